"""Scores of a frozen teacher, kept on disk: what was asked once is never computed again.

A shard is one safetensors file with the scores of the views that one call had to compute. Shards
appear whole or not at all, so several nights may share a folder; the oldest ones go when it grows
too large. Every entry carries a checksum: one that does not match is computed again. Distributions
are never kept.

The last bits of a float32 score depend on which views were computed together, so a night that finds
scores here agrees with one that does not to about 1e-6, not to the last bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.divergence import Distribution
from distill.errors import ConfigError
from distill.protocols import Teacher
from distill.rundir import atomic_write
from distill.types import ScoreRequest, Scores, TeacherView

logger = logging.getLogger(__name__)

Array = NDArray[Any]
GIB = 2**30
_SUMS, _SOURCES = "sums", "sources"
_numbers = itertools.count()


class CachedTeacher:
    """A teacher whose scores come from `folder` where they are there already.

    `key` names everything but the views that the scores depend on: weights, their type, the
    temperature, the shared vocabulary. Only for a teacher whose weights never change.
    """

    def __init__(self, teacher: Teacher, folder: Path, key: str, *, max_gib: float = 8.0) -> None:
        if not max_gib > 0:
            raise ConfigError(f"the cache of scores needs room, got cache_gib = {max_gib:g}")
        self.teacher = teacher
        self.folder = folder
        self.max_bytes = int(max_gib * GIB)
        self.hits = 0
        """Views answered from disk so far."""
        self.misses = 0
        """Views that had to be computed."""
        self._key = key.encode()
        self._known: dict[str, Path] = {}  # entry -> its shard
        self._read: set[str] = set()  # names of the shards whose entries are known

    @property
    def name(self) -> str:
        return self.teacher.name

    @property
    def capabilities(self) -> frozenset[str]:
        return self.teacher.capabilities

    def distribution(self, views: Sequence[TeacherView]) -> Distribution:
        return self.teacher.distribution(views)

    def score(self, views: Sequence[TeacherView], want: ScoreRequest) -> list[Scores]:
        names = [self._name(view, want, i) for i, view in enumerate(views)]
        found = self._load(names)
        self.hits += sum(name in found for name in names)
        # A view that stands twice in a call is computed once.
        first: dict[str, int] = {}
        for i, name in enumerate(names):
            if name not in found:
                first.setdefault(name, i)
        missing = list(first.values())
        if missing:
            self.misses += len(missing)
            listed = want.candidate_ids
            part = ScoreRequest(
                entropy=want.entropy,
                candidates=want.candidates,
                candidate_ids=None if listed is None else [listed[i] for i in missing],
            )
            made = self.teacher.score([views[i] for i in missing], part)
            fresh = dict(zip(first, made, strict=True))
            self._store(fresh)
            found |= fresh
        return [replace(found[n], view_id=v.id) for n, v in zip(names, views, strict=True)]

    def _name(self, view: TeacherView, want: ScoreRequest, row: int) -> str:
        digest = hashlib.sha256()
        listed = want.candidate_ids
        parts: list[bytes] = [
            self._key,
            np.asarray(view.token_ids, np.int64).tobytes(),
            np.asarray(view.positions, np.int64).tobytes(),
            f"{want.entropy}/{want.candidates}".encode(),
        ]
        if listed is not None:
            chosen = np.asarray(listed[row], np.int64)
            parts += [repr(chosen.shape).encode(), chosen.tobytes()]
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()[:40]

    # -- disk ----------------------------------------------------------------------------------

    def _shards(self) -> dict[str, os.DirEntry[str]]:
        """The shards by name; the names of older ones sort first."""
        try:
            with os.scandir(self.folder) as entries:
                kept = [e for e in entries if e.name.endswith(".safetensors") and e.name[0] != "."]
        except FileNotFoundError:
            return {}
        return {entry.name: entry for entry in sorted(kept, key=lambda e: e.name)}

    def _refresh(self) -> None:
        """Learn which entries there are, also those that others have written by now."""
        present = self._shards()
        gone = self._read - present.keys()
        if gone:
            self._known = {n: path for n, path in self._known.items() if path.name not in gone}
            self._read -= gone
        for name in sorted(present.keys() - self._read):  # of two equal entries the newer counts
            path = self.folder / name
            with _opened(path) as file:
                if file is not None:
                    self._known |= dict.fromkeys(_sums_of(file), path)
            self._read.add(name)

    def _load(self, names: Sequence[str]) -> dict[str, Scores]:
        self._refresh()
        wanted: dict[Path, list[str]] = {}
        for name in dict.fromkeys(names):
            if name in self._known:
                wanted.setdefault(self._known[name], []).append(name)
        found: dict[str, Scores] = {}
        for path, entries in wanted.items():
            with _opened(path) as file:
                for name, scores in _read_entries(file, entries).items():
                    if scores is None:
                        logger.warning("%s: the scores %s are damaged; made again", path, name)
                        del self._known[name]
                    else:
                        found[name] = scores
            with contextlib.suppress(OSError):
                os.utime(path)  # it was of use: others go first
        return found

    def _store(self, entries: Mapping[str, Scores]) -> None:
        from safetensors.numpy import save

        tensors: dict[str, Array] = {}
        sums, sources = {}, {}
        for name, scores in entries.items():
            own = _arrays(scores)
            if any(bool(np.isnan(a).any()) for a in own.values() if a.dtype.kind == "f"):
                continue  # never kept: what went wrong once should not stay
            sums[name], sources[name] = _checksum(own), scores.source
            tensors |= {f"{name}/{part}": array for part, array in own.items()}
        if not tensors:
            return
        path = self.folder / f"{time.time_ns():020d}-{os.getpid()}-{next(_numbers)}.safetensors"
        metadata = {_SUMS: json.dumps(sums), _SOURCES: json.dumps(sources)}
        atomic_write(path, save(tensors, metadata=metadata))
        self._known |= dict.fromkeys(sums, path)
        self._read.add(path.name)
        self._make_room()

    def _make_room(self) -> None:
        """Remove the shards that were of no use for the longest time."""
        sizes: list[tuple[int, str, int]] = []
        for name, entry in self._shards().items():
            with contextlib.suppress(OSError):  # another night removed it
                stat = entry.stat()
                sizes.append((stat.st_mtime_ns, name, stat.st_size))
        total = sum(size for _, _, size in sizes)
        for _, name, size in sorted(sizes):
            if total <= self.max_bytes:
                return
            (self.folder / name).unlink(missing_ok=True)
            total -= size


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A shard; None, and a warning, when it cannot be read. One that is gone is only None."""
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="np")
    except FileNotFoundError:
        yield None
        return
    except (SafetensorError, OSError) as error:
        logger.warning("%s cannot be read (%s); its scores are made again", path, error)
        yield None
        return
    with file as opened:
        yield opened


