"""One on-policy step, start to end: the page to read first.

    tasks -> rollouts -> teacher scores -> batch -> update -> new weights for the engine

Choosing teacher, view and objective chooses the method: `opd` or `gkd` with a bigger frozen model
is on-policy distillation; with `self_teacher` and a view that holds the answer it is
self-distillation; `grpo` without a teacher is plain reinforcement learning; `sft` with worked
solutions as the source is supervised fine-tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from distill.batch import collate, token_scores
from distill.divergence import Distribution
from distill.objectives.base import Objective
from distill.policy import Policy
from distill.protocols import RolloutEngine, Teacher, View
from distill.rollout import require_few_errors, summarise
from distill.trainer import Trainer
from distill.types import (
    CheckpointRef,
    Rollout,
    ScoreRequest,
    Scores,
    StepInfo,
    Task,
    TeacherView,
    UpdateReport,
)

R = TypeVar("R")


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
    engine: RolloutEngine | None = None
    publish: Callable[[int], CheckpointRef] | None = None
    publish_every: int = 1
    teacher: Teacher | None = None
    view: View | None = None
    contexts: Mapping[str, str] = field(default_factory=dict)
    stage: str = "train"
    num_steps: int = 1
    seed: int = 0
    pad_id: int = 0
    max_error_share: float = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    update: UpdateReport
    sampled: Mapping[str, float]
    """What the rows looked like: rewards, lengths, shares of cut and failed ones."""
    num_dropped: int
    """Rows left out of the update: failed episodes and views that did not fit."""


def on_policy_step(parts: Parts, step: int, once: Once = just_run) -> StepReport:
    """Step 1, 2, ...: act, ask the teacher, update once, hand the new weights to the engine."""
    info = StepInfo(stage=parts.stage, step=step, num_steps=parts.num_steps, seed=parts.seed)
    tasks = parts.tasks(step)
    sampled = once("rollouts", Rollout, lambda: parts.rows(tasks, step))
    require_few_errors(sampled, parts.max_error_share)
    rows, views = _views(parts, sampled)
    targets = _ask_teacher(parts, views, once)
    batch = collate(rows, targets, pad_id=parts.pad_id)
    if parts.trainer.options.num_updates > 1:
        scores = once("behaviour", Scores, lambda: parts.policy.score(_own_views(rows)))
        kept = token_scores(scores, batch.completion_mask, "behaviour")
        batch = replace(batch, behaviour_logprobs=kept.logprobs)
    update = parts.trainer.update(batch, parts.objective, info)
    if parts.engine is not None and parts.publish is not None and step % parts.publish_every == 0:
        parts.engine.load(parts.publish(step))
    trained = sum(1 for r in rows if r.num_trained)
    return StepReport(update=update, sampled=summarise(sampled), num_dropped=len(sampled) - trained)


def _views(parts: Parts, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], list[TeacherView]]:
    """Rows with the views that the teacher reads; a row without a view loses its mask."""
    if parts.teacher is None or parts.view is None:
        return list(rollouts), []
    built = parts.view.build(rollouts, parts.contexts)
    rows, views = [], []
    for rollout, view in zip(rollouts, built, strict=True):
        if view is None:
            empty = (False,) * len(rollout.token_ids)
            rows.append(replace(rollout, completion_mask=empty))
        else:
            _require_same_ids(rollout, view)
            rows.append(rollout)
            views.append(view)
    return rows, views


def _require_same_ids(rollout: Rollout, view: TeacherView) -> None:
    ours = [t for t, m in zip(rollout.token_ids, rollout.completion_mask, strict=True) if m]
    theirs = [view.token_ids[p] for p in view.positions]
    assert ours == theirs, f"view {view.id} does not hold the response of {rollout.traj_id}"


def _ask_teacher(
    parts: Parts, views: Sequence[TeacherView], once: Once
) -> dict[str, Sequence[Scores] | Distribution]:
    teacher = parts.teacher
    if teacher is None:
        return {}
    if "teacher.distribution" in parts.objective.needs:
        # Full distributions are recomputed on resume, never stored.
        return {"teacher": teacher.distribution(views)}
    if "teacher.logprobs" in parts.objective.needs:
        return {"teacher": once("teacher", Scores, lambda: teacher.score(views, ScoreRequest()))}
    return {}


def _own_views(rows: Sequence[Rollout]) -> list[TeacherView]:
    """What the student itself read, for its own log-probabilities before the first update."""
    return [
        TeacherView(
            token_ids=r.token_ids,
            positions=tuple(i for i, m in enumerate(r.completion_mask) if m),
            kind="own",
            id=r.traj_id,
        )
        for r in rows
    ]
