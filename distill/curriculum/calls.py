"""How calls of one session relate: retries of each other, one inside another, or arms of a trial.

Each works on views: a call together with what of its text decides to which turn it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distill.curriculum.messages import is_request, message_text
from distill.curriculum.records import RoutingTurn


@dataclass(kw_only=True, slots=True, eq=False)
class View:
    """A call, and where it stands in its session."""

    call: RoutingTurn
    messages: tuple[Mapping[str, Any], ...] | None
    """None where there is no text."""
    size: int = 0
    """How many of the messages the model read."""
    users: int = 0
    """Messages that a user wrote."""
    opener: int = -1
    """Where the last of them is."""
    text: str = ""
    """What it says."""
    fresh: bool = True
    """Whether the model read nothing after it: the first answer to that request."""
    has_past: bool = False
    """Whether an answer stands before the request."""
    has_system: bool = False
    rank: int = 0
    """Place in the order of the session."""
    family: str = ""
    """Equal for calls that belong to one turn because one happened inside of the other."""
    wraps: bool = False
    """Whether an inner router logged the same call."""
    aside: bool = False
    """Whether it asks something else inside of another call: a sub-agent."""
    replaced: list[View] = field(default_factory=list)
    """Earlier attempts at the same call."""

    @property
    def origin(self) -> tuple[str, str]:
        """Who logged it."""
        return self.call.source, self.call.format

    @property
    def failed(self) -> bool:
        outcome = self.call.outcome
        return outcome is not None and (
            outcome.status in ("failure", "aborted")
            or (outcome.status is None and bool(outcome.error))
        )

    @property
    def trace(self) -> str | None:
        """Its trace; one that is only the session's name says nothing about calls."""
        trace = self.call.trace_id
        return None if trace == self.call.session_id else trace

    @property
    def prompt(self) -> tuple[Mapping[str, Any], ...]:
        return (self.messages or ())[: self.size]

    @property
    def answer(self) -> tuple[Mapping[str, Any], ...]:
        return (self.messages or ())[self.size :]

    def extends(self, before: View) -> bool:
        """Whether its prompt begins with that of an earlier call and goes on."""
        return self.size > before.size and self.prompt[: before.size] == before.prompt


def view_of(call: RoutingTurn) -> View:
    if not call.messages:
        return View(call=call, messages=None)
    messages = call.messages
    size = call.num_prompt
    if size is None:  # what the model answered last is not what it read
        size = len(messages)
        while size and messages[size - 1].get("role") == "assistant":
            size -= 1
    openers = [i for i, message in enumerate(messages) if is_request(message)]
    opener = openers[-1] if openers else -1
    said = [i for i, m in enumerate(messages[:size]) if m.get("role") in ("assistant", "tool")]
    return View(
        call=call,
        messages=messages,
        size=min(size, len(messages)),
        users=len(openers),
        opener=opener,
        text=message_text(messages[opener]) if openers else "",
        fresh=not said or said[-1] < opener,
        has_past=bool(openers and said and said[0] < opener),
        has_system=messages[0].get("role") == "system",
    )


def same_prompt(one: View, other: View) -> bool | None:
    """Whether two calls read the same; None where the log does not say."""
    if one.messages is not None and other.messages is not None:
        return one.size == other.size and one.prompt == other.prompt
    left, right = one.call.request.prompt_sha256, other.call.request.prompt_sha256
    return None if left is None or right is None else left == right


def arms(views: list[View], ids: set[str]) -> list[View]:
    """Calls without a session that answer one request, each with another model: full tables and
    votes, whose parent is no call of the log. None when it is something else."""
    first = views[0]
    parent = first.call.parent_id
    if len(views) < 2 or first.call.session_id is not None or parent is None or parent in ids:
        return []
    if any(
        v.call.parent_id != parent or (v.users, v.text) != (first.users, first.text) for v in views
    ):
        return []
    models = [v.call.served.model for v in views if v.call.served is not None]
    return views if len(set(models)) == len(views) else []


