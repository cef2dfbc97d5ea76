"""OTLP-JSON unwrapped: spans with plain attributes, out of whatever a row wraps them in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distill.curriculum.drops import RowError
from distill.curriculum.importers.values import (
    as_items,
    as_number,
    as_table,
    ident,
    items,
    table,
    text,
    when,
    wrong,
)
from distill.curriculum.records import Status

ENVELOPES = ("resourceSpans", "resource_spans", "resourceLogs", "resource_logs")
Event = tuple[str, Mapping[str, Any], int | None]
_STATUS: dict[str, Status] = {
    "1": "success", "2": "failure", "OK": "success", "ERROR": "failure",
    "STATUS_CODE_OK": "success", "STATUS_CODE_ERROR": "failure",
}  # fmt: skip
_DEEPEST = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A span, or an event that came alone. Times in ms."""

    id: str | None
    trace: str | None
    parent: str | None
    attributes: Mapping[str, Any]
    time: int | None
    end: int | None
    status: Status | None
    events: tuple[Event, ...]
    name: str = ""
    faults: tuple[RowError, ...] = ()
    """Events that could not be read."""
    alone: bool = False
    """An event without its span; then `id` is the span that it happened in."""

    @property
    def about(self) -> str | None:
        """The span that an evaluation standing here speaks about."""
        return self.id if self.alone else self.parent


def spans_of(row: Mapping[str, Any]) -> list[Span | RowError]:
    """All spans and lone events of an envelope, of a span or of a flat row. Of what cannot be read
    in an envelope the error, in its place."""
    found = [*_wrapped(row, "Spans", "spans"), *_wrapped(row, "Logs", "logRecords")]
    if found or any(name in row for name in ENVELOPES):
        return found
    return [_span(row, "span", alone=False)]


def _wrapped(row: Mapping[str, Any], kind: str, leaf: str) -> Iterator[Span | RowError]:
    low = kind.lower()
    for i, outer in enumerate(items(row, f"resource{kind}", f"resource_{low}")):
        where = f"resource{kind}[{i}]"
        scopes, error = _inside(outer, where, f"scope{kind}", f"scope_{low}")
        if error is not None:
            yield error
        for j, inner in enumerate(scopes):
            name = f"{where}.scope{kind}[{j}]"
            entries, error = _inside(inner, name, leaf, "log_records")
            if error is not None:
                yield error
            for k, entry in enumerate(entries):
                place = f"{name}.{leaf}[{k}]"
                try:
                    found = _span(as_table(entry, place), place, alone=kind == "Logs")
                except RowError as bad:
                    yield RowError(bad.reason, _placed(bad.detail, place))
                    continue
                yield found


def _inside(value: Any, where: str, *names: str) -> tuple[list[Any], RowError | None]:
    try:
        return items(as_table(value, where), *names), None
    except RowError as error:
        return [], RowError(error.reason, _placed(error.detail, where))


def _placed(detail: str, place: str) -> str:
    return detail if detail.startswith(place) else f"{place}: {detail}"


def _span(row: Mapping[str, Any], where: str, *, alone: bool) -> Span:
    events = list(_events(row, where))
    name = row.get("name")
    inner = table(row, "context")  # as the Python console exporter writes it
    attributes = attributes_of(row.get("attributes"), f"{where}.attributes")
    if "attributes" not in row:
        attributes = row
    return Span(
        id=ident(row, "spanId", "span_id") or ident(inner, "spanId", "span_id"),
        trace=ident(row, "traceId", "trace_id") or ident(inner, "traceId", "trace_id"),
        parent=ident(row, "parentSpanId", "parent_span_id", "parent_id"),
        attributes=attributes,
        time=_time(row, "start") if not alone else _event_time(row),
        end=_time(row, "end"),
        status=_status(row),
        events=tuple(entry for entry in events if not isinstance(entry, RowError)),
        name=name if isinstance(name, str) else "",
        faults=tuple(entry for entry in events if isinstance(entry, RowError)),
        alone=alone or text(row, "event.name", "eventName") is not None,
    )


def _time(row: Mapping[str, Any], edge: str) -> int | None:
    nanos = (f"{edge}TimeUnixNano", f"{edge}_time_unix_nano")
    found = when(row, *nanos, unit="ns")
    return when(row, f"{edge}_time", f"{edge}Time") if found is None else found


def _event_time(row: Mapping[str, Any]) -> int | None:
    found = when(row, "timeUnixNano", "time_unix_nano", "observedTimeUnixNano", unit="ns")
    return when(row, "time", "timestamp") if found is None else found


def _status(row: Mapping[str, Any]) -> Status | None:
    value = row.get("status")
    if isinstance(value, Mapping):
        value = value.get("code", value.get("status_code"))
    if type(value) is int and value in (1, 2):
        value = str(value)
    return _STATUS.get(value) if isinstance(value, str) else None


def _events(row: Mapping[str, Any], where: str) -> Iterator[Event | RowError]:
    """The events of a span; of a damaged one its error, so that the span is not lost with it."""
    for index, entry in enumerate(items(row, "events")):
        name = f"{where}.events[{index}]"
        try:
            event = as_table(entry, name)
            attributes = attributes_of(event.get("attributes"), f"{name}.attributes")
            found = text(event, "name", "eventName") or "", attributes, _event_time(event)
        except RowError as error:
            yield RowError(error.reason, _placed(error.detail, name))
            continue
        yield found


def attributes_of(value: Any, field: str) -> Mapping[str, Any]:
    """Attributes as a plain mapping, from a mapping or from OTLP's list of keys and values."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {name: unwrap(entry, field) for name, entry in value.items()}
    if isinstance(value, str):
        return as_table(value, field)
    found: dict[str, Any] = {}
    for index, entry in enumerate(as_items(value, field)):
        pair = as_table(entry, f"{field}[{index}]")
        name = text(pair, "key")
        if name is not None:
            found[name] = unwrap(pair.get("value"), f"{field}.{name}")
    return found


def unwrap(value: Any, field: str, depth: int = 0) -> Any:
    """A value without OTLP's wrapping: {"intValue": "7"} is 7. Other values stay as they are."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    if depth > _DEEPEST:
        raise wrong(field, f"at most {_DEEPEST} levels", value)
    ((kind, inner),) = value.items()
    if kind in ("stringValue", "boolValue", "bytesValue"):
        return inner
    if kind == "intValue":
        whole = isinstance(inner, str) and inner.isascii() and inner.lstrip("-").isdigit()
        return int(inner) if whole and len(inner) < 20 else inner
    if kind == "doubleValue":
        return as_number(inner, field)
    if kind == "arrayValue":
        entries = items(as_table(inner, field), "values")
        return [unwrap(entry, field, depth + 1) for entry in entries]
    if kind == "kvlistValue":
        pairs = [as_table(e, field) for e in items(as_table(inner, field), "values")]
        return {str(p.get("key")): unwrap(p.get("value"), field, depth + 1) for p in pairs}
    return value
