"""What a shell offers when a key asks for the rest of a word: banks, skills, versions.

A key press must be quick and quiet. The files of a bank (their layout: `skills.versions`) are read
without the bank's own code, whose imports would take longer than all the rest, and what cannot be
read offers nothing. Names come from files of others, so only plain ones are offered: a shell would
insert the rest into a command line as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import typer

_PLAIN = re.compile(r"[\w.@+][\w.@+-]*")
SHORT = 12
"""Digits of a version that are offered."""
MAX_OFFERED = 500
"""Of one key press; more is nothing that a person reads."""


def complete_bank(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the banks below `--home`."""
    return _plain((folder.name for folder in _banks(ctx)), incomplete)


def complete_skill(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of the skills in the active version of the bank."""
    bank = _bank(ctx)
    if bank is None:
        return []
    try:
        active = (bank / "active").read_text(encoding="utf-8").strip()
        if not re.fullmatch("[0-9a-f]{64}", active):
            return []
        text = (bank / "versions" / f"{active}.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []  # the command itself says what is wrong with the bank
    # Every skill has a line that begins with its id.
    row = re.compile(rf'^  \["({re.escape(incomplete)}[\w.@+-]*)", "', re.MULTILINE)
    return _plain((found[1] for found in row.finditer(text)), incomplete)


def complete_version(ctx: typer.Context, incomplete: str) -> list[str]:
    """Beginnings of the ids of the bank's versions."""
    bank = _bank(ctx)
    names = sorted(path.stem for path in (bank / "versions").glob("*.json")) if bank else []
    return _plain((name[: max(SHORT, len(incomplete))] for name in names), incomplete)


def _banks(ctx: typer.Context) -> list[Path]:
    home = Path(ctx.params.get("home") or ".")
    return sorted(path.parent for path in (home / "bank").glob("*/bank.json"))


def _bank(ctx: typer.Context) -> Path | None:
    """The folder of the bank that the command would open; None where it would ask which."""
    name, known = ctx.params.get("bank") or "", _banks(ctx)
    if not name:
        return known[0] if len(known) == 1 else None
    return next((folder for folder in known if folder.name == name), None)


def _plain(names: Iterable[str], incomplete: str) -> list[str]:
    found = dict.fromkeys(n for n in names if n.startswith(incomplete) and _PLAIN.fullmatch(n))
    return list(found)[:MAX_OFFERED]
