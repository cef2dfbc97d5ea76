"""More examples for weak regions, without forgetting the others.

    shares_c = floor base_c + (1 - floor) base_c exp(kappa (1 - accuracy_c)) / sum of the same

so with floor = 0.5 no cell loses more than half of its base share. A cell is any region that was
measured, such as a scene; failures only say where a region is weak and are never imitated.

Source: NeoHorse-1 (arXiv 2609.08183) names the shift and no formula; this one is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distill.errors import ConfigError, DataError

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Shares of C cells; each of the first three sums to 1."""

    base: Floats  # [C]
    tilted: Floats  # [C] before the floor
    share: Floats  # [C] after it
    floored: NDArray[np.bool_]  # [C] alone, the tilt would have taken more than the floor allows


@dataclass(frozen=True, kw_only=True, slots=True)
class Picks:
    """Whole numbers of examples of C cells."""

    count: NDArray[np.int64]  # [C]
    short: NDArray[np.bool_]  # [C] the share asked for more than the cell has


def allocate(
    base: Sequence[float] | Floats,
    accuracy: Sequence[float] | Floats,
    *,
    kappa: float = 2.0,
    floor: float = 0.5,
) -> Shares:
    """Shares of cells from their base [C], such as counts of examples, and accuracies [C].

    A cell that was never measured (nan) counts as accurate as the base-weighted mean of the others,
    so it is neither favoured nor starved. ConfigError for a kappa below 0 or a floor outside
    [0, 1], DataError for other numbers that cannot be.
    """
    if not 0.0 <= floor <= 1.0 or not 0.0 <= kappa < np.inf:
        raise ConfigError(
            f"an allocation needs kappa >= 0 and floor within [0, 1], got {kappa} and {floor}"
        )
    given, measured = np.asarray(base, dtype=np.float64), np.asarray(accuracy, dtype=np.float64)
    if given.ndim != 1 or given.shape != measured.shape:
        raise DataError(f"{given.shape} base shares do not match {measured.shape} accuracies")
    known = ~np.isnan(measured)
    good = np.isfinite(given).all() and (given >= 0).all() and given.sum() > 0
    if not good or not ((measured[known] >= 0) & (measured[known] <= 1)).all():
        raise DataError(
            "base shares must be numbers >= 0 that do not sum to 0 and accuracies lie in [0, 1] or "
            f"be nan, got {given} and {measured}"
        )
    start = given / given.sum()
    if not known.all():
        heavy = start[known]
        mean = float(heavy @ measured[known] / heavy.sum()) if heavy.sum() > 0 else 0.5
        measured = np.where(known, measured, mean)
    tilted = start * np.exp(kappa * (1.0 - measured))
    tilted = tilted / tilted.sum()
    return Shares(
        base=start,
        tilted=tilted,
        share=floor * start + (1.0 - floor) * tilted,
        floored=tilted < floor * start,
    )


def picks(
    share: Sequence[float] | Floats, available: Sequence[int] | NDArray[np.int64], examples: int
) -> Picks:
    """How many of `examples` each cell gives, by its share [C] and at most what it has [C].

    Largest remainder; among equals the first cell. What a cell cannot give goes to the others by
    their shares, so all examples are given out while there are any in a cell with a share.
    """
    wanted, room = np.asarray(share, dtype=np.float64), np.asarray(available, dtype=np.int64)
    if wanted.ndim != 1 or wanted.shape != room.shape:
        raise DataError(f"{wanted.shape} shares do not match {room.shape} cells")
    if examples < 0 or not (room >= 0).all():
        raise DataError(f"counts of examples must not be negative, got {examples} and {room}")
    if not np.isfinite(wanted).all() or not (wanted >= 0).all():
        raise DataError(f"shares must be numbers >= 0, got {wanted}")
    total = wanted.sum()
    asked = examples * wanted / (total if total > 0 else 1.0)
    count = np.zeros(len(room), dtype=np.int64)
    open_cells = (wanted > 0) & (room > 0)
    left = examples
    # Each round fills a cell for good or ends: at most C rounds.
    while left and open_cells.any():
        weights = np.where(open_cells, wanted, 0.0)
        ideal = left * weights / weights.sum()
        full = open_cells & (ideal >= room)
        if full.any():
            count[full] = room[full]
            left -= int(room[full].sum())
            open_cells &= ~full
            continue
        count = np.where(open_cells, largest_remainder(ideal, left), count)
        break
    return Picks(count=count, short=asked > room)


def largest_remainder(ideal: Floats, total: int) -> NDArray[np.int64]:
    """Whole numbers near `ideal` [C] that sum to `total`, which `ideal` sums to as well."""
    whole = np.floor(ideal + 1e-9).astype(np.int64)
    rest = np.argsort(-(ideal - whole), kind="stable")
    whole[rest[: total - int(whole.sum())]] += 1
    return whole
