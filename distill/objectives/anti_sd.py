"""Anti-self-distillation: move away from the privileged self-teacher (AntiSD, arXiv 2605.11609).

    u_t = N_t - S_t,   phi(u) = (softplus(u) - ln 2) / 2
    A_t = A_sequence - gate * strength * phi(u_t),   loss = clipped surrogate

It ascends the Jensen-Shannon divergence: tokens that a teacher who knows the answer would not
write (deliberation) are worth up to +0.35, the others cost. Ascent has no floor of its own, so a
gate with hysteresis watches the teacher's entropy: it opens at the level of the warm-up and closes
below `close_ratio` of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar, Literal

import torch
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
    denominator_of,
    importance_ratio,
    own_rewards,
    present,
    spread,
    student_side,
    target_scores,
    with_weights,
)
from distill.objectives.grpo import group_advantage
from distill.types import StepInfo


def anti_bonus(gap: Tensor) -> Tensor:
    """-phi(u) = -(softplus(u) - ln 2) / 2, in (-inf, ln(2) / 2]: zero at u = 0."""
    return -0.5 * (torch.nn.functional.softplus(gap) - math.log(2.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyGate:
    """A Schmitt trigger over a stream of entropies; its state is plain JSON."""

    warmup_steps: int = 5
    close_ratio: float = 0.93

    def update(self, state: State, entropy: float) -> tuple[bool, dict[str, Any]]:
        """Whether the gate is open at this step, and the next state.

        During the warm-up it is shut; then it opens at the warm-up's median, closes below
        `close_ratio` of it, and else stays as it was. It starts open.
        """
        seen = [*state.get("warmup", []), entropy]
        if len(seen) <= self.warmup_steps:
            return False, {"warmup": seen, "open": True}
        warm = median(seen[: self.warmup_steps])
        is_open = bool(state.get("open", True))
        if entropy >= warm:
            is_open = True
        elif entropy < self.close_ratio * warm:
            is_open = False
        return is_open, {"warmup": seen[: self.warmup_steps], "open": is_open}


@dataclass(frozen=True, kw_only=True, slots=True)
class AntiSD:
    name: ClassVar[str] = "anti_sd"
    privileged: ClassVar[bool] = True
    keeps_unviewed: ClassVar[bool] = True
    corrects: ClassVar[str | None] = "behaviour to current"
    paper: ClassVar[str] = "2605.11609"
    formula: ClassVar[str] = "-A r, A = A_group - g s (softplus(N - S) - ln 2) / 2"
    needs: ClassVar[frozenset[str]] = frozenset(
        {"teacher.logprobs", "teacher.entropy", "rewards", "groups"}
    )

    strength: float = 0.5
    """lambda of the paper, > 0; small models stand 0.1."""

    gate: bool = True
    """Whether the entropy gate may shut the bonus off."""

    warmup_steps: int = 5
    """Steps without a bonus, over which the gate learns the usual entropy."""

    close_ratio: float = 0.93
    """The gate closes below this share of the usual entropy."""

    statistic: Literal["median", "mean"] = "median"
    """Which entropy of a step the gate watches; a sharp teacher's median is noise near 0."""

    ddof: int = 0
    """0 = population, 1 = sample standard deviation of a group."""

    clip_low: float = 0.2
    """Lower PPO bound: the ratio is clipped at 1 - clip_low."""

    clip_high: float = 0.2
    """Upper PPO bound: the ratio is clipped at 1 + clip_high."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        if not self.strength > 0:
            raise ConfigError(f"objective.strength must be positive, got {self.strength}")
        if not 0.0 < self.close_ratio <= 1.0:
            raise ConfigError(
                f"objective.close_ratio must be within (0, 1], got {self.close_ratio}"
            )
        if self.warmup_steps < 1:
            raise ConfigError(f"objective.warmup_steps must be at least 1, got {self.warmup_steps}")
        if self.ddof not in (0, 1):
            raise ConfigError(f"objective.ddof must be 0 or 1, got {self.ddof}")
        self._clip()

    def _clip(self) -> Clip:
        return Clip(low=self.clip_low, high=self.clip_high)

    def plan(self) -> ForwardPlan:
        return ForwardPlan(entropy=True)

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        rewards, groups = own_rewards(batch, self.name)
        advantages = group_advantage(rewards, groups, "zscore", self.ddof)
        scored = batch.completion_mask & (batch.row_viewed & batch.row_sampled)[:, None]
        strength = self.strength
        if self.gate and bool(scored.any()):
            known = present(target_scores(batch, "teacher").entropy, "teacher entropy")[scored]
            value = float(known.median() if self.statistic == "median" else known.mean())
            is_open, state = EntropyGate(
                warmup_steps=self.warmup_steps, close_ratio=self.close_ratio
            ).update(state, value)
            strength = self.strength if is_open else 0.0
        elif step.step <= self.warmup_steps:
            strength = 0.0
        signals = {
            **batch.signals,
            self.name: spread(advantages, batch),
            f"{self.name}.strength": scored.float() * strength,
        }
        return with_weights(replace(batch, signals=signals), self.name, self.aggregate), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        weights = batch.weights[self.name]
        strength = batch.signals[f"{self.name}.strength"]
        gap = target_scores(batch, "teacher").logprobs - student_side(policy, batch)
        unviewed = ~batch.row_viewed[:, None]
        bonus = anti_bonus(gap).masked_fill(unviewed, 0.0)
        told = weights.masked_fill(unviewed, 0.0)
        advantages = batch.signals[self.name] + strength * bonus
        ratio = importance_ratio(policy.logprobs, batch.behaviour_logprobs)
        clip = self._clip()
        return (
            Term(
                name=self.name,
                per_token=clip.surrogate(ratio, advantages),
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics={
                    "gap": Metric(values=gap, weights=told),
                    "bonus": Metric(values=bonus, weights=told),
                    "strength": Metric(values=strength, weights=weights),
                    "clipped_share": Metric(values=clip.outside(ratio), weights=weights),
                },
            ),
        )
