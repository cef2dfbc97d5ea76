"""What a store has taken in already: digests of ids and contents, in memory 44 bytes per turn.

Digests lie in a few sorted runs that are merged when they are of similar size, as in a
log-structured merge tree; looking up N of them takes N log(size). On disk a commit adds one packed
record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
SIZE = 16
"""Bytes of a digest."""
FORGOTTEN = 2**32 - 1
"""Stands in place of the reading for a turn that was removed on request."""


def words(digests: bytes) -> Words:
    """Packed digests as [N, 2] words."""
    return np.frombuffer(digests, dtype=np.uint64).reshape(-1, SIZE // 8)


@dataclass(slots=True)
class _Run:
    high: Words
    low: Words
    extra: Words
    """What belongs to each digest."""


@dataclass(slots=True)
class Digests:
    """A growing set of digests, each with a number of its own."""

    _runs: list[_Run] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(run.high) for run in self._runs)

    def add(self, keys: Words, extra: Words | None = None) -> None:
        """Digests [N, 2] that are not in the set, with numbers [N]."""
        if not len(keys):
            return
        if extra is None:
            extra = np.zeros(len(keys), np.uint64)
        self._runs.append(_sorted(keys[:, 0], keys[:, 1], extra))
        while len(self._runs) > 1 and len(self._runs[-2].high) <= 2 * len(self._runs[-1].high):
            right, left = self._runs.pop(), self._runs.pop()
            self._runs.append(
                _sorted(
                    np.concatenate([left.high, right.high]),
                    np.concatenate([left.low, right.low]),
                    np.concatenate([left.extra, right.extra]),
                )
            )

    def find(self, keys: Words) -> tuple[NDArray[np.bool_], Words]:
        """Whether each of [N, 2] is in the set, and its number."""
        found = np.zeros(len(keys), bool)
        extra = np.zeros(len(keys), np.uint64)
        for run in self._runs:
            at = np.searchsorted(run.high, keys[:, 0])
            at[at == len(run.high)] = 0
            hit = (run.high[at] == keys[:, 0]) & (run.low[at] == keys[:, 1])
            # Two digests with one first half stand beside each other, in any order.
            for n in np.flatnonzero((run.high[at] == keys[:, 0]) & ~hit):
                here = at[n] + 1
                while here < len(run.high) and run.high[here] == keys[n, 0]:
                    if run.low[here] == keys[n, 1]:
                        at[n], hit[n] = here, True
                    here += 1
            found |= hit
            extra[hit] = run.extra[at[hit]]
        return found, extra


def _sorted(high: Words, low: Words, extra: Words) -> _Run:
    order = np.argsort(high, kind="stable")
    return _Run(high[order], low[order], extra[order])


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenRecord:
    """What one commit took in, packed. All of one length."""

    ids: bytes
    contents: bytes
    readings: bytes
    """uint32 each: in which reading of which file the turn came."""


class Seen:
    """Ids with the reading they came in and the first half of their content; and contents."""

    def __init__(self, records: Iterable[SeenRecord] = ()) -> None:
        self.ids = Digests()
        self.contents = Digests()
        packed = list(records)
        self.add(
            SeenRecord(
                ids=b"".join(each.ids for each in packed),
                contents=b"".join(each.contents for each in packed),
                readings=b"".join(each.readings for each in packed),
            )
        )

    def add(self, record: SeenRecord) -> None:
        contents = words(record.contents)
        readings = np.frombuffer(record.readings, dtype=np.uint32).astype(np.uint64)
        # 32 bits of the content next to the reading: enough to tell two calls of one id apart.
        self.ids.add(words(record.ids), readings << np.uint64(32) | short(contents))
        self.contents.add(contents)


def short(contents: Words) -> Words:
    """The 32 bits of a content that are kept beside an id, [N]: the call without its outcome."""
    kept: Words = contents[:, 0] & np.uint64(0xFFFFFFFF)
    return kept


def split(extra: Words) -> tuple[list[int], list[int]]:
    """Readings and short contents of the numbers that `Seen.ids` keeps."""
    return (extra >> np.uint64(32)).tolist(), (extra & np.uint64(0xFFFFFFFF)).tolist()
