"""The analyst that knows: the lessons that tasks bring along, and wrong ones as a control.

A gain with true lessons only means something beside a run with lessons of other tasks: a term that
pushes down whatever was sampled can help by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from distill.errors import ConfigError
from distill.types import Note, Task
from skills.hindsight.analysts import no_note
from skills.hindsight.checks import step_lessons_of
from skills.hindsight.episodes import Episode
from skills.hindsight.prompting import meta_text
from skills.items import normal


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleAnalyst:
    """Writes `meta["lesson"]`, and for steps whose state is known `meta["step_lessons"]`.

    With `wrong="random"` every lesson is replaced by another one of the step's tasks and of `pool`,
    of the same domain where there is any. The draw depends on (`seed`, step, trajectory, place)
    only. An episode for which there is no other lesson gets an `empty` note.
    """

    wrong: Literal["", "random"] = ""
    steps: bool = True
    """Also write the lessons of single steps."""
    max_step_skills: int = 0
    """At most so many of them, the first ones; 0 is no limit."""
    seed: int = 0
    pool: Sequence[Task] = ()

    def __post_init__(self) -> None:
        if self.wrong not in ("", "random"):
            raise ConfigError(f"wrong lessons are drawn at 'random' or not at all: {self.wrong!r}")

    @property
    def author(self) -> str:
        return f"rule:{self.wrong}" if self.wrong else "rule"

    def write(self, episodes: Sequence[Episode], *, step: int) -> list[Note]:
        others = _Others([*(e.task for e in episodes), *self.pool]) if self.wrong else None
        return [self._note(episode, step, others) for episode in episodes]

    def _note(self, episode: Episode, step: int, others: _Others | None) -> Note:
        lesson = meta_text(episode.task, "lesson") or ""
        known = step_lessons_of(episode.task) if self.steps else {}
        at = {
            number: known[turn.state]
            for number, turn in enumerate(episode.steps)
            if turn.state is not None and known.get(turn.state)
        }
        if self.max_step_skills:
            at = dict(list(at.items())[: self.max_step_skills])
        if others is not None:
            key = f"{self.seed}/{step}/{episode.traj_id}"
            lesson = others.lesson(lesson, episode.task, key) if lesson else ""
            drawn = {n: others.at_step(x, episode.task, f"{key}/{n}") for n, x in at.items()}
            at = {number: text for number, text in drawn.items() if text}
        if not lesson and not at:
            why = "there is no other lesson to draw" if others else "the task has no lesson"
            return no_note(episode, "empty", why)
        return Note(
            traj_id=episode.traj_id,
            outcome=episode.outcome,
            status="ok",
            episode_skill=lesson,
            step_skills=at,
            author=self.author,
        )


class _Others:
    """The lessons of some tasks, to draw a different one from."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        distinct = {task.id: task for task in tasks}.values()
        self._lessons = {(t.domain, x) for t in distinct if (x := meta_text(t, "lesson"))}
        self._steps = {(t.domain, x) for t in distinct for x in step_lessons_of(t).values() if x}

    def lesson(self, own: str, task: Task, key: str) -> str:
        return _drawn(self._lessons, {normal(own)}, task.domain, f"{key}/lesson")

    def at_step(self, own: str, task: Task, key: str) -> str:
        return _drawn(self._steps, {normal(own)}, task.domain, f"{key}/step")


def _drawn(texts: set[tuple[str, str]], own: set[str], domain: str, key: str) -> str:
    """One of the other texts, all equally likely; empty when there is none."""
    near = sorted({text for d, text in texts if d == domain and normal(text) not in own})
    far = near or sorted({text for _, text in texts if normal(text) not in own})
    if not far:
        return ""
    digest = hashlib.sha256(key.encode()).digest()
    return far[int.from_bytes(digest[:8], "big") % len(far)]
