"""How the page of a curriculum writes numbers, names and reasons."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

from distill.curriculum.drops import REASONS

LONGEST = 60
"""Characters of a name that a log chose; what is longer is shortened with dots."""
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})

RUNGS = {
    "program": "a program checked it",
    "rating": "a person rated it",
    "tool": "the tool's result shows it",
    "next_turn": "the user's next message shows it",
    "system": "the call itself failed",
    "judge": "a judging model says so",
    "none": "nothing says it",
}
"""The ladder of outcomes, strongest first."""
DIMENSIONS = {
    "goal_attainment": "goal reached",
    "instruction_adherence": "instructions followed",
    "tool_use": "tools used well",
    "evidence_consistency": "fits the evidence",
    "error_recovery": "recovers from errors",
    "termination": "ends properly",
}
VERDICTS = {
    "capable": ("\u2713", "capable"),
    "weak": ("\u2717", "weak"),
    "uncertain": ("?", "uncertain"),
}


def plain(text: Any, longest: int = LONGEST) -> str:
    """A name of a log as one short line; what a reader would not see is written as its code."""
    line = " ".join(str(text).split())
    line = line if len(line) <= longest else f"{line[: longest - 3].rstrip()}..."
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in _UNSEEN else c for c in line)


def scene_name(scene: Any) -> str:
    return plain(scene) if scene else "no scene named"


def reason_in_words(reason: str) -> str:
    """A reason for dropping a row; one that this version does not know stays as it is."""
    return REASONS.get(reason, plain(reason))


def share(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f}\u00a0%"


def part(number: float, whole: float, digits: int = 0) -> str:
    """Share of a whole; a small one that would read 0 % says so."""
    if not whole:
        return "\u2013"
    found = number / whole
    return "<\u00a01\u00a0%" if 0 < found < 0.005 and not digits else share(found, digits)


def span(cell: Mapping[str, Any]) -> str:
    return f"{100 * cell['low']:.0f} to {100 * cell['high']:.0f}"


def several(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
