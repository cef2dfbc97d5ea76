"""Fields of a raw row, read with their types. The first name that has a value counts.

A missing field, null, an empty string and NaN are all None. A value of another type raises
RowError("wrong_type") with the field, what was expected and what was found. Numbers may stand in
strings, as in CSV, and objects and lists may be JSON text. What is nearly always there, or nearly
always not, returns before the general way: a row has a hundred fields to ask for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from distill.curriculum.clock import Unit, parse_time, shorten
from distill.curriculum.drops import RowError

_MISSING = ("", "None", "null", "NaN", "nan")
_FLAGS = {
    "true": True, "false": False, "1": True, "0": False,
    "yes": True, "no": False, "t": True, "f": False,
}  # fmt: skip
_UNSET = (0, "0", "0001-01-01T00:00:00Z")
"""How some writers log a time that they do not know."""
_LARGEST = 2**63
_NUMBER = (int, float)


def wrong(field: str, expected: str, found: object) -> RowError:
    return RowError(
        "wrong_type", f"{field}: expected {expected}, found {type(found).__name__} {shorten(found)}"
    )


def raw(row: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    """Name and value of the first field that has one."""
    for name in names:
        value = row.get(name)
        if value is None or value == "" or (type(value) is float and math.isnan(value)):
            continue
        return name, value
    return names[0], None


def nothing(value: Any) -> bool:
    """Whether a whole field says that there is nothing, also as the text of a null."""
    return not value or (isinstance(value, str) and value.strip() in ("None", "null"))


def clean(value: str, field: str) -> str:
    """The string, if it can be written as UTF-8; else RowError("bad_encoding")."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RowError("bad_encoding", f"{field}: half of a surrogate pair") from None
    return value


def text(row: Mapping[str, Any], *names: str) -> str | None:
    for name in names:
        value = row.get(name)
        if value is not None and value != "":
            if type(value) is str and value.isascii():
                return value
            break
    else:
        return None
    name, value = raw(row, names)
    return None if value is None else as_text(value, name)


def as_text(value: Any, field: str) -> str:
    if isinstance(value, str):
        return value if value.isascii() else clean(value, field)
    raise wrong(field, "a string", value)


def ident(row: Mapping[str, Any], *names: str) -> str | None:
    """An id: a string, or a whole number as its digits."""
    for name in names:
        value = row.get(name)
        if value is not None and value != "":
            if type(value) is str and value.isascii():
                return value
            break
    else:
        return None
    name, value = raw(row, names)
    return None if value is None else as_ident(value, name)


def as_ident(value: Any, field: str) -> str:
    if isinstance(value, str):
        return clean(value, field)
    if isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value < _LARGEST:
        return str(value)
    raise wrong(field, "a string or a whole number", value)


def required(row: Mapping[str, Any], *names: str) -> str:
    found = ident(row, *names)
    if found is None:
        raise RowError("missing_field", " or ".join(names))
    return found


def number(row: Mapping[str, Any], *names: str) -> float | None:
    for name in names:
        value = row.get(name)
        if value is not None:
            if type(value) is float and -_LARGEST < value < _LARGEST:
                return value
            break
    else:
        return None
    name, value = raw(row, names)
    return None if value is None else as_number(value, name)


def as_number(value: Any, field: str) -> float | None:
    """A finite number. Text such as "None" or "nan" is no number and None."""
    if type(value) is float:
        found = value
    elif isinstance(value, str):
        if value.strip() in _MISSING:
            return None
        try:
            found = float(value)
        except ValueError:
            raise wrong(field, "a number", value) from None
    elif isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value < _LARGEST:
        return float(value)
    else:
        raise wrong(field, "a number", value)
    if not math.isfinite(found):
        raise wrong(field, "a finite number", value)
    return found


def amount(row: Mapping[str, Any], *names: str) -> float | None:
    """A number that cannot be negative, such as a price or a duration."""
    found = number(row, *names)
    if found is not None and found < 0:
        raise wrong(raw(row, names)[0], "a number of 0 or more", found)
    return found


def count(row: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = row.get(name)
        if value is not None:
            if type(value) is int and 0 <= value < _LARGEST:
                return value
            break
    else:
        return None
    name, value = raw(row, names)
    return None if value is None else as_count(value, name)


def as_count(value: Any, field: str) -> int | None:
    """A whole number of 0 or more that fits in 63 bits; 7.0 is one."""
    if type(value) is int:
        found: float | None = value
    else:
        found = as_number(value, field)
    if found is None:
        return None
    if not 0 <= found < _LARGEST or found != int(found):
        raise wrong(field, "a whole number of 0 or more", value)
    return int(found)


def flag(row: Mapping[str, Any], *names: str) -> bool | None:
    name, value = raw(row, names)
    return None if value is None else as_flag(value, name)


def as_flag(value: Any, field: str) -> bool | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        if value.strip() in _MISSING:
            return None
        found = _FLAGS.get(value.strip().lower())
    else:
        found = bool(value) if isinstance(value, _NUMBER) and value in (0, 1) else None
    if found is None:
        raise wrong(field, "true or false", value)
    return found


def parsed(value: Any, field: str) -> Any:
    """`value`, with JSON text replaced by what it says. Other text raises RowError."""
    if not isinstance(value, str):
        return value
    try:
        return from_json(value)
    except (ValueError, TypeError) as error:  # the latter for half of a surrogate pair
        raise wrong(field, f"JSON ({str(error)[:60]})", value) from None


def table(row: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """An object; empty where there is none."""
    for name in names:
        value = row.get(name)
        if value is not None:
            if type(value) is dict:
                return value
            break
    else:
        return {}
    name, value = raw(row, names)
    return {} if value is None else as_table(value, name)


def as_table(value: Any, field: str) -> Mapping[str, Any]:
    if type(value) is dict:  # asking for a Mapping costs ten times as much
        return value
    value = parsed(value, field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(field, "an object", value)
    return value


def items(row: Mapping[str, Any], *names: str) -> list[Any]:
    """A list; empty where there is none."""
    name, value = raw(row, names)
    return [] if value is None else as_items(value, name)


def as_items(value: Any, field: str) -> list[Any]:
    """A list, which may be the row's own: it is only read."""
    if type(value) is list:
        return value
    value = parsed(value, field)
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise wrong(field, "a list", value)
    return list(value)


def strings(row: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """A list of strings; plain text counts as one of them. Nulls in it are left out."""
    name, value = raw(row, names)
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return (clean(value, name),)
    return tuple(as_text(entry, name) for entry in as_items(value, name) if entry is not None)


def when(row: Mapping[str, Any], *names: str, unit: Unit | None = None) -> int | None:
    """A time in ms. Zero and the year 1 stand for times that the writer did not know."""
    if len(names) == 1 and row.get(names[0]) is None:
        return None
    name, value = raw(row, names)
    if value is None or (not isinstance(value, bool) and value in _UNSET):
        return None
    try:
        return parse_time(value, unit)
    except RowError as error:
        raise RowError(error.reason, f"{name}: {error.detail}") from None


def share(row: Mapping[str, Any], *names: str) -> float | None:
    """A probability or a share, from 0 to 1."""
    name, value = raw(row, names)
    found = None if value is None else as_number(value, name)
    if found is not None and not 0 <= found <= 1:
        raise wrong(name, "a number from 0 to 1", value)
    return found
