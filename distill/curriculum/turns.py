"""Calls of one session to user turns: from what a user asked up to what the user asked next.

A turn opens with a message of a user. Tool results and messages that the harness put in open none.
Three kinds of logs are told apart by their text: rows that repeat the conversation so far (calls
with equally many user messages and the same last one belong together), rows of one whole turn, and
rows that hold only what is new (their turns get the conversation of the rows before them). Rows
without text are told apart by their trace. Source: NeoHorse-1, arXiv 2609.08183.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill.curriculum.calls import View, arms, nest, same_prompt, supersede, view_of
from distill.curriculum.messages import message_text, without_inserted
from distill.curriculum.records import Decision, Prediction, RoutingTurn, Served
from distill.errors import DataError

MAX_NEW_ONLY = 1000
"""Rows with a user message of their own up to which a session without history in its rows counts as
one conversation. Beyond it an id was shared by unrelated requests, and each row stands alone."""

HOME_MADE = ("chat", "mapped")
"""Importers of logs whose rows may hold less than the model read."""

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class UserTurn:
    """What happened between one request of a user and the next."""

    id: str
    """16 hex digits of a digest of source, format and source_id of its first call, see turn_id."""
    source: str
    session_id: str | None
    index: int
    """0, 1, ... in its session."""
    ts: int | None
    user: str | None
    scene: str | None
    tags: tuple[str, ...]
    calls: tuple[RoutingTurn, ...]
    """Calls in the order in which they began, the last attempt of each."""
    attempts: tuple[RoutingTurn, ...] = ()
    """Attempts that a retry or a fallback replaced, oldest first."""
    wrappers: tuple[RoutingTurn, ...] = ()
    """Records of an outer router about calls that an inner one logged too, outermost first."""
    messages: Messages | None = None
    """The conversation up to the end of the turn; None when no call has text."""
    start: int = -1
    """Where in `messages` the user speaks who opened the turn; -1 when nobody does."""
    prediction: Prediction | None = None
    """Of the outermost and first call that has one; so is the decision."""
    decision: Decision | None = None
    served: Served | None = None
    """Of the innermost call. Of several calls in a row the one with the highest tier counts, the
    last of equals: a success must not be put down to a tier that only wrote the last words."""
    fallback_hops: int = 0
    """Hops that the log reports, or attempts in the log, whichever is more."""
    weight: float = 1.0
    """How many turns it stands for: 1 / sample_rate."""
    is_attempt: bool = False
    """It is one attempt that another one replaced, looked at by itself."""

    @property
    def request_text(self) -> str:
        """What the user asked, without what the harness put in; empty without text."""
        if self.messages is None or self.start < 0:
            return ""
        return without_inserted(message_text(self.messages[self.start])).strip()

    @property
    def history(self) -> Messages:
        """What was said before the turn, with the system message."""
        return (self.messages or ())[: max(0, self.start)]

    @property
    def response(self) -> Messages:
        """Everything after the request: answers, tool calls, tool results."""
        return (self.messages or ())[self.start + 1 :]

    @property
    def cached(self) -> bool:
        """Whether any part of the answer came out of a cache of answers."""
        records = (*self.calls, *self.wrappers)
        return any(c.served is not None and c.served.cache_hit is True for c in records)

    @property
    def truncated(self) -> bool:
        """Whether the log cut the text of any of its calls."""
        return any(call.truncated for call in self.calls)

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Definitions of the tools of the first call that lists any."""
        return next((c.tools for c in (*self.calls, *self.wrappers) if c.tools), ())


@dataclass(kw_only=True, slots=True)
class _Open:
    """A turn that is being put together."""

    views: list[View]
    messages: Messages | None = None
    start: int = -1


