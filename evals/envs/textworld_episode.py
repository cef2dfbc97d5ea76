"""One attempt at a TextWorld game: what the player reads, which replies count, what is earned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from distill.errors import DataError
from distill.types import Message, Reward, Task, Turn
from evals.envs.textworld_process import GameProcess

BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}

View = Mapping[str, Any]
"""What the worker says of a state: see `textworld_worker.view`."""


class Options(Protocol):
    """What an episode reads of the environment's options."""

    @property
    def max_steps(self) -> int: ...

    @property
    def mark_exits(self) -> bool: ...

    @property
    def list_commands(self) -> bool: ...

    @property
    def step_rewards(self) -> bool: ...


def shown(view: View, options: Options, used: frozenset[tuple[str, str]] = frozenset()) -> str:
    """A state in words, about 25 tokens. `used` holds the exits taken so far, as (room, way)."""

    def exit_name(way: str) -> str:
        age = "old" if (view["room"], way) in used else "new"
        return f"{way} ({age})" if options.mark_exits else way

    parts = {
        "Room": [view["room"]],
        "See": view["see"],
        "Exits": [exit_name(way) for way in view["exits"]],
        "Carry": view["carry"],
    }
    empty = {"See": "nothing", "Exits": "none", "Carry": "nothing"}
    text = " ".join(f"{name}: {', '.join(items) or empty[name]}." for name, items in parts.items())
    return f"{text}\n{possible(view)}" if options.list_commands else text


def possible(view: View) -> str:
    return f"Commands: {', '.join(view['commands'])}"


class GameEpisode:
    """One attempt; over when the game is won or lost or after `max_steps` replies.

    `choices` are the commands that the game takes now. Any other reply is told that it is not
    possible here and costs one step. Upper and lower case, spaces around and a closing full stop
    do not matter.
    """

    def __init__(
        self,
        task: Task,
        process: GameProcess,
        game: dict[str, Any],
        *,
        walk_length: int,
        options: Options,
    ) -> None:
        self._task = task
        self._process = process
        self._options = options
        self._walk_length = walk_length
        self._generation, self._slot, self._view = process.open(game, self)
        self._used: frozenset[tuple[str, str]] = frozenset()
        self._steps = 0
        self._invalid = 0
        self._earned = 0.0

    @property
    def choices(self) -> tuple[str, ...]:
        """The commands that the game takes now; empty when it is over."""
        return () if self._over else tuple(self._view["commands"])

    def reply(self, text: str) -> Turn:
        """Play one command. Raises GameLost when the worker is gone."""
        if self._over:
            raise DataError(f"the episode of task {self._task.id} is over; start a new one")
        before = f"{self._task.id}:{shown(self._view, self._options, self._used)}"
        wanted = " ".join(text.split()).rstrip(".").casefold()
        command = next((c for c in self.choices if c.casefold() == wanted), None)
        self._steps += 1
        if command is None:
            self._invalid += 1
        else:
            self._play(command)
        return Turn(
            messages=(Message(role="user", content=self._answer(valid=command is not None)),),
            reward=self._pay(),
            valid=command is not None,
            obs_key=before,
            done=self._over,
            choices=self.choices,
        )

    def reward(self) -> Reward:
        """1.0 for a game that is won, else 0.0, at any moment.

        `parts`: `won`, `lost` (a mistake that ends the game), `steps` (share of `max_steps` that
        was used), `invalid` (share of replies that were not possible) and `progress` (share of the
        shortest way that was done at the end).
        """
        return Reward(
            value=float(self._view["won"]),
            parts={
                "won": float(self._view["won"]),
                "lost": float(self._view["lost"]),
                "steps": self._steps / self._options.max_steps,
                "invalid": self._invalid / max(self._steps, 1),
                "progress": self._progress,
            },
            feedback=self._verdict(),
        )

    @property
    def _over(self) -> bool:
        ended = self._view["won"] or self._view["lost"]
        return bool(ended) or self._steps >= self._options.max_steps

    @property
    def _progress(self) -> float:
        """From 0 at the start to 1 for a game that is won; 0 again for one that is lost."""
        if self._view["won"] or self._view["lost"]:
            return float(self._view["won"])
        return max(0.0, 1.0 - self._view["left"] / self._walk_length)

    def _play(self, command: str) -> None:
        room = self._view["room"]
        self._view = self._process.ask(
            "step", generation=self._generation, slot=self._slot, command=command
        )
        verb, _, way = command.partition(" ")
        if verb == "go" and self._view["room"] != room:
            self._used |= {(room, way), (self._view["room"], BACK[way])}

    def _answer(self, *, valid: bool) -> str:
        if self._over:
            return self._verdict()
        if valid:
            return shown(self._view, self._options, self._used)
        return f"That is not possible here. {possible(self._view)}"

    def _verdict(self) -> str:
        if self._view["won"]:
            return f"You won after {self._steps} steps; {self._walk_length} are enough."
        if self._view["lost"]:
            return "You lost: that was a mistake which ends the game."
        if self._over:
            return f"No steps are left; the goal was {self._view['left']} more away."
        return f"The game is not over after {self._steps} steps."

    def _pay(self) -> float:
        """What this turn earned; all turns add up to the value of the episode."""
        due = float(self._view["won"]) if self._over else 0.0
        if self._options.step_rewards and not self._over:
            due = self._progress
        paid = due - self._earned
        self._earned = due
        return paid
