"""What was erased from a log store, or is being erased, as ids that say nothing about a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.rundir import digest_json, now, read_json, write_json

if TYPE_CHECKING:
    from distill.curriculum.store import LogStore
    from flows.forgetting import Wanted

LEDGER = "forgotten"
"""Folder in a store."""


def read(store: LogStore, wanted: Wanted) -> Mapping[str, Any]:
    """What an earlier call erased, or meant to: turn ids; sessions only while it is unfinished."""
    file = _path(store, wanted)
    return dict(read_json(file)) if file.exists() else {}


def note(
    store: LogStore,
    wanted: Wanted,
    ids: Iterable[str],
    talks: Iterable[tuple[str | None, str]],
    *,
    pending: bool,
) -> None:
    """Write down the ids of turns that go, and while it is pending their (source, session)."""
    known = sorted([source, name] for source, name in talks if source is not None)
    table = {"kind": wanted.kind, "at": now(), "pending": pending, "ids": sorted(ids)}
    write_json(_path(store, wanted), {**table, "sessions": known if pending else []})


def _path(store: LogStore, wanted: Wanted) -> Path:
    """Named by a keyed digest, so that the file's name tells nobody who was forgotten."""
    inside = f"{wanted.source}/" if wanted.source else ""
    name = store.user_key(f"{wanted.kind}/{inside}{wanted.name}")
    return store.path / LEDGER / f"{digest_json([wanted.kind, name])[:16]}.json"
