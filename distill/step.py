"""One on-policy step, start to end: the page to read first.

    tasks -> rollouts (-> hindsight) -> teacher scores -> batch -> update -> weights for the engine

Choosing teacher, view and objective chooses the method: `opd` or `gkd` with a bigger frozen model
is on-policy distillation; with `self_teacher` and a view that holds the answer it is
self-distillation; `grpo` without a teacher is plain reinforcement learning; `sft` with worked
solutions as the source is supervised fine-tuning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distill.asking import (
    build_views,
    metrics_of,
    score_roles,
    score_student,
    with_audit,
    with_skills,
)
from distill.batch import collate, token_scores
from distill.notes import contexts_of
from distill.notes import metrics_of as metrics_of_notes
from distill.objectives.base import asks_teacher
from distill.parts import Once, Parts, just_run
from distill.rows import keep_mixed_groups, require_few_errors, summarise
from distill.types import Audit, Note, Rollout, StepInfo, UpdateReport

__all__ = ["Once", "Parts", "StepReport", "just_run", "on_policy_step"]


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
    watched = {**summarise(sampled, seen.rows), **told, **seen.metrics}
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
    update = parts.trainer.update(batch, parts.objective, info, parts.correction)
    if parts.engine is not None and parts.publish is not None and step % parts.publish_every == 0:
        parts.engine.load(parts.publish(step))
    kept_rows = sum(1 for r in seen.rows if r.num_trained)
    return StepReport(update=update, sampled=watched, num_dropped=len(sampled) - kept_rows)
