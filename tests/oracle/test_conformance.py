"""What holds for every objective: equal models, no gradient but the student's, empty batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from distill.batch import TokenScores, collate, token_scores
from distill.errors import AlignmentError
from distill.followers import FollowerSpec
from distill.models import new_adapter
from distill.objectives import GRPO, OBJECTIVES, RLSD, SDFT, SDPO, SEED, SFT
from distill.policy import AdapterSpec, Policy
from distill.trainer import Trainer, TrainerOptions
from distill.types import Scores
from helpers import INFO, make_model, make_policy, make_rollout, objective_loss
from teachers.views import Plain
from vectors import (
    DISTILLING,
    EVERY,
    F64,
    LATER,
    batch_of,
    close,
    f64,
    gradient,
    label,
    numeric_gradient,
)

STEP = replace(LATER, step=10)
"""After every warm-up, before RLSD's mix is gone."""


def random_logits(seed, rows=2, width=3, vocab=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, vocab, dtype=F64, generator=generator)


TOKENS = torch.tensor([[0, 3, 1], [2, 2, 4]])
STUDENT, TEACHER, REFERENCE = (random_logits(seed) for seed in (0, 1, 2))


def group(student, teacher, objective, reference=REFERENCE, **changes):
    """Two rows of one group with different rewards."""
    values = {"rewards": f64([1.0, 0.0]), "row_group": torch.zeros(2, dtype=torch.long)}
    values["row_sampled"] = torch.full((2,), objective.name != "sft")
    return batch_of(student, teacher, TOKENS, objective, reference, **(values | changes))


def slope(objective, student, batch, teacher):
    return gradient(lambda z: objective_loss(objective, z, batch, teacher, STEP), student)


def test_the_list_under_test_holds_every_objective_of_the_table():
    # Texts and groups of bytes instead of token ids: these have oracles of their own.
    others = {OBJECTIVES["omni_opd"], OBJECTIVES["gold"]}
    assert {type(o) for o in EVERY} == set(OBJECTIVES.values()) - others


RAW = [o for o in DISTILLING if getattr(o, "rest", "") == "raw"]


RECORDED = [(o, {}) for o in DISTILLING if o not in RAW]
LIVE = [(o, {"behaviour_logprobs": None}) for o, _ in RECORDED if "student.logprobs" not in o.needs]


@pytest.mark.parametrize(("objective", "changes"), RECORDED + LIVE, ids=label)
def test_a_teacher_equal_to_the_student_gives_zero_loss_and_gradient(objective, changes):
    # conformance 1, T2: rewards equal, so that nothing but the teacher could move the student
    batch = group(STUDENT, STUDENT, objective, STUDENT, rewards=f64([0.3, 0.3]), **changes)
    loss = objective_loss(objective, STUDENT, batch, STUDENT, STEP)
    close(loss, 0.0, 1e-12)
    close(slope(objective, STUDENT, batch, STUDENT), torch.zeros_like(STUDENT), 1e-12)


@pytest.mark.parametrize("objective", RAW, ids=label)
def test_a_raw_sum_of_equal_models_is_zero_and_still_draws_mass_into_its_support(objective):
    # conformance 1 cannot hold here: d/dz of -sum_{v in K} nu_v log pi_v is pi Q - nu 1_K
    batch = group(STUDENT, STUDENT, objective)
    close(objective_loss(objective, STUDENT, batch, STUDENT, STEP), 0.0, 1e-12)
    pi = STUDENT.softmax(-1)
    inside = torch.zeros_like(pi).scatter(-1, pi.topk(objective.k).indices, 1.0)
    mass = (pi * inside).sum(-1, keepdim=True)
    close(slope(objective, STUDENT, batch, STUDENT), pi * (mass - inside) / 6, 1e-9)


@pytest.mark.parametrize("objective", DISTILLING, ids=label)
def test_another_teacher_moves_the_student(objective):
    batch = group(STUDENT, TEACHER, objective)
    assert float(slope(objective, STUDENT, batch, TEACHER).abs().max()) > 1e-3


class Ready:
    """An objective whose batch is already prepared."""

    def __init__(self, objective):
        self.plan, self.terms = objective.plan, objective

    def prepare(self, batch, step, state):
        return batch, state

    def __call__(self, policy, batch):
        return self.terms(policy, batch)


