"""Generalised distillation and its extrapolation beyond the teacher."""

from __future__ import annotations

import pytest
import torch

from distill.errors import AlignmentError, ConfigError
from distill.objectives import GOPD, OPD
from distill.objectives.g_opd import extrapolated
from helpers import logits_batch, objective_loss
from vectors import (
    F1_REFERENCE,
    F1_STUDENT,
    F1_TEACHER,
    F1_TOKENS,
    PRECISIONS,
    batch_of,
    chosen,
    close,
    coefficients,
    expected_gradient,
    f1,
    f64,
    full_scores,
    gradient,
    per_token,
    prompted,
)

S, N, R = (chosen(z, F1_TOKENS) for z in (F1_STUDENT, F1_TEACHER, F1_REFERENCE))

ADVANTAGES = [
    (0.0, [-0.550414, -0.593425]),
    (0.5, [-0.775207, -0.937475]),
    (1.0, [-1.000000, -1.281525]),
    (1.25, [-1.112396, -1.453550]),
    (1.5, [-1.224793, -1.625575]),
]


@pytest.mark.parametrize(("dtype", "atol"), PRECISIONS)
@pytest.mark.parametrize(("scale", "expected"), ADVANTAGES)
def test_advantages_have_their_published_values(scale, expected, dtype, atol):
    # TV4.1; the loss is -A at ratio 1
    batch, student = f1(dtype), F1_STUDENT.to(dtype)
    close(-per_token(GOPD(scale=scale), student, batch), [expected], atol)
    close(objective_loss(GOPD(scale=scale), student, batch), -sum(expected) / 2, atol)
    close(scale * (N - R) - (S - R), [expected])  # the other algebraic form


@pytest.mark.parametrize(
    ("scale", "expected"), [(1.0, 0.336472), (1.25, 0.476376), (2.0, 0.896088)]
)
def test_one_token_of_the_inventory_has_its_published_advantage(scale, expected):
    # policy-gradient-family 5
    s, n, r = f64([0.5, 0.7, 0.4]).log()
    close(extrapolated(s, n, r, scale), expected)


def test_the_reinforce_form_has_its_published_value():
    # TV4.2
    tokens = torch.zeros(1, 2, dtype=torch.long)
    reference = full_scores(F1_REFERENCE, F1_TOKENS)
    batch = logits_batch(tokens, N)
    batch.targets["reference"] = reference
    found = coefficients(GOPD(scale=1.25), S, batch)
    close((found * S).sum(), -0.922975)


TARGETS = [
    (0.0, [0.383652, 0.383652, 0.232697]),
    (0.5, [0.320401, 0.528252, 0.151347]),
    (1.0, [0.244728, 0.665241, 0.090031]),
    (1.25, [0.207685, 0.724890, 0.067425]),
    (1.5, [0.173364, 0.776966, 0.049670]),
    (2.0, [0.116115, 0.857977, 0.025909]),
]


@pytest.mark.parametrize(("scale", "target"), TARGETS)
def test_the_expected_gradient_vanishes_at_the_published_target(scale, target):
    # TV4.3, token 0
    roles = (F1_TEACHER[0, 0], F1_REFERENCE[0, 0])
    there = expected_gradient(GOPD(scale=scale), f64(target).log(), *roles)
    close(there, [0.0] * 3, 3e-6)
    elsewhere = expected_gradient(GOPD(scale=scale), F1_STUDENT[0, 0], *roles)
    assert float(elsewhere.abs().max()) > 0.05


def test_the_expected_gradient_vanishes_at_the_published_target_of_the_second_token():
    # TV4.3, token 1
    target = f64([0.872591, 0.071627, 0.055783]).log()
    found = expected_gradient(GOPD(scale=1.25), target, F1_TEACHER[0, 1], F1_REFERENCE[0, 1])
    close(found, [0.0] * 3, 3e-6)


def full_loss(student, teacher, reference, scale):
    """sum_v pi (log pi/ref - scale log nu/ref), written down."""
    s, n, r = (z.log_softmax(-1) for z in (student, teacher, reference))
    return (s.exp() * ((s - r) - scale * (n - r))).sum(-1)


def test_the_full_vocabulary_loss_is_the_expected_negative_advantage():
    # TV4.4
    s, n, r = (z[0].log_softmax(-1) for z in (F1_STUDENT, F1_TEACHER, F1_REFERENCE))
    found = -(s.exp() * extrapolated(s, n, r, 1.25)).sum(-1)
    close(found, [0.482981, 0.436246])
    close(found.mean(), 0.459613)
    close(full_loss(F1_STUDENT, F1_TEACHER, F1_REFERENCE, 1.25)[0], [0.482981, 0.436246])


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.25, 2.0])
def test_the_expected_gradient_is_that_of_the_full_vocabulary_loss(scale):
    generator = torch.Generator().manual_seed(4)
    student, teacher, reference = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    found = expected_gradient(GOPD(scale=scale), student, teacher, reference)
    exact = gradient(lambda z: full_loss(z, teacher, reference, scale), student)
    close(found, exact, 1e-12)


def test_the_teachers_own_start_as_reference_corrects_the_reward_as_published():
    # TV4.5
    base = f64([[[0.2, 0.4, 0.0], [1.0, 0.0, 0.0]]])
    b = chosen(base, F1_TOKENS)
    close(b, [[-1.111901, -1.551445]])
    batch = batch_of(F1_STUDENT, F1_TEACHER, F1_TOKENS, reference=base, behaviour_logprobs=None)
    found = -per_token(GOPD(scale=1.25), F1_STUDENT, batch)
    close(found, [[-1.073926, -1.453550]])
    close(found - f64([[-1.112396, -1.453550]]), [[0.038470, 0.0]])


def test_scale_one_is_plain_opd_and_needs_no_reference():
    # conformance 7
    batch = logits_batch(F1_TOKENS, N)
    assert GOPD(scale=1.0).needs == OPD().needs
    assert "reference.logprobs" in GOPD(scale=1.25).needs
    pairs = [
        gradient(lambda z, o=o: objective_loss(o, z, batch), F1_STUDENT)
        for o in (GOPD(scale=1.0), OPD())
    ]
    assert torch.equal(*pairs)
    values = [objective_loss(o, F1_STUDENT, batch) for o in (GOPD(scale=1.0), OPD())]
    assert torch.equal(*values)


@pytest.mark.parametrize("scale", [0.0, 0.9999, 1.25])
def test_another_scale_without_a_reference_names_the_role(scale):
    # conformance 7
    with pytest.raises(AlignmentError, match="'reference'"):
        objective_loss(GOPD(scale=scale), F1_STUDENT, logits_batch(F1_TOKENS, N))


def test_a_live_student_as_reference_degenerates_to_a_scaled_gap():
    # objectives-a 4.3: why a reference must be frozen
    close(extrapolated(S, N, S, 1.25), 1.25 * (N - S), 1e-12)


def test_a_ratio_beyond_its_bounds_carries_no_gradient():
    batch = f1(behaviour_logprobs=prompted(S + 0.5))  # ratio 0.61, A < 0
    found = gradient(lambda z: objective_loss(GOPD(), z, batch), F1_STUDENT)
    close(found, torch.zeros(1, 2, 3), 0.0)


@pytest.mark.parametrize(
    ("options", "word"), [({"scale": -0.1}, "scale"), ({"clip_low": 1.0}, "clip_low")]
)
def test_a_bad_hyper_parameter_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        GOPD(**options)
