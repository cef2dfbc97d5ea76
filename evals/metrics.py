"""Numbers with intervals: unbiased pass@k, Wilson, bootstrap over tasks, paired differences.

Accuracies are shares in [0, 1]. Intervals are two-sided at `confidence`. A bootstrap resamples
whole tasks, so several samples of one task never count as independent evidence. Every random
draw comes from `seed` alone: equal arguments give equal intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distill.errors import EvalError
from distill.types import Estimate

# Bounds the memory of one block of resamples: 4 million indices of 8 bytes are 32 MB.
_BLOCK = 4_000_000


class Difference(NamedTuple):
    """Mean of `after - before` over tasks, with its interval."""

    mean: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that at least one of k draws is correct (Chen et al., arXiv:2107.03374).

    1 - C(n - c, k) / C(n, k): the share of k-subsets of the n samples that hold a correct one.
    Raises EvalError when k is larger than n, where no unbiased estimate exists.
    """
    if not 1 <= k <= num_samples:
        raise EvalError(
            f"pass@{k} needs at least {max(k, 1)} samples per task and k >= 1, found "
            f"{num_samples} samples; try a larger evals.samples or a smaller evals.k"
        )
    if not 0 <= num_correct <= num_samples:
        raise EvalError(f"{num_correct} correct samples out of {num_samples} is not possible")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def wilson(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """Share of successes with the Wilson score interval, which holds near 0 and 1 too."""
    _require(n > 0, "an interval needs at least one task, found none")
    _require(0 <= successes <= n, f"{successes} successes out of {n} is not possible")
    z = _quantile(confidence)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At the ends the bound equals the share exactly; rounding must not push it inside.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return Estimate(mean=share, low=low, high=high, n=n)


def mean_interval(
    values: Sequence[float],
    *,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Mean of one value per task in [0, 1], with the interval that fits the values.

    Zeros and ones get Wilson. Shares (several samples per task, partial credit) get the
    percentile bootstrap over tasks. A bootstrap of equal values would claim certainty from any
    number of tasks; it is widened to Wilson at the nearest count.
    """
    array = _finite(values, "values")
    mean = float(array.mean())
    n = len(array)
    if np.isin(array, (0.0, 1.0)).all():
        return wilson(round(float(array.sum())), n, confidence)
    _require(
        bool(((array >= 0) & (array <= 1)).all()),
        f"accuracies must lie in [0, 1], found {array.min():g} to {array.max():g}",
    )
    if array.min() == array.max():
        rough = wilson(round(mean * n), n, confidence)
        return Estimate(mean=mean, low=min(mean, rough.low), high=max(mean, rough.high), n=n)
    low, high = _percentiles(array, resamples, confidence, seed)
    return Estimate(mean=mean, low=low, high=high, n=n)


def plain_interval(
    values: Sequence[float],
    *,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Mean of any finite values, such as counts, with its percentile bootstrap interval."""
    array = _finite(values, "values")
    low, high = _percentiles(array, resamples, confidence, seed)
    return Estimate(mean=float(array.mean()), low=low, high=high, n=len(array))


def paired_bootstrap(
    before: Sequence[float],
    after: Sequence[float],
    *,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Difference:
    """Mean paired difference over the same tasks, with its percentile bootstrap interval.

    `before[i]` and `after[i]` belong to one task. Pairing removes the difficulty of the tasks
    from the interval. Raises EvalError on unequal lengths, no task, or values that are not finite.
    """
    old, new = _finite(before, "before"), _finite(after, "after")
    _require(
        len(old) == len(new),
        f"a paired comparison needs the same tasks on both sides, found {len(old)} and {len(new)}",
    )
    differences = new - old
    low, high = _percentiles(differences, resamples, confidence, seed)
    return Difference(float(differences.mean()), low, high)


def sign_test(num_better: int, num_worse: int) -> float:
    """Two-sided exact p-value that as many tasks got worse as got better (McNemar's exact test).

    Tasks without a change carry no evidence. With no changed task the value is 1.
    """
    changed = num_better + num_worse
    tail = sum(math.comb(changed, i) for i in range(min(num_better, num_worse) + 1))
    return min(1.0, 2 * tail / (1 << changed))


def detectable_difference(
    n: int, discordance: float, *, power: float = 0.8, confidence: float = 0.95
) -> float:
    """Smallest paired difference in accuracy that n tasks would show with this power.

    `discordance` is the share of tasks whose outcome changed. Solves Connor's sample-size formula
    (Biometrics 1987) for the difference: d sqrt(n) = z_conf sqrt(psi) + z_power sqrt(psi - d^2).
    """
    _require(n > 0, "a detectable difference needs at least one task, found none")
    _require(0 <= discordance <= 1, f"discordance is a share in [0, 1], found {discordance:g}")
    z_confidence = _quantile(confidence)
    z_power = NormalDist().inv_cdf(power)

    def excess(difference: float) -> float:
        rest = math.sqrt(max(0.0, discordance - difference**2))
        return difference * math.sqrt(n) - z_confidence * math.sqrt(discordance) - z_power * rest

    low, high = 0.0, 1.0
    if excess(high) <= 0:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return high


def _percentiles(
    values: NDArray[np.float64], resamples: int, confidence: float, seed: int
) -> tuple[float, float]:
    _require(resamples >= 100, f"a bootstrap needs at least 100 resamples, found {resamples}")
    _quantile(confidence)
    if values.min() == values.max():
        return float(values[0]), float(values[0])
    generator = np.random.default_rng(seed)
    n = len(values)
    block = max(1, _BLOCK // n)
    means = np.concatenate(
        [
            values[generator.integers(0, n, size=(min(block, resamples - start), n))].mean(axis=1)
            for start in range(0, resamples, block)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high)


def _finite(values: Sequence[float], name: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    _require(array.size > 0, f"{name}: an interval needs at least one task, found none")
    _require(
        bool(np.isfinite(array).all()),
        f"{name}: outcomes must be finite numbers, found {array[~np.isfinite(array)][:1]}; "
        "check the grader",
    )
    return array


def _quantile(confidence: float) -> float:
    _require(0 < confidence < 1, f"confidence must lie between 0 and 1, found {confidence:g}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise EvalError(message)
