"""What a privileged view is made of: a prompt of its own, then the student's ids, verbatim.

A view says what the last user message of the teacher's prompt becomes for one rollout; everything
else is shared here: encoding each prompt once, the limit on the whole view, and the reasons why a
row got none.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from distill.errors import ConfigError, DataError
from distill.tokens import Chat
from distill.types import Message, Rollout, Task, TeacherView

TaskOf = Callable[[str], Task]
"""Finds the task of a rollout by id."""

Outcome = Literal["built", "too_long", "without_context", "untrained"]


def view_of(
    rollout: Rollout, prompt: Sequence[int], kind: str, *, start: int | None = None
) -> TeacherView:
    """The rollout with another prompt in place of its first `start` tokens; by default of those
    that are the task's own prompt."""
    start = prompt_end(rollout) if start is None else start
    token_ids = (*prompt, *rollout.token_ids[start:])
    offset = len(prompt) - start
    positions = tuple(i + offset for i, m in enumerate(rollout.completion_mask) if m)
    digest = hashlib.sha256(f"{kind}:{token_ids}".encode()).hexdigest()[:16]
    return TeacherView(token_ids=token_ids, positions=positions, kind=kind, id=digest)


def response_start(rollout: Rollout) -> int:
    """Index of the first trained token; the length of a row without one."""
    try:
        return rollout.completion_mask.index(True)
    except ValueError:
        return len(rollout.token_ids)


def prompt_end(rollout: Rollout) -> int:
    """Leading tokens that another prompt of the task takes the place of. What follows up to the
    first trained token is the conversation so far, in the ids that the student read."""
    return rollout.prompt_length or response_start(rollout)


def runs(rollout: Rollout, *, trained: bool) -> list[tuple[int, ...]]:
    """The row's unbroken runs of trained tokens (its replies), or of all others, in order."""
    found: list[list[int]] = []
    inside = False
    for token, mask in zip(rollout.token_ids, rollout.completion_mask, strict=True):
        if mask is trained:
            if not inside:
                found.append([])
            found[-1].append(token)
        inside = mask is trained
    return [tuple(run) for run in found]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What the teacher is to read for one rollout."""

    text: str
    """The last user message of its prompt."""
    source: str
    """Where the privileged part came from: `task` for a prompt that the task brought along."""
    kind: str = ""
    """Kind of the view where it is not always the same."""
    at_the_end: bool = False
    """The text stands at the end of the whole conversation, just before the student's turn,
    instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What became of one rollout: its view, or why it has none."""

    outcome: Outcome
    view: TeacherView | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """What surrounds one rollout: its group, itself included, and the texts of the step."""

    group: Sequence[Rollout]
    contexts: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Privileged(ABC):
    """Base of the views whose prompt holds what the student did not read.

    The acting prompt never changes. A whole view, response included, has at most `max_length`
    tokens; a longer one is dropped and counted, never cut.
    """

    kind: ClassVar[str]

    chat: Chat
    task_of: TaskOf
    max_length: int = 2048

    @abstractmethod
    def shown(self, rollout: Rollout, task: Task, around: Around) -> Shown | None:
        """The last user message for one rollout; None when there is nothing to show."""

    def build(
        self, rollouts: Sequence[Rollout], contexts: Mapping[str, str]
    ) -> list[TeacherView | None]:
        return [sight.view for sight in self.look(rollouts, contexts)]

    def build_counted(
        self, rollouts: Sequence[Rollout], contexts: Mapping[str, str]
    ) -> tuple[list[TeacherView | None], dict[str, float]]:
        """The views, and how many were built or not, and from what (see `counts`)."""
        sights = self.look(rollouts, contexts)
        return [sight.view for sight in sights], counts(sights)

    def look(self, rollouts: Sequence[Rollout], contexts: Mapping[str, str]) -> list[Sight]:
        """One sight per rollout. Raises DataError when a task lacks what the view shows."""
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout)
        tasks = {r.task_id: self.task_of(r.task_id) for r in rollouts if r.num_trained}
        shown = [
            self.shown(r, tasks[r.task_id], Around(group=groups[r.group_id], contexts=contexts))
            if r.num_trained
            else None
            for r in rollouts
        ]
        wanted = {
            _place(r, s): _messages(tasks[r.task_id], r, s)
            for r, s in zip(rollouts, shown, strict=True)
            if s is not None
        }
        # The privileged prompt has a limit of its own, so the student's is not applied.
        encoded = self.chat.prompts(list(wanted.values()), limit=0)
        prompts = dict(zip(wanted, encoded, strict=True))
        out = []
        for rollout, what in zip(rollouts, shown, strict=True):
            if what is None:
                missing: Outcome = "without_context" if rollout.num_trained else "untrained"
                out.append(Sight(outcome=missing))
                continue
            start = response_start(rollout) if _is_whole(rollout, what) else None
            prompt = prompts[_place(rollout, what)]
            view = view_of(rollout, prompt, what.kind or self.kind, start=start)
            if len(view.token_ids) > self.max_length:
                out.append(Sight(outcome="too_long", source=what.source))
            else:
                out.append(Sight(outcome="built", view=view, source=what.source))
        return out


def _is_whole(rollout: Rollout, shown: Shown) -> bool:
    """Whether all that the student read is written anew: history was rewritten behind the prompt,
    or the text stands at its end. Else only the task's prompt is exchanged."""
    return bool(rollout.history) and (shown.at_the_end or not rollout.prompt_length)


