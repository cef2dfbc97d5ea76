"""TextWorld games: walk through rooms, find things, cook, by typing one command per turn.

    [data]
    name = "textworld"
    games = ["coin_collector:5", "treasure_hunter:4"]   # kind:level
    max_steps = 10

A game is made from its kind, level and number (its seed) and nothing else is kept of it. The
number stands in the prompt, so that no two games share one, and decides the split. Games live in
a child process (see `textworld_worker`) that all environments of a program share; textworld is
never imported here.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import ClassVar, NamedTuple

from distill.errors import ConfigError, DataError, MissingExtra
from distill.types import SPLITS, Message, Split, Task, task_id
from evals.envs.base import LazyTasks, split_of
from evals.envs.textworld_episode import GameEpisode, shown
from evals.envs.textworld_process import FEATURE, GameProcess, Lease

LEVELS = {"coin_collector": 300, "treasure_hunter": 30, "cooking": 5}
"""Kind -> highest level. Coin: a walk of (level - 1) % 100 + 1 rooms, from 101 with a dead end
beside each, from 201 with two. Treasure: from 11 on with doors, from 21 on with locks. Cooking:
more ingredients, rooms and kitchen work."""

SYSTEM = (
    "This is a text game. Each message says where you are, what is there and what you can do. "
    "Reply with one command and nothing else, such as: go north. You have {steps} steps."
)

RANGE = 1_000_000
"""Numbers of the games of one `seed`."""


class Game(NamedTuple):
    """What a game is made from."""

    kind: str
    level: int
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.level}:{self.seed}"


@dataclass(frozen=True, kw_only=True)
class TextWorldEnv:
    """Options of the games. A step is one reply, possible or not."""

    name: ClassVar[str] = "textworld"

    games: tuple[str, ...] = ("coin_collector:5",)
    """Each `kind:level`, in the order in which tasks alternate. Kinds: coin_collector (level 1 to
    300), treasure_hunter (1 to 30), cooking (1 to 5)."""
    train_size: int = 256
    """Different games per entry of `games` in the split train."""
    gate_size: int = 32
    """Different games per entry of `games` in each of the splits evolve, gate and test."""
    max_steps: int = 10
    route: bool = False
    """Whether the goal spells out the way."""
    mark_exits: bool = False
    """Whether each exit says if it was used before: `east (old), south (new)`."""
    list_commands: bool = True
    """Whether each message lists the possible commands."""
    step_rewards: bool = False
    """Whether each turn earns what it shortened the way by. The sum of an episode stays 1 or 0:
    what came in on the way is taken back by a last turn that does not win."""
    seed: int = 0
    """Which games are made: numbers from `seed` million on."""
    timeout: float = 60.0
    """Seconds that the worker may take for one answer. The largest games take 20 s to make."""

    def __post_init__(self) -> None:
        for entry in self.games:
            _parsed(entry)
        if not self.games or len(set(self.games)) != len(self.games):
            raise ConfigError(
                f"data.games must name each game once, such as 'coin_collector:5'; "
                f"found {list(self.games)}"
            )
        for key, most in (
            ("train_size", RANGE // 2),
            ("gate_size", RANGE // 40),
            ("max_steps", 999),
        ):
            if not 1 <= getattr(self, key) <= most:
                raise ConfigError(
                    f"data.{key} must be from 1 to {most}, found {getattr(self, key)}"
                )
        if self.seed < 0 or self.timeout <= 0:
            raise ConfigError(
                f"data.seed must not be negative and data.timeout must be positive, "
                f"found {self.seed} and {self.timeout}"
            )
        if importlib.util.find_spec("textworld") is None:
            raise MissingExtra.of("textworld", extra="textworld", feature=FEATURE)

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(entry.replace(":", "_") for entry in self.games)

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, entries of `games` taking turns; a game is made when it is read."""
        if split not in SPLITS:
            raise DataError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
        size = self.train_size if split == "train" else self.gate_size
        return LazyTasks(size * len(self.games), lambda index: self._task(split, index))

    def start(self, task: Task) -> GameEpisode:
        """A fresh game. DataError for a foreign task, EngineError when no worker can be started or
        the game not be made, GameLost when the worker fails at this game."""
        if task.env != self.name:
            raise DataError(f"task {task.id} belongs to {task.env!r}, expected {self.name!r}")
        game = Game(task.meta["kind"], task.meta["level"], task.meta["seed"])
        return GameEpisode(
            task,
            self._process,
            game._asdict(),
            walk_length=len(self._process.make(game._asdict())["walk"]),
            options=self,
        )

    def close(self) -> None:
        """End the worker unless other environments use it; it also ends with the program."""
        lease: Lease | None = self.__dict__.pop("_lease", None)
        if lease is not None:
            lease.close()

    @cached_property
    def _lease(self) -> Lease:
        return Lease(self.timeout)

    @property
    def _process(self) -> GameProcess:
        return self._lease.process

    @cached_property
    def _pools(self) -> dict[tuple[str, Split], _Pool]:
        return {}

    def _task(self, split: Split, index: int) -> Task:
        position, turn = divmod(index, len(self.games))
        entry = self.games[turn]
        pool = self._pools.setdefault((entry, split), _Pool(self, entry, split))
        game = pool.game(position)
        made = self._process.make(game._asdict())
        opening = f"Game {game.seed}. Goal: {made['route'] if self.route else made['goal']}"
        prompt = (
            Message(role="system", content=SYSTEM.format(steps=self.max_steps)),
            Message(role="user", content=f"{opening}\n{shown(made['view'], self)}"),
        )
        domain = self.domains[turn]
        return Task(
            id=task_id(self.name, prompt),
            env=self.name,
            domain=domain,
            split=split,
            prompt=prompt,
            meta={**game._asdict(), "lesson": lesson(game, made["walk"]), "key": domain},
        )


