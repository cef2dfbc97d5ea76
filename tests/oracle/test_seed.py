"""Hindsight skills as a self-teacher: the gate, its mask, its window, and plain GRPO without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distill.batch import TokenScores
from distill.errors import AlignmentError, ConfigError
from distill.ledger import Ledger
from distill.objectives import GRPO, SEED
from distill.objectives.base import PolicyView, asks_teacher, reads_teacher
from distill.objectives.seed import analyst_reward, skill_gate
from helpers import INFO, logits_batch, objective_loss
from vectors import (
    close,
    coefficients,
    f64,
    full_scores,
    gradient,
    numeric_gradient,
    prompted,
    two_way,
)

# skills-and-routing 9.2
STUDENT = f64([[-0.5, -1.2, -2.0, -0.1]])
SKILLED = f64([[-0.3, -1.5, -1.0, -0.1]])
REFERENCE = f64([[-0.45, -1.0, -2.1, -0.2]])
GATE = [0.731059, 0.182426, 0.993307, 0.500000]
WHOLE = SEED(skill_coefficient=1.0, kl_coefficient=0.0)
"""The skill term at weight 1 and nothing else: a group of one has advantage 0."""
PUBLISHED = GRPO(ddof=1, clip_dual=3.0, kl_coefficient=0.01, aggregate="token")


def published(rows=1, **changes):
    """Rows of the published example; every token is id 0."""
    tokens = torch.zeros(rows, 4, dtype=torch.long)
    batch = logits_batch(tokens, SKILLED.expand(rows, 4), **changes)
    reference = full_scores(two_way(REFERENCE.expand(rows, 4)), tokens)
    return replace(batch, targets={**batch.targets, "reference": reference})


def loss(objective, batch, logprobs=STUDENT, info=INFO):
    return objective_loss(objective, two_way(logprobs.expand(batch.num_rows, 4)), batch, info=info)


def metrics_of(objective, batch, info=INFO):
    batch, _ = objective.prepare(batch, info, {})
    ledger = Ledger()
    view = PolicyView(logprobs=prompted(STUDENT.expand(batch.num_rows, 4)))
    ledger.add(0.0, objective(view, batch))
    return ledger.metrics()


def test_the_gate_has_its_published_values():
    # skills-and-routing 9.2
    gap = SKILLED - STUDENT
    close(gap, [[0.2, -0.3, 1.0, 0.0]])
    gate = skill_gate(gap, "sigmoid", 5.0)
    close(gate, [GATE])
    close(gate * gap, [[0.146212, -0.054728, 0.993307, 0.0]])
    close(skill_gate(gap, "centered", 5.0), [[0.462117, -0.635149, 0.986614, 0.0]])
    close(skill_gate(gap, "signed", 5.0), gap)
    close(skill_gate(gap, "signed", 5.0, 0.25), [[0.2, -0.25, 0.25, 0.0]])


def test_the_gate_follows_the_published_sweep():
    gap = f64([-2.0, -1.0, -0.5, -0.2, 0.0, 0.2, 0.5, 1.0, 2.0])
    expected = [0.000045, 0.006693, 0.075858, 0.268941, 0.5, 0.731059, 0.924142, 0.993307, 0.999955]
    close(skill_gate(gap, "sigmoid", 5.0), expected)


def test_loss_and_gradient_of_the_skill_term_have_their_published_values():
    batch = published()
    close(loss(WHOLE, batch), 0.271198)
    close(loss(SEED(kl_coefficient=0.0), batch), 0.002712)
    close(coefficients(WHOLE, STUDENT, batch), [[-0.182765, -0.045606, -0.248327, -0.125]])


def test_a_masked_token_leaves_sum_and_denominator():
    mask = torch.tensor([[False, True, True, False, True]])
    close(loss(WHOLE, published(completion_mask=mask)), 0.030495)


def test_its_metrics_have_their_published_values():
    # the token without a gap has a gate of exactly a half and is not active
    found = metrics_of(WHOLE, published())
    close(found["seed.skill/gate"], 0.601698)
    close(found["seed.skill/gap"], 0.225)
    assert found["seed.skill/gate_active_share"] == 0.5
    assert found["seed.skill/token_share"] == 1.0


def test_the_total_has_its_published_value():
    # skills-and-routing 9.2: surrogate, k3 and skill term at advantage 1.5
    batch = published(
        rewards=f64([1.5]), behaviour_logprobs=prompted(STUDENT - f64([[0.0, 0.1, 0.3, -0.4]]))
    )
    options = {"group": "center", "lone_group": "raw"}
    close(loss(SEED(skill_coefficient=0.0, kl_coefficient=0.0, **options), batch), -1.490809)
    close(loss(SEED(skill_coefficient=0.0, **options), batch), -1.490809 + 0.01 * 0.008087)
    close(loss(SEED(**options), batch), -1.488016)


def test_the_defaults_are_the_published_ones():
    made = SEED()
    assert (made.beta, made.skill_coefficient, made.kl_coefficient) == (5.0, 0.01, 0.01)
    assert (made.clip_low, made.clip_high, made.clip_dual, made.ddof) == (0.2, 0.2, 3.0, 1)
    assert (made.aggregate, made.stat_scope, made.over) == ("token", "rows", "skilled")
    assert made.needs == {"rewards", "groups", "reference.logprobs", "teacher.logprobs"}


def some(seed=0, **changes):
    """Three rows of one group with a random teacher; the last has no skill."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(3, 4, 5, generator=generator) for _ in range(4)]
    tokens = torch.randint(0, 5, (3, 4), generator=generator)
    scores = {
        n: full_scores(x, tokens) for n, x in zip(("teacher", "reference"), made, strict=False)
    }
    values = {
        "rewards": torch.tensor([1.0, 0.0, 0.3]),
        "row_group": torch.zeros(3, dtype=torch.long),
        "row_viewed": torch.tensor([True, True, False]),
        "behaviour_logprobs": full_scores(made[2], tokens).logprobs,
        "targets": scores,
    }
    return made[3], logits_batch(tokens, **(values | changes))


