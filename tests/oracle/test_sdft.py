"""Self-distillation from a demonstration: direction, skipped tokens, the teacher's average."""

from __future__ import annotations

import pytest
import torch

from distill.errors import ConfigError
from distill.followers import Follower, FollowerSpec
from distill.objectives import SDFT
from distill.objectives.base import with_weights
from helpers import logits_batch, objective_loss
from vectors import (
    F1_STUDENT,
    F1_TEACHER,
    F1_TOKENS,
    F2_STUDENT,
    F2_TEACHER,
    PRECISIONS,
    chosen,
    close,
    f1,
    f64,
    gradient,
    per_token,
    prompted,
)


@pytest.mark.parametrize(("dtype", "atol"), PRECISIONS)
@pytest.mark.parametrize(("beta", "expected"), [(0.0, 0.383107), (1.0, 0.409193), (0.5, 0.095015)])
def test_both_directions_and_the_jsd_have_their_published_values(beta, expected, dtype, atol):
    # TV3.1
    objective = SDFT(beta=beta, skip_first=0)
    found = objective_loss(objective, F1_STUDENT.to(dtype), f1(dtype), F1_TEACHER.to(dtype))
    close(found, expected, atol)


def test_the_default_is_the_forward_kl_without_the_first_three_tokens():
    assert (SDFT().beta, SDFT().skip_first) == (0.0, 3)


@pytest.mark.parametrize(("skip", "expected"), [(3, 0.3), (0, 0.6), (5, 0.0)])
def test_skipped_tokens_leave_sum_and_denominator(skip, expected):
    # TV3.2; a reply shorter than the skip adds nothing
    values = f64([[0.0, 0.9, 0.8, 0.7, 0.2, 0.4]])
    batch = logits_batch(torch.zeros(1, 5, dtype=torch.long))
    weights = with_weights(batch, "x", "token", skip=skip).weights["x"]
    close((values * weights).sum() / max(1.0, float(weights.sum())), expected)


def test_a_reply_no_longer_than_the_skip_has_a_loss_of_zero():
    close(objective_loss(SDFT(), F1_STUDENT, f1(), F1_TEACHER), 0.0, 0.0)


def test_the_ratio_of_a_reused_batch_weighs_the_published_values():
    # TV3.6
    s = chosen(F1_STUDENT, F1_TOKENS)
    batch = f1(behaviour_logprobs=prompted(s - f64([[0.10, 0.0]])))
    objective = SDFT(beta=1.0, skip_first=0)
    close(per_token(objective, F1_STUDENT, batch, F1_TEACHER), [[0.464738, 0.397873]])
    close(objective_loss(objective, F1_STUDENT, batch, F1_TEACHER), 0.431306)


def test_the_ratio_is_capped_and_carries_no_gradient():
    s = chosen(F1_STUDENT, F1_TOKENS)
    plain = gradient(lambda z: objective_loss(SDFT(skip_first=0), z, f1(), F1_TEACHER), F1_STUDENT)
    near = f1(behaviour_logprobs=prompted(s - f64([[0.10, 0.0]])))
    found = gradient(lambda z: objective_loss(SDFT(skip_first=0), z, near, F1_TEACHER), F1_STUDENT)
    close(found, plain * f64([[[1.105171], [1.0]]]))
    far = f1(behaviour_logprobs=prompted(s - 3.0))
    found = gradient(lambda z: objective_loss(SDFT(skip_first=0), z, far, F1_TEACHER), F1_STUDENT)
    close(found, 2.0 * plain, 1e-12)


def test_a_students_top_two_and_a_tail_have_their_published_value():
    # TV3.5
    objective = SDFT(support="top_k", k=2, skip_first=0)
    batch = logits_batch(torch.tensor([[0]]))
    close(objective_loss(objective, F2_STUDENT, batch, F2_TEACHER), 0.464346)


def weights(values):
    """A model of one row of weights."""
    model = torch.nn.Linear(len(values), 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(f64([values]))
    return model


def test_one_step_of_the_average_has_its_published_value():
    # TV3.3
    model = weights([1.0, -2.0])
    follower = Follower(model, FollowerSpec(name="ema", rate=0.05), kind="full")
    with torch.no_grad():
        model.weight.copy_(f64([[2.0, 0.0]]))
    follower.follow(1)
    close(follower.model.weight, [[1.05, -1.9]])
    close(model.weight, [[2.0, 0.0]])


@pytest.mark.parametrize(
    ("rate", "steps", "share"),
    [(0.01, 100, 0.366032), (0.05, 20, 0.358486), (0.001, 100, 0.904792), (1.0, 1, 0.0)],
)
def test_the_share_of_the_first_weights_in_the_average_has_its_published_value(rate, steps, share):
    # TV3.3, TV2.5
    model = weights([1.0])
    follower = Follower(model, FollowerSpec(name="ema", rate=rate), kind="full")
    with torch.no_grad():
        model.weight.zero_()
    for step in range(1, steps + 1):
        follower.follow(step)
    close(follower.model.weight, [[share]])


@pytest.mark.parametrize(
    ("options", "word"), [({"skip_first": -1}, "skip_first"), ({"ratio_cap": 0.0}, "ratio_cap")]
)
def test_a_bad_hyper_parameter_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        SDFT(**options)


@pytest.mark.parametrize(
    ("options", "word"), [({"rate": 0.0}, "rate"), ({"rate": 1.5}, "rate"), ({"every": 0}, "every")]
)
def test_a_bad_speed_of_a_follower_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        FollowerSpec(name="ema", **options)
