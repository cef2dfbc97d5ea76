"""One bucket of a log store at a time: calls to user turns, and what is known about each."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic_core import to_json

from distill.curriculum import columns
from distill.curriculum.contamination import Suites, words_by_message
from distill.curriculum.demand import DemandInput, demand_input
from distill.curriculum.labels import Aligned, align, frequencies, from_turns
from distill.curriculum.outcomes import Judged, complaint, judge
from distill.curriculum.profile import Profile, admissible, check
from distill.curriculum.records import LAYERS, Evidence, Outcome, RoutingTurn
from distill.curriculum.scenes import Scene, scene_of
from distill.curriculum.store import LogStore
from distill.curriculum.structure import Structure
from distill.curriculum.structure import check as check_structure
from distill.curriculum.threads import threads
from distill.curriculum.turns import UserTurn, split
from distill.overlap import Hashes

Messages = tuple[Mapping[str, Any], ...]
_NAMES = ("session_id", "trace_id", "parent_id", "source_id")
REASONING = ("reasoning_content", "reasoning")
PART = 500
"""Calls of a bucket that are looked at together, about."""
BLOCK = 256
"""Turns whose words are looked at together."""


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
    keep: int = 0
    """Messages of the longest sound beginning of the conversation."""
    whole: bool = False
    """Whether nothing is wrong with the conversation."""
    words: Hashes | None = None
    """Hashes of the words of request and response; None where nobody needed them yet."""

    @property
    def family(self) -> str:
        """What it belongs to: its session, or itself."""
        return self.turn.session_id or self.turn.id


Known = tuple[UserTurn, Judged, Aligned, int]


@dataclass(kw_only=True, slots=True)
class Tally:
    """What was counted on the way."""

    calls: int = 0
    sessions: int = 0
    superseded: int = 0
    """Attempts that a retry or a fallback replaced."""
    labels: Counter[str] = field(default_factory=Counter)
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    """Source -> `rows`, and how many of them have each layer and `messages`."""

    def add(self, other: Tally) -> None:
        self.calls += other.calls
        self.sessions += other.sessions
        self.superseded += other.superseded
        self.labels.update(other.labels)
        for source, counts in other.sources.items():
            self.sources.setdefault(source, Counter()).update(counts)

    def count(self, calls: Sequence[RoutingTurn]) -> None:
        """What the calls of a bucket tell."""
        self.calls += len(calls)
        for source in {call.source for call in calls}:
            own = [call for call in calls if call.source == source]
            counts = self.sources.setdefault(source, Counter())
            counts["rows"] += len(own)
            for name in (*LAYERS, "messages"):
                counts[name] += sum(getattr(call, name) is not None for call in own)


@dataclass(kw_only=True, slots=True)
class Walker:
    """Reads a store bucket by bucket."""

    store: LogStore
    suites: Suites | None = None
    fits: Fits | None = None
    contexts: str = "all"
    tally: Tally = field(default_factory=Tally)

    def bucket(self, number: int) -> Iterator[list[Found]]:
        """The user turns of a bucket, one part of it after the other, and in each session after
        session; an order that does not depend on when their calls were imported."""
        for calls in self._parts(number):
            found = [self._one(*known) for known in self._judged(calls)]
            for start in range(0, len(found), BLOCK):
                self._decide([f for f in found[start : start + BLOCK] if f.reason is None])
            _drop_trajectories(found)
            yield found
            # One part goes before the next one comes.
            found.clear()
            calls.clear()

    def judged(self, number: int) -> Iterator[Known]:
        """Each user turn of a bucket with its outcome, its label, and the tier that solved it when
        the user asked again, or -1."""
        for calls in self._parts(number):
            yield from self._judged(calls)
            calls.clear()

    def _parts(self, number: int) -> Iterator[list[RoutingTurn]]:
        """The calls of a bucket; those of a large one by and by, whole sessions at a time, so that
        memory does not grow with the log."""
        table = self.store.table(number, columns.SCHEMA.names)
        count = -(-table.num_rows // PART)
        if count < 2:
            yield columns.decode(table)
            return
        table = table.combine_chunks()
        keys = (table.column(name).to_pylist() for name in _NAMES)
        place = np.array(
            [
                # The first bits of the sum have chosen the bucket already.
                (zlib.crc32(_name(*key).encode("utf-8", "surrogatepass")) >> 8) % count
                for key in zip(*keys, strict=True)
            ]
        )
        for part in range(count):
            yield columns.decode(table.take(pa.array(np.flatnonzero(place == part))))

    def _judged(self, calls: list[RoutingTurn]) -> Iterator[Known]:
        self.tally.count(calls)
        calls = _with_evidence(self.store, calls)
        sessions = [split(own) for _, own in _sessions(calls)]
        self.tally.sessions += len(sessions)
        told = [[turns[i] for i in thread] for turns in sessions for thread in threads(turns)]
        routed = [from_turns(turns) for turns in told]
        seen = frequencies(routed)
        for turns, own in zip(told, routed, strict=True):
            labels = align(own, seen)
            judged = [judge(turn, turns[i + 1 : i + 2]) for i, turn in enumerate(turns)]
            for i, turn in enumerate(turns):
                self.tally.labels[labels[i].reason] += 1
                yield turn, judged[i], labels[i], _rescued(i, turns, judged)
                yield from self._attempts(turn, judged[i])

    def _attempts(self, turn: UserTurn, judged: Judged) -> Iterator[Known]:
        """Earlier attempts at a turn that were checked themselves: what their tier could do. The
        others are only counted."""
        final = turn.served.tier if turn.served is not None else None
        for number, attempt in enumerate(turn.attempts):
            # The turn has the name of its first attempt already.
            name = hashlib.sha256(f"{turn.id}/{number}".encode()).hexdigest()[:16]
            own = replace(
                turn,
                id=name,
                ts=attempt.ts,
                calls=(attempt,),
                attempts=(),
                messages=attempt.messages,
                prediction=attempt.prediction,
                decision=attempt.decision,
                served=attempt.served,
                is_attempt=True,
            )
            found = judge(own)
            if not found.verifiable:
                self.tally.superseded += 1
                continue
            solved = judged.result == "success" and found.result == "failure"
            label = Aligned(label=None, reason="no_tier")
            yield own, found, label, final if solved and final is not None else -1

    def _one(self, turn: UserTurn, judged: Judged, label: Aligned, rescued: int) -> Found:
        structure = check_structure(turn.messages) if turn.messages else None
        out = Found(
            turn=turn,
            judged=judged,
            aligned=label,
            profile=check(turn, judged, structure),
            scene=scene_of(turn),
            rescued=rescued,
            reason=_unusable(turn, structure),
        )
        if turn.messages and turn.start >= 0:
            out.demand = demand_input(turn.messages, turn.start, turn.tools)
        if structure is not None:
            out.keep, out.whole = structure.keep, structure.verdict == "complete"
        return out

    def _decide(self, found: Sequence[Found]) -> None:
        """What becomes of turns whose text can be used."""
        texts = [f.turn.messages or () for f in found]
        words = words_by_message(texts)
        hits = [None] * len(found) if self.suites is None else self.suites.check_many(texts, words)
        for one, messages, own, hit in zip(found, texts, words, hits, strict=True):
            if hit is not None:
                one.reason = "contaminated"
                continue
            self._accept(one)
            if one.prompt[-1] is messages[one.turn.start]:  # without reasoning that was left out
                one.words = np.concatenate(own[one.turn.start : one.keep])

    def _accept(self, out: Found) -> None:
        """Prompt and response, and what can be learnt from them."""
        turn = out.turn
        assert turn.messages is not None
        out.prompt = _visible(turn.messages[: turn.start + 1])
        out.response = turn.messages[turn.start + 1 : out.keep]
        digest = hashlib.blake2b(to_json((out.prompt, out.response)), digest_size=8)
        out.content = int.from_bytes(digest.digest(), "big")
        good, why = admissible(out.profile, out.judged)
        out.sft = good and out.whole
        out.opd = self.contexts == "all" or good
        if self.fits is not None:
            fit = self.fits(out.prompt, out.response, turn.tools)
            out.sft, out.opd = out.sft and fit.sft, out.opd and fit.opd
            why = fit.reason or why
        if not (out.sft or out.opd):
            out.reason = why or "bad_profile"


def _drop_trajectories(found: Sequence[Found]) -> None:
    """Leave out everything that was said in a session that holds an evaluation prompt."""
    known = {f.family for f in found if f.reason == "contaminated"}
    for one in found:
        if one.reason is None and one.family in known:
            one.reason = "contaminated"


def _unusable(turn: UserTurn, structure: Structure | None) -> str | None:
    """Why nothing can be learnt from the text of a turn, or None."""
    if turn.is_attempt:
        return "superseded"
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
    return None


def _name(session: str | None, trace: str | None, parent: str | None, source_id: str) -> str:
    """What calls have in common that are looked at together."""
    return session or trace or parent or source_id


def _sessions(calls: Sequence[RoutingTurn]) -> Iterator[tuple[str, list[RoutingTurn]]]:
    """Calls of one session, or of one trace where they have none, in the order of their names.

    Logs of several kinds, such as a gateway's and a harness's, meet in a session. Two sources of
    one kind are two gateways, whose equal session ids mean different sessions.
    """
    rivals: dict[str, list[str]] = {}
    for source, kind in sorted({(call.source, call.format) for call in calls}):
        rivals.setdefault(kind, []).append(source)
    found: dict[tuple[str, str, int], list[RoutingTurn]] = {}
    for call in calls:
        if call.session_id is not None:
            key = ("session", call.session_id, rivals[call.format].index(call.source))
        else:
            key = ("call", _name(None, call.trace_id, call.parent_id, call.source_id), 0)
        found.setdefault(key, []).append(call)
    for (_, name, _), own in sorted(found.items()):
        yield name, own


def _with_evidence(store: LogStore, calls: list[RoutingTurn]) -> list[RoutingTurn]:
    """The calls with what other records say about them: those of their own source, or of one that
    holds nothing but statements."""
    refs = {ref for call in calls for ref in (call.source_id, call.trace_id) if ref is not None}
    found = store.evidence_for(refs)
    if not found:
        return calls
    out, sources = [], {call.source for call in calls}
    for call in calls:
        own: list[Evidence] = [
            e
            for ref in dict.fromkeys((call.source_id, call.trace_id))
            if ref is not None
            for e in found.get(ref, ())
            if e.source == call.source or e.source not in sources
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
