"""A built curriculum on disk: the examples, and the order in which a student meets them.

    plan.arrow          one row per example in training order, see PLAN
    examples/000.arrow  the conversations, in the order in which they were found, see EXAMPLES

Both are Arrow IPC files. The plan is written last: a folder with a plan is complete. Examples are
compressed in batches of `BATCH_ROWS`, so that any one of them can be read by decoding few others;
row r of a file is row r % BATCH_ROWS of its batch r // BATCH_ROWS.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic_core import PydanticSerializationError, to_json

from distill.errors import DataError
from distill.rundir import TEMPORARY, clear_disk_errors

FORMAT = "distill-curriculum-1"
"""Stands in the metadata of every file; another version gets another number."""
BATCH_ROWS = 64
FILE_ROWS = 32_768
CACHED_BYTES = 64 * 2**20
"""Decoded batches that a reader keeps: training order jumps about in the files."""

_METADATA = {"format": FORMAT}

PLAN = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("stage", pa.int8(), nullable=False),  # from 1
        pa.field("position", pa.int64(), nullable=False),  # 0, 1, ... in training order
        pa.field("file", pa.int16(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("score", pa.float64(), nullable=False),
        pa.field("scene", pa.string(), nullable=False),
        pa.field("band", pa.int8(), nullable=False),
        pa.field("tier", pa.int8()),  # who served it, where the log says so
        pa.field("use_sft", pa.bool_(), nullable=False),
        pa.field("use_opd", pa.bool_(), nullable=False),
        pa.field("num_spans", pa.int16(), nullable=False),  # assistant messages of the turn
    ],
    metadata=_METADATA,
)

EXAMPLES = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("session_id", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("scene", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),  # JSON
        pa.field("turn", pa.string(), nullable=False),  # JSON
        pa.field("tools", pa.string(), nullable=False),  # JSON
        pa.field("answer", pa.string()),
        pa.field("grader", pa.string()),
    ],
    metadata=_METADATA,
)


class Place(NamedTuple):
    """Where an example lies: number of its file and row in it."""

    file: int
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One user turn. Messages are mappings in the chat-completions shape."""

    id: str
    session_id: str | None
    source: str
    scene: str
    prompt: Sequence[Mapping[str, Any]]
    """Up to the user message that opens the turn, without the reasoning of earlier turns."""
    turn: Sequence[Mapping[str, Any]]
    """What follows it: answers, tool calls and what the tools said."""
    tools: Sequence[Mapping[str, Any]] = ()
    answer: str | None = None
    grader: str | None = None
    """Name of the grader that compares a reply with `answer`."""


class ExampleWriter:
    """Writes examples one after the other; holds `BATCH_ROWS` of them in memory.

    A context manager. A file appears under its name when it is full or on `close`; what a failed
    write leaves behind has another name and is never read. `first` is the number of its first file:
    writers in several processes share a folder when their numbers are far apart.
    """

    def __init__(self, folder: Path, *, file_rows: int = FILE_ROWS, first: int = 0) -> None:
        if file_rows % BATCH_ROWS:
            raise ValueError(f"file_rows must be a multiple of {BATCH_ROWS}, found {file_rows}")
        self._folder = folder / "examples"
        self._file_rows = file_rows
        self._pending: list[tuple[str | None, ...]] = []
        self._file, self._row = first, 0
        self._out: _ArrowFile | None = None
        with clear_disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        if (self._folder / file_name(first)).exists():
            raise DataError(
                f"{self._folder} already holds examples; write a curriculum into a new folder"
            )

    def __enter__(self) -> ExampleWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif self._out is not None:
            self._out.abandon()
            self._out = None

    def add(self, examples: Iterable[Example]) -> list[Place]:
        """Store examples; where each of them lies. DataError for text that is not valid."""
        places = []
        for example in examples:
            self._pending.append(_cells(example))
            places.append(Place(self._file, self._row))
            self._row += 1
            if len(self._pending) == BATCH_ROWS:
                self._flush()
            if self._row == self._file_rows:
                self._next_file()
        return places

    def close(self) -> None:
        """Write what is left. Nothing can be added afterwards that belongs to the same file."""
        if self._row:
            self._flush()
            self._next_file()

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._out is None:
            self._out = _ArrowFile(self._folder / file_name(self._file), EXAMPLES, packed=True)
        columns = zip(*self._pending, strict=True)
        self._out.write(
            pa.record_batch(
                [pa.array(c, f.type) for c, f in zip(columns, EXAMPLES, strict=True)], EXAMPLES
            )
        )
        self._pending = []

    def _next_file(self) -> None:
        if self._out is not None:
            self._out.finish()
        self._out = None
        self._file, self._row = self._file + 1, 0


