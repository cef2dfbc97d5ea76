"""What every environment shares: one-reply episodes, the split of a task, lazy task lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import overload

from distill.errors import DataError
from distill.types import SPLITS, Reward, Split, Task, Turn

Grader = Callable[[str, Task], Reward]
"""Judges the text of a reply, its end token removed."""

_BUCKETS: tuple[Split, ...] = (
    *("train",) * 80,
    *("evolve",) * 5,
    *("gate",) * 10,
    *("test",) * 5,
)


def split_of(task_id: str) -> Split:
    """Name the split that owns a task: equal prompts have equal ids, so splits cannot overlap.

    `task_id` is what `distill.types.task_id` returns (hex digits). Of all ids 80 % are `train`,
    5 % `evolve`, 10 % `gate`, 5 % `test`.
    """
    return _BUCKETS[int(task_id[:8], 16) % 100]


def check_disjoint(splits: Mapping[Split, Iterable[Task]]) -> None:
    """Raise DataError when two splits share a task (the same prompt, compared by id)."""
    owner: dict[str, Split] = {}
    for split in SPLITS:
        for task in splits.get(split, ()):
            first = owner.setdefault(task.id, split)
            if first != split:
                raise DataError(
                    f"splits must not share tasks, but task {task.id} (domain {task.domain!r}, "
                    f"prompt {task.prompt[-1].content[:60]!r}) is in {first!r} and in {split!r}; "
                    f"remove it from one of them"
                )


class SingleTurn:
    """An episode of one reply. `reward` is what the grader said of that reply; without a grader
    nobody says anything, and there is no reward."""

    def __init__(self, task: Task, grade: Grader | None) -> None:
        self.graded = grade is not None
        self._task = task
        self._grade = grade
        self._replied = False
        self._reward: Reward | None = None

    def reply(self, text: str) -> Turn:
        if self._replied:
            raise DataError(
                f"task {self._task.id} takes one reply and got a second; start a new episode"
            )
        self._replied = True
        if self._grade is None:
            return Turn(done=True)
        self._reward = self._grade(text, self._task)
        return Turn(reward=self._reward.value, done=True)

    def reward(self) -> Reward:
        if self._reward is None:
            when = "before its reply" if self.graded else "because it has no grader"
            raise DataError(f"task {self._task.id} has no reward {when}")
        return self._reward


class LazyTasks(Sequence[Task]):
    """A long list whose tasks are made when they are read: `make(i)` for 0 <= i < size."""

    def __init__(self, size: int, make: Callable[[int], Task]) -> None:
        self._size = size
        self._make = make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._size))]
        position = index + self._size if index < 0 else index
        if not 0 <= position < self._size:
            raise IndexError(f"task {index} of {self._size}")
        return self._make(position)
