"""Trains tiny models by given scenarios, in one process or in those that torchrun started.

    torchrun --standalone --nproc-per-node 2 tests/parallel_worker.py SCENARIOS.json

SCENARIOS.json holds {"out": folder, "scenarios": {name: options of `Scenario`}}. The first process
writes `NAME.json` (losses, norms, metrics) and `NAME.safetensors` (gradients, weights, scores).
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from distill import logprobs, parallel
from distill.asking import own_view
from distill.checkpoint import Progress, load_newest, save_checkpoint
from distill.engines.hf import HFEngine
from distill.errors import AlignmentError
from distill.followers import FollowerSpec
from distill.models import new_adapter
from distill.objectives import OBJECTIVES
from distill.parts import Parts
from distill.policy import AdapterSpec, Policy
from distill.step import on_policy_step
from distill.trainer import Trainer, TrainerOptions
from distill.types import Sampling
from helpers import make_chat, make_model, random_rollouts
from teachers.local import LocalTeacher
from teachers.views import Plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What is trained, how long, and from and to which checkpoint folder."""

    kind: str = "full"
    dtype: str = "float32"
    tied: bool = True
    objective: str = "gkd"
    num_rows: int = 7
    first: int = 1
    last: int = 4
    grad_clip: float = 0.0
    micro_batch_tokens: int = 24
    chunk_rows: int = 3
    follower: str = "ema"
    teacher: str = "frozen"
    load: str | None = None
    save: str | None = None
    recompute: bool = False
    other_rows: bool = False
    """Each process makes rows of its own, which is a mistake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    numbers: list[dict[str, float]]
    tensors: dict[str, torch.Tensor]


@contextmanager
def chunks_of(rows: int):
    """A head pass in chunks of a few rows, as real sizes have it."""
    kept = logprobs.CHUNK_ELEMENTS
    logprobs.CHUNK_ELEMENTS = rows * 48
    try:
        yield
    finally:
        logprobs.CHUNK_ELEMENTS = kept


def make_student(scenario: Scenario, group: parallel.Group) -> Policy:
    model = make_model(0, tie_embeddings=scenario.tied).to(getattr(torch, scenario.dtype))
    if scenario.kind == "adapter":
        model = new_adapter(model, AdapterSpec(rank=4, alpha=8), seed=0)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():  # a fresh adapter changes nothing
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    policy = Policy(model.to(place(group)), base="s", kind=scenario.kind, max_tokens=40)
    policy.shard(group)
    return policy


def place(group: parallel.Group) -> str:
    return "cpu" if group.is_alone else str(group.mesh.device_type)


def make_teacher(scenario: Scenario, policy: Policy) -> LocalTeacher:
    if scenario.teacher == "frozen":
        model = make_model(1).to(policy.device, getattr(torch, scenario.dtype))
        return LocalTeacher(Policy(model, base="t", trainable=False), name="t")
    if scenario.teacher == "base":
        policy.keep_start()
    return LocalTeacher(policy, role=scenario.teacher, name="self")


def run(scenario: Scenario, group: parallel.Group) -> Found:
    policy = make_student(scenario, group)
    options = TrainerOptions(
        num_steps=4,
        lr=1e-3,
        warmup_steps=1,
        grad_clip=scenario.grad_clip,
        micro_batch_tokens=scenario.micro_batch_tokens,
        gradient_checkpointing=scenario.recompute,
    )
    trainer = Trainer(policy, options)
    if scenario.follower:
        policy.add_follower(FollowerSpec(name=scenario.follower, rate=0.3, every=2))
    teacher = make_teacher(scenario, policy)
    if scenario.teacher != "frozen":
        with torch.no_grad():  # where student and teacher agree, a gradient is noise alone
            for p in policy.trainable().values():
                p.mul_(1.2)
    if scenario.load:
        progress = load_newest(Path(scenario.load), policy, trainer)
        assert progress.step == scenario.first - 1, progress
    tensors: dict[str, torch.Tensor] = {}

    def keep_gradients(optimizer, args, kwargs):
        step = len(numbers) + scenario.first
        for name, p in trainer.optimizer.stepped.items():
            tensors[f"gradient{step}/{name}"] = parallel.whole(p.grad).clone()

    trainer.optimizer.register_step_pre_hook(keep_gradients)

    def rows(tasks, step):
        seed = 10 * step + (group.rank if scenario.other_rows else 0)
        return random_rollouts(scenario.num_rows, seed=seed, worked=scenario.objective == "sft")

    options = {"k": 5} if scenario.objective == "sdpo" else {}
    objective = OBJECTIVES[scenario.objective](**options)
    parts = Parts(
        tasks=lambda step: [],
        rows=rows,
        policy=policy,
        objective=objective,
        trainer=trainer,
        teacher=teacher,
        view=Plain(),
        reference=teacher,
    )
    numbers: list[dict[str, float]] = []
    with chunks_of(scenario.chunk_rows):
        for step in range(scenario.first, scenario.last + 1):
            try:
                update = on_policy_step(parts, step).update
            except AlignmentError as error:
                return Found(numbers=[{str(error): 1.0}], tensors={})
            numbers.append({"loss": update.loss, "grad_norm": update.grad_norm, **update.metrics})
        _after(policy, scenario, tensors)
    if scenario.save:
        at = Progress(step=scenario.last, policy_version=scenario.last)
        save_checkpoint(Path(scenario.save), policy, trainer, make_chat().tokenizer, at)
    return Found(numbers=numbers, tensors=tensors)


def _after(policy: Policy, scenario: Scenario, tensors: dict[str, torch.Tensor]) -> None:
    """Weights, scores of every role, and replies."""
    for name, p in policy.trainable().items():
        tensors[f"weight/{name}"] = parallel.whole(p.detach()).clone()
    views = [own_view(r) for r in random_rollouts(9, seed=99)]
    for role in ["student", *([scenario.follower] if scenario.follower else [])]:
        scores = policy.score(views, role)
        tensors[f"scores/{role}"] = torch.tensor([x for s in scores for x in s.logprobs])
    sampling = Sampling(temperature=0.0, max_new_tokens=6, stop_token_ids=(1,))
    groups = HFEngine(policy, pad_id=0).generate([(5, 6, 7), (8, 9), (4,)], sampling)
    replies = [list(c.token_ids) + [0] * (6 - len(c.token_ids)) for (c,) in groups]
    tensors["replies/"] = torch.tensor(replies)


def main() -> None:
    faulthandler.dump_traceback_later(60, exit=True)  # a call that not all make would wait for ever
    asked = json.loads(Path(sys.argv[1]).read_text())
    group = parallel.init_from_env(asked.get("device", "cpu"), even_one=True)
    out = Path(asked["out"])
    for name, options in asked["scenarios"].items():
        found = run(Scenario(**options), group)
        if group.is_first:
            (out / f"{name}.json").write_text(json.dumps(found.numbers))
            cpu = {key: t.cpu().contiguous() for key, t in found.tensors.items()}
            save_file(cpu, str(out / f"{name}.safetensors"))
    group.barrier()
    parallel.destroy()


# -- for the tests that start it ---------------------------------------------------------------


def torchrun(path: Path, *, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run the worker on a file of scenarios in several processes."""
    here = Path(__file__).resolve()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    places = f"{here.parent.parent}{os.pathsep}{here.parent}"
    return subprocess.run(
        [*launcher, "--nproc-per-node", str(processes), str(here), str(path)],
        env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the first of several processes wrote about a scenario."""

    numbers: list[dict[str, float]]
    tensors: dict[str, torch.Tensor]


def outcome(folder: Path, name: str) -> Outcome:
    numbers = json.loads((folder / f"{name}.json").read_text())
    return Outcome(numbers=numbers, tensors=load_file(str(folder / f"{name}.safetensors")))


def gaps(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest difference by what stands before the first slash of a name."""
    assert set(ours) == set(theirs)
    found: dict[str, float] = {}
    for name, tensor in ours.items():
        kind = name.split("/")[0]
        gap = float((tensor.double() - theirs[name].double()).abs().max())
        found[kind] = max(gap, found.get(kind, 0.0))
    return found


if __name__ == "__main__":
    main()
