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
from skills.hindsight.to_items import category_of
from skills.items import SkillItem
from skills.render import Block, RenderOptions, render, render_one
from skills.retrieve import Pick, Retrieval, RetrievalRecord, Retriever, section_of
from teachers.sight import appended, fill, last_user, own_prompt, with_last_user

VIEW = "skill"
"""Name of the tasks' own prompts with a place for one skill."""
MARGIN = 8
"""Tokens that a prompt may grow by where question and block are encoded together."""


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
        if _layout(task) is not None:
            (chosen,) = self.retriever.retrieve([goal], category=category)
            best = first_of(chosen)
            return with_skill(task, best, self.options, self.chat) if best else (task, (), 0)
        most, room = self.options.max_tokens, self._room(task)
        if room <= 0:
            return task, (), 0
        (block,) = blocks_for(
            [goal],
            self.retriever,
            replace(self.options, max_tokens=min(most or room, room)),
            category=category,
            count_tokens=counter_of(self.chat.tokenizer),
        )
        return behind(task, block, self.chat)

    def _room(self, task: Task) -> int:
        """Tokens that are left for skills; whole ones are left out where that is too few."""
        (ids,) = self.chat.prompts([task.prompt], limit=0)
        return self.chat.max_length - len(ids) - MARGIN

    def _category(self, task: Task) -> str | None:
        return None if self.retriever.options.rules else category_of(task) or None


def first_of(found: Retrieval) -> SkillItem | None:
    """The skill that is shown where there is place for one."""
    return next(iter((*found.task, *found.general, *found.mistakes)), None)


def _layout(task: Task) -> str | None:
    """A prompt that the task brings along with a place for one skill."""
    own = own_prompt(task, VIEW)
    return own if own is not None and "{context}" in own else None


def with_skill(
    task: Task, item: SkillItem, options: RenderOptions, chat: Chat
) -> tuple[Task, tuple[str, ...], int]:
    """A task with one skill in its prompt, as it would be shown, however it was chosen; its id, and
    its length. The task as it is where the model has no room for it."""
    layout = _layout(task)
    if layout is not None:
        text = render_one(item, options)
        shown = replace(task, prompt=with_last_user(task, fill(layout, {"context": text})))
        return (shown, (item.id,), len(text)) if fits(shown, chat) else (task, (), 0)
    return behind(
        task, render(_alone(item), options, count_tokens=counter_of(chat.tokenizer)), chat
    )


def behind(task: Task, block: Block, chat: Chat) -> tuple[Task, tuple[str, ...], int]:
    """A task with a block after its question, where there is one and the model has room for it."""
    if not block.text:
        return task, (), 0
    shown = replace(task, prompt=with_last_user(task, appended(task, f"\n\n{block.text}")))
    return (shown, block.shown, block.num_chars) if fits(shown, chat) else (task, (), 0)


def fits(task: Task, chat: Chat) -> bool:
    """Whether the model can read the prompt of a task."""
    return len(chat.prompts([task.prompt], limit=0)[0]) <= chat.max_length


def _alone(item: SkillItem) -> Retrieval:
    """A retrieval that found this skill and nothing else."""
    section = section_of(item)
    found: dict[str, tuple[SkillItem, ...]] = {name: () for name in ("general", "task", "mistake")}
    found[section] = (item,)
    return Retrieval(
        general=found["general"],
        task=found["task"],
        mistakes=found["mistake"],
        record=RetrievalRecord(
            bank_version="",
            mode="template",
            category=item.category,
            picks=(Pick(id=item.id, section=section, rank=1),),
        ),
    )


def render_options(chat: Chat, max_chars: int) -> RenderOptions:
    """How skills are written for a model: its own commands must not appear in them."""
    return RenderOptions(max_chars=max_chars, specials=specials_of(chat.tokenizer))


Act = Callable[[Sequence[Task], str], list[Rollout]]
"""Plays tasks under a key; the draws depend on key, task, sample and turn alone."""
