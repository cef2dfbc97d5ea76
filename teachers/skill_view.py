"""The view of hindsight skills: what somebody learned from the finished trajectory (SEED, OPID).

The skill is never in the acting prompt. The texts of a step are handed over as contexts:
`skill/TRAJECTORY` for the whole episode and `skill/TRAJECTORY/TURN` for one of its turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from distill.errors import ConfigError
from distill.notes import EPISODE_SKILL, STEP_SKILL, context_key
from distill.types import Rollout, Task
from teachers.sight import (
    Around,
    Privileged,
    Shown,
    appended,
    fill,
    own_prompt,
    require_placeholders,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WithSkill(Privileged):
    """The teacher's prompt also holds the skill of this very trajectory.

    `episode` shows the skill of the whole episode, `step` that of the row's first turn, and
    `episode_step` the latter where there is one, else the former (critical steps first). A row
    without a skill has no view. The skill of an episode stands after the task, that of a turn just
    before the student speaks; a task that brings a prompt of its own with `{context}` shows both
    there.
    """

    kind: ClassVar[str] = "with_skill"

    scope: Literal["episode", "step", "episode_step"] = "episode"
    template: str = "\n\nWhat an earlier attempt at this task has taught:\n{context}"
    step_template: str = "\n\nWhat an earlier attempt has taught about this moment:\n{context}"
    view: str = "skill"
    """Name of the task's own prompt for this view."""

    def __post_init__(self) -> None:
        require_placeholders("template", self.template, "context")
        require_placeholders("step_template", self.step_template, "context")
        if self.scope not in ("episode", "step", "episode_step"):
            raise ConfigError(
                f"view.scope must be episode, step or episode_step, got {self.scope!r}"
            )

    def shown(self, rollout: Rollout, task: Task, around: Around) -> Shown | None:
        for kind, turn in self._order(rollout):
            text = around.contexts.get(context_key(rollout.traj_id, turn))
            if text:
                return self._shown(rollout, task, text, kind)
        return None

    def _order(self, rollout: Rollout) -> list[tuple[str, int | None]]:
        episode: list[tuple[str, int | None]] = [(EPISODE_SKILL, None)]
        step: list[tuple[str, int | None]] = [(STEP_SKILL, rollout.step)]
        return {"episode": episode, "step": step, "episode_step": step + episode}[self.scope]

    def _shown(self, rollout: Rollout, task: Task, text: str, kind: str) -> Shown:
        values = {"context": text}
        own = own_prompt(task, self.view)
        if own is not None and "{context}" in own:
            return Shown(text=fill(own, values), source=kind, kind=kind)
        if kind == STEP_SKILL and rollout.history:
            end = rollout.history[-1].content + fill(self.step_template, values)
            return Shown(text=end, source=kind, kind=kind, at_the_end=True)
        template = self.template if kind == EPISODE_SKILL else self.step_template
        return Shown(text=appended(task, fill(template, values)), source=kind, kind=kind)
