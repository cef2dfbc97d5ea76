"""Fields of the normal form by their path, and where in a row a user says that they are.

A path is names joined by dots, with `[n]` for a place in a list: `payload.messages[0].content`.
A name may itself hold dots, as in OpenTelemetry; JSON text on the way is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from distill.curriculum.clock import parse_time
from distill.curriculum.drops import RowError
from distill.curriculum.importers import messages as chat
from distill.curriculum.importers.layers import (
    probs_of,
    propensity_of,
    status_of,
    steps_of,
    tier_of,
)
from distill.curriculum.importers.values import (
    as_count,
    as_flag,
    as_ident,
    as_number,
    as_text,
    parsed,
    strings,
    wrong,
)
from distill.curriculum.importers.verdicts import ORIGINS, grade, verdict_of
from distill.curriculum.records import (
    LAYERS,
    Decision,
    Outcome,
    Prediction,
    Request,
    RoutingTurn,
    Served,
    Verdict,
)
from distill.curriculum.tiers import Tiers
from distill.errors import ConfigError
from distill.tables import did_you_mean

Read = Callable[[Any, str], Any]

_PIECE = re.compile(r"([^.\[\]]+)|\[(-?\d+)\]")
_KINDS: dict[str, type] = {
    "request": Request,
    "prediction": Prediction,
    "decision": Decision,
    "served": Served,
    "outcome": Outcome,
}


def _time(value: Any, field: str) -> int:
    try:
        return parse_time(value)
    except RowError as error:
        raise RowError(error.reason, f"{field}: {error.detail}") from None


def _share(value: Any, field: str) -> float | None:
    found = as_number(value, field)
    if found is not None and not 0 < found <= 1:
        raise wrong(field, "a share above 0 and at most 1", value)
    return found


def _kind(value: Any, field: str) -> str:
    if value not in ("single", "ensemble"):
        raise wrong(field, "single or ensemble", value)
    return str(value)


def _verdicts(value: Any, field: str) -> tuple[Verdict, ...]:
    value = parsed(value, field)
    entries = value if isinstance(value, list | tuple) else [value]
    return tuple(verdict_of(entry, f"{field}[{i}]") for i, entry in enumerate(entries))


TARGETS: dict[str, Read] = {
    "source_id": as_ident,
    "session_id": as_ident,
    "turn_index": as_count,
    "ts": _time,
    "trace_id": as_ident,
    "parent_id": as_ident,
    "user": as_ident,
    "scene": as_text,
    "tags": lambda value, field: strings({field: value}, field),
    "messages": chat.conversation,
    "response": chat.answer,
    "tools": chat.tool_definitions,
    "truncated": as_flag,
    "sample_rate": _share,
    "consent": as_flag,
    "request.prompt_sha256": as_text,
    "request.tools_sha256": as_text,
    "request.tokens_in": as_count,
    "prediction.tier": as_ident,
    "prediction.probs": lambda value, field: value,
    "prediction.confidence": as_number,
    "prediction.score": as_number,
    "prediction.router": as_text,
    "prediction.router_version": as_ident,
    "decision.tier": as_ident,
    "decision.policy": steps_of,
    "decision.reason": as_text,
    "decision.requested_model": as_text,
    "decision.propensity": propensity_of,
    "served.model": as_text,
    "served.provider": as_text,
    "served.tier": as_ident,
    "served.kind": _kind,
    "served.fallback_hops": as_count,
    "served.cache_hit": as_flag,
    "outcome.status": status_of,
    "outcome.finish_reason": as_text,
    "outcome.error": as_text,
    "outcome.verdicts": _verdicts,
    "outcome.complaint": as_flag,
    "outcome.reask": as_flag,
    "outcome.escalated": as_flag,
    "outcome.latency_ms": as_number,
    "outcome.ttft_ms": as_number,
    "outcome.tokens_out": as_count,
    "outcome.reasoning_tokens": as_count,
    "outcome.cost": as_number,
    "outcome.baseline_cost": as_number,
}
"""Every field that can be mapped, and how its value is read. `response` follows `messages`, and
`verdict.ORIGIN` or `verdict.ORIGIN.NAME`, with an origin such as `user`, makes a verdict; its name
says what a number means, `verdict.user.thumb`, or `scales` does, see `verdicts.grade`."""


def check_targets(names: Mapping[str, Any], option: str) -> None:
    """ConfigError for a field that the normal form does not have."""
    for name in names:
        kind, _, rest = name.partition(".")
        if kind == "verdict" and rest.partition(".")[0] in ORIGINS:
            continue
        if name not in TARGETS:
            raise ConfigError(
                f"{option}: {name!r} is no field of a turn{did_you_mean(name, TARGETS)}; expected "
                f"one of {', '.join(TARGETS)}, or verdict.ORIGIN with one of {', '.join(ORIGINS)}"
            )


@lru_cache(maxsize=1024)
def _pieces(path: str) -> tuple[str | int, ...]:
    return tuple(name or int(place) for name, place in _PIECE.findall(path))


def pick(row: Any, path: str) -> Any:
    """The value at a path, or None where the row has none."""
    if isinstance(row, Mapping) and path in row:
        return row[path]
    return _walk(row, _pieces(path), path)


def _walk(value: Any, pieces: tuple[str | int, ...], path: str) -> Any:
    if not pieces or value is None:
        return value
    value = parsed(value, path) if isinstance(value, str) else value
    first = pieces[0]
    if isinstance(first, int):
        if not isinstance(value, list | tuple) or not -len(value) <= first < len(value):
            return None
        return _walk(value[first], pieces[1:], path)
    if not isinstance(value, Mapping):
        return None
    for length in range(len(pieces), 0, -1):
        key = pieces[:length]
        if all(isinstance(piece, str) for piece in key):
            name = ".".join(map(str, key))
            if name in value:
                return _walk(value[name], pieces[length:], path)
    return None


def gather(
    row: Mapping[str, Any], paths: Mapping[str, str], constants: Mapping[str, Any]
) -> dict[str, Any]:
    """Raw values of mapped fields; a constant counts where the row has nothing."""
    found = {name: value for name, value in constants.items() if value is not None}
    for name, path in paths.items():
        value = pick(row, path)
        if value is not None and value != "":
            found[name] = value
    return found


def read_values(raw: Mapping[str, Any], tiers: Tiers, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a turn from raw values by field. Only layers with a value are there."""
    layers: dict[str, dict[str, Any]] = {}
    out: dict[str, Any] = {}
    tags: list[str] = []
    verdicts: list[Verdict] = []
    for name, value in raw.items():
        kind, _, rest = name.partition(".")
        if kind == "verdict":
            source, _, named = rest.partition(".")
            trusted = source in ("program", "tool")
            graded, label = grade(value, named or "outcome", options, trusted=trusted)
            verdicts.append(
                Verdict(source=source, name=named or "outcome", value=graded, label=label)  # type: ignore[arg-type]
            )
        elif rest == "tier":
            layers.setdefault(kind, {})["tier"] = tier_of(value, name, tiers, tags)
        elif name == "prediction.probs":
            layers.setdefault(kind, {})["probs"] = probs_of(value, name, tiers)
        elif rest:
            layers.setdefault(kind, {})[rest] = TARGETS[name](value, name)
        else:
            out[name] = TARGETS[name](value, name)
    if verdicts:
        outcome = layers.setdefault("outcome", {})
        outcome["verdicts"] = (*outcome.get("verdicts", ()), *verdicts)
    _fold_text(out)
    served = layers.get("served", {})
    if served.get("tier") is None and served.get("model"):
        served["tier"] = tiers.of_model(served["model"])
    for kind, values in layers.items():
        known = {key: value for key, value in values.items() if value is not None}
        if known:
            out[kind] = _KINDS[kind](**known)
    if tags:
        out["tags"] = (*out.get("tags", ()), *tags)
    return {key: value for key, value in out.items() if value is not None}


