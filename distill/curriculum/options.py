"""The sections [curriculum] and [traffic] of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distill.sections import within

MIX = (0.80, 0.20, 0.00, 0.12, 0.60, 0.28, 0.08, 0.20, 0.72)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """One source of routing logs."""

    path: str
    """A file, a folder, a pattern, or `stage:NAME` for what a stage `serve` of the run wrote."""
    name: str = ""
    """What the source is called in tables and in `distill forget --source`; empty takes the name of
    the file or folder."""
    format: str = "auto"
    """An importer's name, `my_pkg.module:attr`, or `auto` to recognise it by its rows."""
    consent: bool = True
    """Whether its users agreed that a model learns from it; without it nothing is stored."""
    tiers: Mapping[str, Any] = field(default_factory=dict)
    """Model, or the log's own name of a tier -> tier 0 to 3."""
    mapping: Mapping[str, Any] = field(default_factory=dict)
    """With format `mapped`: field of a turn -> path in a row."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the importer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurriculumSection:
    """How a stage of kind `curriculum` makes training data of routing logs."""

    store: str = ""
    """Folder under `logs/` that keeps what was imported from night to night; empty keeps it in the
    run alone."""
    sources: tuple[SourceOptions, ...] = ()
    redact: Literal["rules", "none"] = "rules"
    """What takes personal data out before anything is stored."""
    entities: str = ""
    """A named-entity redactor besides the rules: `ner:PATH`, or `my_pkg.module:attr`."""
    decontaminate: bool = True
    """Drop trajectories that overlap with an evaluation prompt of the shared [data]."""
    near_duplicate: float = within(0.8, 0.0, 1.0)
    """Jaccard similarity from which two turns of one session are near-duplicates; 0 keeps all."""
    demand: Literal["fitted", "logged", "judge"] = "fitted"
    """Who says how capable a model a turn needs."""
    score: Literal["soft", "hard"] = "soft"
    """Order by the mean of the demand distribution, or by its most likely class."""
    mix: tuple[float, ...] = within(MIX, 0.0, 1.0)
    """Share of the easy, middle and hard third in stage 1, 2 and 3, row by row; rows and columns
    add up to 1."""
    examples: int = within(0, 0)
    """Most turns in the curriculum; 0 takes all. Weak cells get more of them."""
    kappa: float = within(2.0, 0.0)
    """How strongly the allocation leans toward weak cells."""
    floor: float = within(0.5, 0.0, 1.0)
    """Share of its base that a cell keeps whatever its accuracy."""
    contexts: Literal["all", "success"] = "all"
    """Which turns give contexts for distillation: there the student writes its own reply, so those
    that failed may be the most useful. Worked examples are always successes."""
    student_tier: int = within(0, 0, 3)
    """Tier whose success rate says how weak the student is in a cell."""
    capable: float = within(0.70, 0.0, 1.0)
    """Success rate from which a tier is capable of a cell."""
    min_turns: int = within(20, 1)
    """Turns with a verifiable outcome that such a verdict needs."""
    weight_cap: float = within(10.0, 1.0)
    """Largest inverse-propensity weight."""
    judge: Mapping[str, Any] = field(default_factory=dict)
    """A model that judges turns and demand, as options of the analyst `model`; empty means none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficSection:
    """How a stage of kind `serve` lets a router serve a generated workload over two tiers."""

    requests: int = within(2000, 1, 10**7)
    explore: float = within(0.2, 0.0, 1.0)
    """Chance that the router tries a tier at random instead of its first choice."""
    reask: float = within(0.5, 0.0, 1.0)
    """Chance that a user whose request failed asks again; the router then takes the strong tier."""
    temperature: float = within(0.0, 0.0)
    """Temperature of both tiers; 0 is greedy."""
    session: int = within(4, 1, 1000)
    """Requests of one user in a row."""
