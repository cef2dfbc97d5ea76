"""Rows of every format as its documentation shows them, for the tests of the importers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from distill.curriculum.drops import RowError
from distill.curriculum.importers import IMPORTERS, Context
from distill.curriculum.records import RoutingTurn
from distill.curriculum.tiers import Tiers

TIERS = Tiers(models={"azure/gpt-x-mini": 0, "large-x": 3, "m-s": 1})
CONTEXT = Context(source="s", tiers=TIERS, raw_sha256="raw")
MOMENT = 1_788_228_780_000
"""2026-09-01 02:13:00 UTC."""


def read(name: str, row: Any, **options: Any) -> list[Any]:
    return list(IMPORTERS[name].read(row, replace(CONTEXT, options=options)))


def told(found: list[Any]) -> list[Any]:
    """What was read, comparable: an error as its reason and detail."""
    return [(e.reason, e.detail) if isinstance(e, RowError) else e for e in found]


def good(found: list[Any]) -> list[Any]:
    """What was read without the errors of single records."""
    return [entry for entry in found if not isinstance(entry, RowError)]


def one(name: str, row: Any, **options: Any) -> RoutingTurn:
    (turn,) = read(name, row, **options)
    assert isinstance(turn, RoutingTurn)
    return turn


def expected(format: str, source_id: str, **values: Any) -> RoutingTurn:
    return RoutingTurn(source="s", source_id=source_id, format=format, raw_sha256="raw", **values)


ASKED = {"role": "user", "content": "What is 2 + 3?"}
SAID = {"role": "assistant", "content": "5"}

SPEND_LOG: dict[str, Any] = {
    "request_id": "rq-81", "call_type": "acompletion", "model_group": "smart-auto",
    "model": "azure/gpt-x-mini", "custom_llm_provider": "azure", "prompt_tokens": 812,
    "completion_tokens": 96, "spend": 0.00041, "startTime": "2026-09-01T02:10:11Z",
    "endTime": "2026-09-01T02:10:13Z", "session_id": "s-7", "status": "success",
    "cache_hit": "False", "request_tags": ["team:ops"], "messages": "{}",
}  # fmt: skip
PAYLOAD: dict[str, Any] = {
    "id": "call-1", "trace_id": "t-1", "call_type": "completion", "stream": True,
    "response_cost": 0.002, "status": "success", "custom_llm_provider": "acme",
    "prompt_tokens": 20, "completion_tokens": 7, "startTime": 1788228780.0,
    "endTime": 1788228782.5, "completionStartTime": 1788228780.4, "response_time": 0.4,
    "model": "model-s", "model_group": "auto", "cache_hit": None, "end_user": "u-1",
    "request_tags": ["scene:arithmetic", "tier:c1"], "messages": [ASKED],
    "metadata": {
        "user_api_key_hash": "SECRET", "requester_ip_address": "192.0.2.9",
        "spend_logs_metadata": {
            "router": {
                "tier": "c2", "probs": [0.1, 0.2, 0.5, 0.2], "confidence": 0.5, "name": "night",
                "version": 3, "decided_tier": "c0", "propensity": 0.9, "reason": "explore",
                "policy": [{"stage": "explore", "applied": True, "epsilon": 0.1}],
            },
            "outcome": {
                "verdicts": [{"source": "program", "name": "exact", "value": 1}],
                "complaint": False, "baseline_cost": 0.01,
            },
        },
        "feedback": {"thumb": 1, "label": "nice"},
    },
    "model_parameters": {"tools": [{"type": "function", "function": {"name": "add"}}]},
    "response": {
        "choices": [{
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant", "content": None, "reasoning_content": "add them",
                "tool_calls": [{"id": "c1", "type": "function",
                                "function": {"name": "add", "arguments": "{\"a\": 2}"}}],
            },
        }],
        "usage": {"completion_tokens_details": {"reasoning_tokens": 4}},
    },
}  # fmt: skip
REPLAY: dict[str, Any] = {
    "id": "rp-5", "timestamp": "2026-09-01T02:11:00Z", "session_id": "s-7", "turn_index": 3,
    "decision": "code-hard", "decision_tier": 2, "category": "computer science",
    "original_model": "auto", "selected_model": "qwen-32b", "confidence_score": 0.71,
    "selection_method": "static", "signals": {"complexity": ["hard"], "reask": []},
    "outcomes": [{"source": "user", "target": "response", "verdict": "good", "score": 1.0}],
    "lifecycle_state": "completed", "prompt_tokens": 930, "completion_tokens": 210,
    "actual_cost": 0.0009, "baseline_cost": 0.0052,
}  # fmt: skip
REPLAY_WITH_TEXT: dict[str, Any] = {
    **REPLAY,
    "signals": {"user_feedback": ["wrong_answer"], "reask": ["r1"]},
    "route_diagnostics": {"proposal_model": "large-x", "session_action": "stay"},
    "request_body": json.dumps({"model": "auto", "messages": [ASKED]}),
    "response_body": json.dumps({"choices": [{"message": SAID, "finish_reason": "stop"}]}),
    "response_status": 200, "duration_ms": 1200, "from_cache": True,
    "tool_trace": {"steps": [
        {"type": "user_input", "role": "user", "text": "hi"},
        {"type": "assistant_tool_call", "role": "assistant", "tool_name": "add",
         "tool_call_id": "c1", "arguments": "{}"},
        {"type": "client_tool_result", "role": "tool", "tool_call_id": "c1", "raw_output": "5"},
        {"type": "assistant_final_response", "role": "assistant", "text": "five"},
    ], "steps_truncated": False},
    "tool_definitions": [{"type": "function", "function": {"name": "add"}}],
}  # fmt: skip
DECISION_ROW: dict[str, Any] = {
    "decision_id": "d1", "session_key": "k", "turn_index": 2, "ts_ms": 1788228780000,
    "classifier": "v4_phase3", "proposed_tier": "c2", "confidence": 0.44,
    "probs": "[0.1,0.31,0.44,0.15]", "final_tier": "c1", "source": "v4_phase3",
    "trail": '[{"stage":"confidence_gate","applied":true,"threshold":0.5,"default_tier":"c1"}]',
    "executed_kind": "single", "fallback_hops": 0, "requested_model": "m-s",
    "executed_model": "m-s",
}  # fmt: skip
DECISION_LINE: dict[str, Any] = {
    "schema_version": 16, "turn_id": "tu-1", "session_key": "k", "session_id": "sid",
    "decision_id": "d1", "prompt_hash": "ph", "tool_list_hash": "th", "tokens_input": 50,
    "tokens_output": 9, "model": "m-s", "provider": "acme", "latency_ms": 321,
    "ts": "2026-09-01T02:13:00Z", "trace_id": "tr", "skills_invoked": ["search"],
    "pipeline_steps": [
        {"step_name": "route", "applied": True, "routed_tier": "c1", "routing_source": "v4_phase3",
         "confidence": 0.44},
        {"step_name": "complaint_upgrade", "applied": True},
    ],
    "savings": {"routed_model": "m-s", "baseline_model": "m-l", "routing_confidence": 0.44,
                "cost_usd": 0.003},
}  # fmt: skip
SPAN: dict[str, Any] = {
    "traceId": "ab..", "spanId": "01..", "parentSpanId": "", "name": "chat model-s",
    "startTimeUnixNano": "1788228780000000000",
    "attributes": {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "acme",
        "gen_ai.request.model": "auto", "gen_ai.response.model": "model-s",
        "gen_ai.usage.input_tokens": 420, "gen_ai.usage.output_tokens": 51,
        "gen_ai.conversation.id": "s-7", "app.router.tier": "c1",
    },
}  # fmt: skip


def wrapped(value: Any) -> dict[str, Any]:
    """A value as OTLP-JSON wraps it."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [wrapped(entry) for entry in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": attributes(value)}}
    return {"stringValue": value}


def attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": wrapped(value)} for key, value in values.items()]


PARTS_IN = [
    {"role": "user", "parts": [{"type": "text", "content": "What is 2 + 3?"}]},
    {"role": "assistant", "parts": [{"type": "reasoning", "content": "use the tool"},
                                    {"type": "tool_call", "id": "c1", "name": "add",
                                     "arguments": {"a": 2, "b": 3}}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "5"}]},
]  # fmt: skip
PARTS_OUT = [
    {"role": "assistant", "parts": [{"type": "text", "content": "5"}], "finish_reason": "stop"}
]
ENVELOPE: dict[str, Any] = {"resourceSpans": [{"scopeSpans": [{"spans": [
    {"traceId": "t", "spanId": "agent", "startTimeUnixNano": "1788228780000000000",
     "attributes": attributes({"gen_ai.operation.name": "invoke_agent"})},
    {"traceId": "t", "spanId": "gate", "startTimeUnixNano": "1788228780000000000",
     "endTimeUnixNano": "1788228782000000000", "parentSpanId": "agent",
     "attributes": attributes({"gen_ai.operation.name": "chat", "gen_ai.system": "acme",
                               "gen_ai.request.model": "auto", "gen_ai.response.model": "model-s",
                               "gen_ai.usage.prompt_tokens": 11,
                               "gen_ai.usage.completion_tokens": 3,
                               "gen_ai.response.finish_reasons": ["stop"],
                               "gen_ai.system_instructions": json.dumps(
                                   [{"type": "text", "content": "Be brief."}]),
                               "gen_ai.input.messages": json.dumps(PARTS_IN),
                               "gen_ai.output.messages": json.dumps(PARTS_OUT)}),
     "status": {"code": 1},
     "events": [{"name": "gen_ai.evaluation.result", "timeUnixNano": "1788228783000000000",
                 "attributes": attributes({"gen_ai.evaluation.name": "user_rating",
                                           "gen_ai.evaluation.score.value": 0.25,
                                           "gen_ai.evaluation.score.label": "poor"})}]},
    {"traceId": "t", "spanId": "tool", "parentSpanId": "gate",
     "attributes": attributes({"gen_ai.operation.name": "execute_tool"})},
    {"traceId": "t", "spanId": "inner", "parentSpanId": "tool",
     "startTimeUnixNano": "1788228781000000000",
     "attributes": attributes({"gen_ai.operation.name": "chat", "gen_ai.request.model": "large-x",
                               "error.type": "timeout"})},
    {"traceId": "t", "spanId": "ev", "parentSpanId": "inner",
     "attributes": attributes({"gen_ai.operation.name": "evaluate"}),
     "events": [{"name": "gen_ai.evaluation.result",
                 "attributes": attributes({"gen_ai.evaluation.name": "llm_judge",
                                           "gen_ai.evaluation.score.value": 1.0})}]},
]}]}]}  # fmt: skip
FLAT_SPAN: dict[str, Any] = {
    "trace_id": "t2", "span_id": "s2", "start_time": "2026-09-01T02:13:00Z",
    **SPAN["attributes"],
}  # fmt: skip
OBSERVATION: dict[str, Any] = {
    "id": "o1", "trace_id": "t1", "type": "GENERATION", "name": "llm",
    "start_time": "2026-09-01 02:13:00.000000", "provided_model_name": "model-s",
    "input": '[{"role":"user","content":"..."}]', "output": "...",
    "usage_details": {"input": 420, "output": 51}, "total_cost": 0.0001, "session_id": "s-7",
    "metadata": {"tier": "c1", "router_conf": "0.62"},
}  # fmt: skip
API_OBSERVATION: dict[str, Any] = {
    "id": "o2", "traceId": "t1", "type": "GENERATION", "parentObservationId": "o1",
    "startTime": "2026-09-01T02:13:00Z", "endTime": "2026-09-01T02:13:01Z", "level": "ERROR",
    "statusMessage": "rate limited", "model": "model-s", "input": [ASKED],
    "output": {"role": "assistant", "content": "5"}, "userId": "u",
    "usageDetails": {"input": 2, "output": 1}, "tags": ["a"],
}  # fmt: skip
SCORE: dict[str, Any] = {
    "id": "sc1", "trace_id": "t1", "name": "user-thumb", "value": 1, "data_type": "BOOLEAN",
    "source": "API",
}  # fmt: skip
GENERATION: dict[str, Any] = {
    "id": "gen-9", "created_at": "2026-09-01T02:12:00Z", "model": "vendor/model-s",
    "router": "openrouter/auto", "provider_name": "P1", "tokens_prompt": 700,
    "tokens_completion": 88, "native_tokens_reasoning": 0, "latency": 610,
    "generation_time": 1400, "finish_reason": "stop", "total_cost": 0.00021, "cancelled": False,
}  # fmt: skip
VOTE_100K: dict[str, Any] = {
    "question_id": "q1", "model_a": "small", "model_b": "large", "winner": "model_b", "turn": 1,
    "language": "English", "tstamp": 1.788e9, "is_code": True, "judge_hash": "j",
    "conversation_a": [ASKED, SAID], "conversation_b": [ASKED, SAID],
    "dedup_tag": {"high_freq": False, "sampled": True},
}  # fmt: skip
VOTE_55K: dict[str, Any] = {
    "id": 30192, "model_a": "small", "model_b": "large",
    "prompt": '["Is it?", "Why?"]', "response_a": '["Yes.", null]',
    "response_b": '["No.", "So."]', "winner_model_a": 0, "winner_model_b": 0, "winner_tie": 1,
}  # fmt: skip
VOTE_140K: dict[str, Any] = {
    "id": "v3", "model_a": "small", "model_b": "large", "winner": "both_bad",
    "evaluation_session_id": "e", "evaluation_order": 1, "timestamp": "2026-09-01T02:13:00",
    "language": "en", "is_code": False,
    "conversation_a": [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "image": None}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Ho", "image": None}]},
    ],
    "conversation_b": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hey"}]},
    ],
    "category_tag": {"math_v0.1": {"math": True}},
}  # fmt: skip
BENCH: dict[str, Any] = {
    "sample_id": "gsm.12", "prompt": "How many?", "eval_name": "grade-school-math",
    "small-7b": 0.0, "small-7b|total_cost": 0.00002, "large-x": 1.0,
    "large-x|total_cost": 0.0011, "large-x|model_response": "12",
    "oracle_model_to_route_to": "large-x",
}  # fmt: skip
WIDE: dict[str, Any] = {"prompt": "Sum 1..100", "mixtral": "1", "gpt-4": "1", "mf": "0.083100"}
CHAT_LINE: dict[str, Any] = {
    "id": 7, "messages": [{"role": "system", "content": "Be kind."}, ASKED, SAID],
    "model": "model-s", "rating": "up", "timestamp": 1788228780, "session_id": "s", "user": "u",
}  # fmt: skip
PROMPT_LINE: dict[str, Any] = {"prompt": "2 + 3?", "completion": '{"sum": 5}'}
SHARED_CHAT: dict[str, Any] = {
    "id": "g",
    "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}],
}
OWN_LOG: dict[str, Any] = {
    "meta": {"conv": "s-1", "at": "2026-09-01T02:13:00Z"}, "uid": 5,
    "payload": json.dumps({"messages": [ASKED]}), "reply": "5", "model": "model-s",
    "router": {"guess": "c2", "p": {"c0": 0.25, "c3": 0.75}}, "sent_to": "c1", "thumb": "down",
    "took": [12, 34.5],
}  # fmt: skip
NORMAL: dict[str, Any] = {
    "source": "old", "source_id": "n1", "format": "litellm", "session_id": "s", "turn_index": 0,
    "ts": 1788228780000, "trace_id": "t", "tags": ["a"], "consent": True,
    "request": {"tokens_in": 3, "prompt_sha256": "p"},
    "prediction": {"tier": 1, "probs": [0.1, 0.6, 0.2, 0.1], "router": "r"},
    "decision": {"tier": 2, "propensity": 0.5, "policy": [
        {"stage": "floor", "applied": False, "detail": {"min_tier": "c2"}}]},
    "served": {"model": "m", "tier": 2, "kind": "ensemble", "cache_hit": False},
    "outcome": {"status": "success", "complaint": False, "verdicts": [
        {"source": "program", "name": "exact", "value": 1.0, "ts": 1788228780001}]},
    "messages": [ASKED, SAID], "num_prompt": 1, "sample_rate": 0.5, "raw_sha256": "abc",
}  # fmt: skip
NORMAL_EVIDENCE: dict[str, Any] = {
    "source": "old",
    "ref": "n1",
    "verdict": {"source": "user", "name": "thumb", "value": 0.0},
}

