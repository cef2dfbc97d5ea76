"""The proof that a bank is whole: its log explains every version, and every file is what its name
says."""

from __future__ import annotations

from dataclasses import dataclass

from distill.errors import DistillError, SkillBankError
from distill.rundir import digest_bytes
from skills.ops import Op, read_ops, replay
from skills.safety import inspect, is_quarantined
from skills.versions import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that is wrong, and with what."""

    where: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What was looked at, and what is wrong with it."""

    num_ops: int
    num_versions: int
    num_skills: int
    problems: tuple[Problem, ...]


def verify(store: Store) -> Checked:
    """Replay the log and compare every version with its file, bit by bit; check the records and
    the texts of the active one. Never raises for what is wrong in the bank."""
    problems: list[Problem] = []
    ops: list[Op] = []
    seen: set[str] = set()
    try:
        ops = read_ops(store.ops_path)
        for op, version in replay(store, ops):
            name, data = str(op.version), version.encode()
            if digest_bytes(data) != name:
                text = f"seq {op.seq} should lead to {name[:12]}, the log leads elsewhere"
                problems.append(Problem(where=store.ops_path.name, text=text))
            elif name not in seen:
                problems += _compare(store, name, data)
            seen.add(name)
        problems += _records(store, ops)
    except DistillError as error:
        problems.append(Problem(where=store.ops_path.name, text=str(error)))
    num_skills, found = _active(store, ops)
    return Checked(
        num_ops=len(ops),
        num_versions=len(seen),
        num_skills=num_skills,
        problems=tuple(dict.fromkeys([*problems, *found])),
    )


def rebuild(store: Store) -> int:
    """Write every version that the log leads to and that is missing or damaged; returns how many.
    Only under the lock."""
    written = 0
    for op, version in replay(store, read_ops(store.ops_path)):
        data = version.encode()
        path = store.version_path(str(op.version))
        if digest_bytes(data) == op.version and (not path.exists() or path.read_bytes() != data):
            store.write_version(version)
            written += 1
    return written


def _compare(store: Store, name: str, data: bytes) -> list[Problem]:
    path = store.version_path(name)
    if not path.exists():
        return [Problem(where=f"version {name[:12]}", text="the file is missing")]
    if path.read_bytes() != data:
        return [Problem(where=f"version {name[:12]}", text="the file is damaged")]
    return []


def _records(store: Store, ops: list[Op]) -> list[Problem]:
    problems = []
    for sha in dict.fromkeys(s for op in ops for s in (op.before, op.after, op.other) if s):
        try:
            store.read_item(sha)
        except SkillBankError as error:
            problems.append(Problem(where=f"record {sha[:12]}", text=str(error)))
    return problems


def _active(store: Store, ops: list[Op]) -> tuple[int, list[Problem]]:
    """Number of skills of the active version, and what is wrong with the pointer and them."""
    problems = []
    try:
        active = store.read_pointer()
        last = next((op.version for op in reversed(ops) if op.op == "ACTIVATE"), None)
        if last is not None and last != active:
            text = f"points to {active[:12]}, the log ends with {last[:12]}; a writer was killed"
            problems.append(Problem(where="active", text=text))
        version = store.read_version(active)
    except SkillBankError as error:
        return 0, [Problem(where="active", text=str(error))]
    for row in version.rows.values():
        try:
            item = store.read_item(row.item).check()
        except SkillBankError as error:
            problems.append(Problem(where=row.id, text=str(error)))
            continue
        findings = inspect(item)
        # Out of quarantine comes a skill only because a person said so: that is not a problem.
        if item.status in ("candidate", "active") and is_quarantined(findings):
            if item.safety.reasons:
                continue
            found = "; ".join(map(str, findings))
            problems.append(Problem(where=row.id, text=f"{item.status} in spite of: {found}"))
    return len(version.rows), problems
