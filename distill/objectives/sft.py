"""Supervised fine-tuning: maximum likelihood of the trained tokens.

per_token = -log pi(y_t | s_t)

Only worked solutions count: beside other terms it never makes the student repeat itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distill.batch import Batch
from distill.objectives.base import (
    Aggregate,
    ForwardPlan,
    PolicyView,
    State,
    Term,
    denominator_of,
    with_weights,
)
from distill.types import StepInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class SFT:
    name: ClassVar[str] = "sft"
    needs: ClassVar[frozenset[str]] = frozenset()
    corrects: ClassVar[str | None] = None
    paper: ClassVar[str] = "-"
    formula: ClassVar[str] = "-S"

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def plan(self) -> ForwardPlan:
        return ForwardPlan()

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        return with_weights(batch, self.name, self.aggregate, rows="worked"), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        return (
            Term(
                name=self.name,
                per_token=-policy.logprobs,
                weights=batch.weights[self.name],
                denominator=denominator_of(self.aggregate),
            ),
        )
