"""Scores, votes and words of praise as verdicts: who says it, and how good from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from distill.curriculum.importers.messages import written
from distill.curriculum.importers.values import as_number, as_table, as_text, clean, when, wrong
from distill.curriculum.records import Origin, Verdict
from distill.errors import ConfigError

ORIGINS: tuple[str, ...] = get_args(Origin)
_ALIASES: dict[str, Origin] = {
    "verifier": "program", "test": "program", "tests": "program", "checker": "program",
    "human": "user", "person": "user", "annotation": "user", "annotator": "user",
    "llm": "judge", "model": "judge", "eval": "judge", "evaluator": "judge",
    "router": "system", "gateway": "system",
}  # fmt: skip
_GOOD = frozenset(
    {
        "good", "pass", "passed", "correct", "true", "yes", "up", "thumbs_up", "thumbsup", "upvote",
        "positive", "like", "liked", "success", "successful", "succeeded", "helpful", "satisfied",
        "accept", "accepted", "ok", "resolved", "👍",
    }
)  # fmt: skip
_BAD = frozenset(
    {
        "bad", "fail", "failed", "incorrect", "wrong", "false", "no", "down", "thumbs_down",
        "thumbsdown", "downvote", "negative", "dislike", "disliked", "failure", "unhelpful",
        "dissatisfied", "reject", "rejected", "error", "unresolved", "wrong_answer", "👎",
    }
)  # fmt: skip
_OF_USERS = ("thumb", "user", "feedback", "rating", "csat", "vote")
_OF_PROGRAMS = (
    "test",
    "exact_match",
    "exact-match",
    "verified",
    "verifier",
    "compile",
    "exit_code",
)


def origin_of(
    name: str, options: Mapping[str, Any], said: str | None = None, default: Origin = "judge"
) -> Origin:
    """Who gives the score `name`: what `origins` of the options says, else what the row says, else
    what the name gives away, else `default`. A judge counts least, so that nothing is overrated."""
    own = options.get("origins") or {}
    if name in own:
        said = str(own[name])
    if said is not None:
        known = said.strip().lower()
        if known in ORIGINS:
            return cast(Origin, known)
        if known in _ALIASES:
            return _ALIASES[known]
    low = name.lower()
    if "judge" in low or "llm" in low:
        return "judge"
    if any(word in low for word in _OF_USERS):
        return "user"
    if any(word in low for word in _OF_PROGRAMS):
        return "program"
    return default


def grade(value: Any, name: str, options: Mapping[str, Any]) -> tuple[float | None, str | None]:
    """Value from 0 to 1 and label of a score: a truth value, a number or a word.

    A number outside [0, 1] needs `scales` in the options, `{name: [bad, good]}`; without it it is
    only a label, because nobody says whether 4 is good.
    """
    if value is None or value == "":
        return None, None
    if isinstance(value, bool):
        return float(value), None
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _GOOD or word in _BAD:
            return float(word in _GOOD), clean(value, name)
        if not word.replace(".", "", 1).replace("-", "", 1).isdigit():
            return None, clean(value, name)
    found = as_number(value, name)
    if found is None:
        return None, None
    scale = (options.get("scales") or {}).get(name)
    if scale is not None:
        bad, good = _scale(scale, name)
        return min(1.0, max(0.0, (found - bad) / (good - bad))), None
    return (found, None) if 0 <= found <= 1 else (None, f"{found:g}")


def _scale(value: Any, name: str) -> tuple[float, float]:
    numbers = isinstance(value, list | tuple) and all(isinstance(x, int | float) for x in value)
    if not numbers or len(value) != 2 or value[0] == value[1]:
        raise ConfigError(
            f"scales.{name}: expected two different numbers [bad, good], found {value!r}"
        )
    return float(value[0]), float(value[1])


def rating(value: Any, name: str, options: Mapping[str, Any], ts: int | None = None) -> Verdict:
    """What a person said: a plain value, or an object with score, value, rating or thumb."""
    comment = None
    if isinstance(value, Mapping):
        comment = value.get("label", value.get("comment"))
        ts = when(value, "ts", "timestamp") or ts
        for key in ("value", "score", "rating", "thumb", "thumbs", "vote"):
            if value.get(key) is not None:
                value = value[key]
                break
        else:
            value = None
    found, label = grade(value, name, options)
    if label is None and comment is not None:
        label = written(comment, name)
    return Verdict(source="user", name=name, value=found, label=label, ts=ts)


def verdict_of(value: Any, field: str) -> Verdict:
    """A verdict in the normal form: {source, name, value, label, ts}."""
    table = as_table(value, field)
    source = table.get("source")
    if source not in ORIGINS:
        raise wrong(f"{field}.source", f"one of {', '.join(ORIGINS)}", source)
    found = table.get("value")
    found = float(found) if isinstance(found, bool) else found
    found = None if found is None else as_number(found, f"{field}.value")
    if found is not None and not 0 <= found <= 1:
        raise wrong(f"{field}.value", "a number from 0 (bad) to 1 (good)", found)
    label = table.get("label")
    return Verdict(
        source=cast(Origin, source),
        name=as_text(table.get("name") or "outcome", f"{field}.name"),
        value=found,
        label=None if label is None else as_text(label, f"{field}.label"),
        ts=when(table, "ts"),
    )
