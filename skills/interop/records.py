"""What an import found, and what an export wrote: nothing is left out without being counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distill.errors import SkillBankError
from skills.items import Credit, SkillItem

ORIGINAL_ID = "original-id"
"""Key of `extra` with the id that a file gave, where that was taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """Skills as their files describe them, credit and status included.

    A file from elsewhere may claim anything about itself: store `unproven` of it.
    """

    items: tuple[SkillItem, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    """Where something was that could not be used, and why."""
    warnings: tuple[str, ...] = ()
    format: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What a file says about the bank as a whole; an export in the same format takes it back."""

    def unproven(self) -> tuple[SkillItem, ...]:
        """The items as candidates without credit, pins or a clean record."""
        return tuple(
            replace(item, status="candidate", pinned=False, credit=Credit()) for item in self.items
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    path: Path
    num_written: int
    refused: tuple[tuple[str, str], ...] = ()
    """Ids that the format cannot hold, and why."""
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class Collector:
    """Gathers what an importer finds; ids stay unique."""

    items: list[SkillItem] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)

    def add(self, item: SkillItem, where: str) -> None:
        """Take an item, or count why not. A second skill with an id gets another id."""
        try:
            item.check()
        except SkillBankError as error:
            self.skip(where, str(error))
            return
        if item.id in self._taken:
            other = f"{item.id}-{item.sha256[:8]}"
            if other in self._taken:
                self.skip(where, f"the same skill as another one with the id {item.id!r}")
                return
            self.warnings.append(f"{where}: the id {item.id!r} is taken; it became {other!r}")
            item = replace(item, id=other, extra={ORIGINAL_ID: item.id, **item.extra})
        self._taken.add(item.id)
        self.items.append(item)

    def skip(self, where: str, reason: str) -> None:
        self.skipped.append((where, reason))

    def done(self, format: str, extra: Mapping[str, Any] | None = None) -> Imported:
        return Imported(
            items=tuple(self.items),
            skipped=tuple(self.skipped),
            warnings=tuple(self.warnings),
            format=format,
            extra=dict(extra or {}),
        )


def text_of(value: object) -> str:
    """A field that should be text; anything else is no text."""
    return value if isinstance(value, str) else ""
