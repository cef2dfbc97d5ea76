"""KGPS: prompts chosen by a Kalman filter over how hard each is for the policy of today
(arXiv 2607.27610; the constants are ours).

The logit x of a prompt's success rate walks at random while the policy moves:

    predict   P <- P + c * change                       change: mean KL per token of the last update
    observe   p = (k + 1/2) / (n + 1),  y = logit p,  R = 1 / (n p (1 - p))
              K = P / (P + R),  x <- x + K (y - x),  P <- (1 - K) P
    choose    the largest E[s(x) (1 - s(x))] under N(x, P): 20 Gauss-Hermite nodes, ties by larger P

Only prompts that were tried have a state. What all of them drifted since is one sum, so a step
costs the same however many tasks there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill.curriculum.samplers.base import (
    Draw,
    Pool,
    Seen,
    State,
    generator,
    known_positions,
)
from distill.errors import ConfigError

_NODES, _RAW_WEIGHTS = np.polynomial.hermite_e.hermegauss(20)
_WEIGHTS = _RAW_WEIGHTS / _RAW_WEIGHTS.sum()


def predict(var: float, scale: float, change: float) -> float:
    """Variance after the policy moved by `change`."""
    return var + scale * change


def update(mean: float, var: float, successes: int, tries: int) -> tuple[float, float]:
    """Mean and variance of the logit after k of n attempts succeeded; n is at least 1."""
    rate = (successes + 0.5) / (tries + 1)
    observed = math.log(rate / (1 - rate))
    noise = 1 / (tries * rate * (1 - rate))
    gain = var / (var + noise)
    return mean + gain * (observed - mean), (1 - gain) * var


def utility(mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    """E[s(x) (1 - s(x))] for x ~ N(mean, var): [n], [n] -> [n]."""
    x = mean[:, None] + np.sqrt(var)[:, None] * _NODES
    # The same as s (1 - s), without an overflow on either side.
    tail = np.exp(-np.abs(x))
    spread: np.ndarray = (tail / (1 + tail) ** 2) @ _WEIGHTS
    return spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Kalman:
    """name = "kalman": prompts whose groups should teach most, as the policy moves.

    State: `drift`, the sum of c * change so far; `seen`, position -> mean, variance, and the drift
    when it was last tried.
    """

    q_scale: float = 5.0
    """c: how much an update of mean KL 1 adds to the variance of every prompt; 0 trusts old
    attempts for ever."""
    prior_mean: float = 0.0
    """Logit of the success rate of a prompt that nobody tried."""
    prior_var: float = 1.0
    success: float = 1.0
    """Reward from which an attempt counts as a success."""
    candidates: int = 1024
    """Prompts that are compared per step: all of a shorter list; of a longer one half are drawn
    from those that were tried, and the rest from everywhere."""

    def __post_init__(self) -> None:
        if self.q_scale < 0 or self.prior_var <= 0:
            raise ConfigError(
                "sampler.q_scale must not be negative and sampler.prior_var must be positive, got "
                f"{self.q_scale} and {self.prior_var}"
            )
        if self.candidates < 2:
            raise ConfigError(f"sampler.candidates must be at least 2, got {self.candidates}")

    @property
    def reads_rewards(self) -> bool:
        return True

    @property
    def reads_change(self) -> bool:
        return True

    @property
    def rounds(self) -> int:
        return 0

    def draw(self, pool: Pool, state: State, step: int, extra: int = 0) -> Draw:
        """The best of the candidates; an extra draw takes those that come next."""
        seen: Mapping[str, Any] = state.get("seen", {})
        source = generator(f"{pool.key}/{step}/kalman")
        positions = self._candidates(pool, seen, source, pool.batch * (1 + extra))
        beliefs = [self._belief(seen, state, int(p)) for p in positions]
        mean, var = np.array(beliefs).T
        worth = utility(mean, var)
        order = np.lexsort((source.permutation(len(positions)), -var, -worth))
        first = extra * pool.batch
        chosen = order[np.arange(first, first + pool.batch) % len(order)]
        return Draw(
            positions=tuple(positions[chosen].tolist()),
            metrics={
                "candidates": float(len(positions)),
                "seen": float(len(seen)),
                "utility": float(worth[chosen].mean()),
                "variance": float(var[chosen].mean()),
                "new_share": sum(str(p) not in seen for p in positions[chosen].tolist())
                / pool.batch,
            },
        )

    def observe(self, pool: Pool, state: State, seen: Seen) -> tuple[State, Mapping[str, float]]:
        known, drift = dict(state.get("seen", {})), float(state.get("drift", 0.0))
        for position, rewards in seen.rewards.items():
            if rewards:
                mean, var = self._belief(known, state, position)
                wins = sum(r >= self.success for r in rewards)
                known[str(position)] = [*update(mean, var, wins, len(rewards)), drift]
        drift = predict(drift, self.q_scale, seen.change)
        return {"drift": drift, "seen": known}, {"drift": drift}

    def _belief(self, seen: Mapping[str, Any], state: State, position: int) -> tuple[float, float]:
        found = seen.get(str(position))
        if found is None:
            return self.prior_mean, self.prior_var
        mean, var, at = found
        return mean, var + float(state.get("drift", 0.0)) - at

    def _candidates(
        self, pool: Pool, seen: Mapping[str, Any], source: np.random.Generator, least: int
    ) -> np.ndarray:
        """Positions to compare, ascending."""
        wanted = max(self.candidates, 2 * least)
        if pool.size <= wanted:
            return np.arange(pool.size)
        known = known_positions(seen)
        if len(known) > wanted // 2:
            known = source.choice(known, wanted // 2, replace=False)
        others = source.integers(0, pool.size, wanted - len(known))
        found: np.ndarray = np.unique(np.concatenate([known, others]))
        return found
