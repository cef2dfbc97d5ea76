"""A small model of demand, fitted on the very logs that it is used for.

The demand of a turn is how capable a model must be to solve it. A log never shows it: a turn that
succeeded at tier t only says demand <= t, one that failed says demand > t (current-status data).
The model is ordinal regression,

    P(success at tier t | x) = sigmoid(theta_t - w.x)     theta_0 <= ... <= theta_3
    pi_k = P(success at k | x) - P(success at k - 1 | x)     the last tier takes what is left

x are numbers and hashed words of the request, the history and the tools. The tier that was served
and the outcome enter the likelihood and never x. A label k from elsewhere says demand <= k and
demand > k - 1.

What can be known. The order of turns is that of w.x, whatever the thetas are, and one served tier
suffices for it. A theta is known only where its tier was served: the gaps between neighbouring
thetas have a weak prior (mean 1, deviation 1), so tiers that were never served lie evenly between
their neighbours or one step outside, and `identified` says which these are. All of it supposes that
two turns with the same x were sent to tiers without regard to what else made them hard; a router
that reads more than x breaks that, and no fit on the same log can notice.

Five models are fitted, each without the turns of a fifth of the sessions, and a turn is always
estimated by the model that saw no outcome of its session: an estimate never holds its own answer,
and the calibration is that of the estimates in use.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.curriculum.demand import (
    Calibration,
    Demand,
    DemandInput,
    calibration_bins,
    quality,
)
from distill.curriculum.demand_features import (
    NUM_HASHED,
    NUMBERS,
    PIECE_BITS,
    WORD_BITS,
    Hashed,
    Sketch,
    features,
    sketch,
)
from distill.curriculum.demand_sample import NUM_FOLDS, FitSample, Table, fold_of
from distill.curriculum.records import NUM_TIERS
from distill.errors import DataError
from distill.rundir import digest_json, read_json, write_json

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIN_TURNS = 200
MIN_EACH = 20
"""Successes, and failures, that a fit needs; also the turns that make a tier identified."""
MIN_SESSIONS = 10
_FORMAT = 1
_BATCH = 1000
_DIGITS = 6
# Precision of the prior of a hashed feature: 4,096 buckets of words are mostly noise, and a weaker
# prior makes estimates of unseen turns worse than the rate of their tier.
_PENALTY = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DemandModel:
    """The fitted model. `digest` names it; equal samples give equal digests."""

    theta: Floats  # [folds, 4]
    numbers: Floats  # [folds, numbers] weights of the standardised numbers
    hashed: Floats  # [folds, NUM_HASHED]
    mean: Floats  # [numbers]
    scale: Floats  # [numbers]
    num_turns: int
    num_seen: int
    """Turns with an observation in the whole log; at most MAX_TURNS of them are fitted."""
    identified: tuple[bool, ...]
    """Per tier: enough turns were served there to know its theta."""

    @property
    def digest(self) -> str:
        return digest_json(self._record())[:16]

    def probs(self, given: Sequence[DemandInput], sessions: Sequence[str]) -> Floats:
        """Demand of R turns: [R, 4]. `sessions` (or, for a turn without one, its id) only chooses
        the model that did not see the session's outcomes."""
        if len(given) != len(sessions):
            raise DataError(f"{len(given)} turns need one session each, got {len(sessions)}")
        out = np.empty((len(given), NUM_TIERS))
        for start in range(0, len(given), _BATCH):
            part = slice(start, start + _BATCH)
            fold = np.array([fold_of(s) for s in sessions[part]], dtype=np.int64)
            hard = self._hardness([sketch(g) for g in given[part]], fold)
            reached = _sigmoid(self.theta[fold] - hard[:, None])
            reached[:, -1] = 1.0
            out[part] = np.diff(reached, axis=1, prepend=0.0)
        return out

    def demands(self, given: Sequence[DemandInput], sessions: Sequence[str]) -> list[Demand]:
        """The same as records."""
        rows = self.probs(given, sessions).tolist()
        return [Demand(probs=(a, b, c, d), method="fitted") for a, b, c, d in rows]

    def _hardness(self, sketches: Sequence[Sketch], fold: Ints) -> Floats:
        """w.x of R turns, each by the model of its fold: [R]."""
        numbers, hashed = features(sketches)
        scaled = _standardised(numbers, self.mean, self.scale)
        place = fold[hashed.rows] * NUM_HASHED + hashed.columns
        words = np.bincount(
            hashed.rows, weights=hashed.values * self.hashed.ravel()[place], minlength=len(fold)
        )
        # Row by row, so that the sum does not depend on the size of the batch.
        total: Floats = words + np.add.reduce(scaled * self.numbers[fold], axis=1)
        return total

    def _record(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "features": [list(NUMBERS), WORD_BITS, PIECE_BITS],
            "num_turns": self.num_turns,
            "num_seen": self.num_seen,
            "identified": list(self.identified),
            **{name: getattr(self, name).tolist() for name in _ARRAYS},
        }

    def save(self, path: Path) -> None:
        """Write the model as JSON with its digest."""
        write_json(path, {"digest": self.digest, "model": json.dumps(self._record())})

    @classmethod
    def load(cls, path: Path) -> DemandModel:
        """DataError when the file is missing, damaged or of another version."""
        found = read_json(path)
        try:
            record = json.loads(found["model"])
            if (record["format"], record["features"]) != (
                _FORMAT,
                [list(NUMBERS), WORD_BITS, PIECE_BITS],
            ):
                raise DataError(f"{path} was written by another version; fit the model again")
            model = cls(
                num_turns=record["num_turns"],
                num_seen=record["num_seen"],
                identified=tuple(record["identified"]),
                **{name: np.array(record[name], dtype=np.float64) for name in _ARRAYS},
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path} is no model of demand: {error}") from error
        if found.get("digest") != model.digest:
            raise DataError(f"{path} does not have the digest that it names; fit the model again")
        return model


