"""Importing logs from the command line: which sources, with what progress, and what came of it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from distill.curriculum.ingest import IngestReport, Progress, SourceReport, check_sources
from distill.curriculum.prepare import Source
from distill.curriculum.reading import discover
from distill.curriculum.state import Drop
from distill.errors import ConfigError, DataError

if TYPE_CHECKING:
    from distill.curriculum.options import CurriculumSection
    from distill.curriculum.store import LogStore

STAGE_PREFIX = "stage:"
SECONDS_PER_LINE = 10.0
HARMLESS = frozenset({"duplicate", "conflicting_id", "not_completed", "no_consent", "forgotten"})
"""Reasons that say nothing against the file: its rows could be read."""


def pairs(values: Sequence[str], option: str) -> dict[str, str]:
    """KEY=VALUE words as a table; the last `=` divides. ConfigError for a word without one."""
    found = {}
    for text in values:
        key, sign, value = text.rpartition("=")
        if not (sign and key.strip() and value.strip()):
            raise ConfigError(f"{option} expects NAME=VALUE, found {text!r}")
        found[key.strip()] = value.strip()
    return found


def tiers_of(values: Sequence[str]) -> dict[str, Any]:
    """`MODEL=0` words as a table of tiers; what is no number is the name of a tier."""
    return {k: int(v) if v.isdigit() else v for k, v in pairs(values, "--tier").items()}


def source_name(path: str) -> str:
    """A file's name without its endings, a folder's name, or of a pattern the folder it is in."""
    found = Path(path)
    if any(mark in found.name for mark in "*?["):
        found = found.parent
    name = found.absolute().name
    while Path(name).suffix and not found.is_dir():
        name = Path(name).stem
    return name or "logs"


def configured(section: CurriculumSection) -> list[Source]:
    """The sources of a configuration. ConfigError for those that a run makes, or for none."""
    made = [s.path for s in section.sources if s.path.startswith(STAGE_PREFIX)]
    if made:
        raise ConfigError(
            f"source {made[0]!r} is what a stage of a run writes; only a night can read it: "
            "distill nightly"
        )
    if not section.sources:
        raise ConfigError("the configuration names no [[curriculum.sources]]; add one, or PATHS")
    return [
        Source(
            name=source.name or source_name(source.path),
            path=source.path,
            format=source.format,
            consent=source.consent,
            tiers=source.tiers,
            mapping=source.mapping,
            options=source.options,
        )
        for source in section.sources
    ]


def take(
    store: LogStore,
    sources: Sequence[Source],
    *,
    redact: Callable[[Any], Any] | None,
    jobs: int,
    stream: TextIO | None = None,
) -> IngestReport:
    """Import everything new. Sources of one name are read one after the other and reported as one.

    DataError when nothing at all could be read."""
    rounds = _rounds(sources)
    now_ms = int(time.time() * 1000)
    with open_bar(stream) as bar:
        reports = [
            store.ingest(some, redact=redact, now_ms=now_ms, progress=bar, jobs=jobs)
            for some in rounds
        ]
    report = _united(reports)
    _require_something(report)
    return report


def check(sources: Sequence[Source], *, jobs: int) -> None:
    """Refuse what cannot be imported before a store is made for it: ConfigError for a wrong format,
    tier or option, DataError when no source is there."""
    for some in _rounds(sources):
        check_sources(some, jobs)
    if sources and not any(discover(source.path) for source in sources):
        raise _nothing([(source.path, "no file there") for source in sources])


def _rounds(sources: Sequence[Source]) -> list[list[Source]]:
    """Sources of one name in different rounds, in their order."""
    rounds: list[list[Source]] = []
    for source in sources:
        free = [r for r in rounds if source.name not in {s.name for s in r}]
        if free:
            free[0].append(source)
        else:
            rounds.append([source])
    return rounds


def plain(report: SourceReport) -> dict[str, Any]:
    """The report as JSON values. Not by `asdict`, which takes a Counter for a list of pairs."""
    table = {field.name: getattr(report, field.name) for field in fields(report)}
    counters = {"dropped": dict(report.dropped), "formats": dict(report.formats)}
    places = [place._asdict() for place in report.resumed_from]
    return {**table, **counters, "resumed_from": places}


def _united(reports: Sequence[IngestReport]) -> IngestReport:
    merged: dict[str, SourceReport] = {}
    for one in (source for report in reports for source in report.sources):
        known = merged.setdefault(one.source, SourceReport(source=one.source))
        for name in ("read", "stored", "evidence", "again", "schema_changes", "files", "skipped"):
            setattr(known, name, getattr(known, name) + getattr(one, name))
        known.renamed += one.renamed
        known.dropped += one.dropped
        known.formats += one.formats
        known.resumed_from += one.resumed_from
        known.stopped += one.stopped
        known.unreadable += one.unreadable
    return IngestReport(
        sources=tuple(merged.values()),
        segments=sum(report.segments for report in reports),
        seconds=sum(report.seconds for report in reports),
    )


def _require_something(report: IngestReport) -> None:
    """DataError when no row of any file could be used, and none was used before."""
    lost = [(file.path, file.why) for source in report.sources for file in source.unreadable]
    if lost and not report.total("files") and not report.total("skipped"):
        raise _nothing(lost)
    read, good = report.total("read"), sum(map(report.total, ("stored", "evidence", "again")))
    bad: Counter[str] = Counter(
        {reason: n for reason, n in report.dropped.items() if reason not in HARMLESS}
    )
    if read and not good and bad.total() >= read:
        from distill.curriculum.drops import REASONS

        reason, count = bad.most_common(1)[0]
        raise DataError(
            f"none of {read:,} rows could be used; {count:,} of them: "
            f"{REASONS.get(reason, reason)}. Where and why: distill logs drops; name the format "
            "with --format, or where its fields stand with --format mapped --map FIELD=PATH"
        )


def _nothing(lost: Sequence[tuple[str, str]]) -> DataError:
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    return DataError(f"nothing could be read: {lost[0][0]}: {lost[0][1]}{more}")


def first_drops(
    store: LogStore, dropped: Mapping[str, Mapping[str, int]]
) -> dict[tuple[str, str], Drop]:
    """(source, reason) -> the first such row on record; `dropped` says which are asked for."""
    wanted: dict[str, set[str]] = {}
    for source, reasons in dropped.items():
        for reason in reasons:
            wanted.setdefault(reason, set()).add(source)
    found: dict[tuple[str, str], Drop] = {}
    for reason, sources in wanted.items():
        for drop in store.drops(reason):
            if drop.source in sources:
                found[drop.source, reason] = drop
                sources.discard(drop.source)
            if not sources:
                break
    return found


# -- progress -------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_bar(stream: TextIO | None = None) -> Iterator[Callable[[Progress], None]]:
    """Shows how far an import is: a bar with rows per second and bytes in a terminal, else a line
    every ten seconds. On stderr."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _Lines(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(file=stream), transient=True) as bars:
        yield _Bar(bars)


