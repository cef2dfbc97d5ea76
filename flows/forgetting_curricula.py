"""Examples taken out of a built curriculum; a repeated or interrupted removal ends the same.

The plan goes first, so that nothing reaches the examples any more; their rows are then emptied in
place, since the plan of the others names rows by number. `forgotten.json` in the folder says what
is to go before anything goes, and stays as the proof that the curriculum once held these turns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.rundir import (
    TEMPORARY,
    clear_disk_errors,
    digest_file,
    read_json,
    write_json,
)

RECORD = "forgotten.json"
PLAN, EXAMPLES, TURNS = "plan.arrow", "examples", "turns.arrow"
SUMMARY, MANIFEST = "summary.json", "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Doomed:
    """What the turns that have to go are known by."""

    ids: frozenset[str] = frozenset()
    """Ids of user turns; those of calls that open none do no harm."""
    sessions: frozenset[tuple[str | None, str]] = frozenset()
    """(source, session); a source of None means any."""
    source: str = ""
    """Everything of this source; empty for none."""

    def __or__(self, other: Doomed) -> Doomed:
        return Doomed(
            ids=self.ids | other.ids,
            sessions=self.sessions | other.sessions,
            source=self.source or other.source,
        )

    def matches(self, table: Any) -> list[bool]:
        """Which rows of a table or batch with the columns id, source and session_id have to go."""
        columns = [table.column(name).to_pylist() for name in ("id", "source", "session_id")]
        return [self._has(*row) for row in zip(*columns, strict=True)]

    def _has(self, turn: str, source: str, session: str | None) -> bool:
        return turn in self.ids or (
            bool(turn)  # an emptied row is nobody's
            and (
                (bool(self.source) and source == self.source)
                or (
                    (session is not None and bool(self.sessions))
                    and bool({(source, session), (None, session)} & self.sessions)
                )
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What was taken out of a curriculum, or still has to be."""

    ids: frozenset[str] = field(default_factory=frozenset)
    pending: bool = False


def read_record(folder: Path) -> Record:
    path = folder / RECORD
    if not path.exists():
        return Record()
    table = read_json(path)
    return Record(ids=frozenset(table["ids"]), pending=bool(table["pending"]))


def held_ids(folder: Path, doomed: Doomed) -> frozenset[str]:
    """Ids of the turns that a curriculum still holds, as an example or in its table of turns, or
    whose removal was interrupted."""
    record = read_record(folder)
    found = set(record.ids) if record.pending else set()
    for path in _tables(folder):
        for batch in _batches(path, ("id", "source", "session_id")):
            names = batch.column("id").to_pylist()
            found |= {n for n, hit in zip(names, doomed.matches(batch), strict=True) if hit}
    return frozenset(found)


def planned_ids(folder: Path) -> frozenset[str]:
    """Ids of the turns that are examples."""
    from distill.curriculum.examples import read_plan

    return frozenset(read_plan(folder)["id"].to_pylist())


def erase(folder: Path, ids: frozenset[str], *, source: str = "") -> None:
    """Take turns out of a curriculum: plan, examples, table of turns, summary, page and manifest.

    Repeating it, also after it was killed, changes nothing more.
    """
    from distill.curriculum.examples import read_plan, write_plan

    record = read_record(folder)
    every = record.ids | ids
    _write_record(folder, Record(ids=every, pending=True))
    plan = read_plan(folder)
    keep = [name not in every for name in plan["id"].to_pylist()]
    if not all(keep):
        kept = plan.filter(_mask(keep))
        columns = {name: kept[name] for name in kept.column_names}
        write_plan(folder, columns | {"position": list(range(kept.num_rows))})
    for path in _tables(folder):
        if any(every & set(batch.column("id").to_pylist()) for batch in _batches(path, ("id",))):
            _rewrite(path, every)
    _update_summary(folder, len(every), source)
    _refresh_manifest(folder)
    _write_record(folder, Record(ids=every))


def _write_record(folder: Path, record: Record) -> None:
    write_json(folder / RECORD, {"ids": sorted(record.ids), "pending": record.pending})


def _tables(folder: Path) -> list[Path]:
    """Files whose rows have the columns id, source and session_id."""
    turns = folder / TURNS
    return [*sorted((folder / EXAMPLES).glob("*.arrow")), *([turns] if turns.is_file() else [])]


def _batches(path: Path, names: Sequence[str] = ()) -> Iterator[Any]:
    """Record batches of a file, one at a time; with names only these columns of them."""
    import pyarrow as pa

    with pa.OSFile(str(path), "rb") as source:
        with pa.ipc.open_file(source) as reader:
            schema = reader.schema
        fields = [schema.get_field_index(name) for name in names] or None
        reader = pa.ipc.open_file(
            source, options=pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        )
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _rewrite(path: Path, ids: frozenset[str]) -> None:
    """Take the rows of these turns out of an Arrow file, which appears new as a whole. In files of
    examples they are emptied, so that the other rows are found where they were."""
    import pyarrow as pa

    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_file(source) as reader:
        schema = reader.schema
    change = _without if path.name == TURNS else _emptied
    partial = path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}")
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with clear_disk_errors(path):
        try:
            with partial.open("wb") as sink:
                with pa.ipc.new_file(sink, schema, options=options) as writer:
                    for batch in _batches(path):
                        writer.write_batch(change(batch, ids))
                sink.flush()
                os.fsync(sink.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _emptied(batch: Any, ids: frozenset[str]) -> Any:
    """The batch with the rows of these turns emptied; itself when it has none of them."""
    import pyarrow as pa

    hits = [name in ids for name in batch.column("id").to_pylist()]
    if not any(hits):
        return batch
    columns = []
    for field_ in batch.schema:
        blank = None if field_.nullable else _BLANK.get(field_.name, "")
        values = batch.column(field_.name).to_pylist()
        new = [blank if hit else value for value, hit in zip(values, hits, strict=True)]
        columns.append(pa.array(new, field_.type))
    return pa.record_batch(columns, schema=batch.schema)


_BLANK = {"prompt": "[]", "turn": "[]", "tools": "[]"}
"""What the JSON of an emptied row is."""


def _without(batch: Any, ids: frozenset[str]) -> Any:
    keep = [name not in ids for name in batch.column("id").to_pylist()]
    return batch if all(keep) else batch.filter(_mask(keep))


def _mask(values: list[bool]) -> Any:
    import pyarrow as pa

    return pa.array(values, pa.bool_())


def _update_summary(folder: Path, count: int, source: str) -> None:
    """The numbers stay those of the day when it was built, with a note of what is gone since."""
    path = folder / SUMMARY
    if not path.is_file():
        return
    summary = read_json(path)
    sources = summary.get("sources") or {}
    new = {**summary, "forgotten": count}
    if source in sources:
        new["sources"] = {name: value for name, value in sources.items() if name != source}
    if new == summary:
        return
    write_json(path, new)
    if (folder / "curriculum.html").is_file():
        from evals.curriculum_page import write_page

        write_page(folder)


def _refresh_manifest(folder: Path) -> None:
    """Digests of the files as they are now; those of files that did not change stay the same."""
    path = folder / MANIFEST
    if not path.is_file():
        return
    manifest = read_json(path)
    files = {name: digest_file(folder / name) for name in manifest["files"]}
    if files != manifest["files"]:
        write_json(path, {**manifest, "files": files})
