"""Hindsight skills of two levels as a part of the advantage (OPID, arXiv 2606.26790).

    A_t = A_group + w_episode A^E_t + w_step A^S_t,   A^E, A^S = l_skill,t - S_old,t

All parts are detached and stand inside the clip; the scores are those under the policy that acted.
A token belongs to the skill of its step where there is one, else to that of its episode
(`step_priority`); `additive` scores both and adds both. A row without a skill keeps its group
advantage; a group without a spread still learns from its skills.

The published weights are 0.001. The yaml file of the released code carries 1.0, a thousand times
as much: there a single rare token with a gap of -10 outweighs every reward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from distill.advantages import STD_EPSILON
from distill.batch import Batch
from distill.errors import AlignmentError, ConfigError
from distill.objectives.base import (
    Metric,
    PolicyView,
    State,
    Term,
    importance_ratio,
    present,
    student_side,
    target_scores,
)
from distill.objectives.grpo import GRPO, AgentGRPO
from distill.types import StepInfo

LARGE_WEIGHT = 0.1
"""A larger weight needs `allow_large_weights`."""
STEP = "skill.step"
"""Signal: 1.0 where the skill of a row is that of a step; absent = all are of episodes."""
STEP_VIEWED = "step_skill.viewed"
"""Signal of additive routing: 1.0 where a row has a step skill."""
SCOPES = ("episode", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class OPID(AgentGRPO):
    name: ClassVar[str] = "opid"
    privileged: ClassVar[bool] = True
    keeps_unviewed: ClassVar[bool] = True
    paper: ClassVar[str] = "2606.26790"
    formula: ClassVar[str] = (
        "max(-Ah r, -Ah clip(r)) + c k3, Ah = A + w_E (N - S) or + w_S (N_step - S)"
    )

    w_episode: float = 0.001
    """What the gap N - S under a skill of the episode adds to an advantage."""

    w_step: float = 0.001
    """The same under a skill of the step."""

    allow_large_weights: bool = False
    """Weights above 0.1, a hundred times the published ones, are meant."""

    normalize: bool = False
    """Standardise the gaps of each scope over all its tokens of the step (population)."""

    clip_skill: float = 0.0
    """Bound on a gap, after it was standardised; 0 = none."""

    routing: Literal["step_priority", "additive"] = "step_priority"
    """Step skills go before episode skills, or both are scored and added."""

    over: Literal["all", "skilled"] = "all"
    """The skill part is a mean over all tokens, or over those with a skill: then its weights are
    multiplied by all / skilled."""

    auxiliary: Literal["none", "delta", "importance"] = "none"
    """A loss beside the surrogate, over tokens with a skill, D their gap: -D S (delta), or
    -D exp(S - S_old) (importance)."""

    auxiliary_coefficient: float = 0.0
    """What the auxiliary loss is worth; the paper takes 0."""

    def __post_init__(self) -> None:
        GRPO.__post_init__(self)
        for name, legal in (
            ("routing", ("step_priority", "additive")),
            ("over", ("all", "skilled")),
            ("auxiliary", ("none", "delta", "importance")),
        ):
            if getattr(self, name) not in legal:
                raise ConfigError(
                    f"objective.{name} must be one of {', '.join(legal)}, got "
                    f"{getattr(self, name)!r}"
                )
        for name in ("w_episode", "w_step", "clip_skill", "auxiliary_coefficient"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"objective.{name} must not be negative, got {getattr(self, name)}"
                )
        if self.auxiliary_coefficient and self.auxiliary == "none":
            raise ConfigError(
                f"objective.auxiliary_coefficient is {self.auxiliary_coefficient}, but auxiliary "
                'is "none"; choose "delta" or "importance"'
            )
        largest = max(self.w_episode, self.w_step)
        if largest > LARGE_WEIGHT and not self.allow_large_weights:
            raise ConfigError(
                f"objective.w_episode and w_step are 0.001 in the paper, found {self.w_episode} "
                f"and {self.w_step}; the yaml file of the released code carries 1.0, 1,000 times "
                "the published weight, which trains another method. Set them to 0.001, or "
                f"allow_large_weights = true when more than {LARGE_WEIGHT} is meant"
            )

    def also_needs(self) -> set[str]:
        if not self._active:
            return set()
        needs = {"teacher.logprobs"}
        if self.routing == "additive":
            needs.add("step_skill.logprobs")
        return needs | ({"student.logprobs"} if self.normalize else set())

    @property
    def _active(self) -> bool:
        return max(self.w_episode, self.w_step, self.auxiliary_coefficient) > 0

    def teacher_active(self, step: StepInfo) -> bool:
        return self._active

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        batch, state = GRPO.prepare(self, batch, step, state)
        if not self._active:
            return batch, state
        name, where = self.name, self._routed(batch)
        weights, signals = dict(batch.weights), dict(batch.signals)
        skilled = ((where["episode"] + where["step"]) > 0).float()
        factor = 1.0
        if self.over == "skilled":
            told = float((weights[name] * skilled).sum())
            factor = float(weights[name].sum()) / told if told else 0.0
        signals[f"{name}.factor"] = batch.completion_mask.float() * factor
        for scope in SCOPES:
            signals[f"{name}.{scope}"] = where[scope]
            if self.normalize:
                old = present(batch.behaviour_logprobs, "log-probabilities before the update")
                gap = self._gap(batch, old, scope)[where[scope] > 0]
                mean, std = (gap.mean(), gap.std(correction=0)) if gap.numel() else (0.0, 0.0)
                signals[f"{name}.{scope}.mean"] = where[scope] * mean
                signals[f"{name}.{scope}.std"] = where[scope] * std
        if self.auxiliary_coefficient:
            weights[f"{name}.auxiliary"] = skilled
        return replace(batch, signals=signals, weights=weights), state

    def _routed(self, batch: Batch) -> dict[str, Tensor]:
        """Scope -> [B, T], 1.0 at the trained tokens that have a skill of it."""
        own = (batch.completion_mask & batch.row_sampled[:, None]).float()
        viewed = own * batch.row_viewed[:, None]
        if self.routing == "additive":
            step = batch.signals.get(STEP_VIEWED)
            if step is None:
                raise AlignmentError(
                    f"additive routing needs the signal {STEP_VIEWED!r}, which says where a row "
                    f"has a step skill; found {', '.join(batch.signals) or 'no signals'}; score "
                    'the step skills too, or use routing = "step_priority"'
                )
            return {"episode": viewed, "step": own * (step > 0)}
        step = batch.signals.get(STEP, torch.zeros_like(viewed))
        return {"episode": viewed * (step == 0), "step": viewed * (step > 0)}

    def _gap(self, batch: Batch, old: Tensor, scope: str) -> Tensor:
        """l_skill - S_old of a scope, [B, T] and detached; of no meaning where it has no skill."""
        apart = scope == "step" and self.routing == "additive"
        return (target_scores(batch, "step_skill" if apart else "teacher").logprobs - old).detach()

    def _gaps(self, policy: PolicyView, batch: Batch) -> dict[str, Tensor]:
        """The gap of each scope, 0 where it has no skill."""
        old = student_side(policy, batch)
        return {
            scope: self._gap(batch, old, scope).masked_fill(
                batch.signals[f"{self.name}.{scope}"] == 0, 0.0
            )
            for scope in SCOPES
        }

    def _shaped(self, gap: Tensor, batch: Batch, scope: str) -> Tensor:
        if self.normalize:
            where = batch.signals[f"{self.name}.{scope}"]
            std = batch.signals[f"{self.name}.{scope}.std"]
            gap = (gap - batch.signals[f"{self.name}.{scope}.mean"]) / (std + STD_EPSILON) * where
        return gap.clamp(-self.clip_skill, self.clip_skill) if self.clip_skill else gap

    def advantages(self, policy: PolicyView, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        outcome, metrics = GRPO.advantages(self, policy, batch)
        factor = batch.signals.get(f"{self.name}.factor")
        if factor is None:
            return outcome, metrics
        parts, gaps = {"outcome": outcome}, self._gaps(policy, batch)
        for scope, weight in zip(SCOPES, (self.w_episode, self.w_step), strict=True):
            parts[scope] = weight * factor * self._shaped(gaps[scope], batch, scope)
        metrics |= _shares(parts, batch.weights[self.name])
        for scope, gap in gaps.items():
            where = batch.signals[f"{self.name}.{scope}"]
            metrics[f"{scope}_gap"] = Metric(values=gap, weights=where)
            metrics[f"{scope}_gap_size"] = Metric(values=gap.abs(), weights=where)
            metrics[f"{scope}_token_share"] = Metric(
                values=where, weights=(batch.weights[self.name] > 0).float()
            )
        teacher = target_scores(batch, "teacher").logprobs
        viewed = batch.completion_mask.float() * batch.row_viewed[:, None]
        metrics["teacher_logprob"] = Metric(values=teacher, weights=viewed)
        return parts["outcome"] + parts["episode"] + parts["step"], metrics

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        terms = GRPO.__call__(self, policy, batch)
        name = f"{self.name}.auxiliary"
        if name not in batch.weights:
            return terms
        gap = torch.stack(list(self._gaps(policy, batch).values())).sum(0)
        ratio = importance_ratio(policy.logprobs, batch.behaviour_logprobs)
        value = -gap * (policy.logprobs if self.auxiliary == "delta" else ratio)
        return (
            *terms,
            Term(
                name=name,
                per_token=value,
                weights=batch.weights[name],
                coefficient=self.auxiliary_coefficient,
                metrics={"loss": Metric(values=value.detach(), weights=batch.weights[name])},
            ),
        )


def _shares(parts: dict[str, Tensor], weights: Tensor) -> dict[str, Metric]:
    """Mean, mean size and share of the summed sizes of each part of an advantage [B, T]."""
    total = torch.stack([part.abs() for part in parts.values()]).sum(0)
    out = {}
    for name, part in parts.items():
        share = part.abs() / total.clamp(min=torch.finfo(total.dtype).tiny)
        out[f"{name}_advantage"] = Metric(values=part, weights=weights)
        out[f"{name}_size"] = Metric(values=part.abs(), weights=weights)
        out[f"{name}_share"] = Metric(values=share, weights=weights * total)
    return out