def turn_id(call: RoutingTurn) -> str:
    """Name of the turn that begins with this call: 16 hex digits."""
    name = json.dumps([call.source, call.format, call.source_id])
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def split(calls: Sequence[RoutingTurn]) -> list[UserTurn]:
    """User turns of the calls of one session, in order; `index` counts from 0.

    Calls are ordered by the time at which they began, then by length, failures first, then by id;
    the log's own turn number only orders a session in which no call has a time. Calls without a
    session are one family where they share a parent or a trace, else one each. Of such a family
    those that answer the same request with different models (full tables, votes) stay separate.
    """
    turns = []
    for family in _families(calls):
        views = _ordered(family)
        ids = {call.source_id for call in calls}
        if arms(views, ids):
            opened = [_Open(views=[v], messages=v.messages, start=v.opener) for v in views]
        else:
            kept = supersede(views)
            nest(kept)
            opened = _grouped(kept)
        for one in opened:
            one.views.sort(key=lambda v: v.rank)
        opened.sort(key=lambda o: o.views[0].rank)
        turns += [_finished(one, index) for index, one in enumerate(opened)]
    return turns


def _families(calls: Sequence[RoutingTurn]) -> list[list[RoutingTurn]]:
    """Calls of one session id; without one, those tied by a parent or a trace."""
    if all(call.session_id is not None for call in calls):
        found: dict[Any, list[RoutingTurn]] = {}
        for call in calls:
            found.setdefault(call.session_id, []).append(call)
        return list(found.values())
    by_id = {call.source_id: call for call in calls}
    found = {}
    for call in calls:
        root, seen = call, {call.source_id}
        while root.session_id is None and root.parent_id in by_id and root.parent_id not in seen:
            seen.add(root.parent_id)
            root = by_id[root.parent_id]
        key: tuple[str, str]
        if root.session_id is not None:
            key = "session", root.session_id
        elif root.trace_id is not None:
            key = "trace", root.trace_id
        elif root.parent_id is not None and root.parent_id not in by_id:
            key = "parent", root.parent_id
        else:  # a root that is its own ancestor has the least id of its ring
            key = "call", root.source_id if root.parent_id is None else min(seen)
        found.setdefault(key, []).append(call)
    return list(found.values())


def _ordered(calls: Sequence[RoutingTurn]) -> list[View]:
    """Views in the order in which the calls began; calls without a time come last."""
    timed = any(call.ts is not None for call in calls)
    views = [view_of(call) for call in calls]

    def key(view: View) -> tuple[Any, ...]:
        call = view.call
        when = call.ts if timed else call.turn_index
        order = (not view.failed, call.source_id, call.source, call.format)
        return (when is None, when or 0, view.size, *order)

    views.sort(key=key)
    for rank, view in enumerate(views):
        view.rank = rank
    return views


def _grouped(views: list[View]) -> list[_Open]:
    """Turns of the calls of one conversation, their messages filled in."""
    inner = [v for v in views if not v.wraps and not v.aside]
    new_only = _only_new(inner)
    opened: list[_Open] = []
    by_request: dict[tuple[int, str], _Open] = {}
    by_trace: dict[str, _Open] = {}
    by_family: dict[str, _Open] = {}
    told: Messages = ()
    for view in inner:
        turn = by_family.get(view.family) if view.family else None
        if turn is None:
            turn = _turn_of(view, opened, by_request, by_trace, new_only)
        if turn is None:
            turn = _Open(views=[])
            opened.append(turn)
        turn.views.append(view)
        if view.family:
            by_family[view.family] = turn
        if view.trace is not None:
            by_trace[view.trace] = turn
        if view.messages is None:
            continue
        by_request[view.users, view.text] = turn
        if not new_only:
            turn.messages, turn.start = view.messages, view.opener
            continue
        if view.users:
            turn.start = len(told) + view.opener
        told = (*told, *view.messages)
        turn.messages = told
    for view in (v for v in views if v.wraps or v.aside):
        turn = by_family.get(view.family)
        if turn is None:  # what it wraps was itself a wrapper of nothing: it stands alone
            turn = _Open(views=[])
            opened.append(turn)
            by_family[view.family] = turn
        turn.views.append(view)
    return opened


