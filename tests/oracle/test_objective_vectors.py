"""The published formulas as numbers: F1 is two tokens over three vocabulary entries."""

from __future__ import annotations

import pytest
import torch

from distill.advantages import discounted, group_zscore, leave_one_out
from distill.divergence import DivergenceSpec, divergence, k1, k2, k3
from distill.objectives import GKD, GRPO, OPD, SFT
from distill.objectives.base import denominator_of, with_weights
from helpers import INFO, logits_batch, objective_loss

STUDENT = torch.tensor([[1.0, 0.0, -1.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
TEACHER = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.0]], dtype=torch.float64)
TOKENS = torch.tensor([[0, 1]])
TEACHER_LOGPROBS = torch.log_softmax(TEACHER, -1).gather(-1, TOKENS[0][:, None])[:, 0][None]


def close(found: torch.Tensor | float, expected: object, atol: float = 1e-6) -> None:
    found = torch.as_tensor(found, dtype=torch.float64)
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0
    )


def test_sampled_reverse_kl_has_the_published_value_and_gradient():
    batch = logits_batch(TOKENS, TEACHER_LOGPROBS)
    student = STUDENT[None].clone().requires_grad_(True)

    loss = objective_loss(OPD(), student, batch)
    loss.backward()

    close(loss.detach(), 1.140762)  # the ratio form at ratio 1
    close(
        student.grad[0],
        [[0.167380, -0.122364, -0.045015], [-0.245830, 0.394933, -0.149103]],
    )


def test_k1_per_token_is_the_gap_of_log_probabilities():
    chosen = torch.log_softmax(STUDENT, -1).gather(-1, TOKENS[0][:, None])[:, 0]
    close(k1(chosen, TEACHER_LOGPROBS[0]), [1.0, 1.281525])
    advantages = TEACHER_LOGPROBS[0] - chosen
    close(-(advantages * chosen).mean(), -0.817666)  # the value of the REINFORCE form


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [
        (0.0, [-1.0, -1.281525]),
        (0.5, [-1.640762, -1.281525]),
        (1.0, [-2.281525, -1.281525]),
    ],
)
def test_discounting_sums_the_later_advantages(gamma, expected):
    values = torch.tensor([[-1.0, -1.281525]], dtype=torch.float64)
    close(discounted(values, torch.ones(1, 2, dtype=torch.bool), gamma)[0], expected)


def test_a_masked_position_neither_contributes_nor_stops_the_discounting():
    values = torch.tensor([[1.0, 100.0, 2.0]])
    mask = torch.tensor([[True, False, True]])
    torch.testing.assert_close(discounted(values, mask, 0.5), torch.tensor([[1.5, 0.0, 2.0]]))


def test_opd_with_a_discount_uses_the_later_tokens_of_the_row():
    batch = logits_batch(TOKENS, TEACHER_LOGPROBS)
    chosen = torch.log_softmax(STUDENT, -1).gather(-1, TOKENS[0][:, None])[:, 0]
    sampler = torch.cat([torch.zeros(1), chosen])[None]
    batch, _ = OPD(discount=0.5).prepare(_replace(batch, sampler_logprobs=sampler), INFO, {})
    close(batch.advantages[0], [0.0, -1.640762, -1.281525])


DIVERGENCES = [
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


@pytest.mark.parametrize(("beta", "temperature", "per_token", "mean"), DIVERGENCES)
def test_full_vocabulary_divergences_have_their_published_values(
    beta, temperature, per_token, mean
):
    spec = DivergenceSpec(name="d", beta=beta, temperature=temperature)
    value = divergence(torch.log_softmax(STUDENT, -1), torch.log_softmax(TEACHER, -1), spec)
    close(value, per_token)
    loss = objective_loss(
        GKD(beta=beta, temperature=temperature), STUDENT[None], logits_batch(TOKENS), TEACHER[None]
    )
    close(loss, mean)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.0, [[0.420512, -0.420512, 0.0], [-0.403334, 0.277145, 0.126190]]),
        (1.0, [[0.385499, -0.347640, -0.037859], [-0.428289, 0.339015, 0.089274]]),
    ],
)
def test_divergence_gradients_have_their_published_values(beta, expected):
    student = STUDENT.clone().requires_grad_(True)
    spec = DivergenceSpec(name="d", beta=beta)
    divergence(student.log_softmax(-1), TEACHER.log_softmax(-1), spec).sum().backward()
    close(student.grad, expected)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_divergence_gradients_agree_with_finite_differences(beta):
    spec = DivergenceSpec(name="d", beta=beta, temperature=1.5)
    teacher = TEACHER.log_softmax(-1)

    def value(logits: torch.Tensor) -> torch.Tensor:
        return divergence(logits.log_softmax(-1), teacher, spec)

    assert torch.autograd.gradcheck(value, STUDENT.clone().requires_grad_(True))


