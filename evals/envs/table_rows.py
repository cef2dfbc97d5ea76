"""Rows of JSON lines, Parquet and datasets on disk, and the texts that columns make."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distill.errors import DataError

_IN_BRACES = re.compile(r"\{(\w+)\}")
_SPLIT_COLUMN = "split"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row and where it stands, for error messages."""

    where: str
    values: Mapping[str, Any]


class Rows(NamedTuple):
    """Names of all columns, and the rows with at least the columns that were asked for."""

    names: list[str]
    rows: list[Row]


def jsonl_rows(path: str) -> Rows:
    """All rows of JSONL files. DataError names the file and line of a broken one."""
    rows = [row for file in _files(path, "*.jsonl") for row in _json_lines(file)]
    return Rows(list(dict.fromkeys(name for row in rows for name in row.values)), rows)


def parquet_rows(path: str, wanted: frozenset[str]) -> Rows:
    """All rows of Parquet files, with the wanted columns only."""
    import pyarrow.parquet

    names: dict[str, None] = {}
    rows: list[Row] = []
    for file in _files(path, "*.parquet"):
        try:
            with pyarrow.parquet.ParquetFile(file) as source:
                here = source.schema_arrow.names
                table = source.read(columns=[name for name in here if name in wanted])
        except (OSError, ValueError) as error:
            raise DataError(f"{file}: not a readable Parquet file: {error}") from error
        names.update(dict.fromkeys(here))
        rows += [
            Row(where=f"{file} row {number}", values=values)
            for number, values in enumerate(table.to_pylist(), start=1)
        ]
    return Rows(list(names), rows)


def dataset_rows(path: str, wanted: frozenset[str]) -> Rows:
    """All rows of a dataset folder; named splits become the column `split`."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(Path(path).expanduser()))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: expected a folder that datasets' save_to_disk wrote: {error}"
        ) from error
    named = isinstance(loaded, datasets.DatasetDict)
    names: dict[str, None] = {}
    rows: list[Row] = []
    for part, table in dict(loaded if named else {"": loaded}).items():
        extra = {_SPLIT_COLUMN: part} if named else {}
        names.update(dict.fromkeys([*extra, *table.column_names]))
        # Columns that no role needs may hold pictures or sound, which are slow to decode.
        chosen = table.select_columns([name for name in table.column_names if name in wanted])
        rows += [
            Row(where=" ".join(f"{path} {part} row {number}".split()), values={**extra, **values})
            for number, values in enumerate(chosen.with_format(None), start=1)
        ]
    return Rows(list(names), rows)


def columns_in(source: str) -> list[str]:
    """The names in braces of a text."""
    return _IN_BRACES.findall(source)


def columns_of(source: str, names: list[str]) -> list[str]:
    """The columns that a source refers to; a column's own name may contain braces."""
    if source in names:
        return [source]
    return columns_in(source) or [source]


def fill(source: str, row: Row, names: list[str], known: Mapping[str, str]) -> str | None:
    """The column, or the text with its columns filled in; None when one of them is null.

    `known` holds texts besides the row's own; they win over a column of the same name.
    """
    values = {**row.values, **known}
    parts = {name: cell(values.get(name), name, row) for name in columns_of(source, names)}
    if source in parts:
        return parts[source]
    if any(value is None for value in parts.values()):
        return None
    return _IN_BRACES.sub(lambda match: str(parts[match.group(1)]), source)


def cell(value: Any, column: str, row: Row) -> str | None:
    """A text or number as text. DataError for anything else."""
    if value is None:
        return None
    if not isinstance(value, str | int | float):
        raise DataError(
            f"{row.where}: column {column!r} must hold text or a number, found a "
            f"{type(value).__name__}"
        )
    text = str(value)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError(f"{row.where}: column {column!r} holds half of a surrogate pair, not text")
    return text


def _files(path: str, pattern: str) -> list[Path]:
    given = Path(path).expanduser()
    if given.is_dir():
        found = sorted(given.glob(pattern))
    elif given.is_file():
        found = [given]
    else:
        found = sorted(given.parent.glob(given.name)) if given.parent.is_dir() else []
    if not found:
        raise DataError(
            f"data.path: no file at {given.absolute()}; expected a file, a folder with {pattern}, "
            "or a pattern"
        )
    return found


def _json_lines(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file} line {number}"
            try:
                text = line.decode("utf-8-sig").strip()
                values = json.loads(text) if text else None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not valid JSON: {error}") from error
            if not text:
                continue
            if not isinstance(values, dict):
                raise DataError(f"{where}: expected a JSON object, found {text[:60]!r}")
            yield Row(where=where, values=values)
