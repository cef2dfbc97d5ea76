"""Rollout-to-trainer weights: what sampled is not bit for bit what trains."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from distill.correction import Correction, effective_sample_size
from distill.errors import AlignmentError, ConfigError
from distill.objectives import OPD, SFT
from distill.objectives.base import importance_ratio
from helpers import INFO, logits_batch, objective_loss
from vectors import F1_STUDENT, F1_TOKENS, PRECISIONS, close, f1, f64, gradient, prompted

MU, OLD = f64([[-0.357606, -1.358020]]), f64([[-0.507606, -0.958020]])


def batch_with(old, mu, **changes):
    return f1(behaviour_logprobs=prompted(old), sampler_logprobs=prompted(mu), **changes)


@pytest.mark.parametrize(("dtype", "atol"), PRECISIONS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"level": "token", "cap": 5.0}, [0.860708, 1.491825]),
        ({"level": "token", "cap": 1.2}, [0.860708, 1.2]),
        ({"level": "sequence", "cap": 10.0}, [1.284025, 1.284025]),
        ({"level": "sequence", "cap": 1.0}, [1.0, 1.0]),
    ],
)
def test_weights_have_their_published_values(options, expected, dtype, atol):
    # TV1.5
    batch = batch_with(OLD.to(dtype), MU.to(dtype))
    found = Correction(**options).apply(batch).correction
    close(found[:, 1:], [expected], atol)
    assert float(found[0, 0]) == 0.0  # the prompt


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_equal_log_probabilities_weigh_one_and_change_nothing(level, mode):
    # conformance 12
    batch, _ = OPD().prepare(batch_with(OLD, OLD), INFO, {})
    found = Correction(level=level, mode=mode).apply(batch)
    close(found.correction[:, 1:], [[1.0, 1.0]], 0.0)
    assert torch.equal(found.weights["opd"], batch.weights["opd"])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("gap", [1e3, -1e3, 1e30, -1e30])
def test_extreme_gaps_stay_within_the_bounds(level, gap):
    # conformance 12
    for dtype in (torch.float64, torch.float32):
        old = torch.tensor([[gap, 0.0]], dtype=dtype)
        batch = batch_with(old, torch.zeros_like(old))
        correction = Correction(level=level, cap=2.0)
        raw = correction.raw(batch)
        assert bool(torch.isfinite(raw.square()).all())
        found = correction.apply(batch).correction[0, 1]
        assert float(found) == 2.0 if gap > 0 else 0.0 <= float(found) < 1e-8


def test_a_low_bound_holds_truncated_weights_up():
    batch = batch_with(OLD, MU)
    found = Correction(level="token", cap=1.2, low=0.9).apply(batch).correction
    close(found[:, 1:], [[0.9, 1.2]])


@pytest.mark.parametrize(
    ("level", "kept"), [("token", [0.0, 1.0, 0.0]), ("sequence", [0.0, 0.0, 0.0])]
)
def test_masking_leaves_sum_and_denominator(level, kept):
    # weights [.86, 1.49]: the second token, or the row's 1.28, lies outside [.5, 1.2]
    batch, _ = OPD().prepare(batch_with(OLD, MU), INFO, {})
    found = Correction(level=level, mode="mask", cap=1.2, low=0.5).apply(batch)
    close(found.weights["opd"], [kept], 0.0)
    close((found.correction > 0).double(), [kept], 0.0)


def test_masking_also_leaves_out_what_lies_below_the_band():
    batch, _ = OPD().prepare(batch_with(OLD, MU), INFO, {})
    found = Correction(level="token", mode="mask", cap=2.0, low=0.9).apply(batch)
    close(found.weights["opd"], [[0.0, 0.0, 1.0]], 0.0)
    close(found.correction, [[0.0, 0.0, 1.491825]])


def test_truncation_keeps_the_denominator():
    batch = Correction(level="token", cap=1.2).apply(batch_with(OLD, MU))
    free = batch_with(OLD, MU)
    loss = objective_loss(OPD(), F1_STUDENT, batch)
    # -A r of both tokens, with A = N - old and r = exp(S - old)
    a = f64([-1.407606 + 0.507606, -2.239545 + 0.958020])
    r = f64([math.exp(0.1), 1.0])
    close(loss, (-a * r * f64([0.860708, 1.2])).sum() / 2)
    close(objective_loss(OPD(), F1_STUDENT, free), (-a * r).sum() / 2)


def test_worked_solutions_have_weight_one():
    old, mu = OLD.expand(2, 2), MU.expand(2, 2)
    batch = logits_batch(
        F1_TOKENS.expand(2, 2),
        behaviour_logprobs=prompted(old),
        sampler_logprobs=prompted(mu),
        row_sampled=torch.tensor([True, False]),
    )
    for level in ("token", "sequence"):
        close(Correction(level=level).apply(batch).correction[1, 1:], [1.0, 1.0], 0.0)


def test_level_none_changes_nothing():
    batch = batch_with(OLD, MU)
    assert Correction().apply(batch) is batch


def test_weights_are_detached():
    # conformance 12: no gradient reaches what was recorded before the update
    old, mu = (prompted(x).requires_grad_(True) for x in (OLD, MU))
    batch = f1(behaviour_logprobs=old, sampler_logprobs=mu)
    for level in ("token", "sequence"):
        assert not Correction(level=level).apply(batch).correction.requires_grad


def test_the_gradient_is_multiplied_by_the_weight_of_its_token():
    batch = batch_with(OLD, MU)
    corrected = Correction(level="token", cap=1.2).apply(batch)
    plain = gradient(lambda z: objective_loss(OPD(), z, batch), F1_STUDENT)
    found = gradient(lambda z: objective_loss(OPD(), z, corrected), F1_STUDENT)
    close(found, plain * f64([[[0.860708], [1.2]]]))


def test_a_correction_without_scores_of_the_student_names_what_is_missing():
    with pytest.raises(AlignmentError, match="log-probabilities of the step"):
        Correction(level="token").apply(f1())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"cap": 0.5}, "cap"),
        ({"cap": math.nan}, "cap"),
        ({"low": 1.5}, "low"),
        ({"low": -1.0}, "low"),
    ],
)
def test_a_bad_bound_is_named(options, word):
    with pytest.raises(ConfigError, match=f"correction.{word}"):
        Correction(level="token", **options)


def test_the_effective_sample_size_is_one_for_equal_weights_and_falls_to_one_over_n():
    mask = torch.ones(1, 4, dtype=torch.bool)
    close(effective_sample_size(torch.full((1, 4), 0.7), mask), 1.0)
    close(effective_sample_size(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), mask), 0.25)
    close(effective_sample_size(torch.tensor([[1.0, 3.0, 0.0, 0.0]]), mask), 16 / 40)
    mask = torch.tensor([[True, True, False, False]])
    close(effective_sample_size(torch.tensor([[1.0, 3.0, 9.0, 9.0]]), mask), 0.8)
    assert float(effective_sample_size(torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.bool))) == 1


def test_the_ratio_of_an_objective_is_one_with_the_gradient_of_the_log_probability():
    s = f64([[-0.5, -1.0]])
    close(importance_ratio(s, None), [[1.0, 1.0]], 0.0)
    close(gradient(lambda x: importance_ratio(x, None).sum(), s), [[1.0, 1.0]], 0.0)
    far = importance_ratio(f64([1e4, -1e4]), f64([0.0, 0.0]))
    close(far, [math.exp(20), math.exp(-20)], 1e-6)


def test_a_correction_never_reaches_a_term_that_it_has_no_edge_for():
    # a worked solution keeps its full weight beside a corrected sample
    batch = logits_batch(
        F1_TOKENS,
        behaviour_logprobs=prompted(OLD),
        sampler_logprobs=prompted(MU),
        row_sampled=torch.tensor([False]),
    )
    corrected = Correction(level="token", cap=1.2).apply(batch)
    losses = [objective_loss(SFT(), F1_STUDENT, b) for b in (batch, corrected)]
    assert torch.equal(*losses)
    assert bool((replace(corrected).correction[:, 1:] == 1).all())
