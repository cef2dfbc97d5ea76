"""Prepared rows compared with what the store has, and committed: the part that must be in order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from distill.curriculum import segments
from distill.curriculum.prepare import Prepared
from distill.curriculum.seen import FORGOTTEN, NO_CONTENT, Digests, Seen, SeenRecord, short, split
from distill.curriculum.seen import words as packed_words
from distill.curriculum.state import Commit, DropRow, FileState

if TYPE_CHECKING:
    from distill.curriculum.ingest import Chunk
    from distill.curriculum.store import LogStore

KEEP, AGAIN = "keep", "again"


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
        record, segment = self._write(batch, fates)
        files: dict[int, FileState] = {chunk.file.id: chunk.file for chunk in batch.chunks}
        added = self.store.state.commit(
            Commit(
                files=list(files.values()),
                restarted=[c.file.id for c in batch.chunks if c.how == "changed"],
                continued=[c.file.id for c in batch.chunks if c.how == "continue"],
                drops=drops,
                evidence=[row for prepared in batch.prepared for row in prepared.evidence],
                seen=record,
                segment=segment,
            )
        )
        if record is not None:
            self.seen.add(record)
        self._count(batch, fates, drops, added)

    def _fates(self, batch: Batch) -> list[list[str]]:
        """Per chunk and turn: keep, again, or the reason for which it is dropped."""
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
                    if shorts[n] != mine[n] and fate in (AGAIN, "duplicate"):
                        fate = "conflicting_id"
                elif ids[n] in here:
                    fate = "duplicate" if here[ids[n]] == mine[n] else "conflicting_id"
                elif refused and refused[len(found)]:
                    fate = "forgotten"
                elif contents[n] != NO_CONTENT and (same[n] or contents[n] in here_contents):
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
                for key in (("user", user), ("session", session), ("source", source))
                if key in self._forgotten
            )
            for user, session, source, ts in zip(*columns, strict=True)
        ]

    def _late_drops(self, batch: Batch, fates: list[list[str]]) -> list[DropRow]:
        found: list[DropRow] = []
        for chunk, prepared, each in zip(batch.chunks, batch.prepared, fates, strict=True):
            for (position, part, number), fate in zip(prepared.places, each, strict=True):
                if fate not in (KEEP, AGAIN):
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
            ids += [prepared.ids[n] for n in kept]
            contents += [prepared.contents[n] for n in kept]
            buckets += [prepared.buckets[n] for n in kept]
            readings += [chunk.file.reading] * len(kept)
        if not parts:
            return None, None
        number = self.store.state.next_segment()
        segment = segments.write(
            self.store.path, number, pa.concat_batches(parts), np.array(buckets)
        )
        self.written += 1
        record = SeenRecord(
            ids=b"".join(ids),
            contents=b"".join(contents),
            readings=np.array(readings, np.uint32).tobytes(),
        )
        return record, segment

    def _count(
        self, batch: Batch, fates: list[list[str]], drops: list[DropRow], added: dict[str, int]
    ) -> None:
        from distill.curriculum.ingest import stops

        by_file: dict[int, Counter[str]] = {}
        for file, *_, reason, _ in drops:
            by_file.setdefault(file, Counter())[reason] += 1
        for chunk, prepared, each in zip(batch.chunks, batch.prepared, fates, strict=True):
            report = chunk.report
            report.read += prepared.rows
            report.stored += each.count(KEEP)
            new = added.pop(report.source, 0)
            report.evidence += new
            report.again += each.count(AGAIN) + len(prepared.evidence) - new
            report.dropped += by_file.pop(chunk.file.id, Counter())
            report.formats += prepared.formats
            usual = chunk.file.importer
            if usual is not None:
                report.schema_changes += prepared.formats.total() - prepared.formats[usual]
            report.stopped += stops(chunk)
