"""What lies between two versions of a bank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distill.tables import leaves
from skills.codec import to_table
from skills.items import SkillItem
from skills.versions import Store, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """One skill in two versions, and every field that differs: dotted name -> (before, after)."""

    before: SkillItem
    after: SkillItem
    fields: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Diff:
    added: tuple[SkillItem, ...]
    removed: tuple[SkillItem, ...]
    changed: tuple[Changed, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


def diff(store: Store, left: Version, right: Version) -> Diff:
    """From `left` to `right`; reads only the skills that differ."""
    both = [i for i, row in left.rows.items() if i in right.rows and right.rows[i] != row]
    changed = []
    for skill_id in both:
        before = store.read_item(left.rows[skill_id].item)
        after = store.read_item(right.rows[skill_id].item)
        changed.append(Changed(before=before, after=after, fields=field_diff(before, after)))
    added = [row for i, row in right.rows.items() if i not in left.rows]
    removed = [row for i, row in left.rows.items() if i not in right.rows]
    return Diff(
        added=tuple(store.read_items(added)),
        removed=tuple(store.read_items(removed)),
        changed=tuple(changed),
    )


def field_diff(before: SkillItem, after: SkillItem) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (before, after) of every field that differs."""
    old, new = dict(leaves(to_table(before))), dict(leaves(to_table(after)))
    names = dict.fromkeys((*old, *new))
    return {n: (old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)}
