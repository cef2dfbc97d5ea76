"""Files of logs as rows of JSON: JSONL, JSON, CSV, Parquet, Arrow, SQLite, packed or not.

A row comes as the bytes of a JSON object with its place, or with the reason why there is none.
Memory holds a chunk or a row group's page, never a file. Reading goes on after a bad row; where it
cannot go on, the last row says so and carries the position to resume at.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json, to_json

from distill.curriculum import byte_streams, reading_tables, splitting
from distill.curriculum.byte_streams import CutShort
from distill.curriculum.drops import RowError
from distill.errors import ConfigError

Container = Literal["jsonl", "json", "csv", "parquet", "arrow", "sqlite"]
CONTAINERS: tuple[Container, ...] = ("jsonl", "json", "csv", "parquet", "arrow", "sqlite")
TEXTS = ("jsonl", "json", "csv")
"""Containers that can grow at their end, and whose positions count bytes."""
MAX_ROW = 8 * 1024 * 1024
READ_ERRORS: tuple[type[Exception], ...] = (OSError, *reading_tables.ERRORS)
_MARK = b"\xef\xbb\xbf"
_MAGIC: tuple[tuple[bytes, Container], ...] = (
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"\xff\xff\xff\xff", "arrow"),
    (b"SQLite format 3\0", "sqlite"),
)
_SUFFIXES: dict[str, Container | None] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".log": None, ".json": None, ".txt": None,
    ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow",
    ".db": "sqlite", ".sqlite": "sqlite", ".sqlite3": "sqlite",
}  # fmt: skip
_PACKED = (".gz", ".zst", ".zstd", ".gzip")
_DATASET_FILES = ("state.json", "dataset_info.json", "dataset_dict.json")


class Row(NamedTuple):
    """One record of a file, or, with a `reason`, the lack of one."""

    number: int
    """1 for the first row of the file."""
    start: int
    """Names the row inside its file: a byte, an index or a row id."""
    end: int
    """Where to go on after it; equal to `start` where the row should be read again."""
    raw: bytes
    reason: str = ""
    detail: str = ""


class Place(NamedTuple):
    """Where somebody reads, or stopped."""

    file: str
    number: int
    """Rows before it."""
    position: int

    def __str__(self) -> str:
        return f"{self.file}, row {self.number + 1}, position {self.position}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How to read a file. `container` overrules what the content says."""

    container: Container | Literal["auto"] = "auto"
    table: str | None = None
    delimiter: str | None = None
    max_row: int = MAX_ROW
    """Bytes of a row; a longer one is skipped without being held."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    may_grow: bool = True
    """Whether somebody may still be writing: then the last record of a fresh CSV file counts only
    with its newline, since half a record may look whole."""

    @classmethod
    def of(cls, options: Mapping[str, Any], max_row: int) -> Reading:
        """From the options of a source; ConfigError for an unknown container."""
        container = options.get("container", "auto")
        if container not in ("auto", *CONTAINERS):
            raise ConfigError(
                f"container: expected auto or one of {', '.join(CONTAINERS)}, found {container!r}"
            )
        return cls(
            container=container,
            table=options.get("table"),
            delimiter=options.get("delimiter"),
            max_row=max_row,
        )


def discover(path: str | Path) -> list[Path]:
    """Files of a source in the order of their names: a file, a folder, a pattern with `*`, or a
    Hugging Face dataset on disk. Empty when nothing is there."""
    path = Path(path).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return [found for found in sorted(path.rglob("*")) if _is_log(found)]
    if any(mark in str(path) for mark in "*?["):
        base = Path(path.anchor) if path.anchor else Path()
        found = sorted(base.glob(str(path.relative_to(path.anchor) if path.anchor else path)))
        seen = [each for each in found if not each.name.startswith(".")]
        return [file for each in seen for file in (discover(each) if each.is_dir() else [each])]
    return []


def _is_log(path: Path) -> bool:
    if not path.is_file() or path.name.startswith("."):
        return False
    names = path.suffixes[-2:]
    if names and names[-1].lower() in _PACKED:
        return True
    if not names or names[-1].lower() not in _SUFFIXES:
        return False
    if path.name in _DATASET_FILES:
        return not any((path.parent / name).is_file() for name in _DATASET_FILES[1:])
    return True


def container_of(path: Path, reading: Reading) -> Container:
    """What the file is, by its first bytes, then its name. OSError when it cannot be opened."""
    if reading.container != "auto":
        return reading.container
    with path.open("rb") as file:
        head = file.read(16)
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _PACKED]
    named = _SUFFIXES.get(suffixes[-1]) if suffixes else None
    if named in TEXTS:
        return named
    start = byte_streams.peek(path).removeprefix(_MARK).lstrip()
    if start.startswith(b"["):
        return "json"
    line, newline, _ = start.partition(b"\n")
    if not newline or not start.startswith(b"{"):
        return "jsonl"
    try:
        from_json(line)
    except ValueError:
        # A `.json` file that is laid out over many lines; elsewhere the first line is just broken.
        return "json" if suffixes and suffixes[-1] == ".json" else "jsonl"
    return "jsonl"


def read_rows(
    path: Path, reading: Reading, container: str, position: int = 0, number: int = 0
) -> Iterator[Row]:
    """Rows after the first `number`, from `position` on. Never raises for what a file holds: a
    file that cannot be read any further ends with a row of reason truncated_file or
    unreadable_file whose `end` is where to resume."""
    if container in TEXTS:
        source = _texts(path, reading, container, position, number)
    else:
        source = reading_tables.rows(path, reading, container, position, number)
    at, count = position, number
    try:
        for row in source:
            at, count = row.end, row.number
            yield row
    except CutShort as cut:
        yield Row(count + 1, at, at, b"", "truncated_file", str(cut))
    except RowError as error:
        yield Row(count + 1, at, at, b"", error.reason, error.detail)
    except READ_ERRORS as error:
        yield Row(count + 1, at, at, b"", "unreadable_file", f"{type(error).__name__}: {error}")


def parse(raw: bytes) -> Mapping[str, Any]:
    """The object of a row. RowError bad_json, bad_encoding or not_an_object."""
    try:
        value = from_json(raw, cache_strings="keys")
    except ValueError as error:
        if b"\0" in raw or not _is_utf8(raw):
            raise RowError("bad_encoding", _first_bad(raw)) from None
        raise RowError("bad_json", str(error)[:120]) from None
    if not isinstance(value, dict):
        raise RowError("not_an_object", f"found {type(value).__name__}")
    return value


def _is_utf8(raw: bytes) -> bool:
    return not _first_bad(raw).startswith("byte")


def _first_bad(raw: bytes) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"byte 0x{raw[error.start]:02x} at {error.start}"
    return "zero bytes, as in UTF-16"


# -- texts ----------------------------------------------------------------------------------------


def _texts(
    path: Path, reading: Reading, container: str, position: int, number: int
) -> Iterator[Row]:
    if container == "csv":
        yield from _csv(path, reading, position, number)
        return
    chunks, position = _without_mark(byte_streams.chunks(path, position), position)
    limit = reading.max_row
    if container == "jsonl":
        pieces = splitting.lines(chunks, position, limit)
    else:
        first = byte_streams.peek(path).removeprefix(_MARK).lstrip()[:1] if position > 3 else b""
        values = splitting.JsonValues(position, limit, in_array=first == b"[")
        pieces = values.split(chunks)
    for start, end, raw, closed in pieces:
        if raw is None:
            number += 1
            yield Row(number, start, end, b"", "huge_row", _over(limit))
            continue
        if raw.isspace() or (not raw and closed):
            continue
        number += 1
        if not closed and not _is_whole(raw):
            yield Row(number, start, start, b"", "truncated_file", "the last row has no end")
        else:
            yield Row(number, start, end, raw)


def _is_whole(raw: bytes) -> bool:
    """Whether a row without an end is an object all the same: an object closes itself."""
    try:
        parse(raw)
    except RowError:
        return False
    return True


def _over(limit: int) -> str:
    return f"over {limit} bytes"


def _without_mark(chunks: Iterator[bytes], position: int) -> tuple[Iterable[bytes], int]:
    """Skip the mark that some editors put before UTF-8."""
    if position:
        return chunks, position
    first = next(chunks, b"")
    marked = first.startswith(_MARK)
    return _chain(first[3:] if marked else first, chunks), 3 if marked else 0


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _csv(path: Path, reading: Reading, position: int, number: int) -> Iterator[Row]:
    """Cells stay text; an empty cell is null. The header is always read from the file's start."""
    limit = reading.max_row
    delimiter = reading.delimiter or ("\t" if ".tsv" in path.suffixes else ",")
    if csv.field_size_limit() < limit:
        csv.field_size_limit(limit)
    chunks, start = _without_mark(byte_streams.chunks(path), 0)
    header: list[str] | None = None
    pieces = splitting.csv_records(chunks, start, limit)
    for _, end, raw, _ in pieces:
        if raw and raw.strip():
            header, start = _cells(raw, delimiter), end
            break
    if header is None:
        return
    if position > start:
        pieces = splitting.csv_records(byte_streams.chunks(path, position), position, limit)
    for begin, end, raw, closed in pieces:
        if raw is None:
            number += 1
            yield Row(number, begin, end, b"", "huge_row", _over(limit))
        elif raw.strip():
            number += 1
            if not closed and reading.may_grow and _is_fresh(path):
                yield Row(number, begin, begin, b"", "truncated_file", _NO_NEWLINE)
            else:
                yield _csv_row(number, begin, end, raw, header, delimiter, closed)


