"""Prompts at the edge of what the policy can do: those that it solves now and then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill.curriculum.samplers.base import Draw, Pool, Seen, State, distinct, generator
from distill.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """name = "edge": prompts whose running pass rate lies in [low, high], and a share of new ones.

    Where too few qualify, the rest of the batch is drawn uniformly. State: `seen`, position ->
    successes and attempts, both fading; `fallbacks`, steps at which no prompt qualified.
    """

    low: float = 0.2
    high: float = 0.8
    explore: float = 0.25
    """Share of a batch for prompts that nobody tried yet, while there are any."""
    decay: float = 0.5
    """What earlier attempts at a prompt still count whenever it is tried again; 1 never forgets."""
    success: float = 1.0
    """Reward from which an attempt counts as a success."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ConfigError(
                "sampler.low and sampler.high must be ordered within [0, 1], got "
                f"{self.low} and {self.high}"
            )
        for name in ("explore", "decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(
                    f"sampler.{name} must be within [0, 1], got {getattr(self, name)}"
                )

    @property
    def reads_rewards(self) -> bool:
        return True

    @property
    def reads_change(self) -> bool:
        return False

    @property
    def rounds(self) -> int:
        return 0

    def draw(self, pool: Pool, state: State, step: int, extra: int = 0) -> Draw:
        """An extra draw is another one, which may repeat prompts of the first."""
        seen: Mapping[str, Any] = state.get("seen", {})
        source = generator(f"{pool.key}/{step}/edge{extra}")
        inside = self._inside(seen)
        new: list[int] = []
        chosen: list[int] = []
        if len(inside):
            tried = [int(p) for p in seen]
            num_new = min(round(self.explore * pool.batch), pool.size - len(tried))
            new = distinct(source, pool.size, num_new, tried)
            chosen = source.permutation(inside)[: pool.batch - len(new)].tolist()
        picked = [*chosen, *new]
        rest = distinct(source, pool.size, pool.batch - len(picked), picked)
        return Draw(
            positions=(*picked, *rest),
            metrics={
                "qualified": float(len(inside)),
                "seen": float(len(seen)),
                "edge_share": len(chosen) / pool.batch,
                "new_share": len(new) / pool.batch,
                "uniform_share": len(rest) / pool.batch,
                "fallbacks": float(state.get("fallbacks", 0) + (not len(inside))),
            },
        )

    def observe(self, pool: Pool, state: State, seen: Seen) -> tuple[State, Mapping[str, float]]:
        known = dict(state.get("seen", {}))
        fallbacks = int(state.get("fallbacks", 0)) + (not len(self._inside(known)))
        for position, rewards in seen.rewards.items():
            if rewards:
                wins, tries = known.get(str(position), (0.0, 0.0))
                now = sum(r >= self.success for r in rewards)
                known[str(position)] = [
                    self.decay * wins + now,
                    self.decay * tries + len(rewards),
                ]
        return {"seen": known, "fallbacks": fallbacks}, {}

    def _inside(self, seen: Mapping[str, Any]) -> np.ndarray:
        """Positions of the prompts at the edge, ascending."""
        found = [
            int(p) for p, (wins, tries) in seen.items() if self.low <= wins / tries <= self.high
        ]
        return np.sort(np.array(found, dtype=np.int64))
