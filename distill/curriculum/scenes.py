"""What kind of task a turn is: what the log says, else a rough guess by words of the request."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from distill.curriculum.turns import UserTurn

GENERAL = "general"
UNKNOWN = "unknown"
LOOKED_AT = 4000
"""Characters of a request that are looked at."""


class _Rule(NamedTuple):
    """What the requests of a scene contain. The pattern decides; words and parts of words only
    spare most searches: one of `sure` is a match, and without any of `maybe` and `parts`, in a
    request without other signs, there is none."""

    scene: str
    pattern: re.Pattern[str]
    sure: frozenset[str] = frozenset()
    maybe: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()
    signs: re.Pattern[str] | None = None


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RULES: tuple[_Rule, ...] = (
    _Rule(
        "code",
        re.compile(
            r"```|\b(?:def|class|import|function|return|SELECT|npm|pip|git|stack ?trace|traceback"
            r"|compil\w+|refactor\w*|unit tests?|regex|python|javascript|typescript|rust|sql|bash"
            r"|docker\w*|kubernetes)\b|\.(?:py|js|ts|rs|go|java|cpp|sh)\b",
            re.I,
        ),
        _words(
            "def class import function return select npm pip git stacktrace traceback regex "
            "python javascript typescript rust sql bash kubernetes"
        ),
        _words("stack unit py js ts rs go java cpp sh"),
        ("```", "compil", "refactor", "docker"),
    ),
    _Rule(
        "math",
        re.compile(
            r"\\(?:frac|sum|int|sqrt)\b|\b(?:solve|equation|integral|derivative|probability|proof"
            r"|prove|theorem|calculate|compute|percent\w*)\b|\d\s*[-+*/^=]\s*\d",
            re.I,
        ),
        _words(
            "solve equation integral derivative probability proof prove theorem calculate compute"
        ),
        parts=("\\", "percent"),
        signs=re.compile(r"[-+*/^=]\s*\d"),
    ),
    _Rule(
        "translation",
        re.compile(r"\btranslat\w+\b|\b(?:in|into|to) (?:english|german|french|spanish)\b", re.I),
        maybe=_words("english german french spanish"),
        parts=("translat",),
    ),
    _Rule(
        "summary",
        re.compile(r"\b(?:summar\w+|tl;?dr|key points|condense|shorten)\b", re.I),
        _words("tldr condense shorten"),
        _words("dr points"),
        ("summar",),
    ),
    _Rule(
        "extraction",
        re.compile(r"\b(?:extract|classif\w+|label|parse|json|csv|table of|list all)\b", re.I),
        _words("extract label parse json csv"),
        _words("table list"),
        ("classif",),
    ),
    _Rule(
        "writing",
        re.compile(r"\b(?:write|draft|rewrite|essay|email|e-mail|letter|story|poem|blog)\b", re.I),
        _words("write draft rewrite essay email letter story poem blog"),
        _words("mail"),
    ),
)
"""The first rule that fits counts."""
_SPACED = "".join(
    chr(code) if chr(code).isalnum() or chr(code) == "_" else " " for code in range(128)
)
_WORD = re.compile(r"\w+")
_FOLDED = re.compile("[\u017f\u0130\u0131\u212a]")
"""Letters that a search without case takes for `s`, `i` and `k`."""

Method = Literal["log", "words", "none"]


class Scene(NamedTuple):
    name: str
    method: Method
    """Whether the log says so, the words hint at it, or nothing is known."""


def scene_of(turn: UserTurn) -> Scene:
    """Primary scene of a turn. A guess by words never overrides the log."""
    if turn.scene:
        return Scene(turn.scene, "log")
    text = turn.request_text[:LOOKED_AT]
    if not text:
        return Scene(UNKNOWN, "none")
    # A definition of tools says more than words do: what can act is an agent's task.
    if turn.tools:
        return Scene("agent", "words")
    return Scene(guess(text), "words")


def guess(text: str) -> str:
    """Scene of a request by its words."""
    lower = text.lower()
    if text.isascii():
        words = set(lower.translate(_SPACED).split())
    elif _FOLDED.search(text) is None:
        words = set(_WORD.findall(lower))
    else:
        return next((rule.scene for rule in _RULES if rule.pattern.search(text)), GENERAL)
    for rule in _RULES:
        if not words.isdisjoint(rule.sure):
            return rule.scene
        likely = (
            not words.isdisjoint(rule.maybe)
            or any(part in lower for part in rule.parts)
            or (rule.signs is not None and rule.signs.search(text) is not None)
        )
        if likely and rule.pattern.search(text):
            return rule.scene
    return GENERAL
