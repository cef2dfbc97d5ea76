"""From easy to hard in stages: scores -> which example is learnt in which stage, and when.

Examples are cut into as many bands of equal size as there are stages, by score. Row s of the mix
says which share of each band is learnt in stage s: mostly its own, with some easy examples held for
later. Rows and columns sum to 1, so every example is learnt exactly once per pass. Which examples
of a band go where, and their order inside a stage, follows from a hash of the seed and their ids.

Scores only order; they never weigh a loss. Source: NeoHorse-1 (arXiv 2609.08183), which has three
stages and does not disclose their mix.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from distill.errors import ConfigError, DataError

Order = Literal["curriculum", "shuffled", "reverse"]
"""`shuffled` and `reverse` are controls with the same examples and stage sizes: no order at all,
and the hardest stage first."""
ORDERS: tuple[Order, ...] = ("curriculum", "shuffled", "reverse")

MIX = ((0.80, 0.20, 0.0), (0.12, 0.60, 0.28), (0.08, 0.20, 0.72))
"""Stages by bands, easy to hard."""
# Shares such as 0.28 * 25 are whole numbers up to rounding.
_ROUNDING = 1e-9
_BATCH = 1 << 16

Ids = Sequence[str] | NDArray[np.uint64]
"""Names, or numbers [N] that stand for their 16 hexadecimal digits and take far less memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """N examples in S stages."""

    stage: NDArray[np.int64]  # [N] stage of each example
    band: NDArray[np.int64]  # [N] band of each example, 0 the easiest
    order: NDArray[np.int64]  # [N] the examples as they are learnt, stage after stage
    composition: NDArray[np.int64]  # [S, S] examples of each stage (row) and band (column)
    mean_score: NDArray[np.float64]  # [S] of each stage; nan in an empty one
    band_mean: NDArray[np.float64]  # [S] of each band; nan in an empty one

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples of each stage."""
        return tuple(int(n) for n in self.composition.sum(1))


def assign(
    scores: NDArray[Any],
    ids: Ids,
    *,
    seed: int = 0,
    mix: Sequence[Sequence[float]] = MIX,
    order: Order = "curriculum",
) -> Staged:
    """Stages and order of N examples with these scores [N] and ids.

    Equal arguments give equal stages, in whatever order the examples come. DataError for an id that
    occurs twice or a score that is no number, ConfigError for a mix whose rows or columns do not
    sum to 1.
    """
    shares = checked_mix(mix)
    values = np.asarray(scores, dtype=np.float64)
    if order not in ORDERS:
        raise ConfigError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    if values.shape != (len(ids),):
        raise DataError(f"{len(ids)} examples need one score each, got shape {values.shape}")
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise DataError(f"example {_name(ids, bad)} has the score {values[bad]}; expected a number")
    by_id = _distinct(ids)
    # Both sorts are stable, so that equal scores stay in the order of their ids.
    ranked = by_id[np.argsort(values[by_id], kind="stable")]
    num = len(shares)
    band_sizes = _even(len(ids), num)
    counts = stage_counts(band_sizes, mix)
    band = np.empty(len(ids), dtype=np.int64)
    band[ranked] = np.repeat(np.arange(num), band_sizes)
    luck = keyed_hashes(ids, f"stage:{seed}")
    stage = np.empty(len(ids), dtype=np.int64)
    if order == "shuffled":
        stage[by_id[np.argsort(luck[by_id], kind="stable")]] = np.repeat(
            np.arange(num), counts.sum(1)
        )
    else:
        # Within a band by luck; equal luck falls back to the id.
        mixed = by_id[np.lexsort((luck[by_id], band[by_id]))]
        stage[mixed] = np.concatenate([np.repeat(np.arange(num), column) for column in counts.T])
        if order == "reverse":
            stage = num - 1 - stage
    turn = keyed_hashes(ids, f"order:{seed}")
    learnt = by_id[np.lexsort((turn[by_id], stage[by_id]))]
    composition = np.bincount(stage * num + band, minlength=num * num).reshape(num, num)
    return Staged(
        stage=stage,
        band=band,
        order=learnt,
        composition=composition,
        mean_score=_means(values, stage, num),
        band_mean=_means(values, band, num),
    )


def checked_mix(mix: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """A mix as an array [S, S]. ConfigError unless it is square, not negative, and its rows and
    columns sum to 1."""
    lengths = {len(row) for row in mix}
    if lengths != {len(mix)}:
        raise ConfigError(
            f"a mix needs as many columns as rows, got {len(mix)} rows of {sorted(lengths)} columns"
        )
    shares = np.asarray(mix, dtype=np.float64)
    sums = np.concatenate([shares.sum(0), shares.sum(1)])
    if not (shares >= 0).all() or not (np.abs(sums - 1) < 1e-6).all():
        raise ConfigError(
            "rows and columns of a mix must be shares that sum to 1, so that every example is "
            f"learnt exactly once; got columns {shares.sum(0)} and rows {shares.sum(1)}"
        )
    return shares


def stage_counts(
    band_sizes: Sequence[int] | NDArray[np.int64], mix: Sequence[Sequence[float]] = MIX
) -> NDArray[np.int64]:
    """How many examples of each band (column) go to each stage (row): [S] -> [S, S].

    Columns sum to the bands exactly. What does not divide goes, one by one, to the stages that are
    furthest behind their share so far, so that stages stay within one example of it; a share of 0
    stays 0.
    """
    shares = checked_mix(mix)
    counts = np.zeros(shares.shape, dtype=np.int64)
    behind = np.zeros(len(shares))
    for band, size in enumerate(band_sizes):
        wanted = shares[:, band] * size
        whole = np.floor(wanted + _ROUNDING)
        rest = wanted - whole
        behind = behind + rest
        claims = np.where(rest > _ROUNDING, behind, -np.inf)
        left = int(size - whole.sum())
        extra = np.argsort(-claims, kind="stable")[:left]
        whole[extra] += 1
        behind[extra] -= 1
        counts[:, band] = whole.astype(np.int64)
    return counts


def stage_means(
    band_means: Sequence[float], mix: Sequence[Sequence[float]] = MIX
) -> NDArray[np.float64]:
    """Mean score that each stage is expected to have, from those of the bands: [S] -> [S]."""
    return checked_mix(mix) @ np.asarray(band_means, dtype=np.float64)


def keyed_hashes(ids: Ids, key: str) -> NDArray[np.uint64]:
    """64 bits per id [N] that look random and depend on the key and the id alone."""
    state = hashlib.blake2b(key.encode(), digest_size=8)
    state.update(b"\x00")
    out = bytearray()
    for start in range(0, len(ids), _BATCH):
        for name in _encoded(ids[start : start + _BATCH]):
            own = state.copy()
            own.update(name)
            out += own.digest()
    return np.frombuffer(out, dtype="<u8").astype(np.uint64)


def _encoded(ids: Ids) -> list[bytes]:
    if not isinstance(ids, np.ndarray):
        return [name.encode("utf-8", "surrogatepass") for name in ids]
    written = ids.astype(">u8").tobytes().hex().encode()
    return [written[i : i + 16] for i in range(0, len(written), 16)]


def _name(ids: Ids, i: int) -> str:
    return f"{int(ids[i]):016x}" if isinstance(ids, np.ndarray) else ids[i]


def _distinct(ids: Ids) -> NDArray[np.int64]:
    """Positions of the ids in sorted order. DataError when one occurs twice."""
    if isinstance(ids, np.ndarray):  # hexadecimal digits of one length sort as their numbers
        order = np.argsort(ids, kind="stable")
        same = np.flatnonzero(ids[order][1:] == ids[order][:-1])[:1].tolist()
    else:
        order = np.array(sorted(range(len(ids)), key=ids.__getitem__), dtype=np.int64)
        pairs = enumerate(itertools.pairwise(order.tolist()))
        same = [i for i, (a, b) in pairs if ids[a] == ids[b]][:1]
    if same:
        raise DataError(
            f"the id {_name(ids, int(order[same[0]]))} occurs twice; every example needs its own, "
            "so that it is learnt exactly once"
        )
    return order


def _even(n: int, parts: int) -> NDArray[np.int64]:
    """Sizes of n examples in equal parts; the first ones take what does not divide."""
    return np.array([n // parts + (i < n % parts) for i in range(parts)], dtype=np.int64)


def _means(values: NDArray[np.float64], place: NDArray[np.int64], num: int) -> NDArray[np.float64]:
    counts = np.bincount(place, minlength=num)
    sums = np.bincount(place, weights=values, minlength=num)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
