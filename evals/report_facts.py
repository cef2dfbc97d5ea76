"""What a report says, read from the files of a run. Both renderings show exactly these facts."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.rundir import read_json, read_jsonl
from evals.report_learned import Learned, read_learned
from evals.report_measures import (
    ALL,
    WHO,
    Comparison,
    Fields,
    accuracies,
    count,
    domains_of,
    number,
    turns,
)
from evals.report_routed import read_routed
from evals.report_samples import Sample, read_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One rule of the gate."""

    rule: str
    passed: bool | None
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """What a stage logged per step; `series` maps a name to one value or None per step."""

    stage: str
    measure: str
    steps: tuple[int, ...]
    series: Mapping[str, tuple[float | None, ...]]

    def picks(self, count: int = 11) -> list[int]:
        """Evenly spread positions for a table, first and last included."""
        last = len(self.steps) - 1
        return sorted({round(i * last / (count - 1)) for i in range(count)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    name: str
    objective: str
    steps: int | None
    tokens: int | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    run: str
    decision: str | None
    headline: str
    overall: Comparison | None
    domains: tuple[Comparison, ...]
    detectable: float | None
    turns: tuple[Comparison, ...]
    """Mean turns per domain, the whole last; empty where every attempt takes one."""
    checks: tuple[Check, ...]
    learned: tuple[Learned, ...]
    """Stages that learned in words ..."""
    bank: str | None
    """... and the NAME@VERSION of the skills that stand in the prompts."""
    routed: tuple[str, ...]
    """Sentences about the routing log that the night learned from."""
    curves: tuple[Curve, ...]
    samples: tuple[Sample, ...]
    stages: tuple[Stage, ...]
    seconds: float | None
    warnings: tuple[str, ...]
    command: str | None
    about: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]


def read_facts(run_dir: Path) -> Facts:
    """The facts of a run. A missing file leaves its part out; a damaged one is a DataError."""
    summary = _optional(run_dir / "summary.json")
    verdict = _optional(run_dir / "gates" / "verdict.json")
    env = _optional(run_dir / "env.json")
    reports = {who: _optional(run_dir / "evals" / f"{who}.json") for who in WHO}
    decision = verdict.get("decision") or summary.get("verdict")
    results: Fields = verdict.get("domains") or summary.get("domains") or {}
    names = sorted({*results, *domains_of(reports.values())})
    overall = accuracies(ALL, "", verdict.get("overall") or {}, reports)
    return Facts(
        run=str(summary.get("run") or run_dir.resolve().name),
        decision=str(decision) if decision else None,
        headline=_failure(run_dir)
        if not summary and _failure(run_dir)
        else headline(str(decision) if decision else None, overall, bool(summary))
        + _stopped(summary),
        overall=overall,
        domains=tuple(
            found
            for name in names
            if (found := accuracies(name, f"{name}/", results.get(name) or {}, reports))
        ),
        detectable=number(verdict.get("detectable")),
        turns=turns(reports),
        checks=tuple(map(_check, verdict.get("reasons") or summary.get("reasons") or ())),
        learned=read_learned(run_dir, summary.get("stages") or ()),
        bank=str(summary["bank_version"]) if summary.get("bank_version") else None,
        routed=read_routed(summary),
        curves=_curves(run_dir / "metrics.jsonl"),
        samples=read_samples(run_dir / "samples.json", reports),
        stages=tuple(map(_stage, summary.get("stages") or ())),
        seconds=number(summary.get("seconds")),
        warnings=tuple(str(warning) for warning in summary.get("warnings") or ()),
        command=_command(summary, env),
        about=_about(summary),
        environment=tuple(_flat(env, skip=("argv",))),
    )


def _failure(run_dir: Path) -> str:
    """Why the last attempt of a run ended, when it failed."""
    path = run_dir / "events.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    if not rows or rows[-1].get("event") != "failed":
        return ""
    return f"Failed: {rows[-1].get('error') or 'unknown'}"


def _stopped(summary: Fields) -> str:
    names = [str(s["name"]) for s in summary.get("stages") or () if s.get("stopped")]
    return f" Stopped early: stage {', '.join(names)} (see the warnings)." if names else ""


def headline(decision: str | None, overall: Comparison | None, finished: bool) -> str:
    """The verdict in one plain sentence."""
    word = {"promote": "Promoted", "hold": "Held", "reject": "Rejected"}.get(decision or "")
    if overall is None or overall.after is None:
        if word:
            return f"{word}."
        return "Finished without an evaluation." if finished else "This run has not finished yet."
    sentence = f"the student solves {percent(overall.after.mean)} of {overall.n} held-out tasks"
    if overall.before is not None:
        up = overall.after.mean - overall.before.mean
        where = "up from" if up > 0 else "down from" if up < 0 else "the same as before,"
        sentence += f", {where} {percent(overall.before.mean)}"
    if overall.teacher is not None:
        sentence += f"; the teacher solves {percent(overall.teacher.mean)}"
    end = {
        "hold": ". The evidence does not carry a change, so the previous champion stays.",
        "reject": ". The previous champion stays.",
    }.get(decision or "", ".")
    return f"{word or 'Not judged'}: {sentence}{end}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


def points(share: float) -> str:
    """A difference of shares in percentage points, always signed."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def signed(value: float) -> str:
    """A difference of counts, always signed."""
    return f"{round(value, 2) + 0.0:+.2f}"


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """Centred moving average over `window` steps, cut off at both ends; gaps stay gaps."""
    half = window // 2
    # Running sums keep this linear: a long stage has a wide window as well.
    sums = list(itertools.accumulate((value or 0.0 for value in values), initial=0.0))
    counts = list(itertools.accumulate((value is not None for value in values), initial=0))
    smoothed: list[float | None] = []
    for i, value in enumerate(values):
        start, stop = max(0, i - half), min(len(values), i + half + 1)
        mean = None
        if value is not None:
            mean = (sums[stop] - sums[start]) / (counts[stop] - counts[start])
        smoothed.append(mean)
    return smoothed


def window_of(curve: Curve) -> int:
    """How many steps the shown curve averages: about a fifteenth of the stage, odd."""
    return len(curve.steps) // 15 | 1


def _optional(path: Path) -> Fields:
    if not path.exists():
        return {}
    value = read_json(path)
    return value if isinstance(value, Mapping) else {}


def _check(reason: Any) -> Check:
    if isinstance(reason, Mapping):
        passed = reason.get("passed")
        return Check(
            rule=str(reason.get("rule", "")),
            passed=passed if isinstance(passed, bool) else None,
            text=str(reason.get("text", "")),
        )
    return Check(rule="", passed=None, text=str(reason))


def _curves(path: Path) -> tuple[Curve, ...]:
    if not path.exists():
        return ()
    stages: dict[str, dict[int, Fields]] = {}
    for row in read_jsonl(path):
        step = count(row.get("step")) if isinstance(row, Mapping) else None
        if step is not None:
            # A resumed run repeats the steps after its last checkpoint: the last row counts.
            stages.setdefault(str(row.get("stage") or ""), {})[step] = row
    curves = [curve for stage, rows in stages.items() if (curve := _curve(stage, rows))]
    # The student's own attempts first; the bootstrap of teacher and base is background.
    return tuple(sorted(curves, key=lambda curve: curve.measure != "reward"))


def _curve(stage: str, rows: Mapping[int, Fields]) -> Curve | None:
    steps = tuple(sorted(rows))
    keys = sorted({key for row in rows.values() for key in row if key.startswith("reward/")})
    chosen = {"all domains": "reward/mean"}
    chosen |= {key.removeprefix("reward/"): key for key in keys if key != "reward/mean"}
    measure = "reward"
    if not any(number(row.get("reward/mean")) is not None for row in rows.values()):
        chosen, measure = {"loss": "loss"}, "loss"
    logged = {
        name: tuple(number(rows[step].get(key)) for step in steps) for name, key in chosen.items()
    }
    series = {name: values for name, values in logged.items() if any(v is not None for v in values)}
    return Curve(stage=stage, measure=measure, steps=steps, series=series) if series else None


def _stage(row: Fields) -> Stage:
    return Stage(
        name=str(row.get("name", "")),
        objective=str(row.get("objective") or ""),
        steps=count(row.get("steps")),
        tokens=count(row.get("tokens")),
        seconds=number(row.get("seconds")),
    )


def _command(summary: Fields, env: Fields) -> str | None:
    """The stored command line, as text or as a list of arguments."""
    command = summary.get("command") or env.get("argv")
    if isinstance(command, list):
        return shlex.join(map(str, command))
    return str(command) if command else None


def _about(summary: Fields) -> tuple[tuple[str, str], ...]:
    shown = [
        (label, str(summary[key]))
        for key, label in (
            ("preset", "Preset"),
            ("model", "Model"),
            ("seed", "Seed"),
            ("started", "Started"),
            ("adapter_sha256", "Weights (SHA-256)"),
            ("bank_version", "Skill bank"),
        )
        if summary.get(key) is not None
    ]
    if (seconds := number(summary.get("seconds"))) is not None:
        shown.append(("Duration", duration(seconds)))
    if (peak := number(summary.get("peak_rss_bytes"))) is not None:
        shown.append(("Peak memory", f"{peak / 2**30:.2f} GiB"))
    return tuple(shown)


def _flat(value: Any, prefix: str = "", skip: tuple[str, ...] = ()) -> Iterable[tuple[str, str]]:
    """A nested table as dotted names and texts."""
    for key, entry in value.items():
        name = f"{prefix}{key}"
        if name in skip or entry is None:
            continue
        if isinstance(entry, Mapping):
            yield from _flat(entry, f"{name}.", skip)
        else:
            yield name, " ".join(map(str, entry)) if isinstance(entry, list) else str(entry)
