"""A version of a bank as one file that can be sent to somebody: JSON lines, checked on reading.

The first line names the version, each other line is one skill. The version's id covers every
record, so a file that was changed on its way is noticed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import DataError, SkillBankError
from distill.rundir import atomic_write, read_jsonl
from skills.codec import decode, record_sha, to_table
from skills.items import SkillItem
from skills.versions import Store, Tombstone, Version, row_of

KIND = "distill skill bank"
FORMAT = 1
LONGEST_HEAD = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """The content of such a file."""

    bank: str
    version: str
    items: tuple[SkillItem, ...]
    tombstones: dict[str, Tombstone]


def write_pack(store: Store, version: str, path: Path) -> int:
    """Write a version to `path`; returns the number of skills. Equal versions give equal bytes."""
    held = store.read_version(version)
    graves = {sha: {"id": g.id, "reason": g.reason} for sha, g in held.tombstones.items()}
    head: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "bank": store.path.name,
        "version": version,
        "num_skills": len(held.rows),
        "tombstones": dict(sorted(graves.items())),
    }
    tables = [head, *(to_table(item) for item in store.read_items(held.rows.values()))]
    lines = "".join(json.dumps(t, ensure_ascii=False, allow_nan=False) + "\n" for t in tables)
    atomic_write(path, lines)
    return len(held.rows)


def is_pack(path: Path) -> bool:
    """Whether a file begins as a packed bank does."""
    try:
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline(LONGEST_HEAD))
    except (OSError, ValueError):
        return False
    return isinstance(head, dict) and head.get("kind") == KIND


def read_pack(path: Path) -> Packed:
    """A packed version. DataError when the file is another one, cut short, or was changed."""
    rows = read_jsonl(path)
    head = rows[0] if rows and isinstance(rows[0], dict) else {}
    if head.get("kind") != KIND or head.get("format") != FORMAT:
        raise DataError(
            f"{path} is not a packed skill bank of format {FORMAT}; "
            "make one with: distill skills pack"
        )
    try:
        items = [
            decode(json.dumps(row).encode(), f"{path}, line {n}")
            for n, row in enumerate(rows[1:], start=2)
        ]
        packed = Packed(
            bank=str(head["bank"]),
            version=str(head["version"]),
            items=tuple(items),
            tombstones={sha: Tombstone(**grave) for sha, grave in head["tombstones"].items()},
        )
    except (SkillBankError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    found = Version(
        rows={item.id: row_of(item, record_sha(item)) for item in items},
        tombstones=packed.tombstones,
    ).id
    if found != packed.version:
        raise DataError(
            f"{path} was changed or cut: its {len(items)} of {head.get('num_skills')} skills have "
            f"the digest {found[:12]}, the file says {packed.version[:12]}"
        )
    return packed
