"""One accelerator: steps of every objective, scores and a sample there agree with the CPU. Run by
`make gpu`."""

from __future__ import annotations

import pytest
import torch

from distill.asking import own_view
from distill.engines.hf import HFEngine
from distill.objectives import OBJECTIVES, OmniOPD
from distill.parts import Parts
from distill.policy import Policy
from distill.step import on_policy_step
from distill.trainer import Trainer, TrainerOptions
from distill.types import Audit, Sampling
from helpers import make_chat, make_model, random_rollouts
from teachers.local import LocalTeacher
from teachers.views import Plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def frozen(device, seed):
    model = make_model(seed).to(device)
    return LocalTeacher(Policy(model, base="t", trainable=False), name=f"t{seed}")


def step(device, name):
    options = {"k": 5} if name == "sdpo" else {}
    objective = OBJECTIVES[name](**options)
    policy = Policy(make_model(0).to(device), base="s")
    rollouts = random_rollouts(worked=name == "sft")

    def judge(rows, scores):
        return [Audit(starts=(0,), votes=(1.5,), length=min(2, r.num_trained)) for r in rows]

    parts = Parts(
        tasks=lambda step: [],
        rows=lambda tasks, step: rollouts,
        policy=policy,
        objective=objective,
        trainer=Trainer(policy, TrainerOptions(num_steps=1, lr=1e-3)),
        teacher=frozen(device, 1),
        view=Plain(),
        reference=frozen(device, 2),
        audit=judge if isinstance(objective, OmniOPD) else None,
    )
    update = on_policy_step(parts, 1).update
    return update.loss, update.grad_norm


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_of_every_objective_agrees_with_the_cpu(name):
    cpu, gpu = step("cpu", name), step("cuda", name)
    assert gpu[0] == pytest.approx(cpu[0], rel=1e-3, abs=1e-5)
    assert gpu[1] == pytest.approx(cpu[1], rel=1e-2, abs=1e-5)


def test_scores_and_a_greedy_sample_agree_with_the_cpu():
    found = []
    for device in ("cpu", "cuda"):
        policy = Policy(make_model(0).to(device), base="s")
        scores = policy.score([own_view(r) for r in random_rollouts()])
        sampling = Sampling(temperature=0.0, max_new_tokens=8, stop_token_ids=(1,))
        ((sample,),) = HFEngine(policy, pad_id=make_chat().pad_id).generate([(5, 6, 7)], sampling)
        found.append((torch.tensor([x for s in scores for x in s.logprobs]), sample.token_ids))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-3, rtol=1e-3)
    assert found[1][1] == found[0][1]


def test_a_choice_among_replies_agrees_with_the_cpu():
    allowed = (((5, 1), (9, 8, 7, 1), (6, 6, 1)), ())
    found = []
    for device in ("cpu", "cuda"):
        policy = Policy(make_model(0).to(device), base="s")
        sampling = Sampling(temperature=0.0, max_new_tokens=4, stop_token_ids=(1,), choices=allowed)
        groups = HFEngine(policy, pad_id=0).generate([(5, 6, 7), (8, 9)], sampling)
        found.append(groups)
    for cpu, gpu in zip(*found, strict=True):
        assert gpu[0].token_ids == cpu[0].token_ids
        assert gpu[0].logprobs == pytest.approx(cpu[0].logprobs, abs=1e-3)
