"""Divergence between models with different tokenizers, group by group of equal bytes.

A group is a run of student tokens and a run of teacher tokens that spell the same bytes. Each side
has one merged row per group:

    merged(v) = p(v | before the group) * product of p(actual token) over the tokens after the first

so it says how likely the group's bytes are, spelt one's own way, with the first token exchanged for
v; it sums to less than 1 by design. Over vocabulary entries that spell the same bytes the merged
rows are compared by a generalised Jensen-Shannon divergence (or a KL), over all other entries by
the L1 distance of their sorted values (ULD, arXiv 2402.12030).

The rows are no distributions, so the two KLs are the generalised ones, p log(p/q) - p + q: never
negative, and equal to the plain KL where both rows are normalised and every entry has a partner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from distill.divergence import NEVER, Distribution, Divergence, DivergenceSpec
from distill.errors import AlignmentError, ConfigError, TeacherError
from distill.protocols import Teacher
from distill.types import Rollout, TeacherView

SKIPPED, UNMATCHED = -1, -2
"""In `GroupTarget.first`: a trained token that spells nothing; one that no group covers."""


@runtime_checkable
class GroupTeacher(Protocol):
    """A teacher with another tokenizer, capability `groups`."""

    def groups(self, rollouts: Sequence[Rollout], views: Sequence[TeacherView]) -> GroupTarget:
        """What it says of the trained tokens of these rows, each of which has some."""
        ...


def groups_of(
    teacher: Teacher, rows: Sequence[Rollout], views: Sequence[TeacherView]
) -> GroupTarget:
    """The target of a step. ConfigError for a teacher that knows only token ids."""
    if not isinstance(teacher, GroupTeacher):
        raise ConfigError(
            f"the teacher {teacher.name} compares token ids; an objective over groups of bytes "
            'needs teacher.name = "cross_tokenizer"'
        )
    return teacher.groups([row for row in rows if row.num_trained], views)


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyMatch:
    """Entries of two vocabularies that spell the same bytes, and all others."""

    student_ids: Tensor  # [M] int64
    teacher_ids: Tensor  # [M] int64, the partners
    student_rest: Tensor  # [V_S - M] int64
    teacher_rest: Tensor  # [V_T - M] int64

    @classmethod
    def of(
        cls,
        student: Sequence[bytes | None],
        teacher: Sequence[bytes | None],
        *,
        student_width: int,
        teacher_width: int,
        ends: tuple[int, int] | None = None,
        device: torch.device | None = None,
    ) -> VocabularyMatch:
        """Pair what two lists of tokens spell, by id; None has no partner.

        The widths are those of the output heads: ids beyond the tokenizer are among the rest. Of
        several entries that spell the same, the last one counts (a SentencePiece vocabulary lists
        its lone bytes first). `ends` are the tokens that end a reply, which are partners although
        they spell nothing: how likely the end is, both sides say at every token.
        """
        where = {piece: i for i, piece in enumerate(teacher[:teacher_width]) if piece}
        ours = {piece: i for i, piece in enumerate(student[:student_width]) if piece}
        pairs = sorted((i, where[piece]) for piece, i in ours.items() if piece in where)
        pairs += [ends] if ends else []
        student_ids = torch.tensor([i for i, _ in pairs], dtype=torch.long, device=device)
        teacher_ids = torch.tensor([i for _, i in pairs], dtype=torch.long, device=device)
        return cls(
            student_ids=student_ids,
            teacher_ids=teacher_ids,
            student_rest=_others(student_ids, student_width),
            teacher_rest=_others(teacher_ids, teacher_width),
        )

    @property
    def share(self) -> float:
        """Matched entries over the width of the teacher's vocabulary."""
        return len(self.teacher_ids) / max(1, len(self.teacher_ids) + len(self.teacher_rest))


def _others(ids: Tensor, width: int) -> Tensor:
    kept = torch.ones(width, dtype=torch.bool, device=ids.device)
    kept[ids] = False
    return kept.nonzero()[:, 0]


def merged(log_probs: Tensor, later: Tensor) -> Tensor:
    """Log of merged rows [n, V]: rows of the groups' first tokens, and the summed
    log-probabilities [n] of the actual tokens behind them."""
    return log_probs + later[:, None]


