"""From a log store to a curriculum: turns with outcomes and demand, the boundary, and stages.

Two passes over the store, a bucket of sessions at a time: the first looks at a sample of turns and
fits the model of demand, the second does everything else. Memory holds one bucket and a few numbers
per turn; texts go straight to disk. The result depends on the stored turns, the options and the
seed alone. Source: NeoHorse-1, arXiv 2609.08183; where it gives no formula, the parts say whose.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from distill.curriculum.choose import choose
from distill.curriculum.contamination import Suites
from distill.curriculum.demand import (
    Calibration,
    Demand,
    DemandInput,
    demand_input,
    fallback_demand,
    given_demand,
    logged_demand,
)
from distill.curriculum.demand_features import Sketch, sketch
from distill.curriculum.demand_fit import DemandModel, fit_demand
from distill.curriculum.demand_sample import FitSample, Observation, label_observations
from distill.curriculum.examples import Example, ExampleWriter
from distill.curriculum.labels import Aligned
from distill.curriculum.light import Light, RowWriter
from distill.curriculum.nearby import Entry, family_of, near_duplicates, text_of
from distill.curriculum.options import CurriculumSection
from distill.curriculum.outcomes import Judged
from distill.curriculum.profile import Profile, admissible, merge
from distill.curriculum.store import LogStore
from distill.curriculum.summary import SUMMARY, Taken, summary_of
from distill.curriculum.turns import UserTurn
from distill.curriculum.walk import Fits, Found, Tally, Walker
from distill.curriculum.workers import in_turn, processes
from distill.errors import DataError
from distill.rundir import write_json

SAMPLE = 20_000
"""Turns behind the model of demand, at most; buckets are read until there are so many."""
MOST_LOOKED_AT = 5 * SAMPLE
"""Turns that are looked at for them: few may have an outcome."""
MODEL = "demand.json"
FILES_PER_BUCKET = 200
MOST_JOBS = 4
AHEAD = 2 * MOST_JOBS
"""Buckets that are worked on, or wait, at once."""
WORTH_JOBS = 20_000
"""Turns from which further processes pay for their start."""


Told = tuple[str, str | None, Sketch, list[Observation]]
"""Id and session of a turn, its text as numbers, and what it says about demand."""


class Judge(Protocol):
    """A model that is asked about turns; None or NOT_EVALUATED where it does not say."""

    def profiles(self, turns: Sequence[tuple[UserTurn, Profile]]) -> list[Profile]: ...

    def demands(self, wanted: Sequence[DemandInput]) -> list[tuple[float, ...] | None]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """Who says how much a turn demands, for the whole log."""

    method: str
    model: DemandModel | None = None
    calibration: Calibration | None = None
    note: str = ""

    def record(self) -> dict[str, Any]:
        """What a summary says about it."""
        quality = None
        if self.calibration is not None:
            quality = asdict(self.calibration)
        return {"method": self.method, "note": self.note, "calibration": quality}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What every bucket needs; it can be sent to another process."""

    store: Path
    out: Path
    options: CurriculumSection
    demands: Demands
    suites: Suites | None = None
    fits: Fits | None = None


