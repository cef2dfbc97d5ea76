"""Near-duplicate turns inside a session family: the earliest stays.

A turn is compared by what is new in it, its request and its response, never by the history that it
repeats. Only turns of one family are compared: the same answer in two sessions is two observations.
A family is a session; a turn without one belongs to the turns of its source with the same system
prompt and the same first eight words of the first user message.

Two turns are near-duplicates if the Jaccard similarity of their word 3-grams is at least 0.8.
MinHash finds candidates, exact sets decide. In the order of time (then of id) a turn goes if it is
near to an earlier turn that stays; so the result depends on the set of turns alone, not on the
order in which they came. Everything is kept in SQLite; memory holds one page of one family.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from distill.curriculum.contamination import texts_beside
from distill.curriculum.messages import message_text
from distill.overlap import (
    SHINGLE,
    Hashes,
    bands,
    digest,
    grams_of,
    is_near,
    minhash,
    shingles,
    word_hashes,
)

THRESHOLD = 0.8
OPENING_WORDS = 8
SMALL = 32
"""Turns of a family up to which all pairs are compared."""
PAGE = 256
"""Turns of a family that are read and signed at once."""
IN_MEMORY = 4096
"""What turns share is kept in memory up to so many turns of a family, then on disk."""
MIN_BANDS = 3
"""Bands in which two turns must agree to be compared: spares most pairs that are only related. Of
10,000 pairs at the very threshold none agreed in fewer than four."""
_NO_TIME = -(1 << 62)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One turn to compare."""

    id: str
    family: str
    text: str
    ts: int | None = None
    words: Hashes | None = None
    """Hashes of the words of `text`, where somebody has them already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    """A turn that repeats an earlier one."""

    id: str
    of: str
    exact: bool
    """The words are equal, and not only near."""


def family_of(
    source: str, session_id: str | None, messages: Sequence[Mapping[str, Any]] | None
) -> str:
    """32 hex digits that turns have in common which may repeat each other."""
    if session_id:
        return _digest(source, "session", session_id)
    system = user = ""
    for message in messages or ():
        if message.get("role") in ("system", "developer"):
            system += message_text(message) + "\n"
        elif message.get("role") == "user":
            user = " ".join(message_text(message).casefold().split()[:OPENING_WORDS])
            break
    return _digest(source, "opening", system, user)


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """What a turn is compared by: all texts of its request and response, tool calls and results
    with them; `messages` are those of the turn alone."""
    return "\n".join(chain.from_iterable((message_text(m), *texts_beside(m)) for m in messages))


def _digest(*parts: str) -> str:
    data = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Nearby:
    """The turns seen so far. Add all of them, then ask for the duplicates.

    place: a file of its own, or an open connection whose table `nearby` is taken. Whoever gave a
    connection commits it; `close` commits and closes a file.
    """

    def __init__(
        self, place: Path | str | sqlite3.Connection, *, threshold: float = THRESHOLD
    ) -> None:
        self._own = not isinstance(place, sqlite3.Connection)
        self._db = place if isinstance(place, sqlite3.Connection) else sqlite3.connect(place)
        self._threshold = threshold
        if self._own:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS nearby (family BLOB, ts INTEGER, id TEXT, digest BLOB, "
            "shingles BLOB, PRIMARY KEY (family, ts, id)) WITHOUT ROWID"
        )

        # Made now: while rows are read no table can be made.
        self._db.execute(
            "CREATE TEMP TABLE IF NOT EXISTS nearby_keys (key INTEGER, place INTEGER, "
            "PRIMARY KEY (key, place)) WITHOUT ROWID"
        )
        self._db.execute(
            "CREATE TEMP TABLE IF NOT EXISTS nearby_kept (place INTEGER PRIMARY KEY, ts INTEGER, "
            "id TEXT)"
        )

    def __enter__(self) -> Nearby:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._own:
            self._db.commit()
            self._db.close()

    def add(self, entries: Iterable[Entry]) -> None:
        """Remember turns, in any order. One that was added before, with the same family, time and
        id, changes nothing; one without time counts as earliest."""
        self._db.executemany(
            "INSERT OR IGNORE INTO nearby VALUES (?, ?, ?, ?, ?)", map(_row_of, entries)
        )

    def duplicates(self) -> Iterator[Duplicate]:
        """Every turn that goes, family by family, the earliest first."""
        rows = self._db.execute(
            "SELECT family, ts, id, digest, shingles FROM nearby WHERE family IN "
            "(SELECT family FROM nearby GROUP BY family HAVING count(*) > 1) "
            "ORDER BY family, ts, id"
        )
        for family, members in groupby(rows, key=lambda row: row[0]):
            index = _Index(self._db, family)
            yield from _compare(members, index, self._threshold)


def near_duplicates(entries: Sequence[Entry], *, threshold: float = THRESHOLD) -> list[Duplicate]:
    """The same for turns that are all at hand, without a file. Of a small family every turn is
    compared with every other, so that no candidate can be missed."""
    families: dict[str, list[Entry]] = {}
    for entry in entries:
        families.setdefault(entry.family, []).append(entry)
    found: list[tuple[str, list[Duplicate]]] = []
    for family, own in families.items():
        if len(own) > SMALL:
            with Nearby(":memory:", threshold=threshold) as nearby:
                nearby.add(own)
                found.append((_digest(family), list(nearby.duplicates())))
        elif len(own) > 1:
            found.append((_digest(family), _among(own, threshold)))
    found.sort(key=lambda pair: pair[0])
    return [one for _, repeated in found for one in repeated]


def _among(entries: Sequence[Entry], threshold: float) -> list[Duplicate]:
    """The same for a small family."""
    members = sorted({(_time(e), e.id): e for e in entries}.items(), key=lambda item: item[0])
    words = [_words(entry) for _, entry in members]
    kept: list[tuple[str, set[int]]] = []
    exact: dict[bytes, str] = {}
    found = []
    for (_, entry), own, grams in zip(members, words, grams_of(words, SHINGLE), strict=True):
        key = own.tobytes() or digest(entry.text, own)
        if key in exact:
            found.append(Duplicate(id=entry.id, of=exact[key], exact=True))
            continue
        shingled = set(grams.tolist())
        near = next((name for name, other in kept if _near(other, shingled, threshold)), None)
        if near is None:
            kept.append((entry.id, shingled))
            exact[key] = entry.id
        else:
            found.append(Duplicate(id=entry.id, of=near, exact=False))
    return found


def _near(left: set[int], right: set[int], threshold: float) -> bool:
    """`is_near` for sets; an empty one is near to nothing."""
    small, large = sorted((len(left), len(right)))
    if not small or small < threshold * large - 1e-9:
        return False
    shared = len(left & right)
    return shared / (small + large - shared) >= threshold - 1e-12


def _time(entry: Entry) -> int:
    return _NO_TIME if entry.ts is None else entry.ts


def _words(entry: Entry) -> Hashes:
    return word_hashes(entry.text) if entry.words is None else entry.words


def _row_of(entry: Entry) -> tuple[bytes, int, str, bytes, bytes]:
    words = _words(entry)
    return (
        bytes.fromhex(_digest(entry.family)),
        _time(entry),
        entry.id,
        digest(entry.text, words),
        shingles(words).tobytes(),
    )


def _compare(rows: Iterator[Any], index: _Index, threshold: float) -> Iterator[Duplicate]:
    """Walk one family in the order of time."""
    while page := list(islice(rows, PAGE)):
        sets = [np.frombuffer(row[4], dtype=np.uint64) for row in page]
        all_bands = bands(minhash(sets)).tolist()
        for (_, ts, name, words, _), found, keys in zip(page, sets, all_bands, strict=True):
            exact = int.from_bytes(words[:8], "little")
            earlier = next(iter(index.sharing([exact], 1)), None)
            if earlier is not None and index.digest(*earlier) == words:
                yield Duplicate(id=name, of=earlier[1], exact=True)
                continue
            near = None
            if len(found):
                candidates = index.sharing(keys, MIN_BANDS)
                near = next(
                    (c for c in candidates if is_near(index.shingles(*c), found, threshold)), None
                )
            if near is None:
                index.keep(ts, name, [exact, *keys])
            else:
                yield Duplicate(id=name, of=near[1], exact=False)


class _Index:
    """The turns of one family that stay, by what they may share: in memory, beyond IN_MEMORY turns
    in a temporary table."""

    def __init__(self, db: sqlite3.Connection, family: bytes) -> None:
        self._db = db
        self._family = family
        self._turns: list[tuple[int, str]] = []
        self._places: dict[int, list[int]] = {}
        self._num_kept = 0
        self._on_disk = False

    def keep(self, ts: int, name: str, keys: Sequence[int]) -> None:
        if self._on_disk:
            self._write(self._num_kept, ts, name, keys)
        else:
            for key in keys:
                self._places.setdefault(key, []).append(self._num_kept)
            self._turns.append((ts, name))
            if len(self._turns) > IN_MEMORY:
                self._move()
        self._num_kept += 1

    def sharing(self, keys: Sequence[int], least: int) -> Iterator[tuple[int, str]]:
        """(time, id) of the turns that share at least so many keys, the earliest first."""
        if self._on_disk:
            marks = ",".join("?" * len(keys))
            rows = self._db.execute(
                "SELECT t.ts, t.id FROM (SELECT place FROM temp.nearby_keys WHERE key IN "
                f"({marks}) GROUP BY place HAVING count(*) >= {least}) JOIN temp.nearby_kept t "
                "USING (place) ORDER BY place",
                [_signed(key) for key in keys],
            )
            yield from rows.fetchall()
            return
        shared = Counter(chain.from_iterable(self._places.get(key, ()) for key in keys))
        for place in sorted(place for place, times in shared.items() if times >= least):
            yield self._turns[place]

    def digest(self, ts: int, name: str) -> bytes:
        return bytes(self._stored("digest", ts, name))

    def shingles(self, ts: int, name: str) -> Hashes:
        return np.frombuffer(self._stored("shingles", ts, name), dtype=np.uint64)

    def _stored(self, column: str, ts: int, name: str) -> bytes:
        (value,) = self._db.execute(
            f"SELECT {column} FROM nearby WHERE family = ? AND ts = ? AND id = ?",
            (self._family, ts, name),
        ).fetchone()
        return value  # type: ignore[no-any-return]

    def _write(self, place: int, ts: int, name: str, keys: Sequence[int]) -> None:
        self._db.execute("INSERT INTO temp.nearby_kept VALUES (?, ?, ?)", (place, ts, name))
        self._db.executemany(
            "INSERT OR IGNORE INTO temp.nearby_keys VALUES (?, ?)",
            [(_signed(key), place) for key in keys],
        )

    def _move(self) -> None:
        """From memory to a temporary table, which SQLite keeps in a file of its own."""
        for table in ("nearby_keys", "nearby_kept"):
            self._db.execute(f"DELETE FROM temp.{table}")
        by_place: dict[int, list[int]] = {}
        for key, places in self._places.items():
            for place in places:
                by_place.setdefault(place, []).append(key)
        for place, keys in by_place.items():
            self._write(place, *self._turns[place], keys)
        self._on_disk, self._turns, self._places = True, [], {}


def _signed(key: int) -> int:
    """SQLite's numbers are signed."""
    return key - (1 << 64) if key >> 63 else key
