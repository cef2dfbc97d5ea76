"""Divergences between a student's and a teacher's next-token distribution, in nats.

pi is the student, nu the teacher. `beta` is the interpolation of GKD (arXiv 2306.13649):
0 = forward KL(nu||pi), 1 = reverse KL(pi||nu), between: the generalised Jensen-Shannon divergence
beta * KL(nu||M) + (1 - beta) * KL(pi||M) with M = (1 - beta) * pi + beta * nu. It is bounded and
does not tend to a KL at its ends: re-tune the learning rate whenever beta crosses 0 or 1.

A support of k entries keeps what was left out in one of three ways: `tail` adds one bucket with
the rest of each side's mass (a true divergence of the coarser distributions), `renormalised`
rescales both sides, `raw` drops it (never for the reverse KL, which would fall as the student moves
its mass out of the support).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from distill.errors import ConfigError, TeacherError

NEVER = -1e4
"""Log-probability of what cannot happen: finite, so that 0 * log 0 is 0 with a gradient of 0."""
_TAIL_LIMIT = -1e-7
"""Largest log-mass of a support: the tail keeps at least 1e-7, its logarithm stays finite."""


class Distribution(Protocol):
    """A teacher's full distributions, produced chunk by chunk, without gradient.

    Rows are numbered over the trained tokens of the whole optimizer step, row-major. Never
    written to disk; recomputed on resume.
    """

    def log_probs(self, rows: Tensor) -> Tensor: ...  # rows [n] int64 -> [n, V] float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """The few entries of a teacher's distribution that it returned; -inf fills short rows."""

    ids: Tensor  # [n, K] int64
    logprobs: Tensor  # [n, K] float32, each minus the teacher's own full normaliser


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceSpec:
    """Which divergence one pass over the head returns, against which target role.

    `name` is also the name of the term that the divergence feeds and of that term's weights.
    """

    name: str
    kind: Literal["kl", "total_variation", "hybrid"] = "kl"
    """`hybrid` is for a teacher with another tokenizer, see `distill.groups`."""
    beta: float = 1.0
    target: str = "teacher"
    temperature: float = 1.0
    support: Literal["full", "top_k"] = "full"
    chosen_by: Literal["student", "teacher", "union"] = "teacher"
    k: int = 0
    rest: Literal["tail", "renormalised", "raw"] = "tail"
    entry_clip: float = 0.0
    """Upper bound on the contribution of one vocabulary entry, before the sum; 0 = none."""
    clip_form: Literal["paper", "bregman"] = "paper"
    """`paper` clips nu * log(nu/pi) as it stands: the sum can fall below 0 and its gradient can
    point away from the teacher. `bregman` clips nu * log(nu/pi) - nu + pi, which is never negative
    and has the same sum without a clip."""
    matched_weight: float | None = None
    """hybrid: weight of the entries that spell the same bytes on both sides; None is their share of
    the teacher's vocabulary."""
    unmatched_weight: float | None = None
    """hybrid: weight of all other entries; None is 1 minus that share."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta <= 1.0:
            raise ConfigError(f"beta must be within [0, 1], got {self.beta}")
        if not self.temperature > 0.0:
            raise ConfigError(f"temperature must be positive, got {self.temperature}")
        if self.entry_clip < 0.0:
            raise ConfigError(f"entry_clip must not be negative, got {self.entry_clip}")
        if self.support == "full":
            return
        if self.k < 1:
            raise ConfigError(f"a top_k support needs k >= 1, got {self.k}")
        if self.rest == "raw" and self.kind == "kl" and self.beta == 1.0:
            raise ConfigError(
                "the reverse KL over a raw top-k support falls as the student moves mass out of "
                'the support; use rest = "tail" or "renormalised"'
            )
        if self.rest == "renormalised" and self.k == 1 and self.chosen_by != "union":
            raise ConfigError(
                "a renormalised support of one entry has divergence 0 whatever the student does; "
                'use k >= 2 or rest = "tail"'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """A divergence per position, with what tells whether it can be trusted."""

    per_token: Tensor  # [...], with gradient
    stats: Tensor  # [..., 3] without: mass of student, of teacher on the support, clipped share

    @property
    def student_mass(self) -> Tensor:
        return self.stats[..., 0]

    @property
    def teacher_mass(self) -> Tensor:
        return self.stats[..., 1]

    @property
    def clipped_share(self) -> Tensor:
        """Share of the entries of the support that the entry clip holds."""
        return self.stats[..., 2]


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(nu||pi) per position: log-probabilities [..., V] -> [...]."""
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(pi||nu) per position: log-probabilities [..., V] -> [...]."""
    return (student.exp() * (student - teacher)).sum(-1)


def generalised_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """beta KL(nu||M) + (1-beta) KL(pi||M), 0 < beta < 1, per position."""
    return _jsd_entries(student, teacher, beta).sum(-1)


def divergence(student: Tensor, teacher: Tensor | Candidates, spec: DivergenceSpec) -> Divergence:
    """The divergence named by `spec`: student log-probabilities [n, V] against the teacher's.

    The teacher is given in full [n, W] or as candidates. Vocabulary widths that differ by padding
    are cut to the shared ids and renormalised. Raises ConfigError for k > V, TeacherError when
    candidates are too few for the support.
    """
    if isinstance(teacher, Candidates):
        ours, theirs = _on_candidates(student, teacher, spec)
        on_support = True
    else:
        width = min(student.shape[-1], teacher.shape[-1])
        ours = _rescale(student, width, spec.temperature)
        theirs = _rescale(teacher, width, spec.temperature).detach()
        on_support = spec.support == "top_k"
        if on_support:
            ours, theirs = _on_support(ours, theirs, spec)
    found = _summed(ours, theirs, spec, on_support)
    # An entry clip hides an infinite entry from the sum, but not from the gradient.
    hidden = spec.entry_clip > 0.0 and bool(theirs.isneginf().any())
    if hidden or not bool(torch.isfinite(found.per_token).all()):
        # A model that rules entries out (-inf) makes 0 * inf; only then pay for the clamp.
        found = _summed(ours.clamp(min=NEVER), theirs.clamp(min=NEVER), spec, on_support)
    return found


def _summed(ours: Tensor, theirs: Tensor, spec: DivergenceSpec, on_support: bool) -> Divergence:
    stats = torch.ones(*ours.shape[:-1], 3, dtype=torch.float32, device=ours.device)
    stats[..., 2] = 0.0
    if on_support:
        with torch.no_grad():
            stats[..., 0] = ours.exp().sum(-1)
            stats[..., 1] = theirs.exp().sum(-1)
        ours, theirs = _with_rest(ours, spec), _with_rest(theirs, spec)
    entries = _entries(ours, theirs, spec)
    if spec.entry_clip > 0.0:
        stats[..., 2] = (entries.detach() > spec.entry_clip).float().mean(-1)
        entries = entries.clamp(max=spec.entry_clip)
    return Divergence(per_token=entries.sum(-1), stats=stats)


def _entries(student: Tensor, teacher: Tensor, spec: DivergenceSpec) -> Tensor:
    """Contributions of single vocabulary entries; their sum is the divergence."""
    if spec.kind == "total_variation":
        return 0.5 * (student.exp() - teacher.exp()).abs()
    if 0.0 < spec.beta < 1.0:
        return _jsd_entries(student, teacher, spec.beta)  # never negative, in either form
    p, q = (teacher, student) if spec.beta == 0.0 else (student, teacher)
    entries = p.exp() * (p - q)
    bregman = spec.entry_clip > 0.0 and spec.clip_form == "bregman"
    return entries - p.exp() + q.exp() if bregman else entries


def _jsd_entries(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    theirs = beta * teacher.exp() * (teacher - mixture)
    return theirs + (1.0 - beta) * student.exp() * (student - mixture)


def _on_support(ours: Tensor, theirs: Tensor, spec: DivergenceSpec) -> tuple[Tensor, Tensor]:
    """Both sides at the chosen ids [n, k] (or [n, 2k] for a union, repeats ruled out)."""
    width = ours.shape[-1]
    if spec.k > width:
        raise ConfigError(f"k must not exceed the vocabulary of {width} entries, got {spec.k}")
    chosen = []
    if spec.chosen_by in ("student", "union"):
        chosen.append(ours.detach().topk(spec.k, dim=-1).indices)
    if spec.chosen_by in ("teacher", "union"):
        chosen.append(theirs.topk(spec.k, dim=-1).indices)
    ids = torch.cat(chosen, dim=-1)
    ours, theirs = ours.gather(-1, ids), theirs.gather(-1, ids)
    if spec.chosen_by == "union":
        repeated = torch.zeros_like(ids, dtype=torch.bool)
        repeated[..., spec.k :] = (chosen[1][..., :, None] == chosen[0][..., None, :]).any(-1)
        ours = ours.masked_fill(repeated, NEVER)
        theirs = theirs.masked_fill(repeated, NEVER)
    return ours, theirs


def _on_candidates(
    student: Tensor, teacher: Candidates, spec: DivergenceSpec
) -> tuple[Tensor, Tensor]:
    if spec.support == "full" or spec.chosen_by != "teacher":
        raise TeacherError(
            "a teacher that returns only its own candidates serves a top_k support that the "
            'teacher chooses; set support = "top_k" and chosen_by = "teacher"'
        )
    if spec.temperature != 1.0:
        raise TeacherError("candidates have a fixed temperature; set objective.temperature = 1")
    if teacher.ids.shape[-1] < spec.k:
        raise TeacherError(
            f"the teacher returned {teacher.ids.shape[-1]} candidates per token, k is {spec.k}"
        )
    ids, theirs = teacher.ids[..., : spec.k], teacher.logprobs[..., : spec.k].detach()
    absent = theirs.isneginf() | (ids >= student.shape[-1])
    ours = student.gather(-1, ids.masked_fill(absent, 0)).masked_fill(absent, NEVER)
    return ours, theirs.masked_fill(absent, NEVER)


def _with_rest(logprobs: Tensor, spec: DivergenceSpec) -> Tensor:
    if spec.rest == "raw":
        return logprobs
    total = torch.logsumexp(logprobs, dim=-1, keepdim=True)
    if spec.rest == "renormalised":
        return logprobs - total
    tail = torch.log(-torch.expm1(total.clamp(max=_TAIL_LIMIT)))
    return torch.cat([logprobs, tail], dim=-1)


def _rescale(log_probs: Tensor, width: int, temperature: float) -> Tensor:
    if width == log_probs.shape[-1] and temperature == 1.0:
        return log_probs
    return torch.log_softmax(log_probs[..., :width] / temperature, dim=-1)


def k1(student: Tensor, teacher: Tensor) -> Tensor:
    """S - N at sampled tokens: unbiased for reverse KL; as a direct loss its expected gradient
    is zero, so it is only ever an advantage."""
    return student - teacher


def k2(student: Tensor, teacher: Tensor) -> Tensor:
    """(S - N)^2 / 2: biased in value, its expected gradient is that of the reverse KL."""
    return 0.5 * (student - teacher).square()


def k3(student: Tensor, teacher: Tensor) -> Tensor:
    """exp(N - S) - (N - S) - 1: unbiased for reverse KL and never negative; its expected gradient
    is that of the FORWARD KL, so it is a monitor, or the reference penalty of GRPO."""
    gap = teacher - student
    return gap.exp() - gap - 1.0
