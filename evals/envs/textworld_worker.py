"""The child process that plays TextWorld games: JSON lines in, JSON lines out.

Run as `python -m evals.envs.textworld_worker FOLDER`. It is the only module that imports
textworld, whose dependency jericho is under the GPL: the two programs only exchange text. Made
games lie in FOLDER, which is removed when the input ends. One answer per request, in order:

    {"id": 1, "op": "make", "kind": "coin_collector", "level": 5, "seed": 7}
    {"id": 2, "op": "reset", "slot": 1, "kind": ..., "level": ..., "seed": ...}
    {"id": 3, "op": "step", "slot": 1, "command": "go north"}
    {"id": 4, "op": "close", "slots": [1]}

An answer is `{"id": 1, "ok": ...}` or `{"id": 1, "error": "what went wrong"}`; the first line, id
0, says that the worker is ready. Answers go to the file descriptor that was standard output at
the start; whatever a library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

CHALLENGE = {
    "coin_collector": "tw-coin_collector",
    "treasure_hunter": "tw-treasure_hunter",
    "cooking": "tw-cooking",
}

COOKING: Mapping[int, Mapping[str, Any]] = {
    1: {"recipe": 1, "take": 1, "go": 1, "open": False, "cook": False, "cut": False},
    2: {"recipe": 1, "take": 1, "go": 1, "open": False, "cook": True, "cut": False},
    3: {"recipe": 1, "take": 1, "go": 1, "open": False, "cook": True, "cut": True},
    4: {"recipe": 2, "take": 2, "go": 6, "open": True, "cook": True, "cut": True},
    5: {"recipe": 3, "take": 3, "go": 9, "open": True, "cook": True, "cut": True},
}
"""Level -> ingredients of the recipe, how many must be fetched, rooms, and what it asks for."""

NO_EFFECT = ("look", "inventory", "examine")
"""First words of commands that change nothing; the observation already says what they show."""

STATES = ("closed", "locked", "open", "burned", "fried", "roasted", "grilled")
CUTS = ("chopped", "sliced", "diced")

Facts = list[tuple[str, list[str]]]


class Games:
    """The games of one worker: files by (kind, level, seed), and those in progress by slot."""

    def __init__(self, folder: Path) -> None:
        import textworld
        from textworld.challenges import CHALLENGES

        self._textworld = textworld
        self._challenges = CHALLENGES
        self._folder = folder
        self._playing: dict[int, Any] = {}
        self._infos = textworld.EnvInfos(
            admissible_commands=True,
            facts=True,
            policy_commands=True,
            won=True,
            lost=True,
            objective=True,
        )

    def answer(self, request: Mapping[str, Any]) -> Any:
        """What `request["op"]` asks for; ValueError for an unknown one."""
        match request["op"]:
            case "make":
                return self._make(request)
            case "reset":
                self._playing[request["slot"]], state = self._open(request)
                return view(state)
            case "step":
                if request["slot"] not in self._playing:
                    raise ValueError(f"no game is open in slot {request['slot']}")
                state, _, _ = self._playing[request["slot"]].step(request["command"])
                return view(state)
            case "close":
                for slot in request["slots"]:
                    self._playing.pop(slot, None)
                return len(self._playing)
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")

    def _make(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The first view of a game, its goal, its winning walk and the route in words."""
        _, state = self._open(request)
        walk = list(state.policy_commands or ())
        if not walk:
            raise ValueError("the game came without a winning walk")
        return {
            "view": view(state),
            "goal": goal(request["kind"], walk, facts_of(state)),
            "walk": walk,
            "route": " ".join(str(state.objective).split()),
        }

    def _open(self, request: Mapping[str, Any]) -> tuple[Any, Any]:
        env = self._textworld.start(str(self._path(request)), self._infos)
        return env, env.reset()

    def _path(self, request: Mapping[str, Any]) -> Path:
        """The file of a game, made when it is first asked for."""
        kind, level, seed = request["kind"], int(request["level"]), int(request["seed"])
        path = self._folder / f"{kind}-{level}-{seed}.json"
        if not path.exists():
            options = self._textworld.GameOptions()
            options.seeds = seed
            settings: dict[str, Any] = {"level": level}
            if kind == "cooking":
                settings = {**COOKING[level], "drop": False, "recipe_seed": seed, "split": None}
            game = self._challenges[CHALLENGE[kind]][1](settings, options)
            game.save(str(path))
        return path


def facts_of(state: Any) -> Facts:
    return [(str(fact.name), [str(a.name) for a in fact.arguments]) for fact in state.facts]


def view(state: Any) -> dict[str, Any]:
    """What a player sees and may do, from the facts: this kind of game comes without prose."""
    facts = facts_of(state)
    room = next((a[1] for name, a in facts if name == "at" and a[0] == "P"), "?")
    commands = list(state.admissible_commands)
    useful = [c for c in commands if c.split()[0] not in NO_EFFECT]
    doors = [a[1] for name, a in facts if name == "link" and a[0] == room]
    there = [a[0] for name, a in facts if name == "at" and a[1] == room and a[0] != "P"]
    carried = [a[0] for name, a in facts if name == "in" and a[1] == "I"]
    return {
        "room": room,
        "see": sorted(described(thing, facts) for thing in [*there, *doors]),
        "exits": [c.removeprefix("go ") for c in commands if c.startswith("go ")],
        "carry": sorted(described(thing, facts) for thing in carried),
        "commands": useful or commands,
        "won": bool(state.won),
        "lost": bool(state.lost),
        "left": len(state.policy_commands or ()),
    }


def described(thing: str, facts: Facts) -> str:
    """A thing with its state and, unless it is shut, with what is on or in it."""
    states = [name for name, a in facts if a == [thing] and name in (*STATES, *CUTS)]
    notes = [state for state in states if state != "open"]
    if not {"closed", "locked"} & set(states):
        held = [a[0] for name, a in facts if name in ("on", "in") and a[1:] == [thing]]
        notes += sorted(described(item, facts) for item in held)
    return f"{thing} ({', '.join(notes)})" if notes else thing


def goal(kind: str, walk: list[str], facts: Facts) -> str:
    """What has to be done, without the way there."""
    if kind == "coin_collector":
        return "find the coin and take it"
    if kind == "treasure_hunter":
        return f"find and {re.sub(' (from|on|in) .*', '', walk[-1])}; take nothing else"
    wanted = []
    for food, slot in sorted(a for name, a in facts if name == "base"):
        how = [name for name, a in facts if a == [slot] and name in (*STATES, *CUTS)]
        wanted.append(f"{food} ({', '.join(how)})" if how else food)
    return f"cook {' and '.join(wanted)}; then prepare meal and eat meal"


def serve(requests: TextIO, answers: TextIO, folder: Path) -> None:
    """Answer one request per line until the input ends. An error is an answer, not the end."""

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        games = Games(folder)
    except ImportError as error:
        say(id=0, error=str(error), missing=error.name or "textworld")
        return
    say(id=0, ok="ready")
    for line in requests:
        number = None
        try:
            request = json.loads(line)
            number = request["id"]
            say(id=number, ok=games.answer(request))
        except Exception as error:
            say(id=number, error=f"{type(error).__name__}: {error}"[:500])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what C code prints
    sys.stdout = sys.stderr  # what Python prints
    folder = Path(sys.argv[1])
    try:
        serve(sys.stdin, answers, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
