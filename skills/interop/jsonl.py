"""One skill per line, everything that a skill has. Unknown keys survive in `extra`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.rundir import atomic_write, from_json, to_json
from skills.interop.records import Collector, Exported, Imported
from skills.items import FORMAT as ITEM_FORMAT
from skills.items import SkillItem

FORMAT = "jsonl"
_FIELDS = frozenset(f.name for f in fields(SkillItem))


def to_row(item: SkillItem) -> dict[str, Any]:
    return {"format": ITEM_FORMAT, **to_json(item)}


def from_row(row: Mapping[str, Any], where: str) -> SkillItem:
    """DataError for a row that is no skill, or of a newer format."""
    if row.get("format", ITEM_FORMAT) != ITEM_FORMAT:
        raise DataError(f"format {row['format']!r}, but this version reads {ITEM_FORMAT}")
    extra = row.get("extra", {})
    unknown = {k: v for k, v in row.items() if k not in _FIELDS and k != "format"}
    if unknown and isinstance(extra, Mapping):
        extra = {**unknown, **extra}
    known = {k: v for k, v in row.items() if k in _FIELDS}
    return from_json(SkillItem, {**known, "extra": extra}, where=where)


def is_row(row: object) -> bool:
    return isinstance(row, Mapping) and {"id", "title"} <= row.keys()


def export_jsonl(items: Sequence[SkillItem], path: Path) -> Exported:
    lines = [json.dumps(to_row(item), ensure_ascii=False) + "\n" for item in items]
    atomic_write(path, "".join(lines))
    return Exported(path=path, num_written=len(lines))


def import_rows(rows: Sequence[tuple[str, Any]]) -> Imported:
    """Rows with where they were."""
    out = Collector()
    for where, row in rows:
        try:
            if not isinstance(row, Mapping):
                raise DataError(f"expected an object, found {type(row).__name__}")
            out.add(from_row(row, where), where)
        except DataError as error:
            out.skip(where, str(error))
    return out.done(FORMAT)
