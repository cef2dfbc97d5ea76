"""From runs to the table of a comparison: means over seeds, paired intervals, what can be seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import NormalDist, fmean

import numpy as np

from distill.errors import DataError
from evals.compare_page_facts import Change, Point, Range, Row, Run, Table
from evals.metrics import paired_bootstrap

POWER = 0.8
CONFIDENCE = 0.95


def summarise(
    runs: Sequence[Run], names: Sequence[str], *, baseline: str, level: float, metric: str
) -> Table:
    """One row per name, best end first. Every name needs a run for each of the same seeds."""
    by_name = {name: [run for run in runs if run.contender == name] for name in names}
    seeds = [[run.seed for run in found] for found in by_name.values()]
    if any(other != seeds[0] or not other for other in seeds):
        raise DataError(f"every contender needs the same seeds, found {seeds}")
    base = _pooled(by_name[baseline], "end")
    rows, gaps = [], []
    several = any(run.end_turns or run.curve[-1].turns is not None for run in runs)
    for name, found in by_name.items():
        end = _pooled(found, "end")
        against = None
        if name != baseline:
            against = _change(base, end)
            gaps.append(detectable(base, end))
        row = _row(found, against, level, metric)
        if several:
            paired = None if name == baseline else _turns_against(by_name[baseline], found)
            row = replace(row, turns=fmean(map(_mean_turns, found)), turns_against=paired)
        rows.append(row)
    rows.sort(key=lambda row: -row.end)  # stable: equal ends keep the order of the file
    return Table(baseline=baseline, detectable=max(gaps) if gaps else None, rows=tuple(rows))


def detectable(before: Sequence[float], after: Sequence[float]) -> float:
    """Smallest true difference that these paired tasks would show with 80 % power: 2.8 standard
    errors of the mean difference. Equal results count as if one task had changed."""
    gaps = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    count, normal = len(gaps), NormalDist()
    spread = max(float(gaps.std()), 1.0 / math.sqrt(count))
    width = normal.inv_cdf(0.5 + CONFIDENCE / 2) + normal.inv_cdf(POWER)
    return min(1.0, width * spread / math.sqrt(count))


def accuracy(point: Point, metric: str) -> float:
    if metric == "greedy" or point.sampled is None:
        return point.greedy
    return point.sampled


def _row(runs: Sequence[Run], against: Change | None, level: float, metric: str) -> Row:
    reached = [point for run in runs if (point := _first_at(run, level, metric)) is not None]
    entropies = [run.entropy for run in runs if run.entropy is not None]
    kept = [run.kept.end - run.kept.start for run in runs if run.kept is not None]
    return Row(
        name=runs[0].contender,
        num_seeds=len(runs),
        start=fmean(accuracy(run.curve[0], metric) for run in runs),
        end=fmean(accuracy(run.curve[-1], metric) for run in runs),
        change=_change(_pooled(runs, "start"), _pooled(runs, "end")),
        against=against,
        num_reached=len(reached),
        steps_to_level=fmean(p.step for p in reached) if reached else None,
        tokens_to_level=fmean(p.tokens for p in reached) if reached else None,
        steps=fmean(run.steps for run in runs),
        seconds_per_step=fmean(run.speed.seconds_per_step for run in runs),
        peak_rss_bytes=max(run.speed.peak_rss_bytes for run in runs),
        grad_norm=_union([run.grad_norm for run in runs]),
        entropy=_union(entropies) if entropies else None,
        kept=fmean(kept) if kept else None,
        stopped=tuple(f"seed {r.seed}: {r.stopped}" for r in runs if r.stopped is not None),
        withheld=_known(run.withheld for run in runs),
        notes_valid=_known(run.notes_valid for run in runs),
        notes_correct=_known(run.notes_correct for run in runs),
        skills_added=fmean(run.skills_added for run in runs),
    )


def _known(values: Iterable[float | None]) -> float | None:
    """Mean over the seeds that have a value."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def _mean_turns(run: Run) -> float:
    """An evaluation says nothing of turns where each of its attempts took one."""
    last = run.curve[-1].turns
    return 1.0 if last is None else last


def _turns_against(before: Sequence[Run], after: Sequence[Run]) -> Change | None:
    """Paired difference in turns; None where results of before know only the means."""
    pooled = []
    for runs in (before, after):
        if any(not run.end_turns and run.curve[-1].turns is not None for run in runs):
            return None
        pooled.append([t for run in runs for t in run.end_turns or (1.0,) * len(run.end)])
    return _change(*pooled)


def _first_at(run: Run, level: float, metric: str) -> Point | None:
    return next((p for p in run.curve if accuracy(p, metric) >= level), None)


def _pooled(runs: Sequence[Run], which: str) -> list[float]:
    """The values of all tasks of all seeds, one after the other."""
    return [value for run in runs for value in getattr(run, which)]


def _change(before: Sequence[float], after: Sequence[float]) -> Change:
    found = paired_bootstrap(before, after, confidence=CONFIDENCE)
    return Change(mean=found.mean, low=found.low, high=found.high)


def _union(ranges: Sequence[Range]) -> Range:
    return Range(low=min(r.low for r in ranges), high=max(r.high for r in ranges))
