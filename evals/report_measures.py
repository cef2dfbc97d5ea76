"""What the evaluations of a run say: means with intervals, and paired changes, per domain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from evals.metrics import paired_bootstrap

Fields = Mapping[str, Any]
WHO = ("before", "after", "teacher")
ALL = "all domains"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One domain, or all of them: a measure with intervals and the paired change."""

    name: str
    n: int
    before: Interval | None
    after: Interval | None
    teacher: Interval | None
    change: Interval | None


def number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def count(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def domains_of(reports: Iterable[Fields]) -> set[str]:
    return {
        name.removesuffix("/greedy")
        for report in reports
        for name in report.get("metrics") or {}
        if name.endswith("/greedy")
    }


def accuracies(name: str, prefix: str, result: Fields, reports: Fields) -> Comparison | None:
    """Intervals come from the evaluations; without them the gate's means stand alone."""

    def accuracy(who: str) -> Interval | None:
        return _estimate(reports[who], f"{prefix}greedy") or _interval(result.get(who), None, None)

    return _comparison(
        name,
        {who: accuracy(who) for who in WHO},
        [result.get("n"), *(_size(reports[who], f"{prefix}greedy") for who in WHO)],
        _interval(result.get("difference"), result.get("low"), result.get("high")),
    )


def turns(reports: Fields) -> tuple[Comparison, ...]:
    """Mean turns of the greedy attempts per domain, the whole last; nothing where every attempt
    takes one."""
    if not any("turns" in (report.get("metrics") or {}) for report in reports.values()):
        return ()
    names = sorted(domains_of(reports.values()))
    prefixes = {name: f"{name}/" for name in names if len(names) > 1} | {ALL: ""}
    rows = (_turns(name, prefix, reports) for name, prefix in prefixes.items())
    return tuple(row for row in rows if row is not None)


def _turns(name: str, prefix: str, reports: Fields) -> Comparison | None:
    def mean(who: str) -> Interval | None:
        metrics = reports[who].get("metrics") or {}
        # An evaluation says nothing of turns where each of its attempts took one.
        single = Interval(mean=1.0, low=1.0, high=1.0) if f"{prefix}greedy" in metrics else None
        return _estimate(reports[who], f"{prefix}turns") or single

    domain = prefix.removesuffix("/") or None
    return _comparison(
        name,
        {who: mean(who) for who in WHO},
        [_size(reports[who], f"{prefix}greedy") for who in WHO],
        _paired(*(_turns_by_task(reports[who], domain) for who in ("before", "after"))),
    )


def _turns_by_task(report: Fields, domain: str | None) -> dict[str, float]:
    return {
        task: turns
        for task, outcome in (report.get("outcomes") or {}).items()
        if domain in (None, outcome.get("domain"))
        and (turns := number(outcome.get("num_turns"))) is not None
    }


def _paired(before: Mapping[str, float], after: Mapping[str, float]) -> Interval | None:
    same = [task for task in before if task in after]
    if not same:
        return None
    found = paired_bootstrap([before[t] for t in same], [after[t] for t in same])
    return Interval(mean=found.mean, low=found.low, high=found.high)


def _comparison(
    name: str, values: Mapping[str, Interval | None], sizes: Iterable[Any], change: Interval | None
) -> Comparison | None:
    if all(value is None for value in values.values()):
        return None
    n = next((found for size in sizes if (found := count(size))), 0)
    return Comparison(name=name, n=n, change=change, **values)


def _size(report: Fields, metric: str) -> Any:
    return ((report.get("metrics") or {}).get(metric) or {}).get("n")


def _estimate(report: Fields, metric: str) -> Interval | None:
    found = (report.get("metrics") or {}).get(metric) or {}
    return _interval(found.get("mean"), found.get("low"), found.get("high"))


def _interval(mean: Any, low: Any, high: Any) -> Interval | None:
    middle = number(mean)
    if middle is None:
        return None
    bottom, top = number(low), number(high)
    return Interval(
        mean=middle,
        low=middle if bottom is None else bottom,
        high=middle if top is None else top,
    )
