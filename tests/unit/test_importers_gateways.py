"""Logs of gateways and routers, field by field: LiteLLM, vLLM, OpenSquilla, OpenRouter."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from distill.curriculum.drops import RowError
from distill.curriculum.importers import (
    to_plain,
)
from distill.curriculum.records import (
    Decision,
    Outcome,
    PolicyStep,
    Prediction,
    Request,
    Served,
    Verdict,
)
from import_rows import (
    ASKED,
    DECISION_LINE,
    DECISION_ROW,
    GENERATION,
    MOMENT,
    PAYLOAD,
    REPLAY,
    REPLAY_WITH_TEXT,
    SAID,
    SPEND_LOG,
    expected,
    one,
    read,
)


def test_a_litellm_spend_log() -> None:
    assert one("litellm", SPEND_LOG) == expected(
        "litellm",
        "rq-81",
        session_id="s-7",
        ts=MOMENT - 169_000,
        tags=("team:ops",),
        request=Request(tokens_in=812),
        decision=Decision(requested_model="smart-auto"),
        served=Served(model="azure/gpt-x-mini", provider="azure", tier=0, cache_hit=False),
        outcome=Outcome(status="success", latency_ms=2000.0, tokens_out=96, cost=0.00041),
    )


def test_a_litellm_payload_with_prediction_decision_and_outcome() -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 2}'},
    }
    answer = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "add them",
        "tool_calls": [call],
    }
    assert one("litellm", PAYLOAD) == expected(
        "litellm",
        "call-1",
        ts=MOMENT,
        trace_id="t-1",
        user="u-1",
        scene="arithmetic",
        tags=("scene:arithmetic", "tier:c1"),
        request=Request(tokens_in=20),
        prediction=Prediction(
            tier=2, probs=(0.1, 0.2, 0.5, 0.2), confidence=0.5, router="night", router_version="3"
        ),
        decision=Decision(
            tier=0,
            policy=(PolicyStep(stage="explore", applied=True, detail={"epsilon": 0.1}),),
            reason="explore",
            requested_model="auto",
            propensity=0.9,
        ),
        served=Served(model="model-s", provider="acme"),
        outcome=Outcome(
            status="success",
            finish_reason="tool_calls",
            verdicts=(
                Verdict(source="program", name="exact", value=1.0),
                Verdict(source="user", name="feedback", value=1.0, label="nice"),
            ),
            complaint=False,
            latency_ms=2500.0,
            ttft_ms=400.0,
            tokens_out=7,
            reasoning_tokens=4,
            cost=0.002,
            baseline_cost=0.01,
        ),
        messages=(ASKED, answer),
        num_prompt=1,
        tools=({"type": "function", "function": {"name": "add"}},),
    )


def test_litellm_reads_json_text_like_the_objects_that_it_holds() -> None:
    names = ("messages", "response", "metadata", "request_tags", "model_parameters")
    written = {**PAYLOAD, **{name: json.dumps(PAYLOAD[name]) for name in names}}
    assert one("litellm", written) == one("litellm", PAYLOAD)


def test_litellm_keeps_neither_key_nor_address_of_the_requester() -> None:
    row = {**PAYLOAD, "api_key": "SECRET", "requester_ip_address": "192.0.2.9"}
    kept = json.dumps(to_plain(one("litellm", row)))
    assert "SECRET" not in kept
    assert "192.0.2.9" not in kept


def test_litellm_tiers_of_the_complexity_router_are_predictions() -> None:
    for tier, word in enumerate(("SIMPLE", "MEDIUM", "COMPLEX", "REASONING")):
        row = {**SPEND_LOG, "metadata": {"complexity_router": {"tier": word, "score": 0.4}}}
        found = Prediction(tier=tier, score=0.4, router="complexity_router")
        assert one("litellm", row).prediction == found
    tagged = one("litellm", {**SPEND_LOG, "request_tags": '["scene:law","tier:c3"]'})
    assert tagged.prediction is None
    assert (tagged.scene, tagged.decision) == (
        "law",
        Decision(tier=3, requested_model="smart-auto"),
    )


def test_litellm_failures_name_their_error_and_timeouts_were_aborted() -> None:
    row = {**SPEND_LOG, "status": "failure", "error_information": {"error_class": "RateLimit"}}
    failed = one("litellm", row).outcome
    assert failed is not None
    assert (failed.status, failed.error) == ("failure", "RateLimit")
    row["metadata"] = '{"error_information": {"error_class": "Timeout"}}'
    row["error_information"] = None
    late = one("litellm", row).outcome
    assert late is not None
    assert late.status == "aborted"


def test_litellm_zero_tokens_of_a_stream_are_unknown() -> None:
    turn = one("litellm", {**SPEND_LOG, "prompt_tokens": 0, "completion_tokens": 0})
    assert turn.request.tokens_in is None
    assert turn.outcome is not None
    assert turn.outcome.tokens_out is None


def test_litellm_texts_that_the_log_cut_or_hid_are_not_taken_for_texts() -> None:
    hidden = {"role": "user", "content": "redacted-by-litellm"}
    assert one("litellm", {**PAYLOAD, "messages": [hidden]}).messages is None
    cut = {"role": "user", "content": "abc... (litellm_truncated 900 chars)"}
    assert one("litellm", {**PAYLOAD, "messages": [cut]}).truncated
    assert one("litellm", {**PAYLOAD, "messages": "{}"}).truncated  # an answer to nothing
    sent = {"messages": [ASKED], "tools": [{"type": "function"}]}
    row = {**SPEND_LOG, "proxy_server_request": json.dumps(sent), "response": "5"}
    turn = one("litellm", row)
    assert (turn.messages, turn.num_prompt, turn.truncated) == ((ASKED, SAID), 1, False)
    assert turn.tools == ({"type": "function"},)


def test_litellm_calls_that_are_no_conversation_are_no_turns_and_say_so() -> None:
    with pytest.raises(RowError, match="call_type is 'aembedding'") as error:
        read("litellm", {**SPEND_LOG, "call_type": "aembedding"})
    assert error.value.reason == "no_call"


@pytest.mark.parametrize("nothing", ["None", "null", " None\n", "", None])
def test_the_text_of_a_null_is_no_answer_of_litellm(nothing: str | None) -> None:
    row = {**SPEND_LOG, "messages": [ASKED], "response": nothing, "status": "failure"}
    turn = one("litellm", row)
    assert (turn.messages, turn.num_prompt, turn.truncated) == ((ASKED,), 1, False)
    assert one("litellm", {**row, "response": "None of them."}).messages[-1]["content"]
    assert one("litellm", {**row, "messages": "null"}).messages is None


def test_a_vllm_replay_record() -> None:
    assert one("vllm_router", REPLAY) == expected(
        "vllm_router",
        "rp-5",
        session_id="s-7",
        turn_index=3,
        ts=MOMENT - 120_000,
        scene="computer science",
        request=Request(tokens_in=930),
        prediction=Prediction(confidence=0.71, router="static"),
        decision=Decision(tier=2, reason="code-hard", requested_model="auto"),
        served=Served(model="qwen-32b"),
        outcome=Outcome(
            status="success",
            verdicts=(Verdict(source="user", name="response", value=1.0, label="good"),),
            reask=False,
            tokens_out=210,
            cost=0.0009,
            baseline_cost=0.0052,
        ),
    )


def test_a_vllm_replay_record_with_bodies_signals_and_diagnostics() -> None:
    turn = one("vllm_router", REPLAY_WITH_TEXT)
    assert (turn.messages, turn.num_prompt) == ((ASKED, SAID), 1)
    assert turn.tools == ({"type": "function", "function": {"name": "add"}},)
    assert turn.prediction == Prediction(tier=3, confidence=0.71, router="static")
    assert turn.decision is not None
    (step,) = turn.decision.policy
    assert (step.stage, step.applied, step.detail["session_action"]) == ("session", True, "stay")
    assert turn.served == Served(model="qwen-32b", cache_hit=True)
    assert turn.outcome is not None
    assert (turn.outcome.complaint, turn.outcome.reask) == (True, True)
    assert (turn.outcome.finish_reason, turn.outcome.latency_ms) == ("stop", 1200.0)


def test_the_tool_trace_of_a_replay_record_stands_in_for_its_bodies() -> None:
    row = {**REPLAY_WITH_TEXT, "request_body": None, "response_body": ""}
    turn = one("vllm_router", row)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert turn.messages == (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "assistant", "content": "five"},
    )
    assert (turn.num_prompt, turn.truncated) == (3, False)


@pytest.mark.parametrize(
    "change",
    [
        {"request_body_truncated": True},
        {"tool_trace": {"steps": [], "steps_truncated": True}},
        {"request_body": '{"messages": [{"role": "us'},
        {"request_body": None, "tool_trace": None, "prompt": "and then?"},
    ],
)
def test_a_replay_record_that_was_cut_is_marked(change: dict[str, Any]) -> None:
    assert one("vllm_router", {**REPLAY_WITH_TEXT, **change}).truncated


@pytest.mark.parametrize("state", ["in_progress", "aborted", "failed", "paused"])
def test_replay_records_that_are_not_completed_wait(state: str) -> None:
    row = {**REPLAY, "lifecycle_state": state, "terminal_reason": "gone"}
    with pytest.raises(RowError) as error:
        read("vllm_router", row)
    assert (error.value.reason, state in error.value.detail) == ("not_completed", True)
    if state in ("aborted", "failed"):
        outcome = one("vllm_router", row, failures=True).outcome
        assert outcome is not None
        assert outcome.status == {"failed": "failure"}.get(state, state)
        assert outcome.error == "gone"


def test_an_opensquilla_row() -> None:
    step = PolicyStep(
        stage="confidence_gate", applied=True, detail={"threshold": 0.5, "default_tier": "c1"}
    )
    assert one("opensquilla", DECISION_ROW) == expected(
        "opensquilla",
        "d1",
        session_id="k",
        turn_index=2,
        ts=MOMENT,
        prediction=Prediction(
            tier=2, probs=(0.1, 0.31, 0.44, 0.15), confidence=0.44, router="v4_phase3"
        ),
        decision=Decision(tier=1, policy=(step,), reason="v4_phase3", requested_model="m-s"),
        served=Served(model="m-s", tier=1, fallback_hops=0),
    )


@pytest.mark.parametrize("applied", [True, False])
def test_the_complaint_of_an_opensquilla_turn_is_what_its_trail_says(applied: bool) -> None:
    trail = [{"stage": "complaint_upgrade", "applied": applied, "terms_count": 2}]
    row = {**DECISION_ROW, "trail": json.dumps(trail), "rating": "down", "flags": '["code"]'}
    turn = one("opensquilla", row)
    rated = Verdict(source="user", name="rating", value=0.0, label="down")
    assert turn.outcome == Outcome(complaint=applied, verdicts=(rated,))
    assert turn.tags == ("code",)


def test_an_opensquilla_line() -> None:
    turn = one("opensquilla", DECISION_LINE)
    assert turn.decision is not None
    assert [step.stage for step in turn.decision.policy] == ["route", "complaint_upgrade"]
    assert turn == expected(
        "opensquilla",
        "tu-1",
        session_id="k",
        ts=MOMENT,
        trace_id="tr",
        parent_id="d1",
        tags=("skill:search",),
        request=Request(prompt_sha256="ph", tools_sha256="th", tokens_in=50),
        prediction=Prediction(confidence=0.44),
        decision=replace(
            Decision(tier=1, reason="v4_phase3", requested_model="m-s"),
            policy=turn.decision.policy,
        ),
        served=Served(model="m-s", provider="acme", tier=1),
        outcome=Outcome(complaint=True, latency_ms=321.0, tokens_out=9, cost=0.003),
    )


def test_openrouter_generation_stats() -> None:
    whole = expected(
        "openrouter",
        "gen-9",
        ts=MOMENT - 60_000,
        request=Request(tokens_in=700),
        decision=Decision(requested_model="openrouter/auto"),
        served=Served(model="vendor/model-s", provider="P1"),
        outcome=Outcome(
            status="success",
            finish_reason="stop",
            latency_ms=2010.0,
            ttft_ms=610.0,
            tokens_out=88,
            reasoning_tokens=0,
            cost=0.00021,
        ),
    )
    assert one("openrouter", GENERATION) == whole
    assert one("openrouter", {"data": GENERATION}) == whole
    tried = {**GENERATION, "router": None, "cancelled": True, "provider_responses": [{}, {}, {}]}
    turn = one("openrouter", tried)
    assert turn.decision is None
    assert turn.served == Served(model="vendor/model-s", provider="P1", fallback_hops=2)
    assert turn.outcome is not None
    assert turn.outcome.status == "aborted"
