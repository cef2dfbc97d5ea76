"""On-policy distillation with a bounded reward (PowerOPD, arXiv 2606.17199).

    A_t = nu(y_t | s_t)^alpha - pi(y_t | s_t)^alpha, in [-1, 1],   loss = -A_t * ratio_t

A difference of powers, not a power of the ratio. Its expected step descends the Bregman divergence
with generator x^(alpha + 1) / (alpha + 1), whose only minimum is pi = nu; divided by alpha it tends
to the log-ratio of plain OPD as alpha tends to 0. The paper's recipe uses alpha 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from distill.batch import Batch
from distill.errors import ConfigError
from distill.objectives.base import (
    Aggregate,
    ForwardPlan,
    Metric,
    PolicyView,
    State,
    Term,
    advantage_metrics,
    denominator_of,
    importance_ratio,
    student_side,
    target_scores,
    with_weights,
)
from distill.types import StepInfo


def power_advantage(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """nu^alpha - pi^alpha from log-probabilities, detached."""
    return ((alpha * teacher).exp() - (alpha * student).exp()).detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerOPD:
    name: ClassVar[str] = "power_opd"
    needs: ClassVar[frozenset[str]] = frozenset({"teacher.logprobs"})
    corrects: ClassVar[str | None] = "behaviour to current"
    paper: ClassVar[str] = "2606.17199"
    formula: ClassVar[str] = "-A r, A = nu^alpha - pi^alpha"

    alpha: float = 5.0
    """Exponent, > 0: the larger, the more only confident tokens matter."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ConfigError(f"objective.alpha must be positive, got {self.alpha}")

    def plan(self) -> ForwardPlan:
        return ForwardPlan(entropy=True)

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        return with_weights(batch, self.name, self.aggregate), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        teacher = target_scores(batch, "teacher").logprobs
        student = student_side(policy, batch)
        weights = batch.weights[self.name]
        advantages = power_advantage(student, teacher, self.alpha)
        gap = Metric(values=student - teacher, weights=weights)
        return (
            Term(
                name=self.name,
                per_token=-advantages * importance_ratio(policy.logprobs, batch.behaviour_logprobs),
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics={"reverse_kl": gap, **advantage_metrics(advantages, weights)},
            ),
        )
