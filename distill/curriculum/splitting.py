"""Rows of a text that comes in chunks: lines, JSON values, CSV records; one row in memory at most.

Each splitter yields `(start, end, row, closed)`: positions in the text, the bytes of the row or
None where it is longer than `limit`, and whether its end was seen (False: the text stops in it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

Piece = tuple[int, int, bytes | None, bool]

_STRING = re.compile(rb'(?:[^"\\]|\\.)*+"', re.DOTALL)
"""The rest of a JSON string, its closing quote included."""
_MARK = re.compile(rb'["{}\[\],]')
_SPACE = b" \t\r\n"


def lines(chunks: Iterable[bytes], position: int, limit: int) -> Iterator[Piece]:
    """Lines without their newline. `end` lies behind the newline."""
    held: list[bytes] = []
    size, huge, begin = 0, False, position
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        size += len(first)
        huge = huge or size > limit
        if huge:
            held.clear()
        else:
            held.append(first)
        if not rest:
            continue
        last = rest.pop()
        end = begin + size + 1
        yield begin, end, None if huge else b"".join(held), True
        for line in rest:
            begin, end = end, end + len(line) + 1
            yield begin, end, line if len(line) <= limit else None, True
        begin, size = end, len(last)
        huge = size > limit
        held = [] if huge else [last]
    if size:
        yield begin, begin + size, None if huge else b"".join(held), False


def csv_records(chunks: Iterable[bytes], position: int, limit: int) -> Iterator[Piece]:
    """Records of a CSV text: lines, joined while a quote is open.

    A quote that is never closed would swallow the rest of the file: a record that grows over the
    limit is given up at its first line, and reading goes on with the second.
    """
    held: list[tuple[int, int, bytes]] = []
    size, is_open = 0, False
    waiting = lines(chunks, position, limit)
    again: list[Piece] = []
    while True:
        piece = again.pop() if again else next(waiting, None)
        if piece is None or piece[2] is None:
            if held:
                yield held[0][0], held[-1][1], b"".join(part for *_, part in held), False
                held, size, is_open = [], 0, False
            if piece is None:
                return
            yield piece
            continue
        begin, end, line, closed = piece
        assert line is not None
        held.append((begin, end, line + b"\n"))
        size += len(line) + 1
        is_open ^= line.count(b'"') % 2 == 1
        if not is_open:
            yield held[0][0], end, b"".join(part for *_, part in held), closed
            held, size = [], 0
        elif size > limit:
            yield held[0][0], held[0][1], None, True
            again += [(a, b, part[:-1], True) for a, b, part in reversed(held[1:])]
            held, size, is_open = [], 0, False


class JsonValues:
    """Top-level JSON values, or the elements of one top-level array, without parsing them.

    Brackets are counted outside of strings. A value that is broken inside but balanced is one row
    like any other; its parser will say what is wrong.
    """

    def __init__(self, position: int, limit: int, *, in_array: bool = False) -> None:
        self.limit = limit
        self._base = position
        self._depth = 0
        self._floor = 1 if in_array else 0
        """How many brackets are open around a row."""
        if in_array:
            self._depth = 1
        self._in_string = self._escaped = False
        self._held: list[bytes] = []
        self._size = 0
        self._begin = -1
        self._fresh = not in_array

    def split(self, chunks: Iterable[bytes]) -> Iterator[Piece]:
        for chunk in chunks:
            yield from self._feed(chunk)
            self._base += len(chunk)
        if self._begin >= 0:
            yield self._begin, self._base, self._row(), False
        elif self._depth and self._floor:
            yield self._base, self._base, b"", False

    def _feed(self, chunk: bytes) -> Iterator[Piece]:
        at = 0  # of the part of the chunk that no row has taken yet
        here = 0
        while here < len(chunk):
            if self._in_string:
                here = self._string_end(chunk, here)
                continue
            found = _MARK.search(chunk, here)
            stop = found.start() if found else len(chunk)
            if self._begin < 0 and (bare := len(chunk[here:stop].lstrip(_SPACE))):
                self._begin, at = self._base + stop - bare, stop - bare
            if found is None:
                break
            here = stop + 1
            closes = self._mark(chunk[stop : stop + 1])
            if closes == "opens" and self._begin < 0:
                self._begin, at = self._base + stop, stop
            elif closes in ("ends", "separates") and self._begin >= 0:
                end = here if closes == "ends" else stop
                self._take(chunk[at:end])
                yield self._begin, self._base + end, self._row(), True
                self._reset()
                at = here
        if self._begin >= 0:
            self._take(chunk[at:])

    def _mark(self, mark: bytes) -> str:
        """Count a bracket; say what it means for the row."""
        if mark == b'"':
            self._in_string = True
            return "opens"
        if mark == b",":
            return "separates" if self._depth == self._floor else "inside"
        if mark in b"{[":
            fresh, self._fresh = self._fresh, False
            self._depth += 1
            if fresh and mark == b"[":
                self._floor = 1
                return "inside"
            return "opens"
        if self._depth == self._floor:  # the end of the array, or one bracket too many
            self._depth = self._floor = 0
            return "separates"
        self._depth -= 1
        return "ends" if self._depth == self._floor else "inside"

    def _string_end(self, chunk: bytes, here: int) -> int:
        if self._escaped:
            self._escaped = False
            here += 1
        found = _STRING.match(chunk, here)
        if found:
            self._in_string = False
            return found.end()
        text = len(chunk.rstrip(b"\\"))
        self._escaped = (len(chunk) - max(text, here)) % 2 == 1
        return len(chunk)

    def _take(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self.limit:
            self._held.clear()
        elif part:
            self._held.append(part)

    def _row(self) -> bytes | None:
        return None if self._size > self.limit else b"".join(self._held).rstrip(_SPACE)

    def _reset(self) -> None:
        self._held, self._size, self._begin = [], 0, -1
