"""Views that show attempts: a correct one of the same group, and what was said about this one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from distill.errors import ConfigError
from distill.rows import trajectories
from distill.tokens import Chat
from distill.types import Rollout, Task
from teachers.sight import (
    Around,
    Privileged,
    Shown,
    appended,
    fill,
    meta_text,
    own_prompt,
    require_placeholders,
    runs,
)

FEEDBACK_TEMPLATE = "\n\nFeedback on an earlier attempt at this question:\n{feedback}"
CLOSING = "\n\nNow solve the original question correctly."


@dataclass(frozen=True, kw_only=True, slots=True)
class WithFeedback(Privileged):
    """The teacher also reads what the environment said about this very attempt.

    A row without feedback has no view. The task's own prompt, where it brings one, is filled in at
    `{feedback}`.
    """

    kind: ClassVar[str] = "with_feedback"

    template: str = FEEDBACK_TEMPLATE + CLOSING
    view: str = "feedback"
    """Name of the task's own prompt for this view."""

    def __post_init__(self) -> None:
        require_placeholders("template", self.template, "feedback")

    def shown(self, rollout: Rollout, task: Task, around: Around) -> Shown | None:
        feedback = feedback_of(rollout)
        if not feedback:
            return None
        text = filled(task, self.view, self.template, {"feedback": feedback})
        return Shown(text=text, source="feedback")


@dataclass(frozen=True, kw_only=True, slots=True)
class WithPeerSuccess(Privileged):
    """The teacher also reads a successful attempt of the same group (SDPO).

    The first attempt that earned at least `threshold` and has words left to show. Without one:
    the task's worked solution where `fallback` says so, then feedback on the row itself, else no
    view. The last user message becomes prompt, attempt, feedback and `closing`; the task's own
    prompt, where it brings one, is filled in at `{attempt}` and `{feedback}` instead.
    """

    kind: ClassVar[str] = "with_peer_success"

    threshold: float = 1.0
    exclude_self: bool = True
    """An attempt is never shown to itself; a lone success then counts as no success."""
    fallback: Literal["none", "solution"] = "none"
    feedback: bool = True
    """Show what the environment said of the row itself when there is no attempt to show."""
    feedback_with_success: bool = False
    """Show it beside an attempt or a solution as well."""
    strip_think: bool = True
    """Leave out the thinking of the attempt that is shown."""
    template: str = "\n\nA correct attempt at this question:\n{attempt}"
    feedback_template: str = FEEDBACK_TEMPLATE
    closing: str = CLOSING
    view: str = "peer"
    """Name of the task's own prompt for this view."""

    def __post_init__(self) -> None:
        require_placeholders("template", self.template, "attempt")
        require_placeholders("feedback_template", self.feedback_template, "feedback")

    def shown(self, rollout: Rollout, task: Task, around: Around) -> Shown | None:
        attempt, sources = first_success(self, rollout, around), ["peer"]
        if attempt is None and self.fallback == "solution":
            attempt, sources = meta_text(task, "solution"), ["solution"]
        if attempt is None:
            sources = []
        feedback = None
        if self.feedback and (attempt is None or self.feedback_with_success):
            feedback = feedback_of(rollout)
        if feedback:
            sources.append("feedback")
        if not sources:
            return None
        own = own_prompt(task, self.view)
        if own is not None:
            text = fill(own, {"attempt": attempt or "", "feedback": feedback or ""})
        else:
            text = appended(task, self._blocks(attempt, feedback))
        return Shown(text=text, source="_and_".join(sources))

    def _blocks(self, attempt: str | None, feedback: str | None) -> str:
        blocks = []
        if attempt:
            blocks.append(fill(self.template, {"attempt": attempt}))
        if feedback:
            blocks.append(fill(self.feedback_template, {"feedback": feedback}))
        return "".join(blocks) + self.closing


