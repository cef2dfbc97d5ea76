"""Divergences where numbers run out: orientation, underflow, tails, other vocabularies."""

from __future__ import annotations

import math

import pytest
import torch

from distill.distributions import HiddenDistribution, LogitMix, ProbabilityMixture
from distill.divergence import DivergenceSpec, divergence, reverse_kl
from distill.errors import ConfigError
from distill.logprobs import Head
from distill.objectives import GKD, OPSD, SDFT, SDPO
from vectors import (
    F1_REFERENCE,
    F1_STUDENT,
    F1_TEACHER,
    F2_STUDENT,
    F2_TEACHER,
    close,
    f64,
    gradient,
)

S1, T1 = F1_STUDENT[0], F1_TEACHER[0]


def value(student, teacher, **options):
    """Per-position divergence from logits."""
    spec = DivergenceSpec(name="d", **options)
    return divergence(student.log_softmax(-1), teacher.log_softmax(-1), spec).per_token


def test_mixing_happens_among_probabilities():
    # T6
    student, teacher = f64([[1e-9, 1.0]]).log(), f64([[1.0, 1e-9]]).log()
    close(value(student, teacher, beta=0.5), [math.log(2)], 1e-6)


@pytest.mark.parametrize(
    ("beta", "p", "q"), [(0.0, "teacher", "student"), (1.0, "student", "teacher")]
)
def test_beta_zero_is_weighted_by_the_teacher_and_beta_one_by_the_student(beta, p, q):
    # T7, by hand
    sides = {"student": [0.5, 0.3, 0.2], "teacher": [0.7, 0.2, 0.1]}
    expected = sum(a * math.log(a / b) for a, b in zip(sides[p], sides[q], strict=True))
    found = value(f64([sides["student"]]).log(), f64([sides["teacher"]]).log(), beta=beta)
    close(found, [expected])
    assert expected == pytest.approx({0.0: 0.085123, 1.0: 0.092033}[beta], abs=1e-6)


@pytest.mark.parametrize("beta", [0.2, 0.8])
def test_the_mixture_leans_to_the_teacher_as_beta_grows(beta):
    # T7: M = (1 - beta) pi + beta nu, by hand
    pi, nu = [0.5, 0.3, 0.2], [0.7, 0.2, 0.1]
    mix = [(1 - beta) * a + beta * b for a, b in zip(pi, nu, strict=True)]
    expected = sum(
        beta * b * math.log(b / m) + (1 - beta) * a * math.log(a / m)
        for a, b, m in zip(pi, nu, mix, strict=True)
    )
    close(value(f64([pi]).log(), f64([nu]).log(), beta=beta), [expected])


RULED_OUT = [
    *({"beta": b} for b in (0.0, 0.5, 1.0)),
    *(
        {"beta": b, "entry_clip": 0.05, "clip_form": form}
        for b in (0.0, 0.5, 1.0)
        for form in ("paper", "bregman")
    ),
    *(
        {"beta": b, "support": "top_k", "k": 3, "chosen_by": who, "rest": rest}
        for b in (0.0, 0.5, 1.0)
        for who in ("student", "teacher", "union")
        for rest in ("tail", "renormalised")
    ),
    {"kind": "total_variation"},
]


@pytest.mark.parametrize("options", RULED_OUT, ids=str)
@pytest.mark.parametrize("side", ["student", "teacher", "both", "other"])
def test_ruled_out_entries_leave_value_and_gradient_finite(options, side):
    # T5, T12: entries of probability exactly 0
    student, teacher = F2_STUDENT[0].clone(), F2_TEACHER[0].clone()
    if side in ("student", "both"):
        student[0, [1, 4]] = -math.inf
    if side in ("teacher", "both", "other"):
        teacher[0, [1, 4]] = -math.inf
    if side == "other":
        student[0, [0, 3]] = -math.inf
    found = value(student, teacher, **options)
    slope = gradient(lambda z: value(z, teacher, **options).sum(), student)
    assert bool(torch.isfinite(found).all())
    assert bool(torch.isfinite(slope).all())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_entries_that_both_sides_rule_out_count_for_nothing(beta):
    # T5
    out = f64([[0.0, 0.0, -math.inf]])
    found = value(S1[:1] + out, T1[:1] + out, beta=beta)
    close(found, value(S1[:1, :2], T1[:1, :2], beta=beta), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_gap_of_two_hundred_nats_stays_finite(beta, dtype):
    # T10: the head's logits are float32 whatever the dtype of the model
    rows, eye = torch.tensor([[200.0, 0.0], [0.0, 200.0]], dtype=dtype), torch.eye(2, dtype=dtype)
    teacher = HiddenDistribution(hidden=rows, head=Head(weight=eye)).log_probs(torch.arange(2))
    student = torch.tensor([[0.0, 200.0], [0.0, 200.0]])
    found = value(student, teacher, beta=beta)
    slope = gradient(lambda z: value(z, teacher, beta=beta).sum(), student)
    close(found, [math.log(2) if beta == 0.5 else 200.0, 0.0], 1e-4)
    assert bool(torch.isfinite(slope).all())


def test_a_half_precision_teacher_never_makes_the_jsd_negative():
    # T11
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator)
    weight = torch.randn(500, 32, generator=generator)
    student = torch.nn.functional.linear(hidden, weight)
    teacher = HiddenDistribution(
        hidden=hidden.bfloat16(), head=Head(weight=weight.bfloat16())
    ).log_probs(torch.arange(64))
    assert teacher.dtype == torch.float32
    found = value(student, teacher, beta=0.5)
    assert float(found.min()) >= -1e-6
    assert float(found.max()) > 1e-4


