"""A turn as numbers: a few counts, and hashed words and three-byte pieces of its text.

Everything is vectorised over a batch of turns, and the numbers of a turn do not depend on the other
turns of its batch. At most 1,024 characters of the request are read word by word (its beginning and
its end), 256 of the user message before it and 256 of the tools' names; the counts see all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distill.curriculum.demand import DemandInput, text_of

WORD_BITS = 12
PIECE_BITS = 12
NUM_HASHED = 2**WORD_BITS + 2**PIECE_BITS
NUMBERS = (
    "characters",
    "words",
    "lines",
    "digits",
    "capitals",
    "code_blocks",
    "code_marks",
    "questions",
    "question_words",
    "user_messages",
    "assistant_messages",
    "tool_messages",
    "history_characters",
    "tools",
)
"""Counts of a turn, each as log(1 + count)."""
QUESTION_WORDS = ("how", "why", "what", "when", "where", "which", "who", "prove", "explain")

_HEAD, _TAIL, _SIDE = 512, 128, 128
_DIGITS = b"0123456789"
_CAPITALS = bytes(range(65, 91))
_CODE_MARKS = b"{}()[]<>=;_\\"
_PIECE_FACTOR = np.uint32(2654435761)
# Odd, so it has an inverse modulo 2^64, which takes the position out of the hash of a word.
_BASE = 0x9E3779B97F4A7C15 | 1
_INVERSE = pow(_BASE, -1, 2**64)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_SEPARATOR = b"\x00\x00"

_IS_WORD = np.zeros(256, dtype=bool)
_IS_WORD[[*range(48, 58), *range(65, 91), 95, *range(97, 123), *range(128, 256)]] = True


class Sketch(NamedTuple):
    """What is kept of a turn until its features are needed: at most about 6 KB."""

    text: bytes
    numbers: tuple[float, ...]  # [len(NUMBERS)]; words and question words are filled in later


@dataclass(frozen=True, kw_only=True, slots=True)
class Hashed:
    """Hashed features of R turns: entry i says that turn `rows[i]` has `values[i]` more of feature
    `columns[i]`."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[np.float64]


def sketch(given: DemandInput) -> Sketch:
    """The part of a turn that features are made of."""
    request = given.request
    window = request
    if len(request) > _HEAD + _TAIL:
        window = f"{request[:_HEAD]}\n{request[-_TAIL:]}"
    counts = {"user": 0, "assistant": 0, "tool": 0}
    size, earlier = 0, ""
    for message in given.history:
        text = text_of(message.get("content"))
        size += len(text)
        role: Any = message.get("role")
        if role in counts:
            counts[role] += 1
        if role == "user":
            earlier = text
    tools = " ".join(given.tools)
    raw = window.encode("utf-8", "replace")
    seen = f" {window.lower()} \n{earlier[:_SIDE].lower()} \n{tools[:_SIDE].lower()}"
    numbers = (
        len(request),
        0,
        request.count("\n"),
        len(raw) - len(raw.translate(None, _DIGITS)),
        len(raw) - len(raw.translate(None, _CAPITALS)),
        request.count("```"),
        len(raw) - len(raw.translate(None, _CODE_MARKS)),
        request.count("?"),
        0,
        counts["user"],
        counts["assistant"],
        counts["tool"],
        size,
        len(given.tools),
    )
    return Sketch(
        text=seen.encode("utf-8", "replace").replace(b"\x00", b" "),
        numbers=tuple(math.log1p(n) for n in numbers),
    )


def features(sketches: Sequence[Sketch]) -> tuple[NDArray[np.float64], Hashed]:
    """Numbers [R, len(NUMBERS)] and hashed features of R turns.

    A word or piece counts 1 / sqrt(number of words or pieces of its turn), so that long requests
    have no longer vectors; their length is a number of its own.
    """
    numbers = np.array([s.numbers for s in sketches], dtype=np.float64)
    numbers = numbers.reshape(len(sketches), len(NUMBERS))
    if not sketches:
        none = np.zeros(0, dtype=np.int64)
        return numbers, Hashed(rows=none, columns=none, values=np.zeros(0))
    sizes = np.array([len(s.text) for s in sketches], dtype=np.int64)
    data = np.frombuffer(_SEPARATOR.join(s.text for s in sketches) + _SEPARATOR, dtype=np.uint8)
    piece_rows, pieces = _pieces(data, sizes)
    word_rows, words = _words(data, sizes)
    num_words = np.bincount(word_rows, minlength=len(sketches))
    asked = np.bincount(word_rows[_IS_QUESTION[words]], minlength=len(sketches))
    numbers[:, NUMBERS.index("words")] = np.log1p(num_words)
    numbers[:, NUMBERS.index("question_words")] = np.log1p(asked)
    values = (1 / np.sqrt(np.maximum(num_words, 1)), 1 / np.sqrt(sizes))
    return numbers, Hashed(
        rows=np.concatenate([word_rows, piece_rows]),
        columns=np.concatenate([words, pieces + 2**WORD_BITS]),
        values=np.concatenate([values[0][word_rows], values[1][piece_rows]]),
    )


def _pieces(
    data: NDArray[np.uint8], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Turn and hash of the three bytes that begin at each byte of a turn."""
    wide = data.astype(np.uint32)
    three = (wide[:-2] << 16) | (wide[1:-1] << 8) | wide[2:]
    hashes = (three * _PIECE_FACTOR) >> np.uint32(32 - PIECE_BITS)
    # The two zero bytes behind a turn end its last pieces, so no piece sees the next turn. The
    # pieces that begin at them are left out.
    inside = np.ones(len(data), dtype=bool)
    ends = np.cumsum(sizes + 2)
    inside[ends - 1] = inside[ends - 2] = False
    rows = np.repeat(np.arange(len(sizes)), sizes)
    return rows, hashes[inside[:-2]].astype(np.int64)


def _words(
    data: NDArray[np.uint8], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Turn and hash of each word: a longest run of letters, digits, `_` or bytes above 127."""
    inside = _IS_WORD[data]
    edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
    # A turn begins with a space and ends with zero bytes, so edges come in pairs.
    starts, ends = edges[::2], edges[1::2]
    powers = np.cumprod(np.full(len(data), _BASE, dtype=np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(data * powers, dtype=np.uint64)])
    back = np.cumprod(np.full(len(data), _INVERSE, dtype=np.uint64))[starts]
    hashes = ((sums[ends] - sums[starts]) * back * _MIX) >> np.uint64(64 - WORD_BITS)
    rows = np.searchsorted(np.cumsum(sizes + 2), starts, side="right")
    return rows, hashes.astype(np.int64)


def _question_table() -> NDArray[np.bool_]:
    table = np.zeros(2**WORD_BITS, dtype=bool)
    for word in QUESTION_WORDS:
        text = f" {word}".encode()
        data = np.frombuffer(text + _SEPARATOR, dtype=np.uint8)
        table[_words(data, np.array([len(text)]))[1]] = True
    return table


_IS_QUESTION = _question_table()
