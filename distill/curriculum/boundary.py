"""Which tier suffices for which kind of turn: success by scene, demand band and tier.

A cell counts the turns of one scene and band that one tier answered and whose outcome was verified.
It is `capable` when the lower end of its 95 % interval reaches 0.70 and 20 turns stand behind it,
`weak` when the upper end does not exceed 0.70, else `uncertain`. The boundary of a scene and band
is its lowest capable tier.

Success at a tier is seen only on the turns that the policy sent there. With logged propensities p,
the chances with which the policy chose what it chose, turns count 1/p (at most 10) and the rate is
r = sum(w y) / sum(w): what the tier would do on all turns. Its interval is Wilson's at the number
of equal turns that has the same variance,

    n_eff = r (1 - r) (sum w)^2 / sum of w^2 (y - r)^2  -  2        at most n

taken with one more success and one more failure of the cell's largest weight, because a cell may
by chance not yet have seen the rare turns that count most. With equal weights it is n. The usual
(sum w)^2 / sum w^2 is far too large where the rare turns are the ones that fail.

What the cap on 1/p takes away may be all
success or all failure, and the interval is widened by that. Where the policy never explores, no
weight helps: 1/p adds up to less than the turns there are, and the cell is labelled observational,
as it is without propensities. Turns count as independent of one another.

Source: NeoHorse-1 (arXiv 2609.08183) names the table and no estimator; this one is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from distill.curriculum.records import NUM_TIERS
from distill.errors import ConfigError, DataError

Z = 1.959964
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Status = Literal["capable", "weak", "uncertain"]
Basis = Literal["weighted", "observational"]

# Propensities that a log has rounded can add up to a little less than 1.
_LEAST_REACH = 0.95
# Rare enough that cells of a policy that explores are hardly ever taken for others.
_REACH_Z = 3.5
# One in a hundred cells gets the note by chance alone; a weaker link than 0.1 hardly matters.
_ASSOCIATION_Z = 2.575829
_LEAST_ASSOCIATION = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryOptions:
    z: float = Z
    min_n: int = 20
    """Turns that a cell needs to be called capable; of weighted ones, equal turns (n_eff)."""
    capable: float = 0.70
    cap: float = 10.0
    """Largest 1/p."""

    def __post_init__(self) -> None:
        if self.z <= 0 or self.min_n < 1 or not 0 < self.capable < 1 or self.cap < 1:
            raise ConfigError(
                "a boundary needs z > 0, min_n >= 1, capable within (0, 1) and cap >= 1, got "
                f"{self.z}, {self.min_n}, {self.capable} and {self.cap}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """N turns as arrays; -1 and nan mean that the log does not say."""

    scene: NDArray[Any]  # [N] index into the scenes, or -1
    band: NDArray[Any]  # [N] demand band, a tier or -1
    tier: NDArray[Any]  # [N] served tier or -1
    outcome: NDArray[Any]  # [N] 1 success, 0 failure, -1 unknown
    verified: NDArray[Any]  # [N] bool, the outcome is one that can be checked
    cached: NDArray[Any]  # [N] bool, answered from a cache: says nothing about a tier
    propensity: NDArray[Any]  # [N] chance of the served tier under the policy, in (0, 1], or nan
    weight: NDArray[Any]  # [N] how many turns the row stands for: 1 / sample rate
    predicted: NDArray[Any]  # [N] the router's own expected tier, or nan
    rescued: NDArray[Any]  # [N] tier that solved it after an escalation or a re-ask, or -1

    def __post_init__(self) -> None:
        sizes = {f.name: np.asarray(getattr(self, f.name)).shape for f in fields(self)}
        if len(set(sizes.values())) != 1 or len(sizes["scene"]) != 1:
            raise DataError(f"the columns of a boundary table must be equally long, got {sizes}")
        if not len(self.scene):
            return
        for name, most in (("band", 3), ("tier", 3), ("outcome", 1), ("rescued", 3)):
            found = getattr(self, name)
            if int(found.min()) < -1 or int(found.max()) > most:
                raise DataError(
                    f"column {name} must lie within -1 and {most}, found {found.min()} to "
                    f"{found.max()}"
                )
        chances = self.propensity[~np.isnan(self.propensity)]
        if len(chances) and not (chances.min() > 0 and chances.max() <= 1):
            raise DataError(
                f"a propensity must be in (0, 1], found {chances.min():g} to {chances.max():g}"
            )
        if not np.isfinite(self.weight).all() or self.weight.min() <= 0:
            raise DataError("the weight of a turn must be a positive number: 1 / sample rate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    scene: str
    band: int
    tier: int
    n: int
    """Turns with a verified outcome, as they stand in the log."""
    k: int
    """Of those, successes."""
    rate: float
    """Success rate, weighted where weights are known, with its 95 % interval."""
    low: float
    high: float
    n_eff: float
    status: Status
    basis: Basis
    reach: float | None
    """Sum of 1/p over the turns of the scene and band: 1 when every turn could have come here; None
    without propensities."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    cells: tuple[Cell, ...]
    """Every cell that has a turn, by scene, band and tier."""
    tiers: Mapping[tuple[str, int], int | None]
    """(scene, band) -> lowest capable tier, or None while none is."""
    under_routed: NDArray[np.bool_]  # [N]
    over_routed: NDArray[np.bool_]  # [N]
    num_cached: int
    """Turns left out because a cache answered them."""
    num_unverified: int
    """Turns left out because their outcome, scene, band or tier is not known well enough."""


