"""The boundary table: cells, verdicts, weights, notes, and who was routed wrongly."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from distill.curriculum.boundary import (
    BoundaryOptions,
    Columns,
    boundary_table,
    weighted_rates,
    wilson,
)
from distill.errors import ConfigError, DataError

SCENES = ("code", "math")


def columns(rows, **changes):
    """Rows are (scene, band, tier, outcome, times); anything else by name."""
    expanded = np.array([r[:4] for r in rows for _ in range(r[4])], dtype=int).reshape(-1, 4)
    n = len(expanded)
    values = {
        "scene": expanded[:, 0],
        "band": expanded[:, 1],
        "tier": expanded[:, 2],
        "outcome": expanded[:, 3],
        "verified": np.ones(n, dtype=bool),
        "cached": np.zeros(n, dtype=bool),
        "propensity": np.full(n, np.nan),
        "weight": np.ones(n),
        "predicted": np.zeros(n),
        "rescued": np.full(n, -1),
    }
    return Columns(**(values | changes))


# Of code at band 1, tier 0 is weak, 1 uncertain, 2 and 3 are capable.
ROWS = [
    (0, 1, 0, 1, 11), (0, 1, 0, 0, 19),
    (0, 1, 1, 1, 30), (0, 1, 1, 0, 10),
    (0, 1, 2, 1, 46), (0, 1, 2, 0, 4),
    (0, 1, 3, 1, 50),
    (1, 0, 0, 1, 40), (1, 0, 2, 1, 12), (1, 0, 3, 0, 1),
    (1, 3, 3, 0, 5),
]  # fmt: skip


def test_cells_have_counts_wilson_intervals_and_verdicts() -> None:
    found = boundary_table(columns(ROWS), SCENES)
    table = {(c.scene, c.band, c.tier): (c.k, c.n, c.status) for c in found.cells}
    assert table == {
        ("code", 1, 0): (11, 30, "weak"),
        ("code", 1, 1): (30, 40, "uncertain"),
        ("code", 1, 2): (46, 50, "capable"),
        ("code", 1, 3): (50, 50, "capable"),
        ("math", 0, 0): (40, 40, "capable"),
        ("math", 0, 2): (12, 12, "uncertain"),  # its interval begins at 0.757, but 12 are too few
        ("math", 0, 3): (0, 1, "uncertain"),
        ("math", 3, 3): (0, 5, "weak"),
    }
    assert found.tiers == {("code", 1): 2, ("math", 0): 0, ("math", 3): None}
    cell = found.cells[0]
    assert (cell.low, cell.high) == pytest.approx((0.218739, 0.544864), abs=5e-7)
    assert (cell.basis, cell.n_eff) == ("observational", pytest.approx(30))
    assert cell.reach is None


def test_under_and_over_routed_turns_are_counted_against_the_boundary() -> None:
    found = boundary_table(columns(ROWS), SCENES)
    # Below tier 2 and failed: 19 at tier 0 and 10 at tier 1. Where no tier is capable: nobody.
    assert found.under_routed.sum() == 29
    # Of math at band 0 tier 2 is two above; tier 3 failed; of code nothing is two above tier 2.
    assert found.over_routed.sum() == 12
    rows = columns(ROWS)
    for flagged, outcome in ((found.under_routed, 0), (found.over_routed, 1)):
        assert (rows.outcome[flagged] == outcome).all()


def test_a_turn_that_a_higher_tier_rescued_is_under_routed_even_without_a_boundary() -> None:
    rows = [(1, 3, 1, 0, 1), (1, 3, 1, 1, 1), (1, 3, 1, -1, 2), (-1, -1, 0, -1, 1)]
    found = boundary_table(columns(rows, rescued=np.array([-1, -1, 3, 1, 2])), SCENES)
    assert found.under_routed.tolist() == [False, False, True, False, True]
    assert found.tiers == {("math", 3): None}


def test_cached_unverified_and_unplaced_turns_count_in_no_cell() -> None:
    rows = [*ROWS, (0, 1, 0, 0, 40)]
    n = sum(r[4] for r in rows)
    cached = np.arange(n) >= n - 40
    found = boundary_table(columns(rows, cached=cached), SCENES)
    plain = boundary_table(columns(ROWS), SCENES)
    assert found.cells == plain.cells
    assert (found.num_cached, found.num_unverified) == (40, 0)
    assert not found.under_routed[cached].any()
    found = boundary_table(columns(rows, verified=~cached), SCENES)
    assert found.cells == plain.cells
    assert (found.num_cached, found.num_unverified) == (0, 40)
    # A failure that nothing can check is no evidence for a cell, but it is a failure below it.
    assert found.under_routed[cached].all()
    unknown = [*ROWS, (0, 1, 0, -1, 3), (-1, 1, 0, 1, 3), (0, -1, 0, 1, 3), (0, 1, -1, 0, 3)]
    found = boundary_table(columns(unknown), SCENES)
    assert found.cells == plain.cells
    assert found.num_unverified == 12
    assert not found.under_routed[-12:].any()
    assert not found.over_routed[-12:].any()


def test_a_thinned_log_is_weighted_back() -> None:
    rows = [(0, 0, 0, 1, 30), (0, 0, 0, 0, 30)]
    weight = np.repeat([1.0, 3.0], 30)
    cell = boundary_table(columns(rows, weight=weight), SCENES).cells[0]
    assert cell.rate == pytest.approx(0.25)
    assert cell.n_eff == pytest.approx(equal_turns([1.0] * 30 + [0.0] * 30, weight))
    low, high = wilson(0.25 * cell.n_eff, cell.n_eff)
    assert (cell.low, cell.high) == pytest.approx((float(low), float(high)))


def equal_turns(outcomes, weights):
    """Turns of equal weight whose rate has the variance of this one, in the plain order of the
    definition: a success and a failure of the largest weight are added, then taken off again."""
    y = [*outcomes, 1.0, 0.0]
    w = [*weights, max(weights), max(weights)]
    rate = sum(a * b for a, b in zip(w, y, strict=True)) / sum(w)
    variance = sum((a * (b - rate)) ** 2 for a, b in zip(w, y, strict=True)) / sum(w) ** 2
    return min(len(outcomes), rate * (1 - rate) / variance - 2)


def test_equal_weights_change_nothing() -> None:
    plain = boundary_table(columns(ROWS), SCENES)
    heavy = boundary_table(columns(ROWS, weight=np.full(sum(r[4] for r in ROWS), 7.0)), SCENES)
    for a, b in zip(plain.cells, heavy.cells, strict=True):
        assert (a.rate, a.low, a.high, a.n_eff) == pytest.approx((b.rate, b.low, b.high, b.n_eff))


def explored():
    """Half of the turns are easy: solved by tier 0, where 4 of 5 go. Hard ones fail, 1 of 5 go."""
    rows = [(0, 0, 0, 1, 80), (0, 0, 0, 0, 20), (0, 0, 1, 1, 20), (0, 0, 1, 0, 80)]
    return rows, np.repeat([0.8, 0.2, 0.2, 0.8], [80, 20, 20, 80])


def test_logged_propensities_give_what_the_tier_would_do_on_all_turns() -> None:
    rows, chance = explored()
    naive = boundary_table(columns(rows), SCENES).cells[0]
    cell = boundary_table(columns(rows, propensity=chance), SCENES).cells[0]
    assert naive.rate == pytest.approx(0.8)
    assert cell.rate == pytest.approx(0.5)
    assert (cell.basis, cell.n, cell.k) == ("weighted", 100, 80)
    assert cell.reach == pytest.approx(1.0)
    assert cell.notes == ()
    assert cell.status == "weak"
    assert naive.status == "capable"
    assert cell.n_eff < 100


def test_a_capped_weight_widens_the_interval_by_what_it_takes_away() -> None:
    rows, chance = explored()
    options = BoundaryOptions(cap=2.0)
    cell = boundary_table(columns(rows, propensity=chance), SCENES, options).cells[0]
    # Weights 80 * 1.25 and 20 * 2 remain of 100 and 20 * 5.
    rate, share = 100 / 140, 60 / 200
    assert cell.rate == pytest.approx(rate)
    n_eff = equal_turns([1.0] * 80 + [0.0] * 20, [1.25] * 80 + [2.0] * 20)
    low, high = (float(x) for x in wilson(rate * n_eff, n_eff))
    assert cell.low == pytest.approx((1 - share) * low)
    assert cell.high == pytest.approx((1 - share) * high + share)
    assert cell.low < 0.5 < cell.high


def test_a_policy_that_never_explores_stays_observational_and_says_so() -> None:
    rows = [(0, 0, 0, 1, 60), (0, 0, 1, 0, 40)]
    silent = columns(rows, propensity=np.ones(100), predicted=np.full(100, np.nan))
    found = boundary_table(silent, SCENES)
    assert [c.basis for c in found.cells] == ["observational"] * 2
    assert [c.reach for c in found.cells] == pytest.approx([0.6, 0.4])
    assert "never sends about 40%" in found.cells[0].notes[0]
    assert "no prediction was logged" in found.cells[0].notes[1]


def test_a_policy_that_explores_only_some_turns_is_found_out_once_there_are_enough() -> None:
    # Half of the turns toss a coin, the others always go to tier 1.
    rows = [(0, 0, 0, 1, 100), (0, 0, 1, 1, 300)]
    chance = np.repeat([0.5, 0.5, 1.0], [100, 100, 200])
    low, high = boundary_table(columns(rows, propensity=chance), SCENES).cells
    assert (low.basis, low.reach) == ("observational", pytest.approx(0.5))
    assert (high.basis, high.reach) == ("weighted", pytest.approx(1.0))


def test_half_logged_propensities_are_not_mixed_with_the_rest() -> None:
    rows, chance = explored()
    chance[::2] = math.nan
    cell = boundary_table(columns(rows, propensity=chance), SCENES).cells[0]
    assert (cell.basis, cell.rate) == ("observational", pytest.approx(0.8))
    assert "only 50 of 100 turns have a propensity" in cell.notes[0]


def test_selection_is_noted_where_tiers_follow_predictions_and_only_there() -> None:
    rng = np.random.default_rng(0)
    rows = [(s, 0, t, 1, 100) for s in (0, 1) for t in (0, 1)]
    tier = np.tile(np.repeat([0, 1], 100), 2)
    predicted = rng.random(400)
    predicted[:200] += tier[:200]  # code: the router sends up what it finds hard
    found = boundary_table(columns(rows, predicted=predicted), SCENES)
    notes = {(c.scene, c.tier): c.notes for c in found.cells}
    for tier_of_cell in (0, 1):
        (note,) = notes["code", tier_of_cell]
        r = np.corrcoef(predicted[:200], tier[:200])[0, 1]
        assert f"r = {r:.2f}" in note
        assert notes["math", tier_of_cell] == ()


def test_weighted_rates_of_an_empty_cell_could_be_anything() -> None:
    none = np.zeros(0)
    found = weighted_rates(none.astype(int), none, none, none, 2)
    assert found.low.tolist() == [0, 0]
    assert found.high.tolist() == [1, 1]


def test_an_empty_log_has_an_empty_table() -> None:
    for scenes in (SCENES, ()):
        found = boundary_table(columns([]), scenes)
        assert (found.cells, found.tiers, len(found.under_routed)) == ((), {}, 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tier": np.array([4])}, "column tier must lie within -1 and 3"),
        ({"outcome": np.array([2])}, "column outcome must lie within -1 and 1"),
        ({"propensity": np.array([0.0])}, r"propensity must be in \(0, 1\]"),
        ({"propensity": np.array([1.5])}, r"propensity must be in \(0, 1\]"),
        ({"weight": np.array([0.0])}, "weight of a turn"),
        ({"weight": np.array([math.inf])}, "weight of a turn"),
        ({"cached": np.zeros(2, dtype=bool)}, "equally long"),
    ],
)
def test_columns_that_cannot_be_are_refused(changes, expected) -> None:
    with pytest.raises(DataError, match=expected):
        columns([(0, 0, 0, 1, 1)], **changes)


def test_a_scene_without_a_name_and_impossible_options_are_refused() -> None:
    with pytest.raises(DataError, match="scene is number 2, but 2 have a name"):
        boundary_table(columns([(2, 0, 0, 1, 1)]), SCENES)
    with pytest.raises(ConfigError, match="cap >= 1"):
        BoundaryOptions(cap=0.5)
    assert dataclasses.asdict(BoundaryOptions()) == {
        "z": 1.959964, "min_n": 20, "capable": 0.70, "cap": 10.0
    }  # fmt: skip
