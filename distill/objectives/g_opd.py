"""Generalised on-policy distillation, and its extrapolation ExOPD (arXiv 2602.12125).

    A_t = (N_t - S_t) + (scale - 1) * (N_t - R_t),   loss = clipped surrogate

R is a frozen third model. Scale 1 is plain OPD and needs no reference; above 1 the target
nu^scale * ref^(1 - scale) lies beyond the teacher (ExOPD: 1.25); 0 aims at the reference. The
reference is the student's own start, or the teacher's checkpoint before its own training (the
paper's reward correction). Several teachers are routed by the task's domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from distill.batch import Batch
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
    importance_ratio,
    student_side,
    target_scores,
    with_weights,
)
from distill.types import StepInfo


def extrapolated(student: Tensor, teacher: Tensor, reference: Tensor, scale: float) -> Tensor:
    """(N - S) + (scale - 1)(N - R), detached."""
    return ((teacher - student) + (scale - 1.0) * (teacher - reference)).detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class GOPD:
    name: ClassVar[str] = "g_opd"
    corrects: ClassVar[str | None] = "behaviour to current"
    paper: ClassVar[str] = "2602.12125"
    formula: ClassVar[str] = "max(-A r, -A clip(r)), A = (N - S) + (scale - 1)(N - R)"

    scale: float = 1.25
    """lambda of the paper, >= 0: 1 = OPD, above 1 = beyond the teacher (1.5 was unstable)."""

    clip_low: float = 0.2
    """Lower PPO bound: the ratio is clipped at 1 - clip_low."""

    clip_high: float = 0.2
    """Upper PPO bound: the ratio is clipped at 1 + clip_high."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        if self.scale < 0:
            raise ConfigError(f"objective.scale must not be negative, got {self.scale}")
        self._clip()

    @property
    def needs(self) -> frozenset[str]:
        extra = set() if self.scale == 1.0 else {"reference.logprobs"}
        return frozenset({"teacher.logprobs", *extra})

    def _clip(self) -> Clip:
        return Clip(low=self.clip_low, high=self.clip_high)

    def plan(self) -> ForwardPlan:
        return ForwardPlan(entropy=True)

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        return with_weights(batch, self.name, self.aggregate), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        student = student_side(policy, batch)
        teacher = target_scores(batch, "teacher").logprobs
        weights = batch.weights[self.name]
        # At scale 1 the reference cancels: any stand-in gives the same advantage.
        reference = teacher if self.scale == 1.0 else target_scores(batch, "reference").logprobs
        advantages = extrapolated(student, teacher, reference, self.scale)
        ratio = importance_ratio(policy.logprobs, batch.behaviour_logprobs)
        beyond = (self.scale - 1.0) * (teacher - reference)
        return (
            Term(
                name=self.name,
                per_token=self._clip().surrogate(ratio, advantages),
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics={
                    "reverse_kl": Metric(values=student - teacher, weights=weights),
                    "beyond": Metric(values=beyond.abs(), weights=weights),
                    **advantage_metrics(advantages, weights),
                },
            ),
        )
