"""What one step asks of the models besides the update: views, and scores of every role.

Nothing is asked for that no objective needs: no pass of the student before the update, no teacher
whose weight a schedule has set to zero, no reference that cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from distill.batch import Batch
from distill.divergence import Distribution
from distill.errors import AlignmentError, ConfigError
from distill.groups import groups_of
from distill.notes import STEP_SKILL
from distill.objectives.base import Objective, asks_teacher, num_candidates
from distill.objectives.omni_opd import CHUNK, VOTES
from distill.parts import Once, Parts
from distill.protocols import Teacher
from distill.types import Audit, Rollout, ScoreRequest, Scores, StepInfo, TeacherView

Targets = dict[str, Sequence[Scores] | Distribution]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The rows of a step and what the teacher reads of them."""

    rows: list[Rollout]
    """As sampled; those that are left out have an empty mask."""
    views: list[TeacherView]
    """One per row with trained tokens, in order; empty when nobody asks the teacher."""
    viewed: list[bool]
    """Per row: the teacher has a view of its own. A kept row without one is read plainly."""
    metrics: Mapping[str, float]
    """How many views were built and why others were not; what of them the student repeats."""
    kinds: list[str] = field(default_factory=list)
    """Per row the kind of its view; empty without one."""
    extra: Mapping[str, list[TeacherView | None]] = field(default_factory=dict)
    """Role -> further views of every row."""


def build_views(
    parts: Parts, rollouts: Sequence[Rollout], contexts: Mapping[str, str], info: StepInfo
) -> Seen:
    """Views of every row. A row without one loses its mask unless the objective keeps it."""
    teacher, view = parts.teacher, parts.view
    if teacher is None or view is None or not asks_teacher(parts.objective, info):
        return Seen(rows=list(rollouts), views=[], viewed=[True] * len(rollouts), metrics={})
    counted = getattr(view, "build_counted", None)
    if counted is None:
        found, metrics = view.build(rollouts, contexts), {}
    else:
        found, metrics = counted(rollouts, contexts)
    if parts.leaks is not None:
        metrics = {**metrics, **parts.leaks(rollouts, found)}
    keeps = bool(getattr(parts.objective, "keeps_unviewed", False))
    rows, views, viewed = [], [], []
    for rollout, built in zip(rollouts, found, strict=True):
        viewed.append(built is not None)
        if built is not None:
            require_same_ids(rollout, built)
            views.append(replace(built, key=built.key or rollout.domain))
        elif keeps and rollout.num_trained:
            views.append(own_view(rollout))
        else:
            rollout = without_mask(rollout)
        rows.append(rollout)
    extra = {}
    if f"{STEP_SKILL}.logprobs" in parts.objective.needs:
        if parts.step_view is None:
            raise ConfigError(f"objective {parts.objective.name!r} needs a view of step skills")
        extra[STEP_SKILL] = parts.step_view.build(rows, contexts)
    return Seen(
        rows=rows,
        views=views,
        viewed=viewed,
        metrics=metrics,
        kinds=["" if built is None else built.kind for built in found],
        extra=extra,
    )


def without_mask(rollout: Rollout) -> Rollout:
    """The row, left out of the update."""
    return replace(rollout, completion_mask=(False,) * len(rollout.token_ids))


def require_same_ids(rollout: Rollout, view: TeacherView) -> None:
    """Raise AlignmentError unless a view holds the row's response, id by id."""
    ours = [t for t, m in zip(rollout.token_ids, rollout.completion_mask, strict=True) if m]
    theirs = [view.token_ids[p] for p in view.positions]
    if ours != theirs:
        raise AlignmentError(
            f"the view {view.kind!r} of {rollout.traj_id} holds {len(theirs)} response tokens that "
            f"are not the {len(ours)} of the rollout; a view must copy the ids, never encode text"
        )


def own_view(rollout: Rollout) -> TeacherView:
    """What the student itself read."""
    return TeacherView(
        token_ids=rollout.token_ids,
        positions=tuple(i for i, m in enumerate(rollout.completion_mask) if m),
        kind="own",
        id=rollout.traj_id,
        key=rollout.domain,
    )


def score_student(parts: Parts, rows: Sequence[Rollout], once: Once) -> list[Scores] | None:
    """The student's own scores before the update; None when nothing needs them."""
    needs = parts.objective.needs
    several = parts.trainer.options.num_updates > 1
    corrected = parts.correction.level != "none"
    if not (several or corrected or any(n.startswith("student.") for n in needs)):
        return None
    want = ScoreRequest(
        entropy="student.entropy" in needs,
        candidates=num_candidates(parts.objective) if "student.candidates" in needs else 0,
    )
    views = [own_view(r) for r in rows]
    return once("behaviour", Scores, lambda: parts.policy.score(views, want=want))


