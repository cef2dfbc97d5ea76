"""Exact distillation on the student's own samples."""

from __future__ import annotations

import pytest
import torch

from distill.errors import ConfigError
from distill.objectives import GKD
from helpers import logits_batch, objective_loss
from vectors import (
    F1_STUDENT,
    F1_TEACHER,
    F1_TOKENS,
    F2_STUDENT,
    F2_TEACHER,
    FB_STUDENT,
    FB_TEACHER,
    FB_TOKENS,
    PRECISIONS,
    batch_of,
    close,
    divergence_gradient,
    expected_gradient,
    f1,
    gradient,
)


@pytest.mark.parametrize(("dtype", "atol"), PRECISIONS)
@pytest.mark.parametrize(
    ("beta", "temperature", "expected"),
    [
        (0.0, 1.0, 0.383107),
        (1.0, 1.0, 0.409193),
        (0.5, 1.0, 0.095015),
        (0.25, 1.0, 0.070867),
        (0.1, 1.0, 0.034209),
        (0.9, 1.0, 0.035979),
        (0.0, 2.0, 0.099660),
        (1.0, 2.0, 0.099567),
        (0.5, 2.0, 0.024657),
    ],
)
def test_the_token_mean_has_its_published_value(beta, temperature, expected, dtype, atol):
    # TV1.3
    objective = GKD(beta=beta, temperature=temperature)
    close(
        objective_loss(objective, F1_STUDENT.to(dtype), f1(dtype), F1_TEACHER.to(dtype)),
        expected,
        atol,
    )


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.0, [[0.420512, -0.420512, 0.0], [-0.403334, 0.277145, 0.126190]]),
        (1.0, [[0.385499, -0.347640, -0.037859], [-0.428289, 0.339015, 0.089274]]),
    ],
)
def test_the_token_mean_has_half_the_published_gradient_of_each_position(beta, expected):
    # TV1.3
    found = gradient(lambda z: objective_loss(GKD(beta=beta), z, f1(), F1_TEACHER), F1_STUDENT)
    close(2 * found[0], expected)


@pytest.mark.parametrize(
    ("chosen_by", "rest", "expected"),
    [
        ("teacher", "renormalised", [0.027955, 0.026345, 0.006763]),
        ("teacher", "tail", [0.591393, 0.619649, 0.142635]),
        ("student", "renormalised", [0.655785, 0.715798, 0.160773]),
        ("student", "tail", [0.464346, 0.611263, 0.124400]),
    ],
)
def test_top_k_losses_have_their_published_values(chosen_by, rest, expected):
    # TV1.6
    batch = logits_batch(torch.tensor([[0]]))
    for beta, value in zip((0.0, 1.0, 0.5), expected, strict=True):
        objective = GKD(beta=beta, support="top_k", k=2, chosen_by=chosen_by, rest=rest)
        close(objective_loss(objective, F2_STUDENT, batch, F2_TEACHER), value)


def test_the_loss_divides_by_tokens_and_not_by_tokens_times_vocabulary():
    # T8: batch 2, length 3, vocabulary 5
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 3, 5, dtype=torch.float64, generator=generator)
    p, q = student.softmax(-1), teacher.softmax(-1)
    expected = (p * (p / q).log()).sum() / 6
    batch = logits_batch(torch.zeros(2, 3, dtype=torch.long))
    close(objective_loss(GKD(beta=1.0), student, batch, teacher), expected, 1e-12)


def test_renormalised_and_exact_gradients_of_the_shared_fixture_are_the_published_ones():
    # objectives-b 6.1: token 0, support {0, 1}
    def found(**options):
        objective = GKD(beta=1.0, **options)
        batch = logits_batch(FB_TOKENS[:, :1])
        return gradient(
            lambda z: objective_loss(objective, z, batch, FB_TEACHER[:, :1]), FB_STUDENT[:, :1]
        )[0, 0]

    close(found(), [0.253624, -0.308261, 0.054637])
    close(found(support="top_k", k=2, rest="renormalised"), [0.314981, -0.314981, 0.0])


def test_renormalised_values_of_the_shared_fixture_are_the_published_ones():
    # objectives-b 6.1
    batch = logits_batch(FB_TOKENS)
    renormalised = GKD(beta=1.0, support="top_k", k=2, rest="renormalised")
    close(objective_loss(renormalised, FB_STUDENT, batch, FB_TEACHER), (0.828725 + 1.226334) / 2)
    close(objective_loss(GKD(), FB_STUDENT, batch, FB_TEACHER), (0.847754 + 1.397504) / 2)


def test_back_propagating_a_raw_reverse_sum_would_give_the_published_wrong_gradient():
    # objectives-b 6.1, naive: why the product refuses it
    def naive(p, q):
        return (p[:2] * (p[:2] / q[:2]).log()).sum()

    student, teacher = FB_STUDENT[0, 0], FB_TEACHER[0, 0]
    close(divergence_gradient(naive, student, teacher), [0.365226, -0.293158, -0.072068])
    with pytest.raises(ConfigError, match="raw"):
        GKD(beta=1.0, support="top_k", k=2, rest="raw")


def test_the_expected_gradient_of_k2_on_sampled_tokens_is_that_of_the_reverse_kl():
    # TV1.4
    generator = torch.Generator().manual_seed(2)
    student, teacher = torch.randn(2, 7, dtype=torch.float64, generator=generator)
    found = expected_gradient(GKD(support="sampled"), student, teacher)
    exact = divergence_gradient(lambda p, q: (p * (p / q).log()).sum(), student, teacher)
    close(found, exact, 1e-12)


def test_the_sampled_loss_is_the_mean_of_k2():
    # TV1.4
    close(objective_loss(GKD(support="sampled"), F1_STUDENT, f1()), (0.5 + 0.821153) / 2)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_an_estimator_with_another_gradient_is_refused_as_a_loss(estimator):
    # T16
    with pytest.raises(ConfigError, match=r"k1 has no gradient in expectation.*objective opd"):
        GKD(support="sampled", estimator=estimator)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_sampled_loss_of_another_direction_is_refused(beta):
    with pytest.raises(ConfigError, match="beta"):
        GKD(support="sampled", beta=beta)


def test_one_entry_renormalised_is_refused():
    # conformance 6
    with pytest.raises(ConfigError, match="renormalised"):
        GKD(support="top_k", k=1, rest="renormalised")


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_outside_zero_and_one_is_refused(share):
    with pytest.raises(ConfigError, match="on_policy_share"):
        GKD(on_policy_share=share)


def test_more_entries_than_the_vocabulary_has_are_refused():
    with pytest.raises(ConfigError, match="must not exceed the vocabulary of 3"):
        objective_loss(GKD(support="top_k"), F1_STUDENT, f1(), F1_TEACHER)


def test_worked_solutions_count_as_much_as_samples():
    batch = batch_of(F1_STUDENT, F1_TEACHER, F1_TOKENS, row_sampled=torch.tensor([False]))
    close(objective_loss(GKD(), F1_STUDENT, batch, F1_TEACHER), 0.409193)
