"""A frozen Hugging Face model in this process, or another role of the student's own model."""

from __future__ import annotations

from collections.abc import Sequence

from distill.divergence import Distribution, HiddenDistribution
from distill.errors import TeacherError
from distill.policy import STUDENT, Policy
from distill.types import ScoreRequest, Scores, TeacherView


class LocalTeacher:
    """Scores with a role of a policy: `student` of a frozen model, or `adapter:NAME`.

    Full distributions are kept as hidden states [N, d]; the head is applied chunk by chunk.
    """

    capabilities = frozenset({"logprobs", "entropy", "distribution"})

    def __init__(self, policy: Policy, *, name: str, role: str = STUDENT) -> None:
        self.policy = policy
        self.name = name
        self.role = role

    def score(self, views: Sequence[TeacherView], want: ScoreRequest) -> list[Scores]:
        if want.candidates or want.candidate_ids is not None:
            raise TeacherError(
                f"the teacher {self.name} offers {', '.join(sorted(self.capabilities))}, "
                "but candidates were asked for"
            )
        return self.policy.score(views, self.role, entropy=want.entropy)

    def distribution(self, views: Sequence[TeacherView]) -> Distribution:
        hidden, _ = self.policy.hidden(views, self.role)
        return HiddenDistribution(hidden=hidden, head=self.policy.head(self.role))
