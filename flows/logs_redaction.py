"""What the rules take out of a file of logs: counts, masked examples, clean rows. No store."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import ConfigError, DataError
from flows.redacting import redactor_for

if TYPE_CHECKING:
    from distill.curriculum.pii import Redactor
    from distill.curriculum.records import Evidence, RoutingTurn

EXAMPLES = 3
"""Examples of each kind."""
LONGEST = 28
_INNER = re.compile(r"(?<=[^\W_])[^\W_]")


@dataclass(kw_only=True, slots=True)
class Redaction:
    """What was found in a file."""

    rows: int = 0
    touched: int = 0
    """Turns and statements with something in them."""
    records: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Kind -> a few values that were found, masked."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> rows that are no turn of any format."""


def redact_file(
    path: Path, *, name: str, format: str, entities: str = "", out: Path | None = None
) -> Redaction:
    """Put every row of a file through the rules; `out` gets what is left, in the normal form.

    Users, and ids that are personal, become hashes under a key that nobody keeps. DataError when
    the file is not there or no row of it is a turn.
    """
    if not path.is_file():
        raise DataError(f"{path} is no file; name one file of a log")
    if out is not None and out.exists() and out.samefile(path):
        raise ConfigError(f"--out {out} is the file that is read; name another one")
    key = secrets.token_bytes(32)
    redactor = redactor_for("rules", entities, key)
    assert redactor is not None
    found = Redaction()
    clean = (_without_user(one, key) for one in _clean(path, name, format, redactor, found))
    if out is None:
        for _ in clean:
            pass
    else:
        _write(out, clean)
    if found.rows and not found.records:
        reason, count = found.dropped.most_common(1)[0] if found.dropped else ("", 0)
        from distill.curriculum.drops import REASONS

        raise DataError(
            f"none of the {found.rows:,} rows of {path} is a turn; {count:,} of them: "
            f"{REASONS.get(reason, 'they are about no model call')}; name the format with --format"
        )
    return found


def _clean(
    path: Path, name: str, format: str, redactor: Redactor, found: Redaction
) -> Iterator[RoutingTurn | Evidence]:
    from distill.curriculum.drops import RowError
    from distill.curriculum.records import Evidence

    for record, error in _records(path, name, format, found):
        if record is None:
            found.dropped[error] += 1
            continue
        found.records += 1
        try:
            clean, counts = (
                redactor.evidence(record) if isinstance(record, Evidence) else redactor.turn(record)
            )
        except RowError as failure:
            found.dropped[failure.reason] += 1
            continue
        if counts:
            found.touched += 1
            found.counts += counts
            _remember(record, found)
        # The name itself counts, not what the rules made of it: equal users stay equal.
        user = None if isinstance(record, Evidence) else record.user
        yield clean if isinstance(clean, Evidence) else replace(clean, user=user)


def _without_user(record: RoutingTurn | Evidence, key: bytes) -> RoutingTurn | Evidence:
    """As an import stores it: a key stands for the user."""
    from distill.curriculum.prepare import user_key
    from distill.curriculum.records import Evidence

    if isinstance(record, Evidence) or record.user is None:
        return record
    return replace(record, user=user_key(key, record.user))


def _records(
    path: Path, name: str, format: str, found: Redaction
) -> Iterator[tuple[RoutingTurn | Evidence | None, str]]:
    """Every turn and statement of a file, or the reason why a row gives none."""
    from distill.curriculum.drops import RowError
    from distill.curriculum.importers.base import Context
    from distill.curriculum.prepare import AUTO, importer_named, recognise
    from distill.curriculum.reading import Reading, container_of, parse, read_rows

    known = Context(source=name, now_ms=int(time.time() * 1000))
    fixed = None if format == AUTO else importer_named(format)
    reading = Reading(may_grow=False)
    for row in read_rows(path, reading, container_of(path, reading)):
        found.rows += 1
        try:
            if row.reason:
                raise RowError(row.reason, row.detail)
            value = parse(row.raw)
            importer = fixed
            if importer is None:
                chosen = recognise(value)
                if chosen is None:
                    raise RowError("unknown_format")
                importer = importer_named(chosen)
            for record in importer.read(value, known):
                if isinstance(record, RowError):  # a part of a batch; the others are good
                    yield None, record.reason
                else:
                    yield record, ""
        except RowError as error:
            yield None, error.reason


def _remember(record: Any, found: Redaction) -> None:
    """Keep a few examples of every kind, masked."""
    from distill.curriculum.pii_rules import find

    if all(len(found.examples.get(kind, ())) >= EXAMPLES for kind in found.counts):
        return
    for text in _texts(record):
        for span in find(text):
            known = found.examples.setdefault(span.kind, [])
            shown = mask(text[span.start : span.end])
            if len(known) < EXAMPLES and shown not in known:
                known.append(shown)


def _texts(value: Any) -> Iterator[str]:
    from distill.rundir import to_json

    todo = [to_json(value)]
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            todo += reversed(list(one.values()))
        elif isinstance(one, Sequence):
            todo += reversed(one)


def mask(text: str) -> str:
    """The shape of a value: the first letter of every run stays, the others become stars."""
    line = _INNER.sub("*", " ".join(text.split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def _write(out: Path, records: Iterator[RoutingTurn | Evidence]) -> None:
    """One JSON object per line; the file appears when it is complete."""
    import os

    from distill.curriculum.importers import to_plain
    from distill.rundir import TEMPORARY, clear_disk_errors

    partial = out.with_name(f".{out.name}{TEMPORARY}{os.getpid()}")
    with clear_disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("w", encoding="utf-8") as file:
                for record in records:
                    file.write(json.dumps(to_plain(record), ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(out)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