@dataclass(slots=True)
class _Speed:
    """Rows per second since the first row was told."""

    began: float = 0.0

    def of(self, rows: int) -> float:
        now = time.monotonic()
        self.began = self.began or now
        return rows / max(now - self.began, 0.1)


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream, self._speed, self._last = stream, _Speed(), time.monotonic()

    def __call__(self, at: Progress) -> None:
        speed, now = self._speed.of(at.rows), time.monotonic()
        if now - self._last < SECONDS_PER_LINE:
            return
        self._last = now
        done = f", {at.position / at.size:.0%} of" if 0 < at.position <= at.size else ", in"
        name = Path(at.file).name
        text = f"{at.source}: {at.rows:,} rows{done} {name}, {speed:,.0f} rows/s"
        print(ascii_safe(text), file=self._stream, flush=True)


class _Bar:
    def __init__(self, bars: Any) -> None:
        self._bars, self._speed, self._file = bars, _Speed(), ""
        self._task: Any = None

    def __call__(self, at: Progress) -> None:
        from rich.markup import escape

        speed = f"{at.rows:,} rows, {self._speed.of(at.rows):,.0f}/s"
        if self._task is None or at.file != self._file:
            if self._task is not None:
                self._bars.remove_task(self._task)
            words = escape(ascii_safe(f"{at.source}: {Path(at.file).name}"))
            self._task, self._file = self._bars.add_task(words, total=at.size, speed=speed), at.file
        # The position in a compressed file counts what comes out of it.
        total = at.size if at.position <= at.size else None
        self._bars.update(self._task, completed=at.position, total=total, speed=speed)


def ascii_safe(text: str) -> str:
    """A name of a file or source without what would steer a terminal."""
    from flows.skills_tables import short

    return short(text, 100)
