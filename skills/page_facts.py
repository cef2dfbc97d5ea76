"""What the page of a bank shows, read once: skills, their history, and the last changes.

The result is plain JSON. Every string in it is readable as it stands: characters that a reader
would not see, and those that turn the direction of a line, are written out as their code.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from distill.errors import SkillBankError
from skills.bank import SkillBank
from skills.codec import to_table
from skills.diffs import Changed, diff
from skills.items import SkillItem
from skills.lifecycle import gain
from skills.ops import Op
from skills.versions import Store, Version

CHANGES = 10
"""So many of the last changes can be looked at in the page."""
LISTED = 200
"""Skills added, removed or changed that one change lists; the rest is counted."""
EVENTS = 20
"""Lines of the log per skill, the newest ones."""
TRAJECTORIES = 50
CHARACTERS = 20_000
"""Of one text; a longer one ends with how much is missing."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_BLANK = frozenset("\u115f\u1160\u3164\uffa0\u2800\u17b4\u17b5\u034f")
"""Letters and signs that show nothing."""


def read_facts(bank: SkillBank, version: str, against: str | None = None) -> dict[str, Any]:
    """Everything that the page shows of `version`, a full id, as JSON.

    `changes` begins with the difference from `against` when it is given, then come the last
    changes that led to the version, newest first. SkillBankError when the version or one of its
    skills is missing or damaged; an older version that is damaged is named in its place.
    """
    ops = _until(bank.history(), version)
    held = bank.store.read_version(version)
    events, rollbacks = _events(ops)
    skills = [
        {**_skill(bank.store.read_item(row.item)), "text": row.content, **_history(events[row.id])}
        for row in held.rows.values()
    ]
    changes = _changes(bank.store, ops, version, against)
    facts = {
        "bank": bank.name,
        "version": version,
        "activated": _activated(ops),
        "capacity": bank.capacity,
        "statuses": dict(Counter(row.status for row in held.rows.values())),
        "skills": skills,
        "rollbacks": [_event(op) for op in rollbacks],
        "changes": changes,
    }
    shown: dict[str, Any] = readable(facts)
    return shown


