"""Which turns of a log a model of demand is fitted on, and what each of them says about demand."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distill.curriculum.demand import DemandInput
from distill.curriculum.demand_features import Sketch, sketch
from distill.curriculum.records import NUM_TIERS
from distill.errors import ConfigError, DataError

NUM_FOLDS = 5
MAX_TURNS = 20_000

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Observation(NamedTuple):
    """Demand is at most `tier` (success) or above it. Weight 1 is one plain outcome."""

    tier: int
    success: bool
    weight: float = 1.0
    is_label: bool = False
    """It comes from a label and not from an outcome; labels do not enter the calibration."""


def label_observations(label: int, weight: float = 1.0) -> tuple[Observation, ...]:
    """What it says that the demand is `label`: at most that tier, and above the one below."""
    above = (Observation(label - 1, False, weight, True),) if label > 0 else ()
    # That the demand is at most the last tier says nothing.
    below = (Observation(label, True, weight, True),) if label < NUM_TIERS - 1 else ()
    return above + below


def fold_of(session: str) -> int:
    """The fifth of the sessions that a session belongs to."""
    return _hash(f"fold:{session}") % NUM_FOLDS


class FitSample:
    """At most `cap` turns of a log, chosen by a hash of their ids: the same ones in whatever order
    they come. Holds about 2 KB per turn."""

    def __init__(self, cap: int = MAX_TURNS) -> None:
        if cap < 1:
            raise ConfigError(f"a sample needs room for at least one turn, got cap = {cap}")
        self.cap = cap
        self.num_seen = 0
        self._heap: list[tuple[int, str, str, Sketch, tuple[Observation, ...]]] = []

    def add(
        self,
        turn: str,
        session: str | None,
        given: DemandInput | Sketch,
        seen: Sequence[Observation],
    ) -> None:
        """Offer a turn, or what is kept of it. Without a session it is one of its own; without
        observations it says nothing. DataError for an observation of a tier that does not exist."""
        for one in seen:
            if not 0 <= one.tier < NUM_TIERS or not 0 < one.weight < np.inf:
                raise DataError(
                    f"turn {turn}: expected a tier from 0 to 3 and a weight above 0, got {one}"
                )
        if not seen:
            return
        self.num_seen += 1
        rank = (-_hash(f"sample:{turn}"), turn)
        if len(self._heap) >= self.cap and rank < self._heap[0][:2]:
            return
        kept = given if isinstance(given, Sketch) else sketch(given)
        entry = (*rank, turn if session is None else session, kept, tuple(seen))
        if len(self._heap) < self.cap:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heapreplace(self._heap, entry)

    def table(self) -> Table:
        """The chosen turns as arrays, ordered by their hash."""
        rows = sorted(self._heap, reverse=True)
        flat = [(i, one) for i, row in enumerate(rows) for one in row[4]]
        return Table(
            sketches=[row[3] for row in rows],
            fold=np.array([fold_of(row[2]) for row in rows], dtype=np.int64),
            num_sessions=len({row[2] for row in rows}),
            turn=np.array([i for i, _ in flat], dtype=np.int64),
            tier=np.array([one.tier for _, one in flat], dtype=np.int64),
            success=np.array([one.success for _, one in flat], dtype=bool),
            weight=np.array([one.weight for _, one in flat], dtype=np.float64),
            is_label=np.array([one.is_label for _, one in flat], dtype=bool),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """R turns and the M observations of them."""

    sketches: list[Sketch]  # [R]
    fold: Ints  # [R]
    num_sessions: int
    turn: Ints  # [M] which of the R turns an observation is of
    tier: Ints
    success: NDArray[np.bool_]
    weight: Floats
    is_label: NDArray[np.bool_]


def _hash(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
