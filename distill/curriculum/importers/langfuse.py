"""Langfuse: observations and scores, of bulk exports (snake case) and of the API (camel case).

A GENERATION is a turn; other observations only surround it. Routing has no place of its own: the
option `fields` says where in `metadata` it stands, such as {"decision.tier": "metadata.tier"}.
Scores speak about an observation or a whole trace. EVAL scores come from judging models and
ANNOTATION from people; for those of the API the name says it (see `verdicts.origin_of`), and a name
that gives nothing away counts as a judge. What a number means stands in no row: the name decides,
or `scales` (see `verdicts.grade`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from distill.curriculum.clock import shorten
from distill.curriculum.drops import RowError
from distill.curriculum.importers.base import Context, Found, Row, digest_of
from distill.curriculum.importers.endings import finish_of
from distill.curriculum.importers.layers import made
from distill.curriculum.importers.messages import (
    Message,
    answer,
    conversation,
    tool_call,
    tool_definitions,
    written,
)
from distill.curriculum.importers.values import (
    amount,
    count,
    ident,
    items,
    strings,
    table,
    text,
    when,
)
from distill.curriculum.importers.verdicts import scored
from distill.curriculum.records import Outcome, Request, Served

_KINDS = frozenset(
    [
        "SPAN",
        "GENERATION",
        "EVENT",
        "AGENT",
        "TOOL",
        "CHAIN",
        "RETRIEVER",
        "EVALUATOR",
        "EMBEDDING",
        "GUARDRAIL",
    ]
)
_SAID = {"EVAL": "judge", "ANNOTATION": "user"}


class Langfuse:
    name = "langfuse"

    def recognises(self, row: Row) -> bool:
        return _is_score(row) or (
            ("trace_id" in row or "traceId" in row)
            and isinstance(row.get("type"), str)
            and row["type"] in _KINDS
        )

    def read(self, row: Row, context: Context) -> Iterable[Found]:
        """A turn of a generation, or evidence of a score. RowError("no_call") for another
        observation, and for a score of a whole session, which means no turn."""
        if _is_score(row):
            return _score(row, context)
        kind = text(row, "type")
        if kind not in ("GENERATION", None):
            raise RowError("no_call", f"an observation of type {shorten(kind)}")
        read, said = _conversation(row)
        usage = table(row, "usage_details", "usageDetails", "usage")
        error = text(row, "status_message", "statusMessage")
        level = text(row, "level")
        start, end = when(row, "start_time", "startTime"), when(row, "end_time", "endTime")
        first = when(row, "completion_start_time", "completionStartTime")
        latency, ttft = (
            amount(row, "latency"),
            amount(row, "time_to_first_token", "timeToFirstToken"),
        )
        model = text(row, "provided_model_name", "providedModelName", "model")
        defined = row.get("tool_definitions") or row.get("toolDefinitions")
        turn = context.turn(
            row,
            source_id=ident(row, "id") or digest_of(row),
            format=self.name,
            session_id=ident(row, "session_id", "sessionId"),
            ts=start,
            trace_id=ident(row, "trace_id", "traceId"),
            parent_id=ident(row, "parent_observation_id", "parentObservationId"),
            user=ident(row, "user_id", "userId"),
            tags=strings(row, "tags"),
            request=Request(tokens_in=count(usage, "input", "prompt_tokens", "promptTokens")),
            served=made(Served, model=model, tier=context.tiers.of_model(model)),
            outcome=made(
                Outcome,
                status="failure" if level == "ERROR" else "success" if level else None,
                finish_reason=finish_of(row.get("output")),
                error=(error or level) if level == "ERROR" else None,
                latency_ms=_elapsed(latency, start, end),
                ttft_ms=_elapsed(ttft, start, first),
                tokens_out=count(usage, "output", "completion_tokens", "completionTokens"),
                reasoning_tokens=count(usage, "output_reasoning_tokens", "reasoning"),
                cost=amount(row, "total_cost", "totalCost", "calculatedTotalCost"),
            ),
            messages=(*read, *said) or None,
            num_prompt=len(read) if read or said else None,
            tools=tool_definitions(defined, "tool_definitions") if defined else (),
        )
        return [turn]


def _is_score(row: Row) -> bool:
    return (
        "name" in row
        and ("value" in row or "string_value" in row or "stringValue" in row)
        and ("data_type" in row or "dataType" in row or "source" in row)
        and any(name in row for name in ("trace_id", "traceId", "observation_id", "observationId"))
    )


def _elapsed(seconds: float | None, start: int | None, end: int | None) -> float | None:
    """Milliseconds from the logged seconds, else from two times."""
    if seconds is not None:
        return seconds * 1000
    return float(end - start) if start is not None and end is not None and end >= start else None


def _text(row: Row, name: str, read: Callable[[Any, str], list[Message]]) -> list[Message]:
    value = row.get(name)
    return [] if value == "null" else read(value, name)


def _conversation(row: Row) -> tuple[list[Message], list[Message]]:
    """Input and output; calls of tools may stand beside the output."""
    read, said = _text(row, "input", conversation), _text(row, "output", answer)
    calls = items(row, "tool_calls", "toolCalls")
    if calls and not any("tool_calls" in entry for entry in said):
        made_calls = [tool_call(call, f"tool_calls[{i}]") for i, call in enumerate(calls)]
        if not said:
            said = [{"role": "assistant", "content": ""}]
        said[-1]["tool_calls"] = made_calls
    return read, said


def _score(row: Row, context: Context) -> list[Found]:
    ref = ident(row, "observation_id", "observationId") or ident(row, "trace_id", "traceId")
    if ref is None:
        raise RowError("no_call", "a score of a whole session")
    name = text(row, "name") or "score"
    kind = text(row, "data_type", "dataType")
    word = text(row, "string_value", "stringValue")
    value = row.get("value")
    if kind == "CATEGORICAL" and name not in (context.options.get("scales") or {}):
        if word is None and value is not None:
            word = value if isinstance(value, str) else f"category {written(value, 'value')}"
        value = None  # the number of a category is its place in a list, no grade
    verdict = scored(
        name,
        value,
        word,
        context.options,
        said=_SAID.get(text(row, "source") or ""),
        boolean=kind == "BOOLEAN",
        ts=when(row, "timestamp", "created_at", "createdAt"),
    )
    return [context.evidence(ref, verdict)]
