"""Pieces of the four layers, read from what sources call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from distill.curriculum.clock import shorten
from distill.curriculum.importers.messages import plain
from distill.curriculum.importers.values import (
    as_flag,
    as_ident,
    as_items,
    as_number,
    as_table,
    as_text,
    parsed,
    wrong,
)
from distill.curriculum.records import NUM_TIERS, PolicyStep, Status
from distill.curriculum.tiers import Tiers

T = TypeVar("T")

UNKNOWN_TIER = "tier?:"
"""Tag of a turn whose log names a tier that nobody configured, before the name."""
STATUSES: dict[str, Status] = {
    "success": "success", "ok": "success", "completed": "success", "succeeded": "success",
    "failure": "failure", "failed": "failure", "error": "failure",
    "aborted": "aborted", "cancelled": "aborted", "canceled": "aborted", "timeout": "aborted",
}  # fmt: skip
PROBABILITY_SLACK = 0.05
"""How far logged probabilities may be from adding up to 1: logs round them."""


def made(cls: type[T], **values: Any) -> T | None:
    """A layer from the values that the log had; None when it had none of them."""
    for value in values.values():
        if value is not None and value != ():
            # Defaults stand for what is missing.
            return cls(**{name: v for name, v in values.items() if v is not None})
    return None


def tier_of(value: Any, field: str, tiers: Tiers, tags: list[str]) -> int | None:
    """The tier that a name or a number stands for. An unknown one is None and becomes a tag."""
    if value is None or value == "":
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    name = as_ident(value, field)
    tier = tiers.of_name(name)
    if tier is None:
        tags.append(UNKNOWN_TIER + name[:40])
    return tier


def probs_of(value: Any, field: str, tiers: Tiers) -> tuple[float, ...] | None:
    """A probability per tier, from a list of four or an object {tier: probability}."""
    value = parsed(value, field) if value != "" else None
    if value is None:
        return None
    if isinstance(value, Mapping):
        spread = [0.0] * NUM_TIERS
        for name, entry in value.items():
            tier = tiers.of_name(name)
            if tier is None:
                raise wrong(field, "names of known tiers", name)
            spread[tier] += as_number(entry, f"{field}.{name}") or 0.0
    else:
        spread = [as_number(entry, field) or 0.0 for entry in as_items(value, field)]
    if not spread:
        return None
    if len(spread) != NUM_TIERS:
        raise wrong(field, f"{NUM_TIERS} probabilities, or an object with a tier for each", value)
    if min(spread) < 0 or abs(sum(spread) - 1) > PROBABILITY_SLACK:
        raise wrong(field, "probabilities that add up to 1", spread)
    return tuple(spread)


def steps_of(value: Any, field: str, name: str = "stage") -> tuple[PolicyStep, ...]:
    """Policy steps from a list of {stage, applied, ...}; what else they have is their detail. A
    step that does not say whether it was applied, was."""
    steps = []
    for index, entry in enumerate(as_items(value, field) if value != "" else []):
        where = f"{field}[{index}]"
        table = as_table({"stage": entry} if isinstance(entry, str) else entry, where)
        stage = as_text(table.get(name, table.get("stage")), f"{where}.{name}")
        applied = as_flag(table.get("applied", True), f"{where}.applied")
        inner = table.get("detail")
        if set(table) <= {name, "stage", "applied", "detail"} and isinstance(inner, Mapping):
            detail = dict(inner)
        else:
            detail = {k: v for k, v in table.items() if k not in (name, "stage", "applied")}
        detail = plain(detail, where) if detail else detail
        steps.append(PolicyStep(stage=stage, applied=bool(applied), detail=detail))
    return tuple(steps)


def propensity_of(value: Any, field: str) -> float | None:
    found = None if value is None or value == "" else as_number(value, field)
    if found is not None and not 0 < found <= 1:
        raise wrong(field, "a probability above 0 and at most 1", shorten(found))
    return found


def status_of(value: Any, field: str) -> Status | None:
    """None for words that are no known status, such as `unknown`."""
    if value is None or value == "":
        return None
    return STATUSES.get(as_text(value, field).strip().lower())
