"""On the generated world a student learns from its teacher, and from a shuffled one it does not."""

from __future__ import annotations

import copy

import pytest

from distill.curriculum.samplers import TaskSampler
from distill.engines.hf import HFEngine
from distill.models import build_model, char_tokenizer
from distill.objectives import GKD, SFT
from distill.policy import Policy
from distill.rollout import collect
from distill.sections import ModelBuild
from distill.step import Parts, on_policy_step
from distill.tokens import Chat
from distill.trainer import Trainer, TrainerOptions
from distill.types import Sampling
from distill.worked import demonstrate
from evals.envs import build_env
from evals.envs.world import ALPHABET
from teachers.local import LocalTeacher
from teachers.views import Plain, Shuffled

ENV = build_env("world", {"domains": ["sort"], "sort_length": [3, 4]}, seed=0)
CHAT = Chat(char_tokenizer(ALPHABET), max_length=32)
BUILD = ModelBuild(initializer_range=0.04)


def make(seed):
    return Policy(build_model(BUILD, CHAT.tokenizer, seed=seed), base="world")


def options(steps, lr):
    return TrainerOptions(
        num_steps=steps, lr=lr, warmup_steps=10, schedule="linear", min_lr_ratio=0.1
    )


def learn_from_solutions(policy, steps):
    parts = Parts(
        tasks=TaskSampler(ENV.tasks("train"), batch=64, key="sft"),
        rows=lambda tasks, step: demonstrate(tasks, CHAT, key=str(step)),
        policy=policy,
        objective=SFT(),
        trainer=Trainer(policy, options(steps, 3e-3)),
        num_steps=steps,
    )
    for step in range(1, steps + 1):
        on_policy_step(parts, step)


def distil(policy, teacher, view, steps):
    engine = HFEngine(policy, pad_id=CHAT.pad_id)
    sampling = Sampling(max_new_tokens=8)
    parts = Parts(
        tasks=TaskSampler(ENV.tasks("train"), batch=64, key="opd"),
        rows=lambda tasks, step: collect(tasks, ENV, engine, CHAT, sampling, key=str(step)),
        policy=policy,
        objective=GKD(beta=1.0),
        trainer=Trainer(policy, options(steps, 2e-3)),
        engine=engine,
        teacher=teacher,
        view=view,
        num_steps=steps,
        pad_id=CHAT.pad_id,
    )
    return [on_policy_step(parts, step).update.loss for step in range(1, steps + 1)]


def accuracy(policy):
    engine = HFEngine(policy, pad_id=CHAT.pad_id)
    greedy = Sampling(temperature=0.0, max_new_tokens=8)
    rows = collect(ENV.tasks("gate")[:256], ENV, engine, CHAT, greedy, key="eval")
    return sum(r.reward for r in rows) / len(rows)


@pytest.fixture(scope="module")
def pair():
    """A teacher that knows the task and a student that knows a little of it."""
    teacher, student = make(0), make(1)
    learn_from_solutions(teacher, 250)
    learn_from_solutions(student, 30)
    teacher.model.requires_grad_(False)
    return teacher, student, accuracy(teacher), accuracy(student)


def test_the_student_moves_to_its_teacher_and_not_to_a_shuffled_one(pair):
    teacher, student, ceiling, start = pair
    assert ceiling > 0.9, "the positive control: the teacher learned"
    assert start < 0.6, start

    taught = copy.deepcopy(student)
    losses = distil(taught, LocalTeacher(teacher, name="t"), Plain(), 60)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert accuracy(taught) > start + 0.2

    misled = copy.deepcopy(student)
    distil(misled, LocalTeacher(teacher, name="t"), Shuffled(), 60)
    assert accuracy(misled) <= start
