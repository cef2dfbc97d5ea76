"""What every prompt sampler is: a frozen record of options with two pure calls over a JSON state.

    draw(pool, state, step, extra)  which tasks a step trains on; extra 1, 2, ... draws more of them
    observe(pool, state, seen)      what the rewards of that step teach: the next state

Draws depend on (options, pool, state, step) only, so a step that is made again draws the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from distill.errors import DataError
from distill.types import Task

EPOCH_LIMIT = 200_000
"""Up to this many tasks every one is seen once per epoch; beyond, draws are independent."""

State = Mapping[str, Any]


def generator(key: str) -> np.random.Generator:
    """A source of random numbers that depends on the key alone."""
    digest = hashlib.sha256(key.encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def keyed_uniform(key: str) -> float:
    """A draw from [0, 1) that depends on the key alone."""
    return float(generator(key).random())


class Pool:
    """The tasks of a stage, how many a step takes, and the prefix of every random key.

    It remembers the last order that it made: orders are pure, but a long one is not free.
    """

    def __init__(self, tasks: Sequence[Task], *, batch: int, key: str) -> None:
        if not len(tasks):
            raise DataError("there are no tasks to train on; the split 'train' is empty")
        self.tasks = tasks
        self.size = len(tasks)
        self.batch = batch
        self.key = key
        # A list that is read from disk may know its stages without reading a task.
        stages = getattr(tasks, "stages", None)
        self._stages: np.ndarray | None = None if stages is None else np.asarray(stages, np.int64)
        self._order: tuple[str, np.ndarray] | None = None
        self._runs: tuple[np.ndarray, np.ndarray] | None = None

    def shuffled(self, epoch: int, offset: int) -> int:
        """Position of the task at an offset of a shuffled epoch 0, 1, ..."""
        name = f"{self.key}/epoch{epoch}"
        if self._order is None or self._order[0] != name:
            self._order = (name, generator(name).permutation(self.size))
        return int(self._order[1][offset])

    def staged(self, number: int, offset: int) -> int:
        """Position of the task at an offset of pass 0, 1, ...: the first is the list as it is, the
        later ones shuffle inside every run of neighbours with the same `meta["stage"]`."""
        if number == 0:
            return offset
        name = f"{self.key}/pass{number}"
        if self._order is None or self._order[0] != name:
            run, is_staged = self._runs_of_stages()
            noise = np.arange(self.size, dtype=np.float64)
            noise[is_staged] = generator(name).random(self.size)[is_staged]
            self._order = (name, np.lexsort((noise, run)))
        return int(self._order[1][offset])

    def stage(self, position: int) -> Any:
        """The curriculum stage of a task; None for one without."""
        if self._stages is not None:
            return int(self._stages[position])
        return self.tasks[position].meta.get("stage")

    def _runs_of_stages(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of the run that each task is in, and whether it has a stage at all: [size]."""
        if self._runs is None and self._stages is not None:
            run = np.cumsum(np.diff(self._stages, prepend=self._stages[0]) != 0)
            self._runs = (run, np.ones(self.size, dtype=bool))
        if self._runs is None:
            run = np.zeros(self.size, dtype=np.int64)
            is_staged = np.zeros(self.size, dtype=bool)
            number, before = 0, self.stage(0)
            for i in range(self.size):
                stage = self.stage(i)
                number += stage != before
                run[i], is_staged[i], before = number, stage is not None, stage
            self._runs = (run, is_staged)
        return self._runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Positions in the task list, and numbers about how they were chosen."""

    positions: tuple[int, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What became of a step: the rewards of the attempts at each task, by its position, and how far
    the update moved the policy (mean KL per token; 0 where nobody measured it)."""

    step: int
    rewards: Mapping[int, Sequence[float]]
    change: float = 0.0

    @property
    def useful_share(self) -> float:
        """Share of the tasks whose attempts earned different rewards."""
        mixed = sum(len(set(values)) > 1 for values in self.rewards.values())
        return mixed / len(self.rewards) if self.rewards else 0.0


class Sampler(Protocol):
    """Chooses prompts. The state begins empty, is plain JSON and part of every checkpoint."""

    @property
    def reads_rewards(self) -> bool:
        """Whether draws depend on the rewards of earlier steps."""
        ...

    @property
    def reads_change(self) -> bool:
        """Whether it wants to know how far an update moved the policy."""
        ...

    @property
    def rounds(self) -> int:
        """Most extra draws of a step in place of groups that teach nothing; 0 is none."""
        ...

    def draw(self, pool: Pool, state: State, step: int, extra: int = 0) -> Draw: ...

    def observe(
        self, pool: Pool, state: State, seen: Seen
    ) -> tuple[State, Mapping[str, float]]: ...


def distinct(
    source: np.random.Generator, size: int, count: int, taken: Sequence[int] = ()
) -> list[int]:
    """`count` positions below `size`, none of them `taken` and none twice while that is possible;
    afterwards they repeat."""
    if not count:
        return []
    if size <= EPOCH_LIMIT:
        free = np.ones(size, dtype=bool)
        free[list(taken)] = False
        order = source.permutation(np.flatnonzero(free))[:count]
        found: list[int] = order.tolist()
    else:
        kept = dict.fromkeys(taken)
        found = []
        while len(found) < count:
            position = int(source.integers(size))
            if position not in kept:
                kept[position] = None
                found.append(position)
    while len(found) < count:
        found.extend(source.permutation(size)[: count - len(found)].tolist())
    return found


def known_positions(seen: Mapping[str, Any]) -> np.ndarray:
    """The positions that are the keys of a table, ascending: never in the order of a JSON file."""
    return np.sort(np.fromiter(map(int, seen), dtype=np.int64, count=len(seen)))
