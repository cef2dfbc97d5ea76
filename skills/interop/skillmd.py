"""SKILL.md: one skill as a file that coding agents understand, and back.

What the open format has a place for stands in the file; the rest (evidence, intervals, lineage)
lies in `bank.lock.json` beside the folders, keyed by the content hash of the skill, so that an
edited file no longer claims the credit of its former text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.rundir import from_json, staged_dir, to_json, write_json
from skills.interop.files import LOCK, Found, SkillFile, read_archive, read_text, walk
from skills.interop.frontmatter import Value, read, write
from skills.interop.records import Collector, Exported, Imported
from skills.interop.validate import MAX_DESCRIPTION, name_problems, validate_text
from skills.items import KINDS, LEVELS, STATUSES, Credit, SkillItem, slug

FORMAT = "skillmd"
OPTIONAL = ("license", "compatibility", "allowed-tools")
KEPT = ("evidence", "scope", "credit", "safety", "status", "pinned", "lineage", "extra")
"""Fields that the lock file holds."""
_WHEN = " Use when "
_MARK = re.compile(r"^## [\w ]+ <!-- skill:(\w+) -->$")
_HEADINGS = {
    "principle": "Principle",
    "when_to_apply": "When to apply",
    "body": "Details",
    "avoid": "Avoid",
}
_FOLDED = "extra."


# -- one skill ----------------------------------------------------------------------------------


def to_text(item: SkillItem, name: str, *, bank_version: str = "") -> str:
    """The SKILL.md of a skill. DataError for what the format forbids."""
    description = _description(item)
    values: dict[str, Any] = {"name": name, "description": description}
    for key in OPTIONAL:
        if isinstance(item.extra.get(key), str) and item.extra[key]:
            values[key] = item.extra[key]
    values["metadata"] = _metadata(item, bank_version)
    sections = [("body", item.body), ("avoid", item.avoid)]
    if _parts(description) != (item.principle, item.when_to_apply):
        sections[:0] = [("principle", item.principle), ("when_to_apply", item.when_to_apply)]
    parts = []
    for place, (key, text) in enumerate(sections):
        if key == "avoid" and not text:
            continue
        heading = (
            [] if key == "body" and not place else [f"## {_HEADINGS[key]} <!-- skill:{key} -->"]
        )
        parts.append("\n".join([*heading, text.replace("<!-- skill:", "<!-- skill::")]))
    body = "\n\n".join(parts).strip("\n")
    return f"---\n{write(values)}\n---\n{body}\n"


def _description(item: SkillItem) -> str:
    if item.principle or item.when_to_apply:
        when = f"Use when {item.when_to_apply}" if item.when_to_apply else ""
        text = " ".join(part for part in (item.principle, when) if part)
    else:
        text = f"{item.title}: {item.body}"
    return cut(text, MAX_DESCRIPTION) if len(text) > MAX_DESCRIPTION or "\n" in text else text


def cut(text: str, most: int) -> str:
    """Whole words up to `most` characters, on one line."""
    text = " ".join(text.split())
    if len(text) <= most:
        return text
    return text[: most + 1].rpartition(" ")[0].rstrip() or text[:most]


def _parts(description: str) -> tuple[str, str]:
    """Principle and when to apply, out of a description."""
    if description.startswith(_WHEN.lstrip()):
        return "", description.removeprefix(_WHEN.lstrip())
    principle, _, when = description.partition(_WHEN)
    return principle, when


def _metadata(item: SkillItem, bank_version: str) -> dict[str, str]:
    made = {
        "skill-id": item.id,
        "title": item.title,
        "kind": item.kind,
        "level": item.level,
        "category": item.category,
        "status": item.status,
        "utility": f"{item.credit.utility:.6f}",
        "uses": str(item.credit.num_used),
        "successes": str(item.credit.num_success),
        "risk": str(item.safety.risk),
        "pinned": "true" if item.pinned else "",
        "scope-env": item.scope.env,
        "scope-tools": _list(item.scope.tools),
        "scope-models": _list(item.scope.models),
        "parents": _list(item.lineage.parents),
        "source-run": item.lineage.run,
        "author": item.lineage.author,
        "bank-version": bank_version,
        "content-sha256": item.sha256,
    }
    made = {key: value for key, value in made.items() if value}
    foreign = item.extra.get("metadata", {})
    folded = {k: v for k, v in item.extra.items() if k not in (*OPTIONAL, "metadata", "name")}
    # An optional key that is not text has no place at the top of a strict file.
    folded |= {k: item.extra[k] for k in OPTIONAL if not isinstance(item.extra.get(k, ""), str)}
    if isinstance(foreign, Mapping):
        plain = {k: v for k, v in foreign.items() if isinstance(v, str) and v and k not in _READ}
        made |= {k: v for k, v in plain.items() if not k.startswith(_FOLDED)}
        rest = {k: v for k, v in foreign.items() if made.get(k) != v}
        folded |= {"metadata": rest} if rest else {}
    for key, value in folded.items():
        made[_FOLDED + key] = json.dumps(to_json(value), ensure_ascii=False)
    return made


def _list(values: Sequence[str]) -> str:
    return json.dumps(list(values), ensure_ascii=False) if values else ""


def from_text(text: str, folder: str) -> tuple[SkillItem, list[str]]:
    """The skill of a SKILL.md, read leniently, and warnings. DataError when it must be skipped."""
    matter = read(text, strict=False)
    warnings, values = list(matter.warnings), dict(matter.values)
    name = values.pop("name", "")
    if not isinstance(name, str) or not name:
        name = folder
        warnings.append("it has no name; the folder's was taken")
    warnings += [problem.text for problem in name_problems(name, folder)]
    description = values.pop("description", "")
    if not isinstance(description, str) or not description.strip():
        raise DataError("it has no description, so no client could tell when to use it")
    if len(description) > MAX_DESCRIPTION:
        warnings.append(f"its description has {len(description)} characters")
    metadata = values.pop("metadata", {})
    if not isinstance(metadata, dict):
        metadata = {"metadata": metadata} if metadata else {}
    fields, foreign, unfolded = _read_metadata(metadata, warnings)
    sections = _sections(matter.body)
    principle, when = _parts(description)
    title = fields.pop("title", "") or name.replace("-", " ").capitalize()
    item = SkillItem(
        id=fields.pop("id", "") or name,
        title=title,
        kind=fields.pop("kind", "workflow"),
        level=fields.pop("level", "task"),
        category=fields.pop("category", "") or "general",
        principle=sections.get("principle", principle),
        when_to_apply=sections.get("when_to_apply", when),
        body=sections.get("body", ""),
        avoid=sections.get("avoid", ""),
    )
    item = _with_fields(item, fields)
    extra: dict[str, Any] = {**values, **({"metadata": foreign} if foreign else {})}
    for key, value in unfolded.items():
        both = isinstance(value, dict) and isinstance(extra.get(key), dict)
        extra[key] = {**value, **extra[key]} if both else value
    if name not in (slug(title), clashing(slug(title), item)):
        extra["name"] = name
    return replace(item, extra=extra), warnings


def _sections(body: str) -> dict[str, str]:
    found: dict[str, list[str]] = {"body": []}
    now = "body"
    for line in body.split("\n"):
        mark = _MARK.match(line)
        if mark and mark[1] in _HEADINGS:
            now = mark[1]
            found[now] = []
        else:
            found[now].append(line.replace("<!-- skill::", "<!-- skill:"))
    return {key: "\n".join(lines).strip("\n") for key, lines in found.items()}


_READ: Mapping[str, str] = {
    "skill-id": "id",
    "title": "title",
    "kind": "kind",
    "level": "level",
    "category": "category",
    "status": "status",
    "utility": "utility",
    "uses": "num_used",
    "successes": "num_success",
    "risk": "risk",
    "pinned": "pinned",
    "scope-env": "env",
    "scope-tools": "tools",
    "scope-models": "models",
    "parents": "parents",
    "source-run": "run",
    "author": "author",
    "bank-version": "",
    "content-sha256": "",
}
_CHOICES = {"kind": KINDS, "level": LEVELS, "status": STATUSES}


def _read_metadata(
    metadata: Mapping[str, Value], warnings: list[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Our fields, the keys of others, and what an export had folded in."""
    fields: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    unfolded: dict[str, Any] = {}
    for key, value in metadata.items():
        if key.startswith(_FOLDED) and isinstance(value, str):
            try:
                unfolded[key.removeprefix(_FOLDED)] = json.loads(value)
            except ValueError:
                foreign[key] = value
        elif key in _READ and isinstance(value, str):
            read_value = _field(_READ[key], value) if _READ[key] else ""
            if read_value is None:
                warnings.append(f"metadata.{key}: {value[:40]!r} has no meaning here")
                foreign[key] = value
            elif _READ[key]:
                fields[_READ[key]] = read_value
        else:
            foreign[key] = value
    return fields, foreign, unfolded


