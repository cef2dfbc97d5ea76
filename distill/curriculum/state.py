"""The truth of a log store: one SQLite file that says what is committed.

Files with their watermarks, digests of what was taken in, dropped rows with their reasons,
evidence, segments, and what was forgotten. A commit is one transaction, so that after a crash a
row is either wholly in or will be read again.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from distill.curriculum.records import Evidence, Origin, Verdict
from distill.curriculum.seen import SeenRecord
from distill.errors import DataError

NAME = "state.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS sources (name TEXT PRIMARY KEY, consent INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS files (
    id INTEGER PRIMARY KEY, source TEXT NOT NULL, path TEXT NOT NULL, container TEXT NOT NULL,
    importer TEXT, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, fingerprint BLOB NOT NULL,
    reading INTEGER NOT NULL, position INTEGER NOT NULL, number INTEGER NOT NULL,
    finished INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_source ON files (source);
CREATE TABLE IF NOT EXISTS readings (id INTEGER PRIMARY KEY, file INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS seen (
    number INTEGER PRIMARY KEY, ids BLOB, contents BLOB, readings BLOB
);
CREATE TABLE IF NOT EXISTS drops (
    file INTEGER, position INTEGER, part INTEGER, number INTEGER, reason TEXT, detail TEXT,
    PRIMARY KEY (file, position, part)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evidence (
    digest BLOB PRIMARY KEY, source TEXT, ref TEXT, origin TEXT, name TEXT, value REAL, label TEXT,
    ts INTEGER, raw_sha256 TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS evidence_ref ON evidence (ref);
CREATE TABLE IF NOT EXISTS segments (
    number INTEGER PRIMARY KEY AUTOINCREMENT, rows INTEGER, size INTEGER, total BLOB, buckets TEXT
);
CREATE TABLE IF NOT EXISTS forgotten (
    kind TEXT, name TEXT, until INTEGER, PRIMARY KEY (kind, name)
);
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileState:
    """How far a file was read. `id` 0 is a file that the store does not know yet."""

    id: int = 0
    source: str
    path: str
    container: str
    importer: str | None = None
    size: int
    mtime_ns: int
    fingerprint: bytes
    reading: int = 0
    """Number of this reading from the start; a changed file is read anew, under a new number."""
    position: int = 0
    number: int = 0
    finished: bool = False


_FILE = ", ".join(field.name for field in fields(FileState))


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """A row that was not stored, and why."""

    source: str
    file: str
    number: int
    """1 for the first row of the file."""
    position: int
    reason: str
    """A key of distill.curriculum.drops.REASONS."""
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One immutable Arrow file of turns."""

    number: int
    rows: int
    size: int
    """Bytes of the file."""
    total: bytes
    """Sum of the digests of its turns, modulo 2^256: independent of their order."""
    buckets: tuple[tuple[int, int], ...]
    """(bucket, rows) of each record batch, in the order of the file."""

    @property
    def name(self) -> str:
        return f"{self.number:06d}.arrow"


DROPS_OF_FILES = (
    "JOIN files ON files.id = CASE WHEN drops.file > 0 THEN drops.file "
    "ELSE (SELECT file FROM readings WHERE id = -drops.file) END"
)
"""Drops of an earlier reading of a file, whose content was another, are kept under its number,
below zero."""
DropRow = tuple[int, int, int, int, str, str]
"""file, position, part, number, reason, detail"""
EvidenceRow = tuple[bytes, str, str, str, str, float | None, str | None, int | None, str]


@dataclass(kw_only=True, slots=True)
class Commit:
    """Everything that becomes true at once."""

    files: list[FileState]
    restarted: list[int]
    """Files that are read anew: what was dropped is kept as of the reading before."""
    continued: list[int]
    """Files that are read on: what was cut before may be whole now."""
    drops: list[DropRow]
    evidence: list[EvidenceRow]
    returned: dict[int, int] = field(default_factory=dict)
    """File -> the first of its earlier readings that the present one repeats: it was edited, and
    what was dropped since then is told anew. Of a file that was replaced all stays on record."""
    seen: SeenRecord | None = None
    segment: Segment | None = None


def talk_key(source: str, session: str | None) -> str:
    """One conversation of one source, as a name."""
    return json.dumps([source, session])


