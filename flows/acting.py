"""Skills in the acting prompt (SkillRL): what the student reads besides the task itself.

Training, evaluation and `distill skills retrieve --render` write the same block with the same
functions, so that a champion is served with what it was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distill.tokens import Chat
from distill.types import Rollout, Task
from flows.skills_showing import blocks_for, counter_of, specials_of
from skills.items import SkillItem
from skills.render import RenderOptions, render_one
from skills.retrieve import Retrieval, Retriever
from teachers.sight import appended, fill, last_user, own_prompt, with_last_user

VIEW = "skill"
"""Name of the tasks' own prompts with a place for one skill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """Tasks as the student reads them, and the skills that each of them shows."""

    tasks: list[Task]
    skills: Mapping[str, tuple[str, ...]]
    """Task id -> ids of its skills."""
    num_chars: int = 0

    def mark(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rows with the skills that stood in their prompts."""
        return [
            replace(r, skill_ids=self.skills[r.task_id]) if self.skills.get(r.task_id) else r
            for r in rollouts
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class SkillPrompts:
    """Puts the skills of one bank version into prompts.

    A task that brings a prompt of its own with `{context}` shows the first skill there; any other
    task shows the whole block after its question. The category of a task is its `meta["key"]`, or
    its domain, unless a table of words decides.
    """

    retriever: Retriever
    chat: Chat
    options: RenderOptions = field(default_factory=RenderOptions)

    def show(self, tasks: Sequence[Task]) -> Shown:
        found = {task.id: self._one(task) for task in tasks}
        return Shown(
            tasks=[found[task.id][0] for task in tasks],
            skills={name: ids for name, (_, ids, _) in found.items()},
            num_chars=sum(size for _, _, size in found.values()),
        )

    def _one(self, task: Task) -> tuple[Task, tuple[str, ...], int]:
        goal, category = task.prompt[last_user(task)].content, self._category(task)
        layout = own_prompt(task, VIEW)
        if layout is not None and "{context}" in layout:
            (chosen,) = self.retriever.retrieve([goal], category=category)
            best = first_of(chosen)
            return with_skill(task, best, self.options) if best else (task, (), 0)
        (block,) = blocks_for(
            [goal],
            self.retriever,
            self.options,
            category=category,
            count_tokens=counter_of(self.chat.tokenizer),
        )
        if not block.text:
            return task, (), 0
        prompt = with_last_user(task, appended(task, f"\n\n{block.text}"))
        return replace(task, prompt=prompt), block.shown, block.num_chars

    def _category(self, task: Task) -> str | None:
        return None if self.retriever.options.rules else category_of(task) or None


def category_of(task: Task) -> str:
    """The category of a task's skills: its routing key, or its domain."""
    return str(task.meta.get("key") or task.domain)


def first_of(found: Retrieval) -> SkillItem | None:
    """The skill that is shown where there is place for one."""
    return next(iter((*found.task, *found.general, *found.mistakes)), None)


def with_skill(
    task: Task, item: SkillItem, options: RenderOptions
) -> tuple[Task, tuple[str, ...], int]:
    """A task with one skill in its prompt, however it was chosen; its id, and its length."""
    text = render_one(item, options)
    layout = own_prompt(task, VIEW)
    if layout is not None and "{context}" in layout:
        prompt = with_last_user(task, fill(layout, {"context": text}))
    else:
        prompt = with_last_user(task, appended(task, f"\n\n{text}"))
    return replace(task, prompt=prompt), (item.id,), len(text)


def render_options(chat: Chat, max_chars: int) -> RenderOptions:
    """How skills are written for a model: its own commands must not appear in them."""
    return RenderOptions(max_chars=max_chars, specials=specials_of(chat.tokenizer))


Act = Callable[[Sequence[Task], str], list[Rollout]]
"""Plays tasks under a key; the draws depend on key, task, sample and turn alone."""