def _field(name: str, value: str) -> Any:
    """The value of one of our fields; None when it is none."""
    if name in _CHOICES:
        return value if value in _CHOICES[name] else None
    try:
        if name == "utility":
            number = float(value)
            return number if 0.0 <= number <= 1.0 else None
        if name in ("num_used", "num_success"):
            return int(value) if int(value) >= 0 else None
        if name == "risk":
            return int(value) if 1 <= int(value) <= 5 else None
        if name == "pinned":
            return {"true": True, "false": False}.get(value)
        if name in ("tools", "models", "parents"):
            values = json.loads(value)
            good = isinstance(values, list) and all(isinstance(v, str) for v in values)
            return tuple(values) if good else None
    except ValueError:
        return None
    return value


def _with_fields(item: SkillItem, fields: Mapping[str, Any]) -> SkillItem:
    def some(*names: str) -> dict[str, Any]:
        return {name: fields[name] for name in names if name in fields}

    return replace(
        item,
        **some("status", "pinned"),
        credit=Credit(**some("utility", "num_used", "num_success")),
        safety=replace(item.safety, **some("risk")),
        scope=replace(item.scope, **some("env", "tools", "models")),
        lineage=replace(item.lineage, **some("parents", "run", "author")),
    )


def clashing(name: str, item: SkillItem) -> str:
    """The name of a skill whose own is taken."""
    return f"{name[:55].rstrip('-')}-{item.sha256[:8]}"


