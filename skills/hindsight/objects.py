"""JSON out of what a model wrote, whatever stands around it.

The text is not trusted: its size, the places that are tried and the depth of what is evaluated are
bounded, and nothing in it is ever executed.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

How = Literal["fence", "raw", "repaired", "literal"]
MAX_CHARACTERS = 50_000
"""A longer reply is not read at all."""
MAX_STARTS = 256
"""Brackets at which an object may begin, per way of reading."""
MAX_BLOCKS = 16
MAX_LITERALS = 16
MAX_LITERAL = 20_000
"""Characters of a Python literal ..."""
MAX_DEPTH = 16
"""... and how deep it may be nested: its evaluation recurses."""

_DECODER = json.JSONDecoder()
_STRING = r'"(?:[^"\\]|\\.?)*+(?:"|\Z)'
"""A string, closed or not: one that is tried again at each of its escaped quotes costs a square."""
_TRAILING = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)
_TOKEN = re.compile(rf"{_STRING}|'(?:[^'\\]|\\.?)*+(?:'|\Z)|[{{}}\[\]()]", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was read out of a text. Without a `value` the `reason` says why there is none."""

    value: Any = None
    how: How | None = None
    reason: str = ""


def find(text: str, opening: Literal["{", "["], wanted: Callable[[Any], bool]) -> Found:
    """The first wanted value of a text, else its first value; `opening` is `{` or `[`.

    In this order: fenced blocks, decoding from every bracket, the same without trailing commas, and
    Python literals. The first way that finds something wanted wins.
    """
    if len(text) > MAX_CHARACTERS:
        return Found(reason=f"the reply has {len(text)} characters, at most {MAX_CHARACTERS}")
    other: Found | None = None
    ways: tuple[tuple[How, Iterator[Any]], ...] = (
        ("fence", _fenced(text, opening)),
        ("raw", _decoded(text, opening)),
        ("repaired", _decoded(_without_trailing_commas(text), opening)),
        ("literal", _literals(text, opening)),
    )
    for how, values in ways:
        for value in values:
            found = Found(value=value, how=how)
            if wanted(value):
                return found
            other = other or found
    return other or Found(reason=_why(text, opening))


def _fenced(text: str, opening: str) -> Iterator[Any]:
    for block in text.split("```")[1 : 2 * MAX_BLOCKS : 2]:
        yield from _decoded(block, opening)


def _decoded(text: str, opening: str) -> Iterator[Any]:
    at = text.find(opening)
    for _ in range(MAX_STARTS):
        if at < 0:
            return
        try:
            value, _end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            pass  # no value begins here; the next bracket is tried, and `_why` tells at the end
        else:
            yield value
        at = text.find(opening, at + 1)


def _without_trailing_commas(text: str) -> str:
    return _TRAILING.sub(lambda found: "" if found[0] == "," else found[0], text)


def _literals(text: str, opening: str) -> Iterator[Any]:
    at = text.find(opening)
    for _ in range(MAX_LITERALS):
        if at < 0:
            return
        end = _extent(text, at)
        if end is not None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a stray backslash in somebody's text
                    value = ast.literal_eval(text[at:end])
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                pass  # no literal, as above
            else:
                yield value
        at = text.find(opening, at + 1)


def _extent(text: str, at: int) -> int | None:
    """Where the bracket at `at` is closed; None when it is not, too late or too deep."""
    depth = 0
    for token in _TOKEN.finditer(text, at, min(len(text), at + MAX_LITERAL)):
        if token[0] in ("{", "[", "("):
            depth += 1
        elif token[0] in ("}", "]", ")"):
            depth -= 1
        if depth > MAX_DEPTH:
            return None
        if depth == 0:
            return token.end()
    return None


def _why(text: str, opening: str) -> str:
    what = "JSON object" if opening == "{" else "JSON array"
    at = text.find(opening)
    if at < 0:
        return f"there is no {what} in the reply"
    try:
        _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        return f"there is no complete {what}: {error.msg} at character {error.pos}"
    except (ValueError, RecursionError) as error:
        return f"there is no readable {what}: {type(error).__name__}"
    return f"there is no readable {what}"
