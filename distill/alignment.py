"""Which tokens of two tokenizers spell the same bytes.

A group is the shortest run of tokens on both sides that begins and ends at the same byte. Only
bytes are compared, so a character that is split over several tokens is nothing special. A token
that spells nothing (special, end of reply) belongs to no group; a group that has one inside is
given up, because the two sides then read different contexts. Linear in the tokens and the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """Groups of equal bytes: group i is tokens [start, stop) of either side."""

    student_spans: Spans  # [N, 2]
    teacher_spans: Spans  # [N, 2]
    student_skipped: int
    """Tokens that spell nothing."""
    teacher_skipped: int
    student_unmatched: int
    """Tokens that spell something, in no group: a tail that the other side does not have, or what
    stands around a skipped token or a difference."""
    teacher_unmatched: int

    @property
    def num_groups(self) -> int:
        return len(self.student_spans)


def align(student: Sequence[bytes | None], teacher: Sequence[bytes | None]) -> Alignment:
    """Group two lists of what tokens spell; None (or no bytes) is a token that spells nothing.

    From the first byte on where the sides differ, nothing is grouped.
    """
    ours, theirs = _Side(student), _Side(teacher)
    found: list[tuple[tuple[int, int], tuple[int, int]]] = []
    while ours.open() and theirs.open():
        while ours.size != theirs.size:
            side = ours if ours.size < theirs.size else theirs
            if not side.take():
                break
        if ours.size != theirs.size or ours.bytes() != theirs.bytes():
            break
        if not (ours.is_spoiled or theirs.is_spoiled):
            found.append((ours.span, theirs.span))
    student_spans, teacher_spans = tuple(a for a, _ in found), tuple(b for _, b in found)
    return Alignment(
        student_spans=student_spans,
        teacher_spans=teacher_spans,
        student_skipped=ours.num_silent,
        teacher_skipped=theirs.num_silent,
        student_unmatched=len(student) - ours.num_silent - _covered(student_spans),
        teacher_unmatched=len(teacher) - theirs.num_silent - _covered(teacher_spans),
    )


def readable(pieces: Sequence[bytes | None]) -> str:
    """The text of a reply for another tokenizer: up to the first byte that is no UTF-8, as where a
    reply was cut inside a character."""
    raw = b"".join(p for p in pieces if p)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return raw[: error.start].decode()


class _Side:
    """One list of tokens, read once from the left, with the group that is being formed."""

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        self.pieces = pieces
        self.start = self.stop = self.size = 0
        self.is_spoiled = False
        self.num_silent = sum(not p for p in pieces)

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.stop

    def open(self) -> bool:
        """Begin a group with the next token that spells something; False at the end."""
        while self.stop < len(self.pieces) and not self.pieces[self.stop]:
            self.stop += 1
        self.start, self.size, self.is_spoiled = self.stop, 0, False
        return self.take()

    def take(self) -> bool:
        """Add the next token that spells something; False at the end."""
        while self.stop < len(self.pieces):
            piece = self.pieces[self.stop]
            self.stop += 1
            if piece:
                self.size += len(piece)
                return True
            self.is_spoiled = True
        return False

    def bytes(self) -> bytes:
        return b"".join(p for p in self.pieces[self.start : self.stop] if p)


def _covered(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)
