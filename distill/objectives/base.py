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
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from distill.batch import Batch, TokenScores
from distill.divergence import Divergence, DivergenceSpec
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
Reduce = Literal["mean", "sum", "min", "max", "quantiles"]
State = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPlan:
    """What the policy's forward pass returns besides the log-probabilities of the tokens."""

    entropy: bool = False
    candidates: str = ""
    """Role whose candidate ids the student is to be read at; empty = none."""
    divergences: tuple[DivergenceSpec, ...] = ()

    def __add__(self, other: ForwardPlan) -> ForwardPlan:
        """What serves both. AlignmentError when they need candidates of different roles."""
        if self.candidates and other.candidates and self.candidates != other.candidates:
            raise AlignmentError("two terms need candidates of different roles in one pass")
        return ForwardPlan(
            entropy=self.entropy or other.entropy,
            candidates=self.candidates or other.candidates,
            divergences=self.divergences + other.divergences,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyView:
    """The student's answer to a plan, with gradient. 0 outside the trained tokens."""

    logprobs: Tensor  # [B, T]
    entropy: Tensor | None = None  # [B, T]
    candidate_logprobs: Tensor | None = None  # [B, T, K]
    divergences: Mapping[str, Divergence] = field(default_factory=dict)  # per_token [B, T]


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
    """`needs` names what a step must bring along:

    teacher.logprobs, teacher.entropy           one number per trained token
    teacher.candidates, teacher.own_top_k       the teacher at the student's ids; at its own
    teacher.distribution                        full next-token distributions
    teacher.groups                              groups of equal bytes, from a teacher with another
                                                tokenizer
    reference.logprobs, reference.distribution  the same of a frozen reference
    student.logprobs, .entropy, .candidates     the student before the update
    rewards, groups                             a reward per rollout; several rollouts per prompt
    turns                                       one row per turn, each in a state that has a name
    step_skill.logprobs                         the teacher under the skill of a single step, with
                                                the signal `step_skill.viewed`
    text                                        continuations by a teacher that only writes
    """

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> frozenset[str]: ...

    def plan(self) -> ForwardPlan: ...

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]: ...

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]: ...


def reads_teacher(objective: Objective) -> bool:
    """Whether an objective needs scores or distributions of the teacher at all."""
    return any(need.startswith("teacher.") for need in objective.needs)


def asks_teacher(objective: Objective, step: StepInfo) -> bool:
    """Whether this step uses the teacher. An objective may have `teacher_active(step)`, so that
    nobody scores what a schedule multiplies by zero."""
    if not reads_teacher(objective):
        return False
    active = getattr(objective, "teacher_active", None)
    return True if active is None else bool(active(step))


def option_of(objective: Objective, name: str, default: Any) -> Any:
    """An option that concerns the whole step; of a sum, that of the first part that has it."""
    parts = [part for part, _ in getattr(objective, "parts", ((objective, 1.0),))]
    return next((getattr(part, name) for part in parts if hasattr(part, name)), default)


def candidate_lists(objective: Objective) -> dict[str, tuple[str, int]]:
    """Name of each part that reads k entries per position -> who chooses them, and k."""
    parts = [part for part, _ in getattr(objective, "parts", ((objective, 1.0),))]
    found = {}
    for part in parts:
        for need, who in (("student.candidates", "student"), ("teacher.own_top_k", "teacher")):
            if need in part.needs:
                found[part.name] = (who, int(getattr(part, "k", 0)))
    return found


def num_candidates(objective: Objective) -> int:
    """Entries per position that a step lists; a sum has one list for all its parts."""
    return max((k for _, k in candidate_lists(objective).values()), default=0)


def on_policy_share(objective: Objective) -> float:
    """Share of the prompts that the student answers itself; the rest are worked solutions.

    1 unless an objective says otherwise; 0 for sft alone, which reads nothing else.
    """
    parts = [part for part, _ in getattr(objective, "parts", ((objective, 1.0),))]
    shares = [float(part.on_policy_share) for part in parts if hasattr(part, "on_policy_share")]
    return shares[0] if shares else float(any(part.name != "sft" for part in parts))


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