def test_estimators_have_their_values_expectations_and_expected_gradients():
    chosen = torch.log_softmax(STUDENT, -1).gather(-1, TOKENS[0][:, None])[:, 0]
    close(k2(chosen, TEACHER_LOGPROBS[0]), [0.500000, 0.821153])
    close(k3(chosen, TEACHER_LOGPROBS[0]), [0.367879, 0.559138])
    reverse = [0.385499, -0.347640, -0.037859]
    forward = [0.420512, -0.420512, 0.0]
    expectations = {k1: (0.420512, [0.0] * 3), k2: (0.454985, reverse), k3: (0.420512, forward)}
    for estimator, (mean, gradient) in expectations.items():
        logits = STUDENT[0].clone().requires_grad_(True)
        values = estimator(logits.log_softmax(-1), TEACHER[0].log_softmax(-1))
        weights = logits.detach().softmax(-1)
        close((weights * values).sum().detach(), mean)
        (weights * values).sum().backward()
        close(logits.grad, gradient)


def test_the_expected_gradient_of_opd_is_that_of_the_exact_reverse_kl():
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    teacher = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(7)[:, None]  # every vocabulary entry once, as its own row
    student = logits.clone().requires_grad_(True)
    batch = logits_batch(tokens, teacher.log_softmax(-1)[:, None])
    batch, _ = OPD().prepare(batch, INFO, {})
    log_probs = student.log_softmax(-1)
    from distill.objectives.base import PolicyView

    view = PolicyView(logprobs=torch.cat([torch.zeros(7, 1), log_probs[:, None]], 1))
    (term,) = OPD()(view, batch)
    (logits.softmax(-1) * term.per_token[:, 1]).sum().backward()
    expected = logits.clone().requires_grad_(True)
    p = expected.softmax(-1)
    (p * (p.log() - teacher.log_softmax(-1))).sum().backward()
    torch.testing.assert_close(student.grad, expected.grad)


def test_a_temperature_on_one_side_only_makes_equal_models_differ():
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    gap = k1((logits / 0.7).log_softmax(-1), logits.log_softmax(-1))
    close(gap[[0, 2]], [0.147488, -0.709655])
    close(((logits / 0.7).softmax(-1) * gap).sum(), 0.030351)


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("token", 16 / 6), ("sequence", 2.5), ("sequence_sum", 8.0), ("constant", 16.0)],
)
def test_aggregation_divides_by_what_its_name_says(aggregate, expected):
    per_token = torch.tensor([[0.0, 1.0, 3.0, 99.0, 99.0], [0.0, 2.0, 2.0, 2.0, 6.0]])
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
    batch = _replace(logits_batch(torch.ones(2, 4, dtype=torch.long)), completion_mask=mask)
    weights = with_weights(batch, "x", aggregate).weights["x"]
    totals = {"weights": float(weights.sum()), "rows": 2.0, "const": 1.0}
    found = (per_token * weights).sum() / totals[denominator_of(aggregate)]
    close(found, expected, atol=1e-5)


def test_a_trajectory_of_several_rows_counts_once():
    mask = torch.tensor([[0, 1, 0], [0, 1, 1], [0, 1, 1]], dtype=torch.bool)
    batch = _replace(
        logits_batch(torch.ones(3, 2, dtype=torch.long)),
        completion_mask=mask,
        row_traj=torch.tensor([0, 0, 1]),
    )
    weights = with_weights(batch, "x", "trajectory").weights["x"]
    close(weights.sum(1), [1 / 3, 2 / 3, 1.0])


