"""One bucket of a log store at a time: calls to user turns, and what is known about each."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import to_json

from distill.curriculum.contamination import Suites
from distill.curriculum.demand import DemandInput, demand_input
from distill.curriculum.labels import Aligned, align, frequencies, from_turns
from distill.curriculum.outcomes import Judged, complaint, judge
from distill.curriculum.profile import Profile, admissible, check
from distill.curriculum.records import Evidence, Outcome, RoutingTurn
from distill.curriculum.scenes import Scene, scene_of
from distill.curriculum.store import LogStore
from distill.curriculum.structure import Structure
from distill.curriculum.structure import check as check_structure
from distill.curriculum.turns import UserTurn, split

Messages = tuple[Mapping[str, Any], ...]
REASONING = ("reasoning_content", "reasoning")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Whether a student can be taught a turn, or at least answer in its contexts."""

    sft: bool = True
    opd: bool = True
    reason: str | None = None
    """Why not, as a key of the table of reasons."""


Fits = Callable[[Messages, Messages, Messages], Fit]
"""(prompt, turn, tools) -> whether they fit the student's template and length."""


@dataclass(kw_only=True, slots=True)
class Found:
    """A user turn, and everything that is known about it before demand and stages."""

    turn: UserTurn
    judged: Judged
    aligned: Aligned
    profile: Profile
    scene: Scene
    rescued: int = -1
    """Tier that solved it when the user asked again, or -1."""
    reason: str | None = None
    """Why it is no example."""
    sft: bool = False
    opd: bool = False
    prompt: Messages = ()
    response: Messages = ()
    demand: DemandInput | None = None
    content: int = 0
    """64 bits of a digest of prompt and response."""

    @property
    def family(self) -> str:
        """What it belongs to: its session, or itself."""
        return self.turn.session_id or self.turn.id


@dataclass(kw_only=True, slots=True)
class Tally:
    """What was counted on the way."""

    calls: int = 0
    sessions: int = 0
    superseded: int = 0
    """Attempts that a retry or a fallback replaced."""
    labels: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.calls += other.calls
        self.sessions += other.sessions
        self.superseded += other.superseded
        self.labels.update(other.labels)


@dataclass(kw_only=True, slots=True)
class Walker:
    """Reads a store bucket by bucket."""

    store: LogStore
    suites: Suites | None = None
    fits: Fits | None = None
    contexts: str = "all"
    tally: Tally = field(default_factory=Tally)

    def bucket(self, number: int) -> list[Found]:
        """The user turns of a bucket, session after session; an order that does not depend on when
        their calls were imported."""
        calls = _with_evidence(self.store, self.store.turns(number))
        self.tally.calls += len(calls)
        sessions = [split(own) for _, own in _sessions(calls)]
        self.tally.sessions += len(sessions)
        routed = [from_turns(turns) for turns in sessions]
        seen = frequencies(routed)
        found = []
        for turns, own in zip(sessions, routed, strict=True):
            labels = align(own, seen)
            judged = [judge(turn, turns[i + 1 :]) for i, turn in enumerate(turns)]
            for i, turn in enumerate(turns):
                self.tally.superseded += len(turn.attempts)
                self.tally.labels[labels[i].reason] += 1
                found.append(self._one(turn, judged[i], labels[i], _rescued(i, turns, judged)))
        return found

    def _one(self, turn: UserTurn, judged: Judged, label: Aligned, rescued: int) -> Found:
        structure = check_structure(turn.messages) if turn.messages else None
        profile = check(turn, judged, structure)
        out = Found(
            turn=turn,
            judged=judged,
            aligned=label,
            profile=profile,
            scene=scene_of(turn),
            rescued=rescued,
        )
        if turn.messages and turn.start >= 0:
            out.demand = demand_input(turn.messages, turn.start, turn.tools)
        out.reason = self._unusable(turn, structure)
        if out.reason is not None:
            return out
        assert turn.messages is not None
        assert structure is not None
        out.prompt = _visible(turn.messages[: turn.start + 1])
        out.response = turn.messages[turn.start + 1 : structure.keep]
        digest = hashlib.blake2b(to_json((out.prompt, out.response)), digest_size=8)
        out.content = int.from_bytes(digest.digest(), "big")
        good, why = admissible(profile, judged)
        whole = structure.verdict == "complete"
        out.sft = good and whole
        out.opd = self.contexts == "all" or good
        if self.fits is not None:
            fit = self.fits(out.prompt, out.response, turn.tools)
            out.sft, out.opd = out.sft and fit.sft, out.opd and fit.opd
            why = fit.reason or why
        if not (out.sft or out.opd):
            out.reason = why or "bad_profile"
        return out

    def _unusable(self, turn: UserTurn, structure: Structure | None) -> str | None:
        """Why nothing can be learnt from the text of a turn, or None."""
        if structure is None:
            return "no_messages"
        if turn.truncated:
            return "truncated_text"
        if turn.cached:
            return "cached"
        if turn.start >= 0 and not any(m.get("role") == "assistant" for m in turn.response):
            return "no_response"
        if turn.start < 0 or structure.keep <= turn.start + 1:
            return "quarantined"
        if self.suites is not None and self.suites.check(turn.messages or ()) is not None:
            return "contaminated"
        return None


def _sessions(calls: Sequence[RoutingTurn]) -> Iterator[tuple[str, list[RoutingTurn]]]:
    """Calls of one session, or of one trace where they have none, in the order of their names."""
    found: dict[tuple[str, str], list[RoutingTurn]] = {}
    for call in calls:
        if call.session_id is not None:
            key = ("session", call.session_id)
        else:
            key = ("call", call.trace_id or call.parent_id or call.source_id)
        found.setdefault(key, []).append(call)
    for (_, name), own in sorted(found.items()):
        yield name, own


def _with_evidence(store: LogStore, calls: list[RoutingTurn]) -> list[RoutingTurn]:
    """The calls with what other records say about them."""
    refs = {ref for call in calls for ref in (call.source_id, call.trace_id) if ref is not None}
    found = store.evidence_for(refs)
    if not found:
        return calls
    out = []
    for call in calls:
        own: list[Evidence] = [
            e
            for ref in dict.fromkeys((call.source_id, call.trace_id))
            if ref is not None
            for e in found.get(ref, ())
        ]
        if own:
            outcome = call.outcome or Outcome()
            told = tuple(e.verdict for e in own if e.verdict not in outcome.verdicts)
            outcome = replace(outcome, verdicts=(*outcome.verdicts, *told))
            call = replace(call, outcome=outcome)
        out.append(call)
    return out


def _rescued(i: int, turns: Sequence[UserTurn], judged: Sequence[Judged]) -> int:
    """Tier that solved turn i when the user asked again, or -1."""
    if judged[i].result != "failure" or i + 1 >= len(turns) or judged[i + 1].result != "success":
        return -1
    after = turns[i + 1]
    again = complaint(after) or after.request_text == turns[i].request_text
    tier = after.served.tier if after.served is not None else None
    return tier if again and tier is not None else -1


def _visible(messages: Messages) -> Messages:
    """Messages before a turn without their reasoning."""
    return tuple(
        {k: v for k, v in m.items() if k not in REASONING} if any(k in m for k in REASONING) else m
        for m in messages
    )
