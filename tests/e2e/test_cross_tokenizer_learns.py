"""A student that writes characters learns from a teacher that writes pairs of them."""

from __future__ import annotations

import copy
from statistics import mean

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from distill.curriculum.samplers import TaskSampler
from distill.engines.hf import HFEngine
from distill.errors import ConfigError
from distill.models import build_model, char_tokenizer
from distill.objectives import SFT, Gold
from distill.policy import Policy
from distill.rollout import collect
from distill.sections import ModelBuild
from distill.step import Parts, on_policy_step
from distill.tokens import Chat, require_same_tokenizer
from distill.trainer import Trainer, TrainerOptions
from distill.types import Sampling
from distill.worked import demonstrate
from evals.envs import build_env
from evals.envs.world import ALPHABET
from teachers.cross_tokenizer import CrossTokenizerTeacher
from teachers.views import Plain

ENV = build_env("world", {"domains": ["sort"], "sort_length": [3, 3]}, seed=0)
TASKS = ENV.tasks("train")
MEASURED = [TASKS[i] for i in range(128)]
OURS = Chat(char_tokenizer(ALPHABET), max_length=32)
BUILD = ModelBuild(initializer_range=0.04)


def pairs_of_characters():
    """Byte-level BPE with the eight most frequent pairs of sorted digits."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 2 + 8,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=2,
        show_progress=False,
    )
    core.train_from_iterator([TASKS[i].meta["solution"] for i in range(1000)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}>",
    )


THEIRS = Chat(pairs_of_characters(), max_length=64)


def options(steps, lr):
    return TrainerOptions(
        num_steps=steps, lr=lr, warmup_steps=10, schedule="linear", min_lr_ratio=0.1
    )


def worked(chat, seed, steps):
    """A model that learned from solutions, written in its own tokens."""
    policy = Policy(build_model(BUILD, chat.tokenizer, seed=seed), base="world")
    parts = Parts(
        tasks=TaskSampler(TASKS, batch=48, key="sft"),
        rows=lambda tasks, step: demonstrate(tasks, chat, key=str(step)),
        policy=policy,
        objective=SFT(),
        trainer=Trainer(policy, options(steps, 3e-3)),
        num_steps=steps,
    )
    for step in range(1, steps + 1):
        on_policy_step(parts, step)
    return policy


class Shown:
    """Finds the task that the teacher is shown: the student's own, or another one of its step."""

    def __init__(self, *, shuffled=False):
        self.shuffled = shuffled
        self.found = {}

    def see(self, tasks):
        shown = [*tasks[1:], tasks[0]] if self.shuffled else tasks
        self.found |= {mine.id: other for mine, other in zip(tasks, shown, strict=True)}

    def __call__(self, name):
        return self.found[name]


def cross(teacher, student, shown):
    return CrossTokenizerTeacher(
        teacher,
        THEIRS,
        name="pairs",
        student=OURS,
        num_ids=student.head().vocab_size,
        task_of=shown,
    )


def distil(student, teacher, steps, *, shuffled):
    """The student after some steps, and the losses on the way."""
    policy, shown = copy.deepcopy(student), Shown(shuffled=shuffled)
    engine = HFEngine(policy, pad_id=OURS.pad_id)

    def rows(tasks, step):
        shown.see(tasks)
        return collect(tasks, ENV, engine, OURS, Sampling(max_new_tokens=8), key=str(step))

    parts = Parts(
        tasks=TaskSampler(TASKS, batch=48, key="opd"),
        rows=rows,
        policy=policy,
        objective=Gold(),
        trainer=Trainer(policy, options(steps, 2e-3)),
        engine=engine,
        teacher=cross(teacher, policy, shown),
        view=Plain(),
        num_steps=steps,
        pad_id=OURS.pad_id,
    )
    return policy, [on_policy_step(parts, step).update.loss for step in range(1, steps + 1)]


def judged(policy, teacher):
    """Of fresh samples: the teacher's log-probability per byte, and how many are right."""
    shown, engine = Shown(), HFEngine(policy, pad_id=OURS.pad_id)
    shown.see(MEASURED)
    rows = collect(MEASURED, ENV, engine, OURS, Sampling(max_new_tokens=8), key="measure")
    found = cross(teacher, policy, shown).score_groups(rows)
    total = sum(sum(scores.logprobs) for scores in found)
    size = sum(b - a for scores in found for a, b in scores.student_spans)
    return total / size, sum(r.reward for r in rows) / len(rows)


def test_the_student_moves_to_a_teacher_with_other_tokens_and_not_to_a_shuffled_one():
    with pytest.raises(ConfigError, match="has another tokenizer"):
        require_same_tokenizer(OURS.tokenizer, THEIRS.tokenizer, "pairs")
    assert any(len(ids) < 3 for ids in THEIRS.encode([t.meta["solution"] for t in MEASURED]))
    teacher, student = worked(THEIRS, 0, 180), worked(OURS, 1, 45)
    teacher.model.requires_grad_(False)
    before, right = judged(student, teacher)

    taught, losses = distil(student, teacher, 50, shuffled=False)
    after, more_right = judged(taught, teacher)
    assert mean(losses[-10:]) < 0.95 * mean(losses[:10])
    assert after > before + 1.0
    assert more_right > right + 0.1

    misled, losses = distil(student, teacher, 50, shuffled=True)
    after, less_right = judged(misled, teacher)
    assert mean(losses[-10:]) > 0.98 * mean(losses[:10])
    assert after < before
    assert less_right < right
