"""On-policy distillation: the sampled reverse KL as an advantage, and its top-k form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distill.advantages import discounted
from distill.correction import Correction
from distill.errors import AlignmentError, ConfigError
from distill.ledger import Ledger
from distill.objectives import GOPD, OPD
from distill.objectives.base import denominator_of, with_weights
from helpers import INFO, logits_batch, logits_view, objective_loss
from vectors import (
    F1_STUDENT,
    F1_TEACHER,
    F1_TOKENS,
    F2_STUDENT,
    F2_TEACHER,
    FB_STUDENT,
    FB_TEACHER,
    FB_TOKENS,
    PRECISIONS,
    batch_of,
    chosen,
    close,
    divergence_gradient,
    expected_gradient,
    f1,
    f64,
    gradient,
    numeric_gradient,
    prompted,
)

S = chosen(F1_STUDENT, F1_TOKENS)
N = chosen(F1_TEACHER, F1_TOKENS)


@pytest.mark.parametrize(("dtype", "atol"), PRECISIONS)
def test_the_sampled_loss_has_its_published_value_and_gradient(dtype, atol):
    # TV1.1, TV2.4
    batch, student = f1(dtype), F1_STUDENT.to(dtype)
    close(objective_loss(OPD(), student, batch), 1.140762, atol)  # ratio form at ratio 1
    found = gradient(lambda z: objective_loss(OPD(), z, batch), student)
    expected = [[0.167380, -0.122364, -0.045015], [-0.245830, 0.394933, -0.149103]]
    close(found[0], expected, atol)


def test_the_reinforce_form_has_its_published_value():
    # TV1.1
    close(N - S, [[-1.0, -1.281525]])
    close(-((N - S) * S).mean(), -0.817666)


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [(0.0, [-1.0, -1.281525]), (0.5, [-1.640762, -1.281525]), (1.0, [-2.281525, -1.281525])],
)
def test_discounting_sums_the_later_advantages(gamma, expected):
    # TV1.2
    close(discounted(N - S, torch.ones(1, 2, dtype=torch.bool), gamma), [expected])
    batch = f1(behaviour_logprobs=prompted(S))
    slope = gradient(lambda z: objective_loss(OPD(discount=gamma), z, batch), F1_STUDENT)
    onehot = torch.eye(3, dtype=torch.float64)[F1_TOKENS]
    wanted = -f64([expected])[..., None] * (onehot - F1_STUDENT.softmax(-1)) / 2
    close(slope, wanted)


def test_a_masked_position_neither_contributes_nor_stops_the_discounting():
    values, mask = f64([[1.0, 100.0, 2.0]]), torch.tensor([[True, False, True]])
    close(discounted(values, mask, 0.5), [[1.5, 0.0, 2.0]])


def test_one_number_from_the_engine_serves_as_advantage_and_ratio():
    # TV1.5, tinker: what sampled stands in for the behaviour
    batch = f1(behaviour_logprobs=prompted(f64([[-0.357606, -1.358020]])))
    close(objective_loss(OPD(aggregate="constant"), F1_STUDENT, batch), 2.313871)
    close(objective_loss(OPD(), F1_STUDENT, batch), 1.156936)


def test_a_clipped_ratio_times_a_capped_engine_weight_has_its_published_value():
    # TV1.5: scale 1 is opd with PPO bounds
    batch = f1(
        behaviour_logprobs=prompted(f64([[-0.507606, -0.958020]])),
        sampler_logprobs=prompted(f64([[-0.357606, -1.358020]])),
    )
    batch = Correction(level="token", cap=1.2).apply(batch)
    close(batch.correction[:, 1:], [[0.860708, 1.2]])
    close(objective_loss(GOPD(scale=1.0), F1_STUDENT, batch), 1.196968)


def test_a_temperature_on_one_side_only_is_reported():
    # TV1.8 and conformance 1: equal models, the student at 0.7, the teacher at 1
    logits, tokens = f64([[[1.0, 0.0, -1.0]]]).expand(2, 1, 3), torch.tensor([[0], [2]])
    batch = batch_of(logits, logits, tokens, behaviour_logprobs=None)
    batch, _ = OPD().prepare(batch, INFO, {})
    (term,) = OPD()(logits_view(logits / 0.7, batch, OPD()), batch)
    close(term.metrics["reverse_kl"].values[:, 1], [0.147488, -0.709655])
    ledger = Ledger()
    ledger.add(0.0, (term,))
    reported = ledger.metrics()
    assert reported["opd/reverse_kl"] == pytest.approx((0.147488 - 0.709655) / 2, abs=1e-6)
    assert reported["opd/advantage_max"] == pytest.approx(0.709655, abs=1e-6)


def test_the_expected_gradient_is_that_of_the_exact_reverse_kl():
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 7, dtype=torch.float64, generator=generator)
    found = expected_gradient(OPD(), student, teacher)
    exact = divergence_gradient(lambda p, q: (p * (p / q).log()).sum(), student, teacher)
    close(found, exact, 1e-12)
    close(found, numeric_gradient(lambda z: _reverse(z, teacher), student), 1e-8)


def _reverse(student, teacher):
    p, q = student.softmax(-1), teacher.softmax(-1)
    return (p * (p / q).log()).sum()


def test_the_expected_gradient_over_sequences_at_discount_one_is_that_of_their_reverse_kl():
    # objectives-a 1.2: every response of two tokens over three entries, enumerated
    generator = torch.Generator().manual_seed(3)
    first, second, teacher1, teacher2 = (
        torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (1, 3, 1, 3)
    )
    a, b = torch.cartesian_prod(torch.arange(3), torch.arange(3)).t()
    tokens = torch.stack([a, b], 1)

    def rows(top, below):
        return torch.stack([top.expand(9, 3), below[a]], 1)

    def sequence_kl(z):
        p = chosen(rows(z[:1], z[1:]), tokens).sum(1)
        return (p.exp() * (p - chosen(rows(teacher1, teacher2), tokens).sum(1))).sum()

    z = torch.cat([first, second])
    batch = batch_of(rows(first, second), rows(teacher1, teacher2), tokens)
    share = chosen(rows(first, second), tokens).sum(1).exp()
    batch = replace(batch, correction=share[:, None].expand(9, 3))
    objective = OPD(discount=1.0, aggregate="constant")
    found = gradient(lambda z: objective_loss(objective, rows(z[:1], z[1:]), batch), z)
    close(found, gradient(sequence_kl, z), 1e-12)


@pytest.mark.parametrize(
    ("chosen_by", "weighting", "expected"),
    [
        ("student", "student", [-1.188755, 0.235035]),
        ("teacher", "teacher", [0.543984, 0.518713]),
    ],
)
def test_top_k_advantages_have_their_published_values(chosen_by, weighting, expected):
    # TV1.7
    objective = OPD(support="top_k", k=2, chosen_by=chosen_by, weighting=weighting)
    batch = batch_of(F2_STUDENT, F2_TEACHER, torch.tensor([[0]]), objective)
    close(objective_loss(objective, F2_STUDENT, batch), -sum(expected))
    found = gradient(lambda z: objective_loss(objective, z, batch), F2_STUDENT)[0, 0]
    ids = {"student": [0, 1], "teacher": [1, 2]}[chosen_by]
    pi, eye = F2_STUDENT[0, 0].softmax(-1), torch.eye(5, dtype=torch.float64)
    wanted = sum(-a * (eye[i] - pi) for a, i in zip(expected, ids, strict=True))
    close(found, wanted)


def test_uniform_weights_share_the_advantages_evenly():
    objective = OPD(support="top_k", k=2, weighting="uniform")
    batch = batch_of(F2_STUDENT, F2_TEACHER, torch.tensor([[0]]), objective)
    gap = (F2_STUDENT.log_softmax(-1) - F2_TEACHER.log_softmax(-1))[0, 0, :2]
    close(objective_loss(objective, F2_STUDENT, batch), gap.mean())


def test_detached_top_k_coefficients_have_their_published_gradient():
    # objectives-b 6.1: token 0, support {0, 1}; the other form is this one times the mass
    objective = OPD(support="top_k", k=2)
    student, teacher = FB_STUDENT[:, :1], FB_TEACHER[:, :1]
    batch = batch_of(student, teacher, FB_TOKENS[:, :1], objective)
    found = gradient(lambda z: objective_loss(objective, z, batch), student)[0, 0]
    close(found, [0.344239, -0.311021, -0.033218])
    close(found * student.softmax(-1)[0, 0, :2].sum(), [0.329778, -0.297955, -0.031823])


def test_a_support_of_the_whole_vocabulary_has_the_exact_gradient():
    # conformance 6
    objective = OPD(support="top_k", k=3)
    batch = batch_of(FB_STUDENT, FB_TEACHER, FB_TOKENS, objective)
    found = gradient(lambda z: objective_loss(objective, z, batch), FB_STUDENT)
    exact = gradient(
        lambda z: sum(_reverse(z[0, t], FB_TEACHER[0, t]) for t in (0, 1)) / 2, FB_STUDENT
    )
    close(found, exact, 1e-12)
    close(2 * found[0, 0], [0.253624, -0.308261, 0.054637])  # objectives-b 6.1, exact


def test_candidates_that_a_teacher_did_not_return_do_not_count():
    objective = OPD(support="top_k", k=2, chosen_by="teacher", weighting="teacher")
    batch = batch_of(F2_STUDENT, F2_TEACHER, torch.tensor([[0]]), objective)
    known = batch.targets["teacher"].candidate_logprobs.clone()
    known[0, 1, 1] = -torch.inf
    scores = replace(batch.targets["teacher"], candidate_logprobs=known)
    batch = replace(batch, targets={"teacher": scores})
    found = objective_loss(objective, F2_STUDENT, batch)
    gap = (F2_STUDENT.log_softmax(-1) - F2_TEACHER.log_softmax(-1))[0, 0, 1]
    close(found, gap)  # one entry of weight 1


def test_a_clamp_bounds_the_advantage_and_keeps_its_sign():
    batch = f1()
    found = gradient(lambda z: objective_loss(OPD(clamp=1.2), z, batch), F1_STUDENT)
    free = gradient(lambda z: objective_loss(OPD(), z, batch), F1_STUDENT)
    close(found[0, 0], free[0, 0], 1e-12)
    close(found[0, 1], free[0, 1] * 1.2 / 1.281525)


def test_a_coefficient_scales_the_advantage():
    close(objective_loss(OPD(coefficient=3.0), F1_STUDENT, f1()), 3 * 1.140762, 2e-6)


# TV1.9
@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("token", 2.666667), ("sequence", 2.5), ("sequence_sum", 8.0), ("constant", 16.0)],
)
def test_an_aggregate_divides_by_what_its_name_says(aggregate, expected):
    values = torch.tensor([[0.0, 1.0, 3.0, 99.0, 99.0], [0.0, 2.0, 2.0, 2.0, 6.0]])
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
    batch = logits_batch(torch.ones(2, 4, dtype=torch.long), completion_mask=mask)
    weights = with_weights(batch, "x", aggregate).weights["x"]
    totals = {"weights": float(weights.sum()), "rows": 2.0, "const": 1.0}
    close((values * weights).sum() / totals[denominator_of(aggregate)], expected, 1e-5)


def test_a_trajectory_of_several_rows_counts_once():
    mask = torch.tensor([[0, 1, 0], [0, 1, 1], [0, 1, 1]], dtype=torch.bool)
    batch = logits_batch(
        torch.ones(3, 2, dtype=torch.long),
        completion_mask=mask,
        row_traj=torch.tensor([0, 0, 1]),
    )
    weights = with_weights(batch, "x", "trajectory").weights["x"]
    close(weights.sum(1), [1 / 3, 2 / 3, 1.0], 1e-6)


def test_an_aggregate_of_another_name_is_refused():
    with pytest.raises(ConfigError, match="aggregate"):
        OPD(aggregate="mean").prepare(f1(), INFO, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"coefficient": 0.0}, "coefficient"),
        ({"discount": 1.5}, "discount"),
        ({"discount": -0.1}, "discount"),
        ({"clamp": -1.0}, "clamp"),
        ({"k": 0}, "objective.k"),
        ({"support": "top_k", "discount": 0.5}, "discount"),
    ],
)
def test_a_bad_hyper_parameter_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        OPD(**options)


def test_a_discount_outside_zero_and_one_is_refused():
    with pytest.raises(ConfigError, match="discount"):
        discounted(f64([[1.0]]), torch.ones(1, 1, dtype=torch.bool), 1.01)


def test_a_discount_without_scores_of_the_student_names_what_is_missing():
    with pytest.raises(AlignmentError, match="log-probabilities"):
        OPD(discount=0.5).prepare(f1(), INFO, {})


def test_a_batch_without_a_teacher_names_the_role():
    with pytest.raises(AlignmentError, match="'teacher'"):
        objective_loss(OPD(), F1_STUDENT, logits_batch(F1_TOKENS))