def _turn_of(
    view: View,
    opened: list[_Open],
    by_request: dict[tuple[int, str], _Open],
    by_trace: dict[str, _Open],
    new_only: bool,
) -> _Open | None:
    """The turn that a call continues, None when it opens one."""
    if view.messages is None:
        return by_trace.get(view.trace) if view.trace is not None else None
    if new_only:
        return opened[-1] if opened and not view.users else None
    turn = by_request.get((view.users, view.text))
    if turn is None and not view.fresh and opened:  # the history may have been cut to make room
        before = next((v for v in reversed(opened[-1].views) if v.messages is not None), None)
        same = before is not None and before.text == view.text and view.users < before.users
        return opened[-1] if same else None
    if turn is not None and view.fresh and any(_again(v, view) for v in turn.views):
        return None  # the user asks the same once more
    if turn is None or view.users > 1 or view.fresh:
        return turn
    before = next((v for v in reversed(turn.views) if v.messages is not None), None)
    return turn if before is None or view.extends(before) else None


def _again(before: View, view: View) -> bool:
    """Whether a call puts the very same prompt to a model later than another; calls that began
    together are several answers to one request."""
    together = before.call.ts == view.call.ts
    return before.fresh and not together and same_prompt(before, view) is True


def _only_new(views: list[View]) -> bool:
    """Whether the rows of a session hold only what is new since the row before.

    Gateways log the whole request, so that what stands in a row is what the model read: only rows
    of home-made logs are looked at. No row repeats an answer from before its request, none but the
    first has a system message, and none continues the text of another: then the rows are parts of
    one conversation.
    """
    texts = [v for v in views if v.messages is not None]
    if len(texts) < 2 or texts[0].call.session_id is None:
        return False
    if any(v.call.format not in HOME_MADE for v in texts):
        return False
    if any(v.users > 1 or v.has_past for v in texts) or any(v.has_system for v in texts[1:]):
        return False
    if len({v.text for v in texts}) < 2 or sum(v.users for v in texts) > MAX_NEW_ONLY:
        return False
    last: dict[str, View] = {}
    for view in texts:
        before = last.get(view.text) if view.users else None
        if before is not None and not view.fresh and view.extends(before):
            return False
        last[view.text] = view
    return True


def _finished(one: _Open, index: int) -> UserTurn:
    wrappers = [v.call for v in one.views if v.wraps]
    calls = [v.call for v in one.views if not v.wraps]
    main = [v.call for v in one.views if not v.wraps and not v.aside]
    if not calls:
        calls = main = wrappers
        wrappers = []
    replaced = sorted((r for v in one.views for r in v.replaced), key=lambda v: v.rank)
    first = min((*one.views, *replaced), key=lambda v: v.rank)
    everything = (*wrappers, *calls)
    hops = sum(c.served.fallback_hops or 0 for c in main if c.served is not None)
    return UserTurn(
        id=turn_id(first.call),
        source=first.call.source,
        session_id=next((c.session_id for c in everything if c.session_id is not None), None),
        index=index,
        ts=first.call.ts,
        user=next((c.user for c in everything if c.user is not None), None),
        scene=next((c.scene for c in everything if c.scene is not None), None),
        tags=tuple(dict.fromkeys(tag for c in everything for tag in c.tags)),
        calls=tuple(calls),
        attempts=tuple(r.call for r in replaced),
        wrappers=tuple(wrappers),
        messages=one.messages,
        start=one.start,
        prediction=next((c.prediction for c in (*wrappers, *main) if c.prediction), None),
        decision=next((c.decision for c in (*wrappers, *main) if c.decision), None),
        served=_served(main) or _served(wrappers),
        fallback_hops=max(hops, len(replaced)),
        weight=_weight(first.call),
    )


def _served(calls: Sequence[RoutingTurn]) -> Served | None:
    found = [c.served for c in calls if c.served is not None]
    return max(reversed(found), key=lambda s: -1 if s.tier is None else s.tier, default=None)


def _weight(call: RoutingTurn) -> float:
    if not 0 < call.sample_rate <= 1:
        raise DataError(
            f"the share of calls that a log keeps must be in (0, 1], but call {call.source_id!r} "
            f"of {call.source} has sample_rate {call.sample_rate}; correct the importer's mapping"
        )
    return 1.0 / call.sample_rate