def readable(value: Any) -> Any:
    """The same JSON value; in its strings, unseen characters stand as their code. Keys stay."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {key: readable(below) for key, below in value.items()}
    return [readable(below) for below in value] if isinstance(value, list) else value


def visible(text: str) -> str:
    """The text with everything invisible or steering as `⟨U+202E⟩`; line ends and tabs stay."""
    if text.isascii():
        if text.isprintable():
            return text
        text = text.replace("\r\n", "\n")
        return _CONTROLS.sub(lambda found: _code(found[0]), text)
    text = text.replace("\r\n", "\n")
    pairs = zip(" " + text, text, strict=False)
    return "".join(_code(c) if _is_unseen(c, before) else c for before, c in pairs)


def _is_unseen(char: str, before: str) -> bool:
    if char < "\x7f":
        return char < " " and char not in "\n\t"
    if char == "\ufe0f":  # behind a sign it asks for the coloured picture of it
        return unicodedata.category(before) not in ("So", "Sm", "Po")
    is_selector = "\ufe00" <= char < "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"
    return is_selector or char in _BLANK or unicodedata.category(char) in _UNSEEN


def _code(char: str) -> str:
    return f"\u27e8U+{ord(char):04X}\u27e9"


# -- skills --------------------------------------------------------------------------------


def _skill(item: SkillItem) -> dict[str, Any]:
    credit, table = item.credit, to_table(item)
    return {
        "id": item.id,
        "title": item.title,
        "status": item.status,
        "pinned": item.pinned,
        "category": item.category,
        "kind": item.kind,
        "level": item.level,
        "principle": _cut(item.principle),
        "when": _cut(item.when_to_apply),
        "body": _cut(item.body),
        "avoid": _cut(item.avoid),
        "scope": [part for part in (item.scope.env, *item.scope.tools, *item.scope.models) if part],
        "credit": {**table["credit"], "measured": credit.num_used > 0, "gain": gain(credit)},
        "safety": table["safety"],
        "lineage": table["lineage"],
        "evidence": [[one.traj_id, one.outcome, one.step] for one in item.evidence[:TRAJECTORIES]],
        "num_evidence": len(item.evidence),
        "extra": _cut(_written(dict(item.extra))) if item.extra else "",
    }


def _cut(text: str) -> str:
    more = len(text) - CHARACTERS
    return text if more <= 0 else f"{text[:CHARACTERS]}\n... {more} more characters"


def _events(ops: Iterable[Op]) -> tuple[dict[str, list[Op]], list[Op]]:
    """The lines of each skill, and the rollbacks, which move all of them."""
    events: dict[str, list[Op]] = defaultdict(list)
    rollbacks = []
    for op in ops:
        if op.op == "ROLLBACK":
            rollbacks.append(op)
        elif op.item:
            events[op.item].append(op)
    return events, rollbacks


def _history(ops: Sequence[Op]) -> dict[str, Any]:
    return {
        "since": ops[0].at if ops else "",
        "history": [_event(op) for op in ops[-EVENTS:]],
        "num_earlier": max(0, len(ops) - EVENTS),
    }


def _event(op: Op) -> list[Any]:
    to = f"to version {str(op.version)[:12]}" if op.op == "ROLLBACK" else ""
    return [op.seq, op.at, op.op, op.actor, ": ".join(filter(None, (to, op.reason)))]


# -- changes -------------------------------------------------------------------------------


def _until(ops: Sequence[Op], version: str) -> list[Op]:
    """The log up to the last time that this version became the active one."""
    ends = [n for n, op in enumerate(ops) if op.op == "ACTIVATE" and op.version == version]
    return list(ops[: ends[-1] + 1]) if ends else list(ops)


def _activated(ops: Sequence[Op]) -> list[str]:
    """When and by whom the version became the active one."""
    return [ops[-1].at, ops[-1].actor] if ops else ["", ""]


def _changes(
    store: Store, ops: Sequence[Op], version: str, against: str | None
) -> list[dict[str, Any]]:
    changes: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    for op in ops:
        if op.op != "ACTIVATE":
            counts[op.op] += 1
            continue
        if op.previous and op.previous != op.version:
            lines, ends = dict(counts.most_common()), [op.previous, str(op.version)]
            changes.append({"at": op.at, "actor": op.actor, "ops": lines, "ends": ends})
        counts = Counter()
    changes = changes[: -CHANGES - 1 : -1]
    if against is not None:
        changes.insert(0, {"at": "", "actor": "", "ops": {}, "ends": [against, version]})
    known: dict[str, Version] = {}
    return [{**change, **_difference(store, known, *change["ends"])} for change in changes]


def _difference(store: Store, known: dict[str, Version], old: str, new: str) -> dict[str, Any]:
    try:
        for name in (old, new):
            if name not in known:
                known[name] = store.read_version(name)
        left, right, counts = _first(known[old], known[new])
        found = diff(store, left, right)
    except SkillBankError as error:
        # The page is about another version; what is wrong with this one stands in its place.
        return {"problem": str(error), "counts": [0, 0, 0], "added": [], "removed": [], "edits": []}
    return {
        "problem": "",
        "counts": counts,
        "added": [_entry(item) for item in found.added],
        "removed": [_entry(item) for item in found.removed],
        "edits": [_edit(changed) for changed in found.changed],
    }


def _first(left: Version, right: Version) -> tuple[Version, Version, list[int]]:
    """Both versions with only the first skills that differ, and how many are added, removed and
    changed in all: a change of thousands is not read for a list that nobody could read."""
    added = [name for name in right.rows if name not in left.rows]
    removed = [name for name in left.rows if name not in right.rows]
    edited = [n for n, row in left.rows.items() if n in right.rows and right.rows[n] != row]
    shown = (*added[:LISTED], *removed[:LISTED], *edited[:LISTED])
    sides = (Version(rows={n: v.rows[n] for n in shown if n in v.rows}) for v in (left, right))
    return next(sides), next(sides), [len(added), len(removed), len(edited)]


def _entry(item: SkillItem) -> list[str]:
    return [item.id, item.title, item.status, _cut(item.principle or item.body)]


def _edit(changed: Changed) -> list[Any]:
    fields = [
        [name, _cut(_written(old)), _cut(_written(new))]
        for name, (old, new) in changed.fields.items()
    ]
    return [changed.after.id, changed.after.title, changed.after.status, fields]


def _written(value: Any) -> str:
    """A value of a record as text for people; a list with one entry per line."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return "\n".join(_written(entry) for entry in value)
    return json.dumps(value, ensure_ascii=False)
