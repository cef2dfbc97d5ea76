"""Skill banks of others, in and out: SKILL.md folders, SkillRL, lists of lessons, JSONL.

`import_path` recognises what a path holds; every export is complete or not there. What cannot be
used is counted with the place and the reason. Round trips give back what the format can hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from distill.errors import ConfigError, DataError
from skills.interop import jsonl, lists, skillrl
from skills.interop.files import is_archive
from skills.interop.records import Exported, Imported
from skills.interop.skillmd import export_folder, import_tree
from skills.items import SkillItem

__all__ = ["FORMATS", "Exported", "Imported", "export_folder", "export_path", "import_path"]

Format = Literal["skillmd", "skillrl", "jsonl", "expel", "ace", "reasoningbank"]
FORMATS: tuple[Format, ...] = ("skillmd", "skillrl", "jsonl", "expel", "ace", "reasoningbank")
MAX_BYTES = 2**28
"""Of one file."""


def import_path(path: Path) -> Imported:
    """The skills of a folder, archive or file. DataError when nothing in it is recognised."""
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a folder or file with skills")
    if path.is_dir() or path.name.lower() == "skill.md":
        return import_tree(path)
    if not path.is_file():
        raise DataError(f"{path} is neither a folder nor an ordinary file")
    if is_archive(path):
        return import_tree(path)
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path} is larger than {MAX_BYTES} bytes; split it")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return _from_lines(path, text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if path.suffix.lower() == ".json":
            raise DataError(f"{path} is not valid JSON: {error}") from error
        return _from_text(path, text)
    return _from_json(path, value)


def export_path(
    items: Sequence[SkillItem],
    path: Path,
    format: Format,
    *,
    bank_version: str = "",
    extra: Mapping[str, Any] | None = None,
) -> Exported:
    """Write skills in a format. `extra` is that of an import in the same format."""
    if format == "skillmd":
        return export_folder(items, path, bank_version=bank_version)
    if format == "skillrl":
        return skillrl.export_skillrl(items, path, extra=extra)
    if format == "jsonl":
        return jsonl.export_jsonl(items, path)
    if format in lists.STYLES:
        return lists.export_list(items, path, format)
    raise ConfigError(f"unknown format {format!r}; expected one of {', '.join(FORMATS)}")


def _from_lines(path: Path, text: str) -> Imported:
    rows: list[tuple[str, Any]] = []
    broken: list[tuple[str, str]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            rows.append((where, json.loads(line)))
        except (ValueError, RecursionError) as error:
            broken.append((where, f"not valid JSON: {error}"))
    return _with_skipped(_from_rows(path, rows), broken)


def _from_rows(path: Path, rows: Sequence[tuple[str, Any]]) -> Imported:
    """Rows of our own are recognised by their keys, others by the first row."""
    if not rows or any(jsonl.is_row(row) and "kind" in row for _, row in rows):
        return jsonl.import_rows(rows)
    style = lists.list_style([row for _, row in rows if isinstance(row, Mapping)])
    if style == "reasoningbank":
        return lists.import_memories(rows)
    if style == "records":
        return lists.import_records(rows)
    return jsonl.import_rows(rows)


def _from_json(path: Path, value: Any) -> Imported:
    if skillrl.is_bank(value):
        return skillrl.import_bank(value)
    style = lists.list_style(value)
    if style == "expel":
        return lists.import_expel(value)
    if isinstance(value, list) and value:
        rows = [(f"entry {place + 1}", row) for place, row in enumerate(value)]
        if style is not None or jsonl.is_row(value[0]):
            return _from_rows(path, rows)
    raise DataError(
        f"{path} is JSON, but no skill bank that is known here; expected a SkillRL bank (with "
        "general_skills), or a list of skills, rules or memories"
    )


def _from_text(path: Path, text: str) -> Imported:
    style = lists.text_style(text)
    if style == "ace":
        return lists.import_ace(text)
    if style == "expel":
        return lists.import_numbered(text)
    if style == "reasoningbank":
        rows = [(f"item {n + 1}", row) for n, row in enumerate(lists.split_memories(text))]
        return lists.import_memories(rows)
    raise DataError(
        f"{path} is no skill bank that is known here; expected a folder or archive with SKILL.md "
        "files, JSON, JSONL, an ACE playbook, or a numbered list of rules"
    )


def _with_skipped(found: Imported, more: Sequence[tuple[str, str]]) -> Imported:
    from dataclasses import replace

    return replace(found, skipped=(*found.skipped, *more))
