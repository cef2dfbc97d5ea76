"""What a night learned in words, from `learned` in summary.json and `bank.jsonl` of its stages."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.rundir import read_jsonl
from evals.report_measures import Fields, count, number

STATUSES = {
    "ok": "used",
    "empty": "nothing to say",
    "invalid": "could not be read",
    "leaked": "gave an answer away",
    "unsafe": "not safe to show",
    "failed": "never came",
    "skipped": "not asked for",
}
"""What became of a note, in words."""
_CHARACTERS = 160
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_SHOWN_NAMES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One look at what fails: families of tasks below the threshold, and what was done."""

    step: int
    weak: tuple[tuple[str, float | None], ...]
    """Family and its success rate."""
    added: tuple[str, ...]
    refused: tuple[str, ...]
    """Title and reason, in one sentence each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """What one stage learned in words."""

    stage: str
    objective: str
    notes: tuple[tuple[str, int], ...]
    """What became of notes, in words, and how many; most frequent first."""
    valid_rate: float | None
    correct_rate: float | None
    is_enough: bool | None
    verdict: str
    num_looks: int
    looks: tuple[Look, ...]
    num_evolved: int
    """Skills that came of the looks."""
    num_kept: int | None
    """Skills taken in at the end of the stage; None where none are kept then."""
    num_promoted: int
    num_waiting: int
    version: str | None
    """Of the bank after the stage."""

    @property
    def num_notes(self) -> int:
        return sum(number for _, number in self.notes)

    @property
    def num_added(self) -> int:
        return self.num_evolved + (self.num_kept or 0)

    @property
    def has_skills(self) -> bool:
        """Whether the stage could add any."""
        return self.num_kept is not None or self.num_looks > 0


def read_learned(run_dir: Path, stages: Iterable[Any]) -> tuple[Learned, ...]:
    """Every stage of a summary that learned in words."""
    return tuple(
        _learned(run_dir, stage, stage["learned"])
        for stage in stages
        if isinstance(stage, Mapping) and isinstance(stage.get("learned"), Mapping)
    )


def some(texts: Sequence[str], between: str = ", ") -> str:
    """The first of several texts, and how many more there are."""
    rest = len(texts) - _SHOWN_NAMES
    shown = between.join(texts[:_SHOWN_NAMES])
    return f"{shown}{between}and {rest} more" if rest > 0 else shown


def _learned(run_dir: Path, stage: Fields, row: Fields) -> Learned:
    name, kept = str(stage.get("name", "")), row.get("kept")
    last = count(stage.get("steps"))
    enough = row.get("is_enough")
    given = {s: n for s, found in (row.get("notes") or {}).items() if (n := count(found))}
    ends: Fields = kept if isinstance(kept, Mapping) else {}
    return Learned(
        stage=name,
        objective=str(stage.get("objective") or ""),
        notes=tuple(
            (STATUSES.get(status, status), given[status])
            for status in sorted(given, key=lambda status: -given[status])
        ),
        valid_rate=number(row.get("valid_rate")),
        correct_rate=number(row.get("correct_rate")),
        is_enough=enough if isinstance(enough, bool) else None,
        verdict=str(row.get("verdict") or ""),
        num_looks=count(row.get("looks")) or 0,
        looks=_looks(run_dir / "stages" / name / "bank.jsonl", last),
        num_evolved=len(row.get("evolved") or ()),
        num_kept=len(ends.get("added") or ()) if ends else None,
        num_promoted=len(ends.get("promoted") or ()),
        num_waiting=count(ends.get("num_waiting")) or 0,
        version=str(ends["version"]) if ends.get("version") else None,
    )


def _looks(path: Path, last: int | None) -> tuple[Look, ...]:
    """The looks of a stage up to its last step; its first line only names the version it began
    with."""
    if not path.exists():
        return ()
    return tuple(
        _look(row, step)
        for row in read_jsonl(path)
        if isinstance(row, Mapping) and (step := count(row.get("step")))
        if last is None or step <= last
    )


def _look(row: Fields, step: int) -> Look:
    rates: Fields = row.get("rates") or {}
    return Look(
        step=step,
        weak=tuple((_line(name), number(rates.get(name))) for name in row.get("weak") or ()),
        added=tuple(map(_line, row.get("added") or ())),
        refused=tuple(map(_line, row.get("refused") or ())),
    )


def _line(value: Any) -> str:
    """Words of a model as one short line; what a reader would not see is written as its code."""
    text = " ".join(str(value).split())
    text = text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 3]}..."
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in _UNSEEN else c for c in text)
