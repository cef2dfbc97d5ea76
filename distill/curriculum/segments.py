"""Segments: immutable Arrow files of turns, one record batch per bucket of sessions.

Every session lies wholly in one bucket, so that a reader holds one bucket at a time and yet sees
whole sessions. A segment is written to a temporary sibling, synced, and renamed.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distill.curriculum.columns import SCHEMA
from distill.curriculum.state import Segment
from distill.rundir import TEMPORARY, clear_disk_errors

FOLDER = "turns"
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
_MODULUS = 2**256
_DIGESTED = 1000
"""Turns whose texts are taken out of a batch at once."""


def bucket_of(
    session_id: str | None, trace_id: str | None, source_id: str, num_buckets: int
) -> int:
    """Where a turn lies: with its session, else with its trace, else by itself."""
    name = session_id or trace_id or source_id
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % num_buckets


def write(folder: Path, number: int, batch: Any, buckets: NDArray[np.int64]) -> Segment:
    """Write the turns of a record batch as segment `number`, split by their buckets [N]. Inside a
    bucket they keep their order. PreflightError when the disk is full."""
    order = np.argsort(buckets, kind="stable")
    found, starts, counts = np.unique(buckets[order], return_index=True, return_counts=True)
    path = folder / FOLDER / f"{number:06d}.arrow"
    partial = path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}")
    with clear_disk_errors(path):
        path.parent.mkdir(exist_ok=True)
        try:
            with pa.OSFile(str(partial), "wb") as sink:
                with pa.ipc.new_file(sink, SCHEMA, options=_OPTIONS) as writer:
                    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
                        # Bucket by bucket: a second copy of the whole batch would not pay.
                        writer.write_batch(batch.take(pa.array(order[start : start + count])))
                sink.flush()
            _sync(partial)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync(path.parent)
    return Segment(
        number=number,
        rows=batch.num_rows,
        size=path.stat().st_size,
        total=total(digests(batch)),
        buckets=tuple(zip(found.tolist(), counts.tolist(), strict=True)),
    )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(
    folder: Path, segment: Segment, bucket: int | None, names: Sequence[str] | None = None
) -> Iterator[Any]:
    """Record batches of one bucket, or of all. `names` reads only these columns.
    FileNotFoundError when the segment was replaced meanwhile."""
    wanted = [n for n, (name, _) in enumerate(segment.buckets) if bucket in (None, name)]
    if not wanted:
        return
    # A mapped file would count as memory of this process for every page that was ever read.
    with pa.OSFile(str(folder / FOLDER / segment.name), "rb") as source:
        columns = None if names is None else [SCHEMA.get_field_index(name) for name in names]
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=columns)
        with pa.ipc.open_file(source, options=options) as file:
            for n in wanted:
                yield file.get_batch(n)


def digests(batch: Any) -> list[int]:
    """A number per turn that changes with its text, its record and its tiers."""
    found: list[int] = []
    for start in range(0, batch.num_rows, _DIGESTED):
        found += _digests(batch.slice(start, _DIGESTED))
    return found


def _digests(batch: Any) -> list[int]:
    columns = [
        batch.column(name).to_pylist() for name in ("source", "format", "source_id", "raw_sha256")
    ]
    for layer in ("prediction", "decision", "served"):
        struct = batch.column(batch.schema.get_field_index(layer))
        columns.append(pa.compute.struct_field(struct, "tier").to_pylist())
    texts = batch.column("messages").cast(pa.binary()).to_pylist()
    found = []
    for row, text in zip(zip(*columns, strict=True), texts, strict=True):
        digest = hashlib.blake2b(repr(row).encode("utf-8", "surrogatepass"), digest_size=32)
        digest.update(b"\0" if text is None else text)
        found.append(int.from_bytes(digest.digest(), "big"))
    return found


def total(numbers: Sequence[int]) -> bytes:
    """Their sum as 32 bytes: equal for equal turns, in whatever order and files they lie."""
    return (sum(numbers) % _MODULUS).to_bytes(32, "big")


def add_totals(totals: Sequence[bytes]) -> bytes:
    return total([int.from_bytes(each, "big") for each in totals])


def remove_strangers(folder: Path, known: Sequence[Segment]) -> int:
    """Delete files that no commit names: what a killed writer left. Only for who holds the lock."""
    found = strangers(folder, known)
    for path in found:
        path.unlink()
    return len(found)


def strangers(folder: Path, known: Sequence[Segment]) -> list[Path]:
    """Files that no commit names."""
    names = {segment.name for segment in known}
    turns = folder / FOLDER
    return [p for p in turns.iterdir() if p.name not in names] if turns.is_dir() else []
