"""Exact full-vocabulary distillation on the student's own samples (GKD, arXiv 2306.13649).

    per_token = D_beta(nu(. | s_t), pi(. | s_t))

beta 0 = forward KL, 1 = reverse KL, between = generalised Jensen-Shannon divergence. The sampled
tokens are fixed data: the gradient does not flow through the prefix distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distill.batch import Batch
from distill.divergence import DivergenceSpec
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


@dataclass(frozen=True, kw_only=True, slots=True)
class GKD:
    name: ClassVar[str] = "gkd"
    needs: ClassVar[frozenset[str]] = frozenset({"teacher.distribution"})
    paper: ClassVar[str] = "2306.13649"
    formula: ClassVar[str] = "D_beta(nu, pi) over the full vocabulary"

    beta: float = 1.0
    """Interpolation in [0, 1]: 0 forward KL, 1 reverse KL, between the generalised JSD."""

    temperature: float = 1.0
    """Softmax temperature inside the loss, on both sides."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        self._spec()

    def _spec(self) -> DivergenceSpec:
        return DivergenceSpec(name=self.name, beta=self.beta, temperature=self.temperature)

    def plan(self) -> ForwardPlan:
        return ForwardPlan(entropy=True, divergences=(self._spec(),))

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        return with_weights(batch, self.name, self.aggregate), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        value = policy.divergences[self.name]
        weights = batch.weights[self.name]
        return (
            Term(
                name=self.name,
                per_token=value,
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics={"divergence": Metric(values=value.detach(), weights=weights)},
            ),
        )
