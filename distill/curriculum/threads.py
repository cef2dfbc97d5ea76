"""Which earlier turn a turn goes on from: one session id may hold several conversations at once.

A client may run two chats under one session, or ask for a title between an answer and the complaint
about it. What a model read tells them apart: a turn goes on from the latest earlier one whose
request is the last in its history. A turn without history goes on from the one before it, unless
another turn is known to do so.
"""

from __future__ import annotations

from collections.abc import Sequence

from distill.curriculum.messages import is_request, message_text, without_inserted
from distill.curriculum.turns import UserTurn

LOOK_BACK = 64
"""Turns that are looked through for the one that a history ends with."""


def threads(turns: Sequence[UserTurn]) -> list[list[int]]:
    """The turns of one session, by number, as conversations; each in order, none twice."""
    known = [_known(i, turns) for i in range(len(turns))]
    taken = {before for before in known if before is not None}
    found: list[list[int]] = []
    member: list[int] = []
    for i, before in enumerate(known):
        if before is None and i and i - 1 not in taken and _last_request(turns[i]) is None:
            before = i - 1
        if before is None:
            member.append(len(found))
            found.append([i])
        else:
            member.append(member[before])
            found[member[before]].append(i)
    return found


def _known(i: int, turns: Sequence[UserTurn]) -> int | None:
    """Number of the turn that the history of turn i ends with."""
    asked = _last_request(turns[i])
    if asked is None:
        return None
    for j in range(i - 1, max(-1, i - 1 - LOOK_BACK), -1):
        # A log may lack the text of some calls; then the order is all there is.
        if turns[j].request_text == asked or turns[j].messages is None:
            return j
    return None


def _last_request(turn: UserTurn) -> str | None:
    """What the user asked before, by the history of a turn; None where it has none."""
    for message in reversed(turn.history):
        if is_request(message):
            return without_inserted(message_text(message)).strip()
    return None
