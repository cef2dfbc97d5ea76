"""KGPS: the formulas to six digits, and prompts of drifting difficulty."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from distill.curriculum.samplers import Kalman, TaskSampler, Uniform
from distill.curriculum.samplers.kalman import predict, update, utility
from distill.types import Message, Task


def test_one_step_of_the_filter():
    var = predict(1.0, 5.0, 0.04)
    assert var == pytest.approx(1.2, abs=1e-12)
    rate = 6.5 / 9
    assert math.log(rate / (1 - rate)) == pytest.approx(0.955511, abs=1e-6)
    noise = 1 / (8 * rate * (1 - rate))
    assert noise == pytest.approx(0.623077, abs=1e-6)
    assert var / (var + noise) == pytest.approx(0.658228, abs=1e-6)
    assert update(0.0, var, 6, 8) == pytest.approx((0.628944, 0.410127), abs=1e-6)


def test_the_expected_utility_and_that_doubt_outranks_certainty():
    mean, var = np.array([0.628944, 0.0, 3.0, 3.0]), np.array([0.410127, 1.2, 0.2, 3.0])
    found = utility(mean, var)
    assert found == pytest.approx([0.211708, 0.200684, 0.048432, 0.074895], abs=1e-6)
    assert found[3] > found[2]
    assert utility(np.array([0.0]), np.array([0.0])) == pytest.approx([0.25])
    assert np.isfinite(utility(np.array([800.0, -800.0]), np.array([1.0, 9.0]))).all()


@pytest.mark.parametrize(("mean", "var"), [(0.0, 0.5), (1.5, 2.0), (-2.0, 1.0)])
def test_the_quadrature_is_the_integral(mean, var):
    x = np.linspace(mean - 12, mean + 12, 200_001)
    density = np.exp(-((x - mean) ** 2) / (2 * var)) / math.sqrt(2 * math.pi * var)
    rate = 1 / (1 + np.exp(-x))
    expected = float(np.sum(rate * (1 - rate) * density) * (x[1] - x[0]))
    assert utility(np.array([mean]), np.array([var]))[0] == pytest.approx(expected, abs=1e-5)


def tasks(count: int) -> list[Task]:
    return [
        Task(
            id=f"t{i}",
            env="e",
            domain="d",
            split="train",
            prompt=(Message(role="user", content=f"{i}"),),
        )
        for i in range(count)
    ]


def test_the_state_of_the_sampler_is_that_of_the_filter():
    # A change is felt by the next draw, and by the prompt that was tried before it.
    sampler = TaskSampler(tasks(3), batch=3, key="k", sampler=Kalman(q_scale=5.0))
    sampler.observe(1, {}, change=0.04)
    assert sampler.state["drift"] == pytest.approx(0.2)
    sampler.observe(2, {"t1": [1.0] * 6 + [0.0] * 2}, change=0.1)
    mean, var, at = sampler.state["seen"]["1"]
    assert (mean, var, at) == pytest.approx((*update(0.0, 1.0, 6, 8), 0.2), abs=1e-9)
    sampler.observe(3, {"t1": [1.0, 0.0]})
    again, left, at = sampler.state["seen"]["1"]
    assert (again, left) == pytest.approx(update(mean, var + 0.5, 1, 2), abs=1e-9)
    assert at == pytest.approx(0.7)


def test_the_best_prompts_are_taken_and_ties_go_to_the_larger_doubt():
    sampler = TaskSampler(tasks(4), batch=2, key="k", sampler=Kalman())
    # Utilities by (0, 0.5), (3, 0.2), (3, 3) and the prior (0, 1).
    sampler.restore(
        {"drift": 0.0, "seen": {"0": [0.0, 0.5, 0.0], "1": [3.0, 0.2, 0.0], "2": [3.0, 3.0, 0.0]}}
    )
    assert [t.id for t in sampler(1)] == ["t0", "t3"]
    assert [t.id for t in sampler.extra(1, 1)] == ["t2", "t1"]


def test_among_equal_prompts_the_draw_is_keyed_and_spreads():
    fresh = [TaskSampler(tasks(40), batch=4, key=f"k{i}", sampler=Kalman())(1) for i in range(50)]
    count = Counter(t.id for batch in fresh for t in batch)
    assert len(count) > 35


SEEDS = range(6)
MARGIN = 0.08
"""By which the mean share of useful groups must exceed that of both others. Over forty seeds the
gain over the static filter was 0.129 on average, with a standard deviation of 0.026: which seed has
which share depends on the last bit of an exponential, and so on the processor."""


def useful_share(seed: int, kind: str) -> float:
    """240 prompts, groups of 8, 120 steps of 16: prompts become easier as the policy learns, those
    that are trained on a little faster; what each update changed is told to the sampler."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-2.0, 3.0, 240)
    drift = rng.normal(0.03, 0.03, 240)
    choices = {
        "uniform": Uniform(),
        "static": Kalman(q_scale=0.0),
        "kalman": Kalman(q_scale=5.0),
    }
    sampler = TaskSampler(tasks(240), batch=16, key=f"s{seed}", sampler=choices[kind])
    shares = []
    for step in range(1, 121):
        chosen = [int(t.id[1:]) for t in sampler(step)]
        wins = {i: rng.random(8) < 1 / (1 + np.exp(-logits[i])) for i in chosen}
        shares.append(np.mean([0 < w.sum() < 8 for w in wins.values()]))
        sampler.observe(step, {f"t{i}": w.astype(float).tolist() for i, w in wins.items()}, 0.01)
        logits += drift
        logits[chosen] += 0.05
    return float(np.mean(shares))


def test_a_filter_that_forgets_finds_more_useful_groups_than_a_static_one_or_chance():
    shares = {
        kind: np.array([useful_share(seed, kind) for seed in SEEDS])
        for kind in ("kalman", "static", "uniform")
    }
    for other in ("static", "uniform"):
        gains = shares["kalman"] - shares[other]
        assert gains.mean() > MARGIN, (other, gains)
        assert gains.min() > 0.0, (other, gains)
