"""The normal form: a turn, or evidence about one, as plain nested objects, and back.

`from_plain(to_plain(turn)) == turn`. Values that are a field's default are left out, and unknown
ones are ignored. Times are milliseconds since 1970 UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from distill.curriculum.drops import RowError
from distill.curriculum.importers.base import Context, Found, Row
from distill.curriculum.importers.messages import plain, tool_definitions
from distill.curriculum.importers.values import (
    as_count,
    as_flag,
    as_ident,
    as_items,
    as_number,
    as_table,
    as_text,
    wrong,
)
from distill.curriculum.importers.verdicts import ORIGINS
from distill.curriculum.records import (
    NUM_TIERS,
    Decision,
    Evidence,
    Outcome,
    PolicyStep,
    Prediction,
    Request,
    RoutingTurn,
    Served,
    Verdict,
)

T = TypeVar("T")
Read = Callable[[Any, str], Any]
_ROLES = frozenset(("system", "user", "assistant", "tool"))


class Normal:
    name = "normal"

    def recognises(self, row: Row) -> bool:
        return ("source_id" in row and "format" in row) or ("ref" in row and "verdict" in row)

    def read(self, row: Row, context: Context) -> Iterable[Found]:
        """One turn or evidence. The name of the source is the configured one; a digest of the
        original record, the format and a refused consent stay."""
        known = {name: row[name] for name in (*_TURN, "ref", "verdict") if name in row}
        found = from_plain({"source": context.source, **plain(known, self.name)})
        if isinstance(found, Evidence):
            told = context.evidence(found.ref, found.verdict)
            return [replace(told, raw_sha256=found.raw_sha256 or told.raw_sha256)]
        own = {name: getattr(found, name) for name in _TURN_FIELDS if name in row}
        turn = context.turn(row, source_id=found.source_id, format=found.format, **own)
        return [replace(turn, raw_sha256=found.raw_sha256 or turn.raw_sha256)]


def to_plain(found: Found) -> dict[str, Any]:
    """A turn or evidence as objects, lists, texts and numbers, ready for JSON."""
    if isinstance(found, Evidence):
        out: dict[str, Any] = {
            "source": found.source,
            "ref": found.ref,
            "verdict": _written(found.verdict, _VERDICT),
        }
        if found.raw_sha256:
            out["raw_sha256"] = found.raw_sha256
        return out
    out = {"source": found.source, "source_id": found.source_id, "format": found.format}
    for name in _SIMPLE:
        value = getattr(found, name)
        if value is not None:
            out[name] = value
    if found.tags:
        out["tags"] = list(found.tags)
    if found.messages is not None:
        out["messages"] = list(found.messages)
    if found.tools:
        out["tools"] = list(found.tools)
    if found.truncated:
        out["truncated"] = True
    if found.sample_rate != 1.0:
        out["sample_rate"] = found.sample_rate
    if not found.consent:
        out["consent"] = False
    if found.raw_sha256:
        out["raw_sha256"] = found.raw_sha256
    if request := _written(found.request, _REQUEST):
        out["request"] = request
    for name, readers in _LAYERS.items():
        layer = getattr(found, name)
        if layer is not None:
            out[name] = _written(layer, readers)
    return out


def _written(record: Any, readers: Mapping[str, Read]) -> dict[str, Any]:
    out = {}
    for name in readers:
        value = getattr(record, name)
        if value is None or value == ():
            continue
        if name == "verdicts":
            value = [_written(verdict, _VERDICT) for verdict in value]
        elif name == "policy":
            value = [
                {"stage": step.stage, "applied": step.applied, "detail": dict(step.detail)}
                for step in value
            ]
        elif name == "probs":
            value = list(value)
        out[name] = value
    return out


def from_plain(row: Mapping[str, Any]) -> Found:
    """A turn, or evidence where the object has `ref`. RowError where a field does not fit."""
    if "ref" in row and "source_id" not in row:
        verdict = _record(Verdict, _need(row, "verdict"), _VERDICT, "verdict")
        return Evidence(
            source=as_text(_need(row, "source"), "source"),
            ref=as_ident(_need(row, "ref"), "ref"),
            verdict=verdict,
            raw_sha256=as_text(row.get("raw_sha256") or "", "raw_sha256"),
        )
    values = {
        name: reader(value, name)
        for name, reader in _TURN.items()
        if (value := row.get(name)) is not None
    }
    for name in ("source", "source_id", "format"):
        _need(row, name)
    return RoutingTurn(**values)


def _need(row: Mapping[str, Any], name: str) -> Any:
    value = row.get(name)
    if value is None:
        raise RowError("missing_field", name)
    return value


def _record(cls: type[T], value: Any, readers: Mapping[str, Read], field: str) -> T:
    table = as_table(value, field)
    found = {
        name: reader(entry, f"{field}.{name}")
        for name, reader in readers.items()
        if (entry := table.get(name)) is not None
    }
    for name in (
        ("source", "name") if cls is Verdict else ("stage", "applied") if cls is PolicyStep else ()
    ):
        _need(found, name)
    return cls(**found)


def _layer(cls: type[Any], readers: Mapping[str, Read]) -> Read:
    return lambda value, field: _record(cls, value, readers, field)


def _several(read: Read) -> Read:
    return lambda value, field: tuple(
        read(entry, f"{field}[{i}]") for i, entry in enumerate(as_items(value, field))
    )


def _truth(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(field, "true or false", value)
    return value


def _tier(value: Any, field: str) -> int:
    if type(value) is not int or not 0 <= value < NUM_TIERS:
        raise wrong(field, f"a tier from 0 to {NUM_TIERS - 1}", value)
    return value


def _probability(value: Any, field: str) -> float:
    found = as_number(value, field)
    if found is None or not 0 <= found <= 1:
        raise wrong(field, "a number from 0 to 1", value)
    return found


def _positive(value: Any, field: str) -> float:
    found = _probability(value, field)
    if not found:
        raise wrong(field, "a number above 0", value)
    return found


def _probs(value: Any, field: str) -> tuple[float, ...]:
    found = tuple(_probability(entry, field) for entry in as_items(value, field))
    if len(found) != NUM_TIERS:
        raise wrong(field, f"{NUM_TIERS} probabilities", value)
    return found


def _one_of(*words: str) -> Read:
    def read(value: Any, field: str) -> str:
        if value not in words:
            raise wrong(field, f"one of {', '.join(words)}", value)
        return cast(str, value)

    return read


def _object(value: Any, field: str) -> Mapping[str, Any]:
    return as_table(value, field)


def _messages(value: Any, field: str) -> tuple[Mapping[str, Any], ...]:
    """Messages as they are: each an object with a known role. Their text is checked, not copied."""
    found = as_items(value, field)
    for index, entry in enumerate(found):
        where = f"{field}[{index}]"
        if not isinstance(entry, Mapping):
            raise wrong(where, "a message", entry)
        role, content = entry.get("role"), entry.get("content")
        if not isinstance(role, str) or role not in _ROLES:
            raise wrong(f"{where}.role", f"one of {', '.join(sorted(_ROLES))}", role)
        if isinstance(content, str):
            as_text(content, f"{where}.content")
        elif not isinstance(content, list | None):
            raise wrong(f"{where}.content", "text or parts", content)
    return tuple(found)


_VERDICT: dict[str, Read] = {
    "source": _one_of(*ORIGINS),
    "name": as_text,
    "value": _probability,
    "label": as_text,
    "ts": as_count,
}
_STEP: dict[str, Read] = {"stage": as_text, "applied": _truth, "detail": _object}
_REQUEST: dict[str, Read] = {
    "prompt_sha256": as_text,
    "tools_sha256": as_text,
    "tokens_in": as_count,
}
_LAYERS: dict[str, dict[str, Read]] = {
    "prediction": {
        "tier": _tier,
        "probs": _probs,
        "confidence": as_number,
        "score": as_number,
        "router": as_text,
        "router_version": as_text,
    },
    "decision": {
        "tier": _tier,
        "policy": _several(_layer(PolicyStep, _STEP)),
        "reason": as_text,
        "requested_model": as_text,
        "propensity": _positive,
    },
    "served": {
        "model": as_text,
        "provider": as_text,
        "tier": _tier,
        "kind": _one_of("single", "ensemble"),
        "fallback_hops": as_count,
        "cache_hit": as_flag,
    },
    "outcome": {
        "status": _one_of("success", "failure", "aborted"),
        "finish_reason": as_text,
        "error": as_text,
        "verdicts": _several(_layer(Verdict, _VERDICT)),
        "complaint": as_flag,
        "reask": as_flag,
        "escalated": as_flag,
        "latency_ms": as_number,
        "ttft_ms": as_number,
        "tokens_out": as_count,
        "reasoning_tokens": as_count,
        "cost": as_number,
        "baseline_cost": as_number,
    },
}
_SIMPLE: dict[str, Read] = {
    "session_id": as_text,
    "turn_index": as_count,
    "ts": as_count,
    "trace_id": as_text,
    "parent_id": as_text,
    "user": as_text,
    "scene": as_text,
    "num_prompt": as_count,
}
_TURN_FIELDS: dict[str, Read] = {
    **_SIMPLE,
    "tags": _several(as_text),
    "request": _layer(Request, _REQUEST),
    "prediction": _layer(Prediction, _LAYERS["prediction"]),
    "decision": _layer(Decision, _LAYERS["decision"]),
    "served": _layer(Served, _LAYERS["served"]),
    "outcome": _layer(Outcome, _LAYERS["outcome"]),
    "messages": _messages,
    "tools": tool_definitions,
    "truncated": _truth,
    "sample_rate": _positive,
    "consent": _truth,
}
_TURN: dict[str, Read] = {
    "source": as_text,
    "source_id": as_ident,
    "format": as_text,
    **_TURN_FIELDS,
    "raw_sha256": as_text,
}
