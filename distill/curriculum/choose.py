"""Of all turns of a log: the boundary table, which turns are learnt, and in which order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distill.curriculum.allocation import Picks, Shares, allocate, picks
from distill.curriculum.boundary import Boundary, BoundaryOptions, Columns, boundary_table
from distill.curriculum.examples import write_plan
from distill.curriculum.light import USABLE, WHY, Table, finish_rows
from distill.curriculum.options import CurriculumSection
from distill.curriculum.records import NUM_TIERS
from distill.curriculum.stages import Staged, assign, keyed_hashes
from distill.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """How many turns each cell of scene and demand band gave."""

    cell: NDArray[np.int64]  # [C] scene * 4 + band
    available: NDArray[np.int64]  # [C]
    accuracy: NDArray[np.float64]  # [C] of the student's tier; nan where it was not seen
    shares: Shares
    picks: Picks


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What became of N turns."""

    table: Table
    boundary: Boundary
    staged: Staged
    chosen: NDArray[np.int64]  # [E] turns that are examples
    allocation: Allocation | None


def choose(
    table: Table, options: CurriculumSection, out: Path, *, seed: int, num_buckets: int
) -> Chosen:
    """Fill in the reasons, write `plan.arrow` and `turns.arrow`. DataError when nothing is left."""
    _drop_repeated(table)
    boundary = boundary_table(
        _columns(table),
        table.scenes,
        BoundaryOptions(min_n=options.min_turns, capable=options.capable, cap=options.weight_cap),
    )
    usable = np.flatnonzero(table["reason"] == USABLE)
    if not len(usable):
        raise DataError(_nothing(table))
    allocation = None
    if 0 < options.examples < len(usable):
        usable, allocation = _allocated(table, boundary, usable, options, seed)
    scores = table["score"] if options.score == "soft" else table["band"]
    staged = assign(scores[usable], table["id"][usable], seed=seed, mix=square(options.mix))
    after = _after(table, boundary, usable, staged)
    finish_rows(out, num_buckets, after)
    _write_plan(table, usable[staged.order], after["stage"], out)
    return Chosen(
        table=table, boundary=boundary, staged=staged, chosen=usable, allocation=allocation
    )


def square(mix: tuple[float, ...]) -> tuple[tuple[float, ...], ...]:
    """A mix that a configuration gives row by row."""
    size = math.isqrt(len(mix))
    rows = [mix[i : i + size] for i in range(0, len(mix), size or 1)]
    return tuple(rows)


def _drop_repeated(table: Table) -> None:
    """Of turns with the same prompt and the same answer the earliest stays."""
    usable = np.flatnonzero(table["reason"] == USABLE)
    order = usable[np.lexsort((table["id"][usable], table["ts"][usable], table["content"][usable]))]
    same = table["content"][order][1:] == table["content"][order][:-1]
    table["reason"][order[1:][same]] = WHY.index("repeated")


def _columns(table: Table) -> Columns:
    return Columns(
        scene=table["scene"],
        band=table["band"],
        tier=table["tier"],
        outcome=table["outcome"],
        verified=table["verified"],
        cached=table["cached"],
        propensity=table["propensity"],
        weight=table["weight"],
        predicted=table["predicted"],
        rescued=table["rescued"],
    )


def _allocated(
    table: Table,
    boundary: Boundary,
    usable: NDArray[np.int64],
    options: CurriculumSection,
    seed: int,
) -> tuple[NDArray[np.int64], Allocation]:
    """The turns of a curriculum of limited size: more of the cells in which the student is weak."""
    where = table["scene"][usable].astype(np.int64) * NUM_TIERS + table["band"][usable]
    cell, place, available = np.unique(where, return_inverse=True, return_counts=True)
    number = {name: i for i, name in enumerate(table.scenes)}
    rates = {
        number[c.scene] * NUM_TIERS + c.band: c.rate
        for c in boundary.cells
        if c.tier == options.student_tier
    }
    accuracy = np.array([rates.get(int(c), float("nan")) for c in cell])
    shares = allocate(available.astype(float), accuracy, kappa=options.kappa, floor=options.floor)
    counted = picks(shares.share, available, options.examples)
    luck = keyed_hashes(table["id"][usable], f"pick:{seed}")
    # By cell, then by luck; of each cell the first ones.
    order = np.lexsort((table["id"][usable], luck, place))
    begin = np.concatenate([[0], np.cumsum(available)[:-1]])
    rank = np.empty(len(usable), dtype=np.int64)
    rank[order] = np.arange(len(usable)) - begin[place[order]]
    keep = rank < counted.count[place]
    table["reason"][usable[~keep]] = WHY.index("not_picked")
    found = Allocation(
        cell=cell, available=available, accuracy=accuracy, shares=shares, picks=counted
    )
    return usable[keep], found


def _after(
    table: Table, boundary: Boundary, chosen: NDArray[np.int64], staged: Staged
) -> dict[str, NDArray[Any]]:
    """What is known of every turn in the end."""
    stage = np.full(len(table), -1, dtype=np.int8)
    position = np.full(len(table), -1, dtype=np.int64)
    stage[chosen] = staged.stage + 1
    position[chosen[staged.order]] = np.arange(len(chosen))
    return {
        "reason": table["reason"],
        "under": boundary.under_routed,
        "over": boundary.over_routed,
        "stage": stage,
        "position": position,
    }


def _write_plan(
    table: Table, learnt: NDArray[np.int64], stage: NDArray[np.int64], out: Path
) -> None:
    write_plan(
        out,
        {
            "id": _hexadecimal(table["id"][learnt]),
            "stage": stage[learnt],
            "position": np.arange(len(learnt)),
            "file": table["file"][learnt],
            "row": table["row"][learnt],
            "score": table["score"][learnt],
            "scene": pa.array(table.scenes, pa.string()).take(pa.array(table["scene"][learnt])),
            "band": table["band"][learnt],
            "tier": pa.array(table["tier"][learnt], mask=table["tier"][learnt] < 0),
            "use_sft": table["sft"][learnt],
            "use_opd": table["opd"][learnt],
            "num_spans": table["spans"][learnt],
        },
    )


def _hexadecimal(ids: NDArray[np.uint64]) -> Any:
    """Ids as Arrow text of 16 digits each."""
    written = ids.astype(">u8").tobytes().hex().encode()
    ends = np.arange(0, 16 * len(ids) + 1, 16, dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(written)]
    return pa.LargeStringArray.from_buffers(len(ids), buffers[1], buffers[2]).cast(pa.string())


def _nothing(table: Table) -> str:
    reasons, counts = np.unique(table["reason"], return_counts=True)
    told = ", ".join(
        f"{WHY[r]} {n:,}" for r, n in sorted(zip(reasons.tolist(), counts.tolist(), strict=True))
    )
    return (
        f"none of the {len(table):,} turns of the log can be learnt from "
        f"({told or 'it is empty'}); `distill logs inspect` shows them: is the text logged?"
    )
