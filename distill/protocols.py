"""The seams. Synchronous and batch-first; each has one contract test and a scripted fake.

`Objective` lives with its tensors in `distill.objectives.base`, `Distribution` in
`distill.divergence`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from distill.types import (
    CheckpointRef,
    Completion,
    EvalReport,
    Message,
    Reward,
    Rollout,
    Sampling,
    ScoreRequest,
    Scores,
    Split,
    Task,
    TeacherView,
    Turn,
)

if TYPE_CHECKING:
    from distill.divergence import Distribution

S = TypeVar("S")
U_contra = TypeVar("U_contra", contravariant=True)


class RolloutEngine(Protocol):
    """Samples from the student. After `load` the `policy_version` has moved."""

    policy_version: int

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]: ...  # [P][G]

    def load(self, checkpoint: CheckpointRef) -> None: ...

    def close(self) -> None: ...


class Teacher(Protocol):
    """Scores the student's tokens. `capabilities` is a subset of
    {"logprobs", "candidates", "own_top_k", "distribution", "entropy"}."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[str]: ...

    def score(self, views: Sequence[TeacherView], want: ScoreRequest) -> list[Scores]: ...

    def distribution(self, views: Sequence[TeacherView]) -> Distribution: ...


class View(Protocol):
    """Builds what the teacher reads. Sees the whole step; None drops the row (counted)."""

    def build(
        self, rollouts: Sequence[Rollout], contexts: Mapping[str, str]
    ) -> list[TeacherView | None]: ...


class Episode(Protocol):
    """One attempt at one task. Single use: made, run once, dropped.

    It may have `choices`, the only replies that it takes first; `graded`, False where nobody can
    say how an attempt went, so that `reward` is not asked; and `close()`, which is called at the
    end of every attempt, also of one that failed or was cut.
    """

    def reply(self, text: str) -> Turn: ...

    def reward(self) -> Reward: ...


class Env(Protocol):
    """A source of tasks and episodes. `tasks` may be lazy; equal arguments give equal tasks."""

    name: str

    def tasks(self, split: Split) -> Sequence[Task]: ...

    def start(self, task: Task) -> Episode: ...


class Evaluator(Protocol):
    def __call__(self, engine: RolloutEngine, checkpoint: CheckpointRef) -> EvalReport: ...


class Tracker(Protocol):
    """Receives numbers. `log` must not raise: a tracker never stops a night."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TextModel(Protocol):
    """A model that only speaks text: black-box teachers, analysts, judges."""

    def complete(
        self, prompts: Sequence[Sequence[Message]], n: int, sampling: Sampling
    ) -> list[list[str]]: ...  # [P][n], exactly n each


class SkillBank(Protocol[S, U_contra]):
    """Keeps what was learned in words: skills S, and uses U that say what they were worth.

    A change appears as a whole or not at all. `snapshot` names the present version, under which
    the same skills can be read later.
    """

    def add(self, items: Iterable[S]) -> Sequence[Any]: ...  # one outcome per item, in order

    def search(self, query: str, k: int = 6) -> Sequence[tuple[S, float]]: ...  # best first

    def record(self, uses: Iterable[U_contra]) -> Sequence[Any]: ...  # those that did not count

    def snapshot(self) -> str: ...
