"""What the teacher reads: its own prompt, then the student's response ids, verbatim.

Self-distillation with privileged information is a view, not a loss. The response ids of a view are
copied from the rollout, so both sides score the same tokens by construction; no text is decoded
and encoded again. A view that does not fit is dropped and counted, never cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from distill.errors import ConfigError, DataError
from distill.protocols import View
from distill.tokens import Chat
from distill.types import Message, Rollout, Task, TeacherView

TaskOf = Callable[[str], Task]
"""Finds the task of a rollout by id."""


def view_of(rollout: Rollout, prompt: Sequence[int], kind: str) -> TeacherView:
    """The rollout with another prompt in front of its first trained token's context."""
    start = _response_start(rollout)
    token_ids = (*prompt, *rollout.token_ids[start:])
    shift = len(prompt) - start
    positions = tuple(i + shift for i, m in enumerate(rollout.completion_mask) if m)
    digest = hashlib.sha256(f"{kind}:{token_ids}".encode()).hexdigest()[:16]
    return TeacherView(token_ids=token_ids, positions=positions, kind=kind, id=digest)


def _response_start(rollout: Rollout) -> int:
    try:
        return rollout.completion_mask.index(True)
    except ValueError:
        return len(rollout.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """The teacher reads exactly what the student read."""

    kind: ClassVar[str] = "plain"

    def build(
        self, rollouts: Sequence[Rollout], contexts: Mapping[str, str]
    ) -> list[TeacherView | None]:
        return [
            view_of(r, r.token_ids[: _response_start(r)], self.kind) if r.num_trained else None
            for r in rollouts
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class WithAnswer:
    """The teacher's prompt also holds the task's answer.

    A task that brings its own privileged prompt (`meta["views"]["answer"]`) uses it; otherwise
    `template` is appended to the last user message. The answer never enters the acting prompt.
    """

    kind: ClassVar[str] = "with_answer"

    chat: Chat
    task_of: TaskOf
    template: str = "\n\n(The correct answer is: {answer})"
    view: str = "answer"
    max_length: int = 2048

    def __post_init__(self) -> None:
        if "{answer}" not in self.template:
            raise ConfigError(f"view.template must contain {{answer}}, got {self.template!r}")

    def build(
        self, rollouts: Sequence[Rollout], contexts: Mapping[str, str]
    ) -> list[TeacherView | None]:
        cache: dict[str, tuple[int, ...]] = {}
        out: list[TeacherView | None] = []
        for rollout in rollouts:
            if not rollout.num_trained:
                out.append(None)
                continue
            if rollout.task_id not in cache:
                # The privileged prompt has a limit of its own; beyond it the view is dropped.
                (ids,) = self.chat.prompts([self._messages(rollout.task_id)], limit=0)
                cache[rollout.task_id] = ids
            view = view_of(rollout, cache[rollout.task_id], self.kind)
            out.append(view if len(view.token_ids) <= self.max_length else None)
        return out

    def _messages(self, task_id: str) -> tuple[Message, ...]:
        task = self.task_of(task_id)
        last = task.prompt[-1]
        own = task.meta.get("views", {}).get(self.view)
        if own is None and task.answer is None:
            raise DataError(
                f"task {task.id} of {task.domain} has no answer, so the view with_answer cannot be "
                "built; map an answer column or choose the view plain"
            )
        text = own if own is not None else last.content + self.template.format(answer=task.answer)
        return (*task.prompt[:-1], Message(role=last.role, content=text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffled:
    """A negative control: the teacher reads the prompt of another task of the same step.

    Nothing about the task survives, so a night with this view must not be promoted.
    """

    kind: ClassVar[str] = "shuffled"

    def build(
        self, rollouts: Sequence[Rollout], contexts: Mapping[str, str]
    ) -> list[TeacherView | None]:
        prompts = {r.group_id: r.token_ids[: _response_start(r)] for r in rollouts}
        names = list(prompts)
        if len(names) < 2:
            raise ConfigError("the view shuffled needs at least two prompts per step")
        other = {name: prompts[names[i - 1]] for i, name in enumerate(names)}
        return [
            view_of(r, other[r.group_id], self.kind) if r.num_trained else None for r in rollouts
        ]


VIEWS: dict[str, type[View]] = {
    "plain": Plain,
    "with_answer": WithAnswer,
    "shuffled": Shuffled,
}
