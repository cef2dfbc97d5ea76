"""Views that show a text of the task, or one that was handed over for it.

A task that brings its own privileged prompt in `meta["views"]` uses it as it is; otherwise
`template` is appended to the last user message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distill.errors import DataError
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
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WithAnswer(Privileged):
    """The teacher's prompt also holds the task's final answer, and no reasoning."""

    kind: ClassVar[str] = "with_answer"

    template: str = "\n\n(The correct answer is: {answer})"
    view: str = "answer"
    """Name of the task's own prompt for this view."""

    def __post_init__(self) -> None:
        require_placeholders("template", self.template, "answer")

    def shown(self, rollout: Rollout, task: Task, around: Around) -> Shown:
        own = own_prompt(task, self.view)
        if own is not None:
            return Shown(text=own, source="task")
        if task.answer is None:
            raise DataError(
                f"task {task.id} of {task.domain} has no answer, so the view with_answer cannot be "
                "built; map an answer column or choose the view plain"
            )
        text = fill(self.template, {"answer": task.answer})
        return Shown(text=appended(task, text), source="answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class WithSolution(Privileged):
    """The teacher's prompt also holds a worked solution, `meta["solution"]` (OPSD)."""

    kind: ClassVar[str] = "with_solution"

    template: str = (
        "\n\nA worked solution, to be understood and not copied:\n{solution}\n\n"
        "Now work out the answer to the question above in your own way, and check each step."
    )
    view: str = "solution"
    """Name of the task's own prompt for this view."""

    def __post_init__(self) -> None:
        require_placeholders("template", self.template, "solution")

    def shown(self, rollout: Rollout, task: Task, around: Around) -> Shown:
        own = own_prompt(task, self.view)
        if own is not None:
            return Shown(text=own, source="task")
        solution = meta_text(task, "solution")
        if solution is None:
            raise _missing(task, self.kind, "solution")
        text = fill(self.template, {"solution": solution})
        return Shown(text=appended(task, text), source="solution")


@dataclass(frozen=True, kw_only=True, slots=True)
class WithDemonstration(Privileged):
    """The teacher's prompt also holds an expert's reply to this very question (SDFT).

    `meta["demonstration"]`, or `meta["solution"]` where there is none.
    """

    kind: ClassVar[str] = "with_demonstration"

    template: str = (
        "\n\nThis is an example of a good response to the question:\n{demonstration}\n\n"
        "Now respond to the question in your own words, including your own reasoning."
    )
    view: str = "demonstration"
    """Name of the task's own prompt for this view."""

    def __post_init__(self) -> None:
        require_placeholders("template", self.template, "demonstration")

    def shown(self, rollout: Rollout, task: Task, around: Around) -> Shown:
        own = own_prompt(task, self.view)
        if own is not None:
            return Shown(text=own, source="task")
        for source in ("demonstration", "solution"):
            found = meta_text(task, source)
            if found is not None:
                text = fill(self.template, {"demonstration": found})
                return Shown(text=appended(task, text), source=source)
        raise _missing(task, self.kind, "demonstration")


@dataclass(frozen=True, kw_only=True, slots=True)
class WithContext(Privileged):
    """The teacher's prompt also holds a named text, such as a lesson or a skill.

    The first of these that exists: `contexts["CONTEXT/TASK_ID"]` and `contexts["CONTEXT"]`, which
    are handed over for the step; the task's own prompt `meta["views"]["CONTEXT"]`;
    `meta["CONTEXT"]`. An empty text that was handed over for a task means that it has none. A row
    without a text has no view. An own prompt that holds `{context}` is no text but a layout: it
    takes the place of last user message and `template`.
    """

    kind: ClassVar[str] = "with_context"

    context: str = "lesson"
    template: str = "\n\nSomething that helps with questions like this one:\n{context}"

    def __post_init__(self) -> None:
        require_placeholders("template", self.template, "context")

    def shown(self, rollout: Rollout, task: Task, around: Around) -> Shown | None:
        own = own_prompt(task, self.context)
        layout = own if own is not None and "{context}" in own else None
        keys = [k for k in (f"{self.context}/{task.id}", self.context) if k in around.contexts]
        if own is not None and layout is None and not keys:
            return Shown(text=own, source="task")
        text = around.contexts[keys[0]] if keys else meta_text(task, self.context)
        if not text:
            return None
        values = {"context": text}
        told = fill(layout, values) if layout else appended(task, fill(self.template, values))
        return Shown(text=told, source="context" if keys else "meta")


def _missing(task: Task, kind: str, column: str) -> DataError:
    return DataError(
        f"task {task.id} of {task.domain} has no {column}, so the view {kind} cannot be built; "
        "map a solution column or choose another view"
    )
