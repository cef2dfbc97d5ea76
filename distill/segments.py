"""The rollouts and scores of a stage on disk: JSONL that a person can read, one line per artefact.

    segments/000013.jsonl    {"step": 13, "name": "rollouts", "rows": [...]}

A new segment starts with every process; rows become durable together with the next checkpoint.
After a kill the steps beyond the last checkpoint find their artefacts here and need not sample
again. An incomplete last line is what a kill leaves and is ignored.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from distill.errors import DataError
from distill.rundir import clear_disk_errors, from_json, read_jsonl
from distill.types import Rollout

logger = logging.getLogger(__name__)

R = TypeVar("R")

_HEAD = re.compile(rb'\{"step":(\d+),"name":"(\w+)",')
"""How `Segments` begins a line: enough to find it again without reading its rows."""


class Segments:
    """`once` of one stage. `first_step` is the first step that will be asked for."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder = folder / "segments"
        self._stored: dict[tuple[int, str], list[Any]] = {}
        if self._folder.is_dir():
            for path in sorted(self._folder.glob("*.jsonl")):
                for line in read_jsonl(path):
                    if line["step"] >= first_step:
                        self._stored[line["step"], line["name"]] = line["rows"]
        self._ahead: dict[tuple[int, str], list[Any]] = {}
        self.num_reused = 0
        with clear_disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            number = len(list(self._folder.glob("*.jsonl"))) + 1
            self._path = self._folder / f"{first_step:06d}-{number}.jsonl"
            self._file = self._path.open("a", encoding="utf-8")

    def at(self, step: int) -> Callable[..., Any]:
        """The `once` of one step."""

        def once(name: str, kind: type[R], make: Callable[[], list[R]]) -> list[R]:
            rows = self._stored.pop((step, name), None)
            if rows is not None:
                self.num_reused += 1
                return [_unpack(kind, row, self._path) for row in rows]
            made = self._ahead.pop((step, name), None)
            if made is not None:  # written when it was kept
                return made
            made = make()
            self._write(step, name, made)
            return made

        return once

    def later(self, step: int) -> LaterStep:
        """Where what a later step will ask for is kept beforehand."""
        return LaterStep(self, step)

    def holds(self, step: int, name: str) -> bool:
        """Whether an artefact is there without being made."""
        return (step, name) in self._stored or (step, name) in self._ahead

    def keep(self, step: int, name: str, rows: list[Any]) -> None:
        """Write now what `once` of a later step returns."""
        self._write(step, name, rows)
        self._ahead[step, name] = rows

    def _write(self, step: int, name: str, rows: list[Any]) -> None:
        line = {"step": step, "name": name, "rows": [_pack(r) for r in rows]}
        with clear_disk_errors(self._path):
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Make everything written so far durable."""
        with clear_disk_errors(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with clear_disk_errors(self._path):
            self._file.close()


class LaterStep:
    """The artefacts of one later step."""

    def __init__(self, segments: Segments, step: int) -> None:
        self._segments = segments
        self._step = step

    def holds(self, name: str) -> bool:
        return self._segments.holds(self._step, name)

    def keep(self, name: str, rows: list[Any]) -> None:
        self._segments.keep(self._step, name, rows)


class Stored(Mapping[int, list[R]]):
    """Step -> artefacts of one name, read from the disk whenever a step is asked for.

    Of a repeated step the last counts. A stage may have stored more than fits into memory (66 bytes
    per token once it is read), so walk through the steps, which come in ascending order, and keep
    none. DataError for a line that cannot be read.
    """

    def __init__(self, folder: Path, name: str, kind: type[R]) -> None:
        self._kind = kind
        found: dict[int, tuple[Path, int]] = {}
        for path in sorted((folder / "segments").glob("*.jsonl")):
            for offset, step, written in _heads(path):
                if written == name:
                    found[step] = path, offset
        self._places = dict(sorted(found.items()))

    def __getitem__(self, step: int) -> list[R]:
        path, offset = self._places[step]
        try:
            with path.open("rb") as file:
                file.seek(offset)
                line = file.readline()
        except OSError as error:
            raise _unreadable(path, error) from error
        return [_unpack(self._kind, row, path) for row in _parsed(line, path, offset)["rows"]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def stored(folder: Path, name: str, kind: type[R]) -> Stored[R]:
    """Every artefact of one name that a stage has stored, by step."""
    return Stored(folder, name, kind)


def _heads(path: Path) -> Iterator[tuple[int, int, str]]:
    """Offset, step and name of every line. An incomplete last one is dropped with a warning."""
    try:
        with path.open("rb") as file:
            offset = 0
            for line in file:
                head = _HEAD.match(line) if line.endswith(b"\n") else None
                if head is not None:
                    yield offset, int(head[1]), head[2].decode()
                elif line.strip():
                    try:
                        known = _parsed(line, path, offset)
                    except DataError:
                        if line.endswith(b"\n"):
                            raise
                        logger.warning("%s: dropped the incomplete last line", path)
                        return
                    yield offset, known["step"], known["name"]
                offset += len(line)
    except OSError as error:
        raise _unreadable(path, error) from error


def _parsed(line: bytes, path: Path, offset: int) -> dict[str, Any]:
    try:
        known: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, byte {offset}: not a line of valid JSON: {error}") from error
    return known


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror}")


def _pack(record: Any) -> dict[str, Any]:
    """A record without the fields that hold their default; masks as the spans of their ones."""
    row: dict[str, Any] = {}
    for name in record.__dataclass_fields__:
        value = getattr(record, name)
        default = record.__dataclass_fields__[name].default
        if value is None or value == default:
            continue
        row[name] = value
    if isinstance(record, Rollout):
        spans = mask_spans(record.completion_mask)
        row["completion_mask"] = spans
        row["logprobs"] = [x for a, b in spans for x in record.logprobs[a:b]]
        row["reward_parts"] = dict(record.reward_parts)
        if record.history:
            row["history"] = [m.to_row() for m in record.history]
    return row


def _unpack(kind: type[R], row: dict[str, Any], path: Path) -> R:
    if kind is Rollout:
        length = len(row["token_ids"])
        mask, logprobs = [False] * length, [0.0] * length
        values = iter(row["logprobs"])
        for start, stop in row["completion_mask"]:
            if not 0 <= start < stop <= length:
                raise DataError(f"{path}: a rollout has a span {start}:{stop} of {length} tokens")
            mask[start:stop] = [True] * (stop - start)
            logprobs[start:stop] = [next(values) for _ in range(stop - start)]
        row = {**row, "completion_mask": mask, "logprobs": logprobs}
    return from_json(kind, row, where=str(path))


def mask_spans(mask: tuple[bool, ...]) -> list[tuple[int, int]]:
    """[start, stop) of every run of True."""
    spans: list[tuple[int, int]] = []
    previous = False
    for i, value in enumerate(mask):
        if value and not previous:
            spans.append((i, i + 1))
        elif value:
            spans[-1] = (spans[-1][0], i + 1)
        previous = value
    return spans
