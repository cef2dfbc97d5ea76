"""The bounded power reward and the Bregman divergence that it descends."""

from __future__ import annotations

import math

import pytest
import torch

from distill.errors import ConfigError
from distill.objectives import PowerOPD
from distill.objectives.power_opd import power_advantage
from helpers import objective_loss
from vectors import (
    F64,
    FB_GAP,
    FB_STUDENT,
    FB_TEACHER,
    FB_TOKENS,
    PRECISIONS,
    batch_of,
    chosen,
    close,
    divergence_gradient,
    expected_gradient,
    f64,
    gradient,
    numeric_gradient,
    per_token,
)

S, N = chosen(FB_STUDENT, FB_TOKENS), chosen(FB_TEACHER, FB_TOKENS)

REWARDS = [
    (0.1, [-0.106658, -0.232780], -0.130791),
    (0.5, [-0.401260, -0.459844], -0.274554),
    (1.0, [-0.576172, -0.333703], -0.223442),
    (5.0, [-0.426371, -0.005356], -0.039010),
    (10.0, [-0.182963, -0.000029], -0.015553),
]


def fixture(dtype=F64):
    return batch_of(FB_STUDENT.to(dtype), FB_TEACHER.to(dtype), FB_TOKENS, behaviour_logprobs=None)


@pytest.mark.parametrize(("dtype", "atol"), PRECISIONS)
@pytest.mark.parametrize(("alpha", "expected", "loss"), REWARDS)
def test_rewards_and_losses_have_their_published_values(alpha, expected, loss, dtype, atol):
    # objectives-b 1.8; the published loss is the REINFORCE form, -mean(A S)
    student = FB_STUDENT.to(dtype)
    found = -per_token(PowerOPD(alpha=alpha), student, fixture(dtype))
    close(found, [expected], atol)
    close(-(found.double() * S).mean(), loss, atol)
    close(objective_loss(PowerOPD(alpha=alpha), student, fixture(dtype)), -sum(expected) / 2, atol)


def test_the_gradient_at_exponent_one_has_its_published_value():
    # objectives-b 1.8
    found = gradient(lambda z: objective_loss(PowerOPD(alpha=1.0), z, fixture()), FB_STUDENT)
    expected = [[0.045001, -0.032898, -0.012103], [-0.064793, 0.108225, -0.043432]]
    close(found[0], expected)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(0.1, [-1.066579, -2.327800]), (1e-4, [-1.148244, -2.989306])],
)
def test_the_reward_over_its_exponent_tends_to_the_log_ratio(alpha, expected):
    # objectives-b 1.8
    close(power_advantage(S, N, alpha) / alpha, [expected])
    close(N - S, [FB_GAP])
    near = power_advantage(S, N, 1e-7) / 1e-7
    close(near, N - S, 1e-5)


PAIRS = [
    (0.9, 0.6, 0.1, 0.039319),
    (0.9, 0.6, 1.0, 0.300000),
    (0.9, 0.6, 5.0, 0.512730),
    (0.9, 0.6, 10.0, 0.342632),
    (0.002, 0.0001, 1.0, 0.001900),
    (0.002, 0.0001, 5.0, 0.000000),
    (0.2, 0.01, 1.0, 0.190000),
    (0.2, 0.01, 5.0, 0.000320),
    (1e-20, 0.3, 1.0, -0.300000),
    (1e-20, 0.3, 5.0, -0.002430),
    (0.9999, 0.99, 500.0, 0.944657),
    (0.7, 0.5, 5.0, 0.136820),  # policy-gradient-family 5
    (0.2, 0.3, 5.0, -0.002110),
    (0.1, 0.2, 5.0, -0.000310),
    (0.7, 0.5, 1.0, 0.200000),
]


@pytest.mark.parametrize(("p", "q", "alpha", "expected"), PAIRS)
def test_pairs_of_probabilities_have_their_published_rewards(p, q, alpha, expected):
    # objectives-b 1.8
    close(power_advantage(f64(q).log(), f64(p).log(), alpha), expected)


