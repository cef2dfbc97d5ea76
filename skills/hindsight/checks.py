"""What a note must not hold: the answer, what nobody could know yet, personal data, commands.

A note that gives the answer away teaches tokens that cannot be inferred from the question; a skill
of one step that was written with the next observation in view does the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from distill.errors import ConfigError, DataError
from distill.types import Note, Task
from skills.hindsight.episodes import Episode, last_user_text
from skills.hindsight.prompting import meta_text
from skills.items import SkillItem, normal
from skills.render import neutral
from skills.safety import MIN_ANSWER, QUOTED_WORDS, Secrets, fold, inspect, is_quarantined

MAX_REASON = 500
SHORTEST = 3
"""Words of an observation that, quoted as a whole, count although they are fewer than an n-gram."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRules:
    """Which checks a note must pass."""

    answers: bool = True
    """It must not state the task's answer or quote its solution. Off for worlds in which the lesson
    and the answer are the same words."""
    later: bool = True
    """A skill of a step must not quote what was seen after that step."""
    ngram: int = QUOTED_WORDS
    """Words in a row that are a quotation."""
    safety: bool = True

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise ConfigError(f"a quotation needs an ngram of at least 1 word, got {self.ngram}")


def secrets_of(tasks: Iterable[Task]) -> Secrets:
    """Answers and solutions of the tasks. A solution too short to be quoted counts as an answer."""
    answers: dict[str, None] = {}
    solutions: dict[str, None] = {}
    for task in tasks:
        if task.answer:
            answers[task.answer] = None
        for key in ("solution", "demonstration"):
            text = meta_text(task, key)
            if text and len(_words(text)) < QUOTED_WORDS:
                answers[text] = None
            elif text:
                solutions[text] = None
    return Secrets(answers=tuple(answers), solutions=tuple(solutions))


def leaks(
    text: str, episode: Episode, *, step: int | None = None, ngram: int = QUOTED_WORDS
) -> str:
    """Why a skill gives something away; empty when it does not.

    For every skill: the answer (one of fewer than 4 letters only right after "answer is" or the
    like) and `QUOTED_WORDS` words in a row of the solution. For a skill of `step` also `ngram`
    words in a row, or all of at least 3 words, of what the environment said after that step and
    not before.
    """
    said = _stated(text, episode.task)
    return said or ("" if step is None else _Timeline(episode).foresight(text, step, ngram))


def check_note(note: Note, episode: Episode, rules: CheckRules = CheckRules()) -> Note:
    """The note as a teacher may read it, or without its text as `leaked` or `unsafe`.

    A skill of a step that quotes later observations is dropped alone. What stays carries no hidden
    character and no markup of a chat template. Notes that are not `ok` come back as they are.
    """
    if note.status != "ok":
        return note
    parts = [text for text in (note.episode_skill, *note.step_skills.values()) if text]
    unsafe = _first(_danger(text) for text in parts) if rules.safety else ""
    if unsafe:
        return refused(note, "unsafe", unsafe)
    stated = _first(_stated(text, episode.task) for text in parts) if rules.answers else ""
    if stated:
        return refused(note, "leaked", stated)
    steps, reasons = {}, [note.reason] if note.reason else []
    timeline = _Timeline(episode) if rules.later and note.step_skills else None
    for step, text in note.step_skills.items():
        why = timeline.foresight(text, step, rules.ngram) if timeline else ""
        if why:
            reasons.append(f"step {step}: {why}")
        else:
            steps[step] = neutral(text).strip()
    reason = "; ".join(reasons)[:MAX_REASON]
    if not note.episode_skill and not steps:
        return refused(note, "leaked", reason)
    kept = replace(
        note, episode_skill=neutral(note.episode_skill).strip(), step_skills=steps, reason=reason
    )
    return replace(kept, correct=is_correct(kept, episode))


def refused(note: Note, status: Any, reason: str) -> Note:
    """The note without a text that anybody could read by mistake; `raw` stays for the dump."""
    return replace(
        note,
        status=status,
        episode_skill="",
        episode_summary="",
        step_skills={},
        correct=None,
        reason=reason[:MAX_REASON],
    )


def is_correct(note: Note, episode: Episode) -> bool | None:
    """Whether a note says what the task's own lessons say; None when there is nothing to compare.

    The skill of the episode is compared with `lesson`, that of a step with the lesson of its state;
    all that can be compared must agree.
    """
    if note.status != "ok":
        return None
    lesson = meta_text(episode.task, "lesson")
    agree = [normal(note.episode_skill) == normal(lesson)] if lesson and note.episode_skill else []
    lessons = step_lessons_of(episode.task)
    for step, text in note.step_skills.items():
        state = episode.steps[step].state if step < len(episode.steps) else None
        if state is not None and state in lessons:
            agree.append(normal(text) == normal(lessons[state]))
    return all(agree) if agree else None


def step_lessons_of(task: Task) -> Mapping[str, str]:
    """State -> lesson of a task. DataError when it is no table of texts."""
    value = task.meta.get("step_lessons", {})
    if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
        raise DataError(
            f"task {task.id} of {task.domain}: meta['step_lessons'] must map the key of a state "
            "to a text"
        )
    return value


def _danger(text: str) -> str:
    found = inspect(SkillItem(id="", title="", principle=text))
    return "; ".join(str(f) for f in found) if is_quarantined(found) else ""


def _stated(text: str, task: Task) -> str:
    found = inspect(SkillItem(id="", title="", principle=text), secrets_of([task]))
    return _first(f.text for f in found if f.check == "leak")


Gram = tuple[str, ...]
"""Words that stand one after the other."""


class _Timeline:
    """The words of an episode in the order in which they became known."""

    def __init__(self, episode: Episode) -> None:
        task = [message.content for message in episode.task.prompt]
        self._task = [_Run(text) for text in (*task, last_user_text(episode.task))]
        self._seen = [_Run(step.observation) for step in episode.steps]
        self._said = [_Run(step.response) for step in episode.steps]
        self._after = [_Run(episode.ending), _Run(episode.feedback)]

    def foresight(self, text: str, step: int, ngram: int) -> str:
        """Words of later observations in the skill of a step that nobody had read by then."""
        skill = _Run(text)
        news: dict[int, set[Gram]] = {}
        for told in (*self._seen[step + 1 :], *self._after):
            size = min(ngram, len(told.words))
            if size < min(SHORTEST, ngram) or len("".join(told.words)) < MIN_ANSWER:
                continue
            if size not in news:
                news[size] = self._news(skill, step, size)
            if news[size] and not news[size].isdisjoint(told.grams(size)):
                return f"it quotes {size} words in a row of what was seen after step {step}"
        return ""

    def _news(self, skill: _Run, step: int, size: int) -> set[Gram]:
        """The `size` words in a row of a skill that nobody had read by this step."""
        new = set(skill.grams(size))
        for run in (*self._task, *self._seen[: step + 1], *self._said[: step + 1]):
            if new:
                new -= new & run.grams(size)
        return new


class _Run:
    """The words of one text."""

    def __init__(self, text: str) -> None:
        self.words = _words(fold(text))
        self._grams: dict[int, frozenset[Gram]] = {}

    def grams(self, size: int) -> frozenset[Gram]:
        """Every `size` words that stand in the text one after the other.

        As a set, made once: a text that repeats itself must not cost more than another.
        """
        if size not in self._grams:
            shifted = (self.words[start:] for start in range(size))
            self._grams[size] = frozenset(zip(*shifted, strict=False))
        return self._grams[size]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _first(texts: Iterable[str]) -> str:
    return next((text for text in texts if text), "")
