"""How often an analyst can be used at all: the shares of its notes by what became of them.

An analyst that cannot write what can be read leaves a method that is more expensive and no better
than without it. The first trajectories decide whether a run is worth going on with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from distill.errors import ConfigError, DataError
from distill.types import Note

STATUSES: tuple[str, ...] = get_args(get_type_hints(Note)["status"])
READABLE = ("ok", "empty", "leaked", "unsafe")
"""Of these the reply could be read, whether or not it was used then."""
WINDOW = 64
MIN_VALID_RATE = 0.80


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidRate:
    """Counts of notes, in the order in which they came. `skipped` ones are counted apart: nobody
    was asked. Adding gives a new one."""

    window: int = WINDOW
    """Asked trajectories that decide."""
    first: Mapping[str, int] = field(default_factory=dict)
    """Status -> notes among the first `window` asked ones."""
    total: Mapping[str, int] = field(default_factory=dict)
    """Status -> all notes."""
    num_judged: int = 0
    """Notes that could be compared with a lesson ..."""
    num_correct: int = 0
    """... and those that said the same."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"a valid rate needs a window of at least 1, got {self.window}")

    def add(self, notes: Iterable[Note]) -> ValidRate:
        first, total = Counter(self.first), Counter(self.total)
        judged, correct = self.num_judged, self.num_correct
        left = self.window - sum(first.values())
        for note in notes:
            total[note.status] += 1
            if note.status != "skipped" and left > 0:
                first[note.status] += 1
                left -= 1
            judged += note.correct is not None
            correct += note.correct is True
        return ValidRate(
            window=self.window,
            first=_ordered(first),
            total=_ordered(total),
            num_judged=judged,
            num_correct=correct,
        )

    @property
    def num_asked(self) -> int:
        return sum(self.total.values()) - self.total.get("skipped", 0)

    @property
    def valid_rate(self) -> float | None:
        """Share of the first asked notes that could be read; None before the first one."""
        return _share(self.first, READABLE)

    @property
    def correct_rate(self) -> float | None:
        """Share of the comparable notes that say what the lessons say; None without any."""
        return self.num_correct / self.num_judged if self.num_judged else None

    def shares(self) -> dict[str, float]:
        """Status -> share of all asked notes; nothing before the first one."""
        asked = self.num_asked
        return {s: self.total.get(s, 0) / asked for s in STATUSES if s != "skipped" and asked}

    def is_enough(self, min_valid_rate: float = MIN_VALID_RATE) -> bool | None:
        """Whether the window reached the rate; None while it is not full."""
        rate = self.valid_rate
        if rate is None or sum(self.first.values()) < self.window:
            return None
        return rate >= min_valid_rate

    def verdict(self, min_valid_rate: float = MIN_VALID_RATE) -> str:
        """One sentence for the report."""
        seen, rate = sum(self.first.values()), self.valid_rate
        enough = self.is_enough(min_valid_rate)
        if rate is None:
            return "no trajectory was asked about"
        share = f"{100 * rate:.0f} % of the first {seen} notes could be read"
        known = self.correct_rate
        right = "" if known is None else f"; {100 * known:.0f} % of {self.num_judged} were right"
        if enough is None:
            return f"{share}, {self.window} are needed to judge the analyst{right}"
        wanted = f"{100 * min_valid_rate:.0f} %"
        if enough:
            return f"{share}, at least {wanted} are needed: the analyst can be used{right}"
        return (
            f"{share}, {wanted} are needed: the analyst cannot be used; train it on labels first, "
            f"or let another model write{right}"
        )

    def metrics(self) -> dict[str, float]:
        """Numbers to log: `note/asked`, `note/STATUS_share`, `note/valid_rate` (all so far) and,
        where lessons are known, `note/correct_share`."""
        out = {"note/asked": float(self.num_asked)}
        out |= {f"note/{status}_share": share for status, share in self.shares().items()}
        rate, known = _share(self.total, READABLE), self.correct_rate
        if rate is not None:
            out["note/valid_rate"] = rate
        return out if known is None else out | {"note/correct_share": known}

    def to_table(self) -> dict[str, Any]:
        """As JSON, for a checkpoint."""
        return {
            "window": self.window,
            "first": dict(self.first),
            "total": dict(self.total),
            "num_judged": self.num_judged,
            "num_correct": self.num_correct,
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> ValidRate:
        """What `to_table` wrote. DataError when it is something else."""
        try:
            rate = cls(**table)
            counts = [*rate.first.items(), *rate.total.items()]
        except (TypeError, AttributeError) as error:
            raise DataError(f"these are no counts of notes: {error}") from error
        bad = [name for name, count in counts if name not in STATUSES or not _is_count(count)]
        if bad or not (_is_count(rate.num_judged) and _is_count(rate.num_correct)):
            raise DataError(
                f"counts of notes map {', '.join(STATUSES)} to whole numbers, found {bad!r} and "
                f"{rate.num_correct!r} of {rate.num_judged!r} correct"
            )
        return rate


def _share(counts: Mapping[str, int], wanted: Iterable[str]) -> float | None:
    asked = sum(count for status, count in counts.items() if status != "skipped")
    return sum(counts.get(status, 0) for status in wanted) / asked if asked else None


def _ordered(counts: Mapping[str, int]) -> dict[str, int]:
    return {status: counts[status] for status in STATUSES if counts.get(status)}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
