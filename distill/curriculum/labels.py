"""Which tier a turn should have had, from what happened in the turns after it.

c is the class that the router predicted, f the tier that it decided, n the next turn:

    down-vote         excluded for an ensemble and where max(c, f) > 1, else max(c, f) + 1; a label
                      that a complaint already raised above c stays
    own complaint     f: this turn is the retry of the one before
    next complains    max(min(f(n), c + 2, 3), c + 1), if c <= 1, f(n) > c and the turn after that
                      does not complain; a second complaint is noise
    else              f, with a reason that sets its weight

A complaint speaks about the turn before it, so no label of a turn is raised by its own complaint.
Source: OpenSquilla, whose router learns from these labels. Here they are evidence of under-routing
and targets of the demand estimator.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from distill.curriculum.outcomes import complaint, rating
from distill.curriculum.records import NUM_TIERS
from distill.curriculum.turns import UserTurn

Reason = Literal[
    "normal",
    "confidence_backoff",
    "explicit_upvote",
    "ensemble_upvote",
    "immediate_complaint",
    "retrospective",
    "explicit_downvote",
    "downvote_high_tier",
    "downvote_ensemble",
    "no_tier",
]
Vote = Literal["up", "down"]

HIGHEST_CORRECTED = 1
"""A complaint about a turn predicted above it is more likely about the answer than the tier."""
MAX_STEP = 2
WEIGHTS: dict[Reason, float] = {
    "explicit_downvote": 1.2,
    "retrospective": 1.0,
    "immediate_complaint": 0.9,
    "explicit_upvote": 0.6,
    "confidence_backoff": 0.5,
    "normal": 0.3,
    "ensemble_upvote": 0.3,
}
CONFIRMATIONS: frozenset[Reason] = frozenset(
    ("normal", "confidence_backoff", "explicit_upvote", "ensemble_upvote")
)
"""They come in floods, so the same request seen often counts less."""
CORRECTIONS: frozenset[Reason] = frozenset(("retrospective", "explicit_downvote"))
MAX_WEIGHT = 2.0
DAY_MS = 86_400_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """One turn as the router saw it. Tiers are 0 to 3, None where the log has none."""

    raw: int | None
    """Predicted, before any policy."""
    final: int | None
    """Decided, or served where no decision was logged."""
    complaint: bool = False
    """Its own message complains about the turn before."""
    vote: Vote | None = None
    gated: bool = False
    """Low confidence sent it to the default tier."""
    ensemble: bool = False
    features: str = ""
    """Equal for turns that look the same to a router; empty is like no other."""
    day: int = 0
    """Days since 1970 UTC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Aligned:
    """A label and how much it counts. Without a label the turn is left out, not weighted zero."""

    label: int | None
    reason: Reason
    confirmed: bool = True
    """False for a correction that no calm turn has borne out yet."""
    weight: float = 0.0


class Seen(NamedTuple):
    """How often turns with the same features occur, and on how many days."""

    times: int = 1
    days: int = 1


def align(session: Sequence[Routed], seen: Mapping[str, Seen] | None = None) -> list[Aligned]:
    """Labels of the turns of one session, in the order in which they happened.

    `seen` says how common their features are in all of the logs, see `frequencies`; without it
    those of the session count.
    """
    counts = frequencies([session]) if seen is None else seen
    out = []
    for i, turn in enumerate(session):
        label, reason, confirmed = _label(session, i)
        if label is None:
            out.append(Aligned(label=None, reason=reason, confirmed=confirmed))
            continue
        common = counts.get(turn.features, Seen())
        value = weight(reason, confirmed, common.times, common.days)
        out.append(Aligned(label=label, reason=reason, confirmed=confirmed, weight=value))
    return out


def weight(reason: Reason, confirmed: bool = True, times: int = 1, days: int = 1) -> float:
    """Weight of a label whose features were seen `times` times on `days` different days."""
    value = WEIGHTS.get(reason, 0.0)
    if reason in CORRECTIONS and not confirmed:
        value *= 0.5
    if reason in CONFIRMATIONS:
        value /= math.sqrt(times)
    return min(value * min(1.0 + 0.15 * (days - 1), 1.6), MAX_WEIGHT)


def frequencies(sessions: Iterable[Sequence[Routed]]) -> dict[str, Seen]:
    """How common the features of turns are over sessions."""
    counts: dict[str, int] = {}
    days: dict[str, set[int]] = {}
    for session in sessions:
        for turn in session:
            if turn.features:
                counts[turn.features] = counts.get(turn.features, 0) + 1
                days.setdefault(turn.features, set()).add(turn.day)
    return {key: Seen(count, len(days[key])) for key, count in counts.items()}


def from_turns(turns: Sequence[UserTurn]) -> list[Routed]:
    """The user turns of one session as a router saw them, one each, in order."""
    return [_routed(turn) for turn in turns]


def _routed(turn: UserTurn) -> Routed:
    vote = rating(turn)
    decided = turn.decision.tier if turn.decision is not None else None
    if decided is None and turn.served is not None:
        decided = turn.served.tier
    policy = turn.decision.policy if turn.decision is not None else ()
    return Routed(
        raw=turn.prediction.tier if turn.prediction is not None else None,
        final=decided,
        complaint=complaint(turn),
        vote=None if vote is None else "up" if vote else "down",
        gated=any(step.applied and step.stage == "confidence_gate" for step in policy),
        ensemble=turn.served is not None and turn.served.kind == "ensemble",
        features=_features(turn),
        day=0 if turn.ts is None else turn.ts // DAY_MS,
    )


def _features(turn: UserTurn) -> str:
    """Digest of the request, of its words or as the log has it; empty where there is neither."""
    if turn.request_text:
        words = " ".join(turn.request_text.casefold().split())
        return hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return turn.calls[0].request.prompt_sha256 or ""


def _label(session: Sequence[Routed], i: int) -> tuple[int | None, Reason, bool]:
    turn = session[i]
    if turn.raw is None or turn.final is None:
        return None, "no_tier", True
    label, confirmed = turn.final, True
    reason: Reason = "confidence_backoff" if turn.gated else "normal"
    if turn.vote == "up":
        reason = "ensemble_upvote" if turn.ensemble else "explicit_upvote"
    raised = _raised_by_next(session, i)
    if turn.complaint:
        reason = "immediate_complaint"
    elif raised is not None:
        (label, confirmed), reason = raised, "retrospective"
    if turn.vote != "down":
        return label, reason, confirmed
    if turn.ensemble:
        return None, "downvote_ensemble", confirmed
    if reason in ("immediate_complaint", "retrospective") and label > turn.raw:
        return label, "explicit_downvote", confirmed
    anchor = max(turn.raw, turn.final)
    if anchor > HIGHEST_CORRECTED:
        return None, "downvote_high_tier", confirmed
    calm = i + 1 < len(session) and not session[i + 1].complaint
    return anchor + 1, "explicit_downvote", calm


def _raised_by_next(session: Sequence[Routed], i: int) -> tuple[int, bool] | None:
    """Label of a turn that the next one complains about, and whether a calm turn confirms it."""
    raw = session[i].raw
    if raw is None or raw > HIGHEST_CORRECTED or i + 1 >= len(session):
        return None
    after = session[i + 1]
    if not after.complaint or after.final is None or after.final <= raw:
        return None
    third = session[i + 2] if i + 2 < len(session) else None
    if third is not None and third.complaint:
        return None
    return max(min(after.final, raw + MAX_STEP, NUM_TIERS - 1), raw + 1), third is not None
