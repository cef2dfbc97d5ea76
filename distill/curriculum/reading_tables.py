"""Rows of Parquet, Arrow and SQLite files as JSON objects, a batch at a time.

Times become ISO 8601 text, decimals numbers, NaN null, bytes text (base64 where they are none).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pydantic_core import PydanticSerializationError, to_json

from distill.curriculum.drops import RowError

if TYPE_CHECKING:
    from distill.curriculum.reading import Reading, Row

ERRORS: tuple[type[Exception], ...] = (pa.ArrowException, sqlite3.Error)
"""What a damaged file of these kinds raises, beside OSError."""
KNOWN_TABLES = ("router_decisions", "LiteLLM_SpendLogs")
ROWS = 1024


def rows(path: Path, reading: Reading, container: str, position: int, number: int) -> Iterator[Row]:
    """Rows from `position` on: an index in Parquet and Arrow, in SQLite the last row id read."""
    if container == "sqlite":
        yield from _sqlite(path, reading, position, number)
        return
    batches = _parquet(path, position) if container == "parquet" else _arrow(path, position)
    for batch in batches:
        for values in _plain(batch).to_pylist():
            yield _row(position + 1, position, position + 1, values, reading.max_row)
            position += 1


def _row(number: int, start: int, end: int, values: dict[str, Any], limit: int) -> Row:
    from distill.curriculum.reading import Row

    try:
        raw = to_json(values, inf_nan_mode="null", bytes_mode="utf8")
    except (PydanticSerializationError, ValueError):
        try:
            raw = to_json(values, inf_nan_mode="null", bytes_mode="base64")
        except (PydanticSerializationError, ValueError) as error:
            return Row(number, start, end, b"", "bad_encoding", str(error)[:120])
    if len(raw) > limit:
        return Row(number, start, end, b"", "huge_row", f"over {limit} bytes")
    return Row(number, start, end, raw)


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Decimals as floats: as text they would be another type than in the other files."""
    columns = [
        column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _parquet(path: Path, position: int) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        groups: list[int] = []
        skip = position
        for group in range(file.num_row_groups):
            held = file.metadata.row_group(group).num_rows
            if not groups and skip >= held:
                skip -= held
                continue
            groups.append(group)
        if groups:
            yield from _after(
                file.iter_batches(batch_size=ROWS, row_groups=groups, use_threads=False), skip
            )


def _arrow(path: Path, position: int) -> Iterator[pa.RecordBatch]:
    """Both Arrow layouts: with a directory at the end (feather) and as a stream (datasets)."""
    # Not mapped: the pages of a mapped file count as memory of this process.
    with pa.OSFile(str(path), "rb") as source:
        if source.read(6) == b"ARROW1":
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(n) for n in range(file.num_record_batches))
        else:
            source.seek(0)
            batches = iter(pa.ipc.open_stream(source))
        yield from _after(batches, position)


def _after(batches: Iterator[pa.RecordBatch], skip: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if skip >= batch.num_rows:
            skip -= batch.num_rows
            continue
        for start in range(skip, batch.num_rows, ROWS):
            yield batch.slice(start, ROWS)
        skip = 0


# -- SQLite ---------------------------------------------------------------------------------------


def _sqlite(path: Path, reading: Reading, position: int, number: int) -> Iterator[Row]:
    with contextlib.closing(_connect(path)) as db:
        # Text that is no UTF-8 is refused row by row; by default it would end the reading.
        db.text_factory = lambda value: value.decode("utf-8", "surrogateescape")
        table = _quoted(_table(db, reading.table))
        has_id = _has_rowid(db, table)
        if has_id:
            found = db.execute(
                f"SELECT rowid, * FROM {table} WHERE rowid > ? ORDER BY rowid",
                (position if position else -(2**63),),
            )
        else:
            found = db.execute(f"SELECT 0, * FROM {table} LIMIT -1 OFFSET ?", (position,))
        names = [column[0] for column in found.description][1:]
        for row_id, *values in found:
            position = row_id if has_id else position + 1
            number += 1
            row = dict(zip(names, values, strict=True))
            yield _row(number, position, position, row, reading.max_row)


def _connect(path: Path) -> sqlite3.Connection:
    """Read only. A database in a folder that cannot be written has no log beside it to look at."""
    name = f"file:{str(path.resolve()).replace('?', '%3f').replace('#', '%23')}"
    db = sqlite3.connect(f"{name}?mode=ro", uri=True)
    try:
        db.execute("SELECT 1 FROM sqlite_master LIMIT 1")
    except sqlite3.OperationalError:
        db.close()
        db = sqlite3.connect(f"{name}?mode=ro&immutable=1", uri=True)
    return db


def _table(db: sqlite3.Connection, wanted: str | None) -> str:
    query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE ?"
    names = [name for (name,) in db.execute(query, ("sqlite_%",))]
    if wanted is not None:
        if wanted not in names:
            raise RowError("unreadable_file", f"no table {wanted!r}; it has {', '.join(names)}")
        return wanted
    chosen = names if len(names) == 1 else [name for name in KNOWN_TABLES if name in names]
    if not chosen:
        raise RowError(
            "unreadable_file",
            f"several tables: {', '.join(names) or 'none'}; name one in options.table",
        )
    return str(chosen[0])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _has_rowid(db: sqlite3.Connection, table: str) -> bool:
    """False for a table without row ids and for a view, which names none of its own."""
    try:
        first = db.execute(f"SELECT rowid FROM {table} LIMIT 1").fetchone()
    except sqlite3.OperationalError:
        return False
    return first is None or first[0] is not None
