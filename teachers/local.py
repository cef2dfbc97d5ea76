"""Teachers in this process: a frozen Hugging Face model, or a role of the student's own model."""

from __future__ import annotations

from collections.abc import Sequence

from distill.distributions import HiddenDistribution
from distill.divergence import Distribution
from distill.policy import STUDENT, Policy
from distill.types import ScoreRequest, Scores, TeacherView

EVERYTHING = frozenset({"logprobs", "entropy", "candidates", "own_top_k", "distribution"})


class LocalTeacher:
    """Scores with a role of a policy: `student` of a frozen model, `base`, `ema`, `adapter:NAME`.

    Full distributions are kept as hidden states [N, d]; the head is applied chunk by chunk.
    `num_ids` cuts the head to the ids that student and teacher share, where widths differ by
    padding.
    """

    capabilities = EVERYTHING

    def __init__(
        self, policy: Policy, *, name: str, role: str = STUDENT, num_ids: int | None = None
    ) -> None:
        self.policy = policy
        self.name = name
        self.role = role
        self.num_ids = num_ids

    def score(self, views: Sequence[TeacherView], want: ScoreRequest) -> list[Scores]:
        return self.policy.score(views, self.role, want, self.num_ids)

    def distribution(self, views: Sequence[TeacherView]) -> Distribution:
        hidden, _ = self.policy.hidden(views, self.role)
        return HiddenDistribution(hidden=hidden, head=self.policy.head(self.role).cut(self.num_ids))
