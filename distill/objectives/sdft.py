"""Self-distillation from a demonstration, for learning without forgetting (SDFT, arXiv 2601.19897).

    per_token = D_beta(nu(. | s_t), pi(. | s_t)) * min(exp(S_t - S_behaviour_t), ratio_cap)

The teacher is a slow average of the student that reads an expert's demonstration for that very
prompt. The paper derives the reverse KL and reports that the forward KL worked best, the default.
The first tokens of a reply stay out of the loss, or the student learns to open with "Following the
example". The ratio only differs from 1 when a batch is used for several updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from distill.batch import Batch
from distill.divergence import DivergenceSpec
from distill.errors import ConfigError
from distill.objectives.base import (
    Aggregate,
    ForwardPlan,
    PolicyView,
    State,
    Term,
    denominator_of,
    divergence_metrics,
    importance_ratio,
    with_weights,
)
from distill.types import StepInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class SDFT:
    name: ClassVar[str] = "sdft"
    needs: ClassVar[frozenset[str]] = frozenset({"teacher.distribution"})
    privileged: ClassVar[bool] = True
    corrects: ClassVar[str | None] = "behaviour to current"
    paper: ClassVar[str] = "2601.19897"
    formula: ClassVar[str] = "D_beta(nu, pi) min(r, cap), without the first tokens"

    beta: float = 0.0
    """Interpolation in [0, 1]: 0 forward KL (the practice), 1 reverse KL (the derivation)."""

    support: Literal["full", "top_k"] = "full"
    """The whole vocabulary, or the student's k most likely entries."""

    k: int = 100
    """Entries per position with support = "top_k"."""

    rest: Literal["tail", "renormalised"] = "tail"
    """What becomes of the mass outside the support."""

    temperature: float = 1.0
    """Softmax temperature inside the loss, on both sides."""

    skip_first: int = 3
    """Trained tokens at the start of each row that stay out of the loss."""

    ratio_cap: float = 2.0
    """Upper bound on the importance ratio of a batch that is used several times."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        if self.skip_first < 0:
            raise ConfigError(f"objective.skip_first must not be negative, got {self.skip_first}")
        if self.ratio_cap <= 0:
            raise ConfigError(f"objective.ratio_cap must be positive, got {self.ratio_cap}")
        self._spec()

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
        return ForwardPlan(entropy=True, divergences=(self._spec(),))

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        return with_weights(batch, self.name, self.aggregate, skip=self.skip_first), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        weights = batch.weights[self.name]
        found = policy.divergences[self.name]
        return (
            Term(
                name=self.name,
                per_token=capped(found.per_token, policy, batch, self.ratio_cap),
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics=divergence_metrics(found, weights, self._spec()),
            ),
        )


def capped(value: Tensor, policy: PolicyView, batch: Batch, cap: float) -> Tensor:
    """value * min(exp(sg(S - S_behaviour)), cap); the value itself on a first update."""
    if batch.behaviour_logprobs is None:
        return value
    ratio = importance_ratio(policy.logprobs.detach(), batch.behaviour_logprobs)
    return value * ratio.clamp(max=cap)
