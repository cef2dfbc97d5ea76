"""How a user turn went, from the strongest thing that a log says about it.

    program    a check that ran: tests, a grader, an exact answer
    rating     what a person said about this very turn
    tool       how the last call that changed something ended
    next_turn  the next request complains about the answer, or asks for the same again
    system     the call failed, was given up, or had its answer blocked
    judge      a judging model

The first rung that says something decides. That nobody complained says nothing, nor does a call
that came back in good order: then the outcome is unknown. Source: NeoHorse-1, arXiv 2609.08183;
the ladder is ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from distill.curriculum.complaints import complains, reasks
from distill.curriculum.messages import tool_calls, tool_succeeded
from distill.curriculum.records import Origin, RoutingTurn, Verdict
from distill.curriculum.turns import UserTurn

Result = Literal["success", "failure", "unknown"]
Rung = Literal["program", "rating", "tool", "next_turn", "system", "judge", "none"]
VERIFIABLE = frozenset(("program", "rating", "tool"))
MIDDLE = 0.5
"""A value above it is good, below it bad; the middle itself, such as a tie, says nothing."""

_GOOD = frozenset(
    [
        *("good", "pass", "passed", "success", "successful", "succeeded", "correct", "true"),
        *("yes", "up", "upvote", "thumbs_up", "like", "liked", "resolved", "solved"),
        *("accepted", "win", "ok"),
    ]
)
_BAD = frozenset(
    [
        *("bad", "fail", "failed", "failure", "incorrect", "wrong", "false", "no", "down"),
        *("downvote", "thumbs_down", "dislike", "disliked", "unresolved", "unsolved"),
        *("rejected", "loss", "error", "bothbad", "both_bad"),
    ]
)
_CHANGES = frozenset(
    [
        *("create", "write", "update", "delete", "remove", "send", "book", "cancel", "submit"),
        *("apply", "edit", "commit", "push", "deploy", "insert", "save", "set", "pay"),
        *("transfer", "place", "schedule", "move", "rename", "install", "post", "patch", "add"),
        *("upload", "publish", "refund", "modify", "replace", "exchange", "test", "tests"),
        "verify",
    ]
)
_LOOKS = frozenset(
    [
        *("get", "list", "search", "find", "read", "fetch", "look", "lookup", "show", "view"),
        *("query", "describe", "count", "open", "browse", "load", "calculate", "think"),
    ]
)
_NAME_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_BLOCKED = frozenset(("content_filter", "error", "safety", "recitation", "blocked"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Outcome of a turn, the rung that decided, and what it said in words without user text."""

    result: Result = "unknown"
    rung: Rung = "none"
    evidence: str = ""

    @property
    def verifiable(self) -> bool:
        """Whether capability may be counted by it."""
        return self.rung in VERIFIABLE


def judge(turn: UserTurn, following: Sequence[UserTurn] = ()) -> Judged:
    """Outcome of a turn; `following` are the later turns of its session, the next one first.

    Statements of one rung: of equal names the latest counts, of equal times the worse; of different
    names one that is bad is enough. What a log flags wins over what its words look like.
    """
    records = (*turn.calls, *turn.wrappers)
    verdicts = [v for call in records if call.outcome is not None for v in call.outcome.verdicts]
    after = following[0] if following and _follows(turn, following[0]) else None
    return (
        _stated(verdicts, "program", "program")
        or _stated(verdicts, "user", "rating")
        or _stated(verdicts, "tool", "tool")
        or _last_effect(turn)
        or (_next_turn(turn, after) if after is not None else None)
        or _service(turn, verdicts)
        or _stated(verdicts, "judge", "judge")
        or Judged(evidence="nothing says how it went")
    )


def rating(turn: UserTurn) -> bool | None:
    """What a person said about the turn: good, bad, or None."""
    records = (*turn.calls, *turn.wrappers)
    verdicts = [v for call in records if call.outcome is not None for v in call.outcome.verdicts]
    found = _stated(verdicts, "user", "rating")
    return None if found is None else found.result == "success"


def complaint(turn: UserTurn) -> bool:
    """Whether the turn's own message complains about the turn before it: the log's flag where it
    has one, else how it is worded."""
    flag = _flag(call.outcome.complaint for call in _records(turn) if call.outcome is not None)
    return complains(turn.request_text) if flag is None else flag


