"""Nearest skills by cosine: a cache beside the bank that can always be made again.

Exact (flat) up to 100,000 vectors, an inverted file beyond. What is stored is safetensors and
JSON, never the native format of FAISS: vectors, coarse centres, and which text each vector is of.
The bank is the truth; an index that does not fit it is brought up to date or thrown away.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.errors import DataError, SkillBankError
from distill.rundir import digest_file, digest_json, from_json, read_json, staged_dir, write_json
from skills.embed import Embedder, EmbedderKey, Vectors, unit_rows
from skills.items import SkillItem

logger = logging.getLogger(__name__)
EXACT_UP_TO = 100_000
"""Vectors up to which every search compares with all of them."""
TRAINED_ON = 64
"""Vectors per coarse centre that the centres are learned from."""
PROBED = 32
"""Coarse cells that one search looks into."""
DIGITS = 6
"""Scores that agree in so many decimals are equal; the smaller id goes first."""
FORMAT = 1
_VECTORS, _MANIFEST = "vectors.safetensors", "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    id: str
    score: float
    """Cosine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    embedder: EmbedderKey
    ids: tuple[str, ...]
    hashes: tuple[str, ...]
    """Content hash of the skill that each vector belongs to."""
    digest: str
    """Of the file of vectors."""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True, slots=True)
class Synced:
    """What it took to make an index fit a bank."""

    num_kept: int
    num_added: int
    num_removed: int
    rebuilt: str = ""
    """Why the cached index was not used; empty when it was."""


