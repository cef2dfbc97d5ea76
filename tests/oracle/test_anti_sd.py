"""Anti-self-distillation: the capped bonus, its gate, and the divergence that it ascends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from distill.errors import AlignmentError, ConfigError
from distill.objectives import GRPO, AntiSD
from distill.objectives.anti_sd import EntropyGate, anti_bonus
from helpers import INFO, logits_batch, objective_loss
from vectors import (
    F64,
    FB_GAP,
    FB_STUDENT,
    FB_TEACHER,
    LATER,
    batch_of,
    close,
    coefficients,
    divergence_gradient,
    expected_gradient,
    f64,
    gradient,
    numeric_gradient,
    per_token,
    two_way,
)

OPEN = AntiSD(gate=False)


def test_the_bonus_has_its_published_values():
    # objectives-b 2.9
    found = anti_bonus(f64([-20.0, -2.0, -0.5, 0.0, 0.5, 2.0, 10.0]))
    close(found, [0.346574, 0.283110, 0.109535, 0.0, -0.140465, -0.716890, -4.653449])
    close(anti_bonus(f64(FB_GAP)), [0.208832, 0.322043])


def test_the_bonus_of_the_inventory_has_its_published_values():
    # policy-gradient-family 5
    gap = (f64([0.7, 0.2, 0.1]) / f64([0.5, 0.3, 0.2])).log()
    close(gap, [0.336472, -0.405465, -0.693147])
    close(anti_bonus(gap), [-0.091161, 0.091161, 0.143841])


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_the_bonus_is_capped_falls_in_the_gap_and_is_zero_at_zero(dtype):
    gap = torch.linspace(-60, 60, 401, dtype=dtype)
    found = anti_bonus(gap)
    assert bool((found <= 0.5 * math.log(2) + 1e-7).all())
    assert bool((found.diff() <= 0).all())
    close(anti_bonus(torch.zeros(1, dtype=dtype)), [0.0], 1e-7)
    near = f64([1e-4])
    close(anti_bonus(near) / near, [-0.25], 1e-4)  # like the log-ratio, up to scale


def published():
    """Log-probabilities [2, 3] and the batch of objectives-b 2.9, in which every token is id 0."""
    logprobs = f64([[-2.0, -0.1, -0.5], [-1.0, -0.2, -0.3]])
    gap = f64([[-3.0, 0.0, 1.5]])
    batch = logits_batch(
        torch.zeros(2, 3, dtype=torch.long),
        logprobs + gap,
        rewards=f64([1e3, -1e3]),
        row_group=torch.tensor([0, 0]),
    )
    return logprobs, batch


ADVANTAGES = [[1.161140, 1.0, 0.747933], [-0.838860, -1.0, -1.252067]]


def test_token_advantages_and_the_reinforce_loss_have_their_published_values():
    # objectives-b 2.9
    logprobs, batch = published()
    close(-per_token(OPEN, two_way(logprobs), batch, info=LATER), ADVANTAGES)
    found = coefficients(OPEN, logprobs, batch, LATER)  # T17: the bonus carries no gradient
    close(found, -f64(ADVANTAGES) / 6)
    close((found * logprobs).sum(), 0.230294)


def test_during_the_warm_up_there_is_no_bonus():
    logprobs, batch = published()
    for objective in (OPEN, AntiSD()):
        batch.targets["teacher"] = replace(
            batch.targets["teacher"], entropy=torch.full((2, 4), 0.4, dtype=F64)
        )
        for step in range(1, 6):
            info = replace(INFO, step=step)
            found = -per_token(objective, two_way(logprobs), batch, info=info)
            close(found, [[1.0] * 3, [-1.0] * 3])


def test_a_row_without_a_view_keeps_its_reward_alone():
    logprobs, batch = published()
    batch = replace(batch, row_viewed=torch.tensor([True, False]))
    found = -per_token(OPEN, two_way(logprobs), batch, info=LATER)
    close(found, [ADVANTAGES[0], [-1.0] * 3])


ENTROPIES = [0.40, 0.42, 0.38, 0.41, 0.39, 0.41, 0.375, 0.36, 0.39, 0.399, 0.40, 0.41]
FLAGS = [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]


def test_the_gate_opens_and_closes_at_the_published_steps():
    # objectives-b 2.9: 0.375 stays open, 0.39 and 0.399 stay closed
    state, flags = {}, []
    for entropy in ENTROPIES:
        is_open, state = EntropyGate().update(state, entropy)
        flags.append(int(is_open))
    assert flags == FLAGS


def test_the_gate_of_the_inventory_has_its_published_flags():
    # policy-gradient-family 5: thresholds 1 and 0.93
    state, flags = {"warmup": [1.0] * 5, "open": True}, []
    for entropy in [1.0, 0.98, 0.94, 0.92, 0.95, 0.99, 1.01, 0.9]:
        is_open, state = EntropyGate().update(state, entropy)
        flags.append(int(is_open))
    assert flags == [1, 1, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("statistic", ["median", "mean"])
def test_the_teachers_entropy_of_each_step_moves_the_gate_of_the_objective(statistic):
    # objectives-b 2.9, through prepare; the prompt position and one outlier must not count
    _, batch = published()
    objective, state, flags = AntiSD(statistic=statistic), {}, []
    for step, entropy in enumerate(ENTROPIES, start=1):
        seen = torch.full((2, 4), entropy, dtype=F64)
        seen[:, 0] = 9.0
        if statistic == "median":
            seen[0, 1] = 9.0
        scores = replace(batch.targets["teacher"], entropy=seen)
        at = replace(batch, targets={"teacher": scores})
        prepared, state = objective.prepare(at, replace(INFO, step=step), state)
        flags.append(int(prepared.signals["anti_sd.strength"].max() > 0))
    assert flags == FLAGS


def test_the_gate_is_open_after_the_warm_up_until_the_entropy_falls():
    # objectives-b 8: the initial state was not published and is taken as open
    state = {}
    for entropy in [0.4] * 5:
        is_open, state = EntropyGate().update(state, entropy)
        assert not is_open
    assert EntropyGate().update(state, 0.385)[0]
    assert not EntropyGate().update(state, 0.37)[0]


@pytest.mark.parametrize("missing", ["row_viewed", "row_sampled"])
def test_only_replies_that_the_teacher_has_a_view_of_move_the_gate(missing):
    _, batch = published()
    seen = torch.full((2, 4), 0.4, dtype=F64)
    seen[1] = 9.0
    batch.targets["teacher"] = replace(batch.targets["teacher"], entropy=seen)
    batch = replace(batch, **{missing: torch.tensor([True, False])})
    for statistic in ("median", "mean"):
        _, state = AntiSD(statistic=statistic).prepare(batch, INFO, {})
        assert state["warmup"] == pytest.approx([0.4])


def test_a_gate_without_the_teachers_entropy_names_what_is_missing():
    _, batch = published()
    with pytest.raises(AlignmentError, match="teacher entropy"):
        AntiSD().prepare(batch, INFO, {})


def jsd(p, q):
    m = (p + q) / 2
    return 0.5 * (p * (p / m).log()).sum() + 0.5 * (q * (q / m).log()).sum()


def test_the_expected_step_climbs_the_jsd_as_published():
    # objectives-b 2.9, token 0; strength 1, equal rewards
    student, teacher = FB_STUDENT[0, 0], FB_TEACHER[0, 0]
    found = -expected_gradient(replace(OPEN, strength=1.0), student, teacher, info=LATER)
    close(found, [0.080037, -0.087490, 0.007453])
    close(jsd(student.softmax(-1), teacher.softmax(-1)), 0.211458)


def test_the_expected_step_is_the_gradient_of_the_jsd():
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 7, dtype=F64, generator=generator)
    found = -expected_gradient(replace(OPEN, strength=0.3), student, teacher, info=LATER)
    close(found, 0.3 * divergence_gradient(jsd, student, teacher), 1e-8)  # float32 strength
    numeric = numeric_gradient(lambda z: jsd(z.softmax(-1), teacher.softmax(-1)), student)
    close(found, 0.3 * numeric, 1e-8)


def test_a_teacher_equal_to_the_student_leaves_grpo():
    # conformance 1: u = 0 everywhere
    twice = FB_STUDENT.expand(2, -1, -1)
    tokens = torch.tensor([[0, 1], [2, 0]])
    batch = batch_of(twice, twice, tokens, rewards=f64([1.0, 0.0]), row_group=torch.tensor([0, 0]))
    pairs = [
        gradient(lambda z, o=o: objective_loss(o, z, batch, info=LATER), twice)
        for o in (OPEN, GRPO(aggregate="token"))
    ]
    close(pairs[0], pairs[1], 1e-12)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"strength": 0.0}, "strength"),
        ({"strength": math.nan}, "strength"),
        ({"close_ratio": 0.0}, "close_ratio"),
        ({"close_ratio": 1.1}, "close_ratio"),
        ({"warmup_steps": 0}, "warmup_steps"),
        ({"ddof": 2}, "ddof"),
        ({"clip_high": -0.1}, "clip_high"),
    ],
)
def test_a_bad_hyper_parameter_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        AntiSD(**options)
