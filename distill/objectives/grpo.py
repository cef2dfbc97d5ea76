"""Group-relative policy optimisation, plain form (GRPO, arXiv 2402.03300).

    A = (r - mean of its group) / (std of its group + eps), the same for all tokens of a row
    per_token = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)),  r_t = exp(S_t - S_old_t)

A group whose rewards are all equal gets advantage 0. No KL term.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from distill.advantages import group_center, group_zscore
from distill.batch import Batch
from distill.errors import ConfigError
from distill.objectives.base import (
    Aggregate,
    ForwardPlan,
    Metric,
    PolicyView,
    State,
    Term,
    clipped_surrogate,
    denominator_of,
    importance_ratio,
    present,
    with_weights,
)
from distill.types import StepInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO:
    name: ClassVar[str] = "grpo"
    needs: ClassVar[frozenset[str]] = frozenset({"rewards", "groups"})
    paper: ClassVar[str] = "2402.03300"
    formula: ClassVar[str] = "max(-A r, -A clip(r)), A = z-score of the reward in its group"

    group: Literal["zscore", "center"] = "zscore"
    """How a reward becomes an advantage within its group."""

    ddof: int = 0
    """0 = population, 1 = sample standard deviation of a group."""

    clip_low: float = 0.2
    """Lower PPO bound: the ratio is clipped at 1 - clip_low."""

    clip_high: float = 0.2
    """Upper PPO bound: the ratio is clipped at 1 + clip_high."""

    aggregate: Aggregate = "sequence"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        if self.group not in ("zscore", "center"):
            raise ConfigError(f"objective.group must be zscore or center, got {self.group!r}")
        if self.ddof not in (0, 1):
            raise ConfigError(f"objective.ddof must be 0 or 1, got {self.ddof}")
        if not 0.0 <= self.clip_low < 1.0 or self.clip_high < 0.0:
            raise ConfigError(
                "objective.clip_low must be within [0, 1) and clip_high not negative, "
                f"got {self.clip_low} and {self.clip_high}"
            )

    def plan(self) -> ForwardPlan:
        return ForwardPlan(entropy=True)

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        has_tokens = batch.completion_mask.any(1)
        unrewarded = int((batch.rewards.isnan() & has_tokens).sum())
        if unrewarded:
            raise ConfigError(f"grpo needs a reward for every rollout, {unrewarded} have none")
        # A failed episode has neither tokens nor a reward: it must not shift its group's mean.
        groups = batch.row_group.masked_fill(~has_tokens, -1)
        rewards = batch.rewards.masked_fill(~has_tokens, 0.0)
        if self.group == "zscore":
            advantages = group_zscore(rewards, groups, ddof=self.ddof)
        else:
            advantages = group_center(rewards, groups)
        spread = batch.completion_mask.float() * advantages[:, None]
        batch = replace(batch, advantages=spread)
        return with_weights(batch, self.name, self.aggregate), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        advantages = present(batch.advantages, "advantages")
        weights = batch.weights[self.name]
        ratio = importance_ratio(policy.logprobs, batch.behaviour_logprobs)
        outside = (ratio < 1.0 - self.clip_low) | (ratio > 1.0 + self.clip_high)
        return (
            Term(
                name=self.name,
                per_token=clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high),
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics={
                    "clipped_share": Metric(values=outside.float(), weights=weights),
                    "moving_share": Metric(values=(advantages != 0).float(), weights=weights),
                },
            ),
        )
