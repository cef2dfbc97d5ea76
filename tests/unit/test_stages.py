"""Stages from easy to hard, their controls, and how many examples each weak region gets."""

from __future__ import annotations

import math

import numpy as np
import pytest

from distill.curriculum.allocation import allocate, picks
from distill.curriculum.stages import MIX, assign, keyed_hashes, stage_counts
from distill.errors import ConfigError, DataError

TWO = ((0.7, 0.3), (0.3, 0.7))


def examples(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random(n).round(2) * 3, [f"{i:016x}" for i in rng.permutation(n * 7)[:n]]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 7, 74, 75, 76, 1000])
@pytest.mark.parametrize("order", ["curriculum", "shuffled", "reverse"])
@pytest.mark.parametrize("mix", [MIX, TWO, ((1.0,),), np.full((5, 5), 0.2).tolist()])
def test_each_example_is_learnt_exactly_once_per_pass(n, order, mix) -> None:
    scores, ids = examples(n)
    found = assign(scores, ids, order=order, mix=mix)
    assert sorted(found.order.tolist()) == list(range(n))
    assert found.composition.sum() == n
    assert (np.diff(found.stage[found.order]) >= 0).all()
    assert np.bincount(found.stage, minlength=len(mix)).tolist() == list(found.sizes)
    assert np.abs(np.array(found.sizes) - n / len(mix)).max(initial=0) < 2


