"""What a skill is worth: the arithmetic of measured usefulness.

Utility, its moving average and the score of retrieval follow UCOB (arXiv 2606.29502); when to
learn from failures and how new skills are numbered follow SkillRL (arXiv 2602.08234).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from distill.errors import ConfigError

EVOLVED = "dyn_"
"""Prefix of the ids that SkillRL gives to skills learned during training."""


def ucb_score(
    relevance: float,
    utility: float,
    num_used: int,
    total_used: int,
    *,
    alpha: float = 0.1,
    explore: float = 0.1,
) -> float:
    """alpha relevance + (1 - alpha)(utility + explore sqrt(ln N / n)).

    n is the uses of this skill, N of all; a skill that was never used counts as used once.
    """
    bonus = math.sqrt(math.log(max(total_used, 1)) / max(num_used, 1))
    return alpha * relevance + (1.0 - alpha) * (utility + explore * bonus)


def moved(utility: float, credit: float, rate: float = 0.2) -> float:
    """The moving average of utility after one more credit."""
    return (1.0 - rate) * utility + rate * credit


def pair_weight(
    gap: float, *, least: float = 0.05, scale: float = 0.2, most: float = 2.0
) -> float | None:
    """Weight of a pair of branches with and without a skill; None for a gap too small to teach."""
    return min(abs(gap) / scale, most) if abs(gap) >= least else None


def weak_families(rates: Mapping[str, float], threshold: float = 0.4) -> tuple[str, ...]:
    """Task families whose success rate is strictly below the threshold, in the given order."""
    return tuple(family for family, rate in rates.items() if rate < threshold)


def next_id(taken: Iterable[str], prefix: str = EVOLVED) -> str:
    """The next number after the highest one taken: dyn_007 is followed by dyn_008."""
    if not prefix:
        raise ConfigError("a numbered id needs a prefix, such as 'dyn_'")
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    numbers = [int(found[1]) for name in taken if (found := pattern.fullmatch(name))]
    return f"{prefix}{max(numbers, default=0) + 1:03d}"
