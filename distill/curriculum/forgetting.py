"""Removing a user, a session or a source from a store, for good."""

from __future__ import annotations

import time
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from distill.curriculum import columns, segments
from distill.curriculum.pii import KeyedHash
from distill.curriculum.seen import FORGOTTEN, SIZE
from distill.curriculum.state import DROPS_OF_FILES, Segment, talk_key
from distill.curriculum.turns import turn_id
from distill.errors import ConfigError

if TYPE_CHECKING:
    from distill.curriculum.records import RoutingTurn
    from distill.curriculum.store import LogStore


@dataclass(slots=True)
class _Gone:
    turns: list[RoutingTurn] = field(default_factory=list)
    digests: set[bytes] = field(default_factory=set)
    """Digests of their ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meant:
    """Which rows of a store are to go."""

    column: str
    """user, session_id or source."""
    names: frozenset[str]
    """What stands in the column."""
    source: str | None = None
    """Only rows of this source."""
    talks: frozenset[tuple[str, str]] = frozenset()
    """(source, session): whole conversations besides."""

    def hits(self, table: Any) -> list[bool]:
        """Which rows of a table or batch with the columns user, source and session_id."""
        names = table.column(self.column).to_pylist()
        sources = table.column("source").to_pylist()
        sessions = table.column("session_id").to_pylist()
        return [
            (name in self.names and self.source in (None, source))
            or (source, session) in self.talks
            for name, source, session in zip(names, sources, sessions, strict=True)
        ]


_COLUMNS = {"user": "user", "session": "session_id", "source": "source"}
NAMES = ("user", "source", "session_id")


def forget(
    store: LogStore,
    *,
    user: str | None = None,
    session: str | None = None,
    source: str | None = None,
    talks: Iterable[tuple[str, str]] = (),
    now_ms: int | None = None,
) -> list[str]:
    """Remove the turns of a user (by name or key), a session or a source, and what was said about
    them. Returns their ids, sorted.

    session: in every source, or with `source` in this one. talks: (source, session) of whole
    conversations that go with them, at once.

    The digests of their ids stay, and rows up to `now_ms` are refused, so that no later import
    brings them back. The new segments are written first; one transaction then puts them in place of
    the old ones. ConfigError unless exactly one of user, session and source is given, or session
    and source.
    """
    kind, name = _named(user, session, source)
    wanted = meant(store, kind, name, source if kind == "session" else None, talks)
    names = set(wanted.names)
    until = int(time.time() * 1000) if now_ms is None else now_ms
    with store.lock():
        segments.remove_strangers(store.path, store.segments)
        removed = _Gone()
        old: list[Segment] = []
        new: list[Segment] = []
        number = store.state.next_segment()
        for segment in store.segments:
            gone, rest = _split(store, segment, wanted)
            if not gone.turns:
                continue
            removed.turns += gone.turns
            removed.digests |= gone.digests
            old.append(segment)
            if rest is not None:
                new.append(segments.write(store.path, number, *rest))
                number += 1
        # A user's plain name must not stay: only what stands in the store for it.
        known = {store.user_key(name)} | {turn.user for turn in removed.turns}
        kept = names & known if kind == "user" else names
        refused = {(kind, each) for each in kept}
        if wanted.source is not None:
            refused = {("talk", talk_key(wanted.source, each)) for each in names}
        refused |= {("talk", talk_key(*talk)) for talk in wanted.talks}
        about = {(t.source, ref) for t in removed.turns for ref in (t.source_id, t.trace_id) if ref}
        doomed = statements(store, about, source if kind == "source" else None)
        with store.state.transaction():
            _commit(store, old, new, removed, dict.fromkeys(refused, until))
            store.state.forget_evidence(sorted(doomed))
            sources = {turn.source for turn in removed.turns}
            _clear_details(store, sources | ({name} if kind == "source" else set()), name)
        segments.remove_strangers(store.path, store.segments)
    return sorted(turn_id(turn) for turn in removed.turns)


def _named(user: str | None, session: str | None, source: str | None) -> tuple[str, str]:
    if session is not None and user is None:
        return "session", session
    named = [(k, n) for k, n in (("user", user), ("source", source)) if n is not None]
    if len(named) != 1 or session is not None:
        raise ConfigError(
            "forget: expected exactly one of user, session and source, or session and source"
        )
    return named[0]


def meant(
    store: LogStore,
    kind: str,
    name: str,
    source: str | None = None,
    talks: Iterable[tuple[str, str]] = (),
) -> Meant:
    """The rows of a store that are of a user, a session (of one source) or a source."""
    return Meant(
        column=_COLUMNS[kind],
        names=frozenset(stored_names(store, kind, name)),
        source=source,
        talks=frozenset(talks),
    )


def stored_names(store: LogStore, kind: str, name: str) -> set[str]:
    """What the store may have in the place of a name: a redactor hashes ids that are personal."""
    if kind == "user":
        return {name, store.user_key(name)}
    return {name, f"h:{KeyedHash(store.salt)(name)}"} if kind == "session" else {name}


def _split(
    store: LogStore, segment: Segment, wanted: Meant
) -> tuple[_Gone, tuple[Any, Any] | None]:
    """Turns of a segment to remove, and the record batch and buckets of the others."""
    light = segments.read(store.path, segment, None, NAMES)
    if not any(any(wanted.hits(batch)) for batch in light):
        return _Gone(), None
    gone = _Gone()
    rest, buckets = [], []
    batches = segments.read(store.path, segment, None)
    for batch, (bucket, _) in zip(batches, segment.buckets, strict=True):
        hit = pa.array(wanted.hits(batch), pa.bool_())
        out = batch.filter(hit)
        gone.turns += columns.decode(out)
        gone.digests.update(out.column("id_digest").to_pylist())
        kept = batch.filter(pa.compute.invert(hit))
        rest.append(kept)
        buckets += [bucket] * kept.num_rows
    if not buckets:
        return gone, None
    return gone, (pa.concat_batches(rest), np.array(buckets))


# -- what others say ------------------------------------------------------------------------------


def statements(
    store: LogStore, about: Set[tuple[str, str]], source: str | None = None
) -> set[tuple[str, str]]:
    """(source, ref) of the evidence about turns, whoever made it: a curriculum joins it in the same
    way. With a source also of all that came from it.

    about: (source, id or trace) of the turns that go. What another source says stays where that
    source has such a turn itself: then it speaks of that one.
    """
    names = sorted({ref for _, ref in about})
    found: set[tuple[str, str]] = set()
    for start in range(0, len(names), 1000):
        part = names[start : start + 1000]
        marks = ", ".join("?" * len(part))
        query = f"SELECT DISTINCT source, ref FROM evidence WHERE ref IN ({marks})"
        found |= set(store.state.db.execute(query, part))
    foreign = found - about
    if foreign:
        table = store.table(None, ("source", "source_id", "trace_id"))
        sources = table["source"].to_pylist()
        for name in ("source_id", "trace_id"):
            found -= foreign & set(zip(sources, table[name].to_pylist(), strict=True))
    if source is not None:
        query = "SELECT DISTINCT source, ref FROM evidence WHERE source = ? AND ref != ''"
        found |= set(store.state.db.execute(query, (source,)))
    return found


def count_statements(store: LogStore, about: Iterable[tuple[str, str]]) -> int:
    """How many there are."""
    query = "SELECT count(*) FROM evidence WHERE source = ? AND ref = ?"
    return sum(store.state.db.execute(query, each).fetchone()[0] for each in about)


def _clear_details(store: LogStore, sources: Iterable[str], name: str) -> None:
    """Empty what dropped rows of these sources told, and what quotes the name: nobody knows whose
    rows they were."""
    db = store.state.db
    query = f"SELECT drops.file, drops.position, part FROM drops {DROPS_OF_FILES} WHERE"
    rows = [row for each in sources for row in db.execute(f"{query} source = ?", (each,))]
    rows += db.execute(f"{query} instr(detail, ?)", (name,)).fetchall()
    db.executemany(
        "UPDATE drops SET detail = '' WHERE file = ? AND position = ? AND part = ?", rows
    )


def _commit(
    store: LogStore,
    old: list[Segment],
    new: list[Segment],
    removed: _Gone,
    refused: dict[tuple[str, str], int],
) -> None:
    db = store.state.db
    db.executemany("DELETE FROM segments WHERE number = ?", [(s.number,) for s in old])
    for segment in new:
        store.state.add_segment(segment)
    for number, record in store.state.seen():
        readings = np.frombuffer(record.readings, np.uint32).copy()
        for n in range(len(readings)):
            if record.ids[n * SIZE : (n + 1) * SIZE] in removed.digests:
                readings[n] = FORGOTTEN
        if readings.tobytes() != record.readings:
            store.state.set_seen_readings(number, readings.tobytes())
    db.executemany(
        "INSERT OR REPLACE INTO forgotten VALUES (?, ?, ?)",
        [(kind, name, until) for (kind, name), until in refused.items()],
    )
