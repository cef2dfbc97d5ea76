"""OpenTelemetry GenAI: OTLP-JSON envelopes, single spans and flat rows of attributes.

Spans of the operations chat, text_completion and generate_content are turns. Others, such as
execute_tool or invoke_agent, only surround them: inside an envelope the parent of a turn is the
nearest call above it. Evaluation events become verdicts of their turn, or evidence where they stand
elsewhere. Old names (`gen_ai.system`, `usage.prompt_tokens`, `gen_ai.prompt.0.content`) are read
too. Routing has no standard attribute: the option `fields` names those of one's own,
{"decision.tier": "app.router.tier"}. The conventions are in development; attributes that they may
rename are read under both names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distill.curriculum.clock import shorten
from distill.curriculum.drops import RowError
from distill.curriculum.importers.base import Context, Result, Row, digest_of
from distill.curriculum.importers.layers import made
from distill.curriculum.importers.messages import tool_definitions
from distill.curriculum.importers.otel_text import TOOLS, conversation_of, numbered
from distill.curriculum.importers.otlp import ENVELOPES, Span, spans_of
from distill.curriculum.importers.values import amount, count, ident, number, text
from distill.curriculum.importers.verdicts import scored
from distill.curriculum.records import (
    Decision,
    Evidence,
    Outcome,
    Request,
    RoutingTurn,
    Served,
    Status,
    Verdict,
)

CALLS = frozenset({"chat", "text_completion", "generate_content", "completion"})
EVALUATION = "gen_ai.evaluation.result"
DETAILS = "gen_ai.client.inference.operation.details"
_LEGACY = ("gen_ai.request.model", "gen_ai.prompt.0.content", "gen_ai.completion.0.content")
_SIGNS = (
    "gen_ai.operation.name",
    "gen_ai.system",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "gen_ai.evaluation.name",
    "gen_ai.completion.0.content",
)
_SPAN_IDS = ("spanId", "span_id", "context")
_CANCELLED = ("cancel", "timeout", "deadline")


class OpenTelemetry:
    name = "otel"

    def recognises(self, row: Row) -> bool:
        return (
            any(name in row for name in ENVELOPES)
            or ("attributes" in row and any(name in row for name in _SPAN_IDS))
            or any(name in row for name in _SIGNS)
        )

    def read(self, row: Row, context: Context) -> Iterable[Result]:
        """Turns and evidence of all spans and events of a row.

        Of an envelope, the RowError of each span that cannot be used or is about no model call
        stands in its place; a row that is one span raises it.
        """
        wrapped = any(name in row for name in ENVELOPES)
        spans = spans_of(row)
        known = [span for span in spans if isinstance(span, Span) and span.id]
        calls = {span.id: _is_call(span) for span in known if span.id}
        parents = {span.id: span.parent for span in known if span.id}
        for span in spans:
            if isinstance(span, RowError):
                yield span
                continue
            yield from span.faults
            try:
                found = _found(span, _call_above(span, calls, parents), context)
            except RowError as error:
                if not wrapped:
                    raise
                found = [error]
            yield from found


def _found(span: Span, parent: str | None, context: Context) -> list[Result]:
    """What one span gives. RowError("no_call") where that is nothing."""
    told = [(inner, time) for event, inner, time in span.events if event == EVALUATION]
    verdicts, errors = _verdicts(told, context.options)
    if _is_call(span):
        return [_turn(span, parent, verdicts, context), *errors]
    if "gen_ai.evaluation.name" in span.attributes:
        told.insert(0, (span.attributes, span.time))
    if not told:
        raise RowError("no_call", _what(span))
    found: list[Result] = []
    for attributes, time in told:
        try:
            found.append(_evidence(attributes, span, context, time))
        except RowError as error:
            found.append(error)
    return found


def _what(span: Span) -> str:
    """What a span is about that is no call."""
    for name in ("gen_ai.operation.name", "traceloop.span.kind", "openinference.span.kind"):
        value = span.attributes.get(name)
        if isinstance(value, str) and value:
            return f"{name} is {shorten(value)}"
    return f"{'an event' if span.alone else 'a span'} {shorten(span.name)}"


def _is_call(span: Span) -> bool:
    attributes = span.attributes
    operation = attributes.get("gen_ai.operation.name")
    if operation is not None:
        return isinstance(operation, str) and operation in CALLS
    if "gen_ai.evaluation.name" in attributes:
        return False
    kind = attributes.get("llm.request.type")
    if isinstance(kind, str) and kind not in ("chat", "completion", "unknown"):
        return False
    return any(name in attributes for name in _LEGACY)


def _call_above(
    span: Span, calls: Mapping[str, bool], parents: Mapping[str, str | None]
) -> str | None:
    """The nearest call that a span happened inside of. A parent out of sight stays as it is."""
    above, seen = span.parent, {span.id}
    while above is not None and above in calls and not calls[above] and above not in seen:
        seen.add(above)
        above = parents[above]
    return None if above in seen else above


def _turn(
    span: Span, parent: str | None, verdicts: tuple[Verdict, ...], context: Context
) -> RoutingTurn:
    attributes = _with_details(span)
    read, said, finish = conversation_of(attributes)
    asked = text(attributes, "gen_ai.request.model")
    model = text(attributes, "gen_ai.response.model")
    defined = attributes.get("gen_ai.tool.definitions") or numbered(attributes, TOOLS)
    return context.turn(
        attributes,
        source_id=span.id or ident(attributes, "gen_ai.response.id") or digest_of(attributes),
        format=OpenTelemetry.name,
        session_id=ident(attributes, "gen_ai.conversation.id", "session.id"),
        ts=span.time,
        trace_id=span.trace,
        parent_id=parent,
        user=ident(attributes, "enduser.id", "user.id"),
        request=Request(
            tokens_in=count(attributes, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
        ),
        decision=made(Decision, tier=context.tiers.of_model(asked), requested_model=asked),
        served=made(
            Served,
            model=model,
            provider=text(attributes, "gen_ai.provider.name", "gen_ai.system") if model else None,
            tier=context.tiers.of_model(model),
        ),
        outcome=_outcome(span, attributes, finish, verdicts),
        messages=(*read, *said) or None,
        num_prompt=len(read) if read or said else None,
        tools=tool_definitions(defined, "gen_ai.tool.definitions") if defined else (),
        truncated=bool(said) and not read,
    )


def _with_details(span: Span) -> Mapping[str, Any]:
    """The attributes, with those of the event that holds the content below them."""
    attributes = span.attributes
    for event, inner, _ in span.events:
        if event == DETAILS:
            attributes = {**inner, **attributes}
    return attributes


def _outcome(
    span: Span, attributes: Row, finish: str | None, verdicts: tuple[Verdict, ...]
) -> Outcome | None:
    error = text(attributes, "error.type")
    status: Status | None = span.status
    if error is not None:
        low = error.lower()
        status = "aborted" if any(word in low for word in _CANCELLED) else "failure"
    latency = None
    if span.time is not None and span.end is not None and span.end >= span.time:
        latency = float(span.end - span.time)
    first = amount(attributes, "gen_ai.server.time_to_first_token")
    return made(
        Outcome,
        status=status,
        finish_reason=finish,
        error=error,
        verdicts=verdicts,
        latency_ms=latency,
        ttft_ms=None if first is None else first * 1000,
        tokens_out=count(
            attributes, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"
        ),
        reasoning_tokens=count(attributes, "gen_ai.usage.reasoning.output_tokens"),
        cost=number(attributes, "gen_ai.usage.cost"),
    )


def _verdicts(
    told: Iterable[tuple[Row, int | None]], options: Mapping[str, Any]
) -> tuple[tuple[Verdict, ...], list[RowError]]:
    """Evaluations inside a call; of those that cannot be read the errors."""
    found, errors = [], []
    for attributes, time in told:
        try:
            found.append(_verdict(attributes, options, time))
        except RowError as error:
            errors.append(error)
    return tuple(found), errors


def _verdict(attributes: Row, options: Mapping[str, Any], ts: int | None) -> Verdict:
    return scored(
        text(attributes, "gen_ai.evaluation.name") or "evaluation",
        attributes.get("gen_ai.evaluation.score.value"),
        text(attributes, "gen_ai.evaluation.score.label"),
        options,
        ts=ts,
    )


def _evidence(attributes: Row, span: Span, context: Context, ts: int | None) -> Evidence:
    """An evaluation beside its turn speaks about the call that it hangs under or names."""
    ref = span.about or ident(attributes, "gen_ai.response.id") or span.trace
    if ref is None:
        raise RowError("missing_field", "the span or the response that an evaluation is about")
    return context.evidence(ref, _verdict(attributes, context.options, ts))