def with_weights(
    batch: Batch,
    name: str,
    aggregate: Aggregate,
    *,
    skip: int = 0,
    rows: Literal["sampled", "worked", "all"] = "sampled",
) -> Batch:
    """Fill `batch.weights[name]` so that sum(weights) is the aggregate's own denominator.

    token       every trained token of the step counts the same
    sequence    every row counts the same, its tokens share the row's weight
    trajectory  every trajectory counts the same (several rows may belong to one)
    sequence_sum and constant keep weight 1: the sum is divided by the rows, or by nothing.
    `skip` leaves out the first trained tokens of each row. `rows` says which count: those that the
    student wrote, worked solutions, or all; a student never imitates its own words.
    """
    mask = batch.completion_mask
    if skip:
        mask = mask & (mask.cumsum(1) > skip)
    if rows != "all":
        mask = mask & (batch.row_sampled == (rows == "sampled"))[:, None]
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


def student_side(policy: PolicyView, batch: Batch) -> Tensor:
    """The student's log-probabilities before the update, detached: [B, T].

    With one update per batch that is the live pass; with several, what was scored before.
    """
    behaviour = batch.behaviour_logprobs
    return (policy.logprobs if behaviour is None else behaviour).detach()


def importance_ratio(logprobs: Tensor, behaviour: Tensor | None) -> Tensor:
    """exp(S - S_behaviour), exponent within [-20, 20]; without a behaviour the ratio is 1 with the
    gradient of S."""
    reference = (logprobs if behaviour is None else behaviour).detach()
    return torch.exp((logprobs - reference).clamp(-20.0, 20.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """PPO bounds (arXiv 1707.06347): the ratio is held within [1 - low, 1 + high]; with `dual` > 1
    a negative advantage costs at most dual * |A|, and 0 turns that bound off."""

    low: float = 0.2
    high: float = 0.2
    dual: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.low < 1.0 or self.high < 0.0:
            raise ConfigError(
                "objective.clip_low must be within [0, 1) and clip_high not negative, "
                f"got {self.low} and {self.high}"
            )
        if self.dual and self.dual <= 1.0:
            raise ConfigError(f"objective.clip_dual must exceed 1, or be 0, got {self.dual}")

    def surrogate(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """max(-A r, -A clip(r)) per token; A is detached."""
        advantages = advantages.detach()
        clipped = ratio.clamp(1.0 - self.low, 1.0 + self.high)
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        if not self.dual:
            return loss
        return torch.where(advantages < 0, torch.minimum(loss, -advantages * self.dual), loss)

    def outside(self, ratio: Tensor) -> Tensor:
        """1 where the ratio left the bounds: a metric."""
        return ((ratio < 1.0 - self.low) | (ratio > 1.0 + self.high)).float()


def advantage_metrics(advantages: Tensor, weights: Tensor) -> dict[str, Metric]:
    """What every advantage is watched by."""
    return {
        "advantage": Metric(values=advantages, weights=weights),
        "advantage_at": Metric(values=advantages, weights=weights, reduce="quantiles"),
        "advantage_max": Metric(values=advantages.abs(), weights=weights, reduce="max"),
        "positive_share": Metric(values=(advantages > 0).float(), weights=weights),
    }


def divergence_metrics(
    found: Divergence, weights: Tensor, spec: DivergenceSpec
) -> dict[str, Metric]:
    """Value of a divergence; mass on its support and share of clipped entries where it has them."""
    value = found.per_token.detach()
    metrics = {
        "divergence": Metric(values=value, weights=weights),
        "negative_share": Metric(values=(value < -1e-6).float(), weights=weights),
    }
    if spec.support == "top_k":
        metrics["student_mass"] = Metric(values=found.student_mass, weights=weights)
        metrics["teacher_mass"] = Metric(values=found.teacher_mass, weights=weights)
    if spec.entry_clip:
        metrics["clipped_share"] = Metric(values=found.clipped_share, weights=weights)
    return metrics


def own_rewards(batch: Batch, name: str) -> tuple[Tensor, Tensor]:
    """Rewards [B] and group numbers [B] of a group method.

    A failed episode has neither tokens nor a reward, a worked solution has no reward: both are
    taken out of their groups. Raises ConfigError when any other rollout has no reward.
    """
    has_tokens = batch.completion_mask.any(1) & batch.row_sampled
    unrewarded = int((batch.rewards.isnan() & has_tokens).sum())
    if unrewarded:
        raise ConfigError(f"{name} needs a reward for every rollout, {unrewarded} have none")
    groups = batch.row_group.masked_fill(~has_tokens, -1)
    return batch.rewards.masked_fill(~has_tokens, 0.0), groups


def spread(rows: Tensor, batch: Batch) -> Tensor:
    """One value per row at each of its trained tokens: [B] -> [B, T] float32."""
    return batch.completion_mask.float() * rows[:, None]
