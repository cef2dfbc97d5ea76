"""Which files of a source are new, unchanged, longer, renamed or changed, and where to go on.

A file is known by its size, its time and a fingerprint: digests of its head, of its tail and of
samples between. A text that still begins with what was read is continued at the position reached;
a changed file is read anew, and the digests of its turns keep each of them single.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from distill.curriculum.reading import TEXTS, Reading, container_of
from distill.curriculum.state import FileState

_EDGE = 64 * 1024
_SAMPLES, _SAMPLE = 16, 4096
How = Literal["new", "unchanged", "continue", "changed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What to do with a file. `file` has the size, time and fingerprint of now."""

    how: How
    file: FileState
    renamed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    path: str
    why: str


def fingerprint(path: Path, size: int) -> bytes:
    """Digest of the first `size` bytes of a file, by samples where it is large."""
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= 2 * _EDGE + _SAMPLES * _SAMPLE:
            digest.update(file.read(size))
            return digest.digest()
        digest.update(file.read(_EDGE))
        for n in range(1, _SAMPLES + 1):
            file.seek(n * size // (_SAMPLES + 1))
            digest.update(file.read(_SAMPLE))
        file.seek(size - _EDGE)
        digest.update(file.read(_EDGE))
    return digest.digest()


def plan(
    source: str, paths: Sequence[Path], known: Sequence[FileState], reading: Reading
) -> list[Planned | Unreadable]:
    """One entry per path, in their order."""
    by_path = {file.path: file for file in known}
    claimed: set[int] = set()
    now: dict[Path, FileState | Unreadable] = {}
    matched: dict[Path, FileState] = {}
    for path in paths:
        found = _look(source, path, reading, by_path.get(_name(path)))
        now[path] = found
        before = by_path.get(_name(path))
        if isinstance(found, FileState) and before and _begins_alike(path, found, before):
            matched[path] = before
            claimed.add(before.id)
    for path, found in now.items():
        if path in matched or isinstance(found, Unreadable):
            continue
        for before in known:
            if before.id not in claimed and before.size and _begins_alike(path, found, before):
                matched[path] = before
                claimed.add(before.id)
                break
    plans: list[Planned | Unreadable] = []
    for path, found in now.items():
        if isinstance(found, Unreadable):
            plans.append(found)
            continue
        before = matched.get(path) or by_path.get(_name(path))
        if before is not None and before.id in claimed and path not in matched:
            before = None  # what was under this name lies under another one now
        plans.append(_decide(path, found, before, path in matched))
    return plans


def _name(path: Path) -> str:
    return str(path.absolute())


def _look(
    source: str, path: Path, reading: Reading, before: FileState | None
) -> FileState | Unreadable:
    try:
        size, mtime_ns = _size_and_time(path)
        if before and before.finished and (before.size, before.mtime_ns) == (size, mtime_ns):
            return replace(before)
        return FileState(
            source=source,
            path=_name(path),
            container=container_of(path, reading),
            size=size,
            mtime_ns=mtime_ns,
            fingerprint=fingerprint(path, size),
        )
    except OSError as error:
        return Unreadable(path=_name(path), why=error.strerror or str(error))


def _size_and_time(path: Path) -> tuple[int, int]:
    """With the write-ahead log of SQLite, where new rows lie at first."""
    stat = path.stat()
    size, time = stat.st_size, stat.st_mtime_ns
    beside = path.with_name(path.name + "-wal")
    if beside.is_file():
        more = beside.stat()
        if more.st_size:
            size, time = size + more.st_size, max(time, more.st_mtime_ns)
    return size, time


def _begins_alike(path: Path, now: FileState, before: FileState) -> bool:
    if (now.size, now.mtime_ns, now.fingerprint) == (
        before.size,
        before.mtime_ns,
        before.fingerprint,
    ):
        return True
    if now.container not in TEXTS or now.container != before.container or now.size <= before.size:
        return False
    return fingerprint(path, before.size) == before.fingerprint


def _decide(path: Path, now: FileState, before: FileState | None, matched: bool) -> Planned:
    if before is None:
        return Planned(how="new", file=now)
    same = replace(
        before,
        path=now.path,
        size=now.size,
        mtime_ns=now.mtime_ns,
        fingerprint=now.fingerprint,
        container=now.container,
    )
    renamed = before.path != now.path
    if not matched:
        return Planned(how="changed", file=replace(same, importer=None))
    if before.finished and now.size == before.size:
        return Planned(how="unchanged", file=same, renamed=renamed)
    return Planned(how="continue", file=replace(same, finished=False), renamed=renamed)
