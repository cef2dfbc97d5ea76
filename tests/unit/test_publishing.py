"""Weights that are published for an engine, and the probe that proves their arrival."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distill.engines.fed import FedEngine
from distill.engines.hf import HFEngine
from distill.engines.publishing import Arrivals, Probe, publish, read_probe
from distill.engines.refreshed import RefreshedEngine, rest
from distill.errors import EngineError
from distill.followers import FollowerSpec
from distill.models import load_adapter, load_model, new_adapter
from distill.policy import AdapterSpec, Policy
from distill.types import CheckpointRef, Sampling, TeacherView
from helpers import make_chat, make_model, make_policy

CHAT = make_chat()


def adapter_policy() -> Policy:
    adapted = new_adapter(make_model(), AdapterSpec(rank=4), seed=3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return Policy(adapted, base="b", kind="adapter")


def live(policy: Policy, step: int) -> CheckpointRef:
    return CheckpointRef(
        path=Path("live"), step=step, policy_version=step, base="b", kind=policy.kind, digest="live"
    )


def reloaded(ref: CheckpointRef) -> Policy:
    """What another process makes of a published folder."""
    if ref.kind == "full":
        return Policy(load_model(str(ref.path)), base="b")
    return Policy(load_adapter(make_model(), ref.path), base="b", kind="adapter")


def logprobs_of(policy: Policy, rows) -> list[list[float]]:
    views = [
        TeacherView(token_ids=row, positions=tuple(range(1, len(row))), kind="own", id=str(i))
        for i, row in enumerate(rows)
    ]
    return [list(found.logprobs) for found in policy.score(views)]


@pytest.mark.parametrize("make", [make_policy, adapter_policy])
def test_a_published_folder_holds_the_weights_and_what_the_trainer_says_of_a_probe(make, tmp_path):
    policy = make()
    policy.temperature = 0.5  # the probe is at temperature 1 whatever the stage samples at
    ref = publish(policy, CHAT.tokenizer, tmp_path / "a", step=3, policy_version=3)
    assert policy.temperature == 0.5
    probe = read_probe(ref.path)
    assert probe is not None
    assert (ref.step, ref.policy_version, ref.kind) == (3, 3, policy.kind)
    found = logprobs_of(reloaded(ref), probe.token_ids)
    assert probe.require(found, tolerance=1e-6, engine="e") < 1e-6
    assert max(i for row in probe.token_ids for i in row) < len(CHAT.tokenizer)


def test_a_tied_head_is_stored_under_its_own_name_too(tmp_path):
    policy = make_policy()
    ref = publish(policy, CHAT.tokenizer, tmp_path / "a", step=0, policy_version=0)
    tensors = load_file(str(ref.path / "model.safetensors"))
    assert torch.equal(tensors["lm_head.weight"], policy.head().weight)


@pytest.mark.parametrize("make", [make_policy, adapter_policy])
def test_a_copy_is_published_instead_of_the_student_when_it_samples(make, tmp_path):
    policy = make()
    role = policy.add_follower(FollowerSpec(name="sampling"))
    before = publish(policy, CHAT.tokenizer, tmp_path / "a", step=0, policy_version=0, role=role)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.05)
    after = publish(policy, CHAT.tokenizer, tmp_path / "b", step=1, policy_version=1, role=role)
    moved = publish(policy, CHAT.tokenizer, tmp_path / "c", step=1, policy_version=1)
    assert before.digest == after.digest
    assert moved.digest != after.digest
    probe = read_probe(after.path)
    assert probe is not None
    probe.require(logprobs_of(reloaded(after), probe.token_ids), tolerance=1e-6, engine="e")
    with pytest.raises(EngineError, match="does not have the weights that were sent"):
        probe.require(logprobs_of(reloaded(moved), probe.token_ids), tolerance=1e-3, engine="e")


def test_what_an_engine_says_of_a_probe_is_refused_with_the_first_place_that_differs(tmp_path):
    policy = make_policy()
    probe = read_probe(
        publish(policy, CHAT.tokenizer, tmp_path / "a", step=0, policy_version=0).path
    )
    assert probe is not None
    right = [list(row) for row in probe.logprobs]
    wrong = [list(row) for row in right]
    wrong[1][4] -= 9.0
    with pytest.raises(EngineError, match=r"first at token 6 of probe 2, id \d+"):
        probe.require(wrong, tolerance=0.01, engine="the engine e")
    wrong[0][0] = math.nan
    with pytest.raises(EngineError, match="first at token 2 of probe 1"):
        probe.require(wrong, tolerance=0.01, engine="the engine e")
    with pytest.raises(EngineError, match="scored 10 of 11 tokens"):
        probe.require([right[0][:-1], right[1]], tolerance=0.01, engine="the engine e")


class FolderEngine:
    """An engine with weights of its own, read from the folder that it is given."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.policy_version = -1
        self.deaf = deaf
        self.engine: HFEngine | None = None

    def load(self, checkpoint: CheckpointRef) -> None:
        probe = read_probe(checkpoint.path)
        assert probe is not None
        if self.engine is None or not self.deaf:
            self.engine = HFEngine(reloaded(checkpoint), pad_id=CHAT.pad_id)
        found = logprobs_of(self.engine.policy, probe.token_ids)
        probe.require(found, tolerance=1e-4, engine="the engine folder")
        self.policy_version = checkpoint.policy_version

    def generate(self, prompts, sampling):
        assert self.engine is not None
        return self.engine.generate(prompts, sampling)

    def close(self) -> None:
        self.engine = None


