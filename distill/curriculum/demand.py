"""How much capability a turn asks for: four probabilities, estimated from what was asked alone.

    pi_k = P(tier k is the lowest that suffices)      score = sum over k of k pi_k

The tier that was served is no label of difficulty: policy, load and earlier failures chose it. So
the demand of every turn is estimated again, offline, from the request, what came before it and the
names of the tools. `DemandInput` holds these three and nothing else, and an estimator of this
product takes nothing else.

Source: NeoHorse-1 (arXiv 2609.08183).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from distill.curriculum.boundary import wilson
from distill.curriculum.records import NUM_TIERS, Prediction
from distill.errors import DataError

Method = Literal["fitted", "logged", "logged_tier", "judge", "flat"]
"""Where a demand comes from: a model fitted on the logs, the probabilities or only the tier that
the router logged, a judging model, or nothing at all, which is a quarter for every tier."""

_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
# Logged probabilities are often rounded to one or two digits.
_ROUNDING = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class DemandInput:
    """All that an estimator of demand may read about a turn."""

    request: str
    """Text of the user message that opens the turn."""
    history: tuple[Mapping[str, Any], ...] = ()
    """The messages before it."""
    tools: tuple[str, ...] = ()
    """Names of the tools that could be called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Probabilities of the four tiers and where they come from. DataError when they are none."""

    probs: tuple[float, float, float, float]
    method: Method

    def __post_init__(self) -> None:
        total = math.fsum(self.probs)
        bad = len(self.probs) != NUM_TIERS or not all(0.0 <= p <= 1.0 for p in self.probs)
        if bad or abs(total - 1.0) > 1e-6:
            raise DataError(
                f"a demand must be {NUM_TIERS} probabilities that sum to 1, got {self.probs}"
            )

    @property
    def score(self) -> float:
        """Expected tier, from 0 to 3: the soft score, by which turns are ordered."""
        return math.fsum(tier * p for tier, p in enumerate(self.probs))

    @property
    def hard(self) -> int:
        """Most likely tier; among equals the lower one."""
        return max(range(NUM_TIERS), key=lambda tier: (self.probs[tier], -tier))


def demand_input(
    messages: Sequence[Mapping[str, Any]], start: int, tools: Sequence[Mapping[str, Any]] = ()
) -> DemandInput:
    """What an estimator may read of a turn whose user message is `messages[start]`.

    Nothing from the answer on is kept, of earlier messages only what was visible: no reasoning, and
    no field that names a model. DataError when there is no such message.
    """
    if not 0 <= start < len(messages):
        raise DataError(
            f"the turn should begin at message {start}, but the conversation has {len(messages)}"
        )
    return DemandInput(
        request=text_of(messages[start].get("content")),
        history=tuple(
            {key: message[key] for key in _MESSAGE_KEYS if key in message}
            for message in messages[:start]
        ),
        tools=tuple(name for tool in tools if (name := _tool_name(tool))),
    )


def text_of(content: Any) -> str:
    """Text of a message: a string, or the text parts of a list. Anything else is no text."""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    name = (function if isinstance(function, Mapping) else tool).get("name")
    return name if isinstance(name, str) else ""


def logged_demand(prediction: Prediction | None) -> Demand | None:
    """What the router itself predicted, or None. A tier without probabilities is certain of itself
    and marked `logged_tier`. DataError for probabilities that are none."""
    if prediction is None:
        return None
    if prediction.probs is not None:
        return given_demand(prediction.probs, "logged")
    if prediction.tier is None:
        return None
    if not 0 <= prediction.tier < NUM_TIERS:
        raise DataError(f"a tier must be within 0 and {NUM_TIERS - 1}, got {prediction.tier}")
    return given_demand([float(t == prediction.tier) for t in range(NUM_TIERS)], "logged_tier")


def given_demand(probs: Sequence[float], method: Method = "judge") -> Demand:
    """Probabilities from outside, of a judge or a log; rounding errors of the sum are evened out.

    DataError unless they are four numbers in [0, 1] whose sum is within 0.02 of 1.
    """
    values = [float(p) for p in probs]
    total = math.fsum(values)
    good = len(values) == NUM_TIERS and all(0.0 <= p <= 1.0 for p in values)
    if not good or abs(total - 1.0) > _ROUNDING:
        raise DataError(
            f"expected {NUM_TIERS} probabilities in [0, 1] that sum to 1, one per tier, got "
            f"{values}; a router with another number of classes needs a mapping to tiers"
        )
    a, b, c, d = (p / total for p in values)
    return Demand(probs=(a, b, c, d), method=method)


def fallback_demand(prediction: Prediction | None) -> Demand:
    """The demand of a turn when no model could be fitted: the logged one, else a flat one, which
    gives every turn the same score."""
    return logged_demand(prediction) or given_demand([1 / NUM_TIERS] * NUM_TIERS, "flat")


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationBin:
    """Turns whose predicted chance of success lies in one tenth of [0, 1]."""

    n: int
    predicted: float
    """Mean of the predictions."""
    observed: float
    """Share that succeeded, with its 95 % Wilson interval."""
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """How good predicted chances of success are. 0 is best for `brier` and `ece`, 1 for `auc`."""

    brier: float
    """Mean squared error."""
    ece: float
    """Expected calibration error over ten bins."""
    auc: float
    """Chance that a success was rated above a failure; 0.5 knows nothing, nan has one outcome."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Predicted against observed success at the served tier, on turns whose outcomes the model did
    not see. `constant` predicts the overall rate, `tier` the rate of the served tier, so that what
    the text adds can be told from what the tier alone says."""

    bins: tuple[CalibrationBin, ...]
    n: int
    model: Quality
    constant: Quality
    tier: Quality

    @property
    def is_useful(self) -> bool:
        """Whether the text says something about success that the served tier does not."""
        return self.model.brier < self.tier.brier


def calibration_bins(
    predicted: NDArray[np.float64], outcome: NDArray[np.bool_], num_bins: int = 10
) -> tuple[CalibrationBin, ...]:
    """Predictions [N] and outcomes [N] by tenths of the prediction; empty bins are left out."""
    place = np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)
    counts = np.bincount(place, minlength=num_bins)
    sums = np.bincount(place, weights=predicted, minlength=num_bins)
    hits = np.bincount(place, weights=outcome.astype(float), minlength=num_bins)
    low, high = wilson(hits, counts)
    return tuple(
        CalibrationBin(
            n=int(counts[b]),
            predicted=float(sums[b] / counts[b]),
            observed=float(hits[b] / counts[b]),
            low=float(low[b]),
            high=float(high[b]),
        )
        for b in range(num_bins)
        if counts[b]
    )


def quality(predicted: NDArray[np.float64], outcome: NDArray[np.bool_]) -> Quality:
    """Brier score, calibration error and AUC of predictions [N] of outcomes [N], N > 0."""
    bins = calibration_bins(predicted, outcome)
    gaps = math.fsum(b.n * abs(b.predicted - b.observed) for b in bins)
    return Quality(
        brier=float(np.mean((predicted - outcome) ** 2)),
        ece=gaps / len(predicted),
        auc=_auc(predicted, outcome),
    )


def _auc(predicted: NDArray[np.float64], outcome: NDArray[np.bool_]) -> float:
    good = int(outcome.sum())
    bad = len(outcome) - good
    if not good or not bad:
        return math.nan
    _, place, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    # Equal predictions share the mean of their ranks.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[outcome].sum() - good * (good + 1) / 2) / (good * bad))
