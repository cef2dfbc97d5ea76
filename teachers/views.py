"""What the teacher reads: its own prompt, then the student's response ids, verbatim.

Self-distillation with privileged information is a view, not a loss. The response ids of a view are
copied from the rollout, so both sides score the same tokens by construction; no text is decoded
and encoded again. A view that does not fit is dropped and counted, never cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from distill.errors import ConfigError
from distill.protocols import View
from distill.types import Rollout, TeacherView
from teachers.attempts import WithFeedback, WithPeerSuccess, WithVerdict
from teachers.privileged import WithAnswer, WithContext, WithDemonstration, WithSolution
from teachers.sight import prompt_end, view_of
from teachers.skill_view import WithSkill

__all__ = [
    "VIEWS",
    "Plain",
    "Shuffled",
    "WithAnswer",
    "WithContext",
    "WithDemonstration",
    "WithFeedback",
    "WithPeerSuccess",
    "WithSkill",
    "WithSolution",
    "WithVerdict",
    "view_of",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """The teacher reads exactly what the student read."""

    kind: ClassVar[str] = "plain"

    def build(
        self, rollouts: Sequence[Rollout], contexts: Mapping[str, str]
    ) -> list[TeacherView | None]:
        return [
            view_of(r, r.token_ids[: prompt_end(r)], self.kind) if r.num_trained else None
            for r in rollouts
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffled:
    """A negative control: the teacher reads the prompt of another task of the same step.

    Nothing about the task survives, so a night with this view must not be promoted.
    """

    kind: ClassVar[str] = "shuffled"

    def build(
        self, rollouts: Sequence[Rollout], contexts: Mapping[str, str]
    ) -> list[TeacherView | None]:
        prompts: dict[str, tuple[int, ...]] = {}
        for r in rollouts:
            # A row without trained tokens does not say where its prompt ends; one that begins
            # later shows more than the prompt.
            if (r.num_trained and not r.step) or r.task_id not in prompts:
                prompts[r.task_id] = r.token_ids[: prompt_end(r)]
        names = list(prompts)
        if len(names) < 2:
            raise ConfigError("the view shuffled needs at least two prompts per step")
        other = {name: prompts[names[i - 1]] for i, name in enumerate(names)}
        return [
            view_of(r, other[r.task_id], self.kind) if r.num_trained else None for r in rollouts
        ]


VIEWS: dict[str, type[View]] = {
    "plain": Plain,
    "with_answer": WithAnswer,
    "with_solution": WithSolution,
    "with_demonstration": WithDemonstration,
    "with_feedback": WithFeedback,
    "with_peer_success": WithPeerSuccess,
    "with_verdict": WithVerdict,
    "with_context": WithContext,
    "with_skill": WithSkill,
    "shuffled": Shuffled,
}
