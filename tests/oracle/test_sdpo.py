"""Self-distillation from feedback: the student's support, rows without a view, the hybrid."""

from __future__ import annotations

import pytest
import torch

from distill.advantages import group_center
from distill.asking import without_mask
from distill.batch import collate
from distill.errors import ConfigError
from distill.objectives import SDPO
from distill.objectives.base import with_weights
from helpers import INFO, logits_batch, make_rollout, objective_loss
from vectors import (
    F1_STUDENT,
    F1_TEACHER,
    F1_TOKENS,
    F2_STUDENT,
    F2_TEACHER,
    PRECISIONS,
    batch_of,
    chosen,
    close,
    coefficients,
    expected_gradient,
    f1,
    f64,
    gradient,
    per_token,
    prompted,
)


@pytest.mark.parametrize(("dtype", "atol"), PRECISIONS)
@pytest.mark.parametrize(("beta", "expected"), [(1.0, 0.611263), (0.0, 0.464346), (0.5, 0.124400)])
def test_the_students_two_entries_and_a_tail_have_their_published_values(
    beta, expected, dtype, atol
):
    # TV3.5
    batch = logits_batch(torch.tensor([[0]]))
    objective = SDPO(beta=beta, k=2)
    found = objective_loss(objective, F2_STUDENT.to(dtype), batch, F2_TEACHER.to(dtype))
    close(found, expected, atol)


def test_the_default_is_the_jsd_over_a_hundred_entries_with_a_tail():
    objective = SDPO()
    assert (objective.beta, objective.k, objective.rest) == (0.5, 100, "tail")


def test_the_ratio_of_a_reused_batch_weighs_the_published_values():
    # TV3.6
    s = chosen(F1_STUDENT, F1_TOKENS)
    batch = f1(behaviour_logprobs=prompted(s - f64([[0.10, 0.0]])))
    objective = SDPO(beta=1.0, support="full")
    close(per_token(objective, F1_STUDENT, batch, F1_TEACHER), [[0.464738, 0.397873]])
    close(objective_loss(objective, F1_STUDENT, batch, F1_TEACHER), 0.431306)


@pytest.mark.parametrize(
    ("kept", "expected"), [([True, False], 0.3), ([True, True], 1.92), ([False, False], 0.0)]
)
def test_rows_without_a_view_leave_sum_and_denominator(kept, expected):
    # TV3.7
    rows = [make_rollout([5], [6, 7]), make_rollout([5], [6, 7, 8], name="t1")]
    batch = collate([r if k else without_mask(r) for r, k in zip(rows, kept, strict=True)])
    values = torch.tensor([[0.0, 0.2, 0.4, 99.0], [0.0, 1.0, 3.0, 5.0]])
    weights = with_weights(batch, "sdpo", "token").weights["sdpo"]
    close((values * weights).sum() / max(1.0, float(weights.sum())), expected, 1e-6)


def test_no_success_and_no_feedback_give_a_loss_of_zero_and_no_nan():
    # conformance 9: nobody has a view, so no row has a trained token
    batch = f1(completion_mask=torch.zeros(1, 3, dtype=torch.bool))
    for objective in (SDPO(k=2), SDPO(hybrid_lambda=0.9)):
        close(objective_loss(objective, F1_STUDENT, batch, F1_TEACHER), 0.0, 0.0)
        found = gradient(lambda z, o=objective: objective_loss(o, z, batch, F1_TEACHER), F1_STUDENT)
        assert not bool(found.any())


def test_group_advantages_of_the_hybrid_are_not_divided_by_the_spread():
    # TV3.8
    rewards = f64([1.0, 0.0, 0.0, 1.0, 0.0])
    close(group_center(rewards, torch.zeros(5, dtype=torch.long)), [0.6, -0.4, -0.4, 0.6, -0.4])


def hybrid_batch(**changes):
    """Two rows of F1 with group advantages .5 and -.5."""
    twice = [x.expand(2, -1, -1) for x in (F1_STUDENT, F1_TEACHER)]
    values = {"rewards": f64([1.0, 0.0]), "row_group": torch.tensor([0, 0])}
    return batch_of(*twice, F1_TOKENS.expand(2, 2), **(values | changes))


def test_the_hybrid_mixes_group_advantage_and_gap_as_published():
    # TV3.8: the loss is -A at ratio 1
    objective, batch = SDPO(hybrid_lambda=0.9), hybrid_batch()
    found = per_token(objective, F1_STUDENT.expand(2, -1, -1), batch)
    close(-found[0], [0.35, 0.321848])
    close(-found[1], [-0.55, -0.578152])


def test_a_row_without_a_view_keeps_its_group_advantage_in_the_hybrid():
    batch = hybrid_batch(row_viewed=torch.tensor([True, False]))
    found = per_token(SDPO(hybrid_lambda=0.9), F1_STUDENT.expand(2, -1, -1), batch)
    close(-found, [[0.35, 0.321848], [-0.45, -0.45]])


def test_the_hybrids_advantage_is_the_coefficient_of_the_log_probability():
    # T17: no gradient flows through the gap
    s, n = chosen(F1_STUDENT, F1_TOKENS), chosen(F1_TEACHER, F1_TOKENS)
    batch = logits_batch(
        torch.zeros(1, 2, dtype=torch.long), n, rewards=f64([0.0]), behaviour_logprobs=None
    )
    found = coefficients(SDPO(hybrid_lambda=0.9), s, batch)
    close(found, -0.1 * (n - s) / 2, 1e-12)


def test_without_rewards_the_hybrids_expected_gradient_is_its_share_of_the_reverse_kl():
    generator = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    found = expected_gradient(SDPO(hybrid_lambda=0.75), student, teacher)
    p, q = student.softmax(-1), teacher.softmax(-1)
    gap = (p / q).log()
    close(found, 0.25 * p * (gap - (p * gap).sum()), 1e-12)


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5])
def test_a_hybrid_share_outside_zero_and_one_is_refused(share):
    with pytest.raises(ConfigError, match="hybrid_lambda"):
        SDPO(hybrid_lambda=share)


def test_the_hybrid_without_a_reward_says_how_many_are_missing():
    batch = hybrid_batch(rewards=f64([1.0, float("nan")]))
    with pytest.raises(ConfigError, match="1 have none"):
        SDPO(hybrid_lambda=0.5).prepare(batch, INFO, {})
