"""A sum of objectives: `objective.terms = [{name = "grpo"}, {name = "gkd", coefficient = 0.1}]`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from distill.batch import Batch
from distill.errors import ConfigError
from distill.objectives.base import (
    ForwardPlan,
    Objective,
    PolicyView,
    State,
    Term,
    asks_teacher,
)
from distill.types import StepInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """Adds the terms of several objectives, each times its coefficient; every one keeps its own
    denominator, state and metrics."""

    parts: tuple[tuple[Objective, float], ...]

    def __post_init__(self) -> None:
        names = [part.name for part, _ in self.parts]
        if len(set(names)) != len(names):
            raise ConfigError(f"every term needs an objective of its own, got {', '.join(names)}")
        if any(not coefficient > 0 for _, coefficient in self.parts):
            raise ConfigError("every coefficient of objective.terms must be positive")

    @property
    def name(self) -> str:
        return "+".join(part.name for part, _ in self.parts)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(part.needs for part, _ in self.parts))

    @property
    def keeps_unviewed(self) -> bool:
        return any(getattr(part, "keeps_unviewed", False) for part, _ in self.parts)

    def teacher_active(self, step: StepInfo) -> bool:
        asking = [p for p, _ in self.parts if any(n.startswith("teacher.") for n in p.needs)]
        return any(asks_teacher(part, step) for part in asking)

    def plan(self) -> ForwardPlan:
        total = ForwardPlan()
        for part, _ in self.parts:
            total = total + part.plan()
        return total

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        states: dict[str, Any] = dict(state)
        for part, _ in self.parts:
            batch, states[part.name] = part.prepare(batch, step, states.get(part.name, {}))
        return batch, states

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        return tuple(
            replace(term, coefficient=term.coefficient * coefficient)
            for part, coefficient in self.parts
            for term in part(policy, batch)
        )