# -- folders ------------------------------------------------------------------------------------


def export_folder(items: Sequence[SkillItem], path: Path, *, bank_version: str = "") -> Exported:
    """Write `path/NAME/SKILL.md` for every skill, and `path/bank.lock.json`: all or nothing.

    Every file passes the strict validator; a skill that cannot is refused and counted. DataError
    when the folder exists.
    """
    taken: set[str] = set()
    refused: list[tuple[str, str]] = []
    locked: dict[str, dict[str, Any]] = {}
    with staged_dir(path) as partial:
        for item in items:
            try:
                name = _free_name(item, taken)
                text = to_text(item, name, bank_version=bank_version)
                errors = [p for p in validate_text(text, name) if p.is_error]
                if errors:
                    raise DataError(str(errors[0]))
            except DataError as error:
                refused.append((item.id, str(error)))
                continue
            taken.add(name)
            (partial / name).mkdir()
            (partial / name / "SKILL.md").write_text(text, encoding="utf-8", newline="\n")
            whole = to_json(item)
            locked.setdefault(item.sha256, {})[item.id] = {key: whole[key] for key in KEPT}
        write_json(partial / LOCK, {"format": 1, "bank_version": bank_version, "skills": locked})
    return Exported(path=path, num_written=len(taken), refused=tuple(refused))


def _free_name(item: SkillItem, taken: set[str]) -> str:
    wanted = item.extra.get("name")
    own = isinstance(wanted, str) and not name_problems(wanted)
    name = str(wanted) if own else item.slug
    for choice in (name, clashing(name, item)):
        if choice not in taken:
            return choice
    raise DataError(f"a skill with the same words is exported already, as {name!r}")


def import_tree(path: Path) -> Imported:
    """The skills of a folder, a single SKILL.md or an archive, read leniently.

    DataError when there is none, or when an archive is hostile.
    """
    if path.is_dir():
        found = walk(path)
    elif path.name.lower() == "skill.md":
        found = Found()
        folder = path.resolve().parent.name
        found.files.append(SkillFile(where=path.name, folder=folder, text=read_text(path)))
    else:
        found = read_archive(path)
    if not found.files and not found.skipped:
        raise DataError(f"{path} holds no SKILL.md; expected FOLDER/NAME/SKILL.md")
    out = Collector(skipped=found.skipped, warnings=found.warnings)
    lock = _read_lock(found.lock, out)
    for file in found.files:
        try:
            item, warnings = from_text(file.text, file.folder)
            out.warnings += [f"{file.where}: {warning}" for warning in warnings]
            known = lock.get(item.sha256, {}).get(item.id) if lock else None
            if known is not None:
                item = _restored(item, known, file.where)
        except DataError as error:
            out.skip(file.where, str(error))
            continue
        if file.resources:
            out.warnings.append(f"{file.where}: {file.resources} other files were not imported")
        out.add(item, file.where)
    return out.done(FORMAT)


def _read_lock(data: bytes | None, out: Collector) -> dict[str, dict[str, Any]]:
    if data is None:
        return {}
    try:
        value = json.loads(data)
        skills = value["skills"]
        if value["format"] != 1 or not all(isinstance(v, dict) for v in skills.values()):
            raise ValueError("not format 1")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        out.warnings.append(f"{LOCK} is damaged and was not used: {error!r}")
        return {}
    return dict(skills)


def _restored(item: SkillItem, known: Any, where: str) -> SkillItem:
    if not isinstance(known, Mapping):
        raise DataError(f"{LOCK}: its entry of this skill is no object")
    kept = {key: known[key] for key in KEPT if key in known}
    return from_json(SkillItem, {**to_json(item), **kept}, where=f"{LOCK}, {where}")