def is_good(verdict: Verdict) -> bool | None:
    """Whether a statement is good: by its value, else by a label that is a common word for it."""
    if verdict.value is not None:  # NaN is neither above nor below
        above, below = verdict.value > MIDDLE, verdict.value < MIDDLE
        return above if above or below else None
    label = (verdict.label or "").strip().lower().replace(" ", "_")
    return True if label in _GOOD else False if label in _BAD else None


def _stated(verdicts: Iterable[Verdict], source: Origin, rung: Rung) -> Judged | None:
    latest: dict[str, tuple[float, bool]] = {}
    for verdict in verdicts:
        good = is_good(verdict) if verdict.source == source else None
        if good is None:
            continue
        when = float("-inf") if verdict.ts is None else float(verdict.ts)
        before = latest.get(verdict.name)
        if before is None or (when, not good) > (before[0], not before[1]):
            latest[verdict.name] = when, good
    if not latest:
        return None
    bad = [name for name, (_, good) in latest.items() if not good]
    names = ", ".join(sorted(bad or latest))
    return Judged(
        result="failure" if bad else "success",
        rung=rung,
        evidence=f"{source} says {'bad' if bad else 'good'}: {names}",
    )


def _last_effect(turn: UserTurn) -> Judged | None:
    """How the last call of a tool that changes or verifies something ended."""
    names = {
        identity: name
        for message in turn.response
        if message.get("role") == "assistant"
        for identity, name, _ in tool_calls(message)
        if identity
    }
    for message in reversed(turn.response):
        if message.get("role") != "tool":
            continue
        name = names.get(str(message.get("tool_call_id"))) or str(message.get("name") or "")
        if not changes_something(name):
            continue
        good = tool_succeeded(message)
        if good is None:
            return None
        ended = "succeeded" if good else "failed"
        return Judged(
            result="success" if good else "failure", rung="tool", evidence=f"{name} {ended}"
        )
    return None


def changes_something(tool: str) -> bool:
    """Whether a tool's name says that it changes or verifies something: the first verb in it."""
    for part in _NAME_PART.findall(tool):
        word = part.lower()
        if word in _LOOKS or word in _CHANGES:
            return word in _CHANGES
    return False


def _next_turn(turn: UserTurn, after: UserTurn) -> Judged | None:
    if complaint(after):
        return Judged(result="failure", rung="next_turn", evidence="the next turn complains")
    flag = _flag(call.outcome.reask for call in _records(after) if call.outcome is not None)
    again = reasks(turn.request_text, after.request_text) if flag is None else flag
    if again:
        return Judged(result="failure", rung="next_turn", evidence="the next turn asks again")
    return None


def _service(turn: UserTurn, verdicts: Iterable[Verdict]) -> Judged | None:
    """What the gateway says of the last call. A fallback that led to an answer says nothing of the
    answer; one that did not ends in a failure."""
    for call in (*turn.wrappers[-1:], *turn.calls[-1:]):
        outcome = call.outcome
        if outcome is None:
            continue
        reason = (outcome.finish_reason or "").lower()
        if outcome.status == "aborted":
            words = "the call was given up"
        elif outcome.status == "failure" or (outcome.status is None and outcome.error):
            words = "the call failed"
        elif reason in _BLOCKED:
            words = f"the answer ended with {reason}"
        else:
            continue
        hops = f" after {turn.fallback_hops} other attempts" if turn.fallback_hops else ""
        return Judged(result="failure", rung="system", evidence=words + hops)
    return _stated(verdicts, "system", "system")


def _follows(turn: UserTurn, after: UserTurn) -> bool:
    """Whether two turns are of one conversation; arms of a trial are not."""
    if turn.session_id is not None or after.session_id is not None:
        return turn.session_id == after.session_id
    traces = {call.trace_id for call in turn.calls} - {None}
    return any(call.trace_id in traces for call in after.calls)


def _records(turn: UserTurn) -> tuple[RoutingTurn, ...]:
    return (*turn.attempts, *turn.calls, *turn.wrappers)


def _flag(flags: Iterable[bool | None]) -> bool | None:
    """True where any says so, False where one denies it and none says so."""
    found = {flag for flag in flags if flag is not None}
    return (True in found) if found else None
