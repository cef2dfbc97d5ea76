"""The optimizer of a stage: float32 master weights, an offload to the CPU, and their state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distill import optimizers
from distill.batch import collate
from distill.checkpoint import Progress, load_newest, save_checkpoint
from distill.errors import CheckpointError, ConfigError, DistillError
from distill.models import new_adapter
from distill.objectives import SFT
from distill.policy import AdapterSpec, Policy
from distill.trainer import Trainer, TrainerOptions
from distill.types import StepInfo
from helpers import make_chat, make_model, random_rollouts

RATES = {"betas": (0.9, 0.98), "weight_decay": 0.0}


def half_policy():
    return Policy(make_model().to(torch.bfloat16), base="half")


def train(policy, steps, trainer=None, **options):
    """Steps on worked solutions; the trainer that made them."""
    if trainer is None:
        trainer = Trainer(policy, TrainerOptions(num_steps=6, lr=1e-3, warmup_steps=1, **options))
    for step in steps:
        batch = collate(random_rollouts(seed=step, worked=True))
        trainer.update(batch, SFT(), StepInfo(stage="s", step=step, num_steps=6, seed=0))
    return trainer


def weights(policy):
    return {name: p.detach().clone() for name, p in policy.trainable().items()}


def assert_equal(ours, theirs):
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("master_weights", [True, False])
def test_two_hundred_updates_that_half_precision_rounds_away_move_master_weights(master_weights):
    parameter = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = optimizers.build_optimizer(
        {"w": parameter}, lr=5e-5, master_weights=master_weights, **RATES
    )
    for _ in range(200):
        parameter.grad = torch.ones_like(parameter)
        optimizer.collect()
        optimizer.step()
        optimizer.zero_grad()
    moved = 1.0 - float(parameter.detach().float().mean())
    if master_weights:
        assert moved == pytest.approx(200 * 5e-5, abs=2**-8)
        assert parameter.dtype == torch.bfloat16
    else:
        assert moved == 0.0


def test_gradients_of_half_precision_are_summed_in_float32():
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = optimizers.build_optimizer({"w": parameter}, lr=0.1, **RATES)
    for value in [1.0, *[2.0**-9] * 256]:
        parameter.grad = torch.full_like(parameter, value)
        optimizer.collect()
        assert parameter.grad is None
    assert optimizer.stepped["w"].grad.tolist() == [1.5] * 4
    optimizer.zero_grad()
    assert optimizer.stepped["w"].grad is None


def test_weights_in_float32_are_stepped_on_themselves():
    policy = Policy(make_model(), base="b")
    trainer = train(policy, [1])
    assert all(trainer.optimizer.stepped[n] is p for n, p in policy.trainable().items())
    assert not any(n.startswith("master/") for n in trainer.state_tensors())
    adapter = new_adapter(make_model().to(torch.bfloat16), AdapterSpec(rank=2), seed=0)
    policy = Policy(adapter, base="b", kind="adapter")
    assert all(trained.dtype == torch.float32 for trained in policy.trainable().values())
    assert not any(n.startswith("master/") for n in train(policy, [1]).state_tensors())


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_resumed_run_in_half_precision_ends_bit_identical(offload, tmp_path):
    whole, first, second = half_policy(), half_policy(), half_policy()
    expected = train(whole, range(1, 7), offload=offload)
    trainer = train(first, range(1, 4), offload=offload)
    save_checkpoint(tmp_path, first, trainer, make_chat().tokenizer, Progress(step=3))

    resumed = train(second, [], offload=offload)
    load_newest(tmp_path, second, resumed)
    assert_equal(weights(second), weights(first))
    train(second, range(4, 7), resumed)

    assert_equal(weights(second), weights(whole))
    assert_equal(resumed.state_tensors(), expected.state_tensors())
    masters = {n: t for n, t in resumed.state_tensors().items() if n.startswith("master/")}
    assert len(masters) == len(weights(second))
    assert all(t.dtype == torch.float32 for t in masters.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_on_the_cpu_gives_the_same_weights(dtype):
    here, there = (Policy(make_model().to(dtype), base="b") for _ in range(2))
    train(here, range(1, 5), micro_batch_tokens=30)
    trainer = train(there, range(1, 5), micro_batch_tokens=30, offload="optimizer")
    assert_equal(weights(here), weights(there))
    assert all(p.grad is None for p in there.trainable().values())
    assert all(p.device.type == "cpu" for p in trainer.optimizer.stepped.values())


def test_the_norm_of_a_gradient_in_half_precision_is_that_of_its_float32_sum():
    policy = half_policy()
    trainer = Trainer(policy, TrainerOptions(num_steps=1, lr=1e-3, grad_clip=0.5))
    seen = {}
    step = trainer.optimizer.step

    def look():
        seen.update({n: p.grad.clone() for n, p in trainer.optimizer.stepped.items()})
        return step()

    trainer.optimizer.step = look
    batch = collate(random_rollouts(worked=True))
    report = trainer.update(batch, SFT(), StepInfo(stage="s", step=1, num_steps=1, seed=0))
    norm = float(torch.stack([g.square().sum() for g in seen.values()]).sum().sqrt())
    assert report.grad_norm > 0.5
    assert norm == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("kept", [True, False])
def test_a_checkpoint_with_and_a_trainer_without_master_weights_do_not_fit(kept):
    saved = train(half_policy(), [1], master_weights=kept).state_tensors()
    trainer = train(half_policy(), [], master_weights=not kept)
    with pytest.raises(CheckpointError, match=r"trainer\.master_weights"):
        trainer.load_state_tensors(saved)


def test_the_state_of_another_model_is_refused():
    trainer = train(half_policy(), [])
    with pytest.raises(DistillError, match=r"another model"):
        trainer.load_state_tensors({"master/other.weight": torch.zeros(2)})


def test_an_offload_of_sharded_weights_is_refused():
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh))
        with pytest.raises(ConfigError, match="sharded"):
            optimizers.build_optimizer({"w": sharded}, lr=0.1, offload="optimizer", **RATES)
    finally:
        dist.destroy_process_group()