def wilson(
    successes: NDArray[Any] | float, n: NDArray[Any] | float, z: float = Z
) -> tuple[Floats, Floats]:
    """Wilson score intervals of shares successes / n, in arrays of any shape; n may be a fraction.
    An empty cell could be anything: [0, 1]."""
    k, size = np.asarray(successes, dtype=np.float64), np.asarray(n, dtype=np.float64)
    known = np.maximum(size, 1e-100)
    share = np.clip(k / known, 0.0, 1.0)
    scale = 1 + z * z / known
    centre = (share + z * z / (2 * known)) / scale
    half = z / scale * np.sqrt(share * (1 - share) / known + z * z / (4 * known * known))
    # At the ends the bound equals the share exactly; rounding must not push it inside.
    low = np.where((share <= 0) | (size <= 0), 0.0, np.maximum(centre - half, 0.0))
    high = np.where((share >= 1) | (size <= 0), 1.0, np.minimum(centre + half, 1.0))
    return low, high


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Weighted success rates of cells: arrays [C]."""

    rate: Floats
    low: Floats
    high: Floats
    n_eff: Floats


def weighted_rates(
    cell: Ints, outcome: Floats, weight: Floats, lost: Floats, num_cells: int, z: float = Z
) -> Rates:
    """Rates of turns [N] in cells numbered by `cell`, and intervals that mean what they say.

    `weight` are the weights used and `lost` what a cap took from them. With equal weights this is
    exactly Wilson's interval of k / n.
    """

    def total(values: Floats) -> Floats:
        return np.bincount(cell, weights=values, minlength=num_cells).astype(np.float64)

    n, mass = np.bincount(cell, minlength=num_cells), total(weight)
    rate = total(weight * outcome) / np.maximum(mass, 1e-300)
    most = np.zeros(num_cells)
    np.maximum.at(most, cell, weight)
    most[n == 0] = 1.0
    # One more success and one more failure.
    more = mass + 2 * most
    middle = (rate * mass + most) / more
    spread = total((weight * (outcome - middle[cell])) ** 2)
    spread += most**2 * (middle**2 + (1 - middle) ** 2)
    n_eff = np.minimum(np.maximum(middle * (1 - middle) * more**2 / spread - 2, 0.0), n)
    low, high = wilson(rate * n_eff, n_eff, z)
    share = total(lost) / np.maximum(mass + total(lost), 1e-300)
    return Rates(rate=rate, low=(1 - share) * low, high=(1 - share) * high + share, n_eff=n_eff)


def boundary_table(
    columns: Columns, scenes: Sequence[str], options: BoundaryOptions | None = None
) -> Boundary:
    """The table of N turns, the boundary of each scene and band, and who was routed wrongly.

    A turn is under-routed when a tier below the boundary failed it, or when a higher tier solved it
    after an escalation or a re-ask; over-routed when a tier at least two above the boundary solved
    it. Cached turns are neither, and count in no cell.
    """
    chosen = options or BoundaryOptions()
    if len(columns.scene) and int(columns.scene.max()) >= len(scenes):
        raise DataError(f"a scene is number {columns.scene.max()}, but {len(scenes)} have a name")
    cached = columns.cached.astype(bool)
    placed = (columns.scene >= 0) & (columns.band >= 0) & (columns.tier >= 0) & ~cached
    used = placed & columns.verified.astype(bool) & (columns.outcome >= 0)
    cells = _cells(_Used.of(columns, used), scenes, chosen)
    tiers: dict[tuple[str, int], int | None] = {}
    for cell in cells:
        key = (cell.scene, cell.band)
        tiers.setdefault(key, None)
        if cell.status == "capable" and tiers[key] is None:
            tiers[key] = cell.tier
    lowest = np.full(len(scenes) * NUM_TIERS, -1, dtype=np.int64)
    number = {name: i for i, name in enumerate(scenes)}
    for (scene, band), tier in tiers.items():
        lowest[number[scene] * NUM_TIERS + band] = -1 if tier is None else tier
    at = np.where(placed, columns.scene.astype(np.int64) * NUM_TIERS + columns.band, -1)
    bound = np.where(placed, lowest[at], -1) if len(lowest) else np.full(len(at), -1)
    served = columns.tier.astype(np.int64)
    failed_below = (bound > served) & (columns.outcome == 0)
    rescued = (columns.rescued > served) & (served >= 0) & ~cached
    return Boundary(
        cells=cells,
        tiers=tiers,
        under_routed=failed_below & placed | rescued,
        over_routed=(bound >= 0) & (served >= bound + 2) & (columns.outcome == 1),
        num_cached=int(cached.sum()),
        num_unverified=int((~used & ~cached).sum()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Used:
    """The turns that count, M of them."""

    group: Ints  # scene and band
    cell: Ints  # scene, band and tier
    tier: Floats
    outcome: Floats
    chance: Floats
    weight: Floats
    predicted: Floats

    @classmethod
    def of(cls, columns: Columns, used: NDArray[np.bool_]) -> _Used:
        tier = columns.tier[used].astype(np.int64)
        group = columns.scene[used].astype(np.int64) * NUM_TIERS + columns.band[used].astype(int)
        return cls(
            group=group,
            cell=group * NUM_TIERS + tier,
            tier=tier.astype(np.float64),
            outcome=columns.outcome[used].astype(np.float64),
            chance=columns.propensity[used].astype(np.float64),
            weight=columns.weight[used].astype(np.float64),
            predicted=columns.predicted[used].astype(np.float64),
        )


def _cells(turns: _Used, scenes: Sequence[str], options: BoundaryOptions) -> tuple[Cell, ...]:
    size = len(scenes) * NUM_TIERS * NUM_TIERS
    num = np.bincount(turns.cell, minlength=size)
    hits = np.bincount(turns.cell, weights=turns.outcome, minlength=size)
    zero = np.zeros(len(turns.cell))
    plain = weighted_rates(turns.cell, turns.outcome, turns.weight, zero, size, options.z)
    known = ~np.isnan(turns.chance)
    inverse = 1 / turns.chance[known]
    capped = np.minimum(inverse, options.cap)
    cell, weight = turns.cell[known], turns.weight[known]
    explored = weighted_rates(
        cell, turns.outcome[known], weight * capped, weight * (inverse - capped), size, options.z
    )
    logged = np.bincount(cell, minlength=size)
    reach, complete = _reach(turns, known, size)
    linked = _associated(turns, len(scenes) * NUM_TIERS)
    found = []
    for c in np.flatnonzero(num).tolist():
        weighted = bool(logged[c] == num[c] and complete[c])
        rates = explored if weighted else plain
        low, high = float(rates.low[c]), float(rates.high[c])
        found.append(
            Cell(
                scene=scenes[c // NUM_TIERS**2],
                band=c // NUM_TIERS % NUM_TIERS,
                tier=c % NUM_TIERS,
                n=int(num[c]),
                k=int(hits[c]),
                rate=float(rates.rate[c]),
                low=low,
                high=high,
                n_eff=float(rates.n_eff[c]),
                status=status_of(low, high, float(rates.n_eff[c]), options),
                basis="weighted" if weighted else "observational",
                reach=float(reach[c]) if logged[c] else None,
                notes=_notes(
                    weighted, int(logged[c]), int(num[c]), float(reach[c]), linked[c // NUM_TIERS]
                ),
            )
        )
    return tuple(found)


def status_of(low: float, high: float, n: float, options: BoundaryOptions) -> Status:
    """What an interval over n turns says about a tier."""
    # n_eff of equal weights may differ from n by rounding.
    if low >= options.capable and n >= options.min_n - 1e-6:
        return "capable"
    return "weak" if high <= options.capable else "uncertain"


def _reach(turns: _Used, known: NDArray[np.bool_], size: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Per cell the sum of 1/p over the turns of its scene and band, and whether that may be 1: all
    of them could have come. The sum over n turns varies by the sum of (1 - p) / p over them."""
    weight, chance = turns.weight[known], turns.chance[known]
    cell, group = turns.cell[known], turns.group[known]
    there = np.bincount(group, weights=weight, minlength=size // NUM_TIERS)
    scale = np.maximum(np.repeat(there, NUM_TIERS), 1e-300)
    reach = np.bincount(cell, weights=weight / chance, minlength=size) / scale
    noise = np.bincount(cell, weights=weight**2 * (1 - chance) / chance**2, minlength=size)
    return reach, (reach >= _LEAST_REACH) | (reach + _REACH_Z * np.sqrt(noise) / scale >= 1)


def _associated(turns: _Used, num_groups: int) -> Floats:
    """Correlation of the served tier with the router's own expectation, per scene and band, where
    it is more than chance; 0 where it is not, nan where no turn has a prediction."""
    known = ~np.isnan(turns.predicted)
    group, x, y = turns.group[known], turns.predicted[known], turns.tier[known]

    def mean(values: Floats) -> Floats:
        return np.bincount(group, weights=values, minlength=num_groups) / np.maximum(num, 1)

    num = np.bincount(group, minlength=num_groups)
    x, y = x - mean(x)[group], y - mean(y)[group]
    r = mean(x * y) / np.sqrt(np.maximum(mean(x * x) * mean(y * y), 1e-300))
    strength = np.arctanh(np.clip(np.abs(r), 0, 1 - 1e-12)) * np.sqrt(np.maximum(num - 3, 0))
    real = (strength > _ASSOCIATION_Z) & (np.abs(r) >= _LEAST_ASSOCIATION)
    return np.where(num == 0, np.nan, np.where(real, r, 0.0))


def _notes(
    weighted: bool, logged: int, num: int, reach: float, association: float
) -> tuple[str, ...]:
    notes = []
    if not weighted and logged:
        if logged < num:
            notes.append(f"only {logged} of {num} turns have a propensity, so none is weighted")
        else:
            notes.append(
                f"the policy never sends about {max(0.0, 1 - reach):.0%} of these turns here, so "
                "weights cannot correct which ones came"
            )
    if not weighted and np.isnan(association):
        notes.append("no prediction was logged, so whether routing chose easy turns is not known")
    elif not weighted and association:
        notes.append(
            f"selection: the served tier follows the router's prediction (r = {association:.2f}), "
            "so this rate is of the turns that were sent here, not of all"
        )
    return tuple(notes)
