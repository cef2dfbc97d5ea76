"""OpenTelemetry GenAI: OTLP-JSON envelopes, single spans and flat rows of attributes.

Spans of the operations chat, text_completion and generate_content are turns. Others, such as
execute_tool or invoke_agent, only surround them: inside an envelope the parent of a turn is the
nearest call above it. Evaluation events become verdicts of their turn, or evidence where they stand
elsewhere. Old names (`gen_ai.system`, `usage.prompt_tokens`) are read too. Routing has no standard
attribute: the option `fields` names those of one's own, {"decision.tier": "app.router.tier"}.
The conventions are in development; attributes that they may rename are read under both names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distill.curriculum.importers.base import Context, Found, Row, digest_of
from distill.curriculum.importers.layers import made
from distill.curriculum.importers.messages import (
    Message,
    answer,
    conversation,
    tool_definitions,
)
from distill.curriculum.importers.otlp import Span, spans_of
from distill.curriculum.importers.values import (
    amount,
    count,
    ident,
    number,
    parsed,
    strings,
    text,
)
from distill.curriculum.importers.verdicts import grade, origin_of
from distill.curriculum.records import (
    Decision,
    Outcome,
    Request,
    Served,
    Status,
    Verdict,
)

CALLS = frozenset({"chat", "text_completion", "generate_content", "completion"})
EVALUATION = "gen_ai.evaluation.result"
DETAILS = "gen_ai.client.inference.operation.details"
_ENVELOPES = ("resourceSpans", "resource_spans", "resourceLogs", "resource_logs")
_SIGNS = (
    "gen_ai.operation.name",
    "gen_ai.system",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "gen_ai.evaluation.name",
)
_SPAN_IDS = ("spanId", "span_id", "context")
_CANCELLED = ("cancel", "timeout", "deadline")


class OpenTelemetry:
    name = "otel"

    def recognises(self, row: Row) -> bool:
        return (
            any(name in row for name in _ENVELOPES)
            or ("attributes" in row and any(name in row for name in _SPAN_IDS))
            or any(name in row for name in _SIGNS)
        )

    def read(self, row: Row, context: Context) -> Iterable[Found]:
        """Turns and evidence of all spans and events of a row."""
        spans = spans_of(row)
        calls = {span.id: _is_call(span) for span in spans if span.id}
        parents = {span.id: span.parent for span in spans if span.id}
        found: list[Found] = []
        for span in spans:
            if _is_call(span):
                found.append(_turn(span, _call_above(span, calls, parents), context))
                continue
            if "gen_ai.evaluation.name" in span.attributes:
                found += _evidence(span.attributes, span, context, span.time)
            for event, attributes, time in span.events:
                if event == EVALUATION:
                    found += _evidence(attributes, span, context, time)
        return found


def _is_call(span: Span) -> bool:
    operation = span.attributes.get("gen_ai.operation.name")
    if operation is None:
        legacy = "gen_ai.request.model" in span.attributes
        return legacy and "gen_ai.evaluation.name" not in span.attributes
    return isinstance(operation, str) and operation in CALLS


def _call_above(
    span: Span, calls: Mapping[str, bool], parents: Mapping[str, str | None]
) -> str | None:
    """The nearest call that a span happened inside of. A parent out of sight stays as it is."""
    above, seen = span.parent, {span.id}
    while above is not None and above in calls and not calls[above] and above not in seen:
        seen.add(above)
        above = parents[above]
    return None if above in seen else above


def _turn(span: Span, parent: str | None, context: Context) -> Found:
    attributes = _with_details(span)
    read, said, finish = _conversation(attributes)
    asked = text(attributes, "gen_ai.request.model")
    model = text(attributes, "gen_ai.response.model")
    defined = attributes.get("gen_ai.tool.definitions")
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
        outcome=_outcome(span, attributes, finish, context.options),
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


def _conversation(attributes: Row) -> tuple[list[Message], list[Message], str | None]:
    """Input, output and the reason why the output ended."""
    read = _instructions(attributes)
    name = "gen_ai.input.messages" if "gen_ai.input.messages" in attributes else "gen_ai.prompt"
    read += conversation(attributes.get(name), name)
    name = "gen_ai.output.messages"
    name = name if name in attributes else "gen_ai.completion"
    said = answer(attributes.get(name), name)
    reasons = strings(attributes, "gen_ai.response.finish_reasons")
    return read, said, reasons[0] if reasons else None


def _instructions(attributes: Row) -> list[Message]:
    """System instructions are parts without a role."""
    name = "gen_ai.system_instructions"
    value = attributes.get(name)
    if not value:
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(value, name)
    return conversation([{"role": "system", "content": value}], name)


def _outcome(
    span: Span, attributes: Row, finish: str | None, options: Mapping[str, Any]
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
    verdicts = [
        _verdict(inner, options, time) for event, inner, time in span.events if event == EVALUATION
    ]
    return made(
        Outcome,
        status=status,
        finish_reason=finish,
        error=error,
        verdicts=tuple(verdicts),
        latency_ms=latency,
        ttft_ms=None if first is None else first * 1000,
        tokens_out=count(
            attributes, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"
        ),
        reasoning_tokens=count(attributes, "gen_ai.usage.reasoning.output_tokens"),
        cost=number(attributes, "gen_ai.usage.cost"),
    )


def _verdict(attributes: Row, options: Mapping[str, Any], ts: int | None) -> Verdict:
    name = text(attributes, "gen_ai.evaluation.name") or "evaluation"
    label = text(attributes, "gen_ai.evaluation.score.label")
    value, written = grade(attributes.get("gen_ai.evaluation.score.value"), name, options)
    if value is None:
        value, _ = grade(label, name, options)
    return Verdict(
        source=origin_of(name, options), name=name, value=value, label=label or written, ts=ts
    )


def _evidence(attributes: Row, span: Span, context: Context, ts: int | None) -> list[Found]:
    """An evaluation beside its turn speaks about the call that it hangs under or names."""
    ref = span.about or ident(attributes, "gen_ai.response.id") or span.trace
    if ref is None:
        return []
    return [context.evidence(ref, _verdict(attributes, context.options, ts))]
