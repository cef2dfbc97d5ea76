"""A router over two model tiers, and the log that its gateway keeps: what a team records by day.

The workload comes from an environment whose graders know what is right, so every outcome is real.
The log has the shape of LiteLLM's spend log; what the router thought stands in its metadata.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from distill.errors import ConfigError
from distill.types import StopReason, Task

Tier = Literal[0, 2]
WEAK: Tier = 0
STRONG: Tier = 2
ROUTER = "length-v1"
CUTS = (0.0, 1.0, 2.0)
"""Where the router's estimate of a request passes from one class of demand to the next."""
_FARTHEST = 500.0
"""Classes above a border beyond which the chance below it is 0; the exponential ends at 709."""
FIRST_DAY = datetime(2026, 1, 1, 8, tzinfo=UTC)
GAP_MS = 2_500
"""Between two requests of a session."""
AGAIN_MS = 1_200
"""From a request to the same one asked again, before the next of its session."""
DAY_MS = 23 * 3_600_000
"""All requests of a day begin within it; the rest of the day is for the last answers."""
PRICE = {WEAK: 1e-6, STRONG: 8e-6}
"""Cost of a token, in the currency of the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What the router said and did for one request."""

    probs: tuple[float, ...]  # [4] demand classes
    predicted: int
    tier: Tier
    propensity: float
    """Probability with which it takes this tier for this request, in (0, 1]."""
    explored: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """Guesses the demand of a request from its length, and now and then tries a tier at random.

    The guess is rough: it has noise of its own for every request and knows nothing of what is
    asked. So it sends some requests to a tier that cannot solve them, and spends the strong tier on
    others, as real routers do; the random tries make the log useful for estimates.
    """

    explore: float = 0.2
    typical: float = 12.0
    """Length of a request, in characters, that is on the border between the tiers."""
    spread: float = 2.5
    """Characters that move the estimate by one class."""
    noise: float = 0.7

    def __post_init__(self) -> None:
        if not 0.0 <= self.explore <= 1.0:
            raise ConfigError(f"traffic.explore must be from 0 to 1, found {self.explore}")

    def probs(self, task: Task) -> tuple[float, ...]:
        """Chances of the four classes of demand; they add up to 1."""
        rng = random.Random(f"{ROUTER}/{task.id}")
        length = len(task.prompt[-1].content)
        at = (length - self.typical) / self.spread + CUTS[0] + rng.gauss(0.0, self.noise)
        below = [1.0 / (1.0 + math.exp(min(at - cut, _FARTHEST))) for cut in CUTS]
        edges = [0.0, *below, 1.0]
        return tuple(round(high - low, 6) for low, high in itertools.pairwise(edges))

    def weak_share(self, task: Task) -> float:
        """Probability that a request goes to the weak tier."""
        first = 1.0 - self.explore / 2
        return first if _first(self.probs(task)) == WEAK else 1.0 - first

    def choose(self, task: Task, key: str) -> Choice:
        """Depends on (task, key) alone."""
        probs = self.probs(task)
        first = _first(probs)
        rng = random.Random(f"{ROUTER}/{key}/{task.id}")
        explored = rng.random() < self.explore
        other: Tier = STRONG if first == WEAK else WEAK
        tier: Tier = (WEAK if rng.random() < 0.5 else STRONG) if explored else first
        chance = 1.0 - self.explore / 2 if tier == first else self.explore / 2
        assert tier in (first, other)
        return Choice(
            probs=probs,
            predicted=max(range(4), key=lambda k: (probs[k], -k)),
            tier=tier,
            propensity=chance,
            explored=explored,
        )


def _first(probs: Sequence[float]) -> Tier:
    """The tier that the router takes when it does not explore."""
    return WEAK if max(range(4), key=lambda k: (probs[k], -k)) == 0 else STRONG


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request of a user, before anybody answered it."""

    number: int
    session: str
    user: str
    at: datetime
    task: Task


def plan(tasks: Sequence[Task], *, day: int, session: int, key: str) -> list[Request]:
    """Users who ask `session` requests in a row, a few seconds apart, on day 0, 1, ...

    One session follows the other; where they are too many for a day, they overlap, so that no
    request of a day comes after the first one of the next.
    """
    start, found = FIRST_DAY + timedelta(days=day), []
    length = session * GAP_MS
    count = -(-len(tasks) // session)
    step = min(float(length), (DAY_MS - length) / max(1, count - 1))
    for number, task in enumerate(tasks):
        which, place = divmod(number, session)
        name = hashlib.sha256(f"{key}/{which}".encode()).hexdigest()[:12]
        found.append(
            Request(
                number=number,
                session=f"s-{name}",
                user=f"u-{name[:3]}",
                at=start + timedelta(milliseconds=int(which * step) + place * GAP_MS),
                task=task,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """How one call of a request went."""

    request: Request
    choice: Choice
    model: str
    reply: str
    correct: bool
    tokens_in: int
    tokens_out: int
    complaint: bool = False
    """The user asked again because the call before had failed."""
    stop: StopReason = StopReason.STOP
    """Why the reply ended; `length` where it was cut at the limit of tokens."""


def spend_row(call: Answered, *, key: str, model_group: str = "auto") -> dict[str, Any]:
    """The call as a row of LiteLLM's spend log, with prompts stored."""
    request, choice = call.request, call.choice
    begun = request.at + timedelta(milliseconds=AGAIN_MS if call.complaint else 0)
    suffix = "b" if call.complaint else "a"
    identity = hashlib.sha256(f"{key}/{request.number}/{suffix}".encode()).hexdigest()[:20]
    tokens = call.tokens_in + call.tokens_out
    policy = [{"stage": "explore", "applied": choice.explored}]
    if call.complaint:
        policy.append({"stage": "complaint_upgrade", "applied": True})
    return {
        "request_id": f"rq-{identity}",
        "call_type": "acompletion",
        "model_group": model_group,
        "model": call.model,
        "custom_llm_provider": "local",
        "prompt_tokens": call.tokens_in,
        "completion_tokens": call.tokens_out,
        "total_tokens": tokens,
        "spend": round(tokens * PRICE[choice.tier], 9),
        "startTime": _stamp(begun),
        "endTime": _stamp(begun + timedelta(milliseconds=40 + 6 * call.tokens_out)),
        "session_id": request.session,
        "end_user": request.user,
        "status": "failure" if call.stop is StopReason.ERROR else "success",
        "cache_hit": "False",
        "request_tags": json.dumps([f"scene:{request.task.domain}"]),
        "messages": json.dumps(
            [{"role": m.role, "content": m.content} for m in request.task.prompt]
        ),
        "response": json.dumps(
            {
                "choices": [
                    {
                        "finish_reason": str(call.stop),
                        "message": {"role": "assistant", "content": call.reply},
                    }
                ]
            }
        ),
        "metadata": json.dumps(metadata_of(call, policy)),
    }


def metadata_of(call: Answered, policy: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the gateway was told by the router and by the check that ran on the answer."""
    choice = call.choice
    return {
        "router": {
            "name": ROUTER,
            "tier": choice.predicted,
            "probs": list(choice.probs),
            "decided_tier": choice.tier,
            "propensity": round(choice.propensity, 6),
            "policy": list(policy),
        },
        "outcome": {
            "verdicts": [{"source": "program", "name": "graded", "value": float(call.correct)}],
            "complaint": call.complaint,
        },
    }


def _stamp(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
