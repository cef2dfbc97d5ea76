"""Self-distilled reinforcement learning: the verifier's direction, the teacher's size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from distill.advantages import group_zscore
from distill.errors import ConfigError
from distill.followers import Follower, FollowerSpec
from distill.objectives import GRPO, RLSD
from distill.objectives.rlsd import reweighted
from helpers import INFO, objective_loss
from vectors import (
    F1_STUDENT,
    F1_TEACHER,
    F1_TOKENS,
    F64,
    batch_of,
    chosen,
    close,
    f64,
    gradient,
    per_token,
    prompted,
)

GAP = f64([[math.log(1.5), -0.10, 0.05]])
CONSTANT = {"decay_steps": 0, "clip_dual": 0.0}


@pytest.mark.parametrize(
    ("ddof", "expected"),
    [
        (0, [0.999998, -0.999998, -0.999998, 0.999998]),
        (1, [0.866024, -0.866024, -0.866024, 0.866024]),
    ],
)
def test_group_advantages_have_their_published_values(ddof, expected):
    # TV5.1
    found = group_zscore(f64([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.long), ddof=ddof)
    close(found, expected)


@pytest.mark.parametrize(
    ("sign", "mix", "expected"),
    [
        (1.0, 1.0, [1.2, 0.904837, 1.051271]),
        (1.0, 0.5, [1.1, 0.952419, 1.025636]),
        (1.0, 0.0, [1.0, 1.0, 1.0]),
        (-1.0, 1.0, [-0.8, -1.105171, -0.951229]),
        (-1.0, 0.5, [-0.9, -1.052585, -0.975615]),
    ],
)
def test_resized_advantages_have_their_published_values(sign, mix, expected):
    # TV5.2
    close(reweighted(torch.full_like(GAP, sign), GAP, mix=mix, band=0.2), [expected])


@pytest.mark.parametrize(
    ("form", "sign", "expected"),
    [
        ("eq16", 1.0, [0.5, 1.0, 1.2]),
        ("algorithm", 1.0, [0.8, 1.0, 1.2]),
        ("eq16", -1.0, [-0.8, -1.0, -2.0]),
        ("algorithm", -1.0, [-0.8, -1.0, -1.2]),
    ],
)
def test_both_forms_of_the_paper_have_their_published_values(form, sign, expected):
    # TV5.3: w = exp(sign * gap) = [.5, 1, 2]
    gap = sign * f64([[0.5, 1.0, 2.0]]).log()
    found = reweighted(torch.full_like(gap, sign), gap, mix=1.0, band=0.2, form=form)
    close(found, [expected])


def two_rows(rewards, teacher=F1_TEACHER, **changes):
    """Two rows of F1 in one group; rewards +-1000 make z-scores of +-1."""
    return batch_of(
        F1_STUDENT.expand(2, -1, -1),
        teacher.expand(2, -1, -1),
        F1_TOKENS.expand(2, 2),
        rewards=f64(rewards),
        row_group=torch.tensor([0, 0]),
        **changes,
    )


BOTH = F1_STUDENT.expand(2, -1, -1)


def test_the_objective_resizes_both_signs_as_published():
    # TV5.4: the loss is -Ahat at ratio 1
    batch = two_rows([1e3, -1e3])
    found = -per_token(RLSD(mix=0.5, ddof=0, **CONSTANT), BOTH, batch)
    close(found, [[0.9, 0.9], [-1.1, -1.1]])
    close((F1_TEACHER.log_softmax(-1) - F1_STUDENT.log_softmax(-1))[0, 0, 0].exp(), 0.367879)


@pytest.mark.parametrize(("sign", "expected"), [(1.0, [1.2, 0.8, 0.8]), (-1.0, [-0.8, -1.2, -1.2])])
def test_the_three_tokens_of_the_inventory_have_their_published_values(sign, expected):
    # policy-gradient-family 5: student [.5, .3, .2], teacher [.7, .2, .1]
    gap = (f64([[0.7, 0.2, 0.1]]) / f64([[0.5, 0.3, 0.2]])).log()
    close(reweighted(torch.full_like(gap, sign), gap, mix=1.0, band=0.2), [expected])


@pytest.mark.parametrize(
    ("decay", "warmup", "points"),
    [
        (50, 0, {0: 0.5, 1: 0.49, 25: 0.25, 49: 0.01, 50: 0.0, 99: 0.0}),
        (60, 0, {1: 0.491667, 25: 0.291667, 50: 0.083333, 60: 0.0}),
        (50, 10, {0: 0.0, 5: 0.25, 10: 0.5, 35: 0.25, 60: 0.0}),
        (0, 0, {1: 0.5, 1000: 0.5}),
    ],
)
def test_the_mix_follows_its_schedule(decay, warmup, points):
    # TV5.5
    objective = RLSD(decay_steps=decay, warmup_steps=warmup)
    for step, expected in points.items():
        close(objective.mix_at(step), expected)
        assert objective.teacher_active(replace(INFO, step=step)) == (expected > 0)


def test_the_step_of_the_night_sets_the_mix_of_a_batch():
    # TV5.5 through prepare: at step 25 half of the mix is left
    batch = two_rows([1e3, -1e3])
    info = replace(INFO, step=25)
    found = -per_token(RLSD(mix=0.5, ddof=0, clip_dual=0.0), BOTH, batch, info=info)
    close(found, [[0.95, 0.95], [-1.05, -1.05]])


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [0.3, 0.9], [1.0, 1.0]])
def test_mix_zero_is_grpo(rewards):
    # conformance 8
    s = prompted(chosen(BOTH, F1_TOKENS.expand(2, 2)))
    generator = torch.Generator().manual_seed(0)
    moved = s + 0.4 * torch.randn(s.shape, generator=generator, dtype=F64)
    batch = two_rows(rewards, behaviour_logprobs=moved)
    grpo = GRPO(ddof=1, clip_low=0.2, clip_high=0.28, clip_dual=3.0, aggregate="token")
    pairs = [
        (objective_loss(o, BOTH, batch), gradient(lambda z, o=o: objective_loss(o, z, batch), BOTH))
        for o in (RLSD(mix=0.0), grpo)
    ]
    assert torch.equal(pairs[0][0], pairs[1][0])
    assert torch.equal(pairs[0][1], pairs[1][1])


def test_mix_zero_and_a_finished_schedule_need_no_teacher():
    batch = two_rows([1.0, 0.0])
    without = replace(batch, targets={})
    for objective, step in ((RLSD(mix=0.0), 1), (RLSD(), 50)):
        info = replace(INFO, step=step)
        assert not objective.teacher_active(info)
        found = [objective_loss(objective, BOTH, b, info=info) for b in (batch, without)]
        assert torch.equal(*found)


def test_a_teacher_never_turns_the_direction_of_an_advantage():
    # conformance 8
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(50, 40, generator=generator, dtype=F64)
    advantages[::7] = 0.0
    gap = 30.0 * torch.randn(50, 40, generator=generator, dtype=F64)
    gap[0, :2] = f64([1e30, -1e30])
    for mix in (0.0, 0.5, 1.0):
        for band in (0.0, 0.2, 0.99):
            found = reweighted(advantages, gap, mix=mix, band=band)
            assert torch.equal(found.sign(), advantages.sign())
            size = found.abs() / advantages.abs().clamp(min=1e-30)
            assert bool((size[advantages != 0] <= 1 + band + 1e-9).all())
            assert bool((size[advantages != 0] >= 1 - band - 1e-9).all())
    assert torch.equal(
        reweighted(advantages, gap, mix=1.0, band=0.2, form="eq16").sign(), advantages.sign()
    )


@pytest.mark.parametrize("form", ["algorithm", "eq16"])
def test_equal_rewards_move_nothing(form):
    # conformance 8
    batch = two_rows([0.1 + 0.2, 0.1 + 0.2])
    found = gradient(lambda z: objective_loss(RLSD(form=form), z, batch), BOTH)
    assert not bool(found.any())


def test_a_teacher_equal_to_the_student_resizes_nothing():
    # conformance 1: w = 1
    batch = two_rows([1.0, 0.0], teacher=F1_STUDENT)
    grpo = GRPO(ddof=1, clip_high=0.28, aggregate="token")
    for form in ("algorithm", "eq16"):
        found = gradient(lambda z, f=form: objective_loss(RLSD(form=f), z, batch), BOTH)
        close(found, gradient(lambda z: objective_loss(grpo, z, batch), BOTH), 1e-12)


def test_only_negative_advantages_can_be_resized():
    batch = two_rows([1e3, -1e3])
    found = -per_token(RLSD(mix=0.5, ddof=0, negative_only=True, **CONSTANT), BOTH, batch)
    close(found, [[1.0, 1.0], [-1.1, -1.1]])


def test_the_advantage_carries_no_gradient():
    # T17: at ratio 1 the gradient is -Ahat times that of S, although Ahat reads the live S
    batch = two_rows([1e3, -1e3], behaviour_logprobs=None)
    objective = RLSD(mix=0.5, ddof=0, **CONSTANT)
    found = gradient(lambda z: objective_loss(objective, z, batch), BOTH)
    onehot = torch.eye(3, dtype=F64)[F1_TOKENS]
    wanted = -f64([[[0.9]], [[-1.1]]]) * (onehot - BOTH.softmax(-1)) / 4
    close(found, wanted)


def test_a_snapshot_is_taken_every_so_many_steps():
    # conformance 10: the copy after step k is the student of the last multiple of `every`
    model = torch.nn.Linear(1, 1, bias=False, dtype=F64)
    follower = Follower(model, FollowerSpec(name="snapshot", every=10), kind="full")
    start = float(follower.model.weight)
    for step in range(1, 26):
        with torch.no_grad():
            model.weight.fill_(step)
        follower.follow(step)
        last = 10 * (step // 10)
        assert float(follower.model.weight) == (last or start)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"mix": 1.5}, "mix"),
        ({"mix": -0.1}, "mix"),
        ({"band": 1.0}, "band"),
        ({"band": -0.1}, "band"),
        ({"decay_steps": -1}, "decay_steps"),
        ({"ddof": 2}, "ddof"),
        ({"clip_dual": 0.5}, "clip_dual"),
    ],
)
def test_a_bad_hyper_parameter_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        RLSD(**options)