class SkillIndex:
    """Vectors of skills by id. Equal contents answer equally, whatever the order of additions,
    as long as the search is exact."""

    def __init__(self, embedder: EmbedderKey) -> None:
        self.embedder = embedder
        self._ids: list[str] = []  # by row; removed rows keep their id until compaction
        self._rows: dict[str, int] = {}
        self._hashes: dict[str, str] = {}
        self._centres: Vectors | None = None
        self._faiss: Any = _flat(embedder.dimension)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, skill_id: str) -> bool:
        return skill_id in self._rows

    @property
    def entries(self) -> Mapping[str, str]:
        """Id -> content hash of the text that its vector belongs to."""
        return self._hashes

    @property
    def kind(self) -> str:
        return "flat" if self._centres is None else "ivf"

    def add(self, ids: Sequence[str], hashes: Sequence[str], vectors: Any) -> None:
        """Add vectors [N, d]; an id that is there already gets the new one."""
        rows = self._checked(vectors, len(ids))
        if len(set(ids)) != len(ids) or len(hashes) != len(ids):
            raise SkillBankError("an index needs different ids, each with one content hash")
        self.remove([i for i in ids if i in self._rows])
        start = len(self._ids)
        self._ids += ids
        self._rows |= {name: start + place for place, name in enumerate(ids)}
        self._hashes |= dict(zip(ids, hashes, strict=True))
        self._faiss.add(rows)
        self._fit()

    def remove(self, ids: Collection[str]) -> int:
        """Forget these; returns how many were there."""
        gone = [name for name in ids if self._rows.pop(name, None) is not None]
        for name in gone:
            del self._hashes[name]
        self._fit()
        return len(gone)

    def vectors(self, ids: Sequence[str]) -> Vectors:
        """The vectors of these ids: [N, d]."""
        missing = [name for name in ids if name not in self._rows]
        if missing:
            raise SkillBankError(f"the index knows no skill {missing[0]!r}; bring it up to date")
        if not ids:
            return np.zeros((0, self.embedder.dimension), dtype=np.float32)
        rows = np.array([self._rows[name] for name in ids], dtype=np.int64)
        found: Vectors = self._faiss.reconstruct_batch(rows)
        return found

    def search(
        self, queries: Any, k: int, *, among: Collection[str] | None = None
    ) -> list[list[Hit]]:
        """The k nearest of each query [Q, d], by score, then by id; fewer when there are fewer.

        `among` restricts the search to these ids.
        """
        rows = self._checked(queries, None)
        ids = self._rows if among is None else {n: self._rows[n] for n in among if n in self._rows}
        if k < 1 or not ids or not len(rows):
            return [[] for _ in rows]
        if among is not None and (self.kind == "ivf" and len(ids) <= EXACT_UP_TO):
            names = sorted(ids)
            scores = rows @ self.vectors(names).T
            return [_best([(names[i], float(row[i])) for i in _top(row, k)], k) for row in scores]
        selector = None if len(ids) == len(self._ids) else self._selector(list(ids.values()))
        return [self._nearest(row[None], k, len(ids), selector) for row in rows]

    def _nearest(self, query: Vectors, k: int, total: int, selector: Any) -> list[Hit]:
        asked = min(total, k + 8)
        while True:
            scores, rows = self._faiss.search(query, asked, params=self._parameters(selector))
            found = [
                (self._ids[r], float(s)) for r, s in zip(rows[0], scores[0], strict=True) if r >= 0
            ]
            tied = len(found) > k and round(found[-1][1], DIGITS) == round(found[k - 1][1], DIGITS)
            if not tied or asked >= total:
                return _best(found, k)
            asked = min(total, asked * 4)

    def _parameters(self, selector: Any) -> Any:
        if self._centres is None:
            return _faiss().SearchParameters(sel=selector) if selector is not None else None
        probes = min(PROBED, len(self._centres))
        if selector is None:
            return _faiss().SearchParametersIVF(nprobe=probes)
        return _faiss().SearchParametersIVF(sel=selector, nprobe=probes)

    def _selector(self, rows: Sequence[int]) -> Any:
        marks = np.zeros(len(self._ids), dtype=bool)
        marks[list(rows)] = True
        return _faiss().IDSelectorBitmap(np.packbits(marks, bitorder="little"))

    def _checked(self, vectors: Any, count: int | None) -> Vectors:
        rows = (
            unit_rows(vectors, source="the skill index") if len(vectors) else _none(vectors, self)
        )
        expected = (len(rows) if count is None else count, self.embedder.dimension)
        if rows.shape != expected:
            raise SkillBankError(
                f"the skill index holds vectors of {self.embedder}, expected the shape {expected}, "
                f"got {rows.shape}; use the embedder that the index was made with, or rebuild it"
            )
        return rows

    # -- kinds of index ---------------------------------------------------------------------

    def _fit(self) -> None:
        """Compact when a quarter is gone; change the kind when the size asks for it."""
        dead = len(self._ids) - len(self._rows)
        wants = "ivf" if len(self._rows) > EXACT_UP_TO else "flat"
        grown = self._centres is not None and len(self._rows) > len(self._centres) ** 2 // 4
        if dead <= 64 + len(self._rows) // 4 and wants == self.kind and not grown:
            return
        names = sorted(self._rows)
        self._fill(names, self.vectors(names), None)

    def _fill(self, names: Sequence[str], vectors: Vectors, centres: Vectors | None) -> None:
        """Start over with these rows. `centres` None learns them where they are needed."""
        self._ids, self._rows = list(names), {name: row for row, name in enumerate(names)}
        self._centres = None
        self._faiss = _flat(self.embedder.dimension)
        if len(names) > EXACT_UP_TO:
            self._centres = learn_centres(vectors) if centres is None else centres
            self._faiss = _inverted(self._centres)
        if len(names):
            self._faiss.add(vectors)

    # -- on disk ----------------------------------------------------------------------------

    def save(self, folder: Path) -> Path:
        """Write `folder/KEY`, complete or not at all, and drop other versions of it."""
        from safetensors.numpy import save_file

        names = sorted(self._rows)
        hashes = tuple(self._hashes[n] for n in names)
        path = folder / f"{self.embedder.digest}-{digest_json([names, hashes])[:16]}"
        if not path.exists():
            with contextlib.suppress(DataError), staged_dir(path) as partial:
                tensors = {"vectors": self.vectors(names)}
                if self._centres is not None:
                    tensors["centres"] = self._centres
                save_file(tensors, partial / _VECTORS)
                manifest = Manifest(
                    embedder=self.embedder,
                    ids=tuple(names),
                    hashes=hashes,
                    digest=digest_file(partial / _VECTORS),
                )
                write_json(partial / _MANIFEST, manifest)
        for old in folder.glob(f"{self.embedder.digest}-*"):
            if old != path:
                shutil.rmtree(old, ignore_errors=True)
        return path

    @classmethod
    def load(cls, path: Path, embedder: EmbedderKey) -> SkillIndex:
        """The index of a folder that `save` wrote. SkillBankError when it is damaged, or holds
        vectors of another embedder."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            manifest = from_json(Manifest, read_json(path / _MANIFEST), where=str(path))
            if manifest.embedder != embedder:
                raise SkillBankError(
                    f"{path} holds vectors of {manifest.embedder}, but the embedder is {embedder}; "
                    "rebuild the index, or use the embedder that it was made with"
                )
            if manifest.format != FORMAT or digest_file(path / _VECTORS) != manifest.digest:
                raise SkillBankError(f"{path} was changed after it was written; rebuild the index")
            tensors = load_file(path / _VECTORS)
            vectors = tensors["vectors"]
            if vectors.shape != (len(manifest.ids), embedder.dimension):
                raise SkillBankError(f"{path}: {len(manifest.ids)} ids, vectors {vectors.shape}")
        except (SafetensorError, KeyError, DataError) as error:
            raise SkillBankError(f"{path} is damaged: {error}; rebuild the index") from error
        made = cls(embedder)
        made._hashes = dict(zip(manifest.ids, manifest.hashes, strict=True))
        made._fill(manifest.ids, vectors, tensors.get("centres"))
        return made


def open_index(
    folder: Path, items: Sequence[SkillItem], embedder: Embedder
) -> tuple[SkillIndex, Synced]:
    """The index of exactly these skills: from the cache as far as it fits, else made anew.

    Other embedders' caches in the folder are left alone.
    """
    key, reason = EmbedderKey.of(embedder), "there was none"
    index = SkillIndex(key)
    saved = sorted(
        folder.glob(f"{key.digest}-*"), key=lambda path: (path.stat().st_mtime_ns, path.name)
    )
    for path in reversed(saved):
        try:
            index, reason = SkillIndex.load(path, key), ""
            break
        except SkillBankError as error:
            reason = str(error)
            logger.warning("the skill index is made anew: %s", error)
            shutil.rmtree(path, ignore_errors=True)
    synced = sync(index, items, embedder, rebuilt=reason)
    if synced.num_added or synced.num_removed or reason:
        index.save(folder)
    return index, synced


def sync(
    index: SkillIndex, items: Sequence[SkillItem], embedder: Embedder, *, rebuilt: str = ""
) -> Synced:
    """Make an index hold exactly these skills; only new and changed ones are embedded."""
    key = EmbedderKey.of(embedder)
    if index.embedder != key:
        raise SkillBankError(
            f"the index holds vectors of {index.embedder}, but the embedder is {key}; start a new "
            "index"
        )
    wanted = {item.id: item for item in items}
    before = len(index)
    removed = index.remove([name for name in index.entries if name not in wanted])
    fresh = [i for i in wanted.values() if index.entries.get(i.id) != i.sha256]
    if fresh:
        vectors = embedder.embed([item.text for item in fresh])
        index.add([item.id for item in fresh], [item.sha256 for item in fresh], vectors)
    changed = len(fresh) - (len(wanted) - (before - removed))
    return Synced(
        num_kept=before - removed - changed,
        num_added=len(fresh),
        num_removed=removed,
        rebuilt=rebuilt,
    )


def learn_centres(vectors: Vectors) -> Vectors:
    """Coarse centres of an inverted file, learned from a fixed sample: [C, d]."""
    count = max(1, 4 * math.isqrt(len(vectors)))
    step = max(1, len(vectors) // (count * TRAINED_ON))
    kmeans = _faiss().Kmeans(
        vectors.shape[1],
        count,
        niter=8,
        seed=0,
        spherical=True,
        max_points_per_centroid=TRAINED_ON * 4,
        min_points_per_centroid=1,
    )
    kmeans.train(np.ascontiguousarray(vectors[::step]))
    return unit_rows(kmeans.centroids, source="the skill index")


def _faiss() -> Any:
    """The library, loaded when it is needed; its annotations lack what its wrapper adds."""
    import faiss

    return faiss


def _flat(dimension: int) -> Any:
    return _faiss().IndexFlatIP(dimension)


def _inverted(centres: Vectors) -> Any:
    coarse = _flat(centres.shape[1])
    coarse.add(centres)
    index = _faiss().IndexIVFFlat(
        coarse, centres.shape[1], len(centres), _faiss().METRIC_INNER_PRODUCT
    )
    index.make_direct_map(True)
    return index


def _none(vectors: Any, index: SkillIndex) -> Vectors:
    return np.zeros((0, index.embedder.dimension), dtype=np.float32)


def _top(scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Places of the k best scores and of all that tie with the last of them."""
    if k >= len(scores):
        return np.arange(len(scores))
    rounded = np.round(scores.astype(np.float64), DIGITS)
    least = np.partition(rounded, len(scores) - k)[len(scores) - k]
    return np.flatnonzero(rounded >= least)


def _best(found: Sequence[tuple[str, float]], k: int) -> list[Hit]:
    order = sorted(found, key=lambda pair: (-round(pair[1], DIGITS), pair[0]))
    return [Hit(id=name, score=score) for name, score in order[:k]]
