"""What an analyst is asked: the packaged prompts, or the one that a task brings along.

The text of a trajectory is data that nobody vouched for. In a packaged prompt every line of it
begins with a mark, carries no hidden character and cannot imitate a chat template.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from distill.errors import ConfigError, DataError
from distill.types import Message, Task
from skills.hindsight.episodes import Episode, last_user_text
from skills.hindsight.parse import EPISODE, PLACEHOLDER, STEPS, SUMMARY, ReplyRules
from skills.render import neutral

LINE = "| "
"""Begins every line of text that is not ours."""
ANSWER_TAIL = 2000
"""Characters of a bad answer that are shown again."""
_NAME = re.compile(r"\{([a-z_]+)\}")
_HEAD = frozenset(("outcome_rule", "task", "outcome", "truth", "num_steps", "steps"))
PLACEHOLDERS: Mapping[str, frozenset[str]] = {
    "seed": _HEAD,
    "opid": _HEAD | {"max_step_skills", "candidates"},
    "retry": frozenset(("original", "error", "answer", "schema")),
    "skillrl_update": frozenset(("min_new", "max_new", "titles", "failures")),
    "rule_success": frozenset(),
    "rule_failure": frozenset(),
    "rule_unknown": frozenset(),
}
"""The packaged prompts and what is filled into each."""
MAX_LISTED = 60
"""Step numbers that a prompt lists; a longer attempt has a range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """What a prompt shows of an attempt."""

    truth: Literal["none", "answer", "solution"] = "none"
    """What a failure is shown of its task, where the task has it."""
    max_text: int = 2000
    """Characters of one observation or reply; what is longer loses its middle, visibly."""
    max_attempt: int = 40_000
    """Characters of all of them, spread evenly."""
    view: str = "analyst"
    """Name of the task's own prompt, in which `{attempt}`, `{outcome}` and `{truth}` are filled in.
    With a truth to show, one called `analyst_truth` comes first."""
    success: str = "+"
    """Outcome in the task's own prompt."""
    failure: str = "#"
    unknown: str = "?"
    specials: tuple[str, ...] = ()
    """Further texts that must not appear, such as the tokenizer's special tokens."""

    def __post_init__(self) -> None:
        if self.truth not in ("none", "answer", "solution"):
            raise ConfigError(
                f"an analyst is shown the truth none, answer or solution, got {self.truth!r}"
            )
        if self.max_text < 1 or self.max_attempt < 1:
            raise ConfigError(
                "an analyst needs max_text and max_attempt of at least 1, got "
                f"{self.max_text} and {self.max_attempt}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One prompt for an analyst."""

    messages: tuple[Message, ...]
    version: str
    """Digest of the packaged files, `task/NAME` for a prompt of the task."""
    is_own: bool
    """Whether the task brought it. It then has a grammar that no second question would fit."""


def load(name: str) -> str:
    """A packaged prompt. ConfigError when its placeholders are not those that are filled in."""
    return _load(name)


@cache
def _load(name: str) -> str:
    if name not in PLACEHOLDERS:
        raise ConfigError(f"no packaged prompt {name!r}; there are: {', '.join(PLACEHOLDERS)}")
    text = (files("skills.hindsight") / "prompts" / f"{name}.md").read_text(encoding="utf-8")
    return check_prompt(name, text)


def check_prompt(name: str, text: str) -> str:
    """The text. ConfigError naming the placeholders that are missing or not known."""
    found, wanted = set(_NAME.findall(text)), PLACEHOLDERS[name]
    if found != wanted:
        missing = ", ".join(sorted(wanted - found)) or "none"
        extra = ", ".join(sorted(found - wanted)) or "none"
        raise ConfigError(
            f"the prompt {name}.md must hold the placeholders {', '.join(sorted(wanted))}; "
            f"missing: {missing}; not known: {extra}"
        )
    return text.strip()


def prompt_version(*names: str) -> str:
    """Digest of packaged prompts: 16 hex digits of SHA-256 over their names and texts."""
    text = json.dumps([[name, load(name)] for name in names], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with each `{name}` of the values replaced, once; other braces stay."""
    return _NAME.sub(lambda found: values.get(found[1], found[0]), template)


def first_prompt(episode: Episode, rules: ReplyRules, options: PromptOptions) -> Asked:
    """The question about an episode. DataError for the slot format without a prompt of the task:
    its grammar belongs to a world and cannot be guessed."""
    own = _own_prompt(episode, options)
    if own is not None:
        return own
    if rules.format == "slot":
        raise DataError(
            f"task {episode.task.id} of {episode.task.domain} brings no prompt "
            f"{options.view!r} in meta['views'], which an analyst that replies in slot format "
            "needs; use the format json for this environment"
        )
    name, rule = "opid" if rules.max_step_skills else "seed", f"rule_{episode.outcome}"
    count = len(episode.steps)
    some = ", ".join(map(str, range(count))) if count <= MAX_LISTED else f"0 to {count - 1}"
    truth = truth_of(episode, options)
    values = {
        "outcome_rule": load(rule),
        "task": quoted(last_user_text(episode.task), options.max_attempt, options.specials),
        "outcome": episode.outcome,
        "truth": f"\n\nWhat was right:\n{_quoted(truth, options)}" if truth else "",
        "num_steps": str(count),
        "steps": _steps(episode, options),
        "max_step_skills": str(rules.max_step_skills),
        "candidates": some,
    }
    text = fill(load(name), values)
    return Asked(
        messages=(Message(role="user", content=text),),
        version=prompt_version(name, rule),
        is_own=False,
    )


def retry_prompt(asked: Asked, answer: str, error: str, rules: ReplyRules) -> Asked:
    """The question once more, with what was wrong and the end of the bad answer."""
    values = {
        "original": asked.messages[-1].content,
        "error": neutral(error),
        "answer": quoted(answer[-ANSWER_TAIL:], ANSWER_TAIL) or LINE.strip(),
        "schema": json.dumps(schema(rules)),
    }
    text = fill(load("retry"), values)
    return Asked(
        messages=(*asked.messages[:-1], Message(role="user", content=text)),
        version=asked.version,
        is_own=asked.is_own,
    )


def schema(rules: ReplyRules) -> dict[str, Any]:
    table: dict[str, Any] = {SUMMARY: PLACEHOLDER, EPISODE: PLACEHOLDER}
    return {**table, STEPS: {"0": PLACEHOLDER}} if rules.max_step_skills else table


def truth_of(episode: Episode, options: PromptOptions) -> str:
    """What a failure may be shown of its task; empty for the others and where there is nothing."""
    if episode.outcome != "failure" or options.truth == "none":
        return ""
    if options.truth == "answer":
        return episode.task.answer or ""
    return meta_text(episode.task, "solution") or ""


def meta_text(task: Task, key: str) -> str | None:
    """A text of the task's metadata; None when missing or empty. DataError when it is no text."""
    return _text(task, task.meta, key)


def quoted(text: str, most: int, specials: Sequence[str] = ()) -> str:
    """Text that is not ours: cut in its middle, neutral, with a mark before every line."""
    clean = neutral(shortened(text, most), specials)
    return "\n".join(f"{LINE}{line}" for line in clean.split("\n"))


def shortened(text: str, most: int) -> str:
    """Text with at most `most` characters of its own, its two ends, and a mark where it was cut."""
    if len(text) <= most:
        return text
    tail = most // 2
    gone = len(text) - most
    return f"{text[: most - tail]} [... {gone} characters left out ...] {text[len(text) - tail :]}"


def _own_prompt(episode: Episode, options: PromptOptions) -> Asked | None:
    task = episode.task
    views = task.meta.get("views", {})
    truth = truth_of(episode, options)
    names = [f"{options.view}_truth", options.view] if truth else [options.view]
    found = next(((n, text) for n in names if (text := _text(task, views, n))), None)
    if found is None:
        return None
    name, template = found
    marks = {
        "success": options.success,
        "failure": options.failure,
        "unknown": options.unknown,
    }
    values = {
        "attempt": neutral(shortened(episode.text, options.max_attempt), options.specials),
        "outcome": marks[episode.outcome],
        "truth": truth,
    }
    text = fill(template, values)
    return Asked(messages=_with_last_user(task, text), version=f"task/{name}", is_own=True)


def _with_last_user(task: Task, text: str) -> tuple[Message, ...]:
    at = max((i for i, m in enumerate(task.prompt) if m.role == "user"), default=-1)
    if at < 0:
        return (*task.prompt[:-1], Message(role="user", content=text))
    return (*task.prompt[:at], replace(task.prompt[at], content=text), *task.prompt[at + 1 :])


def _steps(episode: Episode, options: PromptOptions) -> str:
    """Every step as headings of ours and quoted text of others."""
    share = options.max_attempt // (2 * len(episode.steps))
    most = max(80, min(options.max_text, share))
    lines: list[str] = []
    for number, step in enumerate(episode.steps):
        lines.append(f"Step {number}")
        if number:
            lines += ["Observation:", quoted(step.observation, most, options.specials)]
        lines += ["Response:", quoted(step.response, most, options.specials)]
        if step.valid is False:
            lines.append("The environment could not read this response.")
        if step.reward is not None:
            lines.append(f"Return: {step.reward:g}")
    last = dict.fromkeys(text for text in (episode.ending, episode.feedback) if text.strip())
    if last:
        lines.append("After the last step:")
        lines += [quoted(text, most, options.specials) for text in last]
    return "\n".join(lines)


def _quoted(text: str, options: PromptOptions) -> str:
    return quoted(text, options.max_text, options.specials)


def _text(task: Task, table: Mapping[str, Any], key: str) -> str | None:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"task {task.id} of {task.domain}: {key!r} must be text to be shown to an analyst, "
            f"found {type(value).__name__}"
        )
    return value or None
