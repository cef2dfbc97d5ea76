"""Scores, votes and words of praise as verdicts: who says it, and how good from 0 to 1.

What is not surely good or bad stays ungraded, with the statement as its label: a log that nobody
explained teaches nothing, and one that was read upside down teaches the worst answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from distill.curriculum.importers.messages import written
from distill.curriculum.importers.polarity import grade_number, grade_truth, kind_of, words_of
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
        "good", "pass", "passed", "correct", "up", "thumbs_up", "thumbsup", "upvote",
        "like", "liked", "success", "successful", "succeeded", "helpful", "satisfied",
        "accept", "accepted", "ok", "resolved", "👍",
    }
)  # fmt: skip
_BAD = frozenset(
    {
        "bad", "fail", "failed", "incorrect", "wrong", "down", "thumbs_down",
        "thumbsdown", "downvote", "dislike", "disliked", "failure", "unhelpful",
        "dissatisfied", "reject", "rejected", "error", "unresolved", "wrong_answer", "👎",
    }
)  # fmt: skip
_TRUTHS = {
    "true": True, "yes": True, "positive": True,
    "false": False, "no": False, "negative": False,
}  # fmt: skip
"""Words that are good or bad by what was asked: yes to `correct`, no to `hallucination`."""
_OF_USERS = frozenset({"user", "rating", "csat", "vote", "upvote", "downvote"})
_OF_PROGRAMS = frozenset({"test", "verified", "verifier", "compile", "compiled", "compiles"})


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
    words = words_of(name)
    if words & _OF_USERS or "thumb" in low or "feedback" in low:
        return "user"
    if words & _OF_PROGRAMS or {"exact", "match"} <= words or kind_of(name) == "exit":
        return "program"
    return default


def grade(
    value: Any,
    name: str,
    options: Mapping[str, Any],
    *,
    boolean: bool = False,
    trusted: bool = False,
) -> tuple[float | None, str | None]:
    """Value from 0 to 1 and label of a score: a truth value, a number or a word.

    A number counts where `scales` of the options has its name, `{name: [bad, good]}`, or where the
    name leaves no doubt (see `polarity`); else it is only a label, because nobody says whether 1 is
    the best or the worst. `boolean`: the log says that 0 and 1 are no and yes. `trusted`: a program
    that the user named as a check says it.
    """
    if value is None or value == "":
        return None, None
    if isinstance(value, bool):
        return _truth(value, name, None)
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _GOOD or word in _BAD:
            return float(word in _GOOD), clean(value, name)
        if word in _TRUTHS:
            return _truth(_TRUTHS[word], name, clean(value, name))
        if not word.replace(".", "", 1).replace("-", "", 1).isdigit():
            return None, clean(value, name)
    found = as_number(value, name)
    if found is None:
        return None, None
    scale = (options.get("scales") or {}).get(name)
    if scale is not None:
        bad, good = _scale(scale, name)
        return min(1.0, max(0.0, (found - bad) / (good - bad))), None
    if boolean and found in (0, 1):
        return _truth(bool(found), name, None)
    graded = grade_number(found, name, trusted=trusted)
    return (None, f"{found:g}") if graded is None else (graded, None)


def _truth(truth: bool, name: str, word: str | None) -> tuple[float | None, str | None]:
    graded = grade_truth(truth, name)
    if graded is None:  # the bare word would be taken for praise or blame
        return None, f"{clean(name, 'name')}: {str(truth).lower()}"
    return graded, word


def scored(
    name: str,
    value: Any,
    word: str | None,
    options: Mapping[str, Any],
    *,
    said: str | None = None,
    default: Origin = "judge",
    boolean: bool = False,
    ts: int | None = None,
) -> Verdict:
    """The verdict of a score that has a value, a word for it, or both, from whoever `said` it.

    The value counts before the word, unless only the score's name tells that high is bad.
    """
    source = origin_of(name, options, said, default)
    told = said is not None or name in (options.get("origins") or {})
    trusted = told and source in ("program", "tool")
    graded, label = grade(value, name, options, boolean=boolean, trusted=trusted)
    if word is not None:
        judged, own = grade(word, name, options, trusted=trusted)
        guessed = kind_of(name) in ("fault", "harm") and name not in (options.get("scales") or {})
        plain = word.strip().lower() in _GOOD | _BAD
        if graded is None or (guessed and plain):
            graded = judged
        label = own if own is not None else label
    return Verdict(source=source, name=name, value=graded, label=label, ts=ts)


def _scale(value: Any, name: str) -> tuple[float, float]:
    numbers = isinstance(value, list | tuple) and all(isinstance(x, int | float) for x in value)
    if not numbers or len(value) != 2 or value[0] == value[1]:
        raise ConfigError(
            f"scales.{name}: expected two different numbers [bad, good], found {value!r}"
        )
    return float(value[0]), float(value[1])


def rating(value: Any, name: str, options: Mapping[str, Any], ts: int | None = None) -> Verdict:
    """What a person said: a plain value, or an object with score, value, rating or thumb.

    Numbers need `scales`, `{name: [worst, best]}`, except for thumbs and votes: 1 may be the best
    of two or the worst of five.
    """
    comment, asked = None, name
    if isinstance(value, Mapping):
        comment = value.get("label", value.get("comment"))
        ts = when(value, "ts", "timestamp") or ts
        for key in ("value", "score", "rating", "thumb", "thumbs", "vote"):
            if value.get(key) is not None:
                value = value[key]
                asked = name if key in ("value", "score") else key
                break
        else:
            value = None
    if asked != name and name in (options.get("scales") or {}):
        asked = name
    found, label = grade(value, asked, options)
    if comment is not None:
        said = written(comment, name)
        if found is None and said.strip().lower() in _GOOD | _BAD:
            found, label = grade(said, name, options)
        label = said if label is None else label
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