def test_one_entry_and_a_tail_are_the_whole_of_two_entries():
    # T13
    student, teacher = f64([[0.6, 0.4]]).log(), f64([[0.9, 0.1]]).log()
    close(reverse_kl(student[:, :1], teacher[:, :1]), [-0.243279])
    options = {"beta": 1.0, "support": "top_k", "k": 1}
    close(value(student, teacher, **options), [0.311239])
    close(value(student, teacher, beta=1.0), [0.311239])
    found = gradient(lambda z: value(z, teacher, **options).sum(), student)
    exact = gradient(lambda z: value(z, teacher, beta=1.0).sum(), student)
    close(found, exact, 1e-9)
    assert float(found.abs().min()) > 0.1


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("left", [1e-6, 1e-8, 1e-12])
def test_a_tail_of_almost_no_mass_is_finite_with_a_bounded_gradient(left, dtype, beta):
    # T14: the support of two entries holds 1 - left of the student's mass
    logits = torch.tensor([[0.5, 0.5 - left, left / 2, left / 2]], dtype=torch.float64).log()
    student = logits.to(dtype)
    teacher = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=dtype).log()
    options = {"beta": beta, "support": "top_k", "k": 2, "chosen_by": "student"}
    found = value(student, teacher, **options)
    slope = gradient(lambda z: value(z, teacher, **options).sum(), student)
    assert 0.0 < float(found) < 0.3 * math.log(0.3 / 1e-7) + 1.0
    assert float(slope.abs().max()) < 1.5


def test_vocabularies_of_ten_and_twelve_ids_are_compared_on_the_nine_of_the_tokenizer():
    # T18: the rows behind the tokenizer are random on both sides
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, generator=generator)
    ours = torch.randn(5, 10, generator=generator)
    weight = torch.randn(12, 4, generator=generator)
    teacher = HiddenDistribution(hidden=hidden, head=Head(weight=weight).cut(9))
    rows = torch.arange(5)
    theirs = hidden @ weight.t()
    for beta in (0.0, 0.5, 1.0):
        spec = DivergenceSpec(name="d", beta=beta)
        found = divergence(ours.log_softmax(-1), teacher.log_probs(rows), spec).per_token
        close(found, value(ours[:, :9].double(), theirs[:, :9].double(), beta=beta), 1e-5)


def test_widths_that_differ_by_padding_are_cut_to_the_shared_ids():
    # T18: neither zero-padding nor the other side's values
    wide = torch.cat([T1, torch.full((2, 5), 3.0, dtype=torch.float64)], 1)
    close(value(S1, wide), value(S1, T1), 1e-12)
    close(value(wide, S1), value(T1, S1), 1e-12)


def test_the_total_variation_is_half_the_absolute_difference_and_never_above_one():
    pi, nu = f64([[0.5, 0.3, 0.2]]).log(), f64([[0.7, 0.2, 0.1]]).log()
    close(value(pi, nu, kind="total_variation"), [0.2])
    close(value(f64([[0.0, -800.0]]), f64([[-800.0, 0.0]]), kind="total_variation"), [1.0])


def test_a_trust_region_interpolates_logits():
    # TV3.4
    eye, rows = torch.eye(3), torch.arange(1)
    reference, current = (
        HiddenDistribution(hidden=z[0, :1].float(), head=Head(weight=eye))
        for z in (F1_REFERENCE, F1_TEACHER)
    )
    found = LogitMix(first=reference, second=current, mix=0.1).log_probs(rows).exp()
    close(found, [[0.372839, 0.412051, 0.215110]], 1e-5)
    both = ProbabilityMixture(parts=[reference, current], weights=[0.9, 0.1])
    expected = 0.9 * F1_REFERENCE[0, :1].softmax(-1) + 0.1 * F1_TEACHER[0, :1].softmax(-1)
    close(both.log_probs(rows).exp(), expected, 1e-5)


@pytest.mark.parametrize("make", [GKD, OPSD, SDFT, SDPO])
@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan])
def test_a_beta_outside_zero_and_one_is_refused(make, beta):
    with pytest.raises(ConfigError, match="beta"):
        make(beta=beta)


@pytest.mark.parametrize("make", [GKD, OPSD, SDFT, SDPO])
@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(make, temperature):
    with pytest.raises(ConfigError, match="temperature"):
        make(temperature=temperature)


@pytest.mark.parametrize("make", [GKD, SDFT, SDPO])
def test_a_top_k_support_without_entries_is_refused(make):
    with pytest.raises(ConfigError, match="k >= 1"):
        make(support="top_k", k=0)


@pytest.mark.parametrize("chosen_by", ["student", "teacher", "union"])
def test_a_support_larger_than_the_vocabulary_is_refused(chosen_by):
    with pytest.raises(ConfigError, match="k must not exceed the vocabulary of 3 entries, got 4"):
        value(S1, T1, support="top_k", k=4, chosen_by=chosen_by)


def test_a_raw_reverse_kl_is_refused():
    with pytest.raises(ConfigError, match="raw"):
        GKD(beta=1.0, support="top_k", rest="raw")


def test_a_negative_entry_clip_is_refused():
    with pytest.raises(ConfigError, match="entry_clip"):
        OPSD(entry_clip=-0.1)