def _sums_of(file: Any) -> dict[str, str]:
    """Entry -> checksum, as the shard lists them; none when the list is damaged."""
    try:
        found = json.loads((file.metadata() or {}).get(_SUMS, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _read_entries(file: Any | None, names: Sequence[str]) -> dict[str, Scores | None]:
    """Entry -> its scores, None for one that is not whole; nothing of a shard that is gone."""
    from safetensors import SafetensorError

    if file is None:
        return {}
    sums, keys, found = _sums_of(file), set(file.keys()), dict[str, Scores | None]()
    for name in names:
        try:
            parts = [part for part in _PARTS if f"{name}/{part}" in keys]
            own = {part: file.get_tensor(f"{name}/{part}") for part in parts}
            source = json.loads(file.metadata()[_SOURCES])[name]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError):
            found[name] = None
            continue
        found[name] = _scores(own, source) if _checksum(own) == sums.get(name) else None
    return found


_PARTS = ("logprobs", "entropy", "candidate_ids", "candidate_logprobs")


def _arrays(scores: Scores) -> dict[str, Array]:
    """float32 where that loses nothing, which is so for all of ours; else float64."""
    found: dict[str, Array] = {}
    for name in _PARTS:
        values = getattr(scores, name)
        if values is None:
            continue
        exact: Array = np.asarray(values, np.int64 if name == "candidate_ids" else np.float64)
        short: Array = exact.astype(np.int32 if name == "candidate_ids" else np.float32)
        found[name] = short if np.array_equal(short, exact) else exact
    return found


def _scores(arrays: Mapping[str, Array], source: str) -> Scores:
    values: dict[str, Any] = {
        name: tuple(map(tuple, array.tolist())) if array.ndim == 2 else tuple(array.tolist())
        for name, array in arrays.items()
    }
    return Scores(**values, source=source, view_id="")


def _checksum(arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}/{array.dtype}/{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]
