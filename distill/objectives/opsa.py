"""On-policy self-adaptation: a fixed push on the least likely tokens, no teacher, no reward
(OPSA, arXiv 2608.31046; not the safety method of the same name).

    S = the `fraction` of trained tokens with the lowest log-probability
    A_t = a_max + (a_min - a_max) (H_t - H_lo) / (H_hi - H_lo) in S, H the student's entropy
    loss = mean over rows of the mean over the row's selected tokens of -A_t r_t

Only negative advantages, so it is purely mode seeking and a deterministic policy is its fixed
point: run it with the collapse monitor on. The paper ranks within a response, its code over the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from distill.batch import Batch
from distill.errors import ConfigError
from distill.objectives.base import (
    ForwardPlan,
    Metric,
    PolicyView,
    State,
    Term,
    importance_ratio,
    present,
)
from distill.types import StepInfo

_FLAT = 1e-12
"""Entropies closer together than this count as equal; every token then gets a_min."""


def least_likely(logprobs: Tensor, eligible: Tensor, fraction: float) -> Tensor:
    """Marks max(1, floor(fraction * n)) of the n eligible tokens, the least likely: 1-d tensors.

    Ties keep their order.
    """
    where = eligible.nonzero()[:, 0]
    out = torch.zeros_like(eligible)
    if len(where):
        count = max(1, int(fraction * len(where) + 1e-9))
        out[where[logprobs[where].argsort(stable=True)[:count]]] = True
    return out


def entropy_advantage(entropy: Tensor, selected: Tensor, a_min: float, a_max: float) -> Tensor:
    """Advantages of the selected tokens, more negative at higher entropy; 0 elsewhere."""
    out = torch.zeros_like(entropy)
    if bool(selected.any()):
        found = entropy[selected]
        low, width = found.min(), found.max() - found.min()
        rank = torch.ones_like(found) if float(width) <= _FLAT else (found - low) / width
        out[selected] = a_max + (a_min - a_max) * rank
    return out


def _ends(mask: Tensor, row_ended: Tensor) -> Tensor:
    """Marks the end token of every turn: [B, T] bool. Only the last turn of a row may lack one."""
    closing = mask.int().diff(dim=1, append=mask.new_zeros(len(mask), 1).int()) < 0
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    return closing & ~(last & ~row_ended[:, None])


@dataclass(frozen=True, kw_only=True, slots=True)
class OPSA:
    name: ClassVar[str] = "opsa"
    corrects: ClassVar[str | None] = "behaviour to current"
    paper: ClassVar[str] = "2608.31046"
    formula: ClassVar[str] = "-A r on the least likely tokens, A in [a_min, a_max] < 0 by entropy"
    needs: ClassVar[frozenset[str]] = frozenset({"student.logprobs", "student.entropy"})
    guarded: ClassVar[bool] = True

    fraction: float = 0.2
    """Share of the trained tokens that are pushed."""

    mode: Literal["entropy", "fixed"] = "entropy"
    """Advantages by entropy between a_max and a_min, or `fixed_advantage` for all."""

    scope: Literal["response", "batch"] = "response"
    """Where tokens compete: within each reply (paper), or over the whole step (released code)."""

    a_min: float = -1.0
    """Advantage of the selected token with the highest entropy."""

    a_max: float = -0.5
    """Advantage of the selected token with the lowest entropy, < 0."""

    fixed_advantage: float = -0.5
    """Advantage of every selected token with mode = "fixed", < 0."""

    exclude_end: bool = True
    """Never select the end token of a turn: pushing it down lengthens replies without end."""

    aggregate: ClassVar[str] = "mean of each row's selected tokens, then of rows"

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"objective.fraction must be within (0, 1], got {self.fraction}")
        if not self.a_min < self.a_max < 0.0:
            raise ConfigError(
                f"objective needs a_min < a_max < 0, got {self.a_min} and {self.a_max}"
            )
        if not self.fixed_advantage < 0.0:
            raise ConfigError(
                f"objective.fixed_advantage must be negative, got {self.fixed_advantage}; a "
                "positive one collapses the policy within a few steps"
            )

    def plan(self) -> ForwardPlan:
        return ForwardPlan(entropy=True)

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        logprobs = present(batch.behaviour_logprobs, "log-probabilities before the update")
        entropy = present(batch.behaviour_entropy, "entropies before the update")
        eligible = batch.completion_mask & batch.row_sampled[:, None]
        if self.exclude_end:
            eligible = eligible & ~_ends(eligible, batch.row_ended)
        if self.scope == "batch":
            parts = [(logprobs.flatten(), entropy.flatten(), eligible.flatten())]
        else:
            parts = list(zip(logprobs, entropy, eligible, strict=True))
        selected, advantages = [], []
        for scores, uncertainty, allowed in parts:
            chosen = least_likely(scores, allowed, self.fraction)
            selected.append(chosen)
            if self.mode == "fixed":
                advantages.append(chosen.float() * self.fixed_advantage)
            else:
                advantages.append(entropy_advantage(uncertainty, chosen, self.a_min, self.a_max))
        shape = batch.completion_mask.shape
        chosen = torch.stack(selected).view(shape)
        weights = chosen.float() / chosen.sum(1, keepdim=True).clamp(min=1)
        return replace(
            batch,
            signals={**batch.signals, self.name: torch.stack(advantages).view(shape)},
            weights={**batch.weights, self.name: weights},
        ), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        advantages, weights = batch.signals[self.name], batch.weights[self.name]
        ratio = importance_ratio(policy.logprobs, batch.behaviour_logprobs)
        chosen = (weights > 0).float()
        return (
            Term(
                name=self.name,
                per_token=-advantages * ratio,
                weights=weights,
                denominator="rows",
                metrics={
                    "advantage": Metric(values=advantages, weights=chosen),
                    "logprob": Metric(values=policy.logprobs.detach(), weights=chosen),
                    "selected_share": Metric(values=chosen, weights=batch.completion_mask.float()),
                },
            ),
        )
