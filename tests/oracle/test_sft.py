"""Supervised fine-tuning on worked solutions, and on nothing else."""

from __future__ import annotations

import torch

from distill.objectives import SFT
from helpers import logits_batch, objective_loss
from vectors import (
    F1_STUDENT,
    F1_TOKENS,
    F64,
    PRECISIONS,
    chosen,
    close,
    gradient,
    numeric_gradient,
)

WORKED = logits_batch(F1_TOKENS, row_sampled=torch.tensor([False]))


def test_the_loss_is_the_mean_negative_log_likelihood():
    # F1: S = [-0.407606, -0.958020]
    for dtype, atol in PRECISIONS:
        close(objective_loss(SFT(), F1_STUDENT.to(dtype), WORKED), 0.682813, atol)


def test_the_gradient_is_student_minus_one_hot_and_agrees_with_finite_differences():
    found = gradient(lambda z: objective_loss(SFT(), z, WORKED), F1_STUDENT)
    onehot = torch.eye(3, dtype=F64)[F1_TOKENS]
    close(found, (F1_STUDENT.softmax(-1) - onehot) / 2, 1e-12)
    close(found, numeric_gradient(lambda z: objective_loss(SFT(), z, WORKED), F1_STUDENT), 1e-8)


def test_the_students_own_words_are_never_imitated():
    # T41
    both = torch.cat([F1_STUDENT, 2 * F1_STUDENT])
    tokens = F1_TOKENS.expand(2, 2)
    batch = logits_batch(tokens, row_sampled=torch.tensor([True, False]))
    close(objective_loss(SFT(), both, batch), -chosen(both[1:], F1_TOKENS).mean(), 1e-9)
    found = gradient(lambda z: objective_loss(SFT(), z, batch), both)
    assert not bool(found[0].any())
    assert bool(found[1].any())


def test_a_batch_of_own_words_alone_has_a_loss_of_zero():
    # T41
    batch = logits_batch(F1_TOKENS)
    close(objective_loss(SFT(), F1_STUDENT, batch), 0.0, 0.0)
    assert not bool(gradient(lambda z: objective_loss(SFT(), z, batch), F1_STUDENT).any())
