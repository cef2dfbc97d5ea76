"""Group-relative policy optimisation (GRPO, arXiv 2402.03300) and two of its relatives.

    A = (r - mean of its group) / (std of its group + eps), the same for all tokens of a row
    per_token = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)),  r_t = exp(S_t - S_old_t)
              + kl_coefficient * k3(S_t, R_t), against a frozen reference R

A group whose rewards are all equal gets advantage 0, and so does one that shrank to a single row.
With several rows per trajectory, `stat_scope` says whether rows or trajectories make the mean, and
`credit` adds what a row's own step was worth (see `distill.credit`), before the clip:

    A_row = A + credit_weight * C_row

`dr_grpo` (arXiv 2503.20783) divides by neither the spread of the group nor the length of the row;
`dapo` (arXiv 2503.14476) clips higher upward, averages over tokens, draws new prompts in place of
groups without a spread, and lets the reward fall over the last tokens before the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from distill.advantages import (
    LoneGroup,
    group_center,
    group_zscore,
    once_per_trajectory,
    overlong_penalty,
)
from distill.batch import Batch
from distill.credit import METHODS, Comparison, CreditMethod, StepCredit, step_credit
from distill.divergence import k3
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
    spread,
    target_scores,
    with_weights,
)
from distill.types import StepInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO:
    name: ClassVar[str] = "grpo"
    corrects: ClassVar[str | None] = "behaviour to current"
    paper: ClassVar[str] = "2402.03300"
    formula: ClassVar[str] = (
        "max(-A r, -A clip(r)) + c k3, A = z-score of the reward in its group (+ step credit)"
    )

    group: Literal["zscore", "center"] = "zscore"
    """How a reward becomes an advantage within its group."""

    ddof: int = 0
    """0 = population, 1 = sample standard deviation of a group."""

    stat_scope: Literal["rows", "trajectories"] = "rows"
    """What counts in a group: every row, so that long trajectories weigh more, or each trajectory
    once."""

    lone_group: LoneGroup = "zero"
    """A group of one gets 0, or its "raw" reward (verl-agent's code)."""

    credit: Literal["none", "gigpo", "g2po"] = "none"
    """Step credit from rows that acted in the same state; needs one row per turn."""

    credit_weight: float = 1.0
    """What step credit is worth beside the advantage of the trajectory."""

    credit_std: bool = True
    """Divide step credit by its spread, or only centre it."""

    gamma: float = 0.95
    """Discount per step of step credit, in (0, 1]."""

    clip_low: float = 0.2
    """Lower PPO bound: the ratio is clipped at 1 - clip_low."""

    clip_high: float = 0.2
    """Upper PPO bound: the ratio is clipped at 1 + clip_high."""

    clip_dual: float = 0.0
    """A negative advantage costs at most clip_dual * |A| per token (3 is usual); 0 = no bound."""

    kl_coefficient: float = 0.0
    """Weight of k3 to the reference; above 0 a [reference] is needed."""

    overlong_length: int = 0
    """Tokens of a reply at which the length penalty reaches -1; 0 = no penalty."""

    overlong_cache: int = 0
    """Tokens before overlong_length over which the penalty grows from 0."""

    refill_rounds: int = 0
    """How often a step may draw new prompts for groups whose rewards are all equal."""

    aggregate: Aggregate = "sequence"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        if self.group not in ("zscore", "center"):
            raise ConfigError(f"objective.group must be zscore or center, got {self.group!r}")
        if self.ddof not in (0, 1):
            raise ConfigError(f"objective.ddof must be 0 or 1, got {self.ddof}")
        self._check_choices()
        if self.kl_coefficient < 0 or self.refill_rounds < 0:
            raise ConfigError(
                "objective.kl_coefficient and refill_rounds must not be negative, got "
                f"{self.kl_coefficient} and {self.refill_rounds}"
            )
        if not 0 <= self.overlong_cache <= self.overlong_length:
            raise ConfigError(
                "objective.overlong_cache must be within [0, overlong_length], got "
                f"{self.overlong_cache} and {self.overlong_length}"
            )
        self._clip()

    def _check_choices(self) -> None:
        for name, found, legal in (
            ("stat_scope", self.stat_scope, ("rows", "trajectories")),
            ("lone_group", self.lone_group, ("zero", "raw")),
            ("credit", self.credit, ("none", *METHODS)),
        ):
            if found not in legal:
                raise ConfigError(f"objective.{name} must be {' or '.join(legal)}, got {found!r}")
        if self.credit_weight < 0 or not 0.0 < self.gamma <= 1.0:
            raise ConfigError(
                "objective.credit_weight must not be negative and gamma must be within (0, 1], "
                f"got {self.credit_weight} and {self.gamma}"
            )

    @property
    def needs(self) -> frozenset[str]:
        extra = {"reference.logprobs"} if self.kl_coefficient else set()
        if self.credit != "none":
            extra.add("turns")
        return frozenset({"rewards", "groups", *extra, *self.also_needs()})

    def also_needs(self) -> set[str]:
        """What a method built on this one needs besides."""
        return set()

    def _clip(self) -> Clip:
        return Clip(low=self.clip_low, high=self.clip_high, dual=self.clip_dual)

    def plan(self) -> ForwardPlan:
        return ForwardPlan(entropy=True)

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        rewards, groups = own_rewards(batch, self.name)
        if self.overlong_length:
            lengths = batch.completion_mask.sum(1)
            rewards = rewards + overlong_penalty(lengths, self.overlong_length, self.overlong_cache)
        entry = None
        if self.stat_scope == "trajectories":
            rewards, groups, entry = once_per_trajectory(rewards, groups, batch.row_traj)
        advantages = group_advantage(rewards, groups, self.group, self.ddof, lone=self.lone_group)
        advantages = advantages if entry is None else advantages[entry]
        signals = {**batch.signals, self.name: spread(advantages, batch)}
        if self.credit != "none":
            signals |= self._credit_signals(batch, self.credit)
        batch = with_weights(replace(batch, signals=signals), self.name, self.aggregate)
        if self.kl_coefficient:
            batch = with_weights(batch, f"{self.name}.kl", self.aggregate)
        return batch, state

    def _credit_signals(self, batch: Batch, method: CreditMethod) -> dict[str, Tensor]:
        compared = Comparison(std=self.credit_std, ddof=self.ddof)
        found: StepCredit = step_credit(batch, method, gamma=self.gamma, compared=compared)
        return {
            f"{self.name}.credit": spread(self.credit_weight * found.values, batch),
            f"{self.name}.shared": spread(found.shared, batch),
            f"{self.name}.steps": spread(found.steps, batch),
            f"{self.name}.nodes": batch.completion_mask.float() * found.num_nodes,
        }

    def advantages(self, policy: PolicyView, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        """What the clipped surrogate is given, [B, T] and detached, and what its parts are watched
        by. A method that adds a part of its own overrides this."""
        outcome = batch.signals[self.name]
        credit = batch.signals.get(f"{self.name}.credit")
        if credit is None:
            return outcome, {}
        weights = batch.weights[self.name]
        once = weights * (batch.completion_mask.cumsum(1) == 1)  # one token speaks for its row
        once = (once > 0).float()
        return outcome + credit, {
            "trajectory_size": Metric(values=outcome.abs(), weights=weights),
            "credit_size": Metric(values=credit.abs(), weights=weights),
            "shared_share": Metric(values=batch.signals[f"{self.name}.shared"], weights=once),
            "steps": Metric(
                values=batch.signals[f"{self.name}.steps"], weights=once, reduce="quantiles"
            ),
            "nodes": Metric(values=batch.signals[f"{self.name}.nodes"], weights=once, reduce="max"),
        }

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        advantages, metrics = self.advantages(policy, batch)
        weights = batch.weights[self.name]
        ratio = importance_ratio(policy.logprobs, batch.behaviour_logprobs)
        clip = self._clip()
        terms = [
            Term(
                name=self.name,
                per_token=clip.surrogate(ratio, advantages),
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics={
                    "clipped_share": Metric(values=clip.outside(ratio), weights=weights),
                    "moving_share": Metric(values=(advantages != 0).float(), weights=weights),
                    **metrics,
                },
            )
        ]
        if self.kl_coefficient:
            name = f"{self.name}.kl"
            value = k3(policy.logprobs, target_scores(batch, "reference").logprobs.detach())
            terms.append(
                Term(
                    name=name,
                    per_token=value,
                    weights=batch.weights[name],
                    denominator=denominator_of(self.aggregate),
                    coefficient=self.kl_coefficient,
                    metrics={"k3": Metric(values=value.detach(), weights=weights)},
                )
            )
        return tuple(terms)


def group_advantage(
    rewards: Tensor,
    groups: Tensor,
    how: Literal["zscore", "center"],
    ddof: int,
    *,
    lone: LoneGroup = "zero",
) -> Tensor:
    """[B] rewards and group numbers -> [B] advantages; exactly 0 in groups without a spread."""
    if how == "zscore":
        return group_zscore(rewards, groups, ddof=ddof, lone=lone)
    return group_center(rewards, groups, lone=lone)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrGRPO(GRPO):
    name: ClassVar[str] = "dr_grpo"
    paper: ClassVar[str] = "2503.20783"
    formula: ClassVar[str] = "max(-A r, -A clip(r)), A = reward - mean of its group"

    group: Literal["zscore", "center"] = "center"
    """How a reward becomes an advantage within its group."""

    aggregate: Aggregate = "sequence_sum"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DAPO(GRPO):
    name: ClassVar[str] = "dapo"
    paper: ClassVar[str] = "2503.14476"
    formula: ClassVar[str] = "max(-A r, -A clip(r, 1 - 0.2, 1 + 0.28)), refilled groups"

    clip_high: float = 0.28
    """Upper PPO bound: the ratio is clipped at 1 + clip_high."""

    refill_rounds: int = 2
    """How often a step may draw new prompts for groups whose rewards are all equal."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentGRPO(GRPO):
    """The base that `seed`, `opid` and `surprise` share, with the defaults of verl-agent's code."""

    ddof: int = 1
    """0 = population, 1 = sample standard deviation of a group."""

    clip_dual: float = 3.0
    """A negative advantage costs at most clip_dual * |A| per token; 0 = no bound."""

    kl_coefficient: float = 0.01
    """Weight of k3 to the reference; above 0 a [reference] is needed."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""


def succeeded(batch: Batch, failed_at: float) -> Tensor:
    """Rows of the student's own with a return above `failed_at`: [B] bool."""
    return batch.row_sampled & (batch.rewards > failed_at)