def test_the_reward_is_a_difference_of_powers_and_not_a_power_of_the_ratio():
    # objectives-b 0, correction 2: the other form is 1895.366596 here
    other = ((0.9 / 1e-6) ** 0.5 - 1) / 0.5
    assert other == pytest.approx(1895.366596, abs=1e-6)
    found = float(power_advantage(f64(1e-6).log(), f64(0.9).log(), 0.5))
    assert found == pytest.approx(0.9**0.5 - 1e-3, abs=1e-9)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(1.0, [-0.133721, 0.117732, 0.015989]), (5.0, [-0.075829, 0.061692, 0.014137])],
)
def test_the_expected_ascent_has_its_published_direction(alpha, expected):
    # objectives-b 1.8, token 0
    found = -expected_gradient(PowerOPD(alpha=alpha), FB_STUDENT[0, 0], FB_TEACHER[0, 0])
    close(found, expected)


def bregman(alpha):
    """D_a of objectives-b 1.1, up to what does not depend on the student."""
    return lambda p, q: (p ** (alpha + 1) / (alpha + 1) - q**alpha * p).sum()


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 2.0, 5.0, 10.0])
def test_the_expected_gradient_is_that_of_the_bregman_divergence(alpha):
    # objectives-b 1.1
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 7, dtype=F64, generator=generator)
    found = expected_gradient(PowerOPD(alpha=alpha), student, teacher)
    close(found, divergence_gradient(bregman(alpha), student, teacher), 1e-12)
    numeric = numeric_gradient(
        lambda z: bregman(alpha)(z.softmax(-1), teacher.softmax(-1)), student
    )
    close(found, numeric, 1e-8)


def test_at_exponent_one_it_descends_half_the_squared_distance():
    found = expected_gradient(PowerOPD(alpha=1.0), FB_STUDENT[0, 1], FB_TEACHER[0, 1])
    exact = divergence_gradient(
        lambda p, q: 0.5 * (p - q).square().sum(), FB_STUDENT[0, 1], FB_TEACHER[0, 1]
    )
    close(found, exact, 1e-12)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 5.0])
def test_exact_descent_ends_at_the_teacher(alpha):
    # objectives-b 1.1: the only minimum; the step shrinks with the exponent, so it is scaled
    student, teacher = f64([1.0, 0.0, -0.5]), f64([0.2, 0.7, 0.0])
    rate = 4.0 / (alpha * 0.5 ** (alpha - 1))
    for _ in range(200):
        student = student - rate * expected_gradient(PowerOPD(alpha=alpha), student, teacher)
    close(student.softmax(-1), teacher.softmax(-1), 1e-2)


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 1.0, 5.0, 500.0])
def test_the_reward_is_bounded_by_one_and_never_nan(alpha):
    values = f64([0.0, -1e-9, -0.5, -3.0, -50.0, -700.0, -1e4, -math.inf])
    for dtype in (F64, torch.float32):
        s, n = torch.cartesian_prod(values, values).to(dtype).t()
        found = power_advantage(s, n, alpha)
        assert bool((found.abs() <= 1.0).all())
        assert bool((found[s == n] == 0).all())
        assert bool((found[n > s] >= 0).all())
        assert bool((found[n < s] <= 0).all())


@pytest.mark.parametrize("alpha", [0.1, 1.0, 5.0])
def test_the_reward_has_the_sign_of_the_log_ratio(alpha):
    generator = torch.Generator().manual_seed(0)
    s, n = -5 * torch.rand(2, 500, dtype=F64, generator=generator)
    assert torch.equal(power_advantage(s, n, alpha).sign(), (n - s).sign())


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan])
def test_an_exponent_that_is_not_positive_is_refused(alpha):
    with pytest.raises(ConfigError, match="alpha"):
        PowerOPD(alpha=alpha)
