"""What a stage is made of, and the one link between a step and the disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from distill.ahead import Ahead
from distill.correction import Correction
from distill.curriculum.samplers import TaskSampler
from distill.objectives.base import Objective
from distill.policy import Policy
from distill.protocols import RolloutEngine, Teacher, View
from distill.trainer import Trainer
from distill.types import Audit, CheckpointRef, Note, Rollout, Scores, Task, TeacherView

R = TypeVar("R")
Leaks = Callable[[Sequence[Rollout], Sequence[TeacherView | None]], Mapping[str, float]]


class Once(Protocol):
    """The only link to disk: returns the stored artefact if there is one, else makes it."""

    def __call__(self, name: str, kind: type[R], make: Callable[[], list[R]]) -> list[R]: ...


def just_run(name: str, kind: type[R], make: Callable[[], list[R]]) -> list[R]:
    """Nothing is stored: every artefact is made anew."""
    return make()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a stage is made of. `rows` turns the tasks of a step into rows: the student acts on
    them, or their worked solutions speak."""

    tasks: Callable[[int], list[Task]]
    rows: Callable[[Sequence[Task], int], list[Rollout]]
    policy: Policy
    objective: Objective
    trainer: Trainer
    sampler: TaskSampler | None = None
    """Told of the rewards of every step; its state is part of every checkpoint."""
    rounds: int = 0
    """Most extra draws of tasks per step, in place of groups that teach nothing."""
    engine: RolloutEngine | None = None
    ahead: Ahead | None = None
    """Samples the next step while this one trains."""
    publish: Callable[[int], CheckpointRef] | None = None
    publish_every: int = 1
    teacher: Teacher | None = None
    view: View | None = None
    step_view: View | None = None
    """Shows the skill of a turn where an objective reads it beside that of the episode."""
    contexts: Mapping[str, str] = field(default_factory=dict)
    hindsight: Callable[[Sequence[Rollout], int], list[Note]] | None = None
    """Writes what the finished trajectories of a step teach, for the views to show."""
    told: Callable[[int], Mapping[str, float]] | None = None
    """Further numbers of a step, once its rows are there."""
    closing: Callable[[int], None] | None = None
    """Called once with the last step, while the student can still act."""
    leaks: Leaks | None = None
    """Measures what of a privileged view the student repeats."""
    reference: Teacher | None = None
    audit: Callable[[Sequence[Rollout], Sequence[Scores]], list[Audit]] | None = None
    """Lets a text-only teacher judge the rows with trained tokens (OmniOPD)."""
    correction: Correction = field(default_factory=Correction)
    num_groups: int = 0
    """Groups with different rewards that a step trains on, where its objective refills; else 0."""
    stage: str = "train"
    num_steps: int = 1
    seed: int = 0
    pad_id: int = 0
    max_error_share: float = 0.2
