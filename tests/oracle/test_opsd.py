"""On-policy self-distillation: the clip of single vocabulary entries."""

from __future__ import annotations

import pytest
import torch

from distill.errors import ConfigError
from distill.objectives import OPSD
from helpers import INFO, logits_batch, logits_view, objective_loss
from vectors import (
    F1_STUDENT,
    F1_TEACHER,
    F3_STUDENT,
    F3_TEACHER,
    PRECISIONS,
    close,
    f1,
    gradient,
    per_token,
)

ONE = logits_batch(torch.tensor([[0]]))


def loss_and_gradient(**options):
    """On F3."""
    objective = OPSD(**options)
    loss = objective_loss(objective, F3_STUDENT, ONE, F3_TEACHER)
    found = gradient(lambda z: objective_loss(objective, z, ONE, F3_TEACHER), F3_STUDENT)
    return loss, found[0, 0]


def test_without_a_clip_it_is_the_forward_kl():
    # TV2.1
    for form in ("paper", "bregman"):
        loss, slope = loss_and_gradient(entry_clip=0.0, clip_form=form)
        close(loss, 0.085123)
        close(slope, [-0.2, 0.1, 0.1])


def test_the_papers_clip_has_its_published_value_and_its_gradient_points_the_wrong_way():
    # TV2.1
    loss, slope = loss_and_gradient(entry_clip=0.05, clip_form="paper")
    close(loss, -0.100408)
    close(slope, [0.15, -0.11, -0.04])


@pytest.mark.parametrize(
    ("clip", "expected", "slope"),
    [
        (0.03, 0.078907, [-0.05, 0.07, -0.02]),  # TV2.2
        (1.0, 0.085123, [-0.2, 0.1, 0.1]),
    ],
)
def test_the_bregman_clip_has_its_published_value_and_gradient(clip, expected, slope):
    found, found_slope = loss_and_gradient(entry_clip=clip, clip_form="bregman")
    close(found, expected)
    close(found_slope, slope)


def test_the_clip_acts_before_the_sum_and_not_after_it():
    # objectives-a 2.8 (2): after it, the value would be 0.05 with no gradient
    loss, slope = loss_and_gradient(entry_clip=0.05, clip_form="paper")
    assert abs(float(loss) - 0.05) > 0.1
    assert float(slope.abs().max()) > 0.1


@pytest.mark.parametrize(("dtype", "atol"), PRECISIONS)
def test_clipped_values_of_two_tokens_are_the_published_ones(dtype, atol):
    # TV2.3
    def found(beta):
        objective = OPSD(beta=beta, entry_clip=0.05, clip_form="paper")
        return per_token(objective, F1_STUDENT.to(dtype), f1(dtype), F1_TEACHER.to(dtype))[0]

    close(found(0.0), [-0.194728, -0.169729], atol)
    close(found(0.0).mean(), -0.182229, atol)
    close(found(0.5).mean(), 0.094537, atol)
    close(found(1.0).mean(), -0.185186, atol)


def test_the_default_form_of_a_clip_never_goes_below_zero():
    # T38
    generator = torch.Generator().manual_seed(0)
    student, teacher = 3 * torch.randn(2, 50, 4, 6, dtype=torch.float64, generator=generator)
    batch = logits_batch(torch.zeros(50, 4, dtype=torch.long))
    found = per_token(OPSD(entry_clip=0.05), student, batch, teacher)
    assert float(found.min()) >= 0.0
    published = OPSD(entry_clip=0.05, clip_form="paper")
    assert float(per_token(published, student, batch, teacher).min()) < 0.0


def test_a_small_step_on_the_default_form_of_a_clip_brings_the_student_nearer_to_the_teacher():
    # T38: with the paper's form the same step leads away
    def forward_kl_after(**options):
        _, slope = loss_and_gradient(**options)
        moved = F3_STUDENT - 0.1 * slope
        return float(objective_loss(OPSD(entry_clip=0.0), moved, ONE, F3_TEACHER))

    assert forward_kl_after(entry_clip=0.05) < 0.085
    assert forward_kl_after(entry_clip=0.05, clip_form="paper") > 0.086


def test_the_share_of_clipped_entries_and_of_negative_positions_is_reported():
    objective = OPSD(entry_clip=0.05, clip_form="paper")
    batch, _ = objective.prepare(ONE, INFO, {})
    (term,) = objective(logits_view(F3_STUDENT, batch, objective, F3_TEACHER), batch)
    close(term.metrics["clipped_share"].values[0, 1], 1 / 3, 1e-6)
    assert float(term.metrics["negative_share"].values[0, 1]) == 1.0


def test_the_first_tokens_can_stay_out_of_the_loss():
    skipped = objective_loss(OPSD(skip_first=1, entry_clip=0.0), F1_STUDENT, f1(), F1_TEACHER)
    close(skipped, 0.345701)


@pytest.mark.parametrize(
    ("options", "word"), [({"skip_first": -1}, "skip_first"), ({"entry_clip": -0.1}, "entry_clip")]
)
def test_a_bad_hyper_parameter_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        OPSD(**options)