def supersede(views: Iterable[View]) -> list[View]:
    """The last attempt of each call, with the earlier ones in `replaced`; the order stays.

    A call replaces the latest one of the same log that has the same trace and prompt, or the same
    prompt if that failed and nothing lies between. Where the log has no prompt, equal traces mean a
    retry unless the earlier call succeeded: traces may also span a whole run of an agent.
    """
    kept: dict[int, View] = {}
    by_trace: dict[Any, View] = {}
    last: dict[tuple[str, str], View] = {}
    for view in views:
        before = None
        key: Any = None
        if view.trace is not None:
            tail = message_text(view.prompt[-1]) if view.size else ""
            digest = view.call.request.prompt_sha256 if view.messages is None else None
            key = (view.origin, view.trace, view.size, view.text, tail, digest)
            before = by_trace.get(key)
            if before is not None and not (before.rank in kept and _retries(view, before)):
                before = None
        previous = last.get(view.origin)
        if before is None and previous is not None and previous.failed:
            before = previous if same_prompt(view, previous) else None
        if before is not None:
            del kept[before.rank]
            view.replaced = [*before.replaced, before]
            before.replaced = []
        kept[view.rank] = last[view.origin] = view
        if key is not None:
            by_trace[key] = view
    return list(kept.values())


def _retries(view: View, before: View) -> bool:
    """Whether a call of the same trace is another attempt at the same prompt."""
    related = same_prompt(view, before)
    if related is None:
        succeeded = before.call.outcome is not None and before.call.outcome.status == "success"
        return not succeeded
    return related


def nest(views: list[View]) -> None:
    """Mark the calls that happened inside of others, and those that only wrap another.

    A parent in the log wraps a child with the same request; a child with another request is an
    aside of it. Two logs of one call are told by the same request and answer, or by a shared trace;
    the one that began first is the outer.
    """
    by_id = {view.call.source_id: view for view in views}
    for view in views:
        outer = by_id.get(view.call.parent_id) if view.call.parent_id is not None else None
        if outer is None or outer is view or outer.family == view.family != "":
            continue
        _join(view, outer, views)
        if outer.messages is None or view.messages is None or outer.text == view.text:
            _wrap(outer, view)
        else:
            view.aside = True
    if len({view.origin for view in views}) > 1:
        _nest_logs(views)


def _nest_logs(views: list[View]) -> None:
    by_answer: dict[Any, View] = {}
    by_trace: dict[str, list[View]] = {}
    for view in views:
        if view.trace is not None:
            by_trace.setdefault(view.trace, []).append(view)
        said = "\n".join(message_text(m) for m in view.answer)
        if not said.strip():
            continue
        outer = by_answer.pop((view.text, said), None)
        if outer is not None and outer.origin != view.origin and not outer.wraps:
            _join(view, outer, views)
            _wrap(outer, view)
        else:  # a pair is complete: the same words later are another call
            by_answer[view.text, said] = view
    for traced in by_trace.values():
        inmost = list({v.origin: v for v in traced})[-1]
        inner = [v for v in traced if v.origin == inmost]
        for view in traced:
            if view.origin == inmost or view.wraps:
                continue
            fits = [v for v in inner if None in (v.messages, view.messages) or v.text == view.text]
            if fits:
                found = next((v for v in fits if v.rank > view.rank), fits[-1])
                _join(found, view, views)
                _wrap(view, found)


def _wrap(outer: View, inner: View) -> None:
    """The outer record only wraps the inner one, which gets its text where it has none itself."""
    outer.wraps = True
    if inner.messages is None and outer.messages is not None:
        for name in ("messages", "size", "users", "opener", "text", "fresh", "has_past"):
            setattr(inner, name, getattr(outer, name))
        inner.has_system = outer.has_system


def _join(view: View, other: View, views: list[View]) -> None:
    """Put two calls, and all that belong to them, into one family."""
    name = other.family or view.family or f"{other.rank}"
    old = {one.family for one in (view, other)} - {"", name}
    if old:
        for one in views:
            if one.family in old:
                one.family = name
    view.family = other.family = name
