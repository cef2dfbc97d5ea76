"""On-policy self-distillation (OPSD, arXiv 2601.18734).

    per_token = sum_v min(nu_v (log nu_v - log pi_v), entry_clip)

The teacher is the same network at its start, reading a prompt that holds a worked solution; the
student reads the bare prompt and gets the forward KL over the full vocabulary. The paper clips
single entries at 0.05, which can make the loss negative and turn its gradient away from the
teacher; the Bregman form of an entry cannot, but a clipped entry has no gradient in either form, so
a clip is off by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

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
    with_weights,
)
from distill.types import StepInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class OPSD:
    name: ClassVar[str] = "opsd"
    needs: ClassVar[frozenset[str]] = frozenset({"teacher.distribution"})
    privileged: ClassVar[bool] = True
    corrects: ClassVar[str | None] = None
    paper: ClassVar[str] = "2601.18734"
    formula: ClassVar[str] = "sum_v min(nu (log nu - log pi) - nu + pi, clip)"

    beta: float = 0.0
    """Interpolation in [0, 1]: 0 forward KL (the paper), 1 reverse KL, between the JSD."""

    entry_clip: float = 0.0
    """Upper bound on the contribution of one vocabulary entry (the paper: 0.05); 0 = none."""

    clip_form: Literal["paper", "bregman"] = "bregman"
    """What an entry_clip bounds: nu log(nu/pi) as it stands, or a form that is never negative."""

    temperature: float = 1.0
    """Softmax temperature inside the loss, on both sides (the paper: 1.1, as sampled)."""

    skip_first: int = 0
    """Trained tokens at the start of each row that stay out of the loss."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        if self.skip_first < 0:
            raise ConfigError(f"objective.skip_first must not be negative, got {self.skip_first}")
        self._spec()

    def _spec(self) -> DivergenceSpec:
        return DivergenceSpec(
            name=self.name,
            beta=self.beta,
            temperature=self.temperature,
            entry_clip=self.entry_clip,
            clip_form=self.clip_form,
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
                per_token=found.per_token,
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics=divergence_metrics(found, weights, self._spec()),
            ),
        )
