"""Plain tables: read into dataclasses, with errors that say where a value came from."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from distill.errors import ConfigError

COMMAND_LINE = "command line"
_DOTTED = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")

T = TypeVar("T")
OriginOf = Callable[[str], str]
"""Dotted key -> the file, preset or command line that set it."""

_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a table",
}


def build_record(cls: type[T], table: Mapping[str, Any], path: str, origin_of: OriginOf) -> T:
    """A `cls` from its table. ConfigError on an unknown or missing key, or a value that does not
    fit the field's type or limits."""
    reject_unknown(table, [field.name for field in fields(cls)], path, origin_of)  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    values = {}
    for field in fields(cls):  # type: ignore[arg-type]
        key = join(path, field.name)
        if field.name in table:
            value = coerce(hints[field.name], table[field.name], key, origin_of)
            _check_limits(field, value, key, origin_of)
            values[field.name] = value
        elif _is_required(field):
            raise ConfigError(f"{origin_of(path)}: {key} is missing")
    return cls(**values)


def coerce(hint: Any, value: Any, path: str, origin_of: OriginOf) -> Any:
    """`value` as the annotated type `hint`. Only an integer standing for a float is converted."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = [arg for arg in get_args(hint) if arg is not type(None)]
        return coerce(hint, value, path, origin_of)
    if origin is Literal:
        choices = get_args(hint)
        if value not in choices:
            expected = f"one of {', '.join(map(repr, choices))}"
            raise _mismatch(expected, value, path, origin_of) from None
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _mismatch(_WORDS[list], value, path, origin_of)
        (entry, *_) = get_args(hint)
        return tuple(coerce(entry, v, f"{path}[{i}]", origin_of) for i, v in enumerate(value))
    if origin is Mapping or origin is dict or is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _mismatch(_WORDS[dict], value, path, origin_of)
        if is_dataclass(hint):
            return build_record(cast(type[Any], hint), value, path, origin_of)
        return plain_table(value, path, origin_of)
    return _scalar(hint, value, path, origin_of)


def _scalar(hint: Any, value: Any, path: str, origin_of: OriginOf) -> Any:
    if hint is float and type(value) is int:
        value = float(value)
    # bool is a subclass of int, so the types are compared and not tested by isinstance.
    if type(value) is not hint:
        raise _mismatch(_WORDS[hint], value, path, origin_of)
    if hint is float and not math.isfinite(value):
        raise _mismatch("a finite number", value, path, origin_of)
    return value


def plain_table(table: Mapping[str, Any], path: str, origin_of: OriginOf) -> dict[str, Any]:
    """A copy that JSON can hold; dates and infinities are refused."""
    return {key: _plain_value(value, join(path, key), origin_of) for key, value in table.items()}


def _plain_value(value: Any, path: str, origin_of: OriginOf) -> Any:
    if isinstance(value, Mapping):
        return plain_table(value, path, origin_of)
    if isinstance(value, list | tuple):
        return [_plain_value(v, f"{path}[{i}]", origin_of) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise _mismatch("a finite number", value, path, origin_of)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _mismatch("text, a number, true, false, a list or a table", value, path, origin_of)


def reject_unknown(
    table: Mapping[str, Any],
    valid: Iterable[str],
    path: str,
    origin_of: OriginOf,
    whole: str = "a configuration",
) -> None:
    """ConfigError for the first key of `table` that is not in `valid`, naming the nearest one.
    `whole` is what a table without a path is."""
    names = list(valid)
    for key in table:
        if key in names:
            continue
        where = f"[{path}]" if path else whole
        raise ConfigError(
            f"{origin_of(join(path, key))}: unknown key {join(path, key)!r}"
            f"{did_you_mean(key, names)}; valid in {where}: {', '.join(names)}"
        )


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`", did you mean 'steps'?"`, or nothing when no name is near."""
    near = difflib.get_close_matches(word, list(names), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _is_required(field: Field[Any]) -> bool:
    return field.default is field.default_factory  # both are MISSING


def _check_limits(field: Field[Any], value: Any, path: str, origin_of: OriginOf) -> None:
    low, high = field.metadata.get("low"), field.metadata.get("high")
    for entry in value if isinstance(value, tuple) else (value,):
        if low is not None and entry < low:
            raise _mismatch(f"at least {low:g}", entry, path, origin_of)
        if high is not None and entry > high:
            raise _mismatch(f"at most {high:g}", entry, path, origin_of)


def _mismatch(expected: str, found: Any, path: str, origin_of: OriginOf) -> ConfigError:
    kind = _WORDS.get(type(found), type(found).__name__)
    shown = repr(found) if len(repr(found)) <= 80 else repr(found)[:77] + "..."
    return ConfigError(f"{origin_of(path)}: {path}: expected {expected}, found {shown} ({kind})")


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The nested table that `key=value` arguments describe. ConfigError on a malformed one."""
    tree: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not _DOTTED.fullmatch(key):
            raise ConfigError(
                f"{COMMAND_LINE}: expected key=value with a dotted key such as trainer.steps=100, "
                f"found {text!r}"
            )
        *parents, last = key.split(".")
        below = tree
        for parent in parents:
            below = below.setdefault(parent, {})
            if not isinstance(below, dict):
                raise ConfigError(f"{COMMAND_LINE}: {key} is set inside a value set before it")
        below[last] = _parse_value(value)
    return tree


def _parse_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string, so that nobody needs to quote for two parsers
    return table["value"] if list(table) == ["value"] else text


def forget(origins: dict[str, str], dotted: str) -> None:
    """Drop the origins of a key and of everything below it, in place."""
    for key in [k for k in origins if k == dotted or k.startswith(dotted + ".")]:
        del origins[key]


def find_origin(origins: Mapping[str, str], dotted: str) -> str | None:
    """The origin of a key, or of the nearest table above it."""
    dotted = dotted.partition("[")[0]
    while dotted:
        if dotted in origins:
            return origins[dotted]
        dotted = dotted.rpartition(".")[0]
    return None


def plain(value: Any) -> Any:
    """A deep copy with tuples as lists, as JSON would give it back."""
    if isinstance(value, Mapping):
        return {key: plain(below) for key, below in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def leaves(table: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of everything below; an empty table is a value."""
    found = []
    for key, value in table.items():
        dotted = join(path, key)
        below = isinstance(value, Mapping) and value
        found += leaves(value, dotted) if below else [(dotted, value)]
    return found
