"""Divergences per position against their published values, by hand and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from distill.divergence import (
    Candidates,
    DivergenceSpec,
    divergence,
    forward_kl,
    generalised_jsd,
    k1,
    k2,
    k3,
    reverse_kl,
)
from distill.errors import ConfigError, TeacherError
from distill.logprobs import token_entropy
from distill.objectives.base import importance_ratio
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
    chosen,
    close,
    f64,
    gradient,
    numeric_gradient,
)

S1, T1 = F1_STUDENT[0], F1_TEACHER[0]
S2, T2 = F2_STUDENT[0], F2_TEACHER[0]
TOP2 = {"student": [0, 1], "teacher": [1, 2]}
ALL_KINDS = [
    *(DivergenceSpec(name="d", beta=b) for b in (0.0, 0.3, 0.5, 1.0)),
    DivergenceSpec(name="d", beta=0.5, temperature=1.7),
    DivergenceSpec(name="d", kind="total_variation"),
    *(
        DivergenceSpec(name="d", beta=b, support="top_k", k=2, chosen_by=who, rest=rest)
        for b in (0.0, 0.5, 1.0)
        for who in ("student", "teacher", "union")
        for rest in ("tail", "renormalised")
    ),
    DivergenceSpec(name="d", beta=0.0, support="top_k", k=2, rest="raw"),
    DivergenceSpec(name="d", beta=0.0, entry_clip=0.05, clip_form="paper"),
    DivergenceSpec(name="d", beta=0.0, entry_clip=0.05, clip_form="bregman"),
]


def value(student, teacher, **options):
    """Per-position divergence from logits."""
    spec = DivergenceSpec(name="d", **options)
    return divergence(student.log_softmax(-1), teacher.log_softmax(-1), spec).per_token


# TV1.3 (and TV3.1, whose numbers are the same)
FULL = [
    (0.0, 1.0, [0.420512, 0.345701], 0.383107),
    (1.0, 1.0, [0.420512, 0.397873], 0.409193),
    (0.5, 1.0, [0.100956, 0.089074], 0.095015),
    (0.25, 1.0, [0.076444, 0.065290], 0.070867),
    (0.1, 1.0, [0.037271, 0.031146], 0.034209),
    (0.9, 1.0, [0.037271, 0.034688], 0.035979),
    (0.0, 2.0, [0.099642, 0.099677], 0.099660),
    (1.0, 2.0, [0.099642, 0.099492], 0.099567),
    (0.5, 2.0, [0.024654, 0.024660], 0.024657),
]


@pytest.mark.parametrize(("dtype", "atol"), PRECISIONS)
@pytest.mark.parametrize(("beta", "temperature", "expected", "mean"), FULL)
def test_full_vocabulary_divergences_have_their_published_values(
    beta, temperature, expected, mean, dtype, atol
):
    found = value(S1.to(dtype), T1.to(dtype), beta=beta, temperature=temperature)
    close(found, expected, atol)
    close(found.mean(), mean, atol)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.0, [[0.420512, -0.420512, 0.0], [-0.403334, 0.277145, 0.126190]]),
        (1.0, [[0.385499, -0.347640, -0.037859], [-0.428289, 0.339015, 0.089274]]),
    ],
)
def test_gradients_of_both_kls_have_their_published_values(beta, expected):
    close(gradient(lambda z: value(z, T1, beta=beta).sum(), S1), expected)  # TV1.3


def test_the_forward_kl_gradient_is_student_minus_teacher_whatever_the_logits():
    found = gradient(lambda z: value(z, T2, beta=0.0).sum(), S2)
    close(found, S2.softmax(-1) - T2.softmax(-1), 1e-12)


@pytest.mark.parametrize("spec", ALL_KINDS, ids=str)
def test_every_divergence_gradient_agrees_with_finite_differences(spec):
    def total(logits):
        return divergence(logits.log_softmax(-1), T2.log_softmax(-1), spec).per_token.sum()

    close(gradient(total, S2), numeric_gradient(total, S2), 1e-8)


# TV1.6: full support
@pytest.mark.parametrize(("beta", "expected"), [(0.0, 0.622113), (1.0, 0.712), (0.5, 0.153992)])
def test_the_five_entry_fixture_has_its_full_values(beta, expected):
    close(value(S2, T2, beta=beta), [expected])


# TV1.6 and TV3.5
TOP_K = [
    ("teacher", "renormalised", [0.027955, 0.026345, 0.006763]),
    ("teacher", "tail", [0.591393, 0.619649, 0.142635]),
    ("student", "renormalised", [0.655785, 0.715798, 0.160773]),
    ("student", "tail", [0.464346, 0.611263, 0.124400]),
]


@pytest.mark.parametrize(("dtype", "atol"), PRECISIONS)
@pytest.mark.parametrize(("chosen_by", "rest", "expected"), TOP_K)
def test_top_two_divergences_have_their_published_values(chosen_by, rest, expected, dtype, atol):
    options = {"support": "top_k", "k": 2, "chosen_by": chosen_by, "rest": rest}
    found = [value(S2.to(dtype), T2.to(dtype), beta=b, **options).item() for b in (0.0, 1.0, 0.5)]
    close(f64(found), expected, atol)


@pytest.mark.parametrize(
    ("chosen_by", "forward", "reverse", "teacher_mass", "student_mass"),
    [
        ("teacher", 0.847364, -0.285700, 0.797371, 0.283321),
        ("student", 0.253675, 0.734503, 0.607078, 0.770145),
    ],
)
def test_raw_top_two_sums_and_masses_have_their_published_values(
    chosen_by, forward, reverse, teacher_mass, student_mass
):
    # TV1.6, raw
    ours, theirs = S2.log_softmax(-1), T2.log_softmax(-1)
    spec = DivergenceSpec(name="d", beta=0.0, support="top_k", k=2, chosen_by=chosen_by, rest="raw")
    found = divergence(ours, theirs, spec)
    close(found.per_token, [forward])
    close(found.teacher_mass, [teacher_mass])
    close(found.student_mass, [student_mass])
    ids = TOP2[chosen_by]
    close(reverse_kl(ours[:, ids], theirs[:, ids]), [reverse])


def test_top_two_gradients_have_their_published_values():
    # TV1.6
    options = {"beta": 1.0, "support": "top_k", "k": 2}
    found = gradient(
        lambda z: value(z, T2, chosen_by="teacher", rest="renormalised", **options).sum(), S2
    )
    close(found, [[0.0, 0.098306, -0.098306, 0.0, 0.0]])
    found = gradient(lambda z: value(z, T2, chosen_by="student", rest="tail", **options).sum(), S2)
    close(found, [[0.571360, -0.307618, -0.087430, -0.032164, -0.144148]])


def test_cross_entropy_to_the_teachers_two_entries_is_the_raw_sum_without_its_constant():
    # TV1.6, tinker: q . (-log pi) with q the teacher renormalised over its two entries.
    q = T2.log_softmax(-1)[0, [1, 2]].log_softmax(-1)
    ours = S2.log_softmax(-1)[0, [1, 2]]
    close(q.exp(), [0.622459, 0.377541])
    close(forward_kl(ours, q) + token_entropy(q[None])[0], 1.951979)


def test_a_raw_forward_sum_may_be_negative_and_still_moves_the_student():
    # TV1.6, last line: other trainers clamp this to 0 and lose the gradient.
    student, teacher = f64([[0.45, 0.40, 0.15]]).log(), f64([[0.30, 0.25, 0.45]]).log()
    few = Candidates(ids=torch.tensor([[0, 1]]), logprobs=teacher[:, :2])
    spec = DivergenceSpec(name="d", beta=0.0, support="top_k", k=2, rest="raw")

    def raw(logits):
        return divergence(logits.log_softmax(-1), few, spec).per_token.sum()

    close(raw(student), -0.239140)
    assert bool((gradient(raw, student)[0, :2].abs() > 1e-3).all())


@pytest.mark.parametrize("rest", ["tail", "renormalised"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chosen_by", ["student", "teacher", "union"])
def test_a_support_of_the_whole_vocabulary_is_the_full_divergence(beta, chosen_by, rest):
    # conformance 6
    options = {"beta": beta, "support": "top_k", "k": 5, "chosen_by": chosen_by, "rest": rest}
    close(value(S2, T2, **options), value(S2, T2, beta=beta), 1e-9)
    close(
        gradient(lambda z: value(z, T2, **options).sum(), S2),
        gradient(lambda z: value(z, T2, beta=beta).sum(), S2),
        1e-9,
    )


@pytest.mark.parametrize("chosen_by", ["student", "teacher"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_tail_of_one_entry_is_the_full_divergence(beta, chosen_by):
    # conformance 6: K = V - 1
    options = {"beta": beta, "support": "top_k", "k": 4, "chosen_by": chosen_by}
    close(value(S2, T2, **options), value(S2, T2, beta=beta), 1e-9)
    close(
        gradient(lambda z: value(z, T2, **options).sum(), S2),
        gradient(lambda z: value(z, T2, beta=beta).sum(), S2),
        1e-9,
    )


@pytest.mark.parametrize("chosen_by", ["student", "teacher"])
def test_a_renormalised_support_of_one_entry_is_refused(chosen_by):
    # conformance 6
    with pytest.raises(ConfigError, match="renormalised support of one entry"):
        DivergenceSpec(name="d", support="top_k", k=1, chosen_by=chosen_by, rest="renormalised")


def test_candidates_of_the_teacher_give_what_its_full_distribution_gives():
    spec = DivergenceSpec(name="d", beta=0.3, support="top_k", k=2)
    top = T2.log_softmax(-1).topk(3)
    few = Candidates(ids=top.indices, logprobs=top.values)  # one more than asked
    found = divergence(S2.log_softmax(-1), few, spec)
    wanted = divergence(S2.log_softmax(-1), T2.log_softmax(-1), spec)
    close(found.per_token, wanted.per_token, 1e-12)
    close(found.stats, wanted.stats, 1e-6)


def test_a_candidate_outside_the_students_vocabulary_counts_as_the_teachers_tail():
    # Ids 1 and 7 with .5 and .3; the student knows 5 ids, so 7 goes to the rest.
    few = Candidates(ids=torch.tensor([[1, 7]]), logprobs=f64([[0.5, 0.3]]).log())
    spec = DivergenceSpec(name="d", beta=0.0, support="top_k", k=2)
    pi = float(S2.softmax(-1)[0, 1])
    expected = 0.5 * math.log(0.5 / pi) + 0.5 * math.log(0.5 / (1 - pi))
    close(divergence(S2.log_softmax(-1), few, spec).per_token, [expected])


def test_short_candidate_rows_end_in_minus_infinity_and_are_left_out():
    few = Candidates(ids=torch.tensor([[1, 0]]), logprobs=f64([[math.log(0.9), -math.inf]]))
    spec = DivergenceSpec(name="d", beta=1.0, support="top_k", k=2)
    pi = float(S2.softmax(-1)[0, 1])
    expected = pi * math.log(pi / 0.9) + (1 - pi) * math.log((1 - pi) / 0.1)
    found = gradient(lambda z: divergence(z.log_softmax(-1), few, spec).per_token.sum(), S2)
    close(divergence(S2.log_softmax(-1), few, spec).per_token, [expected])
    assert bool(torch.isfinite(found).all())


def test_no_gradient_reaches_the_teacher():
    # conformance 3
    spec = DivergenceSpec(name="d", beta=0.3, support="top_k", k=2)
    theirs = T2.log_softmax(-1).requires_grad_(True)
    few = Candidates(ids=torch.tensor([[1, 2]]), logprobs=theirs[:, 1:3])
    for teacher in (theirs, few):
        assert not divergence(S2.log_softmax(-1), teacher, spec).per_token.requires_grad


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"support": "full"}, "top_k"),
        ({"support": "top_k", "k": 2, "chosen_by": "student"}, "chosen_by"),
        ({"support": "top_k", "k": 3}, "k is 3"),
        ({"support": "top_k", "k": 2, "temperature": 2.0}, "temperature"),
    ],
)
def test_candidates_that_cannot_serve_a_support_are_refused(options, word):
    few = Candidates(ids=torch.tensor([[1, 2]]), logprobs=f64([[-0.5, -1.5]]))
    with pytest.raises(TeacherError, match=word):
        divergence(S2.log_softmax(-1), few, DivergenceSpec(name="d", **options))


def test_estimators_have_their_values_expectations_and_expected_gradients():
    # TV1.4
    ours, theirs = chosen(F1_STUDENT, F1_TOKENS)[0], chosen(F1_TEACHER, F1_TOKENS)[0]
    close(k1(ours, theirs), [1.0, 1.281525])
    close(k2(ours, theirs), [0.5, 0.821153])
    close(k3(ours, theirs), [0.367879, 0.559138])
    reverse, forward = [0.385499, -0.347640, -0.037859], [0.420512, -0.420512, 0.0]
    expectations = {k1: (0.420512, [0.0] * 3), k2: (0.454985, reverse), k3: (0.420512, forward)}
    weights = S1[0].softmax(-1)
    for estimator, (mean, expected) in expectations.items():

        def averaged(logits, estimator=estimator):
            return (weights * estimator(logits.log_softmax(-1), T1[0].log_softmax(-1))).sum()

        close(averaged(S1[0]), mean)
        close(gradient(averaged, S1[0]), expected)


def test_a_temperature_on_one_side_only_makes_equal_models_differ():
    # TV1.8
    logits = f64([1.0, 0.0, -1.0])
    gap = k1((logits / 0.7).log_softmax(-1), logits.log_softmax(-1))
    close(gap[[0, 2]], [0.147488, -0.709655])
    close(((logits / 0.7).softmax(-1) * gap).sum(), 0.030351)


def test_the_shared_fixture_has_its_published_divergences_and_entropies():
    # objectives-b 0
    ours, theirs = FB_STUDENT[0].log_softmax(-1), FB_TEACHER[0].log_softmax(-1)
    close(reverse_kl(ours, theirs), [0.847754, 1.397504])
    close(forward_kl(ours, theirs), [1.029194, 0.777421])
    close(generalised_jsd(ours, theirs, 0.5), [0.211458, 0.219259])
    close(token_entropy(ours), [0.524267, 1.085169])
    close(token_entropy(theirs), [0.610307, 0.177324])


def test_stabilised_losses_are_made_of_the_same_parts():
    # objectives-b 6.1: SDAR, Skill-SD and EOPD
    ours, theirs = FB_STUDENT[0].log_softmax(-1), FB_TEACHER[0].log_softmax(-1)
    s, n = chosen(FB_STUDENT, FB_TOKENS)[0], chosen(FB_TEACHER, FB_TOKENS)[0]
    close(-(torch.sigmoid(-5 * k1(s, n)) * k1(s, n)).mean(), -0.001837)
    ratio = importance_ratio(s, s - f64([0.1, -0.2]))
    close(k3(s, n), [0.465496, 2.040350])
    close(ratio, [1.105171, 0.818731])
    close((ratio * k3(s, n)).mean(), 1.092475)
    unsure = token_entropy(theirs) > 0.5
    gated = reverse_kl(ours, theirs) + unsure * forward_kl(ours, theirs)
    close(gated, [1.876948, 1.397504])


def test_the_expected_k3_with_its_ratio_kept_in_the_graph_has_the_reverse_kl_gradient():
    # objectives-b 6, row 16
    old = S1[0].softmax(-1)

    def averaged(logits):
        live = logits.log_softmax(-1)
        return (old * importance_ratio(live, old.log()) * k3(live, T1[0].log_softmax(-1))).sum()

    close(gradient(averaged, S1[0]), [0.385499, -0.347640, -0.037859])