@pytest.mark.parametrize("make", [make_policy, adapter_policy])
def test_a_fed_engine_samples_what_the_student_would(make, tmp_path):
    policy, behind = make(), FolderEngine()
    fed = FedEngine(policy, CHAT.tokenizer, tmp_path / "p", start=lambda ref: behind)
    prompts = [CHAT.encode(["abc"])[0], CHAT.encode(["b"])[0]]
    asked = Sampling(
        num_samples=3, max_new_tokens=5, stop_token_ids=CHAT.stop_token_ids, keys=("x", "y")
    )
    for step in (0, 1):
        fed.load(live(policy, step))
        assert fed.policy_version == behind.policy_version == step
        ours = HFEngine(policy, pad_id=CHAT.pad_id).generate(prompts, asked)
        theirs = fed.generate(prompts, asked)
        assert [[c.token_ids for c in group] for group in theirs] == [
            [c.token_ids for c in group] for group in ours
        ]
        assert [p.name for p in (tmp_path / "p").iterdir()] == [f"{step:06d}"]
        with torch.no_grad():
            for parameter in policy.trainable().values():
                parameter.mul_(1.5)
    fed.close()
    assert not (tmp_path / "p").exists()


def test_an_engine_that_keeps_its_old_weights_is_found_out_before_it_samples(tmp_path):
    policy, behind = make_policy(), FolderEngine(deaf=True)
    fed = FedEngine(policy, CHAT.tokenizer, tmp_path / "p", start=lambda ref: behind)
    fed.load(live(policy, 0))
    with torch.no_grad():
        policy.head().weight.mul_(1.5)
    with pytest.raises(EngineError, match="does not have the weights that were sent"):
        fed.load(replace(live(policy, 1)))
    assert fed.policy_version == 0


def test_an_update_far_below_the_tolerance_that_never_arrived_is_found_out(tmp_path):
    policy = make_policy()

    def probe(version: int) -> Probe:
        ref = publish(policy, CHAT.tokenizer, tmp_path / "a", step=0, policy_version=version)
        found = read_probe(ref.path)
        assert found is not None
        return found

    first = probe(0)
    with torch.no_grad():
        policy.head().weight.mul_(1.0005)
    second = probe(1)
    old, new = [list(map(list, p.logprobs)) for p in (first, second)]
    deaf = Arrivals()
    deaf.require(first, old, tolerance=0.02, engine="e")
    with pytest.raises(EngineError, match="answers as it did before the weights were sent"):
        deaf.require(second, old, tolerance=0.02, engine="e")
    working = Arrivals()
    working.require(first, old, tolerance=0.02, engine="e")
    assert working.require(second, new, tolerance=0.02, engine="e") < 1e-6
    # The same weights again, and a change too small to be told from rounding, say nothing.
    assert working.require(second, new, tolerance=0.02, engine="e") < 1e-6
    with torch.no_grad():
        policy.head().weight.mul_(1.0000001)
    assert working.require(probe(2), new, tolerance=0.02, engine="e") < 1e-4


class Sleeper(FolderEngine):
    """Says what it was told, and works only while it is awake."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.awake = True

    def sleep(self) -> None:
        self.told.append("sleep")
        self.awake = False

    def wake(self) -> None:
        if not self.awake:
            self.told.append("wake")
        self.awake = True

    def load(self, checkpoint):
        assert self.awake
        super().load(checkpoint)

    def generate(self, prompts, sampling):
        assert self.awake
        return super().generate(prompts, sampling)


def test_an_engine_that_sleeps_does_so_between_the_replies_and_the_next_weights(tmp_path):
    policy, behind = make_policy(), Sleeper()
    fed = FedEngine(policy, CHAT.tokenizer, tmp_path / "p", start=lambda ref: behind, sleeps=True)
    copied = RefreshedEngine(policy, make=lambda role: fed, is_due=lambda step: True)
    asked = Sampling(num_samples=1, max_new_tokens=2, keys=("x",))
    for step in (0, 1):
        copied.load(live(policy, step))
        copied.generate([(5, 6)], asked)
        copied.generate([(5, 6)], asked)  # a second turn wakes nobody
        rest(copied)
    copied.close()
    assert behind.told == ["sleep", "wake", "sleep", "sleep"]
    rest(HFEngine(policy))  # has nothing to give back