def score_roles(parts: Parts, seen: Seen, own: Sequence[Scores] | None, once: Once) -> Targets:
    """Scores and distributions of teacher and reference, as the objective needs them.

    A distribution of role R is filed as `R.distribution`; it is recomputed on resume, never stored.
    """
    needs, targets = parts.objective.needs, Targets()
    if parts.teacher is not None and seen.views:
        targets |= _score_teacher(parts.teacher, parts.objective, seen, own, once)
        for role, views in seen.extra.items():
            targets[role] = _score_extra(parts.teacher, seen, role, views, once)
    if any(n.startswith("reference.") for n in needs):
        if parts.reference is None:
            raise ConfigError(
                f"objective {parts.objective.name!r} needs a reference; set reference.name"
            )
        reference = parts.reference
        plain = [own_view(r) for r in seen.rows if r.num_trained]
        if "reference.distribution" in needs:
            targets["reference.distribution"] = reference.distribution(plain)
        if "reference.logprobs" in needs:
            targets["reference"] = once(
                "reference",
                Scores,
                lambda: reference.score(plain, ScoreRequest()) if plain else [],
            )
    return targets


def _score_teacher(
    teacher: Teacher,
    objective: Objective,
    seen: Seen,
    own: Sequence[Scores] | None,
    once: Once,
) -> Targets:
    needs, targets = objective.needs, Targets()
    if "teacher.distribution" in needs:
        targets["teacher.distribution"] = teacher.distribution(seen.views)
    if "teacher.groups" in needs:
        targets["teacher.distribution"] = groups_of(teacher, seen.rows, seen.views)
    numbers = {"logprobs", "entropy", "candidates", "own_top_k"}
    if not {f"teacher.{n}" for n in numbers} & needs:
        return targets
    trained = [i for i, row in enumerate(seen.rows) if row.num_trained]
    asked = [seen.viewed[i] for i in trained]
    ids = None
    if "teacher.candidates" in needs:
        known = [s.candidate_ids or () for s in own or () if s.logprobs]
        ids = [row for row, keep in zip(known, asked, strict=True) if keep]
    want = ScoreRequest(
        entropy="teacher.entropy" in needs,
        candidates=num_candidates(objective) if "teacher.own_top_k" in needs else 0,
        candidate_ids=ids,
    )
    views = [view for view, keep in zip(seen.views, asked, strict=True) if keep]
    found = once("teacher", Scores, lambda: teacher.score(views, want) if views else [])
    given = iter(found)
    targets["teacher"] = [
        next(given) if keep else _nothing(view, want)
        for view, keep in zip(seen.views, asked, strict=True)
    ]
    return targets


def _score_extra(
    teacher: Teacher, seen: Seen, role: str, views: Sequence[TeacherView | None], once: Once
) -> list[Scores]:
    trained = [i for i, row in enumerate(seen.rows) if row.num_trained]
    asked = [view for i in trained if (view := views[i]) is not None]
    want = ScoreRequest()
    found = iter(once(role, Scores, lambda: teacher.score(asked, want) if asked else []))
    return [
        _nothing(own_view(seen.rows[i]), want) if views[i] is None else next(found) for i in trained
    ]


def _nothing(view: TeacherView, want: ScoreRequest) -> Scores:
    """Stands in for a row that the teacher had no view of; objectives mask it by `row_viewed`."""
    zeros, none = (0.0,) * len(view.positions), ((),) * len(view.positions)
    listed = bool(want.candidates) or want.candidate_ids is not None
    return Scores(
        logprobs=zeros,
        entropy=zeros,
        candidate_ids=none if listed else None,
        candidate_logprobs=none if listed else None,
        source="none",
        view_id=view.id,
    )


def with_skills(batch: Batch, seen: Seen) -> Batch:
    """Signals [B, T] that say where a view shows the skill of a turn: `skill.step` for the view
    itself, `ROLE.viewed` for further ones. Absent where no row has any."""
    signals = dict(batch.signals)
    if STEP_SKILL in seen.kinds:
        signals["skill.step"] = _marked(batch, [kind == STEP_SKILL for kind in seen.kinds])
    for role, views in seen.extra.items():
        signals[f"{role}.viewed"] = _marked(batch, [view is not None for view in views])
    return replace(batch, signals=signals)


def _marked(batch: Batch, rows: Sequence[bool]) -> Tensor:
    return batch.completion_mask.float() * torch.tensor(rows).float()[:, None]


def with_audit(batch: Batch, audits: Sequence[Audit]) -> Batch:
    """Signals `audit.votes` and `audit.chunk` [B, T] from one audit per row with trained tokens."""
    votes = torch.zeros(batch.input_ids.shape)
    chunk = torch.zeros(batch.input_ids.shape)
    rows = [i for i in range(batch.num_rows) if bool(batch.completion_mask[i].any())]
    if len(rows) != len(audits):
        raise AlignmentError(f"expected {len(rows)} audits, one per trained row, got {len(audits)}")
    for row, audit in zip(rows, audits, strict=True):
        where = batch.completion_mask[row].nonzero()[:, 0]
        for number, (start, value) in enumerate(zip(audit.starts, audit.votes, strict=True), 1):
            span = where[start : start + audit.length]
            votes[row, span] = value
            chunk[row, span] = number
    return replace(batch, signals={**batch.signals, VOTES: votes, CHUNK: chunk})


def metrics_of(audits: Sequence[Audit]) -> Mapping[str, float]:
    """What the audits of a step cost and found."""
    chunks = [v for a in audits for v in a.votes]
    return {
        "audit/chunks": float(len(chunks)),
        "audit/rows_without": float(sum(not a.starts for a in audits)),
        "audit/teacher_tokens": float(sum(a.num_tokens for a in audits)),
    }
