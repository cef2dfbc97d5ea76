"""Traces, field by field: OpenTelemetry and Langfuse."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from distill.curriculum.drops import RowError
from distill.curriculum.records import (
    Decision,
    Evidence,
    Outcome,
    Prediction,
    Request,
    Served,
    Verdict,
)
from import_rows import (
    API_OBSERVATION,
    ASKED,
    ENVELOPE,
    FLAT_SPAN,
    MOMENT,
    OBSERVATION,
    SAID,
    SCORE,
    SPAN,
    attributes,
    expected,
    one,
    read,
    told,
)


def test_a_flat_span() -> None:
    whole = expected(
        "otel",
        "01..",
        session_id="s-7",
        ts=MOMENT,
        trace_id="ab..",
        request=Request(tokens_in=420),
        decision=Decision(requested_model="auto"),
        served=Served(model="model-s", provider="acme"),
        outcome=Outcome(tokens_out=51),
    )
    assert one("otel", SPAN) == whole
    assert one("otel", {**SPAN, "attributes": attributes(SPAN["attributes"])}) == whole
    assert one("otel", FLAT_SPAN) == replace(whole, source_id="s2", trace_id="t2")
    routed = one("otel", SPAN, fields={"decision.tier": "app.router.tier"})
    assert routed == replace(whole, decision=Decision(tier=1, requested_model="auto"))


def test_an_envelope_of_spans() -> None:
    agent, gate, tool, inner, judged = told(read("otel", ENVELOPE))
    assert agent == ("no_call", "gen_ai.operation.name is 'invoke_agent'")
    assert tool == ("no_call", "gen_ai.operation.name is 'execute_tool'")
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'},
    }
    assert gate == expected(
        "otel",
        "gate",
        ts=MOMENT,
        trace_id="t",
        request=Request(tokens_in=11),
        decision=Decision(requested_model="auto"),
        served=Served(model="model-s", provider="acme"),
        outcome=Outcome(
            status="success",
            finish_reason="stop",
            verdicts=(
                Verdict(
                    source="user", name="user_rating", value=None, label="poor", ts=MOMENT + 3000
                ),
            ),
            latency_ms=2000.0,
            tokens_out=3,
        ),
        messages=(
            {"role": "system", "content": "Be brief."},
            ASKED,
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "use the tool",
                "tool_calls": [call],
            },
            {"role": "tool", "content": "5", "tool_call_id": "c1"},
            SAID,
        ),
        num_prompt=4,
    )
    assert inner == expected(
        "otel",
        "inner",
        ts=MOMENT + 1000,
        trace_id="t",
        parent_id="gate",  # the tool's span between the two is no call
        decision=Decision(tier=3, requested_model="large-x"),
        outcome=Outcome(status="aborted", error="timeout"),
    )
    verdict = Verdict(source="judge", name="llm_judge", label="1")
    assert judged == Evidence(source="s", ref="inner", verdict=verdict, raw_sha256="raw")


def test_an_evaluation_that_came_as_a_log_record_speaks_about_its_span() -> None:
    values = {"gen_ai.evaluation.name": "unit_test", "gen_ai.evaluation.score.label": "fail"}
    record = {
        "traceId": "t",
        "spanId": "gate",
        "eventName": "gen_ai.evaluation.result",
        "timeUnixNano": "1788228780000000000",
        "attributes": attributes(values),
    }
    (found,) = read("otel", {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]})
    verdict = Verdict(source="program", name="unit_test", value=0.0, label="fail", ts=MOMENT)
    assert found == Evidence(source="s", ref="gate", verdict=verdict, raw_sha256="raw")


def test_a_langfuse_observation() -> None:
    whole = expected(
        "langfuse",
        "o1",
        session_id="s-7",
        ts=MOMENT,
        trace_id="t1",
        request=Request(tokens_in=420),
        served=Served(model="model-s"),
        outcome=Outcome(tokens_out=51, cost=0.0001),
        messages=({"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}),
        num_prompt=1,
    )
    assert one("langfuse", OBSERVATION) == whole
    paths = {
        "prediction.confidence": "metadata.router_conf",
        "decision.tier": "metadata.tier",
    }
    assert one("langfuse", OBSERVATION, fields=paths) == replace(
        whole, prediction=Prediction(confidence=0.62), decision=Decision(tier=1)
    )
    with pytest.raises(RowError, match="an observation of type 'TOOL'") as error:
        read("langfuse", {**OBSERVATION, "type": "TOOL"})
    assert error.value.reason == "no_call"


def test_a_langfuse_observation_of_the_api() -> None:
    assert one("langfuse", API_OBSERVATION) == expected(
        "langfuse",
        "o2",
        ts=MOMENT,
        trace_id="t1",
        parent_id="o1",
        user="u",
        tags=("a",),
        request=Request(tokens_in=2),
        served=Served(model="model-s"),
        outcome=Outcome(status="failure", error="rate limited", latency_ms=1000.0, tokens_out=1),
        messages=(ASKED, SAID),
        num_prompt=1,
    )


@pytest.mark.parametrize(
    ("change", "ref", "source", "value", "label"),
    [
        ({}, "t1", "user", 1.0, None),
        ({"observation_id": "o1"}, "o1", "user", 1.0, None),
        ({"name": "quality", "value": 0.4, "data_type": "NUMERIC"}, "t1", "judge", 0.4, None),
        ({"name": "quality", "value": 4, "data_type": "NUMERIC"}, "t1", "judge", None, "4"),
        ({"name": "user-thumb", "source": "EVAL"}, "t1", "judge", 1.0, None),
        ({"name": "quality", "source": "ANNOTATION", "value": 0}, "t1", "user", 0.0, None),
        (
            {"data_type": "CATEGORICAL", "value": None, "string_value": "incorrect"},
            "t1",
            "user",
            0.0,
            "incorrect",
        ),
        ({"name": "ours", "value": 4, "data_type": "NUMERIC"}, "t1", "program", 0.75, None),
    ],
)
def test_langfuse_scores_say_who_and_how_good(
    change: dict[str, Any], ref: str, source: Any, value: float | None, label: str | None
) -> None:
    row = {**SCORE, **change}
    options = {"origins": {"ours": "program"}, "scales": {"ours": [1, 5]}}
    (found,) = read("langfuse", row, **options)
    verdict = Verdict(source=source, name=row["name"], value=value, label=label)
    assert found == Evidence(source="s", ref=ref, verdict=verdict, raw_sha256="raw")


def batch(*spans: Any) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def span(name: str, events: list[Any] | None = None, **values: Any) -> dict[str, Any]:
    said = [{"role": "assistant", "parts": [{"type": "text", "content": name}]}]
    plain = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": '[{"role": "user", "content": "hi"}]',
        "gen_ai.output.messages": said,
    } | {key.replace("__", "."): value for key, value in values.items()}
    return {"traceId": "t", "spanId": name, "attributes": plain, "events": events or []}


def test_one_damaged_span_costs_no_other_of_its_batch() -> None:
    bad = [
        span("b1", gen_ai__usage__output_tokens="many"),
        {**span("b2"), "startTimeUnixNano": "soon"},
        {**span("b3"), "attributes": [{"key": 5}]},
        7,
        span("b4", gen_ai__input__messages='[{"role": "queen"}]'),
    ]
    found = told(read("otel", batch(span("a"), *bad, span("z"))))
    assert [e if isinstance(e, tuple) else e.source_id for e in found][::6] == ["a", "z"]
    reasons = [reason for reason, _ in found[1:6]]
    assert reasons == ["wrong_type", "bad_time", "wrong_type", "wrong_type", "wrong_type"]
    assert "resourceSpans[0].scopeSpans[0].spans[2]" in found[2][1]
    broken = {"resourceSpans": [5, *batch(span("a"))["resourceSpans"], {"scopeSpans": ["x"]}]}
    first, turn, last = told(read("otel", broken))
    assert (first[0], turn.source_id, last[0]) == ("wrong_type", "a", "wrong_type")


def test_a_damaged_event_costs_no_span() -> None:
    event = "gen_ai.evaluation.result"
    events = [
        5,
        {"name": event, "attributes": {"gen_ai.evaluation.score.label": []}},
        {"name": event, "attributes": {"gen_ai.evaluation.score.label": "pass"}},
    ]
    found = told(read("otel", batch(span("a", events))))
    turn = next(entry for entry in found if not isinstance(entry, tuple))
    assert [v.value for v in turn.outcome.verdicts] == [1.0]
    assert [entry[0] for entry in found if isinstance(entry, tuple)] == ["wrong_type"] * 2


def test_a_span_on_its_own_that_is_no_call_is_a_row_error() -> None:
    for values, words in (
        ({"gen_ai.operation.name": "embeddings"}, "embeddings"),
        ({"traceloop.span.kind": "tool"}, "traceloop.span.kind is 'tool'"),
        ({"http.method": "GET"}, "a span 'GET /'"),
        ({"llm.request.type": "embedding", "gen_ai.request.model": "m"}, "a span"),
    ):
        with pytest.raises(RowError, match=words) as error:
            read("otel", {"spanId": "s", "name": "GET /", "attributes": values})
        assert error.value.reason == "no_call"


def test_the_numbered_attributes_of_openllmetry_are_a_conversation() -> None:
    values = {
        "llm.request.type": "chat",
        "gen_ai.request.model": "model-s",
        "gen_ai.prompt.10.role": "user",
        "gen_ai.prompt.10.content": '[{"type": "text", "text": "and now?"}]',
        "gen_ai.prompt.0.role": "system",
        "gen_ai.prompt.0.content": "Be brief.",
        "gen_ai.prompt.1.role": "assistant",
        "gen_ai.prompt.1.tool_calls.0.id": "c1",
        "gen_ai.prompt.1.tool_calls.0.name": "add",
        "gen_ai.prompt.1.tool_calls.0.arguments": '{"a": 2}',
        "gen_ai.prompt.2.role": "tool",
        "gen_ai.prompt.2.tool_call_id": "c1",
        "gen_ai.prompt.2.content": "5",
        "gen_ai.completion.0.content": "five",
        "gen_ai.completion.0.finish_reason": "max_tokens",
        "gen_ai.completion.1.content": "another answer",
        "llm.request.functions.0.name": "add",
    }
    turn = one("otel", {"spanId": "s", "attributes": attributes(values)})
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    assert turn.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "five"},
    )
    assert (turn.num_prompt, turn.tools) == (4, ({"name": "add"},))
    assert turn.outcome == Outcome(finish_reason="length")


def test_messages_of_langchain_are_read() -> None:
    asked = [
        {"type": "system", "content": "Be brief."},
        {"type": "human", "content": "2 + 3?", "additional_kwargs": {}},
        {"type": "ai", "content": "", "tool_calls": [{"name": "add", "args": {"a": 2}, "id": "c"}]},
        {"type": "tool", "content": "5", "tool_call_id": "c"},
    ]
    said = {"type": "ai", "content": "5", "response_metadata": {"finish_reason": "length"}}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    whole = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
        {"role": "assistant", "content": "5"},
    )
    stored = [{"type": entry.pop("type"), "data": dict(entry)} for entry in map(dict, asked)]
    generations = {"generations": [[{"text": "5", "message": said}]]}
    for read_, wrote in (
        (asked, said),
        ([asked], said),
        (stored, said),
        ({"messages": asked}, [said]),
        (json.dumps(asked), json.dumps(said)),
        (asked, generations),
    ):
        turn = one("langfuse", {**OBSERVATION, "input": read_, "output": wrote})
        assert (turn.messages, turn.num_prompt) == (whole, 4)
        assert turn.outcome.finish_reason == "length"
    lc = {"lc": 1, "type": "constructor", "id": ["langchain", "HumanMessage"], "kwargs": asked[1]}
    assert one("chat", {"messages": [lc]}).messages == (whole[1],)


def test_a_null_output_and_a_score_of_a_session_are_nothing_of_a_turn() -> None:
    turn = one("langfuse", {**OBSERVATION, "output": "null"})
    assert turn.messages == ({"role": "user", "content": "..."},)
    alone = {**SCORE, "trace_id": None, "session_id": "s"}
    with pytest.raises(RowError, match="a score of a whole session") as error:
        read("langfuse", alone)
    assert error.value.reason == "no_call"