def test_group_advantages_are_z_scores_and_zero_where_all_are_equal():
    rewards = torch.tensor([1.0, 0.0, 0.1 + 0.2, 0.3, 0.3, 5.0])
    groups = torch.tensor([0, 0, 1, 1, 1, 2])
    found = group_zscore(rewards.float(), groups)
    torch.testing.assert_close(found[:2], torch.tensor([1.0, -1.0]), atol=1e-5, rtol=0)
    assert found[2:].tolist() == [0.0] * 4
    sample = group_zscore(rewards, groups, ddof=1)
    torch.testing.assert_close(sample[:2], torch.tensor([2**-0.5, -(2**-0.5)]), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        leave_one_out(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.long)),
        torch.tensor([1.0, -0.5, -0.5]),
    )


def test_grpo_pushes_by_the_group_advantage_and_clips_the_ratio():
    tokens = torch.tensor([[0], [1]])
    logits = torch.zeros(2, 1, 3, dtype=torch.float64)
    batch = _replace(
        logits_batch(tokens),
        rewards=torch.tensor([1.0, 0.0]),
        row_group=torch.tensor([0, 0]),
        behaviour_logprobs=torch.tensor([[0.0, -5.0], [0.0, -5.0]], dtype=torch.float64),
    )
    # Both ratios are far above 1.2: the good row is clipped, the bad one is not.
    ratio = float((logits.log_softmax(-1)[0, 0, 0] + 5.0).exp())
    loss = objective_loss(GRPO(), logits, batch)
    close(loss, (-1.2 + ratio) / 2, atol=1e-4)


def test_a_failed_episode_does_not_shift_the_mean_of_its_group():
    batch = logits_batch(torch.tensor([[0], [1], [2]]))
    mask = batch.completion_mask.clone()
    mask[2] = False
    batch = _replace(
        batch,
        completion_mask=mask,
        rewards=torch.tensor([1.0, 0.0, float("nan")]),
        row_group=torch.zeros(3, dtype=torch.long),
    )
    prepared, _ = GRPO().prepare(batch, INFO, {})
    torch.testing.assert_close(
        prepared.advantages[:, 1], torch.tensor([1.0, -1.0, 0.0]), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("objective", [GKD(beta=b) for b in (0.0, 0.5, 1.0)] + [OPD()])
def test_a_teacher_equal_to_the_student_gives_zero_loss_and_gradient(objective):
    chosen = torch.log_softmax(STUDENT, -1).gather(-1, TOKENS[0][:, None])[:, 0]
    student = STUDENT[None].clone().requires_grad_(True)
    loss = objective_loss(objective, student, logits_batch(TOKENS, chosen[None]), STUDENT[None])
    loss.backward()
    close(loss.detach(), 0.0, atol=1e-12)
    close(student.grad, [[[0.0] * 3] * 2], atol=1e-12)


def test_sft_is_the_mean_negative_log_likelihood():
    chosen = torch.log_softmax(STUDENT, -1).gather(-1, TOKENS[0][:, None])[:, 0]
    close(objective_loss(SFT(), STUDENT[None], logits_batch(TOKENS)), float(-chosen.mean()))


def test_vocabulary_widths_that_differ_by_padding_are_cut_to_the_shared_ids():
    wide = torch.cat([TEACHER, torch.full((2, 5), 3.0, dtype=torch.float64)], 1)
    spec = DivergenceSpec(name="d")
    narrow = divergence(STUDENT.log_softmax(-1), TEACHER.log_softmax(-1), spec)
    torch.testing.assert_close(
        divergence(STUDENT.log_softmax(-1), wide.log_softmax(-1), spec), narrow
    )


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: OPD(coefficient=0.0), "coefficient"),
        (lambda: OPD(discount=1.5), "discount"),
        (lambda: OPD(clamp=-1.0), "clamp"),
        (lambda: GKD(beta=-0.1), "beta"),
        (lambda: GKD(temperature=0.0), "temperature"),
        (lambda: GRPO(ddof=2), "ddof"),
        (lambda: GRPO(clip_low=1.0), "clip_low"),
        (lambda: GRPO(group="median"), "group"),
    ],
)
def test_a_bad_hyper_parameter_is_named(make, word):
    with pytest.raises(ValueError, match=word):
        make()


def _replace(batch, **changes):
    from dataclasses import replace

    return replace(batch, **changes)
