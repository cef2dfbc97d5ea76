"""What a comparison found: the records of `results.json`.

    results.json   {format, name, metric, level, tokens, num_tasks, seeds, contenders: [...],
                    runs: [...], teachers: {seed: {stage: {domain: accuracy}}},
                    table: {baseline, detectable, rows: [...]}, seconds, command}

A run is one contender with one seed: its curve (accuracy by sampled tokens), the value of every
task at the start and at the end (same order in every run of a seed), ranges over all steps, and,
apart from the rest because only they differ between two computations of the same run, speed and
memory. Accuracies are shares in [0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One evaluation."""

    point: int
    """0 = the start; `compare.points` = the budget is spent."""
    step: int
    tokens: int
    """Sampled by the student so far, or written for it by a teacher."""
    greedy: float
    sampled: float | None
    domains: Mapping[str, float]
    """The chosen metric by domain."""
    turns: float | None = None
    """Mean turns of the greedy attempts, where they take several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Of this computation; not part of what a resume must reproduce."""

    seconds: float
    """All steps together, without evaluations."""
    seconds_per_step: float
    peak_rss_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    contender: str
    seed: int
    stopped: str | None
    """Why it ended before its budget; None when it did not."""
    steps: int
    tokens: int
    num_dropped: int
    """Rows that took no part in an update: failed episodes, views that did not fit, groups that
    a refill replaced."""
    curve: tuple[Point, ...]
    start: tuple[float, ...]
    """The chosen metric per task, before training."""
    end: tuple[float, ...]
    grad_norm: Range
    entropy: Range | None
    kept: Ends | None
    """Accuracy on the tasks' own `compare.forgetting` prompts, where they have such."""
    speed: Speed
    withheld: float | None = None
    """The chosen metric at the end without the skills that its prompts otherwise show."""
    notes_valid: float | None = None
    """Share of its hindsight that could be read ..."""
    notes_correct: float | None = None
    """... and that says what the tasks' own lessons say."""
    skills_added: int = 0
    end_turns: tuple[float, ...] = ()
    """Turns of the greedy attempt per task at the end, in the order of `end`; empty where every
    attempt took one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a contender is, for people."""

    name: str
    objective: str
    teacher: str
    view: str
    lr: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A paired mean difference with its 95 % interval over tasks, seeds pooled."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table: a contender over its seeds."""

    name: str
    num_seeds: int
    start: float
    end: float
    change: Change
    """End against start, on the same tasks."""
    against: Change | None
    """End against the baseline's end, on the same tasks; None for the baseline itself."""
    num_reached: int
    """Seeds that reached the level."""
    steps_to_level: float | None
    """Mean over the seeds that reached it; the first evaluated point at or above it counts."""
    tokens_to_level: float | None
    steps: float
    seconds_per_step: float
    peak_rss_bytes: int
    grad_norm: Range
    entropy: Range | None
    kept: float | None
    """Mean change of the accuracy on the forgetting prompts."""
    stopped: tuple[str, ...]
    turns: float | None = None
    """Mean turns of the greedy attempts at the end; None where no contender takes several."""
    turns_against: Change | None = None
    """The same against the baseline's, on the same tasks."""
    withheld: float | None = None
    """The chosen metric at the end without the skills that the prompts otherwise show."""
    notes_valid: float | None = None
    notes_correct: float | None = None
    skills_added: float = 0.0
    """Mean over the seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    baseline: str
    detectable: float | None
    """Smallest true difference to the baseline that every row would show with 80 % power; None
    with one contender."""
    rows: tuple[Row, ...]
    """Best end first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    name: str
    metric: str
    level: float
    tokens: int
    num_tasks: int
    """Per seed."""
    seeds: tuple[int, ...]
    contenders: tuple[About, ...]
    runs: tuple[Run, ...]
    table: Table
    teachers: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """Seed -> bootstrapped teacher -> domain -> accuracy; `all` is the mean over all tasks."""
    seconds: float = 0.0
    """Training time of all runs, without evaluations and bootstrap."""
    command: str = ""
    format: int = FORMAT