class State:
    """An open state file. Every reader gets what the last commit left."""

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.path = folder / NAME
        if not create and not self.path.is_file():
            raise DataError(f"{folder} is no log store: {NAME} is missing")
        self.db = sqlite3.connect(self.path, isolation_level=None, timeout=60)
        self.db.execute("PRAGMA synchronous = FULL")
        self.db.execute("PRAGMA secure_delete = ON")  # what is forgotten must not stay on the disk
        if create:
            with self.transaction():
                for statement in _TABLES.split(";"):
                    self.db.execute(statement)

    def close(self) -> None:
        self.db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield self.db
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")

    # -- files ------------------------------------------------------------------------------------

    def files(self, source: str | None = None) -> list[FileState]:
        where = "" if source is None else "WHERE source = ?"
        rows = self.db.execute(
            f"SELECT {_FILE} FROM files {where} ORDER BY id", () if source is None else (source,)
        )
        names = [field.name for field in fields(FileState)]
        return [
            FileState(**{**dict(zip(names, row, strict=True)), "finished": bool(row[-1])})
            for row in rows
        ]

    def rename(self, file: int, path: str) -> None:
        self.db.execute("UPDATE files SET path = ? WHERE id = ?", (path, file))

    def next_ids(self) -> tuple[int, int]:
        """Free numbers for a file and for a reading."""
        (file,) = self.db.execute("SELECT max(id) FROM files").fetchone()
        (reading,) = self.db.execute("SELECT max(id) FROM readings").fetchone()
        return (file or 0) + 1, (reading or 0) + 1

    def readings(self) -> dict[int, int]:
        """Reading -> file."""
        return dict(self.db.execute("SELECT id, file FROM readings"))

    def set_sources(self, consent: dict[str, bool]) -> None:
        known = dict(self.db.execute("SELECT name, consent FROM sources"))
        if any(known.get(name) != int(given) for name, given in consent.items()):
            with self.transaction() as db:
                db.executemany("INSERT OR REPLACE INTO sources VALUES (?, ?)", consent.items())

    # -- commit -----------------------------------------------------------------------------------

    def commit(self, change: Commit) -> dict[str, int]:
        """Make it true, all or nothing. Returns how much of the evidence of each source is new."""
        with self.transaction() as db:
            db.executemany(  # nothing was lost with a row that is stored, or with a whole file
                "DELETE FROM drops WHERE file = ? AND reason IN ('duplicate', 'unreadable_file')",
                [(n,) for n in change.restarted],
            )
            db.executemany(
                "UPDATE OR REPLACE drops SET file = (SELECT -reading FROM files WHERE id = ?1) "
                "WHERE file = ?1",
                [(n,) for n in change.restarted],
            )
            db.executemany(
                "DELETE FROM drops WHERE file IN "
                "(SELECT -id FROM readings WHERE file = ? AND id >= ?)",
                list(change.returned.items()),
            )
            db.executemany(
                "DELETE FROM drops WHERE file = ? AND reason IN "
                "('truncated_file', 'unreadable_file')",
                [(n,) for n in change.continued],
            )
            marks = ", ".join("?" * len(fields(FileState)))
            db.executemany(
                f"INSERT OR REPLACE INTO files ({_FILE}) VALUES ({marks})",
                [tuple(getattr(f, field.name) for field in fields(f)) for f in change.files],
            )
            db.executemany(
                "INSERT OR IGNORE INTO readings VALUES (?, ?)",
                [(file.reading, file.id) for file in change.files],
            )
            db.executemany("INSERT OR REPLACE INTO drops VALUES (?, ?, ?, ?, ?, ?)", change.drops)
            added: dict[str, int] = {}
            for source in dict.fromkeys(row[1] for row in change.evidence):
                before = db.total_changes
                db.executemany(
                    "INSERT OR IGNORE INTO evidence VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    [row for row in change.evidence if row[1] == source],
                )
                added[source] = db.total_changes - before
            if change.seen is not None:
                self._add_seen(change.seen)
            if change.segment is not None:
                self.add_segment(change.segment)
        return added

    def _add_seen(self, record: SeenRecord) -> None:
        self.db.execute(
            "INSERT INTO seen (ids, contents, readings) VALUES (?, ?, ?)",
            (record.ids, record.contents, record.readings),
        )

    def seen(self) -> list[tuple[int, SeenRecord]]:
        found = self.db.execute("SELECT number, ids, contents, readings FROM seen ORDER BY number")
        return [(n, SeenRecord(ids=i, contents=c, readings=r)) for n, i, c, r in found]

    def set_seen_readings(self, number: int, readings: bytes) -> None:
        self.db.execute("UPDATE seen SET readings = ? WHERE number = ?", (readings, number))

    # -- segments ---------------------------------------------------------------------------------

    def add_segment(self, segment: Segment) -> None:
        self.db.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?)",
            (
                segment.number,
                segment.rows,
                segment.size,
                segment.total,
                json.dumps(segment.buckets),
            ),
        )

    def next_segment(self) -> int:
        """A number that no segment ever had: a reader may still look for the old ones."""
        row = self.db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'segments'").fetchone()
        return (row[0] if row else 0) + 1

    def segments(self) -> list[Segment]:
        return [
            Segment(
                number=number,
                rows=rows,
                size=size,
                total=total,
                buckets=tuple((bucket, count) for bucket, count in json.loads(buckets)),
            )
            for number, rows, size, total, buckets in self.db.execute(
                "SELECT number, rows, size, total, buckets FROM segments ORDER BY number"
            )
        ]

    # -- drops and evidence -----------------------------------------------------------------------

    def drops(self, reason: str | None = None) -> Iterator[Drop]:
        """Dropped rows in the order of files and positions."""
        where = "" if reason is None else "WHERE reason = ?"
        query = (
            "SELECT source, path, drops.number, drops.position, reason, detail FROM drops "
            f"{DROPS_OF_FILES} {where} ORDER BY files.id, drops.file, drops.position, part"
        )
        for source, path, number, position, why, detail in self.db.execute(
            query, () if reason is None else (reason,)
        ):
            yield Drop(
                source=source,
                file=path,
                number=number,
                position=position,
                reason=why,
                detail=detail,
            )

    def drop_counts(self) -> dict[str, dict[str, int]]:
        """Source -> reason -> rows."""
        found: dict[str, dict[str, int]] = {}
        query = (
            f"SELECT source, reason, count(*) FROM drops {DROPS_OF_FILES} "
            "GROUP BY source, reason ORDER BY source, reason"
        )
        for source, reason, count in self.db.execute(query):
            found.setdefault(source, {})[reason] = count
        return found

    def evidence(self, refs: Iterable[str]) -> dict[str, list[Evidence]]:
        """Evidence about each of the refs that has any, oldest first."""
        found: dict[str, list[Evidence]] = {}
        names = list(refs)
        for start in range(0, len(names), 1000):
            part = names[start : start + 1000]
            query = (
                "SELECT source, ref, origin, name, value, label, ts, raw_sha256 FROM evidence "
                f"WHERE ref IN ({', '.join('?' * len(part))}) ORDER BY ref, ts, digest"
            )
            for row in self.db.execute(query, part):
                found.setdefault(row[1], []).append(_evidence(*row))
        return found

    def knows_any(self, evidence: Iterable[EvidenceRow]) -> bool:
        """Whether one of the statements was made before."""
        query = "SELECT 1 FROM evidence WHERE digest = ?"
        return any(self.db.execute(query, row[:1]).fetchone() for row in evidence)

    def all_evidence(self) -> Iterator[bytes]:
        """Digests of the evidence, sorted."""
        for (digest,) in self.db.execute(
            "SELECT digest FROM evidence WHERE ref != '' ORDER BY digest"
        ):
            yield digest

    def count_evidence(self) -> dict[str, int]:
        query = "SELECT source, count(*) FROM evidence WHERE ref != '' GROUP BY source"
        return dict(self.db.execute(query))

    # -- forgetting -------------------------------------------------------------------------------

    def forgotten(self) -> dict[tuple[str, str], int]:
        """(user, session, source or talk, see `talk_key`; its name) -> time until which its turns
        are refused."""
        return {
            (kind, name): until
            for kind, name, until in self.db.execute("SELECT kind, name, until FROM forgotten")
        }

    def forget_evidence(self, refs: Sequence[tuple[str, str]]) -> None:
        """Empty what was said about these turns; the digest stays, so that it does not return."""
        self.db.executemany(
            "UPDATE evidence SET ref = '', origin = '', name = '', value = NULL, label = NULL, "
            "ts = NULL, raw_sha256 = '' WHERE source = ? AND ref = ?",
            refs,
        )


def _evidence(
    source: str,
    ref: str,
    origin: Origin,
    name: str,
    value: float | None,
    label: str | None,
    ts: int | None,
    raw_sha256: str,
) -> Evidence:
    verdict = Verdict(source=origin, name=name, value=value, label=label, ts=ts)
    return Evidence(source=source, ref=ref, verdict=verdict, raw_sha256=raw_sha256)
