"""Hindsight skills as a self-teacher beside GRPO (SEED, arXiv 2607.14777).

    D_t = l_skill,t - S_t,   g_t = sigmoid(beta D_t), detached
    L = GRPO + skill_coefficient * sum m_t g_t (sg[l_skill,t] - S_t) / sum m_t

`l_skill` are the scores of the sampled tokens under a prompt that also holds what was learned from
the finished trajectory; they arrive as role `teacher` and stay as they were scored, while `S` is
the live student's. `m` leaves out rows without a skill, which keep their GRPO part. The gradient
towards S is -m g / sum m: a sigmoid gate never pushes a token down, and pushes one by half where a
skill says nothing. `signed` (weight D) and `centered` (2 g - 1) can push down. The value of the
term may be negative and says nothing about divergence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from distill.batch import Batch
from distill.errors import ConfigError
from distill.objectives.base import Metric, PolicyView, State, Term, target_scores, with_weights
from distill.objectives.grpo import GRPO, AgentGRPO, succeeded
from distill.types import StepInfo

Gate = Literal["sigmoid", "signed", "centered"]
LONG_TEXT = 1200
"""Characters above which a skill counts as long."""
REWARD_BOUND = 2.0


def skill_gate(gap: Tensor, kind: Gate, beta: float, bound: float = 0.0) -> Tensor:
    """Weight of each token from its gap D, detached: any shape -> the same.

    sigmoid: sigmoid(beta D) in (0, 1); centered: 2 sigmoid(beta D) - 1 in (-1, 1); signed: D, held
    within [-bound, bound] unless `bound` is 0.
    """
    gap = gap.detach()
    if kind == "signed":
        return gap.clamp(-bound, bound) if bound else gap
    gate = torch.sigmoid(beta * gap)
    return gate if kind == "sigmoid" else 2.0 * gate - 1.0


def analyst_reward(
    gain: float,
    text: str,
    *,
    valid: bool,
    failed: bool,
    coefficient: float = 1.0,
    bonus: float = 0.2,
    penalty: float = 0.2,
    on_failure: Literal["zero", "negate"] = "zero",
) -> float:
    """What the author of a skill earns: coefficient * gain + bonuses - penalty, within +-2.

    `gain` is the mean gain in log-probability of the trajectory's tokens under the skill, in nats;
    of a failed trajectory it counts 0 or is negated. One bonus for an answer that could be read
    (`valid`), one for a text that is not blank; the penalty for more than 1,200 characters. SEED's
    optional `skill_gen`; its scripts set both bonuses to 0.
    """
    if on_failure not in ("zero", "negate"):
        raise ConfigError(f"on_failure must be zero or negate, got {on_failure!r}")
    if failed:
        gain = -gain if on_failure == "negate" else 0.0
    reward = coefficient * gain + bonus * valid + bonus * bool(text.strip())
    reward -= penalty * (len(text) > LONG_TEXT)
    return max(-REWARD_BOUND, min(REWARD_BOUND, reward))


@dataclass(frozen=True, kw_only=True, slots=True)
class SEED(AgentGRPO):
    name: ClassVar[str] = "seed"
    privileged: ClassVar[bool] = True
    keeps_unviewed: ClassVar[bool] = True
    paper: ClassVar[str] = "2607.14777"
    formula: ClassVar[str] = (
        "max(-A r, -A clip(r)) + c k3 + l sigmoid(beta (N - S)) (N - S), the gate detached"
    )

    skill_coefficient: float = 0.01
    """What the skill term is worth; 0 = plain GRPO, and no teacher is asked."""

    gate: Gate = "sigmoid"
    """Weight of a token from its gap D = N - S: sigmoid(beta D), D itself (signed), or
    2 sigmoid(beta D) - 1 (centered)."""

    beta: float = 5.0
    """Sharpness of the gate; nothing to `signed`."""

    clip_gap: float = 0.0
    """Bound on the weights of the signed gate; 0 = none."""

    over: Literal["skilled", "all"] = "skilled"
    """The skill term is a mean over the tokens that have a skill, or over all tokens."""

    start_step: int = 1
    """First step with the skill term."""

    stop_step: int = 0
    """Last step with the skill term; 0 = to the end."""

    failed_only: bool = False
    """Only failed trajectories learn from their skill."""

    failed_only_after: int = 0
    """The same, but only after this step; 0 = never."""

    failed_at: float = 0.0
    """A trajectory failed when its return, after penalties, is at most this."""

    def __post_init__(self) -> None:
        GRPO.__post_init__(self)
        if self.gate not in ("sigmoid", "signed", "centered"):
            raise ConfigError(
                f"objective.gate must be sigmoid, signed or centered, got {self.gate!r}"
            )
        if self.over not in ("skilled", "all"):
            raise ConfigError(f"objective.over must be skilled or all, got {self.over!r}")
        for name in ("skill_coefficient", "clip_gap", "stop_step", "failed_only_after"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"objective.{name} must not be negative, got {getattr(self, name)}"
                )
        if not self.beta > 0:
            raise ConfigError(f"objective.beta must be positive, got {self.beta}")
        if self.clip_gap and self.gate != "signed":
            raise ConfigError(
                f"objective.clip_gap bounds the signed gate only, but gate = {self.gate!r} is "
                'bounded by itself; use gate = "signed" or clip_gap = 0'
            )
        if self.start_step < 1 or 0 < self.stop_step < self.start_step:
            raise ConfigError(
                "objective.start_step must be at least 1 and stop_step 0 or not before it, got "
                f"{self.start_step} and {self.stop_step}"
            )

    def also_needs(self) -> set[str]:
        return {"teacher.logprobs"} if self.skill_coefficient else set()

    def teacher_active(self, step: StepInfo) -> bool:
        late = self.stop_step and step.step > self.stop_step
        return bool(self.skill_coefficient) and step.step >= self.start_step and not late

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        batch, state = GRPO.prepare(self, batch, step, state)
        if not self.teacher_active(step):
            return batch, state
        rows = batch.row_viewed & batch.row_sampled
        late = self.failed_only_after and step.step > self.failed_only_after
        if self.failed_only or late:
            rows = rows & ~succeeded(batch, self.failed_at)
        skilled = (batch.completion_mask & rows[:, None]).float()
        name = f"{self.name}.skill"
        batch = with_weights(batch, name, "token")
        if self.over == "skilled":
            batch = replace(batch, weights={**batch.weights, name: skilled})
        return replace(batch, signals={**batch.signals, name: skilled}), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        terms = GRPO.__call__(self, policy, batch)
        skilled = batch.signals.get(f"{self.name}.skill")
        return terms if skilled is None else (*terms, self._skill_term(policy, batch, skilled))

    def _skill_term(self, policy: PolicyView, batch: Batch, skilled: Tensor) -> Term:
        gap = target_scores(batch, "teacher").logprobs.detach() - policy.logprobs
        gap = gap.masked_fill(skilled == 0, 0.0)
        gate = skill_gate(gap, self.gate, self.beta, self.clip_gap)
        more = (torch.sigmoid(self.beta * gap.detach()) > 0.5).float()
        own = (batch.completion_mask & batch.row_sampled[:, None]).float()
        name = f"{self.name}.skill"
        return Term(
            name=name,
            per_token=gate * gap,
            weights=batch.weights[name],
            coefficient=self.skill_coefficient,
            metrics={
                "gate": Metric(values=gate, weights=skilled),
                "gate_active_share": Metric(values=more, weights=skilled),
                "gap": Metric(values=gap.detach(), weights=skilled),
                "gap_at": Metric(values=gap.detach(), weights=skilled, reduce="quantiles"),
                "token_share": Metric(values=skilled, weights=own),
            },
        )