ROWS: dict[str, list[dict[str, Any]]] = {
    "normal": [NORMAL, NORMAL_EVIDENCE],
    "litellm": [SPEND_LOG, PAYLOAD],
    "vllm_router": [REPLAY, REPLAY_WITH_TEXT],
    "opensquilla": [DECISION_ROW, DECISION_LINE],
    "otel": [SPAN, ENVELOPE, FLAT_SPAN],
    "langfuse": [OBSERVATION, API_OBSERVATION, SCORE],
    "openrouter": [GENERATION, {"data": GENERATION}],
    "arena": [VOTE_100K, VOTE_55K, VOTE_140K],
    "routerbench": [BENCH],
    "routellm": [WIDE],
    "chat": [CHAT_LINE, PROMPT_LINE, SHARED_CHAT],
    "mapped": [OWN_LOG],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "mapped": {
        "fields": {
            "source_id": "uid", "session_id": "meta.conv", "ts": "meta.at",
            "messages": "payload.messages", "response": "reply", "served.model": "model",
            "prediction.tier": "router.guess", "prediction.probs": "router.p",
            "decision.tier": "sent_to", "verdict.user.thumb": "thumb",
            "outcome.latency_ms": "took[1]",
        },
        "constants": {"scene": "support", "served.model": "unknown"},
    }
}  # fmt: skip
