"""Flat lists of lessons: ExpeL rules, ACE playbooks, ReasoningBank memories, UCOB's items.

Each says less about a skill than a bank does; what it says beyond one goes to `extra`, so that an
export in the same style gives it back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from distill.errors import ConfigError
from distill.rundir import atomic_write, to_json
from skills.interop.records import ORIGINAL_ID, Collector, Exported, Imported, text_of
from skills.interop.skillmd import cut
from skills.items import Credit, Evidence, SkillItem

Style = Literal["expel", "ace", "reasoningbank"]
STYLES: tuple[Style, ...] = ("expel", "ace", "reasoningbank")
_BULLET = re.compile(r"\[([^\]]+)\]\s*helpful=(\d+)\s*harmful=(\d+)\s*::\s*(.*)")
_NUMBERED = re.compile(r"(\d+)[.)]\s+(\S.*)")
_MEMORY = re.compile(r"^#\s*Memory Item\b.*$", re.MULTILINE | re.IGNORECASE)
_TITLE = 60


def list_style(value: object) -> Style | Literal["records"] | None:
    """Which kind of list a decoded JSON value is."""
    if isinstance(value, Mapping) and isinstance(value.get("rules"), list):
        value = value["rules"]
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    if isinstance(first, str) or (isinstance(first, list) and len(first) == 2):
        return "expel"
    if not isinstance(first, Mapping):
        return None
    if {"rule", "count"} <= first.keys():
        return "expel"
    if "memory_items" in first or {"title", "content"} <= first.keys():
        return "reasoningbank"
    return "records" if {"title", "principle"} <= first.keys() else None


def text_style(text: str) -> Style | None:
    """Which kind of list a text is."""
    if any(_BULLET.match(line.strip()) for line in text.splitlines()):
        return "ace"
    if _MEMORY.search(text):
        return "reasoningbank"
    return "expel" if any(_NUMBERED.match(line) for line in text.splitlines()) else None


# -- ExpeL --------------------------------------------------------------------------------------


def import_expel(value: Any) -> Imported:
    """Rules as [text, count] pairs, objects or plain texts, in their order."""
    rows = value["rules"] if isinstance(value, Mapping) else value
    out = Collector()
    for place, row in enumerate(rows):
        where = f"rule {place + 1}"
        if isinstance(row, Mapping):
            row = [row.get("rule"), row.get("count")]
        text, count = (row, None) if isinstance(row, str) else [*row, None, None][:2]
        if not isinstance(text, str) or not text.strip():
            out.skip(where, "a rule must be text")
            continue
        out.add(_lesson(place + 1, text, count), where)
    return out.done("expel")


def import_numbered(text: str) -> Imported:
    """Rules as a numbered list in plain text."""
    out = Collector()
    for number, line in enumerate(text.splitlines(), start=1):
        found = _NUMBERED.fullmatch(line.strip())
        if found:
            out.add(_lesson(int(found[1]), found[2], None), f"line {number}")
        elif line.strip():
            out.skip(f"line {number}", "no numbered rule")
    return out.done("expel")


def _lesson(number: int, text: str, count: object) -> SkillItem:
    return SkillItem(
        id=f"expel_{number:03d}",
        title=cut(text, _TITLE),
        level="general",
        category="general",
        principle=text,
        credit=Credit(votes=count) if type(count) is int else Credit(),
    )


# -- ACE ----------------------------------------------------------------------------------------


def import_ace(text: str) -> Imported:
    """A playbook: `## SECTION` and lines `[id] helpful=X harmful=Y :: text`."""
    out, section = Collector(), ""
    for number, line in enumerate(text.splitlines(), start=1):
        line, where = line.strip(), f"line {number}"
        if line.startswith("#"):
            section = line.lstrip("#").strip()
            continue
        found = _BULLET.match(line)
        if found is None or not found[4].strip():
            if line:
                out.skip(where, "no line of a playbook: [id] helpful=X harmful=Y :: text")
            continue
        helpful, harmful = int(found[2]), int(found[3])
        out.add(
            SkillItem(
                id=found[1],
                title=cut(found[4], _TITLE),
                level="general",
                category=re.sub(r"\W+", "_", section.lower().replace("&", "and")) or "general",
                principle=found[4],
                credit=Credit(num_used=helpful + harmful, num_success=helpful),
                extra={"section": section} if section else {},
            ),
            where,
        )
    return out.done("ace")


def to_playbook(items: Sequence[SkillItem]) -> str:
    sections: dict[str, list[str]] = {}
    for item in items:
        section = text_of(item.extra.get("section")) or item.category.replace("_", " ").upper()
        number = item.extra.get(ORIGINAL_ID, item.id)
        used, good = item.credit.num_used, item.credit.num_success
        text = " ".join((item.principle or item.body).split())
        line = f"[{number}] helpful={good} harmful={max(0, used - good)} :: {text}"
        sections.setdefault(section, []).append(line)
    return "\n\n".join(f"## {name}\n" + "\n".join(rows) for name, rows in sections.items()) + "\n"


# -- ReasoningBank ------------------------------------------------------------------------------


def import_memories(rows: Sequence[tuple[str, Any]]) -> Imported:
    """Memory items, alone or in rows with the task that they came from."""
    out, num_traces = Collector(), 0
    for where, row in rows:
        if not isinstance(row, Mapping):
            out.skip(where, f"expected an object, found {type(row).__name__}")
            continue
        if "memory_items" not in row:
            _add_memory(out, where, row, (), len(out.items))
            continue
        num_traces += bool(row.get("think_list") or row.get("action_list"))
        outcome: Any = "success" if row.get("status") == "success" else "failure"
        evidence = (Evidence(traj_id=str(row.get("task_id", where)), outcome=outcome),)
        given = row["memory_items"]
        texts = given if isinstance(given, list) else [given]
        for entry in texts:
            found = split_memories(entry) if isinstance(entry, str) else [entry]
            if not found:
                out.skip(where, "its memory has no title and content")
            for place, memory in enumerate(found):
                _add_memory(out, f"{where}, item {place + 1}", memory, evidence, len(out.items))
    if num_traces:
        out.warnings.append(f"the trajectories of {num_traces} rows were not kept")
    return out.done("reasoningbank")


def split_memories(text: str) -> list[dict[str, str]]:
    """`# Memory Item N` with `## Title`, `## Description` and `## Content`, as the model wrote."""
    found = []
    for part in _MEMORY.split(text)[1:]:
        fields = {}
        for name in ("title", "description", "content"):
            match = re.search(
                rf"^##\s*{name}\b:?[ \t]*\n?(.*?)(?=^##\s|\Z)", part, re.DOTALL | re.I | re.M
            )
            fields[name] = match[1].strip().strip("`").strip() if match else ""
        if fields["title"] and (fields["content"] or fields["description"]):
            found.append(fields)
    return found


def _add_memory(
    out: Collector, where: str, row: Any, evidence: tuple[Evidence, ...], count: int
) -> None:
    if not isinstance(row, Mapping):
        out.skip(where, f"expected an object, found {type(row).__name__}")
        return
    title, content = text_of(row.get("title")), text_of(row.get("content"))
    known = ("title", "content", "id")
    out.add(
        SkillItem(
            id=text_of(row.get("id")) or f"mem_{count + 1:03d}",
            title=title,
            principle=content or text_of(row.get("description")),
            evidence=evidence,
            extra={k: v for k, v in row.items() if k not in known},
        ),
        where,
    )


def to_memories(items: Sequence[SkillItem]) -> list[dict[str, Any]]:
    return [
        {
            "id": item.extra.get(ORIGINAL_ID, item.id),
            "title": item.title,
            "description": item.when_to_apply,
            "content": item.principle or item.body,
            **{k: to_json(v) for k, v in item.extra.items() if k != ORIGINAL_ID},
        }
        for item in items
    ]


# -- records with a title and a principle ---------------------------------------------------------

_NAMES: Mapping[str, tuple[str, ...]] = {
    "id": ("id", "skill_id", "memory_id"),
    "category": ("category", "task_category"),
    "utility": ("utility", "utility_score"),
    "num_used": ("num_used", "count"),
}


def import_records(rows: Sequence[tuple[str, Any]]) -> Imported:
    """Objects with at least a title and a principle, such as UCOB's memory."""
    out = Collector()
    for where, row in rows:
        if not isinstance(row, Mapping):
            out.skip(where, f"expected an object, found {type(row).__name__}")
            continue
        used = {"title", "principle", "when_to_apply"}
        values: dict[str, Any] = {}
        for field, names in _NAMES.items():
            kinds = (str,) if field in ("id", "category") else (int, float)
            name = next((n for n in names if isinstance(row.get(n), kinds)), None)
            if name is not None:
                values[field] = row[name]
                used.add(name)
        out.add(
            SkillItem(
                id=values.get("id") or f"rec_{len(out.items) + 1:03d}",
                title=text_of(row.get("title")),
                category=values.get("category") or "general",
                principle=text_of(row.get("principle")),
                when_to_apply=text_of(row.get("when_to_apply")),
                credit=Credit(
                    utility=float(values.get("utility", 0.5)),
                    num_used=int(values.get("num_used", 0)),
                ),
                extra={k: v for k, v in row.items() if k not in used},
            ),
            where,
        )
    return out.done("records")


# -- export -------------------------------------------------------------------------------------


def export_list(items: Sequence[SkillItem], path: Path, style: Style) -> Exported:
    """Write a list in one of the styles; what it has no place for is not written, and counted."""
    if style == "ace":
        text = to_playbook(items)
    elif style == "expel":
        rules = [[i.principle or i.body, i.credit.votes] for i in items]
        text = json.dumps(rules, indent=2, ensure_ascii=False) + "\n"
    elif style == "reasoningbank":
        text = json.dumps(to_memories(items), indent=2, ensure_ascii=False) + "\n"
    else:
        raise ConfigError(f"a list has the style {', '.join(STYLES)}, got {style!r}")
    atomic_write(path, text)
    lost = sum(bool(item.avoid or (item.body and item.principle)) for item in items)
    warnings = (f"{lost} skills say more than this list has a place for",) if lost else ()
    return Exported(path=path, num_written=len(items), warnings=warnings)
