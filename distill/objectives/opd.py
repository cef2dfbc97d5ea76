"""On-policy distillation: sampled reverse KL as a per-token advantage.

    A_t = coefficient * (log nu(y_t | s_t) - log pi(y_t | s_t)),   loss = -A_t * ratio_t

The advantage is detached and used raw: no baseline, no whitening. Its expected gradient at
discount 0 is that of the exact reverse KL. With support `top_k` every one of k entries v has its
own advantage -w_v (log pi(v) - log nu(v)), w the student's (or teacher's) probabilities rescaled to
the support, and the surrogates are summed. Sources: "On-Policy Distillation" (Thinking Machines,
2025); GKD, arXiv 2306.13649; Qwen3, arXiv 2505.09388; top-k advantages: arXiv 2604.13016.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from distill.advantages import discounted
from distill.batch import Batch, TokenScores
from distill.divergence import NEVER
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
    present,
    student_side,
    target_scores,
    with_weights,
)
from distill.types import StepInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class OPD:
    name: ClassVar[str] = "opd"
    corrects: ClassVar[str | None] = "behaviour to current"
    paper: ClassVar[str] = "2306.13649"
    formula: ClassVar[str] = "-A r, A = N - S"

    coefficient: float = 1.0
    """Scale of the advantage, > 0."""

    discount: float = 0.0
    """Weight of later tokens' advantages in [0, 1]; 0 treats the rollout as fixed data."""

    clamp: float = 0.0
    """Bound on |A_t| in nats, 0 = none."""

    support: Literal["sampled", "top_k"] = "sampled"
    """Advantages of the sampled token alone, or of k entries per position."""

    k: int = 16
    """Entries per position with support = "top_k"."""

    chosen_by: Literal["student", "teacher"] = "student"
    """Whose most likely entries form the support."""

    weighting: Literal["student", "teacher", "uniform"] = "student"
    """Whose probabilities, rescaled to the support, weigh the entries."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        if self.coefficient <= 0:
            raise ConfigError(f"objective.coefficient must be positive, got {self.coefficient}")
        if not 0.0 <= self.discount <= 1.0:
            raise ConfigError(f"objective.discount must be within [0, 1], got {self.discount}")
        if self.clamp < 0:
            raise ConfigError(f"objective.clamp must not be negative, got {self.clamp}")
        if self.k < 1:
            raise ConfigError(f"objective.k must be at least 1, got {self.k}")
        if self.support == "top_k" and self.discount:
            raise ConfigError('objective.discount needs support = "sampled"')

    @property
    def needs(self) -> frozenset[str]:
        if self.support == "sampled":
            extra = {"student.logprobs"} if self.discount else set()
            return frozenset({"teacher.logprobs", *extra})
        if self.chosen_by == "student":
            return frozenset({"student.candidates", "teacher.candidates"})
        return frozenset({"teacher.own_top_k"})

    def plan(self) -> ForwardPlan:
        return ForwardPlan(entropy=True, candidates="teacher" if self.support == "top_k" else "")

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        if self.discount > 0:
            # Later tokens count too, so the whole row's advantages are taken before the update.
            local = self._advantages(present(batch.behaviour_logprobs, "log-probabilities"), batch)
            total = discounted(local, batch.completion_mask, self.discount)
            batch = replace(batch, signals={**batch.signals, self.name: total})
        return with_weights(batch, self.name, self.aggregate), state

    def _advantages(self, student: Tensor, batch: Batch) -> Tensor:
        return self._bounded(target_scores(batch, "teacher").logprobs - student)

    def _bounded(self, gap: Tensor) -> Tensor:
        gap = self.coefficient * gap.detach()
        return gap.clamp(-self.clamp, self.clamp) if self.clamp else gap

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        weights = batch.weights[self.name]
        teacher = target_scores(batch, "teacher")
        gap = policy.logprobs.detach() - teacher.logprobs
        metrics = {"reverse_kl": Metric(values=gap, weights=weights)}
        if self.support == "top_k":
            per_token, more = self._over_candidates(policy, teacher, weights)
        else:
            advantages = batch.signals.get(self.name)
            if advantages is None:
                advantages = self._advantages(student_side(policy, batch), batch)
            per_token = -advantages * importance_ratio(policy.logprobs, batch.behaviour_logprobs)
            more = advantage_metrics(advantages, weights)
        return (
            Term(
                name=self.name,
                per_token=per_token,
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics=metrics | more,
            ),
        )

    def _over_candidates(
        self, policy: PolicyView, teacher: TokenScores, weights: Tensor
    ) -> tuple[Tensor, dict[str, Metric]]:
        ours = present(policy.candidate_logprobs, "candidate log-probabilities")
        theirs = present(teacher.candidate_logprobs, "candidate log-probabilities").detach()
        absent = theirs.isneginf()
        ours, theirs = ours.masked_fill(absent, NEVER), theirs.masked_fill(absent, NEVER)
        live = ours.detach()
        shares = {
            "student": live.softmax(-1),
            "teacher": theirs.softmax(-1),
            "uniform": (~absent).float() / (~absent).sum(-1, keepdim=True).clamp(min=1),
        }[self.weighting]
        advantages = self._bounded(theirs - live) * shares
        per_token = (-advantages * torch.exp(ours - live)).sum(-1)
        return per_token, {
            "student_mass": Metric(values=live.exp().sum(-1), weights=weights),
            "teacher_mass": Metric(values=theirs.exp().sum(-1), weights=weights),
        }
