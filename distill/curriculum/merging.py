"""Prepared rows compared with what the store has, and committed: the part that must be in order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from distill.curriculum import segments
from distill.curriculum.prepare import Prepared, evidence_row
from distill.curriculum.records import Evidence, Verdict
from distill.curriculum.seen import FORGOTTEN, Digests, Seen, SeenRecord, short, split
from distill.curriculum.seen import words as packed_words
from distill.curriculum.state import Commit, DropRow, EvidenceRow, FileState, talk_key

if TYPE_CHECKING:
    from distill.curriculum.ingest import Chunk
    from distill.curriculum.store import LogStore

KEEP, AGAIN, LATE = "keep", "again", "late"
"""A new turn; one of an earlier reading of its file; a known one with another outcome."""
_LATE_COLUMNS = ("source", "source_id", "raw_sha256", "id_digest", "outcome")


@dataclass(slots=True)
class Batch:
    """Chunks that are committed together."""

    chunks: list[Chunk] = field(default_factory=list)
    prepared: list[Prepared] = field(default_factory=list)
    rows: int = 0
    size: int = 0

    def add(self, chunk: Chunk, prepared: Prepared) -> None:
        self.chunks.append(chunk)
        self.prepared.append(prepared)
        # A file counts for something even without rows, so that many empty ones get committed.
        self.rows += max(1, prepared.rows)
        self.size += prepared.size


class Merger:
    """Takes batches in order. Exactly one turn is kept per id, and one per content."""

    def __init__(self, store: LogStore) -> None:
        self.store = store
        self.written = 0
        self._seen: Seen | None = None
        self._again = Digests()
        """Ids that the present reading of a changed file met once more."""
        self._returned: dict[int, int] = {}
        """File -> the first of its earlier readings that is met once more."""
        self._reading = 0
        self._files: dict[int, int] = {}
        self._forgotten = store.state.forgotten()

    @property
    def seen(self) -> Seen:
        if self._seen is None:
            self._seen = Seen(record for _, record in self.store.state.seen())
            self._files = self.store.state.readings()
        return self._seen

    def commit(self, batch: Batch) -> None:
        """Write the new turns of a batch and everything else that it says."""
        fates = self._fates(batch)
        drops = [
            (chunk.file.id, *drop)
            for chunk, prepared in zip(batch.chunks, batch.prepared, strict=True)
            for drop in prepared.drops
        ]
        drops += self._late_drops(batch, fates)
        for chunk, prepared in zip(batch.chunks, batch.prepared, strict=True):
            if chunk.how == "changed" and self.store.state.knows_any(prepared.evidence[:100]):
                self._returned[chunk.file.id] = 0
        late = self._late_statements(batch, fates)
        record, segment = self._write(batch, fates)
        files: dict[int, FileState] = {chunk.file.id: chunk.file for chunk in batch.chunks}
        added = self.store.state.commit(
            Commit(
                files=list(files.values()),
                restarted=[c.file.id for c in batch.chunks if c.how == "changed"],
                continued=[c.file.id for c in batch.chunks if c.how == "continue"],
                drops=drops,
                returned=self._returned,
                evidence=[row for prepared in batch.prepared for row in self._allowed(prepared)]
                + [row for turns in late for rows in turns for row in rows],
                seen=record,
                segment=segment,
            )
        )
        if record is not None:
            self.seen.add(record)
        self._returned = {}
        self._count(batch, fates, drops, late, added)

    def _fates(self, batch: Batch) -> list[list[str]]:
        """Per chunk and turn: keep, again, late, or the reason for which it is dropped."""
        ids = [id_ for prepared in batch.prepared for id_ in prepared.ids]
        if not ids:
            return [[] for _ in batch.prepared]
        contents = [content for prepared in batch.prepared for content in prepared.contents]
        id_words, content_words = packed_words(b"".join(ids)), packed_words(b"".join(contents))
        known, extra = self.seen.ids.find(id_words)
        readings, shorts = split(extra)
        same, _ = self.seen.contents.find(content_words)
        mine = short(content_words).tolist()
        self._files |= {chunk.file.reading: chunk.file.id for chunk in batch.chunks}
        here: dict[bytes, int] = {}
        here_contents: set[bytes] = set()
        fates: list[list[str]] = []
        n = 0
        for chunk, prepared in zip(batch.chunks, batch.prepared, strict=True):
            refused = self._refused(prepared)
            found: list[str] = []
            for _ in prepared.ids:
                if known[n]:
                    fate = self._fate_of_known(chunk, id_words[n : n + 1], readings[n])
                    if fate in (AGAIN, "duplicate"):
                        told = bool(same[n]) or contents[n] in here_contents
                        fate = _of_same_id(shorts[n] == mine[n], told, fate)
                elif ids[n] in here:
                    told = bool(same[n]) or contents[n] in here_contents
                    fate = _of_same_id(here[ids[n]] == mine[n], told, "duplicate")
                elif refused and refused[len(found)]:
                    fate = "forgotten"
                elif same[n] or contents[n] in here_contents:
                    fate = "duplicate"
                else:
                    fate = KEEP
                    here[ids[n]] = mine[n]
                    here_contents.add(contents[n])
                found.append(fate)
                n += 1
            fates.append(found)
        return fates

    def _fate_of_known(self, chunk: Chunk, digest: Any, reading: int) -> str:
        if reading == FORGOTTEN:
            return "forgotten"
        current = chunk.file.reading
        if reading == current or self._files.get(reading) != chunk.file.id:
            return "duplicate"
        if self._reading != current:
            self._reading, self._again = current, Digests()
        if self._again.find(digest)[0][0]:
            return "duplicate"
        self._again.add(digest)
        self._returned[chunk.file.id] = min(reading, self._returned.get(chunk.file.id, reading))
        return AGAIN

    def _refused(self, prepared: Prepared) -> list[bool]:
        """Which turns belong to somebody who was forgotten after they happened."""
        if not self._forgotten or prepared.batch is None:
            return []
        names = ("user", "session_id", "source", "ts")
        columns = [prepared.batch.column(name).to_pylist() for name in names]
        return [
            any(
                ts is None or ts <= self._forgotten[key]
                for key in (
                    ("user", user),
                    ("session", session),
                    ("source", source),
                    ("talk", talk_key(source, session)),
                )
                if key in self._forgotten
            )
            for user, session, source, ts in zip(*columns, strict=True)
        ]

    def _allowed(self, prepared: Prepared) -> list[EvidenceRow]:
        """Statements of sources that were not forgotten after they were made."""
        if not any(kind == "source" for kind, _ in self._forgotten):
            return prepared.evidence
        until = [self._forgotten.get(("source", row[1])) for row in prepared.evidence]
        return [
            row
            for row, last in zip(prepared.evidence, until, strict=True)
            if last is None or (row[7] is not None and row[7] > last)
        ]

    def _late_statements(
        self, batch: Batch, fates: list[list[str]]
    ) -> list[list[list[EvidenceRow]]]:
        """Per chunk and late turn, what it says that its call did not say when it was stored."""
        found: list[dict[str, Any]] = []
        wanted: set[int] = set()
        for prepared, each in zip(batch.prepared, fates, strict=True):
            late = [n for n, fate in enumerate(each) if fate == LATE]
            if late:
                found += _rows(prepared.batch, late)
                wanted |= {prepared.buckets[n] for n in late}
        if not found:
            return [[] for _ in fates]
        told = self._told(batch, fates, {row["id_digest"] for row in found}, wanted)
        rows = iter(found)
        return [
            [self._statements(next(rows), told) for fate in each if fate == LATE] for each in fates
        ]

    def _statements(
        self, row: dict[str, Any], told: dict[bytes, list[dict[str, Any]]]
    ) -> list[EvidenceRow]:
        before = told.get(row["id_digest"], ())
        new = [
            Evidence(
                source=row["source"],
                ref=row["source_id"],
                verdict=Verdict(**said),
                raw_sha256=row["raw_sha256"],
            )
            for said in _said(row)
            if said not in before
        ]
        return [evidence_row(each, self.store.salt) for each in new]

    def _told(
        self, batch: Batch, fates: list[list[str]], ids: set[bytes], buckets: set[int]
    ) -> dict[bytes, list[dict[str, Any]]]:
        """Id -> verdicts that came with the call itself, in the store or in this batch."""
        names = pa.array(list(ids), pa.binary(16))
        found: dict[bytes, list[dict[str, Any]]] = {}
        for bucket in buckets:
            table = self.store.table(bucket, ("id_digest", "outcome"))
            table = table.filter(pa.compute.is_in(table["id_digest"], value_set=names))
            found |= {row["id_digest"]: _said(row) for row in table.to_pylist()}
        for prepared, each in zip(batch.prepared, fates, strict=True):
            kept = [n for n, f in enumerate(each) if f == KEEP and prepared.ids[n] in ids]
            if kept:
                rows = _rows(prepared.batch, kept)
                found |= {row["id_digest"]: _said(row) for row in rows}
        return found

    def _late_drops(self, batch: Batch, fates: list[list[str]]) -> list[DropRow]:
        found: list[DropRow] = []
        for chunk, prepared, each in zip(batch.chunks, batch.prepared, fates, strict=True):
            for (position, part, number), fate in zip(prepared.places, each, strict=True):
                if fate not in (KEEP, AGAIN, LATE):
                    found.append((chunk.file.id, position, part, number, fate, ""))
        return found

    def _write(self, batch: Batch, fates: list[list[str]]) -> tuple[Any, Any]:
        """The new turns as a segment, and the record of their digests; None without any."""
        parts, ids, contents, readings, buckets = [], [], [], [], []
        for chunk, prepared, each in zip(batch.chunks, batch.prepared, fates, strict=True):
            kept = [n for n, fate in enumerate(each) if fate == KEEP]
            if not kept:
                continue
            whole = len(kept) == len(each)
            parts.append(prepared.batch if whole else prepared.batch.take(pa.array(kept)))
            prepared.batch = None  # the texts are what takes memory; nobody needs them again
            ids += [prepared.ids[n] for n in kept]
            contents += [prepared.contents[n] for n in kept]
            buckets += [prepared.buckets[n] for n in kept]
            readings += [chunk.file.reading] * len(kept)
        if not parts:
            return None, None
        number = self.store.state.next_segment()
        whole_batch = pa.concat_batches(parts)
        parts.clear()
        segment = segments.write(self.store.path, number, whole_batch, np.array(buckets))
        self.written += 1
        record = SeenRecord(
            ids=b"".join(ids),
            contents=b"".join(contents),
            readings=np.array(readings, np.uint32).tobytes(),
        )
        return record, segment

    def _count(
        self,
        batch: Batch,
        fates: list[list[str]],
        drops: list[DropRow],
        late: list[list[list[EvidenceRow]]],
        added: dict[str, int],
    ) -> None:
        from distill.curriculum.ingest import stops

        by_file: dict[int, Counter[str]] = {}
        for file, *_, reason, _ in drops:
            by_file.setdefault(file, Counter())[reason] += 1
        for chunk, prepared, each, more in zip(
            batch.chunks, batch.prepared, fates, late, strict=True
        ):
            report = chunk.report
            report.read += prepared.rows
            report.stored += each.count(KEEP)
            new = added.pop(report.source, 0)
            report.evidence += new
            # Of an outcome that tells nothing new, the call itself is what came again.
            told = len(prepared.evidence) + sum(len(rows) or 1 for rows in more)
            report.again += each.count(AGAIN) + told - new
            report.dropped += by_file.pop(chunk.file.id, Counter())
            report.formats += prepared.formats
            usual = chunk.file.importer
            if usual is not None:
                report.schema_changes += prepared.formats.total() - prepared.formats[usual]
            report.stopped += stops(chunk)


def _of_same_id(same_call: bool, told: bool, fate: str) -> str:
    """What becomes of a turn whose id is known: `told` where its outcome is known as well."""
    if not same_call:
        return "conflicting_id"
    return fate if told else LATE


def _rows(batch: Any, numbers: list[int]) -> list[dict[str, Any]]:
    part = batch.select(list(_LATE_COLUMNS)).take(pa.array(numbers))
    rows: list[dict[str, Any]] = part.to_pylist()
    return rows


def _said(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The verdicts of an outcome."""
    return list((row["outcome"] or {}).get("verdicts") or ())
