"""What a routing log says about one model call, in four layers that stay separate.

Prediction, decision, served and outcome are never inferred from one another: a layer that the log
does not have is None. Tiers are whole numbers from 0 (bounded, low risk) to 3 (most capable).
Source: NeoHorse-1, arXiv 2609.08183.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NUM_TIERS = 4

Status = Literal["success", "failure", "aborted"]
"""Whether a call came back: `aborted` was given up by the caller or timed out. It says nothing
about whether the answer was right."""
Origin = Literal["program", "user", "tool", "judge", "system"]
"""Who says it: a programmatic check, a person, a tool's result, a judging model, the gateway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    prompt_sha256: str | None = None
    """Digest of the request where the log keeps one instead of the text."""
    tools_sha256: str | None = None
    tokens_in: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the router thought of the request, before any policy."""

    tier: int | None = None
    probs: tuple[float, ...] | None = None  # [NUM_TIERS]
    confidence: float | None = None
    score: float | None = None
    """A router's own number, such as the predicted win rate of the strong model."""
    router: str | None = None
    router_version: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyStep:
    """One rule that changed, or might have changed, the decision."""

    stage: str
    applied: bool
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was asked for after the policy had its say."""

    tier: int | None = None
    policy: tuple[PolicyStep, ...] = ()
    reason: str | None = None
    requested_model: str | None = None
    propensity: float | None = None
    """Probability with which the policy chose this tier, where the log says it; in (0, 1]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Who really answered."""

    model: str | None = None
    provider: str | None = None
    tier: int | None = None
    kind: Literal["single", "ensemble"] = "single"
    fallback_hops: int | None = None
    cache_hit: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One statement about how a turn went. `value` grows with quality, 0 bad to 1 good, where the
    importer can say so; else None, with the statement in `label`."""

    source: Origin
    name: str
    value: float | None = None
    label: str | None = None
    ts: int | None = None
    """Milliseconds since 1970 UTC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the call ended. None means that the log does not say."""

    status: Status | None = None
    finish_reason: str | None = None
    error: str | None = None
    verdicts: tuple[Verdict, ...] = ()
    complaint: bool | None = None
    """The user's message of this very turn complains about the turn before."""
    reask: bool | None = None
    """It asks again what the turn before should have answered."""
    escalated: bool | None = None
    """The turn was handed to a higher tier."""
    latency_ms: float | None = None
    ttft_ms: float | None = None
    tokens_out: int | None = None
    reasoning_tokens: int | None = None
    cost: float | None = None
    baseline_cost: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingTurn:
    """One model call as a log has it. `source` and `source_id` name it; nothing else is unique."""

    source: str
    """Name of the configured source."""
    source_id: str
    format: str
    """The importer that read it."""
    session_id: str | None = None
    turn_index: int | None = None
    """The log's own number; it may saturate or reset, so sessions are ordered by `ts`."""
    ts: int | None = None
    """When the request began: milliseconds since 1970 UTC."""
    trace_id: str | None = None
    """Equal for a call and its retries and fallbacks."""
    parent_id: str | None = None
    """The call that this one happened inside of."""
    user: str | None = None
    scene: str | None = None
    """Kind of task where the log names one."""
    tags: tuple[str, ...] = ()
    request: Request = field(default_factory=Request)
    prediction: Prediction | None = None
    decision: Decision | None = None
    served: Served | None = None
    outcome: Outcome | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The conversation as the model read it, in the chat-completions shape (`role`, `content`, and
    where there are any `reasoning_content`, `tool_calls`, `tool_call_id`, `name`), then its answer.
    """
    num_prompt: int | None = None
    """How many of `messages` the model read; the rest is what it answered."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Definitions of the tools that the model could call."""
    truncated: bool = False
    """The log cut the request or the answer: nothing may be learnt from the text."""
    sample_rate: float = 1.0
    """Share of all calls that the log keeps; a turn stands for 1 / sample_rate calls."""
    consent: bool = True
    raw_sha256: str = ""
    """Digest of the record as it was read."""

    @property
    def completeness(self) -> dict[str, bool]:
        """Which of the four layers the log had."""
        return {name: getattr(self, name) is not None for name in LAYERS}


LAYERS = ("prediction", "decision", "served", "outcome")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """A record that speaks about a turn of another record: a score, a rating, a late outcome."""

    source: str
    ref: str
    """`source_id` or `trace_id` of the turn, or of all turns of that trace, that it is about."""
    verdict: Verdict
    raw_sha256: str = ""