@pytest.mark.parametrize("objective", EVERY, ids=label)
def test_no_gradient_reaches_anything_but_the_student(objective):
    # conformance 3: teacher, reference, behaviour and weights
    leaves = []

    def leaf(values):
        leaves.append(values.clone().requires_grad_(True))
        return leaves[-1]

    teacher = leaf(TEACHER)
    batch = group(STUDENT, TEACHER, objective)
    targets = {
        role: TokenScores(
            logprobs=leaf(scores.logprobs),
            candidate_ids=scores.candidate_ids,
            candidate_logprobs=None
            if scores.candidate_logprobs is None
            else leaf(scores.candidate_logprobs),
        )
        for role, scores in batch.targets.items()
    }
    batch = replace(
        batch,
        targets=targets,
        behaviour_logprobs=leaf(batch.behaviour_logprobs),
        behaviour_entropy=leaf(batch.behaviour_entropy),
    )
    with torch.no_grad():  # as the trainer does
        prepared, _ = objective.prepare(batch, STEP, {})
    made = [*prepared.weights.values(), *prepared.signals.values()]
    assert not any(x.requires_grad for x in made)
    ready = Ready(objective)
    student = STUDENT.clone().requires_grad_(True)
    objective_loss(ready, student, prepared, teacher, STEP).backward()
    assert student.grad is not None
    assert bool(student.grad.any())
    reached = [x.shape for x in leaves if x.grad is not None and bool(x.grad.any())]
    assert reached == []


FIXED_WEIGHTS = [
    o
    for o in EVERY
    # These read the live student inside a detached factor: no number has their gradient.
    if not (isinstance(o, RLSD | SDFT | SDPO) and not getattr(o, "hybrid_lambda", 0.0))
    and not (isinstance(o, SEED) and o.skill_coefficient)
    and getattr(o, "support", "") != "top_k"
]


@pytest.mark.parametrize("objective", FIXED_WEIGHTS, ids=label)
def test_the_gradient_agrees_with_finite_differences(objective):
    # conformance 3; the recorded student makes advantages constant
    moved = STUDENT + 0.1 * random_logits(7)
    batch = group(STUDENT, TEACHER, objective)

    def loss(logits):
        return objective_loss(objective, logits, batch, TEACHER, STEP)

    found = gradient(loss, moved)
    close(found, numeric_gradient(loss, moved), 1e-8)
    assert float(found.abs().max()) > 1e-3


EXACT = [o for o in DISTILLING if o.name in {"gkd", "sdft", "sdpo"} and o not in FIXED_WEIGHTS]
EXACT = [o for o in EXACT if not getattr(o, "hybrid_lambda", 0.0)]


@pytest.mark.parametrize("objective", EXACT, ids=label)
def test_the_gradient_of_a_first_update_agrees_with_finite_differences(objective):
    batch = group(STUDENT, TEACHER, objective, behaviour_logprobs=None)

    def loss(logits):
        return objective_loss(objective, logits, batch, TEACHER, STEP)

    close(gradient(loss, STUDENT), numeric_gradient(loss, STUDENT), 1e-8)


@pytest.mark.parametrize("objective", EVERY, ids=label)
def test_a_batch_without_a_trained_token_has_loss_and_gradient_zero(objective):
    # T24
    batch = group(STUDENT, TEACHER, objective, completion_mask=torch.zeros(2, 4, dtype=torch.bool))
    close(objective_loss(objective, STUDENT, batch, TEACHER, STEP), 0.0, 0.0)
    assert not bool(slope(objective, STUDENT, batch, TEACHER).any())


@pytest.mark.parametrize("objective", EVERY, ids=label)
def test_a_row_without_a_trained_token_does_not_count(objective):
    # T24: an empty completion beside two whole ones, of a group of its own
    three = [torch.cat([x, 9 * random_logits(8, rows=1)]) for x in (STUDENT, TEACHER, REFERENCE)]
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[:, 0] = mask[2] = False
    values = {
        "rewards": f64([1.0, 0.0, math.nan]),
        "row_group": torch.tensor([0, 0, 1]),
        "row_sampled": torch.full((3,), objective.name != "sft"),
        "completion_mask": mask,
    }
    tokens = torch.cat([TOKENS, torch.zeros(1, 3, dtype=torch.long)])
    batch = batch_of(*three[:2], tokens, objective, three[2], **values)
    found = slope(objective, three[0], batch, three[1])
    wanted = slope(objective, STUDENT, group(STUDENT, TEACHER, objective), TEACHER)
    close(found[:2], wanted, 1e-12)
    assert not bool(found[2].any())


def test_an_update_without_a_trained_token_changes_nothing_and_counts_it():
    # T24, through the trainer
    policy = make_policy()
    before = {n: p.detach().clone() for n, p in policy.trainable().items()}
    batch = collate([make_rollout([5, 6], []), make_rollout([5, 6, 7], [], name="t1")])
    trainer = Trainer(policy, TrainerOptions(num_steps=1, lr=1.0))
    report = trainer.update(batch, GRPO(), INFO)
    assert (report.loss, report.grad_norm, report.num_tokens) == (0.0, 0.0, 0)
    assert all(torch.equal(before[n], p) for n, p in policy.trainable().items())