def test_counts_keep_bands_exactly_and_stages_within_one_example_of_their_share() -> None:
    mix = np.array(MIX)
    for n in range(300):
        sizes = np.array([n // 3 + (i < n % 3) for i in range(3)])
        counts = stage_counts(sizes)
        assert counts.sum(0).tolist() == sizes.tolist()
        assert (np.abs(counts - mix * sizes) < 1).all()
        assert (np.abs(counts.sum(1) - mix @ sizes) < 1 + 1e-9).all()
        assert counts[0, 2] == 0


def test_stages_depend_on_seed_and_ids_and_not_on_the_order_of_the_rows() -> None:
    scores, ids = examples(200)
    found = assign(scores, ids)
    mixed = np.random.default_rng(1).permutation(200)
    again = assign(scores[mixed], [ids[i] for i in mixed])
    assert (again.stage == found.stage[mixed]).all()
    assert [ids[mixed[i]] for i in again.order] == [ids[i] for i in found.order]
    other = assign(scores, ids, seed=1)
    assert (other.stage != found.stage).any()
    assert (other.band == found.band).all()


def test_equal_scores_are_told_apart_by_id() -> None:
    ids = ["c", "a", "f", "b", "e", "d"]
    found = assign(np.ones(6), ids)
    assert dict(zip(ids, found.band.tolist(), strict=True)) == {
        "a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 2
    }  # fmt: skip


def test_controls_have_the_same_examples_and_stage_sizes_but_another_order() -> None:
    scores, ids = examples(3000)
    plain, shuffled, reverse = (
        assign(scores, ids, order=order) for order in ("curriculum", "shuffled", "reverse")
    )
    assert (np.diff(plain.mean_score) > 0.2).all()
    assert (np.diff(reverse.mean_score) < -0.2).all()
    assert (reverse.stage == 2 - plain.stage).all()
    assert shuffled.sizes == plain.sizes
    assert np.ptp(shuffled.mean_score) < 0.15
    middle = shuffled.composition / shuffled.composition.sum(1, keepdims=True)
    assert middle == pytest.approx(np.full((3, 3), 1 / 3), abs=0.05)


def test_the_order_inside_a_stage_says_nothing_about_difficulty() -> None:
    scores, ids = examples(6000)
    found = assign(scores, ids)
    learnt = scores[found.order][: found.sizes[0]]
    assert abs(np.corrcoef(learnt, np.arange(len(learnt)))[0, 1]) < 0.08
    middle = found.band[found.order][found.sizes[0] : sum(found.sizes[:2])]
    assert abs(np.corrcoef(middle, np.arange(len(middle)))[0, 1]) < 0.08


def test_the_report_has_the_means_of_stages_and_bands() -> None:
    scores, ids = examples(75)
    found = assign(scores, ids)
    for s in range(3):
        assert found.mean_score[s] == pytest.approx(scores[found.stage == s].mean())
        assert found.band_mean[s] == pytest.approx(scores[found.band == s].mean())
    assert math.isnan(assign(np.ones(1), ["a"]).mean_score[2])


def test_what_cannot_be_staged_is_refused() -> None:
    with pytest.raises(DataError, match="a occurs twice"):
        assign(np.ones(2), ["a", "a"])
    with pytest.raises(DataError, match="b has the score nan"):
        assign(np.array([1.0, math.nan]), ["a", "b"])
    with pytest.raises(DataError, match="one score each"):
        assign(np.ones(3), ["a", "b"])
    with pytest.raises(ConfigError, match="order must be one of"):
        assign(np.ones(1), ["a"], order="random")  # type: ignore[arg-type]
    for mix in (((0.5, 0.5), (0.4, 0.6)), ((1.2, -0.2), (-0.2, 1.2))):
        with pytest.raises(ConfigError, match="sum to 1"):
            assign(np.ones(1), ["a"], mix=mix)
    with pytest.raises(ConfigError, match="as many columns as rows"):
        assign(np.ones(1), ["a"], mix=((0.5, 0.5),))


def test_hashes_are_even_and_depend_on_the_key() -> None:
    ids = [str(i) for i in range(4000)]
    one, two = (keyed_hashes(ids, key).astype(float) / 2**64 for key in ("a", "b"))
    for values in (one, two):
        assert np.bincount((values * 8).astype(int)) == pytest.approx(np.full(8, 500), abs=100)
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.06


def test_a_full_floor_keeps_the_base_and_none_follows_the_weakness() -> None:
    base, accuracy = [3.0, 1.0], [1.0, 0.0]
    assert allocate(base, accuracy, floor=1.0).share == pytest.approx([0.75, 0.25])
    weak = math.e**2 / (3 + math.e**2)
    assert allocate(base, accuracy, floor=0.0).share == pytest.approx([1 - weak, weak])
    found = allocate(base, accuracy)
    assert found.floored.tolist() == [True, False]
    assert found.share == pytest.approx([0.375 + (1 - weak) / 2, 0.125 + weak / 2])


def test_no_cell_loses_more_than_half_of_its_base_share() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        base, accuracy = rng.random(6), rng.random(6)
        found = allocate(base, accuracy, kappa=20.0)
        assert found.share.sum() == pytest.approx(1.0)
        assert (found.share >= 0.5 * found.base - 1e-12).all()


def test_a_cell_that_was_never_measured_is_neither_favoured_nor_starved() -> None:
    found = allocate([1.0, 1.0, 2.0], [0.2, math.nan, 0.8])
    measured = (0.2 + 2 * 0.8) / 3
    assert found.share == pytest.approx(allocate([1, 1, 2], [0.2, measured, 0.8]).share)
    assert allocate([1.0, 1.0], [math.nan] * 2).share == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("share", "room", "examples", "expected", "short"),
    [
        ([0.5, 0.3, 0.2], [9, 9, 9], 10, [5, 3, 2], [0, 0, 0]),
        ([1, 1, 1], [9, 9, 9], 10, [4, 3, 3], [0, 0, 0]),  # the remainder, to the first of equals
        ([0.5, 0.3, 0.2], [2, 9, 9], 10, [2, 5, 3], [1, 0, 0]),  # 8 left over 3 : 2
        ([0.5, 0.3, 0.2], [2, 4, 9], 10, [2, 4, 4], [1, 0, 0]),  # and again
        ([0.5, 0.3, 0.2], [1, 1, 1], 10, [1, 1, 1], [1, 1, 1]),
        ([0.5, 0.0, 0.5], [3, 9, 3], 10, [3, 0, 3], [1, 0, 1]),
        ([0.0, 0.0], [3, 9], 10, [0, 0], [0, 0]),
        ([0.5, 0.5], [3, 9], 0, [0, 0], [0, 0]),
    ],
)
def test_picks_follow_the_shares_and_never_exceed_a_cell(share, room, examples, expected, short):
    found = picks(share, room, examples)
    assert found.count.tolist() == expected
    assert found.short.tolist() == [bool(x) for x in short]


def test_picks_give_out_all_that_there_is() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        share, room = rng.dirichlet(np.ones(8)), rng.integers(0, 20, 8)
        examples = int(rng.integers(0, 120))
        found = picks(share, room, examples).count
        assert found.sum() == min(examples, room.sum())
        assert ((found >= 0) & (found <= room)).all()


def test_numbers_that_cannot_be_shares_are_refused() -> None:
    with pytest.raises(DataError, match="accuracies lie in"):
        allocate([1.0], [1.5])
    with pytest.raises(DataError, match="do not sum to 0"):
        allocate([0.0], [0.5])
    with pytest.raises(DataError, match="do not match"):
        allocate([1.0, 1.0], [0.5])
    with pytest.raises(ConfigError, match="kappa"):
        allocate([1.0], [0.5], kappa=-1.0)
    with pytest.raises(DataError, match="not be negative"):
        picks([1.0], [1], -1)
    with pytest.raises(DataError, match="numbers >= 0"):
        picks([math.nan], [1], 1)
    with pytest.raises(DataError, match="do not match"):
        picks([1.0], [1, 2], 1)


def test_ids_as_numbers_give_what_their_hexadecimal_digits_give() -> None:
    scores, ids = examples(300)
    numbers = np.array([int(name, 16) for name in ids], dtype=np.uint64)
    numbers[0] = 2**64 - 1
    ids[0] = "f" * 16
    found, other = assign(scores, ids), assign(scores, numbers)
    assert (found.stage == other.stage).all()
    assert (found.order == other.order).all()
    assert (keyed_hashes(ids, "k") == keyed_hashes(numbers, "k")).all()
    numbers[7] = numbers[0]
    with pytest.raises(DataError, match="ffffffffffffffff occurs twice"):
        assign(scores, numbers)
    with pytest.raises(DataError, match="occurs twice"):
        assign(scores[:3], ["a", "b", "a"])
