"""What must not change a gradient: micro-batches, order, padding; and what must not train."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distill.asking import own_view
from distill.batch import collate, micro_batches, token_scores
from distill.correction import Correction
from distill.objectives import (
    DAPO,
    GKD,
    GOPD,
    GRPO,
    OBJECTIVES,
    OPD,
    OPID,
    OPSA,
    OPSD,
    RLSD,
    SDFT,
    SDPO,
    SEED,
    SFT,
    AntiSD,
    DrGRPO,
    OmniOPD,
    PowerOPD,
    Surprise,
)
from distill.objectives.base import ForwardPlan, Term, with_weights
from distill.objectives.terms import Sum
from distill.policy import Policy
from distill.step import Parts, on_policy_step
from distill.trainer import Trainer, TrainerOptions, sum_terms
from distill.types import Audit
from helpers import INFO, make_policy, make_rollout, random_rollouts
from teachers.local import LocalTeacher
from teachers.views import Plain


def gradients(rollouts, objective, correction="none", **options):
    """One step with a learning rate of 0: its report and the gradient that it took."""
    policy = make_policy()
    kept = {}
    trainer = Trainer(policy, TrainerOptions(num_steps=1, lr=0.0, grad_clip=0.0, **options))
    step = trainer.optimizer.step

    def keep_then_step():
        kept.update({n: p.grad.clone() for n, p in policy.trainable().items()})
        return step()

    def judge(rows, scores):
        return [Audit(starts=(0,), votes=(1.5,), length=min(2, r.num_trained)) for r in rows]

    trainer.optimizer.step = keep_then_step
    parts = Parts(
        tasks=lambda step: [],
        rows=lambda tasks, step: rollouts,
        policy=policy,
        objective=objective,
        trainer=trainer,
        teacher=_other(1),
        view=Plain(),
        reference=_other(2),
        audit=judge if "text" in objective.needs else None,
        correction=Correction(level=correction, cap=1.5),
    )
    return on_policy_step(parts, 1).update, kept


def _other(seed):
    return LocalTeacher(
        Policy(make_policy(seed=seed).model, base="t", trainable=False), name=f"t{seed}"
    )


CASES = [
    SFT(),
    SFT(aggregate="sequence"),
    OPD(),
    OPD(discount=0.5),
    OPD(support="top_k", k=4),
    OPD(support="top_k", k=4, chosen_by="teacher"),
    GKD(beta=1.0),
    GKD(beta=0.5, aggregate="trajectory"),
    GKD(beta=0.0, support="top_k", k=5, chosen_by="union"),
    GKD(beta=0.0, support="top_k", k=5, chosen_by="teacher"),
    GKD(support="sampled"),
    GOPD(),
    PowerOPD(),
    OPSD(),
    SDFT(),
    SDPO(k=5),
    SDPO(hybrid_lambda=0.9),
    RLSD(),
    AntiSD(),
    OPSA(),
    OPSA(scope="batch"),
    OmniOPD(num_chunks=1, chunk_length=2),
    GRPO(),
    GRPO(kl_coefficient=0.1, clip_dual=3.0),
    DrGRPO(),
    DAPO(refill_rounds=0),
    GRPO(stat_scope="trajectories", credit="gigpo"),
    GRPO(stat_scope="trajectories", credit="g2po", credit_std=False, lone_group="raw"),
    SEED(skill_coefficient=0.5),
    SEED(skill_coefficient=0.5, gate="signed", over="all", failed_only=True),
    SEED(skill_coefficient=0.5, gate="centered", credit="gigpo", aggregate="trajectory"),
    OPID(),
    OPID(w_episode=0.5, allow_large_weights=True, normalize=True, over="skilled", credit="g2po"),
    OPID(auxiliary="importance", auxiliary_coefficient=0.1, aggregate="sequence"),
    Surprise(),
    Sum(parts=((GRPO(), 1.0), (GKD(), 0.3), (SFT(), 0.5))),
]


def _name(objective):
    return f"{objective.name}-{CASES.index(objective)}"


def _rows(objective):
    if objective.name == "sft":
        return random_rollouts(8, worked=True)
    if "sft" in objective.name:
        return random_rollouts(6) + [
            replace(r, group_id=f"w{r.traj_id}", traj_id=f"w{r.traj_id}")
            for r in random_rollouts(2, seed=9, worked=True)
        ]
    if "turns" in objective.needs:
        return turn_rollouts()
    return random_rollouts(8)


def turn_rollouts():
    """Five trajectories of two or three turns, one row each, in two groups: states are shared, one
    action could not be read, and the third trajectory fails."""
    paths = [("g0", "ab"), ("g0", "abc"), ("g0", "ac"), ("g1", "ab"), ("g1", "aab")]
    rows = iter(random_rollouts(12, seed=3))
    out = []
    for number, (group, states) in enumerate(paths):
        for step, state in enumerate(states):
            last, invalid = step == len(states) - 1, (number, step) == (1, 1)
            earned = float(last and number not in (2, 4)) - 0.1 * invalid
            out.append(
                replace(
                    next(rows),
                    group_id=group,
                    traj_id=f"r{number}",
                    step=step,
                    num_steps=len(states),
                    reward=float(number not in (2, 4)),
                    return_=float(number not in (2, 4)) - 0.1 * (number == 1),
                    step_reward=earned,
                    action_valid=not invalid,
                    obs_key=state,
                )
            )
    return out


def test_every_objective_of_the_table_is_among_the_cases():
    # A teacher with another tokenizer needs other rows: tests/contract/test_cross_tokenizer.py.
    assert {o.name for o in CASES} >= set(OBJECTIVES) - {"gold"}


@pytest.mark.parametrize("objective", CASES, ids=_name)
@pytest.mark.parametrize("tokens", [1, 40])
def test_micro_batches_change_neither_loss_nor_gradient(objective, tokens):
    rollouts = _rows(objective)
    whole, expected = gradients(rollouts, objective)
    split, found = gradients(rollouts, objective, micro_batch_tokens=tokens)
    assert split.loss == pytest.approx(whole.loss, abs=1e-5)
    assert split.metrics == pytest.approx(whole.metrics, abs=1e-4)
    assert any(bool(grad.any()) for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_micro_batches_change_nothing_under_a_correction_either(level):
    rows = [
        replace(r, logprobs=tuple(-0.9 if m else 0.0 for m in r.completion_mask))
        for r in random_rollouts(8)
    ]
    for objective in (OPD(), GKD()):
        whole, expected = gradients(rows, objective, level)
        split, found = gradients(rows, objective, level, micro_batch_tokens=20)
        assert 0.0 < whole.metrics["correction/effective_share"] < 1.0
        assert split.metrics == pytest.approx(whole.metrics, abs=1e-4)
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("objective", CASES, ids=_name)
def test_the_order_of_the_rows_changes_nothing(objective):
    rollouts = _rows(objective)
    whole, expected = gradients(rollouts, objective)
    turned, found = gradients(rollouts[::-1], objective)
    assert turned.loss == pytest.approx(whole.loss, abs=1e-5)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-5, rtol=1e-4)


def test_a_dense_step_equals_the_loop_over_single_rows():
    rollouts = random_rollouts(6, worked=True)
    policy = make_policy()
    total = sum(r.num_trained for r in rollouts)
    loss = 0.0
    for rollout in rollouts:
        batch = collate([rollout])
        loss -= float(policy.forward(batch, ForwardPlan()).logprobs.detach().sum()) / total
    report, _ = gradients(rollouts, SFT())
    assert report.loss == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("extra", [1, 7])
def test_more_padding_on_the_right_changes_nothing(extra):
    policy, batch = make_policy(), collate(random_rollouts())
    wide = _padded(batch, 0, extra)
    ours = policy.forward(batch, ForwardPlan(entropy=True))
    theirs = policy.forward(wide, ForwardPlan(entropy=True))
    width = batch.input_ids.shape[1]
    torch.testing.assert_close(theirs.logprobs[:, :width], ours.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs.entropy[:, :width], ours.entropy, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("extra", [1, 5])
def test_padding_on_the_left_changes_nothing(extra):
    policy, batch = make_policy(), collate(random_rollouts())
    shifted = _padded(batch, extra, 0)
    ours = policy.forward(batch, ForwardPlan()).logprobs
    theirs = policy.forward(shifted, ForwardPlan()).logprobs
    torch.testing.assert_close(theirs[:, extra:], ours, atol=1e-5, rtol=1e-5)


def test_the_eos_token_is_trained_even_when_it_is_the_padding_token():
    rollout = make_rollout([5, 6], [7, 0])
    batch = collate([rollout, make_rollout([5, 6], [7, 8, 9, 0])], pad_id=0)
    assert batch.num_tokens == 6
    assert batch.labels[0].tolist() == [-100, -100, 7, 0, -100, -100]


def test_only_the_sampled_tokens_of_several_turns_are_trained():
    rollout = make_rollout([5, 6], [7, 8, 9, 10])
    mask = (False, False, True, False, False, True)  # an observation between two replies
    batch = collate([replace(rollout, completion_mask=mask)])
    policy = make_policy()
    view = policy.forward(batch, ForwardPlan())
    assert (view.logprobs[0] != 0).tolist() == list(mask)


def test_infinite_values_outside_the_mask_do_not_reach_the_loss():
    per_token = torch.tensor([[float("inf"), 1.0, float("nan")]], requires_grad=True)
    term = Term(name="x", per_token=per_token, weights=torch.tensor([[0.0, 2.0, 0.0]]))
    loss = sum_terms((term,), lambda name, kind: 4.0)
    loss.backward()
    assert float(loss.detach()) == 0.5
    assert per_token.grad.tolist() == [[0.0, 0.5, 0.0]]


def test_micro_batches_hold_every_trained_row_once_and_leave_out_empty_ones():
    rollouts = random_rollouts(7)
    empty = (False,) * len(rollouts[3].token_ids)
    rollouts[3] = replace(rollouts[3], completion_mask=empty)
    batch = with_weights(collate(rollouts), "x", "token")
    parts = list(micro_batches(batch, 30))
    assert sum(p.num_rows for p in parts) == 6
    assert sum(p.num_tokens for p in parts) == batch.num_tokens
    flat = torch.cat([p.flat_rows() for p in parts]).sort().values
    assert flat.tolist() == list(range(batch.num_tokens))
    for part in parts:
        assert part.num_rows == 1 or part.input_ids.numel() <= 30


@pytest.mark.parametrize("objective", CASES, ids=_name)
def test_a_batch_without_a_trained_token_costs_nothing_and_moves_nothing(objective):
    rollout = replace(make_rollout([5], [6]), completion_mask=(False, False))
    policy = make_policy()
    trainer = Trainer(policy, TrainerOptions(num_steps=1, lr=0.1))
    before = {n: p.detach().clone() for n, p in policy.trainable().items()}
    report = trainer.update(collate([rollout]), objective, INFO)
    assert (report.loss, report.grad_norm, report.num_tokens) == (0.0, 0.0, 0)
    assert all(bool((before[n] == p).all()) for n, p in policy.trainable().items())


def test_several_updates_per_batch_use_the_log_probabilities_from_before_the_first():
    rollouts = random_rollouts(8)
    policy = make_policy()
    trainer = Trainer(policy, TrainerOptions(num_steps=1, lr=0.01, epochs=2, minibatches=2))
    batch = collate(rollouts)
    behaviour = token_scores(
        policy.score([own_view(r) for r in rollouts]), batch.completion_mask, "b"
    )
    batch = replace(batch, behaviour_logprobs=behaviour.logprobs)
    report = trainer.update(batch, GRPO(clip_low=0.01, clip_high=0.01), INFO)
    assert report.metrics["grpo/clipped_share"] > 0  # only possible once the policy has moved


def _padded(batch, left, right):
    def pad(x, value=0):
        return torch.nn.functional.pad(x, (left, right), value=value)

    return replace(
        batch,
        input_ids=pad(batch.input_ids),
        attention_mask=pad(batch.attention_mask),
        completion_mask=pad(batch.completion_mask),
        sampler_logprobs=pad(batch.sampler_logprobs),
    )
