"""What a report says of the routing log that a night learned from, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.curriculum.drops import REASONS
from evals.report_measures import Fields, count, number


def read_routed(summary: Fields) -> tuple[str, ...]:
    """Sentences about the night's curricula and traffic; none where it had no log."""
    told = [_curriculum(found) for found in summary.get("curricula") or ()]
    traffic = summary.get("traffic")
    return (*told, *(_traffic(traffic) if traffic else ()))


def _curriculum(found: Mapping[str, Any]) -> str:
    counts = found.get("counts") or {}
    stages = [f"{count(stage.get('n')) or 0:,}" for stage in found.get("stages") or ()]
    dropped = (found.get("dropped") or {}).get("build") or {}
    worst = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))[:3]
    left = "; ".join(f"{n:,}: {REASONS.get(reason, reason)}" for reason, n in worst)
    new = count(found.get("new"))
    tonight = "" if new is None else f" ({new:,} new tonight)"
    return (
        f"Stage {found.get('stage')}: {_n(counts, 'calls')} calls of the log{tonight} made "
        f"{_n(counts, 'turns')} turns and {_n(counts, 'examples')} examples "
        f"({' + '.join(stages)} from easy to hard; {_n(counts, 'sft')} to imitate, "
        f"{_n(counts, 'contexts')} contexts to answer)."
        + (f" Left out most often: {left}." if left else "")
    )


def _n(counts: Fields, name: str) -> str:
    return f"{count(counts.get(name)) or 0:,}"


def _traffic(found: Mapping[str, Any]) -> list[str]:
    before, after = found.get("before") or {}, found.get("after") or {}
    values = {
        "sent": found.get("sent"),
        "old": before.get("solved"),
        "new": after.get("solved"),
        **{name: found.get(name) for name in ("difference", "low", "high")},
    }
    known = {
        name: 100 * share for name, value in values.items() if (share := number(value)) is not None
    }
    if len(known) < len(values):
        return []
    sentences = [
        f"The router sends {known['sent']:.1f} % of requests to the student's tier, which solves "
        f"{known['old']:.1f} % of all traffic before and {known['new']:.1f} % after the night: "
        f"{known['difference']:+.1f} points [{known['low']:+.1f}, {known['high']:+.1f}]."
    ]
    first, second = (number(side.get("of_solved")) for side in (before, after))
    if first is not None and second is not None:
        sentences.append(
            f"Its share of all solved traffic goes from {100 * first:.1f} % to "
            f"{100 * second:.1f} %."
        )
    return sentences