def both(objective, logits, batch, info=INFO):
    value = objective_loss(objective, logits, batch, info=info)
    return value, gradient(lambda z: objective_loss(objective, z, batch, info=info), logits)


NOBODY = torch.zeros(3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("objective", "changes", "step"),
    [
        (SEED(skill_coefficient=0.0), {}, 1),
        (SEED(skill_coefficient=0.5), {"row_viewed": NOBODY}, 1),
        (SEED(skill_coefficient=0.5, over="all"), {"row_viewed": NOBODY}, 1),
        (SEED(skill_coefficient=0.5, start_step=3), {}, 2),
        (SEED(skill_coefficient=0.5, stop_step=3), {}, 4),
        (SEED(skill_coefficient=0.5, failed_only=True, failed_at=-1.0), {}, 1),
    ],
)
def test_without_a_skill_to_learn_it_is_grpo_bit_for_bit(objective, changes, step):
    # skills-and-routing 7.6, invariant 4
    logits, batch = some(**changes)
    info = replace(INFO, step=step)
    plain = both(PUBLISHED, logits, batch)
    found = both(objective, logits, batch, info)
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])
    assert not torch.equal(both(SEED(skill_coefficient=0.5), *some())[1], plain[1])


def test_outside_its_window_no_teacher_is_asked():
    objective = SEED(start_step=2, stop_step=3)
    assert reads_teacher(objective)
    asked = [asks_teacher(objective, replace(INFO, step=n)) for n in (1, 2, 3, 4)]
    assert asked == [False, True, True, False]
    assert all(asks_teacher(SEED(), replace(INFO, step=n)) for n in (1, 999))
    assert not reads_teacher(SEED(skill_coefficient=0.0))
    logits, batch = some()
    batch = replace(batch, targets={"reference": batch.targets["reference"]})
    objective_loss(objective, logits, batch, info=INFO)
    with pytest.raises(AlignmentError, match="'teacher'"):
        objective_loss(SEED(), logits, batch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_sigmoid_gate_pushes_every_token_up_whatever_its_gap(dtype):
    # skills-and-routing 7.6, invariant 6
    gap = torch.tensor([[-15.0, -2.0, 0.0, 12.0]], dtype=dtype)
    student = torch.tensor([[-16.0, -13.0, -12.5, -12.5]], dtype=dtype)
    batch = logits_batch(torch.zeros(1, 4, dtype=torch.long), student + gap)
    assert bool((coefficients(WHOLE, student, batch) < 0).all())
    for gate in ("signed", "centered"):
        pushed = coefficients(replace(WHOLE, gate=gate), student, batch)
        assert pushed[0].sign().tolist() == [1.0, 1.0, 0.0, -1.0]


@pytest.mark.parametrize("gate", ["sigmoid", "signed", "centered"])
def test_gate_and_skilled_scores_carry_no_gradient(gate):
    # skills-and-routing 7.6, invariant 3: what remains is the gate as a constant
    moved = f64([[-0.7, -0.9, -2.4, -0.3]])
    objective, batch = replace(WHOLE, gate=gate), published()
    weights = skill_gate(SKILLED - moved, gate, 5.0)
    close(coefficients(objective, moved, batch), -weights / 4)

    def frozen(logits):
        student = logits.log_softmax(-1)[..., 0]
        return (weights * (SKILLED - student)).mean()

    at = two_way(moved)
    found = gradient(lambda z: objective_loss(objective, z, batch), at)
    close(found, numeric_gradient(frozen, at), 1e-8)
    leaf = batch.targets["teacher"].logprobs.clone().requires_grad_(True)
    batch = replace(batch, targets={"teacher": TokenScores(logprobs=leaf)})
    objective_loss(objective, at.clone().requires_grad_(True), batch).backward()
    assert leaf.grad is None


def test_the_gap_is_taken_against_the_live_student_and_not_the_one_that_acted():
    away = prompted(STUDENT - 1.0)
    close(loss(WHOLE, published(behaviour_logprobs=away)), 0.271198)


@pytest.mark.parametrize(("over", "share"), [("skilled", 1.0), ("all", 0.5)])
def test_the_denominator_is_skilled_tokens_or_all(over, share):
    # world-agents A4.2: a comparison must state it
    batch = published(2, row_viewed=torch.tensor([True, False]))
    objective = replace(WHOLE, over=over)
    close(loss(objective, batch), 0.271198 * share)
    assert metrics_of(objective, batch)["seed.skill/token_share"] == 0.5
    close(metrics_of(objective, batch)["seed.skill/gate"], 0.601698)


def test_worked_solutions_learn_from_no_skill_and_leave_the_denominators():
    batch = published(2, row_sampled=torch.tensor([True, False]))
    for over in ("skilled", "all"):
        close(loss(replace(WHOLE, over=over), batch), 0.271198)


def test_only_failures_learn_from_their_skill_on_request_or_later():
    returns = f64([0.0, 0.9, -0.1])
    batch = published(3, rewards=returns, row_group=torch.arange(3))

    def share(objective, step=1):
        return metrics_of(objective, batch, replace(INFO, step=step))["seed.skill/token_share"]

    close(share(WHOLE), 1.0)
    close(share(replace(WHOLE, failed_only=True)), 2 / 3)
    close(share(replace(WHOLE, failed_only=True, failed_at=-0.05)), 1 / 3)
    later = replace(WHOLE, failed_only_after=2)
    close([share(later, 2), share(later, 3)], [1.0, 2 / 3])


def test_a_row_without_a_skill_keeps_its_part_of_grpo():
    logits, batch = some()
    slope = both(SEED(skill_coefficient=0.5), logits, batch)[1]
    plain = both(PUBLISHED, logits, batch)[1]
    assert torch.equal(slope[2], plain[2])
    assert float((slope[:2] - plain[:2]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("gain", "text", "failed", "options", "expected"),
    [
        (0.35, "take the lamp", False, {}, 0.75),  # skills-and-routing 9.2
        (0.35, "x" * 1201, True, {}, 0.2),
        (3.1, "take the lamp", False, {}, 2.0),
        (0.35, "x" * 1200, True, {"on_failure": "negate"}, 0.05),
        (-9.0, "take the lamp", False, {}, -2.0),
        (0.35, " ", False, {"coefficient": 2.0}, 0.9),
    ],
)
def test_the_reward_of_an_analyst_has_its_published_values(gain, text, failed, options, expected):
    close(analyst_reward(gain, text, valid=True, failed=failed, **options), expected)


def test_an_answer_that_could_not_be_read_earns_no_bonus_for_it():
    close(analyst_reward(0.1, "", valid=False, failed=False), 0.1)
    with pytest.raises(ConfigError, match="zero or negate"):
        analyst_reward(0.1, "", valid=False, failed=True, on_failure="drop")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"gate": "tanh"}, "gate"),
        ({"over": "rows"}, "over"),
        ({"beta": 0.0}, "beta"),
        ({"skill_coefficient": -0.1}, "skill_coefficient"),
        ({"gate": "signed", "clip_gap": -1.0}, "clip_gap"),
        ({"clip_gap": 1.0}, "signed gate only"),
        ({"start_step": 0}, "start_step"),
        ({"start_step": 5, "stop_step": 4}, "stop_step"),
        ({"failed_only_after": -1}, "failed_only_after"),
        ({"ddof": 3}, "ddof"),
        ({"clip_dual": 1.0}, "clip_dual"),
    ],
)
def test_a_bad_hyper_parameter_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        SEED(**options)