class _Pool:
    """The games of one entry that belong to a split, in the order of their numbers."""

    def __init__(self, env: TextWorldEnv, entry: str, split: Split) -> None:
        kind, level = _parsed(entry)
        numbered = (Game(kind, level, env.seed * RANGE + n) for n in count())
        self._games = (game for game in numbered if owner_of(game.seed) == split)
        self._found: list[Game] = []

    def game(self, position: int) -> Game:
        while len(self._found) <= position:
            self._found.append(next(self._games))
        return self._found[position]


def owner_of(seed: int) -> Split:
    """The split of a game: by its number, which its prompt holds, so that no game has to be made.

    Kind and level do not count: games of one number have rooms in common.
    """
    return split_of(task_id(TextWorldEnv.name, (Message(role="user", content=str(seed)),)))


def lesson(game: Game, walk: Sequence[str]) -> str:
    """What would have helped, read off the winning walk, in words that hold for other games too."""
    moves = sum(command.startswith("go ") for command in walk)
    target = walk[-1].split(" from ")[0]
    if game.kind == "coin_collector":
        rule = (
            f"The coin is {_times(moves, 'room')} away. Do not go back through the door that you "
            "came from while there is another exit; take the coin as soon as you see it."
        )
        if game.level > 100:
            rule += " A room without another exit is a dead end: go back once, then try a new exit."
        return rule
    if game.kind == "treasure_hunter":
        rule = (
            f"What you need is {_times(moves, 'room')} away. Go on to rooms that you have not "
            f"seen, {target} when you see it, and take nothing that looks like it instead."
        )
        if any(command.startswith("unlock ") for command in walk):
            rule += " A locked thing opens with its own key: take the key, unlock, then open."
        elif any(command.startswith("open ") for command in walk):
            rule += " Open what is closed on the way."
        return rule
    verbs = ("fry on the stove", "roast in the oven", "grill on the BBQ")
    return (
        f"The work takes {_times(len(walk), 'command')}, {moves} of them to walk. Take only what "
        f"the goal names, cut with the knife in hand, {', '.join(verbs)}, cook nothing twice, and "
        "prepare and eat the meal in the kitchen."
    )


def _times(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _parsed(entry: str) -> tuple[str, int]:
    """Kind and level of `kind:level`; ConfigError when there is no such game."""
    kind, _, level = entry.partition(":")
    if kind not in LEVELS:
        near = difflib.get_close_matches(kind, list(LEVELS), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"data.games: unknown game {entry!r}; expected kind:level with a kind of "
            f"{', '.join(LEVELS)}{hint}"
        )
    if not (level.isdecimal() and 1 <= int(level) <= LEVELS[kind]):
        raise ConfigError(
            f"data.games: the level of {kind} must be from 1 to {LEVELS[kind]}, "
            f"found {entry!r}; write for example '{kind}:1'"
        )
    return kind, int(level)
