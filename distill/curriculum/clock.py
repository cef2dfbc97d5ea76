"""Times of logs, in any of their clocks, as milliseconds since 1970 UTC."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from distill.curriculum.drops import RowError
from distill.curriculum.pii_rules import find

Unit = Literal["s", "ms", "us", "ns"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_LAST = 253_402_300_800_000
"""End of the year 9999."""
_PER_MS: dict[Unit, tuple[int, int]] = {
    "s": (1000, 1),
    "ms": (1, 1),
    "us": (1, 1000),
    "ns": (1, 1_000_000),
}
"""Multiply by the first and divide by the second."""
_BY_SIZE: tuple[tuple[float, Unit], ...] = ((1e11, "s"), (1e14, "ms"), (1e17, "us"), (1e20, "ns"))
"""Numbers below the limit are in the unit: since 1973 the ranges do not overlap."""
_SHOWN, _LOOKED_AT = 60, 4096
"""Characters of a value that a message quotes, and that are searched for personal data."""
_EARLIEST = 1e8
"""No log is older than March 1973; a smaller number is not a time."""


def parse_time(value: Any, unit: Unit | None = None) -> int:
    """Milliseconds since 1970 UTC of a number, a numeric string, an ISO 8601 string or a datetime.

    Numbers are seconds, milliseconds, microseconds or nanoseconds, told apart by their size unless
    `unit` says it. A time without a zone is UTC. Raises RowError("bad_time") for all else.
    """
    if isinstance(value, str):
        return _of_text(value.strip(), unit)
    if isinstance(value, datetime):
        return _of_datetime(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _of_number(value, unit)
    raise _unreadable(value)


def _of_text(text: str, unit: Unit | None) -> int:
    if text.isascii() and text.isdigit() and len(text) != 8:  # eight digits are a date
        return _of_number(int(text) if len(text) < 25 else math.inf, unit)
    try:
        return _of_datetime(datetime.fromisoformat(text.removesuffix(" UTC")))
    except (ValueError, OverflowError):
        pass
    try:
        return _of_number(float(text), unit)
    except ValueError:
        raise _unreadable(text) from None


def _of_datetime(time: datetime) -> int:
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    ms = (time - _EPOCH) // _MILLISECOND
    if ms < 0:
        raise _unreadable(time.isoformat())
    return ms


def _of_number(number: float, unit: Unit | None) -> int:
    if unit is None:
        if not number >= _EARLIEST:
            raise _unreadable(number)
        unit = next((name for limit, name in _BY_SIZE if number < limit), None)
    if unit is None or not 0 <= number < math.inf:
        raise _unreadable(number)
    times, divisor = _PER_MS[unit]
    # Whole numbers stay whole: nanoseconds do not fit a float.
    ms = number * times // divisor if isinstance(number, int) else round(number * times / divisor)
    if ms >= _LAST:
        raise _unreadable(number)
    return int(ms)


def shorten(value: object) -> str:
    """At most 60 characters of a value, fit for any file or terminal, without personal data: a
    number that is cut could not be told any more."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "a huge whole number"  # Python refuses to write out the largest ones
    if isinstance(value, Mapping | list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    text = (value if isinstance(value, str) else str(value))[:_LOOKED_AT]
    for start, end, kind in reversed(find(text)):
        text = f"{text[:start]}[{kind}]{text[end:]}"
    return repr(text[:_SHOWN]).encode(errors="replace").decode()


def _unreadable(value: object) -> RowError:
    return RowError(
        "bad_time",
        "expected a time since 1973 as ISO 8601 or as a number of s, ms, us or ns since 1970, "
        f"found {shorten(value)}",
    )
