"""Distillation from a teacher with another tokenizer (GOLD, after ULD, arXiv 2402.12030).

    per group of equal bytes: w D_beta(nu~, pi~) over entries that spell the same bytes
                              + u sum_i |sorted nu~_i - sorted pi~_i| over all others

nu~ and pi~ are merged rows (`distill.groups`): the row at the group's first token times the
probabilities of its later tokens. Both have the student's gradient: that of the first row comes out
of the pass over the head, that of the later tokens is added here through their log-probabilities,
as slope * (a - sg(a)) with a their sum. The value stands at the first token of each group; tokens
that no group covers, special tokens and the end of a reply weigh nothing and are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from distill.batch import Batch
from distill.divergence import DivergenceSpec
from distill.errors import AlignmentError, ConfigError
from distill.groups import SKIPPED, GroupTarget, require_groups
from distill.logprobs import scatter
from distill.objectives.base import (
    Aggregate,
    ForwardPlan,
    Metric,
    PolicyView,
    State,
    Term,
    denominator_of,
    with_weights,
)
from distill.types import StepInfo

PLACE, TEACHER = "gold.place", "gold.teacher"
"""Signals: 1 + the column of the first token of a token's group, 0 for a token in no group, -1 for
one that spells nothing; and the teacher's log-probability of the group at its first token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gold:
    name: ClassVar[str] = "gold"
    needs: ClassVar[frozenset[str]] = frozenset({"teacher.groups"})
    corrects: ClassVar[str | None] = None
    paper: ClassVar[str] = "2402.12030"
    formula: ClassVar[str] = (
        "per group of equal bytes: w D_beta(nu, pi) on equal entries + u L1 of the others, sorted"
    )

    beta: float = 0.5
    """On entries that spell the same: 0 forward KL, 1 reverse KL, between the generalised JSD."""

    matched_weight: float | None = None
    """Weight of those entries; None is their share of the teacher's vocabulary."""

    unmatched_weight: float | None = None
    """Weight of the sorted rest; None is 1 minus that share."""

    on_policy_share: float = 1.0
    """Share of the prompts that the student answers itself; the rest are worked solutions."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over, counting groups: token, sequence, trajectory, ..."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.on_policy_share <= 1.0:
            raise ConfigError(
                f"objective.on_policy_share must be within [0, 1], got {self.on_policy_share}"
            )
        weights = self.matched_weight, self.unmatched_weight
        if any(w is not None and w < 0.0 for w in weights) or weights == (0.0, 0.0):
            raise ConfigError(
                "objective.matched_weight and unmatched_weight must not be negative, and not both "
                f"0, got {self.matched_weight} and {self.unmatched_weight}"
            )
        self._spec()

    def _spec(self) -> DivergenceSpec:
        return DivergenceSpec(
            name=self.name,
            kind="hybrid",
            beta=self.beta,
            matched_weight=self.matched_weight,
            unmatched_weight=self.unmatched_weight,
        )

    def plan(self) -> ForwardPlan:
        return ForwardPlan(entropy=True, divergences=(self._spec(),))

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        if batch.num_tokens:
            target = require_groups(batch.targets.get("teacher.distribution"))
            place, teacher = _placed(target, batch)
        else:
            place = teacher = torch.zeros_like(batch.sampler_logprobs)
        begins = place == _columns(batch)
        counted = with_weights(
            replace(batch, completion_mask=begins), self.name, self.aggregate, rows="all"
        )
        signals = {**batch.signals, PLACE: place, TEACHER: teacher}
        return replace(batch, signals=signals, weights=counted.weights), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        weights, place = batch.weights[self.name], batch.signals[PLACE]
        found = policy.divergences[self.name]
        near, far, slope = found.stats.unbind(-1)
        later = _later(policy.logprobs, place, _columns(batch))
        value = found.per_token + slope * (later - later.detach())
        everything = batch.completion_mask.float()
        whole = (policy.logprobs + later).detach()  # at the first token of a group
        return (
            Term(
                name=self.name,
                per_token=value,
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics={
                    "divergence": Metric(values=value.detach(), weights=weights),
                    "matched": Metric(values=near, weights=weights),
                    "unmatched": Metric(values=far, weights=weights),
                    "student_logprob": Metric(values=whole, weights=weights),
                    "teacher_logprob": Metric(values=batch.signals[TEACHER], weights=weights),
                    "unmatched_share": Metric(values=(place == 0).float(), weights=everything),
                    "skipped_share": Metric(values=(place == SKIPPED).float(), weights=everything),
                    "merged_share": Metric(
                        values=((place > 0) & (place != _columns(batch))).float(),
                        weights=everything,
                    ),
                },
            ),
        )


def _columns(batch: Batch) -> Tensor:
    """1 + the column of each token: [T] float32, exact up to 2^24."""
    return torch.arange(1, batch.input_ids.shape[1] + 1, device=batch.input_ids.device).float()


def _placed(target: GroupTarget, batch: Batch) -> tuple[Tensor, Tensor]:
    """The signals PLACE and TEACHER [B, T] of a whole step."""
    mask = batch.completion_mask
    numbers = batch.flat_rows()
    if len(numbers) != len(target.first):
        raise AlignmentError(
            f"the groups cover {len(target.first)} trained tokens, the step has {len(numbers)}"
        )
    first, group = (x.to(numbers.device)[numbers] for x in (target.first, target.group))
    columns = _columns(batch).expand(mask.shape)[mask]
    # Trained tokens of a row are one reply, so their numbers run as their columns do.
    started = columns - (numbers - first)
    place = torch.where(first >= 0, started, (first == SKIPPED).float() * SKIPPED)
    said = torch.cat([target.logprobs, target.logprobs.new_zeros(1)])  # the last is for no group
    teacher = said.to(numbers.device)[group]
    return scatter(place, mask), scatter(teacher.float(), mask)


def _later(logprobs: Tensor, place: Tensor, columns: Tensor) -> Tensor:
    """At the first token of each group, the summed log-probabilities of its later tokens: [B, T],
    with gradient."""
    behind = (place > 0) & (place != columns)
    at = torch.where(behind, place - 1, torch.zeros_like(place)).long()
    return torch.zeros_like(logprobs).scatter_add(1, at, logprobs.masked_fill(~behind, 0.0))
