"""An analyst's reply as a note, or the reason why it is none. The reply is not trusted.

json    {"episode_summary": "...", "episode_skill": "...", "step_skills": {"2": "..."}}
slot    [the skill]          what stands in the first brackets; [] has nothing to say
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distill.errors import ConfigError
from skills.hindsight.objects import MAX_CHARACTERS, find

Format = Literal["json", "slot"]
EPISODE, SUMMARY, STEPS = "episode_skill", "episode_summary", "step_skills"
PLACEHOLDER = "text"
"""What the schema of a prompt shows as the value of a field."""
MAX_ROWS = 50
"""Objects of an array that are looked at."""
_STEP = re.compile(r"0|[1-9][0-9]{0,5}")
_SLOT = re.compile(r"\[([^\[\]]*)\]")
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
"""A word, or one sign of a script that is written without spaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyRules:
    """What a reply must look like."""

    format: Format = "json"
    max_step_skills: int = 0
    """Steps that may have a skill of their own; 0 asks for none and drops what comes."""
    min_words: int = 5
    """Fewer words in a skill say nothing. A small world speaks in single ones."""
    max_characters: int = 2000
    """Of one skill."""
    slot: str | Callable[[str], bool] | None = None
    """What may stand in the brackets: a regular expression for all of it, or a function."""

    def __post_init__(self) -> None:
        if self.format not in ("json", "slot"):
            raise ConfigError(f"an analyst replies in json or slot, got {self.format!r}")
        if self.max_step_skills < 0 or self.min_words < 1 or self.max_characters < 1:
            raise ConfigError(
                "an analyst needs max_step_skills of 0 or more, min_words and max_characters of 1 "
                f"or more, got {self.max_step_skills}, {self.min_words} and {self.max_characters}"
            )
        if self.format == "slot" and self.max_step_skills:
            raise ConfigError(
                "a reply in slot format has no place for step skills; use the format json or set "
                "max_step_skills to 0"
            )

    def knows(self, skill: str) -> bool:
        """Whether a text may stand in the brackets."""
        if self.slot is None:
            return True
        if isinstance(self.slot, str):
            return re.fullmatch(self.slot, skill) is not None
        return self.slot(skill)

    def trivial(self, text: str) -> str:
        """Why a skill says nothing or too much; empty when it may stand."""
        words = len(_WORD.findall(text[: self.max_characters]))
        if len(text) > self.max_characters:
            return f"it has {len(text)} characters, at most {self.max_characters}"
        if not words:
            return "it has no word"
        if words < self.min_words:
            return f"it has {words} of at least {self.min_words} words"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """What stands in a reply."""

    status: Literal["ok", "empty", "invalid"]
    episode_skill: str = ""
    episode_summary: str = ""
    step_skills: Mapping[int, str] = field(default_factory=dict)
    reason: str = ""
    """Why it is no note."""
    how: str = ""
    """Which way of reading found it."""
    dropped: tuple[str, ...] = ()
    """Parts of it that were left out, with their reasons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedList:
    """The objects of an array in a reply; none with the `reason`."""

    rows: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""
    how: str = ""


def parse_note(text: str, num_steps: int, rules: ReplyRules) -> Parsed:
    """Read a reply about a trajectory of `num_steps` turns. Never raises for what it says."""
    if rules.format == "slot":
        return _parse_slot(text, rules)
    found = find(text, "{", _is_note)
    if found.how is None:
        return Parsed(status="invalid", reason=found.reason)
    table = found.value
    if not isinstance(table, dict) or EPISODE not in table:
        return _invalid(f"the object has no {EPISODE!r}", found.how)
    skill, summary = table[EPISODE], table.get(SUMMARY, "")
    if not isinstance(skill, str):
        return _invalid(f"{EPISODE} must be text, found {type(skill).__name__}", found.how)
    dropped: list[str] = []
    steps = _step_skills(table.get(STEPS), num_steps, rules, dropped)
    skill = skill.strip()
    if not skill and not steps:
        return Parsed(status="empty", reason="it has nothing to say", how=found.how)
    trouble = rules.trivial(skill) if skill else ""
    if trouble:
        return _invalid(f"{EPISODE}: {trouble}", found.how)
    return Parsed(
        status="ok",
        episode_skill=skill,
        episode_summary=summary.strip()[:2000] if isinstance(summary, str) else "",
        step_skills=steps,
        how=found.how,
        dropped=tuple(dropped),
    )


def _is_note(value: Any) -> bool:
    """Whether an object is meant as the answer, and is not the schema said once more."""
    return isinstance(value, dict) and value.get(EPISODE, PLACEHOLDER) != PLACEHOLDER


def _step_skills(
    value: Any, num_steps: int, rules: ReplyRules, dropped: list[str]
) -> dict[int, str]:
    """The skills of steps that were executed, the first ones written; `dropped` gets the others."""
    if value is None or value in ({}, []):
        return {}
    if not isinstance(value, dict):
        dropped.append(f"{STEPS} must be an object, found {type(value).__name__}")
        return {}
    if not rules.max_step_skills:
        dropped.append(f"{STEPS}: none were asked for")
        return {}
    numbered = [(_number(key), key, text) for key, text in value.items()]
    numbers = {number for number, _, _ in numbered}
    if num_steps in numbers and 0 not in numbers:
        # Numbered from 1, it seems. A shift would be a guess, and a wrong step teaches nonsense.
        dropped.append(f"{STEPS}: numbered from 1 ({num_steps} steps end at {num_steps - 1})")
        return {}
    kept: dict[int, str] = {}
    for number, key, text in numbered:
        trouble = _step_trouble(number, text, num_steps, rules)
        if not trouble and len(kept) >= rules.max_step_skills:
            trouble = f"more than {rules.max_step_skills} steps"
        if trouble or number is None:
            dropped.append(f"step {shown(key)}: {trouble}")
        else:
            kept[number] = text.strip()
    del dropped[2 * rules.max_step_skills + 10 :]
    return dict(sorted(kept.items()))


def _step_trouble(number: int | None, text: Any, num_steps: int, rules: ReplyRules) -> str:
    if number is None:
        return "no step number, which is 0, 1, 2 and so on"
    if not 0 <= number < num_steps:
        return f"not executed, the steps are 0 to {num_steps - 1}"
    if not isinstance(text, str):
        return f"must be text, found {type(text).__name__}"
    return rules.trivial(text.strip())


def _number(key: Any) -> int | None:
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    return int(key) if isinstance(key, str) and _STEP.fullmatch(key) else None


def _parse_slot(text: str, rules: ReplyRules) -> Parsed:
    if len(text) > MAX_CHARACTERS:
        return _invalid(f"the reply has {len(text)} characters, at most {MAX_CHARACTERS}", "slot")
    start = text.find("[")
    if start < 0:
        return _invalid("there is no [skill] in brackets in the reply", "slot")
    found = _SLOT.match(text, start)
    if found is None:
        return _invalid("the first bracket is not closed, or holds another one", "slot")
    skill = found[1].strip()
    if not skill:
        return Parsed(status="empty", reason="it has nothing to say", how="slot")
    trouble = rules.trivial(skill)
    if not trouble and not rules.knows(skill):
        trouble = "it is no skill of this world"
    if trouble:
        return _invalid(f"[{shown(skill)}]: {trouble}", "slot")
    return Parsed(status="ok", episode_skill=skill, how="slot")


def parse_list(text: str, *, limit: int = MAX_ROWS) -> ParsedList:
    """The objects of the first array that holds any, else the first object alone; at most `limit`.

    An empty array has no rows and no reason."""
    found = find(text, "[", lambda value: isinstance(value, list) and any(_objects(value)))
    if found.how is not None and isinstance(found.value, list):
        rows = _objects(found.value)
        if rows or not found.value:
            return ParsedList(rows=tuple(rows[:limit]), how=found.how)
    alone = find(text, "{", lambda value: isinstance(value, dict))
    if alone.how is not None and isinstance(alone.value, dict):
        return ParsedList(rows=(alone.value,)[:limit], how=alone.how)
    return ParsedList(reason=found.reason or "the array holds no object")


def _objects(values: list[Any]) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, dict)]


def shown(value: Any) -> str:
    """A piece of untrusted text for a reason: short, on one line, ASCII."""
    if isinstance(value, int) and abs(value) >= 10**9:
        return "with a huge number"
    if isinstance(value, str | int | float):
        return ascii(str(value)[:40])[1:-1]
    return type(value).__name__


def _invalid(reason: str, how: str) -> Parsed:
    return Parsed(status="invalid", reason=reason, how=how)
