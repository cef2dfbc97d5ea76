from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from distill.errors import EvalError
from evals.metrics import (
    detectable_difference,
    mean_interval,
    paired_bootstrap,
    pass_at_k,
    sign_test,
    wilson,
)


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_equals_the_share_of_subsets_with_a_correct_sample(n: int) -> None:
    for correct in range(n + 1):
        samples = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(samples, k))
            share = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_undefined_with_fewer_samples_than_k() -> None:
    with pytest.raises(EvalError, match="pass@5 needs at least 5 samples"):
        pass_at_k(4, 2, 5)


@pytest.mark.parametrize("k", [0, -1])
def test_pass_at_k_needs_a_positive_k(k: int) -> None:
    with pytest.raises(EvalError, match="k >= 1"):
        pass_at_k(4, 2, k)


# Newcombe, Statistics in Medicine 1998, table I, method 3 (score without continuity correction).
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0000),
    ],
)
def test_wilson_gives_the_published_intervals(
    successes: int, n: int, low: float, high: float
) -> None:
    estimate = wilson(successes, n)
    assert (round(estimate.low, 4), round(estimate.high, 4)) == (low, high)
    assert estimate.n == n


def test_wilson_refuses_an_empty_suite_and_impossible_counts() -> None:
    with pytest.raises(EvalError, match="at least one task"):
        wilson(0, 0)
    with pytest.raises(EvalError, match="not possible"):
        wilson(5, 4)


def test_mean_interval_of_zeros_and_ones_is_wilson() -> None:
    assert mean_interval([1.0] * 15 + [0.0] * 133) == wilson(15, 148)


def test_mean_interval_of_equal_shares_does_not_claim_certainty() -> None:
    estimate = mean_interval([0.5] * 10)
    assert estimate.mean == 0.5
    assert estimate.low < 0.3
    assert estimate.high > 0.7


def test_mean_interval_refuses_values_outside_of_zero_and_one() -> None:
    with pytest.raises(EvalError, match=r"\[0, 1\]"):
        mean_interval([0.5, 1.5])


def test_samples_of_one_task_do_not_narrow_the_interval_as_independent_tasks_would() -> None:
    accuracies = [1.0, 0.75, 0.25, 0.0] * 16
    by_task = mean_interval(accuracies)
    by_sample = wilson(round(4 * sum(accuracies)), 4 * len(accuracies))
    assert by_task.high - by_task.low > 1.3 * (by_sample.high - by_sample.low)


def test_paired_bootstrap_agrees_with_the_normal_interval_on_many_tasks() -> None:
    generator = np.random.default_rng(5)
    before = (generator.random(3000) < 0.4).astype(float)
    after = np.where(generator.random(3000) < 0.8, before, 1 - before)
    result = paired_bootstrap(before.tolist(), after.tolist(), resamples=4000)
    differences = after - before
    half = 1.96 * differences.std() / math.sqrt(len(differences))
    assert result.mean == pytest.approx(differences.mean())
    assert result.low == pytest.approx(differences.mean() - half, abs=0.003)
    assert result.high == pytest.approx(differences.mean() + half, abs=0.003)


def test_paired_bootstrap_covers_the_true_difference_about_as_often_as_it_says() -> None:
    rng = random.Random(11)
    covered = 0
    trials = 200
    for trial in range(trials):
        pairs = [(float(rng.random() < 0.3), float(rng.random() < 0.5)) for _ in range(80)]
        before, after = zip(*pairs, strict=True)
        result = paired_bootstrap(before, after, resamples=400, seed=trial)
        covered += result.low <= 0.2 <= result.high
    # 95 % of 200 is 190; 180 lies three standard deviations below.
    assert 180 <= covered <= 199


def test_paired_bootstrap_is_deterministic_and_moves_with_the_seed() -> None:
    rng = random.Random(0)
    before = [float(rng.random() < 0.4) for _ in range(200)]
    after = [float(rng.random() < 0.6) for _ in range(200)]
    first = paired_bootstrap(before, after, seed=3)
    assert paired_bootstrap(before, after, seed=3) == first
    assert paired_bootstrap(before, after, seed=4) != first


def test_pairing_narrows_the_interval_when_the_same_tasks_are_hard() -> None:
    rng = random.Random(2)
    before = [float(i % 2) for i in range(400)]
    after = [1.0 if rng.random() < 0.1 else value for value in before]
    shuffled = after[:]
    rng.shuffle(shuffled)
    paired, unpaired = paired_bootstrap(before, after), paired_bootstrap(before, shuffled)
    assert paired.high - paired.low < 0.5 * (unpaired.high - unpaired.low)


def test_paired_bootstrap_with_no_change_is_exactly_zero() -> None:
    assert paired_bootstrap([0.0, 1.0] * 30, [0.0, 1.0] * 30) == (0.0, 0.0, 0.0)


def test_paired_bootstrap_refuses_unequal_lengths_and_values_that_are_not_numbers() -> None:
    with pytest.raises(EvalError, match="same tasks on both sides, found 1 and 2"):
        paired_bootstrap([1.0], [1.0, 0.0])
    with pytest.raises(EvalError, match="finite"):
        paired_bootstrap([1.0], [math.nan])
    with pytest.raises(EvalError, match="at least one task"):
        paired_bootstrap([], [])


def test_sign_test_is_the_two_sided_binomial_tail() -> None:
    assert sign_test(0, 0) == 1.0
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(0, 5) == sign_test(5, 0)
    assert sign_test(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert sign_test(3000, 10) < 1e-300


def test_detectable_difference_is_found_with_the_promised_power() -> None:
    n, discordance = 400, 0.3
    difference = detectable_difference(n, discordance)
    generator = np.random.default_rng(1)
    better = (discordance + difference) / 2
    draws = generator.multinomial(n, [better, discordance - better, 1 - discordance], size=4000)
    better_minus_worse = draws[:, 0] - draws[:, 1]
    statistic = better_minus_worse / np.sqrt(draws[:, 0] + draws[:, 1])
    assert (statistic > 1.96).mean() == pytest.approx(0.8, abs=0.03)


def test_more_tasks_detect_smaller_differences() -> None:
    sizes = [detectable_difference(n, 0.2) for n in (50, 200, 800)]
    assert sizes == sorted(sizes, reverse=True)
    assert detectable_difference(1, 0.5) == 1.0
