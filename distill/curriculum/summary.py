"""What a curriculum is made of, in numbers: for its page, its tables and the report of a night."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill.curriculum.choose import Chosen
from distill.curriculum.light import GRADES, RESULTS, RUNGS, USABLE, WHY
from distill.curriculum.profile import DIMENSIONS
from distill.curriculum.records import LAYERS, NUM_TIERS
from distill.curriculum.walk import Tally

SUMMARY = "summary.json"
FORMAT = 1
BINS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What a build began with."""

    digest: str
    dropped: Mapping[str, Mapping[str, int]]
    """Source -> reason -> rows that were not stored."""


def summary_of(taken: Taken, made: Chosen, tally: Tally, demand: dict[str, Any]) -> dict[str, Any]:
    """Plain JSON: counts, dropped rows by reason, outcomes, demand, boundary, stages."""
    table, chosen = made.table, made.chosen
    return {
        "format": FORMAT,
        "store": taken.digest,
        "counts": {
            "calls": tally.calls,
            "turns": len(table),
            "sessions": tally.sessions,
            "examples": len(chosen),
            "sft": int(table["sft"][chosen].sum()),
            "opd": int(table["opd"][chosen].sum()),
            "contexts": int(table["spans"][chosen][table["opd"][chosen]].sum()),
        },
        "sources": _sources(tally),
        "dropped": {"import": _imported(taken), "build": _left_out(made, tally)},
        "outcomes": _outcomes(made),
        "labels": dict(sorted(tally.labels.items())),
        "profile": {
            name: {g: int(table.profile[i, j]) for j, g in enumerate(GRADES)}
            for i, name in enumerate(DIMENSIONS)
        },
        "demand": demand | _histogram(made),
        "tiers": _tiers(made),
        "boundary": _boundary(made),
        "stages": _stages(made),
        "allocation": _allocation(made),
    }


def _sources(tally: Tally) -> dict[str, Any]:
    return {
        name: {key: counts[key] for key in ("rows", *LAYERS, "messages")}
        for name, counts in sorted(tally.sources.items())
    }


def _imported(taken: Taken) -> dict[str, int]:
    total: dict[str, int] = {}
    for reasons in taken.dropped.values():
        for reason, number in reasons.items():
            total[reason] = total.get(reason, 0) + number
    return dict(sorted(total.items()))


def _left_out(made: Chosen, tally: Tally) -> dict[str, int]:
    reasons, counts = np.unique(made.table["reason"], return_counts=True)
    found = {
        WHY[r]: n for r, n in zip(reasons.tolist(), counts.tolist(), strict=True) if r != USABLE
    }
    if tally.superseded:
        found["superseded"] = tally.superseded
    return dict(sorted(found.items()))


def _outcomes(made: Chosen) -> dict[str, Any]:
    table = made.table
    return {
        **{name: int((table["outcome"] == i).sum()) for i, name in enumerate(RESULTS[:2])},
        "unknown": int((table["outcome"] < 0).sum()),
        "rungs": {
            name: int(n) for i, name in enumerate(RUNGS) if (n := (table["rung"] == i).sum())
        },
    }


def _histogram(made: Chosen) -> dict[str, Any]:
    edges = np.linspace(0.0, NUM_TIERS - 1, BINS + 1)
    counts, _ = np.histogram(made.table["score"], bins=edges)
    return {"edges": [round(e, 6) for e in edges.tolist()], "counts": counts.tolist()}


def _tiers(made: Chosen) -> list[dict[str, Any]]:
    """Turns by the tier that served them; tier None for those of which the log does not say it."""
    table, found = made.table, []
    for tier in range(-1, NUM_TIERS):
        own = table["tier"] == tier
        if not own.any():
            continue
        outcome = table["outcome"][own]
        found.append(
            {
                "tier": None if tier < 0 else tier,
                "success": int((outcome == 1).sum()),
                "failure": int((outcome == 0).sum()),
                "unknown": int((outcome < 0).sum()),
                "mean_score": float(table["score"][own].mean()),
            }
        )
    return found


def _boundary(made: Chosen) -> dict[str, Any]:
    found = made.boundary
    biased = sum(bool(cell.notes) for cell in found.cells)
    note = "A tier was only seen on the turns that the router sent there."
    if biased:
        note += (
            f" In {biased} of {len(found.cells)} cells that matters, or cannot be put right: their "
            "rates are observational."
        )
    return {
        "cells": [
            {
                "scene": c.scene,
                "band": c.band,
                "tier": c.tier,
                "n": c.n,
                "k": c.k,
                "rate": c.rate,
                "low": c.low,
                "high": c.high,
                "n_effective": c.n_eff,
                "verdict": c.status,
                "basis": c.basis,
                "reach": c.reach,
                "notes": list(c.notes),
            }
            for c in found.cells
        ],
        "tiers": [
            {"scene": scene, "band": band, "tier": tier}
            for (scene, band), tier in sorted(found.tiers.items())
        ],
        "under": int(found.under_routed.sum()),
        "over": int(found.over_routed.sum()),
        "cached": found.num_cached,
        "unverified": found.num_unverified,
        "note": note,
    }


def _stages(made: Chosen) -> list[dict[str, Any]]:
    table, staged, found = made.table, made.staged, []
    for stage, sizes in enumerate(staged.composition.tolist()):
        own = made.chosen[staged.stage == stage]
        scenes, counts = np.unique(table["scene"][own], return_counts=True)
        mean = float(staged.mean_score[stage])
        found.append(
            {
                "stage": stage + 1,
                "n": len(own),
                "sft": int(table["sft"][own].sum()),
                "opd": int(table["opd"][own].sum()),
                "mean_score": None if math.isnan(mean) else mean,
                "thirds": sizes,
                "scenes": {
                    table.scenes[s]: n
                    for s, n in zip(scenes.tolist(), counts.tolist(), strict=True)
                },
            }
        )
    return found


def _allocation(made: Chosen) -> list[dict[str, Any]] | None:
    found = made.allocation
    if found is None:
        return None
    return [
        {
            "scene": made.table.scenes[int(cell) // NUM_TIERS],
            "band": int(cell) % NUM_TIERS,
            "base": float(found.shares.base[i]),
            "accuracy": None if math.isnan(found.accuracy[i]) else float(found.accuracy[i]),
            "share": float(found.shares.share[i]),
            "picked": int(found.picks.count[i]),
            "available": int(found.available[i]),
            "floored": bool(found.shares.floored[i]),
        }
        for i, cell in enumerate(found.cell)
    ]
