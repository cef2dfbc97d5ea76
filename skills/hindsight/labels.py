"""Labels for a cold start: the policy learns to be its own analyst (SEED, stage 1).

Each labelled episode becomes a task whose prompt is the question to the analyst and whose worked
solution is a good answer, so that `distill` trains on it with the objective `sft`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distill.errors import DataError
from distill.types import Note, Task, task_id
from skills.hindsight.episodes import Episode
from skills.hindsight.parse import EPISODE, STEPS, SUMMARY, ReplyRules, parse_note
from skills.hindsight.prompting import PromptOptions, first_prompt

LEARNABLE = ("train", "evolve")
"""Splits whose episodes may teach; what is judged on the others must not be learnt from them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """Tasks to learn from, and what became of the other episodes."""

    tasks: tuple[Task, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Status of a note, `repeated` (the same question again) or `unreadable` (the label would not
    pass the reply's own rules) -> episodes."""


def label_tasks(
    episodes: Sequence[Episode],
    notes: Sequence[Note],
    rules: ReplyRules,
    options: PromptOptions | None = None,
    *,
    domain: str = "analyst",
    keep_empty: bool = False,
) -> Labels:
    """One task per episode whose note may be learnt: `ok`, with `keep_empty` also `empty` ones.

    `rules` and `options` are those with which the policy will be asked. A label is read back by
    these rules before it is kept. DataError for episodes of a split that is judged on.
    """
    require_learnable(episodes)
    options = options or PromptOptions()
    tasks: dict[str, Task] = {}
    left: Counter[str] = Counter()
    for episode, note in zip(episodes, notes, strict=True):
        if note.traj_id != episode.traj_id:
            raise DataError(
                f"the note about trajectory {note.traj_id} stands beside episode {episode.traj_id};"
                " labels need one note per episode, in the same order"
            )
        if note.status != "ok" and not (keep_empty and note.status == "empty"):
            left[note.status] += 1
            continue
        label = write_label(note, rules)
        parsed = parse_note(label, len(episode.steps), rules)
        if parsed.status != note.status or parsed.episode_skill != note.episode_skill:
            left["unreadable"] += 1
            continue
        task = _task(episode, label, rules, options, domain)
        left["repeated"] += task.id in tasks
        tasks.setdefault(task.id, task)
    return Labels(tasks=tuple(tasks.values()), left_out={k: n for k, n in left.items() if n})


def write_label(note: Note, rules: ReplyRules) -> str:
    """A note as an analyst should have written it: canonical JSON, or the skill in brackets."""
    if rules.format == "slot":
        return f"[{note.episode_skill}]"
    table: dict[str, Any] = {SUMMARY: note.episode_summary, EPISODE: note.episode_skill}
    if rules.max_step_skills:
        chosen = sorted(note.step_skills.items())[: rules.max_step_skills]
        table[STEPS] = {str(step): text for step, text in chosen}
    return json.dumps(table, ensure_ascii=False)


def require_learnable(episodes: Sequence[Episode]) -> None:
    """DataError when an episode belongs to a split that is judged on."""
    for episode in episodes:
        if episode.task.split not in LEARNABLE:
            raise DataError(
                f"episode {episode.traj_id} is of the split {episode.task.split!r}; only "
                f"{' and '.join(LEARNABLE)} may teach, since the others judge what was taught"
            )


def _task(
    episode: Episode, label: str, rules: ReplyRules, options: PromptOptions, domain: str
) -> Task:
    prompt = first_prompt(episode, rules, options).messages
    meta = {"solution": label, "traj_id": episode.traj_id, "outcome": episode.outcome}
    return Task(
        id=task_id(episode.task.env, prompt),
        env=episode.task.env,
        domain=domain,
        split="train",
        prompt=prompt,
        meta=meta,
    )
