"""One on-policy step, start to end: the page to read first.

    tasks -> rollouts (-> hindsight) -> teacher scores -> batch -> update -> weights for the engine

Choosing teacher, view and objective chooses the method: `opd` or `gkd` with a bigger frozen model
is on-policy distillation; with `self_teacher` and a view that holds the answer it is
self-distillation; `grpo` without a teacher is plain reinforcement learning; `sft` with worked
solutions as the source is supervised fine-tuning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distill.ahead import ROLLOUTS, Later
from distill.asking import (
    build_views,
    metrics_of,
    own_view,
    score_roles,
    score_student,
    with_audit,
    with_skills,
)
from distill.batch import collate, token_scores
from distill.curriculum.samplers import Drawn
from distill.errors import CheckpointError
from distill.notes import contexts_of
from distill.notes import metrics_of as metrics_of_notes
from distill.objectives.base import asks_teacher
from distill.parts import Once, Parts, just_run
from distill.rows import keep_mixed_groups, require_few_errors, summarise, trajectories
from distill.types import Audit, Note, Rollout, StepInfo, Task, UpdateReport

__all__ = ["Once", "Parts", "StepReport", "just_run", "on_policy_step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    update: UpdateReport
    sampled: Mapping[str, float]
    """What the rows looked like: rewards, lengths, shares of cut and failed ones."""
    num_dropped: int
    """Rows left out of the update: failed episodes and views that did not fit."""


def on_policy_step(
    parts: Parts, step: int, once: Once = just_run, later: Later | None = None
) -> StepReport:
    """Step 1, 2, ...: act, ask the teacher, update once, hand the new weights to the engine.

    `later` keeps what is sampled ahead for the next step; without it that stays in memory.
    """
    info = StepInfo(stage=parts.stage, step=step, num_steps=parts.num_steps, seed=parts.seed)
    tasks = parts.tasks(step)
    _store_draw(parts, step, once)
    sampled = once(ROLLOUTS, Rollout, lambda: _rows(parts, tasks, step))
    if parts.ahead is not None:
        parts.ahead.start(step + 1, later)
    require_few_errors(sampled, parts.max_error_share)
    chosen = keep_mixed_groups(sampled, parts.num_groups) if parts.num_groups else sampled
    contexts, told = parts.contexts, metrics_of_notes([])
    if parts.hindsight is not None and asks_teacher(parts.objective, info):
        analyse = parts.hindsight
        notes = once("notes", Note, lambda: analyse(sampled, step))
        contexts, told = {**contexts, **contexts_of(notes)}, metrics_of_notes(notes)
    seen = build_views(parts, chosen, contexts, info)
    own = score_student(parts, seen.rows, once)
    targets = score_roles(parts, seen, own, once)
    batch = collate(seen.rows, targets, pad_id=parts.pad_id, viewed=seen.viewed)
    batch = with_skills(batch, seen)
    watched = {**summarise(sampled, seen.rows), **told, **seen.metrics, **_ages(sampled, step)}
    if parts.told is not None:
        watched |= parts.told(step)
    if own is not None:
        kept = token_scores(own, batch.completion_mask, "behaviour")
        batch = replace(batch, behaviour_logprobs=kept.logprobs, behaviour_entropy=kept.entropy)
    if parts.audit is not None:
        audit, trained = parts.audit, [i for i, r in enumerate(seen.rows) if r.num_trained]
        rows, scores = [seen.rows[i] for i in trained], [(own or [])[i] for i in trained]
        audits = once("audit", Audit, lambda: audit(rows, scores))
        batch = with_audit(batch, audits)
        watched |= metrics_of(audits)
    few = _watched_rows(parts, sampled)
    before = _logprobs(parts, few)
    update = parts.trainer.update(batch, parts.objective, info, parts.correction)
    if parts.sampler is not None:
        change = mean_change(before, _logprobs(parts, few))
        watched |= {"policy_change": change} if few else {}
        watched |= parts.sampler.observe(step, rewards_of(sampled), change)
    if parts.ahead is not None:
        parts.ahead.finish(later)
    if parts.engine is not None and parts.publish is not None and step % parts.publish_every == 0:
        parts.engine.load(parts.publish(step))
    kept_rows = sum(1 for r in seen.rows if r.num_trained)
    return StepReport(update=update, sampled=watched, num_dropped=len(sampled) - kept_rows)


def _rows(parts: Parts, tasks: Sequence[Task], step: int) -> list[Rollout]:
    ready = parts.ahead.take(step) if parts.ahead is not None else None
    return parts.rows(tasks, step) if ready is None else ready


def _ages(rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    """How many updates older than the learner the writer of a row was; nothing while on policy."""
    ages = [step - 1 - r.policy_version for r in rollouts if r.policy_version >= 0]
    if not any(ages):
        return {}
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}


WATCHED_ROWS = 32
"""Rows by which the change of the policy is measured, where a sampler asks for it."""


def rewards_of(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Task id -> the reward of every attempt of the student; failed ones and worked solutions have
    none."""
    found: dict[str, list[float]] = {}
    for rows in trajectories(rollouts):
        end = rows[-1]
        if end.policy_version >= 0 and end.error is None and end.reward is not None:
            found.setdefault(end.task_id, []).append(end.reward)
    return found


def mean_change(before: Sequence[float], after: Sequence[float]) -> float:
    """Estimate of the mean KL(before || after) per token, from log-probabilities of tokens that the
    policy sampled before: mean of exp(d) - 1 - d with d = after - before. It is never negative."""
    gaps = [new - old for old, new in zip(before, after, strict=True)]
    return math.fsum(math.expm1(d) - d for d in gaps) / len(gaps) if gaps else 0.0


def _store_draw(parts: Parts, step: int, once: Once) -> None:
    """Keep what a step drew where only the rewards of earlier steps could tell it again.

    CheckpointError when a repeated step draws other tasks than its stored rollouts belong to.
    """
    if parts.sampler is None or not parts.sampler.sampler.reads_rewards:
        return
    drawn = parts.sampler.drawn(step, parts.rounds)
    if once("draws", Drawn, lambda: [drawn]) != [drawn]:
        raise CheckpointError(
            f"step {step} of stage {parts.stage} draws other tasks than those of its stored "
            "rollouts: the sampler does not remember what it did; start a new run"
        )


def _watched_rows(parts: Parts, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """A few of the student's own rows, spread over the step; none unless a sampler needs them."""
    if parts.sampler is None or not parts.sampler.sampler.reads_change:
        return []
    own = [r for r in rollouts if r.policy_version >= 0 and r.num_trained]
    return own[:: max(1, len(own) // WATCHED_ROWS)][:WATCHED_ROWS]


def _logprobs(parts: Parts, rows: Sequence[Rollout]) -> list[float]:
    """The student's log-probability of every trained token, row by row."""
    if not rows:
        return []
    scores = parts.policy.score([own_view(r) for r in rows])
    return [value for found in scores for value in found.logprobs]