_SETTLED = 600.0
"""Seconds after which nobody is taken to be writing a file any more."""
_NO_NEWLINE = "the last row has no newline; it is read when it has one, or ten minutes later"


def _is_fresh(path: Path) -> bool:
    """Whether the file was written to just now, so that its last row may be half of one. A packed
    file was closed when it was packed."""
    if any(suffix.lower() in _PACKED for suffix in path.suffixes):
        return False
    return abs(time.time() - path.stat().st_mtime) < _SETTLED


def is_waiting(row: Row) -> bool:
    """Whether a file ends with a row that counts later, even if nothing is added to the file."""
    return row.reason == "truncated_file" and row.detail == _NO_NEWLINE


def _csv_row(
    number: int, begin: int, end: int, raw: bytes, header: list[str], delimiter: str, closed: bool
) -> Row:
    try:
        cells = _cells(raw, delimiter)
    except UnicodeDecodeError:
        return Row(number, begin, end, b"", "bad_encoding", _first_bad(raw))
    except csv.Error as error:
        return Row(number, begin, end, b"", "wrong_type", f"not a CSV record: {error}")
    if len(cells) != len(header) or raw.count(b'"') % 2:
        if not closed:
            return Row(number, begin, begin, b"", "truncated_file", "the last row has no end")
        detail = f"expected {len(header)} cells, found {len(cells)}"
        return Row(number, begin, end, b"", "wrong_type", detail)
    pairs = zip(header, cells, strict=True)
    return Row(number, begin, end, to_json({name: cell or None for name, cell in pairs}))


def _cells(raw: bytes, delimiter: str) -> list[str]:
    text = io.StringIO(raw.decode().rstrip("\r\n"), newline="")
    return next(csv.reader(text, delimiter=delimiter), [])