def _place(rollout: Rollout, shown: Shown) -> tuple[str, str, tuple[Message, ...]]:
    """What a privileged prompt depends on."""
    history = rollout.history if _is_whole(rollout, shown) else ()
    return rollout.task_id, shown.text, history


def _messages(task: Task, rollout: Rollout, shown: Shown) -> tuple[Message, ...]:
    if not _is_whole(rollout, shown):
        return with_last_user(task, shown.text)
    if not shown.at_the_end:
        return (*with_last_user(task, shown.text), *rollout.history)
    *before, last = rollout.history
    return (*task.prompt, *before, replace(last, content=shown.text))


def counts(sights: Sequence[Sight]) -> dict[str, float]:
    """Rows with trained tokens by what became of their views, and built views by source.

    `view/built`, `view/too_long` and `view/without_context` add up to these rows;
    `view/from_SOURCE` add up to `view/built`.
    """
    found = Counter(sight.outcome for sight in sights)
    names: tuple[Outcome, ...] = ("built", "too_long", "without_context")
    sources = Counter(s.source for s in sights if s.outcome == "built")
    return {f"view/{name}": float(found[name]) for name in names} | {
        f"view/from_{source}": float(number) for source, number in sorted(sources.items())
    }


def last_user(task: Task) -> int:
    """Index of the last user message of a prompt; of its last message when no user speaks."""
    spoken = [i for i, message in enumerate(task.prompt) if message.role == "user"]
    return spoken[-1] if spoken else len(task.prompt) - 1


def with_last_user(task: Task, text: str) -> tuple[Message, ...]:
    """The task's prompt with another last user message."""
    at = last_user(task)
    changed = replace(task.prompt[at], content=text)
    return (*task.prompt[:at], changed, *task.prompt[at + 1 :])


def appended(task: Task, text: str) -> str:
    """The last user message with a text after it."""
    return task.prompt[last_user(task)].content + text


def own_prompt(task: Task, name: str) -> str | None:
    """The last user message of a privileged prompt that the task brings along, by name."""
    return text_of(task, task.meta.get("views", {}), name)


def meta_text(task: Task, key: str) -> str | None:
    """A text of the task's metadata; None when it is missing or empty."""
    return text_of(task, task.meta, key)


def text_of(task: Task, table: Mapping[str, Any], key: str) -> str | None:
    """A text of a table; None when missing or empty. Raises DataError when it is no text."""
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"task {task.id} of {task.domain}: {key!r} must be text to be shown to a teacher, "
            f"found {value!r}"
        )
    return value or None


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with each `{name}` of the values replaced, once; other braces stay."""
    names = "|".join(re.escape(name) for name in values)
    return re.sub(rf"\{{({names})\}}", lambda found: values[found[1]], template)


def require_placeholders(option: str, template: str, *names: str) -> None:
    """Raise ConfigError unless a template of [view] holds `{name}` for every name."""
    for name in names:
        if f"{{{name}}}" not in template:
            raise ConfigError(f"view.{option} must contain {{{name}}}, got {template!r}")
