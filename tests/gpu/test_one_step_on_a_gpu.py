"""One accelerator: a step, a score and a sample there agree with the CPU. Run by `make gpu`."""

from __future__ import annotations

import pytest
import torch

from distill.batch import collate
from distill.engines.hf import HFEngine
from distill.objectives import GKD
from distill.policy import Policy
from distill.step import _own_views
from distill.trainer import Trainer, TrainerOptions
from distill.types import Sampling
from helpers import INFO, make_chat, make_model, random_rollouts
from teachers.local import LocalTeacher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def run(device: str) -> tuple[float, float, list[float], tuple[int, ...]]:
    student = Policy(make_model(0).to(device), base="s")
    teacher = LocalTeacher(Policy(make_model(1).to(device), base="t", trainable=False), name="t")
    rollouts = random_rollouts()
    views = _own_views(rollouts)
    batch = collate(rollouts, {"teacher": teacher.distribution(views)})
    trainer = Trainer(student, TrainerOptions(num_steps=1, lr=1e-3))
    report = trainer.update(batch, GKD(), INFO)
    scores = [x for s in student.score(views) for x in s.logprobs]
    engine = HFEngine(student, pad_id=make_chat().pad_id)
    ((sample,),) = engine.generate(
        [(5, 6, 7)], Sampling(temperature=0.0, max_new_tokens=8, stop_token_ids=(1,))
    )
    return report.loss, report.grad_norm, scores, sample.token_ids


def test_a_step_a_score_and_a_sample_agree_with_the_cpu():
    cpu, gpu = run("cpu"), run("cuda")
    assert gpu[0] == pytest.approx(cpu[0], rel=1e-4)
    assert gpu[1] == pytest.approx(cpu[1], rel=1e-3)
    torch.testing.assert_close(torch.tensor(gpu[2]), torch.tensor(cpu[2]), atol=1e-3, rtol=1e-3)
    assert gpu[3] == cpu[3]
