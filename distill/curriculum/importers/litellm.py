"""LiteLLM: rows of the table `LiteLLM_SpendLogs` and `StandardLoggingPayload` of callbacks.

`model_group` is the alias that was asked for and `model` the deployment that served; a call and its
retries share `trace_id`. The key and the address of the requester are never read. A row can say
more in `metadata`, `metadata.spend_logs_metadata` or `metadata.requester_metadata`:

    router    what the router thought: {tier, probs, confidence, score, name, version, and what
              was decided: decided_tier, propensity, reason, policy: [{stage, applied, ...}]}
    outcome   how it went: {verdicts: [{source, name, value, label, ts}], complaint, reask,
              escalated, baseline_cost}
    feedback  a person's rating: true or false, a word such as up, {thumb}, or a number or {score,
              label} with `scales` in the options, {feedback: [worst, best]}
    scene, sample_rate, parent_id   as in the normal form

`complexity_router` {tier, score} or `complexity_tier` of LiteLLM's own router (SIMPLE, MEDIUM,
COMPLEX, REASONING) is a prediction too. Tags `scene:NAME` and `tier:NAME` name the kind of task and
the tier that the caller asked for; options `scene_tag` and `tier_tag` change the prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distill.curriculum.clock import shorten
from distill.curriculum.drops import RowError
from distill.curriculum.importers.base import Context, Found, Row, digest_of
from distill.curriculum.importers.endings import finish_of
from distill.curriculum.importers.layers import (
    made,
    probs_of,
    propensity_of,
    status_of,
    steps_of,
    tier_of,
)
from distill.curriculum.importers.messages import Message, answer, conversation, tool_definitions
from distill.curriculum.importers.values import (
    amount,
    as_table,
    count,
    flag,
    ident,
    items,
    nothing,
    number,
    parsed,
    share,
    strings,
    table,
    text,
    when,
)
from distill.curriculum.importers.verdicts import rating, verdict_of
from distill.curriculum.records import (
    Decision,
    Outcome,
    Prediction,
    Request,
    Served,
    Status,
    Verdict,
)

REDACTED = "redacted-by-litellm"
CUT = "litellm_truncated"
_CHAT = ("completion", "responses", "generate_content", "anthropic_messages", "pass_through")
_NESTED = ("spend_logs_metadata", "requester_metadata")
_TIMEOUTS = ("timeout", "cancel")


class LiteLLM:
    name = "litellm"

    def recognises(self, row: Row) -> bool:
        return (
            "call_type" in row
            and ("request_id" in row or "id" in row)
            and ("startTime" in row or "model_group" in row or "custom_llm_provider" in row)
        )

    def read(self, row: Row, context: Context) -> Iterable[Found]:
        """One turn. RowError("no_call") for what is no conversation, such as an embedding."""
        call_type = text(row, "call_type")
        if call_type is not None and not any(kind in call_type for kind in _CHAT):
            raise RowError("no_call", f"call_type is {shorten(call_type)}")
        meta = _metadata(row)
        tags = list(strings(row, "request_tags"))
        scene, asked = _tagged(tags, meta, context.options)
        router = as_table(meta.get("router"), "metadata.router")
        said, read, tools, truncated = _conversation(row)
        response = said.table
        start = when(row, "startTime")
        turn = context.turn(
            row,
            source_id=ident(row, "request_id", "id") or digest_of(row),
            format=self.name,
            session_id=ident(row, "session_id", "litellm_session_id")
            or ident(meta, "session_id", "litellm_session_id"),
            ts=start,
            trace_id=ident(row, "trace_id", "litellm_trace_id") or ident(meta, "trace_id"),
            parent_id=ident(meta, "parent_id"),
            user=ident(row, "end_user", "user"),
            scene=scene,
            request=Request(tokens_in=_tokens(row)[0]),
            prediction=_prediction(router, meta, context, tags),
            decision=_decision(row, router, asked, context, tags),
            served=_served(row, meta, context),
            outcome=_outcome(row, meta, response, start, context.options),
            messages=(*read, *said.messages) or None,
            num_prompt=len(read) if read or said.messages else None,
            tools=tools,
            truncated=truncated,
            tags=tuple(tags),
            **_sampled(meta),
        )
        return [turn]


class _Said:
    """The answer of a call: its messages, and the object that they stood in."""

    __slots__ = ("messages", "table")

    def __init__(self, messages: list[Message], table: Mapping[str, Any]) -> None:
        self.messages = messages
        self.table = table


def _metadata(row: Row) -> Mapping[str, Any]:
    """The metadata with the caller's own on top."""
    meta = table(row, "metadata")
    for name in _NESTED:
        inner = meta.get(name)
        if inner:
            meta = {**meta, **as_table(inner, f"metadata.{name}")}
    return meta


def _sampled(meta: Mapping[str, Any]) -> dict[str, float]:
    found = share(meta, "sample_rate")
    return {"sample_rate": found} if found else {}


