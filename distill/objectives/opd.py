"""On-policy distillation: sampled reverse KL as a per-token advantage.

    A_t = coefficient * (log nu(y_t | s_t) - log pi(y_t | s_t)),   loss = -A_t * ratio_t

The advantage is detached and used raw: no baseline, no whitening. Its expected gradient at
discount 0 is that of the exact reverse KL. Sources: "On-Policy Distillation" (Thinking Machines,
2025); GKD, arXiv 2306.13649; Qwen3, arXiv 2505.09388.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from distill.advantages import discounted
from distill.batch import Batch
from distill.errors import ConfigError
from distill.objectives.base import (
    Aggregate,
    ForwardPlan,
    Metric,
    PolicyView,
    State,
    Term,
    denominator_of,
    importance_ratio,
    target_scores,
    with_weights,
)
from distill.types import StepInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class OPD:
    name: ClassVar[str] = "opd"
    needs: ClassVar[frozenset[str]] = frozenset({"teacher.logprobs"})
    paper: ClassVar[str] = "2306.13649"
    formula: ClassVar[str] = "-A r, A = N - S"

    coefficient: float = 1.0
    """Scale of the advantage, > 0."""

    discount: float = 0.0
    """Weight of later tokens' advantages in [0, 1]; 0 treats the rollout as fixed data."""

    clamp: float = 0.0
    """Bound on |A_t| in nats, 0 = none."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        if self.coefficient <= 0:
            raise ConfigError(f"objective.coefficient must be positive, got {self.coefficient}")
        if not 0.0 <= self.discount <= 1.0:
            raise ConfigError(f"objective.discount must be within [0, 1], got {self.discount}")
        if self.clamp < 0:
            raise ConfigError(f"objective.clamp must not be negative, got {self.clamp}")

    def plan(self) -> ForwardPlan:
        return ForwardPlan(entropy=True)

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        # On policy, with one update per batch, the student's side is the live forward pass.
        student = batch.behaviour_logprobs
        if student is None and self.discount > 0:
            student = batch.sampler_logprobs
        if student is not None:
            local = self._advantages(student, batch)
            total = discounted(local, batch.completion_mask, self.discount)
            batch = replace(batch, advantages=total)
        return with_weights(batch, self.name, self.aggregate), state

    def _advantages(self, student: Tensor, batch: Batch) -> Tensor:
        gap = self.coefficient * (target_scores(batch, "teacher").logprobs - student)
        return gap.clamp(-self.clamp, self.clamp) if self.clamp else gap

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        advantages = batch.advantages
        if advantages is None:
            advantages = self._advantages(policy.logprobs.detach(), batch)
        teacher = target_scores(batch, "teacher").logprobs
        weights = batch.weights[self.name]
        ratio = importance_ratio(policy.logprobs, batch.behaviour_logprobs)
        gap = policy.logprobs.detach() - teacher
        return (
            Term(
                name=self.name,
                per_token=-advantages * ratio,
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics={
                    "reverse_kl": Metric(values=gap, weights=weights),
                    "advantage_max": Metric(values=advantages.abs(), weights=weights, reduce="max"),
                },
            ),
        )
