"""Traces, field by field: OpenTelemetry and Langfuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

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
    gate, inner, judged = read("otel", ENVELOPE)
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
                    source="user", name="user_rating", value=0.25, label="poor", ts=MOMENT + 3000
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
    verdict = Verdict(source="judge", name="llm_judge", value=1.0)
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
    assert read("langfuse", {**OBSERVATION, "type": "TOOL"}) == []


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