def uld(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """L1 of sorted probabilities, the shorter side filled up with 0: [n, R_S], [n, R_T] -> [n],
    and its derivative by the logarithm of a factor on the student's side [n]."""
    ours = student.sort(dim=-1, descending=True).values
    theirs = teacher.sort(dim=-1, descending=True).values
    width = max(ours.shape[-1], theirs.shape[-1])
    ours = torch.nn.functional.pad(ours, (0, width - ours.shape[-1]))
    theirs = torch.nn.functional.pad(theirs, (0, width - theirs.shape[-1]))
    gap = ours - theirs
    return gap.abs().sum(-1), (gap.detach().sign() * ours.detach()).sum(-1)


def unnormalised(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Divergence of logarithms of positive rows [n, M] that need not sum to 1, never negative:
    [n], and its derivative by the logarithm of a factor on the student's side [n].

    beta 0 = KL(nu||pi), 1 = KL(pi||nu), between = generalised Jensen-Shannon.
    """
    pi, nu = student.exp(), teacher.exp()
    if beta == 0.0:
        value = nu * (teacher - student) - nu + pi
        slope = pi - nu
    elif beta == 1.0:
        value = pi * (student - teacher) - pi + nu
        slope = pi * (student - teacher)
    else:
        mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
        ours = (1.0 - beta) * pi * (student - mixture)
        value = beta * nu * (teacher - mixture) + ours
        slope = ours
    return value.sum(-1), slope.detach().sum(-1)


def hybrid(
    student: Tensor, teacher: Tensor, match: VocabularyMatch, spec: DivergenceSpec
) -> Divergence:
    """The divergence of merged log rows [n, V_S] and [n, V_T].

    `stats` [n, 3]: its part over equal entries, its part over the others, and the derivative of
    the whole by the logarithm of a factor on the student's merged row.
    """
    share = match.share
    on_matched = share if spec.matched_weight is None else spec.matched_weight
    on_rest = 1.0 - share if spec.unmatched_weight is None else spec.unmatched_weight
    student, teacher = student.clamp(min=NEVER), teacher.clamp(min=NEVER).detach()
    near, near_slope = unnormalised(
        student.index_select(-1, match.student_ids),
        teacher.index_select(-1, match.teacher_ids),
        spec.beta,
    )
    far, far_slope = uld(
        student.index_select(-1, match.student_rest).exp(),
        teacher.index_select(-1, match.teacher_rest).exp(),
    )
    slope = on_matched * near_slope + on_rest * far_slope
    stats = torch.stack([near.detach(), far.detach(), slope], dim=-1)
    return Divergence(per_token=on_matched * near + on_rest * far, stats=stats)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTarget:
    """What a teacher with another tokenizer says of a whole step, without gradient.

    N trained tokens of the step, row-major; G groups in the same order. A group lies within one
    reply of one row. As a `Distribution`, row i is the merged row of the group that token i begins.
    """

    teacher: Distribution  # row g is the teacher's row at the first token of group g
    logprobs: Tensor  # [G] float32, the teacher's log-probability of all tokens of each group
    later: Tensor  # [G] float32, that of the tokens behind the first one
    first: Tensor  # [N] int64, number of the first token of a token's group; SKIPPED, UNMATCHED
    group: Tensor  # [N] int64, the group that a token begins; -1 for every other token
    match: VocabularyMatch

    def __post_init__(self) -> None:
        begins = self.group >= 0
        num_groups = len(self.logprobs)
        same = torch.equal(self.first[begins], begins.nonzero()[:, 0])
        if len(self.first) != len(self.group) or int(begins.sum()) != num_groups or not same:
            raise AlignmentError(
                f"{num_groups} groups must each begin at one of {len(self.first)} trained tokens, "
                f"got {int(begins.sum())} beginnings"
            )

    @torch.no_grad()
    def log_probs(self, rows: Tensor) -> Tensor:
        """Merged rows [n, V_T] of the groups that begin at these trained tokens."""
        groups = self.group[rows.to(self.group.device)]
        found = self.teacher.log_probs(groups)
        return merged(found, self.later[groups].to(found.device))

    def behind_first(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of the trained tokens `rows` [n] of a batch: which ones stand behind the first token of
        their group, and where in `rows` that one is. Rows of a batch are whole, so it is there."""
        numbers = rows.to(self.first.device)
        first = self.first[numbers]
        members = ((first >= 0) & (first != numbers)).nonzero()[:, 0]
        places = members - (numbers - first)[members]
        return members.to(rows.device), places.to(rows.device)

    def compare(
        self, log_probs: Tensor, rows: Tensor, later: Tensor, spec: DivergenceSpec
    ) -> Divergence:
        """Divergence at the trained tokens `rows` [n] that begin a group; 0 at all others.

        `log_probs` [n, V_S] are the student's rows, `later` [n] the summed log-probabilities of
        the tokens behind each first one, a number without gradient: the derivative by it is in
        `stats`.
        """
        begins = (self.group[rows.to(self.group.device)] >= 0).nonzero()[:, 0].to(rows.device)
        theirs = self.log_probs(rows[begins]).to(log_probs.device)
        ours = merged(log_probs[begins], later[begins])
        found = hybrid(ours, theirs, self.match, spec)
        size = log_probs.shape[0]
        value = log_probs.new_zeros(size).index_copy(0, begins, found.per_token)
        stats = found.stats.new_zeros(size, 3).index_copy(0, begins, found.stats)
        return Divergence(per_token=value, stats=stats)


def require_groups(target: object) -> GroupTarget:
    """Narrow a target; it is another one only when `needs` was not honoured."""
    if not isinstance(target, GroupTarget):
        raise TeacherError(
            "the objective compares groups of equal bytes, but its teacher compares token ids; "
            'use teacher.name = "cross_tokenizer"'
        )
    return target
