"""Exact distillation on the student's own samples (GKD, arXiv 2306.13649).

    per_token = D_beta(nu(. | s_t), pi(. | s_t))

beta 0 = forward KL, 1 = reverse KL, between = generalised Jensen-Shannon divergence, over the full
vocabulary or k entries of it. The sampled tokens are fixed data: the gradient does not flow through
the prefix distribution. A share of the prompts may be answered by their worked solutions instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from distill.batch import Batch
from distill.divergence import DivergenceSpec, k2
from distill.errors import ConfigError
from distill.objectives.base import (
    Aggregate,
    ForwardPlan,
    Metric,
    PolicyView,
    State,
    Term,
    denominator_of,
    divergence_metrics,
    target_scores,
    with_weights,
)
from distill.types import StepInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class GKD:
    name: ClassVar[str] = "gkd"
    corrects: ClassVar[str | None] = None
    paper: ClassVar[str] = "2306.13649"
    formula: ClassVar[str] = "D_beta(nu, pi) over the vocabulary, or over k entries of it"

    beta: float = 1.0
    """Interpolation in [0, 1]: 0 forward KL, 1 reverse KL, between the generalised JSD."""

    temperature: float = 1.0
    """Softmax temperature inside the loss, on both sides."""

    support: Literal["full", "top_k", "sampled"] = "full"
    """Which entries the sum runs over; `sampled` estimates from the sampled token alone."""

    k: int = 64
    """Entries per position with support = "top_k"."""

    chosen_by: Literal["student", "teacher", "union"] = "teacher"
    """Whose most likely entries form the support."""

    rest: Literal["tail", "renormalised", "raw"] = "tail"
    """What becomes of the mass outside the support."""

    estimator: Literal["k1", "k2", "k3"] = "k2"
    """With support = "sampled": only k2 has the gradient of the reverse KL as a loss."""

    on_policy_share: float = 1.0
    """Share of the prompts that the student answers itself; the rest are worked solutions."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.on_policy_share <= 1.0:
            raise ConfigError(
                f"objective.on_policy_share must be within [0, 1], got {self.on_policy_share}"
            )
        if self.support == "sampled":
            if self.beta != 1.0 or self.estimator != "k2":
                raise ConfigError(
                    "a loss over sampled tokens alone must be beta = 1 with estimator = "
                    f'"k2": k1 has no gradient in expectation and k3 that of the forward KL; got '
                    f"beta = {self.beta} and {self.estimator!r}; for k1 as an advantage use the "
                    "objective opd"
                )
        else:
            self._spec()

    @property
    def needs(self) -> frozenset[str]:
        if self.support == "sampled":
            return frozenset({"teacher.logprobs"})
        if self.support == "top_k" and self.chosen_by == "teacher":
            return frozenset({"teacher.own_top_k"})
        return frozenset({"teacher.distribution"})

    def _spec(self) -> DivergenceSpec:
        return DivergenceSpec(
            name=self.name,
            beta=self.beta,
            temperature=self.temperature,
            support="top_k" if self.support == "top_k" else "full",
            chosen_by=self.chosen_by,
            k=self.k if self.support == "top_k" else 0,
            rest=self.rest,
        )

    def plan(self) -> ForwardPlan:
        if self.support == "sampled":
            return ForwardPlan(entropy=True)
        return ForwardPlan(entropy=True, divergences=(self._spec(),))

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        return with_weights(batch, self.name, self.aggregate, rows="all"), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        weights = batch.weights[self.name]
        if self.support == "sampled":
            value = k2(policy.logprobs, target_scores(batch, "teacher").logprobs.detach())
            metrics = {"divergence": Metric(values=value.detach(), weights=weights)}
        else:
            found = policy.divergences[self.name]
            value, metrics = found.per_token, divergence_metrics(found, weights, self._spec())
        return (
            Term(
                name=self.name,
                per_token=value,
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics=metrics,
            ),
        )
