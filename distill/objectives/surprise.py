"""A control for hindsight skills: successes imitate their own surprising tokens, without a skill.

    A_t = A_group + surprise_weight * (-S_t, detached) on trajectories that succeeded

On a success the gap that a skill makes, log p(reply | skill) - log p(reply), is -log p(reply)
wherever the skill gives the reply away, whatever it says. A gain of `opid` over this objective is
evidence that the text of a skill carries information; a gain over `grpo` alone is none. Compare
with the same denominators: this term is worth its weight on every token of a success, as that of
`opid` with over = "all".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from distill.batch import Batch
from distill.errors import ConfigError
from distill.objectives.base import Metric, PolicyView, spread, student_side
from distill.objectives.grpo import GRPO, AgentGRPO, succeeded


@dataclass(frozen=True, kw_only=True, slots=True)
class Surprise(AgentGRPO):
    name: ClassVar[str] = "surprise"
    paper: ClassVar[str] = "-"
    formula: ClassVar[str] = (
        "max(-Ah r, -Ah clip(r)) + c k3, Ah = A - w S on successes: a control without a skill"
    )

    surprise_weight: float = 0.5
    """What the surprise -S of a token of a success adds to its advantage."""

    failed_at: float = 0.0
    """A trajectory failed when its return, after penalties, is at most this."""

    def __post_init__(self) -> None:
        GRPO.__post_init__(self)
        if self.surprise_weight < 0:
            raise ConfigError(
                f"objective.surprise_weight must not be negative, got {self.surprise_weight}"
            )

    def advantages(self, policy: PolicyView, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        outcome, metrics = GRPO.advantages(self, policy, batch)
        good = spread(succeeded(batch, self.failed_at).float(), batch)
        surprise = -student_side(policy, batch) * good
        weights = batch.weights[self.name]
        return outcome + self.surprise_weight * surprise, {
            **metrics,
            "surprise": Metric(values=surprise, weights=weights * good),
            "success_share": Metric(values=good, weights=weights),
        }
