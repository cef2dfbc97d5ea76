"""Which tasks a step trains on. Draws depend on (key, step) only, so any step can be redone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from distill.errors import DataError
from distill.types import Task

EPOCH_LIMIT = 200_000
"""Up to this many tasks every one is seen once per epoch; beyond, draws are independent."""


class TaskSampler:
    """Chooses `batch` tasks per step: shuffled epochs over a finite list, or draws from a huge one.

    Steps count from 1.
    """

    def __init__(self, tasks: Sequence[Task], *, batch: int, key: str) -> None:
        if not len(tasks):
            raise DataError("there are no tasks to train on; the split 'train' is empty")
        self._tasks = tasks
        self._batch = batch
        self._key = key
        self._epoch: tuple[int, np.ndarray] | None = None

    def __call__(self, step: int) -> list[Task]:
        size = len(self._tasks)
        if size > EPOCH_LIMIT:
            picks = _generator(f"{self._key}/{step}").integers(0, size, self._batch)
            return [self._tasks[int(i)] for i in picks]
        first = (step - 1) * self._batch
        return [self._tasks[self._at(first + j)] for j in range(self._batch)]

    def extra(self, step: int, number: int) -> list[Task]:
        """Another `batch` tasks for a step, drawn independently: refill 1, 2, ..."""
        generator = _generator(f"{self._key}/{step}/extra{number}")
        return [self._tasks[int(i)] for i in generator.integers(0, len(self._tasks), self._batch)]

    def _at(self, position: int) -> int:
        number, offset = divmod(position, len(self._tasks))
        if self._epoch is None or self._epoch[0] != number:
            order = _generator(f"{self._key}/epoch{number}").permutation(len(self._tasks))
            self._epoch = (number, order)
        return int(self._epoch[1][offset])


def keyed_uniform(key: str) -> float:
    """A draw from [0, 1) that depends on the key alone."""
    return float(_generator(key).random())


def _generator(key: str) -> np.random.Generator:
    digest = hashlib.sha256(key.encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