_ARRAYS = ("theta", "numbers", "hashed", "mean", "scale")


def fit_demand(sample: FitSample) -> tuple[DemandModel, Calibration]:
    """The model and its calibration on outcomes that it did not see.

    DataError when the sample says too little: fewer than 200 turns with an observation, 20
    successes, 20 failures or 10 sessions. The demand of a turn then is `fallback_demand`.
    """
    table = sample.table()
    _check_enough(table)
    numbers, matrix, used = _matrix(table.sketches)
    mean = numbers.mean(0).round(_DIGITS)
    scale = np.maximum(numbers.std(0), 1e-3).round(_DIGITS)
    scaled = _standardised(numbers, mean, scale)
    # Threads share the matrix, and its products leave the others run meanwhile.
    with ThreadPoolExecutor(min(NUM_FOLDS, os.cpu_count() or 1)) as pool:
        fit = functools.partial(_fit_fold, table, scaled, matrix)
        folds = list(pool.map(fit, range(NUM_FOLDS)))
    hashed = np.zeros((NUM_FOLDS, NUM_HASHED))
    hashed[:, used] = np.array([f[2] for f in folds])
    served = np.bincount(table.tier[~table.is_label], minlength=NUM_TIERS)
    model = DemandModel(
        theta=np.array([f[0] for f in folds]).round(_DIGITS),
        numbers=np.array([f[1] for f in folds]).round(_DIGITS),
        hashed=hashed.round(_DIGITS),
        mean=mean,
        scale=scale,
        num_turns=len(table.sketches),
        num_seen=sample.num_seen,
        identified=tuple(bool(n >= MIN_EACH) for n in served),
    )
    return model, _calibrate(table, model)


def _check_enough(table: Table) -> None:
    good = int(table.success.sum())
    found = (
        ("turns with an observation", len(table.sketches), MIN_TURNS),
        ("successes", good, MIN_EACH),
        ("failures", len(table.success) - good, MIN_EACH),
        ("sessions", table.num_sessions, MIN_SESSIONS),
    )
    for what, number, least in found:
        if number < least:
            raise DataError(
                f"a model of demand needs at least {least} {what}, the log has {number}; until "
                "there are more, the demand that the router logged is used, or a flat one"
            )


