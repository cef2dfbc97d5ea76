"""Removing a user, a session or a source from a store, for good."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from distill.curriculum import columns, segments
from distill.curriculum.pii import KeyedHash
from distill.curriculum.seen import FORGOTTEN, SIZE
from distill.curriculum.state import Segment
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


_COLUMNS = {"user": "user", "session": "session_id", "source": "source"}


def forget(
    store: LogStore,
    *,
    user: str | None = None,
    session: str | None = None,
    source: str | None = None,
    now_ms: int | None = None,
) -> list[str]:
    """Remove the turns of a user (by name or key), a session or a source, and what was said about
    them. Returns their ids, sorted.

    The digests of their ids stay, and rows up to `now_ms` are refused, so that no later import
    brings them back. The new segments are written first; one transaction then puts them in place of
    the old ones. ConfigError unless exactly one of the three is given.
    """
    given = {"user": user, "session": session, "source": source}
    named = [(kind, name) for kind, name in given.items() if name is not None]
    if len(named) != 1:
        raise ConfigError("forget: expected exactly one of user, session and source")
    ((kind, name),) = named
    names = _stored_names(store, kind, name)
    until = int(time.time() * 1000) if now_ms is None else now_ms
    with store.lock():
        segments.remove_strangers(store.path, store.segments)
        removed = _Gone()
        old: list[Segment] = []
        new: list[Segment] = []
        number = store.state.next_segment()
        for segment in store.segments:
            gone, rest = _split(store, segment, _COLUMNS[kind], names)
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
        _commit(store, old, new, removed, {(kind, each): until for each in kept})
        if kind == "source":
            store.state.db.execute(
                "UPDATE drops SET detail = '' WHERE file IN "
                "(SELECT id FROM files WHERE source = ?)",
                (name,),
            )
        segments.remove_strangers(store.path, store.segments)
    return sorted(turn_id(turn) for turn in removed.turns)


def _stored_names(store: LogStore, kind: str, name: str) -> set[str]:
    """What the store may have in the place of a name: a redactor hashes ids that are personal."""
    if kind == "user":
        return {name, store.user_key(name)}
    return {name, f"h:{KeyedHash(store.salt)(name)}"} if kind == "session" else {name}


def _split(
    store: LogStore, segment: Segment, column: str, names: set[str]
) -> tuple[_Gone, tuple[Any, Any] | None]:
    """Turns of a segment to remove, and the record batch and buckets of the others."""
    light = segments.read(store.path, segment, None, [column])
    if not any(name in names for batch in light for name in batch.column(0).to_pylist()):
        return _Gone(), None
    gone = _Gone()
    rest, buckets = [], []
    batches = segments.read(store.path, segment, None)
    for batch, (bucket, _) in zip(batches, segment.buckets, strict=True):
        hit = pa.array([name in names for name in batch.column(column).to_pylist()])
        out = batch.filter(hit)
        gone.turns += columns.decode(out)
        gone.digests.update(out.column("id_digest").to_pylist())
        kept = batch.filter(pa.compute.invert(hit))
        rest.append(kept)
        buckets += [bucket] * kept.num_rows
    if not buckets:
        return gone, None
    return gone, (pa.concat_batches(rest), np.array(buckets))


def _commit(
    store: LogStore,
    old: list[Segment],
    new: list[Segment],
    removed: _Gone,
    refused: dict[tuple[str, str], int],
) -> None:
    refs = {(t.source, ref) for t in removed.turns for ref in (t.source_id, t.trace_id) if ref}
    with store.state.transaction() as db:
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
        store.state.forget_evidence(sorted(refs))
        db.executemany(
            "INSERT OR REPLACE INTO forgotten VALUES (?, ?, ?)",
            [(kind, name, until) for (kind, name), until in refused.items()],
        )
