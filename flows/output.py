"""Results on stdout: JSON for programs, short aligned text for people."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.types import DomainResult, EvalReport, Verdict


def say(text: str = "") -> None:
    """One line of talk: stderr, so that stdout holds results only."""
    print(text, file=sys.stderr)


def print_json(value: Any) -> None:
    """A JSON value or record. Numbers that JSON cannot hold become null."""
    from distill.rundir import to_json

    print(json.dumps(_finite(to_json(value)), indent=2, ensure_ascii=False))


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Left-aligned columns under their names; a missing value is a dash."""
    cells = [
        list(columns),
        *([_cell(row.get(column)) for column in columns] for row in rows),
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        pairs = zip(line, widths, strict=True)
        print("  ".join(cell.ljust(width) for cell, width in pairs).rstrip())


def print_verdict(verdict: Verdict) -> None:
    """The decision, one line per domain with its interval, and the reasons."""
    print(f"verdict: {verdict.decision}")
    rows = [_domain(name, result) for name, result in verdict.domains.items()]
    rows.append(_domain("all", verdict.overall))
    print_table(rows, ["domain", "teacher", "before", "after", "difference", "interval", "n"])
    for reason in verdict.reasons:
        print(f"{'passed' if reason.passed else 'failed'}: {reason.text}")


def print_report(report: EvalReport) -> None:
    """Every metric with its interval."""
    rows = [
        {
            "metric": name,
            "mean": _percent(estimate.mean),
            "interval": f"{_percent(estimate.low)} to {_percent(estimate.high)}",
            "n": estimate.n,
        }
        for name, estimate in report.metrics.items()
    ]
    print_table(rows, ["metric", "mean", "interval", "n"])


def _domain(name: str, result: DomainResult) -> dict[str, Any]:
    return {
        "domain": name,
        "teacher": None if result.teacher is None else _percent(result.teacher),
        "before": _percent(result.before),
        "after": _percent(result.after),
        "difference": f"{100 * result.difference:+.1f}",
        "interval": f"{100 * result.low:+.1f} to {100 * result.high:+.1f}",
        "n": result.n,
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _cell(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
