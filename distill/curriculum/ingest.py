"""The import of logs into a store: only what is new, each row once, whatever happens on the way.

Rows are read in chunks, prepared (here or in other processes), gathered, compared with what the
store has, and written: first a segment, then one transaction that makes it count together with the
positions up to which files were read. An interrupted import goes on at the last commit.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from distill.curriculum import segments
from distill.curriculum.drops import RowError
from distill.curriculum.merging import Batch, Merger
from distill.curriculum.prepare import (
    AUTO,
    Job,
    Prepared,
    Redact,
    Source,
    check,
    recognise,
)
from distill.curriculum.reading import (
    Place,
    Reading,
    Row,
    discover,
    is_waiting,
    parse,
    read_rows,
)
from distill.curriculum.state import FileState
from distill.curriculum.watermarks import Unreadable, plan
from distill.curriculum.workers import in_order
from distill.errors import ConfigError

if TYPE_CHECKING:
    from distill.curriculum.store import LogStore

logger = logging.getLogger(__name__)

CHUNK_ROWS, CHUNK_BYTES = 1000, 1024 * 1024
BATCH_ROWS, BATCH_BYTES = 20_000, 32 * 1024 * 1024
_LOOKED_AT = 100
"""Rows of a chunk that are looked at to recognise a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Where reading a file ended before its end."""

    place: Place
    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """After each chunk."""

    source: str
    file: str
    rows: int
    """Read so far, of all sources."""
    position: int
    size: int
    """Bytes of the file; of a compressed one `position` counts uncompressed bytes."""


@dataclass(kw_only=True, slots=True)
class SourceReport:
    """What the import of one source did. Counts are of committed rows."""

    source: str
    read: int = 0
    stored: int = 0
    evidence: int = 0
    """New statements about turns."""
    again: int = 0
    """Turns and statements that came from an earlier reading of the same file."""
    dropped: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    schema_changes: int = 0
    """Rows of another format than their file began with."""
    files: int = 0
    skipped: int = 0
    """Files without anything new."""
    renamed: int = 0
    resumed_from: list[Place] = field(default_factory=list)
    """Where files were read on."""
    stopped: list[Stop] = field(default_factory=list)
    """Files that end in the middle of a row or could not be read to their end."""
    unreadable: list[Unreadable] = field(default_factory=list)
    """Files and sources that could not be opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestReport:
    sources: tuple[SourceReport, ...]
    segments: int
    """Segments written."""
    seconds: float

    def total(self, name: str) -> int:
        """Sum of a count over the sources, such as `stored`."""
        return sum(getattr(source, name) for source in self.sources)

    @property
    def dropped(self) -> Counter[str]:
        return sum((source.dropped for source in self.sources), Counter())


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Rows of one file, and how far the file is read with them."""

    source: Source
    report: SourceReport
    file: FileState
    rows: Sequence[Row]
    how: str
    """Of the first chunk of a file: new, continue or changed; else empty."""


def ingest(
    store: LogStore,
    sources: Sequence[Source],
    *,
    redact: Redact | None,
    now_ms: int,
    progress: Callable[[Progress], None] | None = None,
    jobs: int = 1,
) -> IngestReport:
    """Import everything new in the sources.

    `redact` takes personal data out of a turn before anything of it is written; it must be a pure
    function, and with `jobs` > 1 one that can be sent to another process. The result does not
    depend on `jobs`. A file that cannot be read is reported and the next one goes on. An exception
    on the way carries a note saying where the next import will go on.
    """
    check_sources(sources, jobs)
    began = time.monotonic()
    with store.lock():
        segments.remove_strangers(store.path, store.segments)
        store.state.set_sources({source.name: source.consent for source in sources})
        work = _Import(store, sources, now_ms, progress)
        try:
            work.run(redact, jobs)
        except BaseException as error:
            if work.committed is not None:
                error.add_note(f"the import stopped; it will go on at {work.committed}")
                logger.warning("the import stopped; it will go on at %s", work.committed)
            raise
    return IngestReport(
        sources=tuple(work.reports),
        segments=work.merger.written,
        seconds=time.monotonic() - began,
    )


def check_sources(sources: Sequence[Source], jobs: int) -> None:
    """ConfigError for what no import could read: before anything is read or made."""
    names = [source.name for source in sources]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"two sources are called {twice[0]!r}; each needs a name of its own")
    if jobs < 1:
        raise ConfigError(f"jobs: expected at least 1, found {jobs}")
    for source in sources:
        check(source)
        Reading.of(source.options, source.max_line_bytes)


class _Import:
    def __init__(
        self,
        store: LogStore,
        sources: Sequence[Source],
        now_ms: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.store, self.sources, self.now_ms = store, sources, now_ms
        self.progress = progress
        self.reports = [SourceReport(source=source.name) for source in sources]
        self.merger = Merger(store)
        self.next_file, self.next_reading = store.state.next_ids()
        self.committed: Place | None = None
        self.rows = 0

    def run(self, redact: Redact | None, jobs: int) -> None:
        batch = Batch()
        chunks = (
            chunk
            for source, report in zip(self.sources, self.reports, strict=True)
            for chunk in self._source(source, report)
        )
        with in_order(chunks, self._job, redact, jobs) as done:
            for chunk, prepared in done:
                self._tell(chunk)
                batch.add(chunk, prepared)
                if batch.rows >= BATCH_ROWS or batch.size >= BATCH_BYTES:
                    self._flush(batch)
                    batch = Batch()
        self._flush(batch)

    def _flush(self, batch: Batch) -> None:
        if batch.chunks:
            self.merger.commit(batch)
            pa.default_memory_pool().release_unused()
            self.committed = _place(batch.chunks[-1].file)

    def _job(self, chunk: Chunk) -> Job:
        return Job(
            source=chunk.source,
            importer=chunk.file.importer,
            rows=chunk.rows,
            salt=self.store.salt,
            now_ms=self.now_ms,
            num_buckets=self.store.num_buckets,
        )

    def _tell(self, chunk: Chunk) -> None:
        self.rows += len(chunk.rows)
        if self.progress is not None:
            file = chunk.file
            self.progress(
                Progress(
                    source=file.source,
                    file=file.path,
                    rows=self.rows,
                    position=file.position,
                    size=file.size,
                )
            )

    # -- files ------------------------------------------------------------------------------------

    def _source(self, source: Source, report: SourceReport) -> Iterator[Chunk]:
        reading = Reading.of(source.options, source.max_line_bytes)
        paths = discover(source.path)
        if not paths:
            report.unreadable.append(Unreadable(path=source.path, why="no file there"))
        known = self.store.files(source.name)
        for planned in plan(source.name, paths, known, reading):
            if isinstance(planned, Unreadable):
                report.unreadable.append(planned)
                continue
            file = planned.file
            if planned.renamed:
                report.renamed += 1
                self.store.state.rename(file.id, file.path)
            if planned.how == "unchanged":
                report.skipped += 1
                continue
            report.files += 1
            if planned.how == "continue":
                if file.position:
                    report.resumed_from.append(_place(file))
            else:
                file = replace(
                    file,
                    id=file.id or self._new_file(),
                    reading=self._new_reading(),
                    position=0,
                    number=0,
                    finished=False,
                )
            if self.committed is None:
                self.committed = _place(file)
            yield from self._file(source, report, reading, file, planned.how)

    def _new_file(self) -> int:
        self.next_file += 1
        return self.next_file - 1

    def _new_reading(self) -> int:
        self.next_reading += 1
        return self.next_reading - 1

    def _file(
        self, source: Source, report: SourceReport, reading: Reading, file: FileState, how: str
    ) -> Iterator[Chunk]:
        rows: list[Row] = []
        size = 0
        path = Path(file.path)
        last: Row | None = None
        for row in read_rows(path, reading, file.container, file.position, file.number):
            last = row
            rows.append(row)
            size += len(row.raw)
            if len(rows) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                file = _advance(file, rows, source)
                yield Chunk(source=source, report=report, file=file, rows=rows, how=how)
                rows, size, how = [], 0, ""
        # What broke while it was read is tried again next time, and so is what may be whole later
        # though it stays as it is; what is cut, when it has grown.
        finished = last is None or not (last.reason == "unreadable_file" or is_waiting(last))
        file = replace(_advance(file, rows, source), finished=finished)
        yield Chunk(source=source, report=report, file=file, rows=rows, how=how)


def _advance(file: FileState, rows: Sequence[Row], source: Source) -> FileState:
    """The file as it stands after these rows."""
    if file.importer is None and source.format == AUTO and source.consent:
        file = replace(file, importer=_first_importer(rows))
    if not rows:
        return file
    last = rows[-1]
    # A row that will be read again is not counted yet.
    number = last.number if last.end != last.start or not last.reason else last.number - 1
    return replace(file, position=last.end, number=number)


def _first_importer(rows: Sequence[Row]) -> str | None:
    for row in rows[:_LOOKED_AT]:
        if not row.reason:
            try:
                name = recognise(parse(row.raw))
            except RowError:
                continue
            if name is not None:
                return name
    return None


def _place(file: FileState) -> Place:
    return Place(file.path, file.number, file.position)


def stops(chunk: Chunk) -> Iterator[Stop]:
    """Why reading ended with this chunk, if it did."""
    for row in chunk.rows[-1:]:
        if row.reason in ("truncated_file", "unreadable_file"):
            yield Stop(place=_place(chunk.file), reason=row.reason, detail=row.detail)


__all__ = ["IngestReport", "Prepared", "Progress", "Source", "SourceReport", "Stop", "ingest"]