def _tagged(
    tags: list[str], meta: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """Scene, and the tier that was asked for."""
    scene_tag = options.get("scene_tag", "scene:")
    tier_tag = options.get("tier_tag", "tier:")
    scene, asked = text(meta, "scene"), None
    for tag in tags:
        if scene is None and tag.startswith(scene_tag):
            scene = tag[len(scene_tag) :]
        if asked is None and tag.startswith(tier_tag):
            asked = tag[len(tier_tag) :]
    return scene, asked


def _tokens(row: Row) -> tuple[int | None, int | None]:
    """Tokens of request and answer. Streaming rows log two zeros for what they did not count."""
    read, said = count(row, "prompt_tokens"), count(row, "completion_tokens")
    return (read, said) if read or said else (None, None)


def _conversation(
    row: Row,
) -> tuple[_Said, list[Message], tuple[Mapping[str, Any], ...], bool]:
    """Answer, request, tools, and whether the log cut any of them. Redacted text is none."""
    sent = table(row, "proxy_server_request")
    asked, replied = row.get("messages"), row.get("response")
    replied = None if nothing(replied) else replied
    if nothing(asked) or asked in ("{}", "[]"):
        asked = sent if "messages" in sent or "input" in sent else None
    if isinstance(replied, str) and replied.lstrip().startswith("{"):
        replied = parsed(replied, "response")
    response = replied if isinstance(replied, Mapping) else {}
    read, said = conversation(asked, "messages"), answer(replied, "response")
    cut = CUT in sent or _cut(asked, read) or _cut(row.get("response"), said)
    if any(entry["content"] == REDACTED for entry in (*read, *said)):
        read, said = [], []
    if not read and said:
        cut = True  # an answer to a question that the log does not have
    parameters = table(row, "model_parameters")
    defined = parameters.get("tools") or sent.get("tools")
    tools = tool_definitions(defined, "tools") if defined else ()
    return _Said(said, response), read, tools, cut


def _cut(value: Any, found: list[Message]) -> bool:
    """Whether the log shortened a text, which then says so."""
    if isinstance(value, str):
        return CUT in value
    for entry in found:
        if CUT in entry["content"]:
            return True
        if len(entry) > 2 and CUT in str(entry):
            return True
    return False


def _prediction(
    router: Mapping[str, Any], meta: Mapping[str, Any], context: Context, tags: list[str]
) -> Prediction | None:
    own = as_table(meta.get("complexity_router"), "metadata.complexity_router")
    word = own.get("tier") or meta.get("complexity_tier")
    if not router and not word and not own:
        return None
    tier = router.get("tier", word)
    name = text(router, "name") or ("complexity_router" if own or word else None)
    return made(
        Prediction,
        tier=tier_of(tier, "router.tier", context.tiers, tags),
        probs=probs_of(router.get("probs"), "router.probs", context.tiers),
        confidence=number(router, "confidence"),
        score=number(router, "score") if "score" in router else number(own, "score"),
        router=name,
        router_version=ident(router, "version"),
    )


def _decision(
    row: Row, router: Mapping[str, Any], asked: str | None, context: Context, tags: list[str]
) -> Decision | None:
    wanted = text(row, "model_group")
    decided = router.get("decided_tier", asked)
    tier = tier_of(decided, "router.decided_tier", context.tiers, tags)
    return made(
        Decision,
        tier=context.tiers.of_model(wanted) if tier is None else tier,
        policy=steps_of(router.get("policy"), "router.policy"),
        reason=text(router, "reason"),
        requested_model=wanted,
        propensity=propensity_of(router.get("propensity"), "router.propensity"),
    )


def _served(row: Row, meta: Mapping[str, Any], context: Context) -> Served | None:
    model = text(row, "model")
    return made(
        Served,
        model=model,
        provider=text(row, "custom_llm_provider"),
        tier=context.tiers.of_model(model),
        fallback_hops=count(meta, "attempted_fallbacks"),
        cache_hit=flag(row, "cache_hit"),
    )


def _outcome(
    row: Row,
    meta: Mapping[str, Any],
    response: Mapping[str, Any],
    start: int | None,
    options: Mapping[str, Any],
) -> Outcome | None:
    told = as_table(meta.get("outcome"), "metadata.outcome")
    status = status_of(row.get("status") or meta.get("status"), "status")
    error = _error(row, meta) if status != "success" else None
    latency, ttft = _times(row, start)
    return made(
        Outcome,
        status=_status(status, error),
        finish_reason=finish_of(response),
        error=error,
        verdicts=_verdicts(told, meta, options),
        complaint=flag(told, "complaint"),
        reask=flag(told, "reask"),
        escalated=flag(told, "escalated"),
        latency_ms=latency,
        ttft_ms=ttft,
        tokens_out=_tokens(row)[1],
        reasoning_tokens=_reasoning(response),
        cost=amount(row, "spend", "response_cost"),
        baseline_cost=amount(told, "baseline_cost"),
    )


def _verdicts(
    told: Mapping[str, Any], meta: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Verdict, ...]:
    found = [
        verdict_of(entry, f"outcome.verdicts[{index}]")
        for index, entry in enumerate(items(told, "verdicts"))
    ]
    feedback = meta.get("feedback")
    if feedback is not None and feedback != "":
        found.append(rating(feedback, "feedback", options))
    return tuple(found)


def _error(row: Row, meta: Mapping[str, Any]) -> str | None:
    told = table(row, "error_information") or as_table(
        meta.get("error_information"), "metadata.error_information"
    )
    return text(told, "error_class") or ident(told, "error_code") or text(row, "error_str")


def _status(status: Status | None, error: str | None) -> Status | None:
    if status == "failure" and error and any(word in error.lower() for word in _TIMEOUTS):
        return "aborted"
    return status


def _times(row: Row, start: int | None) -> tuple[float | None, float | None]:
    """Milliseconds until the answer was complete, and until its first token. Calls that do not
    stream log their end as the time of the first token."""
    end, first = when(row, "endTime"), when(row, "completionStartTime")
    latency = amount(row, "request_duration_ms")
    if latency is None and start is not None and end is not None and end >= start:
        latency = float(end - start)
    if latency is None and (seconds := amount(row, "response_time")) is not None:
        latency = seconds * 1000
    streamed = first is not None and start is not None and end is not None and start <= first < end
    return latency, float(first - start) if streamed and first and start else None


def _reasoning(response: Mapping[str, Any]) -> int | None:
    usage = table(response, "usage") if response else {}
    return count(table(usage, "completion_tokens_details"), "reasoning_tokens") if usage else None