@dataclass(frozen=True, kw_only=True, slots=True)
class WithVerdict(Privileged):
    """The teacher also reads a correct reply, and whether the attempt that follows is one (AntiSD).

    The reply is the first successful attempt of the same group, else the task's worked solution,
    else its answer; a row with none of them, or without a reward, has no view. The verdict is
    `correct` from `threshold` on and `incorrect` at 0 or below. In between it is `partial` when
    `reward_parts` counts `passed` and `total`, else `share` with the reward in percent of
    `threshold`. The task's own prompt is filled in at `{attempt}` and `{verdict}`.
    """

    kind: ClassVar[str] = "with_verdict"

    threshold: float = 1.0
    exclude_self: bool = True
    """An attempt is never shown to itself; a lone success reads the task's solution."""
    strip_think: bool = True
    """Leave out the thinking of the attempt that is shown."""
    template: str = (
        "\n\nA previous attempt, known to be correct:\n{attempt}\n\n"
        "Assessment of the attempt that follows: {verdict}.\n\nNow solve the question once more."
    )
    correct: str = "correct"
    incorrect: str = "incorrect"
    partial: str = "passes {passed} of {total}"
    share: str = "earns {percent} of 100"
    view: str = "verdict"
    """Name of the task's own prompt for this view."""

    def __post_init__(self) -> None:
        if self.threshold <= 0:
            raise ConfigError(f"view.threshold must be positive, got {self.threshold}")
        require_placeholders("template", self.template, "attempt", "verdict")
        require_placeholders("partial", self.partial, "passed", "total")
        require_placeholders("share", self.share, "percent")

    def shown(self, rollout: Rollout, task: Task, around: Around) -> Shown | None:
        if rollout.reward is None:
            return None
        known = {
            "peer": first_success(self, rollout, around),
            "solution": meta_text(task, "solution"),
            "answer": task.answer,
        }
        for source, attempt in known.items():
            if attempt:
                values = {"attempt": attempt, "verdict": self.verdict(rollout.reward, rollout)}
                return Shown(text=filled(task, self.view, self.template, values), source=source)
        return None

    def verdict(self, reward: float, rollout: Rollout) -> str:
        """What is said of a row that earned `reward`."""
        if reward >= self.threshold:
            return self.correct
        if reward <= 0:
            return self.incorrect
        parts = rollout.reward_parts
        if parts.get("total", 0) > 0 and "passed" in parts:
            count = {name: f"{parts[name]:g}" for name in ("passed", "total")}
            return fill(self.partial, count)
        return fill(self.share, {"percent": f"{100 * reward / self.threshold:.0f}"})


def filled(task: Task, name: str, template: str, values: Mapping[str, str]) -> str:
    """The task's own prompt of that name, else its last user message and `template`, filled in."""
    own = own_prompt(task, name)
    return fill(own, values) if own is not None else appended(task, fill(template, values))


def first_success(
    view: WithPeerSuccess | WithVerdict, rollout: Rollout, around: Around
) -> str | None:
    """Words of the first success in the rollout's group that has any, all its turns; None when
    there is none."""
    for rows in trajectories(around.group):
        last = rows[-1]
        if last.reward is None or last.reward < view.threshold:
            continue
        if view.exclude_self and last.traj_id == rollout.traj_id:
            continue
        turns = [attempt_text(row, view.chat, strip_think=view.strip_think) for row in rows]
        words = "\n".join(turn for turn in turns if turn)
        if words:
            return words
    return None


def attempt_text(rollout: Rollout, chat: Chat, *, strip_think: bool) -> str:
    """The student's words of a row, turns joined by a newline, with or without its thinking."""
    turns = [chat.decode(run) for run in runs(rollout, trained=True)]
    if strip_think:
        turns = [without_thinking(turn) for turn in turns]
    return "\n".join(turn for turn in turns if turn).strip()


def without_thinking(text: str) -> str:
    """A reply without its `<think>...</think>` blocks.

    A block that the prompt has opened ends at a lone `</think>`; one that never ends reaches to
    the end of the reply.
    """
    text = re.sub(r"<think>.*?(?:</think>|\Z)", "", text, flags=re.DOTALL)
    return text.rpartition("</think>")[2].strip()


def feedback_of(rollout: Rollout) -> str | None:
    """What the environment said about the attempt; None when it said nothing."""
    return (rollout.feedback or "").strip() or None
