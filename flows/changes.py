"""What a night changed in its bank, found again in the history of the bank.

Every reason that a night gives ends with the id of the night: a later run may have the same name,
and two nights may work with the same bank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skills.bank import SkillBank
    from skills.ops import Op, OpName

ACTOR = "night"
"""Who changes a bank, as its history names it."""
PATIENCE = 60.0
"""Seconds that a night waits for another writer of its bank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A change that a night made before it was interrupted."""

    version: str
    before: str
    """The version that it changed."""
    ops: tuple[Op, ...]
    usable: frozenset[str]
    """Skills that it left, not those in quarantine."""

    def named(self, *names: OpName) -> tuple[str, ...]:
        """Usable skills with one of these operations, in order."""
        found = dict.fromkeys(op.item for op in self.ops if op.op in names)
        return tuple(name for name in found if name in self.usable)


def signed(reason: str, night: str) -> str:
    """A reason that no other night can give; nights of before they had an id give it as it is."""
    return f"{reason}, {night}" if night else reason


def committed(bank: SkillBank, reason: str) -> Done | None:
    """What a night changed for this reason; None when it did not."""
    ops = bank.history()
    # The bank adds to a reason after a semicolon; another stage may only have a longer name.
    own = [
        op
        for op in ops
        if op.actor == ACTOR and (op.reason == reason or op.reason.startswith(f"{reason};"))
    ]
    if not own:
        return None
    end = next(op for op in ops if op.seq > own[-1].seq and op.op == "ACTIVATE")
    assert end.version is not None
    assert end.previous is not None
    bank.recover(wait=PATIENCE)  # it may not have become the active version yet
    left = bank.rows(version=end.version)
    return Done(
        version=end.version,
        before=end.previous,
        ops=tuple(op for op in ops if own[0].seq <= op.seq < end.seq),
        usable=frozenset(row.id for row in left if row.status != "quarantined"),
    )


def is_untouched(
    ops: Sequence[Op], since: str, *, run: str, night: str, made: Collection[str] = ()
) -> bool:
    """Whether nobody but this night changed a bank after a version was last the active one; not
    when the history does not know that version. `made` are versions that are known to be its own.
    """
    places = [n for n, op in enumerate(ops) if op.op == "ACTIVATE" and op.version == since]
    if not places:
        return False
    own = False
    for op in ops[places[-1] + 1 :]:
        if op.op != "ACTIVATE":
            own = own or _is_of(op, run, night)
        elif not own and op.version not in made:
            return False
        else:
            own = False
    return True


def stands_at(ops: Sequence[Op], version: str) -> bool:
    """Whether the last change made a version the active one, be it without skills that were
    retired since."""
    for op in reversed(ops[:-1]):
        if op.op == "ACTIVATE":
            break
        if op.op == "ROLLBACK" and op.version == version:
            return True
    return ops[-1].version == version


def _is_of(op: Op, run: str, night: str) -> bool:
    said = op.reason.partition(";")[0]
    if op.actor != ACTOR:
        return False
    if night:
        return said.endswith(f", {night}")
    return re.search(rf"(?<![\w-]){re.escape(run)}(?![\w-])", said) is not None