def _fold_text(out: dict[str, Any]) -> None:
    """`messages` and `response` as messages with the number of those that the model read."""
    said = out.pop("response", [])
    read = out.pop("messages", [])
    if not read and not said:
        return
    num_prompt = len(read)
    if not said and read[-1]["role"] == "assistant":
        num_prompt -= 1
    out["messages"] = (*read, *said)
    out["num_prompt"] = num_prompt


def overlay(turn: RoutingTurn, row: Mapping[str, Any], tiers: Tiers, options: Any) -> RoutingTurn:
    """The turn with the fields that the user mapped put over those that the importer found."""
    paths = options["fields"]
    check_targets(paths, "fields")
    found = read_values(gather(row, paths, {}), tiers, options)
    changes: dict[str, Any] = {}
    for name, value in found.items():
        before = getattr(turn, name)
        if name == "tags":
            value = (*before, *value)
        elif name in (*LAYERS, "request") and before is not None:
            value = _merged(before, value)
        changes[name] = value
    return replace(turn, **changes)


def _merged(before: Any, after: Any) -> Any:
    """A layer with the values of another that differ from its defaults."""
    empty = type(after)()
    changes = {
        field.name: getattr(after, field.name)
        for field in fields(after)
        if getattr(after, field.name) != getattr(empty, field.name)
    }
    if "verdicts" in changes:
        changes["verdicts"] = (*before.verdicts, *changes["verdicts"])
    return replace(before, **changes)
