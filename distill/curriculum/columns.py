"""Turns as Arrow columns and back.

The four layers are structs, null where the log had no such layer; conversations, tool definitions
and the details of policy steps are JSON text. Column names are the field names of the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pydantic_core import from_json, to_json

from distill.curriculum.records import (
    Decision,
    Outcome,
    PolicyStep,
    Prediction,
    Request,
    RoutingTurn,
    Served,
    Verdict,
)

_TEXT, _WHOLE, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
VERDICT = pa.struct(
    {"source": _TEXT, "name": _TEXT, "value": _REAL, "label": _TEXT, "ts": _WHOLE}.items()
)
_LAYERS: dict[str, tuple[type[Any], dict[str, pa.DataType]]] = {
    "request": (Request, {"prompt_sha256": _TEXT, "tools_sha256": _TEXT, "tokens_in": _WHOLE}),
    "prediction": (
        Prediction,
        {
            "tier": pa.int8(),
            "probs": pa.list_(_REAL),
            "confidence": _REAL,
            "score": _REAL,
            "router": _TEXT,
            "router_version": _TEXT,
        },
    ),
    "decision": (
        Decision,
        {
            "tier": pa.int8(),
            "policy": _TEXT,
            "reason": _TEXT,
            "requested_model": _TEXT,
            "propensity": _REAL,
        },
    ),
    "served": (
        Served,
        {
            "model": _TEXT,
            "provider": _TEXT,
            "tier": pa.int8(),
            "kind": _TEXT,
            "fallback_hops": _WHOLE,
            "cache_hit": _FLAG,
        },
    ),
    "outcome": (
        Outcome,
        {
            "status": _TEXT,
            "finish_reason": _TEXT,
            "error": _TEXT,
            "verdicts": pa.list_(VERDICT),
            "complaint": _FLAG,
            "reask": _FLAG,
            "escalated": _FLAG,
            "latency_ms": _REAL,
            "ttft_ms": _REAL,
            "tokens_out": _WHOLE,
            "reasoning_tokens": _WHOLE,
            "cost": _REAL,
            "baseline_cost": _REAL,
        },
    ),
}
_PLAIN: dict[str, pa.DataType] = {
    "source": _TEXT,
    "source_id": _TEXT,
    "format": _TEXT,
    "session_id": _TEXT,
    "turn_index": _WHOLE,
    "ts": _WHOLE,
    "trace_id": _TEXT,
    "parent_id": _TEXT,
    "user": _TEXT,
    "scene": _TEXT,
    "tags": pa.list_(_TEXT),
    "num_prompt": _WHOLE,
    "truncated": _FLAG,
    "sample_rate": _REAL,
    "consent": _FLAG,
    "raw_sha256": _TEXT,
}
_JSON = ("messages", "tools")
SCHEMA = pa.schema(
    [
        *_PLAIN.items(),
        *((name, pa.struct(children.items())) for name, (_, children) in _LAYERS.items()),
        *((name, _TEXT) for name in _JSON),
        ("id_digest", pa.binary(16)),
    ]
)
"""`id_digest` names the turn among all that were ever read; a redactor may change its ids."""
ERRORS: tuple[type[Exception], ...] = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""What a value of a wrong type or size raises on its way into a column."""
_NO_TOOLS = b"[]"


def messages_json(turn: RoutingTurn) -> bytes | None:
    return None if turn.messages is None else to_json(turn.messages)


def tools_json(turn: RoutingTurn) -> bytes:
    return to_json(turn.tools) if turn.tools else _NO_TOOLS


def encode(
    turns: Sequence[RoutingTurn],
    texts: Sequence[tuple[bytes | None, bytes]],
    users: Sequence[str | None],
    ids: Sequence[bytes],
) -> Any:
    """A record batch of the turns. `texts` are their conversations and tools as JSON, `users` stand
    in the place of theirs, and `ids` are digests of 16 bytes. Raises one of ERRORS when a value
    does not fit its column."""
    columns = [
        pa.array(users if name == "user" else [getattr(turn, name) for turn in turns], type=kind)
        for name, kind in _PLAIN.items()
    ]
    columns += [_struct(name, [getattr(turn, name) for turn in turns]) for name in _LAYERS]
    # Through bytes: JSON is UTF-8 already, so that nothing has to be decoded and encoded again.
    columns += [
        pa.array([pair[n] for pair in texts], type=pa.binary()).cast(_TEXT) for n in range(2)
    ]
    columns.append(pa.array(ids, type=pa.binary(16)))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _struct(layer: str, records: list[Any]) -> pa.Array:
    _, children = _LAYERS[layer]
    missing = [record is None for record in records]
    if all(missing):
        return pa.nulls(len(records), SCHEMA.field(layer).type)
    arrays = []
    for name, kind in children.items():
        values = [None if record is None else getattr(record, name) for record in records]
        if name == "policy":
            values = [_policy_json(steps) if steps else None for steps in values]
        elif name == "verdicts":
            values = [[_verdict(each) for each in found] if found else None for found in values]
        arrays.append(pa.array(values, type=kind))
    return pa.StructArray.from_arrays(
        arrays, fields=list(SCHEMA.field(layer).type), mask=pa.array(missing)
    )


def _policy_json(steps: Sequence[PolicyStep]) -> str:
    return to_json([[step.stage, step.applied, step.detail] for step in steps]).decode()


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "source": verdict.source,
        "name": verdict.name,
        "value": verdict.value,
        "label": verdict.label,
        "ts": verdict.ts,
    }


def decode(table: Any) -> list[RoutingTurn]:
    """The turns of a table or record batch with all columns of SCHEMA."""
    columns: dict[str, list[Any]] = {name: table.column(name).to_pylist() for name in _PLAIN}
    for name in _LAYERS:
        columns[name] = _records(name, table.column(name))
    for name in _JSON:
        columns[name] = [
            None if text is None else tuple(from_json(text)) if text != "[]" else ()
            for text in table.column(name).to_pylist()
        ]
    columns["tags"] = [tuple(tags or ()) for tags in columns["tags"]]
    names = list(columns)
    return [
        RoutingTurn(**dict(zip(names, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ]


def _records(layer: str, column: Any) -> list[Any]:
    cls, children = _LAYERS[layer]
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if column.null_count == len(column):
        return [None] * len(column)
    values = [_restore(name, column.field(name).to_pylist()) for name in children]
    names = list(children)
    return [
        cls(**dict(zip(names, row, strict=True))) if valid else None
        for valid, *row in zip(column.is_valid().to_pylist(), *values, strict=True)
    ]


def _restore(name: str, values: list[Any]) -> list[Any]:
    if name == "probs":
        return [None if probs is None else tuple(probs) for probs in values]
    if name == "policy":
        return [
            tuple(PolicyStep(stage=s, applied=a, detail=d) for s, a, d in from_json(text))
            if text
            else ()
            for text in values
        ]
    if name == "verdicts":
        return [tuple(Verdict(**each) for each in found or ()) for found in values]
    return values