def scores_of(*logprobs):
    return [Scores(logprobs=logprobs, source="x", view_id="v")]


MASK = torch.tensor([[False, True, True]])


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan, None])
@pytest.mark.parametrize("role", ["teacher", "reference"])
def test_a_score_that_is_no_finite_number_names_its_role(bad, role):
    with pytest.raises(AlignmentError, match=f"{role} log-probabilities"):
        token_scores(scores_of(-0.5, bad), MASK, role)


@pytest.mark.parametrize("logprobs", [(-0.5,), (-0.5, -0.5, -0.5), ()])
def test_scores_of_another_length_name_role_and_counts(logprobs):
    with pytest.raises(AlignmentError, match=r"teacher scores must cover \[2\]"):
        token_scores(scores_of(*logprobs), MASK, "teacher")


def test_scores_land_at_their_tokens():
    found = token_scores(scores_of(-0.5, -1.5), MASK, "teacher")
    assert found.logprobs.tolist() == [[0.0, -0.5, -1.5]]


ROWS = [make_rollout([5, 6], [7, 8, 9, 1], policy_version=-1)]


def adapter_policy():
    model = new_adapter(make_model(), AdapterSpec(rank=4, alpha=8), seed=1)
    return Policy(model, base="tiny", kind="adapter")


def logprobs(policy, role):
    views = Plain().build(ROWS, {})
    return torch.tensor(policy.score(views, role)[0].logprobs)


def train(policy, steps=1):
    trainer = Trainer(policy, TrainerOptions(num_steps=99, lr=0.05, warmup_steps=0))
    for step in range(1, steps + 1):
        trainer.update(collate(ROWS), SFT(), replace(INFO, step=step))


def test_a_teacher_with_the_adapter_off_is_the_base_model():
    # conformance 10
    policy, untouched = adapter_policy(), make_policy()
    start = logprobs(untouched, "student")
    assert torch.equal(logprobs(policy, "base"), start)
    train(policy, 3)
    assert torch.equal(logprobs(policy, "base"), start)
    assert float((logprobs(policy, "student") - start).abs().max()) > 0.1


@pytest.mark.parametrize("make", [adapter_policy, make_policy])
def test_an_average_of_the_weights_has_its_closed_form_after_k_steps(make):
    # conformance 10: (1 - a)^k phi_0 + a sum_j (1 - a)^(k - j) theta_j
    policy, rate, steps = make(), 0.3, 4
    policy.add_follower(FollowerSpec(name="ema", rate=rate))
    own = policy.followers["ema"]
    expected = {n: t.double().clone() for n, t in own.tensors().items()}
    trainer = Trainer(policy, TrainerOptions(num_steps=9, lr=0.05, warmup_steps=0))
    total = {n: (1 - rate) ** steps * t for n, t in expected.items()}
    for step in range(1, steps + 1):
        trainer.update(collate(ROWS), SFT(), replace(INFO, step=step))
        for name, parameter in policy.trainable().items():
            total[name] += rate * (1 - rate) ** (steps - step) * parameter.detach().double()
    assert own.tensors().keys() == policy.trainable().keys()
    for name, tensor in own.tensors().items():
        close(tensor, total[name], 1e-6)
        assert not tensor.requires_grad
    assert set(policy.trainable()) == set(trainer.policy.trainable())


@pytest.mark.parametrize("make", [adapter_policy, make_policy])
def test_a_snapshot_is_the_student_of_the_last_multiple(make):
    # conformance 10
    policy = make()
    policy.add_follower(FollowerSpec(name="snapshot", every=2))
    start = logprobs(policy, "student")
    trainer = Trainer(policy, TrainerOptions(num_steps=9, lr=0.05, warmup_steps=0))
    seen = [start]
    for step in range(1, 6):
        trainer.update(collate(ROWS), SFT(), replace(INFO, step=step))
        seen.append(logprobs(policy, "student"))
        assert torch.equal(logprobs(policy, "snapshot"), seen[2 * (step // 2)])
    assert not torch.equal(seen[4], seen[5])


def test_followers_never_train():
    policy = adapter_policy()
    names = set(policy.trainable())
    policy.add_follower(FollowerSpec(name="ema", rate=0.1))
    policy.add_follower(FollowerSpec(name="snapshot", every=2))
    assert set(policy.trainable()) == names
    for role in ("ema", "snapshot", "base"):
        logprobs(policy, role)
        assert set(policy.trainable()) == names
