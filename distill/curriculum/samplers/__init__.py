"""Which tasks a step trains on: one interface, a literal table of samplers, a resumable state."""

from __future__ import annotations

from typing import Any

from distill.curriculum.samplers.balanced import Balanced
from distill.curriculum.samplers.base import (
    EPOCH_LIMIT,
    Draw,
    Pool,
    Sampler,
    Seen,
    State,
    keyed_uniform,
)
from distill.curriculum.samplers.edge import Edge
from distill.curriculum.samplers.kalman import Kalman
from distill.curriculum.samplers.orders import Refill, Staged, Uniform, num_draws, steps_for
from distill.curriculum.samplers.tasks import Drawn, TaskSampler

SAMPLERS: dict[str, type[Any]] = {
    "uniform": Uniform,
    "staged": Staged,
    "kalman": Kalman,
    "refill": Refill,
    "edge": Edge,
    "balanced": Balanced,
}
"""Names of a configuration; the fields of the classes are their options."""

__all__ = [
    "EPOCH_LIMIT",
    "SAMPLERS",
    "Balanced",
    "Draw",
    "Drawn",
    "Edge",
    "Kalman",
    "Pool",
    "Refill",
    "Sampler",
    "Seen",
    "Staged",
    "State",
    "TaskSampler",
    "Uniform",
    "keyed_uniform",
    "num_draws",
    "steps_for",
]
