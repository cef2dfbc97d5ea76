"""Rollouts from a copy of the student that is renewed now and then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.ahead import Ahead
from distill.asking import own_view
from distill.checkpoint import Progress, load_newest, save_checkpoint
from distill.curriculum.samplers import Staged, TaskSampler
from distill.engines.hf import HFEngine
from distill.engines.refreshed import RefreshedEngine
from distill.models import new_adapter
from distill.objectives import GRPO
from distill.policy import AdapterSpec, Policy
from distill.rollout import collect
from distill.step import Parts, on_policy_step
from distill.trainer import Trainer, TrainerOptions
from distill.types import CheckpointRef, Message, Reward, Rollout, Sampling, Task, Turn
from helpers import make_chat, make_model, make_policy

CHAT = make_chat()
ASKED = Sampling(num_samples=2, max_new_tokens=4)


def adapter_policy() -> Policy:
    adapted = new_adapter(make_model(), AdapterSpec(rank=4), seed=3)
    return Policy(adapted, base="b", kind="adapter")


KINDS = pytest.mark.parametrize("make", [make_policy, adapter_policy], ids=["full", "adapter"])


class Episode:
    def reply(self, text: str) -> Turn:
        return Turn(done=True)

    def reward(self) -> Reward:
        return Reward(value=0.0)


class Env:
    name = "letters"

    def tasks(self, split: str) -> list[Task]:
        return [
            Task(
                id=f"t{i}",
                env="letters",
                domain="d",
                split="train",
                prompt=(Message(role="user", content="abcdefgh"[i]),),
                meta={"stage": i // 4},
            )
            for i in range(8)
        ]

    def start(self, task: Task) -> Episode:
        return Episode()


def live(policy: Policy, step: int) -> CheckpointRef:
    return CheckpointRef(
        path=Path("live"), step=step, policy_version=step, base="b", kind=policy.kind, digest="live"
    )


@dataclass
class Stage:
    """A stage in memory, its rollouts, and what the student weighed before each step."""

    policy: Policy
    every: int
    staged: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        policy, every = self.policy, self.every
        sampler = TaskSampler(
            Env().tasks("train"), batch=2, key="k", sampler=Staged() if self.staged else None
        )
        self.engine: Any = HFEngine(policy, pad_id=CHAT.pad_id)
        if every:
            self.engine = RefreshedEngine(
                policy,
                make=lambda role: HFEngine(policy, role=role, pad_id=CHAT.pad_id),
                is_due=lambda step: step % every == 0 or sampler.enters_stage(step + 1),
            )
        self.trainer = Trainer(policy, TrainerOptions(num_steps=8, lr=1e-2, warmup_steps=0))
        self.rollouts: dict[int, list[Rollout]] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.parts = Parts(
            tasks=sampler,
            rows=self.rows,
            policy=policy,
            objective=GRPO(),
            trainer=self.trainer,
            sampler=sampler,
            engine=self.engine,
            ahead=Ahead(lambda step: self.rows(sampler(step), step), num_steps=8)
            if self.overlap
            else None,
            publish=lambda step: live(policy, step),
            num_steps=8,
            pad_id=CHAT.pad_id,
        )

    def rows(self, tasks: Any, step: int) -> list[Rollout]:
        made = collect(tasks, Env(), self.engine, CHAT, ASKED, key=f"k/{step}")
        # Every reply earns something else, so that every step moves the student.
        made = [replace(r, reward=sum(r.token_ids) % 97 / 97, return_=None) for r in made]
        self.rollouts[step] = made
        return made

    def train(self, first: int, last: int) -> Stage:
        self.engine.load(live(self.policy, first - 1))
        for step in range(first, last + 1):
            self.weights[step] = self.copy_of_weights()
            on_policy_step(self.parts, step)
        return self

    def copy_of_weights(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.policy.trainable().items()}

    def equals(self, other: Stage) -> bool:
        mine, theirs = self.copy_of_weights(), other.copy_of_weights()
        return all(torch.equal(mine[name], theirs[name]) for name in mine)

    def gap(self, step: int, made_with: int) -> float:
        """Largest difference between the stored log-probabilities of a step's rollouts and those
        under the weights before another step."""
        kept = self.copy_of_weights()
        self.put(self.weights[made_with])
        rows = [r for r in self.rollouts[step] if r.num_trained]
        scores = self.policy.score([own_view(r) for r in rows])
        self.put(kept)
        return max(
            abs(own - stored)
            for row, found in zip(rows, scores, strict=True)
            for own, stored in zip(
                found.logprobs,
                [x for x, m in zip(row.logprobs, row.completion_mask, strict=True) if m],
                strict=True,
            )
        )

    def put(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.policy.trainable().items():
                parameter.copy_(weights[name])

    def versions(self) -> list[int]:
        return [rows[0].policy_version for rows in self.rollouts.values()]


@KINDS
def test_a_copy_that_is_renewed_after_every_step_changes_nothing(make):
    plain, copied = Stage(make(), 0).train(1, 4), Stage(make(), 1).train(1, 4)
    assert copied.rollouts == plain.rollouts
    assert copied.equals(plain)
    assert not copied.equals(Stage(make(), 3).train(1, 4)), "an older copy leads elsewhere"
    assert copied.versions() == [0, 1, 2, 3]


@KINDS
def test_rollouts_between_two_refreshes_come_from_the_older_weights(make):
    stage = Stage(make(), 3).train(1, 5)
    assert stage.versions() == [0, 0, 0, 3, 3]
    for step, made_with in ((2, 1), (3, 1), (4, 4), (5, 4)):
        assert stage.gap(step, made_with) < 1e-4
    for step in (2, 3, 5):
        assert stage.gap(step, step) > 1e-3, "the student has moved on"


def test_replies_sampled_ahead_come_from_the_weights_before_the_last_update():
    stage = Stage(make_policy(), 1, overlap=True).train(1, 5)
    assert stage.versions() == [0, 0, 1, 2, 3, 4], "the last ones are for a step that was not asked"
    for step in (2, 3, 4, 5):
        assert stage.gap(step, step - 1) < 1e-4
        assert stage.gap(step, step) > 1e-3, "the student has moved on"


def test_the_copy_is_renewed_when_the_curriculum_enters_a_further_stage():
    # 8 tasks in two stages of four, two per step: stages 0 0 1 1 0 0.
    stage = Stage(make_policy(), 100, staged=True).train(1, 6)
    assert stage.versions() == [0, 0, 2, 2, 4, 4]


@KINDS
@pytest.mark.parametrize("killed_after", [1, 4, 5])
def test_a_stage_that_is_resumed_between_two_refreshes_ends_the_same(make, killed_after, tmp_path):
    whole = Stage(make(), 3, staged=True).train(1, 7)
    first = Stage(make(), 3, staged=True).train(1, killed_after)
    save_checkpoint(
        tmp_path, first.policy, first.trainer, CHAT.tokenizer, Progress(step=killed_after)
    )
    second = Stage(make(), 3, staged=True)
    load_newest(tmp_path, second.policy, second.trainer)
    second.train(killed_after + 1, 7)
    assert {s: whole.rollouts[s] for s in second.rollouts} == second.rollouts
    assert second.versions() == whole.versions()[killed_after:]
    assert second.equals(whole)
