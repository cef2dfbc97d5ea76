"""What a comparison left behind, and how a claim is read off it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from evals.compare_page_facts import Change, Results, Run
from evals.metrics import paired_bootstrap
from flows.compare_table import detectable


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a comparison left behind."""

    results: Results
    rows: Mapping[tuple[str, int], list[dict[str, Any]]]
    """Contender and seed -> the metrics of every step."""
    domains: Mapping[int, list[str]]
    """Seed -> domain of each task, in the order of `Run.end`."""

    def runs(self, name: str) -> list[Run]:
        return [run for run in self.results.runs if run.contender == name]

    def values(self, name: str, which: str = "end", domain: str = "") -> list[float]:
        """The accuracy of every task of every seed; of one domain when it is named."""
        return [
            value
            for run in self.runs(name)
            for value, own in zip(getattr(run, which), self.domains[run.seed], strict=True)
            if domain in ("", own)
        ]

    def series(self, name: str, key: str) -> list[list[float]]:
        """One list per seed: the metric of every step that has it."""
        return [
            [float(row[key]) for row in self.rows[run.contender, run.seed] if key in row]
            for run in self.runs(name)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    result: str
    numbers: str


def verdict(before: Sequence[float], after: Sequence[float]) -> Answer:
    """Whether `after` is surely above `before`, on the same tasks."""
    found = paired_bootstrap(before, after)
    change = Change(mean=found.mean, low=found.low, high=found.high)
    seen = detectable(before, after)
    if change.low > 0:
        result = "reproduced"
    elif change.high < 0:
        result = "the opposite"
    else:
        result = "no verdict" if seen > abs(change.mean) else "not reproduced"
    span = f"{points(change.mean)} [{points(change.low)}, {points(change.high)}]"
    return Answer(result=result, numbers=f"{span}, detectable {100 * seen:.1f}")


def learned(found: Found, name: str) -> bool:
    """The positive control: a baseline that did not learn decides nothing."""
    change = paired_bootstrap(found.values(name, "start"), found.values(name))
    return bool(change.low > 0)


def points(value: float) -> str:
    return f"{100 * value:+.1f}"


def percent(values: Sequence[float]) -> str:
    return f"{100 * fmean(values):.1f} %"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    method: str
    text: str
    judge: Callable[[Found], Answer]
    comparison: str = ""
    """A packaged comparison that several claims share; empty: `claims/NAME.toml` over `compare`."""
    seeds: int = 0
    """Of that comparison, where it is not its own number."""
