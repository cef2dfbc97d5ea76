"""What kind of task a turn is: what the log says, else a rough guess by words of the request."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from distill.curriculum.turns import UserTurn

GENERAL = "general"
UNKNOWN = "unknown"

_RULES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "code",
        re.compile(
            r"```|\b(?:def|class|import|function|return|SELECT|npm|pip|git|stack ?trace|traceback"
            r"|compil\w+|refactor\w*|unit tests?|regex|python|javascript|typescript|rust|sql|bash"
            r"|docker\w*|kubernetes)\b|\.(?:py|js|ts|rs|go|java|cpp|sh)\b",
            re.I,
        ),
    ),
    (
        "math",
        re.compile(
            r"\\(?:frac|sum|int|sqrt)\b|\b(?:solve|equation|integral|derivative|probability|proof"
            r"|prove|theorem|calculate|compute|percent\w*)\b|\d\s*[-+*/^=]\s*\d",
            re.I,
        ),
    ),
    (
        "translation",
        re.compile(r"\btranslat\w+\b|\b(?:in|into|to) (?:english|german|french|spanish)\b", re.I),
    ),
    ("summary", re.compile(r"\b(?:summar\w+|tl;?dr|key points|condense|shorten)\b", re.I)),
    (
        "extraction",
        re.compile(r"\b(?:extract|classif\w+|label|parse|json|csv|table of|list all)\b", re.I),
    ),
    (
        "writing",
        re.compile(r"\b(?:write|draft|rewrite|essay|email|e-mail|letter|story|poem|blog)\b", re.I),
    ),
)
"""Scene -> what its requests contain; the first that fits counts."""

Method = Literal["log", "words", "none"]


class Scene(NamedTuple):
    name: str
    method: Method
    """Whether the log says so, the words hint at it, or nothing is known."""


def scene_of(turn: UserTurn) -> Scene:
    """Primary scene of a turn. A guess by words never overrides the log."""
    if turn.scene:
        return Scene(turn.scene, "log")
    text = turn.request_text[:4000]
    if not text:
        return Scene(UNKNOWN, "none")
    # A definition of tools says more than words do: what can act is an agent's task.
    if turn.tools:
        return Scene("agent", "words")
    for name, pattern in _RULES:
        if pattern.search(text):
            return Scene(name, "words")
    return Scene(GENERAL, "words")
