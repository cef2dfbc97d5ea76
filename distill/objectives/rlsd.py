"""Self-distilled reinforcement learning: the verifier gives the direction of an update, the
privileged self-teacher its size (RLSD, arXiv 2604.03128).

    A = z-score of the reward in its group,  w_t = exp(sign(A) (N_t - S_t))
    Ahat_t = A ((1 - mix) + mix clip(w_t, 1 - band, 1 + band)),   loss = clipped surrogate

The teacher reads the final answer and is a snapshot of the student. Since w > 0 the teacher never
turns a direction; a group without a spread stays at 0. `mix` falls to 0 over `decay_steps`, and
then the teacher is not asked any more. The paper's equation 16 states min(w A, clip(w) A) without
a mix; its algorithm and code have the form above.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

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
    spread,
    target_scores,
    with_weights,
)
from distill.objectives.grpo import group_advantage
from distill.types import StepInfo


def reweighted(
    advantages: Tensor,
    gap: Tensor,
    *,
    mix: float,
    band: float,
    form: Literal["algorithm", "eq16"] = "algorithm",
) -> Tensor:
    """Advantages [B, T] resized by the gap N - S [B, T], detached."""
    weight = (advantages.sign() * gap).clamp(-20.0, 20.0).exp()
    clipped = weight.clamp(1.0 - band, 1.0 + band)
    if form == "eq16":
        return (advantages * weight).minimum(advantages * clipped).detach()
    return (advantages * ((1.0 - mix) + mix * clipped)).detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class RLSD:
    name: ClassVar[str] = "rlsd"
    privileged: ClassVar[bool] = True
    corrects: ClassVar[str | None] = "behaviour to current"
    paper: ClassVar[str] = "2604.03128"
    formula: ClassVar[str] = (
        "max(-Ah r, -Ah clip(r)), Ah = A (1 - m + m clip(exp(sign(A) (N - S))))"
    )
    needs: ClassVar[frozenset[str]] = frozenset({"teacher.logprobs", "rewards", "groups"})

    mix: float = 0.5
    """lambda of the paper in [0, 1]: how much of an advantage the teacher resizes at first."""

    decay_steps: int = 50
    """Steps over which mix falls to 0; 0 = never."""

    warmup_steps: int = 0
    """Steps over which mix first rises from 0."""

    band: float = 0.2
    """The teacher's factor is held within [1 - band, 1 + band]."""

    form: Literal["algorithm", "eq16"] = "algorithm"
    """The paper's algorithm, or its equation 16."""

    negative_only: bool = False
    """Resize only advantages below 0; resizing the others shortened replies."""

    ddof: int = 1
    """0 = population, 1 = sample standard deviation of a group."""

    clip_low: float = 0.2
    """Lower PPO bound: the ratio is clipped at 1 - clip_low."""

    clip_high: float = 0.28
    """Upper PPO bound: the ratio is clipped at 1 + clip_high."""

    clip_dual: float = 3.0
    """A negative advantage costs at most clip_dual * |A| per token; 0 = no bound."""

    aggregate: Aggregate = "token"
    """What the loss is a mean over: token, sequence, sequence_sum, trajectory or constant."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.mix <= 1.0:
            raise ConfigError(f"objective.mix must be within [0, 1], got {self.mix}")
        if not 0.0 <= self.band < 1.0:
            raise ConfigError(f"objective.band must be within [0, 1), got {self.band}")
        if self.decay_steps < 0 or self.warmup_steps < 0:
            raise ConfigError("objective.decay_steps and warmup_steps must not be negative")
        if self.ddof not in (0, 1):
            raise ConfigError(f"objective.ddof must be 0 or 1, got {self.ddof}")
        self._clip()

    def _clip(self) -> Clip:
        return Clip(low=self.clip_low, high=self.clip_high, dual=self.clip_dual)

    def mix_at(self, step: int) -> float:
        """The schedule at step 1, 2, ...: up over the warm-up, then down to 0."""
        if step < self.warmup_steps:
            return self.mix * step / self.warmup_steps
        if not self.decay_steps:
            return self.mix
        return self.mix * max(0.0, 1.0 - (step - self.warmup_steps) / self.decay_steps)

    def teacher_active(self, step: StepInfo) -> bool:
        return self.form == "eq16" or self.mix_at(step.step) > 0.0

    def plan(self) -> ForwardPlan:
        return ForwardPlan(entropy=True)

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        rewards, groups = own_rewards(batch, self.name)
        advantages = spread(group_advantage(rewards, groups, "zscore", self.ddof), batch)
        signals = {**batch.signals, self.name: advantages}
        if self.teacher_active(step):
            mix = spread(advantages.new_full((batch.num_rows,), self.mix_at(step.step)), batch)
            signals[f"{self.name}.mix"] = mix
        return with_weights(replace(batch, signals=signals), self.name, self.aggregate), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        advantages, weights = batch.signals[self.name], batch.weights[self.name]
        metrics = {"moving_share": Metric(values=(advantages != 0).float(), weights=weights)}
        mix = batch.signals.get(f"{self.name}.mix")
        if mix is not None:
            gap = target_scores(batch, "teacher").logprobs - policy.logprobs.detach()
            resized = reweighted(
                advantages, gap, mix=float(mix.max()), band=self.band, form=self.form
            )
            if self.negative_only:
                resized = resized.where(advantages < 0, advantages)
            factor = (advantages.sign() * gap).exp()
            outside = (factor < 1.0 - self.band) | (factor > 1.0 + self.band)
            metrics |= {
                "gap": Metric(values=gap, weights=weights),
                "mix": Metric(values=mix, weights=weights),
                "band_share": Metric(values=outside.float(), weights=weights),
            }
            advantages = resized
        ratio = importance_ratio(policy.logprobs, batch.behaviour_logprobs)
        clip = self._clip()
        return (
            Term(
                name=self.name,
                per_token=clip.surrogate(ratio, advantages),
                weights=weights,
                denominator=denominator_of(self.aggregate),
                metrics=metrics
                | {"clipped_share": Metric(values=clip.outside(ratio), weights=weights)},
            ),
        )
