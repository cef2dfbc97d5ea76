"""SkillRL banks, in all three shapes in which they were released.

ALFWorld and WebShop keep their task skills under `task_specific_skills`, Search under
`query_type_skills`, which SkillRL's own loader never reads. The rest of a file, its `metadata` for
one, is kept for the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.rundir import to_json, write_json
from skills.interop.records import ORIGINAL_ID, Collector, Exported, Imported, text_of
from skills.interop.skillmd import cut
from skills.items import SkillItem
from skills.retrieve import section_of

FORMAT = "skillrl"
GENERAL, MISTAKES = "general_skills", "common_mistakes"
TASKS = ("task_specific_skills", "query_type_skills")
_SKILL = ("skill_id", "title", "principle", "when_to_apply")
_MISTAKE = ("mistake_id", "description", "why_it_happens", "how_to_avoid")


def is_bank(value: object) -> bool:
    return isinstance(value, Mapping) and any(k in value for k in (GENERAL, MISTAKES, *TASKS))


def import_bank(bank: Mapping[str, Any]) -> Imported:
    """The skills of a decoded bank; entries that are none are counted."""
    out = Collector()
    for where, row in _rows(bank.get(GENERAL, []), GENERAL, out):
        _add_skill(out, where, row, "general", "general")
    for key in TASKS:
        groups = bank.get(key, {})
        if not isinstance(groups, Mapping):
            out.skip(key, f"expected an object of lists, found {type(groups).__name__}")
            continue
        for category, rows in groups.items():
            for where, row in _rows(rows, f"{key}.{category}", out):
                _add_skill(out, where, row, "task", str(category))
    for where, row in _rows(bank.get(MISTAKES, []), MISTAKES, out):
        _add_mistake(out, where, row)
    extra = {k: v for k, v in bank.items() if k not in (GENERAL, MISTAKES, *TASKS)}
    return out.done(FORMAT, {"task_key": _task_key(bank), "bank": extra})


def _task_key(bank: Mapping[str, Any]) -> str:
    return next((key for key in TASKS if key in bank), TASKS[0])


def _rows(rows: object, name: str, out: Collector) -> list[tuple[str, Mapping[str, Any]]]:
    if not isinstance(rows, list):
        out.skip(name, f"expected a list, found {type(rows).__name__}")
        return []
    found = []
    for place, row in enumerate(rows):
        if isinstance(row, Mapping):
            found.append((f"{name}[{place}]", row))
        else:
            out.skip(f"{name}[{place}]", f"expected an object, found {type(row).__name__}")
    return found


def _add_skill(
    out: Collector, where: str, row: Mapping[str, Any], level: Any, category: str
) -> None:
    title, principle = text_of(row.get("title")), text_of(row.get("principle"))
    if not title.strip() or not principle.strip():
        out.skip(where, "a skill needs a title and a principle, both text")
        return
    number = f"{where.rpartition('[')[2].rstrip(']')}"
    out.add(
        SkillItem(
            id=text_of(row.get("skill_id")) or f"{category[:3]}_{int(number) + 1:03d}",
            title=title,
            kind="principle",
            level=level,
            category=category,
            principle=principle,
            when_to_apply=text_of(row.get("when_to_apply")),
            extra={k: v for k, v in row.items() if k not in _SKILL},
        ),
        where,
    )


def _add_mistake(out: Collector, where: str, row: Mapping[str, Any]) -> None:
    description = text_of(row.get("description"))
    if not description.strip():
        out.skip(where, "a mistake needs a description")
        return
    number = int(where.rpartition("[")[2].rstrip("]")) + 1
    out.add(
        SkillItem(
            id=text_of(row.get("mistake_id")) or f"err_{number:03d}",
            title=cut(description, 80),
            kind="mistake",
            level="general",
            category="general",
            principle=text_of(row.get("how_to_avoid")),
            body=text_of(row.get("why_it_happens")),
            avoid=description,
            extra={k: v for k, v in row.items() if k not in _MISTAKE},
        ),
        where,
    )


def to_bank(items: Sequence[SkillItem], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The bank as SkillRL writes it. `extra` is that of the import, where there was one."""
    general: list[Any] = []
    mistakes: list[Any] = []
    tasks: dict[str, list[Any]] = {}
    for item in items:
        own = {k: v for k, v in item.extra.items() if k != ORIGINAL_ID}
        number = item.extra.get(ORIGINAL_ID, item.id)
        section = section_of(item)
        if section == "mistake":
            values = (number, item.avoid or item.title, item.body, item.principle)
            mistakes.append({**dict(zip(_MISTAKE, values, strict=True)), **own})
            continue
        says = item.principle or item.body
        row = {
            **dict(zip(_SKILL, (number, item.title, says, item.when_to_apply), strict=True)),
            **own,
        }
        if section == "general":
            general.append(row)
        else:
            tasks.setdefault(item.category, []).append(row)
    known = dict(extra or {})
    rest = known.get("bank", {"metadata": {"source": "distill-nightly"}})
    if not isinstance(rest, Mapping):
        raise DataError("the extra of a SkillRL bank must be what its import returned")
    made = {GENERAL: general, str(known.get("task_key", TASKS[0])): tasks, MISTAKES: mistakes}
    return {**made, **to_json(rest)}


def export_skillrl(
    items: Sequence[SkillItem], path: Path, *, extra: Mapping[str, Any] | None = None
) -> Exported:
    lost = sum(bool(i.body and i.principle and i.kind != "mistake") for i in items)
    write_json(path, to_bank(items, extra))
    warnings = (f"{lost} skills have steps that this format has no place for",) if lost else ()
    return Exported(path=path, num_written=len(items), warnings=warnings)
