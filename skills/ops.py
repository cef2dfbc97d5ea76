"""What happened to a bank, one line per change, and the proof that it explains every version.

A transaction is a run of lines that ends with ACTIVATE, which names the version that they lead to.
Lines behind the last ACTIVATE were never committed: readers ignore them, the next writer cuts them
off. Each other line moves one skill from the record `before` to the record `after`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from distill.errors import ConfigError, SkillBankError
from distill.rundir import append_jsonl, clear_disk_errors
from skills.versions import Row, Store, Tombstone, Version, row_of

OpName = Literal[
    "ADD",
    "EDIT",
    "AGREE",
    "MERGE",
    "REMOVE",
    "EVICT",
    "RETIRE",
    "RESTORE",
    "STATUS",
    "PIN",
    "UNPIN",
    "CREDIT",
    "ROLLBACK",
    "ACTIVATE",
]
OPS: tuple[OpName, ...] = get_args(OpName)
CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One line of the log. Digests name records; None stands for no record."""

    seq: int
    at: str
    actor: str
    op: OpName
    reason: str = ""
    item: str = ""
    before: str | None = None
    after: str | None = None
    other: str | None = None
    """MERGE, AGREE: the record that was taken in."""
    content: str | None = None
    """RETIRE, RESTORE: the content hash that gets or loses its tombstone."""
    version: str | None = None
    """ACTIVATE: what is active now. ROLLBACK: the version gone back to."""
    previous: str | None = None
    """ACTIVATE: what was active before."""

    def to_table(self) -> dict[str, Any]:
        """The line as JSON; what does not apply is left out."""
        values = {name: getattr(self, name) for name in _FIELDS}
        return {key: value for key, value in values.items() if value not in (None, "")}


_FIELDS = tuple(field.name for field in fields(Op))


def parse_op(line: bytes, where: str) -> Op:
    try:
        op = Op(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise SkillBankError(f"{where} is not a line of an ops log: {error}") from error
    if op.op not in OPS:
        raise SkillBankError(f"{where}: op must be one of {', '.join(OPS)}, found {op.op!r}")
    return op


def read_ops(path: Path) -> list[Op]:
    """Every committed line, oldest first. SkillBankError on a broken one."""
    end, _ = committed(path)
    with path.open("rb") as file:
        lines = file.read(end).splitlines()
    return [parse_op(line, f"{path}, line {n}") for n, line in enumerate(lines, start=1)]


def committed(path: Path) -> tuple[int, Op]:
    """Offset behind the last ACTIVATE, and that line. Reads from the end, so that a long log
    costs nothing. SkillBankError when there is none."""
    try:
        with path.open("rb") as file:
            size = end = file.seek(0, os.SEEK_END)
            tail = b""
            while end > 0:
                start = max(0, end - max(CHUNK, len(tail)))
                file.seek(start)
                tail = file.read(end - start) + tail
                end = start
                found = _last_activate(tail, whole=start == 0)
                if found is not None:
                    offset, line = found
                    return size - len(tail) + offset, parse_op(line, f"{path}, last ACTIVATE")
    except OSError as error:
        raise SkillBankError(f"{path} cannot be read: {error.strerror}") from error
    raise SkillBankError(f"{path} names no version: it is empty or damaged; restore it from a copy")


def _last_activate(tail: bytes, *, whole: bool) -> tuple[int, bytes] | None:
    """End offset and text of the last complete ACTIVATE line in `tail`, which may begin inside a
    line unless it is the whole file."""
    end = tail.rfind(b"\n") + 1
    while end > 0:
        start = tail.rfind(b"\n", 0, end - 1) + 1
        line = tail[start : end - 1]
        if start == 0 and not whole:
            return None
        if b'"op": "ACTIVATE"' in line and _is_activate(line):
            return end, line
        end = start
    return None


def _is_activate(line: bytes) -> bool:
    try:
        table = json.loads(line)
    except ValueError:
        return False
    return isinstance(table, dict) and table.get("op") == "ACTIVATE"


def append_ops(path: Path, ops: Iterable[Op]) -> None:
    """Add the lines of one transaction; returns when they are on the disk."""
    append_jsonl(path, [op.to_table() for op in ops], sync=True)


def cut_uncommitted(path: Path) -> tuple[int, Op]:
    """Drop what a killed writer left behind the last ACTIVATE. Only under the lock.

    Returns the number of bytes dropped and the last ACTIVATE."""
    end, last = committed(path)
    size = path.stat().st_size
    if size > end:
        with clear_disk_errors(path), path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
    return size - end, last


def replay(store: Store, ops: Iterable[Op]) -> Iterator[tuple[Op, Version]]:
    """Every version that the log leads to, beside its ACTIVATE line; needs only log and records.

    SkillBankError when a line does not follow from the ones before it."""
    ops = list(ops)
    targets = {op.version for op in ops if op.op == "ROLLBACK"}
    seen: dict[str, Version] = {}
    rows: dict[str, Row] = {}
    graves: dict[str, Tombstone] = {}
    for op in ops:
        if op.op == "ACTIVATE":
            version = Version(rows=dict(rows), tombstones=dict(graves))
            if op.version in targets:
                seen[str(op.version)] = version
            yield op, version
        elif op.op == "ROLLBACK":
            target = seen.get(str(op.version))
            if target is None:
                raise _broken(store, op, f"goes back to {str(op.version)[:12]}, which never was")
            rows, graves = dict(target.rows), {**target.tombstones, **graves}
        else:
            _step(store, op, rows, graves)


def _step(store: Store, op: Op, rows: dict[str, Row], graves: dict[str, Tombstone]) -> None:
    """Apply one change of one skill to `rows` and `graves`, in place."""
    row = rows.get(op.item)
    if (row.item if row else None) != op.before:
        found = row.item[:12] if row else "nothing"
        wanted = op.before[:12] if op.before else "nothing"
        raise _broken(store, op, f"expects {wanted} as {op.item!r}, found {found}")
    if op.after is None:
        rows.pop(op.item, None)
    else:
        item = store.read_item(op.after)
        if item.id != op.item:
            raise _broken(store, op, f"is about {op.item!r}, its record about {item.id!r}")
        rows[op.item] = row_of(item, op.after)
    if op.op == "RETIRE" and op.content:
        graves[op.content] = Tombstone(id=op.item, reason=op.reason)
    elif op.op == "RESTORE" and op.content:
        graves.pop(op.content, None)


def _broken(store: Store, op: Op, what: str) -> SkillBankError:
    return SkillBankError(f"{store.ops_path}, seq {op.seq} ({op.op}): {what}")


def find_version(ops: Iterable[Op], prefix: str) -> str:
    """The id of a version of the log by its beginning. ConfigError naming the newest ones when
    it stands for none or for several."""
    known: Mapping[str, None] = dict.fromkeys(str(op.version) for op in ops if op.op == "ACTIVATE")
    found = [version for version in known if version.startswith(prefix)] if prefix else []
    if len(found) == 1:
        return found[0]
    newest = ", ".join(version[:12] for version in list(known)[-5:])
    raise ConfigError(
        f"{prefix!r} stands for {len(found)} versions of the bank; the newest are: {newest}"
    )
