"""A bank as one page to look at: search it, sort it, see what every skill says and was worth.

The page is one file without requests to anywhere. The texts in it come from trajectories that
nobody vouched for: they are carried as JSON and only ever become text nodes, and a policy in the
page lets no other script or style run than the two that belong to it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from string import Template
from typing import Any

from skills.bank import SkillBank
from skills.items import STATUSES
from skills.lifecycle import LIVE
from skills.page_facts import read_facts, visible

GENERATOR = '<meta name="generator" content="distill skills html">'
"""Stands near the top of every such page."""


def build_page(bank: SkillBank, *, version: str | None = None, against: str | None = None) -> str:
    """The page of a version, by default of the active one, as HTML.

    `version` and `against` are beginnings of version ids. The page shows the last changes that led
    to the version; with `against` first the difference from that one. ConfigError for a beginning
    that stands for no version or for several, SkillBankError for a damaged one.
    """
    other = None if against is None else bank.resolve(against)
    facts = read_facts(bank, bank.resolve(version), other)
    style, script = _part("page.css"), _part("page.js")
    return Template(_part("page.html")).substitute(
        policy=_policy(style, script),
        generator=GENERATOR,
        title=_text(f"Skills - {facts['bank']}"),
        eyebrow=_text(f"distill skills \u00b7 {facts['bank']}"),
        headline=_headline(facts),
        about=_about(facts),
        tiles=_tiles(facts),
        notice=_notice(facts),
        style=style,
        script=script,
        data=_data(facts),
    )


def is_page(start: str) -> bool:
    """Whether a text that begins so is a page of this kind."""
    return GENERATOR in start[:4096]


def _part(name: str) -> str:
    return files("skills").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    rules = (
        "default-src 'none'",
        f"style-src '{_hash(style)}'",
        f"script-src '{_hash(script)}'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
    )
    return "; ".join(rules)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(facts: dict[str, Any]) -> str:
    """JSON that cannot end the element that it stands in."""
    text = json.dumps(facts, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text(text: str) -> str:
    return html.escape(visible(text), quote=True)


def _headline(facts: dict[str, Any]) -> str:
    counts, total = facts["statuses"], len(facts["skills"])
    if not total:
        return "This bank is empty"
    if not counts.get("active"):
        return f"{_skills(total)}, none of them active yet"
    active = counts["active"]
    return f'<span class="active">{_skills(active, "active ")}</span> of {total:,}'


def _skills(count: int, kind: str = "") -> str:
    return f"{count:,} {kind}skill{'' if count == 1 else 's'}"


def _about(facts: dict[str, Any]) -> str:
    at, actor = facts["activated"]
    minute = at[:16].replace("T", " ") + (" UTC" if at.endswith("+00:00") else "")
    when = f" Made by {_text(actor)}, {_text(minute)}." if at else ""
    return f"Version <code>{_text(facts['version'][:12])}</code>.{when}"


def _tiles(facts: dict[str, Any]) -> str:
    counts, capacity = facts["statuses"], facts["capacity"]
    live = sum(counts.get(status, 0) for status in LIVE)
    names = {"candidate": "Candidates", "quarantined": "In quarantine"}
    tiles = [
        (names.get(status, status.capitalize()), f"{counts.get(status, 0):,}", "")
        for status in sorted(STATUSES, key="active candidate quarantined retired".index)
    ]
    measured = sum(skill["credit"]["measured"] for skill in facts["skills"])
    total = len(facts["skills"])
    tiles.append(("Measured", f"{measured:,}", f"of {total:,}" if total else ""))
    room = f"of {capacity:,} live" if capacity else "live, no limit"
    tiles.append(("Capacity", f"{live:,}", room))
    return "".join(
        f"<div><dd>{number}{f'<small>{below}</small>' if below else ''}</dd><dt>{name}</dt></div>"
        for name, number, below in tiles
    )


def _notice(facts: dict[str, Any]) -> str:
    if facts["skills"]:
        return '<noscript><p class="alert">The list of skills needs JavaScript.</p></noscript>'
    command = _text(f"distill skills add skills.toml --bank {facts['bank']}")
    return (
        '<div class="card"><p>Nothing was learned or added so far. Add skills from a file, then '
        f"write this page again:</p><pre>{command}</pre></div>"
    )
