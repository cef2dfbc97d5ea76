"""Reinforcement learning by self-distillation from feedback (SDPO, arXiv 2601.20802).

    per_token = D_beta(nu(. | s_t), pi(. | s_t)) * min(exp(S_t - S_behaviour_t), ratio_cap)

over the student's k most likely entries and a tail. The teacher is a slow average of the student
(or its trust region) that reads a successful attempt of the same group, or the environment's
feedback; rows with neither are left out. With `hybrid_lambda` > 0 the method becomes a policy
gradient on A = lambda A_group + (1 - lambda) (N_t - S_t), which weak models need; rows without a
view then keep their group advantage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from distill.batch import Batch
from distill.divergence import DivergenceSpec
from distill.errors import ConfigError
from distill.objectives.base import (
    Aggregate,
    Clip,
    ForwardPlan,
    Metric,
    PolicyView,
    State,
    Term,
    advantage_metrics,
    denominator_of,
    divergence_metrics,
    importance_ratio,
    own_rewards,
    spread,
    student_side,
    target_scores,
    with_weights,
)
from distill.objectives.grpo import group_advantage
from distill.objectives.sdft import capped
from distill.types import StepInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class SDPO:
    name: ClassVar[str] = "sdpo"
    privileged: ClassVar[bool] = True
    corrects: ClassVar[str | None] = "behaviour to current"
    paper: ClassVar[str] = "2601.20802"
    formula: ClassVar[str] = "D_beta(nu, pi) min(r, cap), or -A r, A = l A_group + (1 - l)(N - S)"

    beta: float = 0.5
    """Interpolation in [0, 1]: 0 forward KL, 1 reverse KL, between the generalised JSD."""

    support: Literal["full", "top_k"] = "top_k"
    """The whole vocabulary, or the student's k most likely entries."""

    k: int = 100
    """Entries per position with support = "top_k"."""

    rest: Literal["tail", "renormalised"] = "tail"
    """What becomes of the mass outside the support."""

    temperature: float = 1.0
    """Softmax temperature inside the loss, on both sides."""

    ratio_cap: float = 2.0
    """Upper bound on the importance ratio of a batch that is used several times."""

    hybrid_lambda: float = 0.0
    """Share of the group advantage in [0, 1); the paper takes 0.9 for weak models."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.hybrid_lambda < 1.0:
            raise ConfigError(
                f"objective.hybrid_lambda must be within [0, 1), got {self.hybrid_lambda}"
            )
        if self.ratio_cap <= 0:
            raise ConfigError(f"objective.ratio_cap must be positive, got {self.ratio_cap}")
        self._spec()

    @property
    def needs(self) -> frozenset[str]:
        if self.hybrid_lambda:
            return frozenset({"teacher.logprobs", "rewards", "groups"})
        return frozenset({"teacher.distribution"})

    @property
    def keeps_unviewed(self) -> bool:
        return self.hybrid_lambda > 0

    def _spec(self) -> DivergenceSpec:
        return DivergenceSpec(
            name=self.name,
            beta=self.beta,
            temperature=self.temperature,
            support=self.support,
            chosen_by="student",
            k=self.k if self.support == "top_k" else 0,
            rest=self.rest,
        )

    def plan(self) -> ForwardPlan:
        if self.hybrid_lambda:
            return ForwardPlan(entropy=True)
        return ForwardPlan(entropy=True, divergences=(self._spec(),))

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        if self.hybrid_lambda:
            rewards, groups = own_rewards(batch, self.name)
            centred = group_advantage(rewards, groups, "center", 0)
            signals = {**batch.signals, self.name: spread(centred, batch)}
            batch = replace(batch, signals=signals)
        return with_weights(batch, self.name, self.aggregate), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        weights = batch.weights[self.name]
        if self.hybrid_lambda:
            gap = target_scores(batch, "teacher").logprobs - student_side(policy, batch)
            gap = gap.masked_fill(~batch.row_viewed[:, None], 0.0)
            share = self.hybrid_lambda
            advantages = share * batch.signals[self.name] + (1.0 - share) * gap
            ratio = importance_ratio(policy.logprobs, batch.behaviour_logprobs)
            per_token = Clip().surrogate(ratio, advantages)
            metrics = {
                "reverse_kl": Metric(
                    values=-gap, weights=weights.masked_fill(~batch.row_viewed[:, None], 0.0)
                ),
                **advantage_metrics(advantages, weights),
            }
        else:
            found = policy.divergences[self.name]
            per_token = capped(found.per_token, policy, batch, self.ratio_cap)
            metrics = divergence_metrics(found, weights, self._spec())
        return (
            Term(
                name=self.name,
                per_token=per_token,
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics=metrics,
            ),
        )
