"""One skill: what was learned, in words, with where it came from and what it was worth.

The text of a skill is what its content hash covers; credit, safety and status change without
making it another skill. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from distill.errors import SkillBankError

Kind = Literal["principle", "workflow", "correction", "mistake"]
Level = Literal["general", "task", "step"]
Status = Literal["candidate", "active", "quarantined", "retired"]
KINDS: tuple[Kind, ...] = ("principle", "workflow", "correction", "mistake")
LEVELS: tuple[Level, ...] = ("general", "task", "step")
STATUSES: tuple[Status, ...] = ("candidate", "active", "quarantined", "retired")
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """A trajectory that taught or confirmed a skill."""

    traj_id: str
    outcome: Literal["success", "failure"]
    step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Where a skill applies; empty means anywhere."""

    env: str = ""
    tools: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """What a skill was worth, measured. Utilities are in [0, 1]."""

    utility: float = 0.5
    num_used: int = 0
    num_success: int = 0
    """Successes among the uses."""
    num_without: int = 0
    """Matched rollouts of the same tasks without the skill ..."""
    num_success_without: int = 0
    """... and the successes among them."""
    gain_low: float | None = None
    gain_high: float | None = None
    """Interval of the paired gain with the skill over without."""
    tokens_saved: float = 0.0
    votes: int = 2
    """ExpeL's counter: written 2, confirmed or edited +1, contradicted -1, gone at 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Safety:
    """Risk from 1 (harmless) to 5."""

    risk: int = 1
    lineage_risk: int = 1
    """Highest risk among its ancestors."""
    num_harm: int = 0
    """Times that it was seen to do harm."""
    reasons: tuple[str, ...] = ()
    """What the checks found in its text; why it is in quarantine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """Who made a skill, from what."""

    parents: tuple[str, ...] = ()
    op: str = "ADD"
    run: str = ""
    author: str = ""
    """Model or person that wrote the text."""
    prompt_version: str = ""
    created_step: int | None = None
    updated_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SkillItem:
    """A skill of a bank. `id` is stable over edits, `sha256` names the very text."""

    id: str
    title: str
    kind: Kind = "principle"
    level: Level = "task"
    category: str = "general"
    principle: str = ""
    when_to_apply: str = ""
    body: str = ""
    """Markdown: steps, reasons, how to avoid a mistake."""
    avoid: str = ""
    evidence: tuple[Evidence, ...] = ()
    scope: Scope = field(default_factory=Scope)
    credit: Credit = field(default_factory=Credit)
    safety: Safety = field(default_factory=Safety)
    status: Status = "candidate"
    pinned: bool = False
    lineage: Lineage = field(default_factory=Lineage)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a foreign format that have no place here; they survive a round trip."""

    @property
    def slug(self) -> str:
        """The title as a name: lower case letters, digits and hyphens, 1 to 64 characters."""
        return slug(self.title)

    @property
    def sha256(self) -> str:
        """Content hash (hex) of the text: what two equal skills share, whatever their credit."""
        parts = [self.kind, self.level, normal(self.category), normal(self.title)]
        parts += [normal(x) for x in (self.principle, self.when_to_apply, self.body, self.avoid)]
        parts += [self.scope.env, *sorted(self.scope.tools), "|", *sorted(self.scope.models)]
        return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()

    @property
    def text(self) -> str:
        """What is embedded and searched: title, principle and when it applies."""
        parts = (self.title, self.principle, self.when_to_apply)
        return " ".join(p if p.endswith((".", "!", "?")) else f"{p}." for p in parts if p)

    def check(self) -> SkillItem:
        """Itself. SkillBankError when it could not be stored or shown."""
        if not self.id or not self.title.strip():
            raise SkillBankError(
                f"a skill needs an id and a title, got {self.id!r} and {self.title!r}"
            )
        if not self.category.strip():
            raise SkillBankError(
                f"skill {self.id} has no category, so it would never be shown; use 'general'"
            )
        if not (self.principle.strip() or self.body.strip()):
            raise SkillBankError(f"skill {self.id} says nothing: give a principle or a body")
        for name, value, known in (
            ("kind", self.kind, KINDS),
            ("level", self.level, LEVELS),
            ("status", self.status, STATUSES),
        ):
            if value not in known:
                raise SkillBankError(
                    f"skill {self.id}: {name} must be one of {', '.join(known)}, got {value!r}"
                )
        if not 0.0 <= self.credit.utility <= 1.0:
            raise SkillBankError(
                f"skill {self.id}: utility must be within [0, 1], got {self.credit.utility}"
            )
        if not 1 <= self.safety.risk <= 5:
            raise SkillBankError(
                f"skill {self.id}: risk must be from 1 to 5, got {self.safety.risk}"
            )
        return self

    def with_status(self, status: Status) -> SkillItem:
        return replace(self, status=status)


def normal(text: str) -> str:
    """Text as it is compared: NFKC, one space between words, lower case."""
    return " ".join(unicodedata.normalize("NFKC", text).split()).casefold()


def slug(title: str) -> str:
    """A title as a folder name; `skill` when no letter or digit is left."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    name = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")[:64].strip("-")
    return name or "skill"
