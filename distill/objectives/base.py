"""What an objective is: a frozen record of hyper-parameters with three pure calls.

    plan()                         what ONE pass over the output head must return
    prepare(batch, step, state)    once per optimizer step, the whole step, no gradient:
                                   advantages, selections, weights
    __call__(policy, batch)        per micro-batch: terms, each with a value per token

An objective never reduces. The trainer multiplies `per_token` by `weights`, sums, and divides by
a denominator taken over the whole optimizer step (all micro-batches), so that splitting a batch
changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from distill.batch import Batch, TokenScores
from distill.divergence import DivergenceSpec
from distill.errors import AlignmentError, ConfigError
from distill.types import StepInfo

Aggregate = Literal["token", "sequence", "sequence_sum", "trajectory", "constant"]
AGGREGATES: tuple[Aggregate, ...] = (
    "token",
    "sequence",
    "sequence_sum",
    "trajectory",
    "constant",
)
Denominator = Literal["tokens", "weights", "rows", "const"]
Reduce = Literal["mean", "sum", "min", "max"]
State = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPlan:
    """What the policy's forward pass returns besides the log-probabilities of the tokens."""

    entropy: bool = False
    divergences: tuple[DivergenceSpec, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyView:
    """The student's answer to a plan, with gradient. 0 outside the trained tokens."""

    logprobs: Tensor  # [B, T]
    entropy: Tensor | None = None  # [B, T]
    divergences: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [B, T]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Values that know how to merge: over micro-batches and ranks, exactly."""

    values: Tensor  # [B, T]
    weights: Tensor  # [B, T]
    reduce: Reduce = "mean"


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One summand of the loss: coefficient * sum(weights * per_token) / denominator.

    `weights` must be the micro-batch's slice of `batch.weights[name]`: the trainer sums those over
    the whole step before the first micro-batch.
    """

    name: str
    per_token: Tensor  # [B, T]
    weights: Tensor  # [B, T], detached
    denominator: Denominator = "weights"
    coefficient: float = 1.0
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@runtime_checkable
class Objective(Protocol):
    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]

    def plan(self) -> ForwardPlan: ...

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]: ...

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]: ...


def present(value: Tensor | None, name: str) -> Tensor:
    """Narrow an optional field; it is missing only when `needs` was not honoured."""
    if value is None:
        raise AlignmentError(
            f"the batch has no {name}, but the objective declared that it needs it"
        )
    return value


def target_scores(batch: Batch, role: str) -> TokenScores:
    target = batch.targets.get(role)
    if not isinstance(target, TokenScores):
        raise AlignmentError(f"the batch has no token scores of role {role!r}")
    return target


def with_weights(batch: Batch, name: str, aggregate: Aggregate) -> Batch:
    """Fill `batch.weights[name]` so that sum(weights) is the aggregate's own denominator.

    token       every trained token of the step counts the same
    sequence    every row counts the same, its tokens share the row's weight
    trajectory  every trajectory counts the same (several rows may belong to one)
    sequence_sum and constant keep weight 1: the sum is divided by the rows, or by nothing.
    """
    mask = batch.completion_mask
    weights = mask.float()
    if aggregate == "sequence":
        weights = weights / mask.sum(1, keepdim=True).clamp(min=1)
    elif aggregate == "trajectory":
        per_row = mask.sum(1)
        size = int(batch.row_traj.max()) + 1
        per_traj = per_row.new_zeros(size).index_add_(0, batch.row_traj, per_row)
        weights = weights / per_traj[batch.row_traj][:, None].clamp(min=1)
    elif aggregate not in AGGREGATES:
        raise ConfigError(f"aggregate must be one of {', '.join(AGGREGATES)}, got {aggregate!r}")
    return replace(batch, weights={**batch.weights, name: weights})


def denominator_of(aggregate: Aggregate) -> Denominator:
    """Which denominator makes `with_weights` the mean its name says."""
    if aggregate == "sequence_sum":
        return "rows"
    return "const" if aggregate == "constant" else "weights"


def importance_ratio(logprobs: Tensor, behaviour: Tensor | None) -> Tensor:
    """exp(S - S_behaviour); without a behaviour the ratio is 1 with the gradient of S."""
    reference = logprobs.detach() if behaviour is None else behaviour
    return torch.exp(logprobs - reference)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO: max(-A r, -A clip(r, 1 - low, 1 + high)) per token (arXiv 1707.06347)."""
    advantages = advantages.detach()
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(-advantages * ratio, -advantages * clipped)
