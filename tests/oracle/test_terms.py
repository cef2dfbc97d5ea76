"""Sums of objectives: every term keeps its own denominator, state and gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distill.errors import AlignmentError, ConfigError
from distill.objectives import GKD, GRPO, OPD, RLSD, SDPO, SFT, AntiSD
from distill.objectives.base import Term
from distill.objectives.terms import Sum
from distill.trainer import sum_terms
from helpers import INFO, objective_loss
from vectors import F1_STUDENT, F1_TEACHER, F1_TOKENS, F64, batch_of, close, f64, gradient

STUDENT, TEACHER = F1_STUDENT.expand(3, -1, -1), F1_TEACHER.expand(3, -1, -1)


def mixed_batch(**changes):
    """Two samples of one group and a worked solution."""
    values = {
        "rewards": f64([1.0, 0.0, float("nan")]),
        "row_group": torch.zeros(3, dtype=torch.long),
        "row_sampled": torch.tensor([True, True, False]),
        "behaviour_logprobs": None,
    }
    return batch_of(STUDENT, TEACHER, F1_TOKENS.expand(3, 2), **(values | changes))


def found(objective, batch, info=INFO):
    loss = objective_loss(objective, STUDENT, batch, TEACHER, info)
    return loss, gradient(lambda z: objective_loss(objective, z, batch, TEACHER, info), STUDENT)


def test_a_sum_is_the_sum_of_losses_and_gradients_times_their_coefficients():
    # T40: both terms have a gradient
    parts = ((GRPO(), 1.0), (GKD(beta=0.5), 0.1), (SFT(), 2.0))
    batch = mixed_batch()
    loss, slope = found(Sum(parts=parts), batch)
    alone = [found(part, batch) for part, _ in parts]
    close(loss, sum(c * a[0] for (_, c), a in zip(parts, alone, strict=True)), 1e-12)
    close(slope, sum(c * a[1] for (_, c), a in zip(parts, alone, strict=True)), 1e-12)
    assert all(bool(a[1].any()) for a in alone)


def test_an_sft_term_counts_worked_solutions_and_the_other_terms_samples():
    # T41
    batch = mixed_batch()
    for part, rows in ((SFT(), [2]), (OPD(), [0, 1]), (GKD(), [0, 1, 2])):
        _, slope = found(part, batch)
        assert slope.abs().sum((1, 2)).nonzero()[:, 0].tolist() == rows
        _, summed = found(Sum(parts=((part, 1.0),)), batch)
        assert torch.equal(summed, slope)


def test_a_coefficient_scales_a_term_and_no_denominator():
    batch = mixed_batch()
    single, _ = found(OPD(), batch)
    double, _ = found(Sum(parts=((OPD(), 2.0),)), batch)
    close(double, 2 * single, 1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_of_weight_zero_is_left_out_before_the_sum(bad):
    # the law of the denominator: 0 times inf is nan, in value and gradient
    values = f64([[bad, 3.0, bad]])
    weights, correction = torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, 0.0]])

    def loss(x):
        term = Term(name="x", per_token=x, weights=weights)
        return sum_terms((term,), lambda name, kind: 2.0, correction)

    close(loss(values), 1.5, 0.0)
    close(gradient(loss, values), [[0.0, 0.5, 0.0]], 0.0)


def test_states_are_kept_apart():
    batch = mixed_batch()
    scores = replace(batch.targets["teacher"], entropy=torch.full((3, 3), 0.4, dtype=F64))
    batch = replace(batch, targets={"teacher": scores})
    objective, state = Sum(parts=((AntiSD(), 1.0), (SFT(), 1.0))), {}
    for step in (1, 2):
        _, state = objective.prepare(batch, replace(INFO, step=step), state)
    assert len(state["anti_sd"]["warmup"]) == 2
    assert state["sft"] == {}


def test_a_sum_needs_what_its_terms_need():
    total = Sum(parts=((GRPO(kl_coefficient=0.1), 1.0), (GKD(beta=0.5), 0.1)))
    assert total.name == "grpo+gkd"
    assert total.needs == {"rewards", "groups", "reference.logprobs", "teacher.distribution"}
    assert [s.name for s in total.plan().divergences] == ["gkd"]
    assert total.plan().entropy


def test_a_teacher_is_asked_while_one_term_uses_it():
    late = replace(INFO, step=50)
    assert not Sum(parts=((RLSD(), 1.0), (SFT(), 1.0))).teacher_active(late)
    assert Sum(parts=((RLSD(), 1.0), (GKD(), 1.0))).teacher_active(late)


def test_unviewed_rows_are_kept_when_one_term_keeps_them_or_asks_no_teacher():
    assert Sum(parts=((AntiSD(), 1.0), (SDPO(), 1.0))).keeps_unviewed
    assert Sum(parts=((SFT(), 1.0), (SDPO(), 1.0))).keeps_unviewed
    assert not Sum(parts=((SDPO(), 1.0), (RLSD(), 1.0))).keeps_unviewed


def test_candidates_of_two_roles_in_one_pass_are_refused():
    plan = OPD(support="top_k").plan()
    with pytest.raises(AlignmentError, match="different roles"):
        plan + replace(plan, candidates="reference")
    assert (plan + plan).candidates == "teacher"


@pytest.mark.parametrize("coefficient", [0.0, -1.0, float("nan")])
def test_a_coefficient_that_is_not_positive_is_refused(coefficient):
    with pytest.raises(ConfigError, match="positive"):
        Sum(parts=((SFT(), coefficient),))


def test_one_objective_twice_is_refused():
    with pytest.raises(ConfigError, match="of its own"):
        Sum(parts=((GKD(beta=0.0), 1.0), (GKD(beta=1.0), 1.0)))
