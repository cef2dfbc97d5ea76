"""A sum of objectives: `objective.terms = [{name = "grpo"}, {name = "gkd", coefficient = 0.1}]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from distill.batch import Batch
from distill.errors import ConfigError
from distill.objectives.base import (
    ForwardPlan,
    Objective,
    PolicyView,
    State,
    Term,
    asks_teacher,
    candidate_lists,
    reads_teacher,
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
        lists = candidate_lists(self)
        if len(set(lists.values())) > 1:
            told = ", ".join(f"{name}: {k} of the {who}" for name, (who, k) in lists.items())
            raise ConfigError(
                "a step lists the most likely entries once for all objective.terms; give them the "
                f"same k and the same chosen_by, found {told}"
            )

    @property
    def name(self) -> str:
        return "+".join(part.name for part, _ in self.parts)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(part.needs for part, _ in self.parts))

    @property
    def keeps_unviewed(self) -> bool:
        return any(_keeps_unviewed(part) for part, _ in self.parts)

    def teacher_active(self, step: StepInfo) -> bool:
        return any(asks_teacher(part, step) for part, _ in self.parts)

    def plan(self) -> ForwardPlan:
        total = ForwardPlan()
        for part, _ in self.parts:
            total = total + part.plan()
        return total

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        states: dict[str, Any] = dict(state)
        for part, _ in self.parts:
            others = batch.weights
            batch, states[part.name] = part.prepare(batch, step, states.get(part.name, {}))
            if not _keeps_unviewed(part):
                batch = _only_viewed(batch, others)
        return batch, states

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        return tuple(
            replace(term, coefficient=term.coefficient * coefficient)
            for part, coefficient in self.parts
            for term in part(policy, batch)
        )


def _keeps_unviewed(part: Objective) -> bool:
    """Whether a term counts rows that the teacher has no view of; one that asks no teacher does."""
    return not reads_teacher(part) or bool(getattr(part, "keeps_unviewed", False))


def _only_viewed(batch: Batch, others: Mapping[str, Tensor]) -> Batch:
    """The weights that are not in `others`, without rows that another term keeps although the
    teacher had no view of them."""
    unviewed = ~batch.row_viewed[:, None]
    new = {n: w.masked_fill(unviewed, 0.0) for n, w in batch.weights.items() if n not in others}
    return replace(batch, weights={**batch.weights, **new})