def _matrix(sketches: Sequence[Sketch]) -> tuple[Floats, Any, Ints]:
    """Numbers [R, numbers], a sparse matrix [R, U] of the hashed features that occur, and which
    [U] they are: the weight of one that never occurs is that of its prior, 0."""
    from scipy import sparse

    # As large as it can get; what is never written takes no memory.
    room = sum(2 * len(s.text) + 1 for s in sketches)
    values, columns = np.empty(room), np.empty(room, dtype=np.int32)
    numbers, ends = [], [np.zeros(1, dtype=np.int32)]
    for start in range(0, len(sketches), _BATCH):
        part = sketches[start : start + _BATCH]
        own, hashed = features(part)
        numbers.append(own)
        block = _sparse(sparse, hashed, len(part))
        first = int(ends[-1][-1])
        values[first : first + block.nnz] = block.data
        columns[first : first + block.nnz] = block.indices
        ends.append(block.indptr[1:] + first)
    size = int(ends[-1][-1])
    columns = columns[:size]
    occurs = np.bincount(columns, minlength=NUM_HASHED) > 0
    columns[:] = (np.cumsum(occurs, dtype=np.int32) - 1)[columns]
    used = np.flatnonzero(occurs)
    parts = values[:size], columns, np.concatenate(ends)
    matrix = sparse.csr_matrix(parts, shape=(len(sketches), len(used)), copy=False)
    return np.concatenate(numbers), matrix, used


def _sparse(sparse: Any, hashed: Hashed, num: int) -> Any:
    shape = (num, NUM_HASHED)
    return sparse.coo_matrix((hashed.values, (hashed.rows, hashed.columns)), shape=shape).tocsr()


def _fit_fold(table: Table, numbers: Floats, matrix: Any, fold: int) -> tuple[Floats, ...]:
    """theta [4], weights of the numbers and of the hashed features, without one fold."""
    from scipy.optimize import minimize

    weight = np.where(table.fold[table.turn] == fold, 0.0, table.weight)
    sign = np.where(table.success, 1.0, -1.0)
    width = numbers.shape[1]
    transposed = matrix.T

    def loss(values: Floats) -> tuple[float, Floats]:
        # The penalties are priors: gaps around 1, weights around 0.
        gaps, plain, words = values[1:4], values[4 : 4 + width], values[4 + width :]
        hard = numbers @ plain + matrix @ words
        margin = sign * (_theta(values)[table.tier] - hard[table.turn])
        slope = -weight * sign * _sigmoid(-margin)
        by_tier = np.bincount(table.tier, weights=slope, minlength=NUM_TIERS)
        by_turn = np.bincount(table.turn, weights=slope, minlength=len(numbers))
        total = weight @ np.logaddexp(0.0, -margin)
        total += 0.5 * (((gaps - 1) ** 2).sum() + plain @ plain + _PENALTY * (words @ words))
        gradient = np.concatenate(
            [
                np.cumsum(by_tier[::-1])[::-1],
                plain - numbers.T @ by_turn,
                _PENALTY * words - transposed @ by_turn,
            ]
        )
        gradient[1:4] += gaps - 1
        return float(total), gradient

    start = np.zeros(4 + width + matrix.shape[1])
    start[1:4] = 1.0
    bounds = [(None, None)] + [(0.0, None)] * 3 + [(None, None)] * (len(start) - 4)
    found = minimize(
        loss,
        start,
        jac=True,
        bounds=bounds,
        method="L-BFGS-B",
        options={"maxiter": 200, "ftol": 1e-7},
    ).x
    return _theta(found), found[4 : 4 + width], found[4 + width :]


def _theta(values: Floats) -> Floats:
    return np.asarray(np.cumsum(values[:4]))


def _calibrate(table: Table, model: DemandModel) -> Calibration:
    own = ~table.is_label
    if not own.any():
        raise DataError("a model of demand needs outcomes beside labels to check its calibration")
    turn, tier, success = table.turn[own], table.tier[own], table.success[own]
    hard = np.concatenate(
        [
            model._hardness(table.sketches[s : s + _BATCH], table.fold[s : s + _BATCH])
            for s in range(0, len(table.sketches), _BATCH)
        ]
    )
    fold = table.fold[turn]
    predicted = _sigmoid(model.theta[fold, tier] - hard[turn])
    # The baselines are fitted to the very outcomes they are judged on, which favours them slightly.
    num = np.maximum(np.bincount(tier, minlength=NUM_TIERS), 1)
    rates = np.bincount(tier, weights=success, minlength=NUM_TIERS) / num
    return Calibration(
        bins=calibration_bins(predicted, success),
        n=len(success),
        model=quality(predicted, success),
        constant=quality(np.full(len(success), success.mean()), success),
        tier=quality(rates[tier], success),
    )


def _standardised(numbers: Floats, mean: Floats, scale: Floats) -> Floats:
    return np.clip((numbers - mean) / scale, -5.0, 5.0)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))