class ExampleReader:
    """Reads examples by place. Files are mapped into memory; the last batches stay decoded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "examples"
        self._files: dict[int, Any] = {}
        self._batches: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._held = 0  # bytes

    def __call__(self, place: Place) -> Example:
        """The example that lies there. DataError naming the file when it does not."""
        number, within = divmod(place.row, BATCH_ROWS)
        batch = self._batch(place.file, number)
        if batch is None or within >= batch.num_rows:
            raise DataError(
                f"{self._folder / file_name(place.file)} has no row {place.row}, but the plan asks "
                "for it; build the curriculum again"
            )
        try:
            cells = {f.name: batch.column(i)[within].as_py() for i, f in enumerate(EXAMPLES)}
            texts = {key: json.loads(cells[key]) for key in ("prompt", "turn", "tools")}
        except (TypeError, ValueError) as error:  # no UTF-8, no JSON, or a null
            raise self._damaged(place.file, f"row {place.row}: {error}") from error
        return Example(**cells | texts)

    def _damaged(self, file: int, what: str) -> DataError:
        return DataError(
            f"{self._folder / file_name(file)} is damaged: {what}; build the curriculum again"
        )

    def _batch(self, file: int, number: int) -> Any:
        found = self._batches.pop((file, number), None)
        if found is None:
            if file not in self._files:
                self._files[file] = _open(self._folder / file_name(file), EXAMPLES)
            if number >= self._files[file].num_record_batches:
                return None
            try:
                found = self._files[file].get_batch(number)
                found.validate(full=True)  # else wrong offsets would read anything
            except (pa.ArrowException, OSError, ValueError) as error:
                raise self._damaged(file, f"batch {number}: {error}") from error
            self._held += found.nbytes
        self._batches[file, number] = found  # the newest is last
        while self._held > CACHED_BYTES and len(self._batches) > 1:
            self._held -= self._batches.popitem(last=False)[1].nbytes
        return found


def write_plan(folder: Path, columns: Mapping[str, Any]) -> None:
    """Write the plan of a folder whose examples are complete; this makes the curriculum appear.

    `columns` holds a sequence, array or Arrow array per column of PLAN. DataError when one is
    missing or unknown, holds a null where none may be, or when `position` is not 0, 1, 2, ...
    """
    if set(columns) != set(PLAN.names):
        wrong = sorted(set(columns) ^ set(PLAN.names))
        raise DataError(
            f"a plan has the columns {', '.join(PLAN.names)}; "
            f"missing or unknown: {', '.join(wrong)}"
        )
    try:
        arrays = [_array(columns[field.name], field.type) for field in PLAN]
        table = pa.table(arrays, PLAN)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise DataError(f"the columns of the plan do not fit: {error}") from error
    for field, column in zip(PLAN, table.columns, strict=True):
        if column.null_count and not field.nullable:
            raise DataError(f"column {field.name!r} of the plan has {column.null_count} nulls")
    if not np.array_equal(table["position"].to_numpy(), np.arange(table.num_rows)):
        raise DataError("column 'position' of the plan must count 0, 1, 2, ... in training order")
    file = _ArrowFile(folder / "plan.arrow", PLAN, packed=False)
    file.write(table)
    file.finish()


def read_plan(folder: Path) -> Any:
    """The plan as an Arrow table, mapped into memory. DataError for a missing or foreign folder."""
    path = folder / "plan.arrow"
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; expected a folder that `distill curriculum build` wrote"
        )
    reader = _open(path, PLAN)
    try:
        plan = reader.read_all()
        plan.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged: {error}; build the curriculum again") from error
    return plan


def file_name(number: int) -> str:
    return f"{number:03d}.arrow"


class _ArrowFile:
    """An Arrow IPC file that appears under its name when it is finished."""

    def __init__(self, path: Path, schema: Any, *, packed: bool) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}")
        # Several processes write at once: threads would only take memory.
        options = pa.ipc.IpcWriteOptions(compression="zstd" if packed else None, use_threads=False)
        with clear_disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = self._partial.open("wb")
            self._writer = pa.ipc.new_file(self._sink, schema, options=options)

    def write(self, data: Any) -> None:
        with clear_disk_errors(self._path):
            self._writer.write(data)

    def finish(self) -> None:
        with clear_disk_errors(self._path):
            self._writer.close()
            self._sink.flush()
            os.fsync(self._sink.fileno())
            self._sink.close()
            self._partial.replace(self._path)

    def abandon(self) -> None:
        self._sink.close()
        self._partial.unlink(missing_ok=True)


def _open(path: Path, schema: Any) -> Any:
    try:
        # A map without a reader's own copy: decoding touches only the pages of one batch.
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist, but the plan names it; build the curriculum again"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Arrow file: {error}") from error
    found = (reader.schema.metadata or {}).get(b"format", b"none").decode(errors="replace")
    if found != FORMAT or not reader.schema.equals(schema):
        raise DataError(
            f"{path} is no file of a curriculum of this version: expected format {FORMAT}, found "
            f"{found}; build the curriculum again with `distill curriculum build`"
        )
    return reader


def _array(values: Any, kind: Any) -> Any:
    return (
        values.cast(kind)
        if isinstance(values, pa.Array | pa.ChunkedArray)
        else pa.array(values, kind)
    )


def _cells(example: Example) -> tuple[str | None, ...]:
    """The cells of a row, in the order of EXAMPLES."""
    try:
        texts = [to_json(v).decode() for v in (example.prompt, example.turn, example.tools)]
        for text in (example.id, example.session_id, example.scene, example.answer):
            (text or "").encode()
    except (PydanticSerializationError, UnicodeEncodeError) as error:
        raise DataError(
            f"example {example.id!r} of {example.source} cannot be stored as JSON: {error}"
        ) from error
    return (
        example.id,
        example.session_id,
        example.source,
        example.scene,
        *texts,
        example.answer,
        example.grader,
    )