def build(
    store: LogStore,
    options: CurriculumSection,
    out: Path,
    *,
    seed: int = 0,
    suites: Suites | None = None,
    fits: Fits | None = None,
    judge: Judge | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write a curriculum into the empty folder `out` and return its summary.

    `progress` gets (buckets done, all buckets). A large log is worked on by several processes, for
    which `suites` and `fits` must be picklable; the result is the same. DataError when nothing of
    the log can be used.
    """
    taken = Taken(digest=store.digest(), dropped=store.drop_counts())
    demands = _demands(store, options, judge)
    if demands.model is not None:
        demands.model.save(out / MODEL)
    work = Work(
        store=store.path, out=out, options=options, demands=demands, suites=suites, fits=fits
    )
    light, tally = Light(), Tally()
    for number, (part, counted) in enumerate(_parts(work, store, judge), start=1):
        light.extend(part)
        tally.add(counted)
        if progress is not None:
            progress(number, store.num_buckets)
    made = choose(light.table(), options, out, seed=seed, num_buckets=store.num_buckets)
    summary = summary_of(taken, made, tally, demands.record())
    write_json(out / SUMMARY, summary)
    return summary


def helpers(num_turns: int) -> int:
    """Processes that work on a log of so many turns; 1 is this one alone."""
    return min(os.cpu_count() or 1, MOST_JOBS) if num_turns >= WORTH_JOBS else 1


def _parts(work: Work, store: LogStore, judge: Judge | None) -> Iterator[tuple[Light, Tally]]:
    """What every bucket gives, in order."""
    numbers = range(store.num_buckets)
    if judge is not None or helpers(store.num_turns) == 1:
        for number in numbers:
            yield bucket(work, number, store, judge)
        return
    with processes(helpers(store.num_turns), _start, work.store, work) as pool:
        yield from in_turn(pool, _bucket_elsewhere, numbers, AHEAD)


_store: LogStore | None = None
_work: Work | None = None


def _start(store: Path, work: Work | None = None) -> None:
    """Begin a helping process."""
    global _store, _work
    _store, _work = LogStore.open(store), work


def _told_elsewhere(number: int) -> tuple[int, list[Told]]:
    assert _store is not None
    return _told_by(number, _store)


def _bucket_elsewhere(number: int) -> tuple[Light, Tally]:
    assert _store is not None
    assert _work is not None
    return bucket(_work, number, _store, None)


def bucket(work: Work, number: int, store: LogStore, judge: Judge | None) -> tuple[Light, Tally]:
    """Write the examples and light rows of one bucket; return its numbers."""
    walker = Walker(store=store, suites=work.suites, fits=work.fits, contexts=work.options.contexts)
    light = Light()
    examples = ExampleWriter(work.out, first=number * FILES_PER_BUCKET)
    with examples, RowWriter(work.out, number) as rows:
        for found in walker.bucket(number):
            _judge(found, judge, work.options.contexts)
            _drop_near(found, work.options.near_duplicate)
            given = _estimates(found, work.demands, judge)
            places = examples.add([_example(f) for f in found if f.reason is None])
            light.add(found, given, places)
            rows.add(found, given)
            del given, places
            pa.default_memory_pool().release_unused()
    return light, walker.tally


# -- demand --------------------------------------------------------------------------------------


def _demands(store: LogStore, options: CurriculumSection, judge: Judge | None) -> Demands:
    if options.demand == "judge" and judge is None:
        raise DataError('curriculum.demand = "judge" needs somebody to ask; set curriculum.judge')
    if options.demand != "fitted":
        return Demands(method=options.demand)
    sample, looked_at = FitSample(SAMPLE), 0
    for looked, told in _told(store):
        looked_at += looked
        for turn, session, given, seen in told:
            sample.add(turn, session, given, seen)
        if sample.num_seen >= SAMPLE or looked_at >= MOST_LOOKED_AT:
            break
    try:
        model, calibration = fit_demand(sample)
    except DataError as error:
        return Demands(method="fallback", note=str(error))
    if not calibration.is_useful:
        note = (
            f"a model fitted on {model.num_turns:,} turns predicts outcomes no better than the "
            "tier that served; the logged prediction stands in, or a flat demand without one"
        )
        return Demands(method="fallback", calibration=calibration, note=note)
    known = [tier for tier, is_known in enumerate(model.identified) if is_known]
    note = f"fitted on {model.num_turns:,} turns; tiers served often enough: {known}"
    return Demands(method="fitted", model=model, calibration=calibration, note=note)


def _told(store: LogStore) -> Iterator[tuple[int, list[Told]]]:
    """Of each bucket how many turns it has, and what they say about demand."""
    if helpers(store.num_turns) == 1:
        yield from (_told_by(number, store) for number in range(store.num_buckets))
        return
    with processes(helpers(store.num_turns), _start, store.path) as pool:
        yield from in_turn(pool, _told_elsewhere, range(store.num_buckets), AHEAD)


def _told_by(number: int, store: LogStore) -> tuple[int, list[Told]]:
    looked, told = 0, []
    for turn, judged, label, _ in Walker(store=store).judged(number):
        looked += 1
        seen = observed(turn, judged, label)
        if seen and turn.messages and turn.start >= 0:
            given = demand_input(turn.messages, turn.start, turn.tools)
            told.append((turn.id, turn.session_id, sketch(given), seen))
    return looked, told


def observed(turn: UserTurn, judged: Judged, label: Aligned) -> list[Observation]:
    """What a turn says about its demand: how it went at the tier that answered, and its label."""
    seen: list[Observation] = []
    tier = turn.served.tier if turn.served is not None else None
    if tier is not None and judged.verifiable and not turn.cached:
        seen.append(Observation(tier, judged.result == "success"))
    # A label that only repeats the decision is the router's word, not an outcome.
    if label.label is not None and label.reason in ("retrospective", "explicit_downvote"):
        seen += label_observations(label.label, label.weight)
    return seen


def _estimates(found: Sequence[Found], demands: Demands, judge: Judge | None) -> list[Demand]:
    given: list[Demand | None] = [None] * len(found)
    asked = [i for i, f in enumerate(found) if f.demand is not None]
    inputs = [f.demand for f in found if f.demand is not None]
    if demands.model is not None:
        families = [found[i].family for i in asked]
        for i, demand in zip(asked, demands.model.demands(inputs, families), strict=True):
            given[i] = demand
    elif demands.method == "judge":
        assert judge is not None
        for i, probs in zip(asked, judge.demands(inputs), strict=True):
            given[i] = None if probs is None else given_demand(probs, "judge")
    elif demands.method == "logged":
        given = [logged_demand(f.turn.prediction) for f in found]
    return [
        demand or fallback_demand(f.turn.prediction) for f, demand in zip(found, given, strict=True)
    ]


# -- what is left out ----------------------------------------------------------------------------


def _judge(found: Sequence[Found], judge: Judge | None, contexts: str) -> None:
    """Let a judge fill in and lower the profiles of what may become an example."""
    if judge is None:
        return
    asked = [f for f in found if f.reason is None]
    views = judge.profiles([(f.turn, f.profile) for f in asked])
    for one, view in zip(asked, views, strict=True):
        one.profile = merge(one.profile, view)
        good, why = admissible(one.profile, one.judged)
        one.sft = one.sft and good
        one.opd = one.opd and (good or contexts == "all")
        if not (one.sft or one.opd):
            one.reason = why


def _drop_near(found: Sequence[Found], threshold: float) -> None:
    """Leave out turns that nearly repeat an earlier one of their session."""
    if not threshold:
        return
    families: dict[tuple[str, str], str] = {}
    entries = []
    for one in found:
        if one.reason is not None:
            continue
        turn = one.turn
        session = (turn.source, turn.session_id or turn.id)
        family = families.get(session)
        if family is None:
            family = families[session] = family_of(turn.source, turn.session_id, turn.messages)
        known = one.words is not None and len(one.words)
        text = "" if known else text_of((*one.prompt[-1:], *one.response))
        entries.append(Entry(id=turn.id, family=family, text=text, ts=turn.ts, words=one.words))
    repeated = {d.id for d in near_duplicates(entries, threshold=threshold)}
    for one in found:
        if one.turn.id in repeated:
            one.reason = "near_duplicate"


def _example(found: Found) -> Example:
    turn = found.turn
    return Example(
        id=turn.id,
        session_id=turn.session_id,
        source=turn.source,
        scene=found.scene.name,
        prompt=found.prompt,
        turn=found.response,
        tools=turn.tools,
    )
