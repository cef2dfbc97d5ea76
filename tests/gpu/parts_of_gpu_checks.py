"""The checks of `run_all.py`: each returns figures, and promises with whether they hold."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distill.asking import own_view
from distill.devices import find_device
from distill.distributions import HiddenDistribution
from distill.divergence import DivergenceSpec
from distill.engines.hf import HFEngine
from distill.headpass import HeadPass, Wanted
from distill.logprobs import Head
from distill.models import build_model, char_tokenizer, new_adapter
from distill.objectives import OBJECTIVES
from distill.parts import Parts
from distill.policy import AdapterSpec, Policy
from distill.rollout import collect
from distill.sections import ModelBuild
from distill.step import on_policy_step
from distill.tokens import Chat
from distill.trainer import Trainer, TrainerOptions
from distill.types import CheckpointRef, Message, Reward, Sampling, Task, Turn
from teachers.local import LocalTeacher
from teachers.views import Plain

Result = tuple[dict[str, Any], dict[str, bool]]
ALPHABET = "\x00\x01\x02abcdefghijklmnopqrstuvwxyz0123456789 "


class Skip(Exception):
    """A check that this machine cannot run, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large everything is. Counts are tokens or units."""

    student: ModelBuild
    teacher: ModelBuild
    prompts: int
    samples: int
    reply: int
    loss_tokens: tuple[int, ...]
    loss_vocab: int
    loss_hidden: int


BIG = Sizes(
    # The shapes of Qwen3-0.6B and Qwen3-4B, with a vocabulary of a few letters.
    student=ModelBuild(
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        max_positions=2048,
    ),
    teacher=ModelBuild(
        hidden_size=2560,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=9728,
        max_positions=2048,
    ),
    prompts=32,
    samples=4,
    reply=256,
    loss_tokens=(1024, 8192),
    loss_vocab=128256,
    loss_hidden=4096,
)
SMALL = Sizes(
    student=ModelBuild(head_dim=32),
    teacher=ModelBuild(head_dim=32, hidden_size=128, num_layers=3, num_heads=4),
    prompts=4,
    samples=2,
    reply=16,
    loss_tokens=(64, 256),
    loss_vocab=4096,
    loss_hidden=64,
)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _make(build: ModelBuild, device: str, dtype: torch.dtype, seed: int = 0) -> Any:
    with torch.device("cpu"):
        model = build_model(build, char_tokenizer(ALPHABET), seed=seed)
    return model.to(device=device, dtype=dtype)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _timed(device: str, run: Callable[[], Any]) -> float:
    _wait(device)
    began = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - began


def _peak(device: str, run: Callable[[], Any]) -> int:
    """Extra bytes on the device at the worst moment; 0 on a CPU, where nothing counts them."""
    if device != "cuda":
        run()
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


class _Episode:
    def reply(self, text: str) -> Turn:
        return Turn(done=True)

    def reward(self) -> Reward:
        return Reward(value=0.0)


class _Env:
    name = "letters"

    def tasks(self, split: str) -> list[Task]:
        return []

    def start(self, task: Task) -> _Episode:
        return _Episode()


def _tasks(count: int) -> list[Task]:
    return [
        Task(
            id=f"t{i}",
            env="letters",
            domain="d",
            split="train",
            prompt=(Message(role="user", content=f"{i} abc {i} xyz"),),
        )
        for i in range(count)
    ]


def _chat() -> Chat:
    return Chat(char_tokenizer(ALPHABET), max_length=2048)


def half_precision(device: str, sizes: Sizes) -> Result:
    """Log-probabilities in bfloat16 against float32, and the chunked head against HF's logits."""
    full = Policy(_make(sizes.student, device, torch.float32), base="s")
    half = Policy(_make(sizes.student, device, torch.bfloat16), base="s")
    chat = _chat()
    engine = HFEngine(full, pad_id=chat.pad_id)
    sampling = Sampling(num_samples=1, max_new_tokens=sizes.reply)
    rows = collect(_tasks(sizes.prompts), _Env(), engine, chat, sampling, key="k")
    views = [own_view(row) for row in rows]
    exact, low = (
        torch.tensor([x for s in policy.score(views) for x in s.logprobs])
        for policy in (full, half)
    )
    engine_gap = max(
        abs(a - b)
        for row, scores in zip(rows, full.score(views), strict=True)
        for a, b in zip(
            [x for x, m in zip(row.logprobs, row.completion_mask, strict=True) if m],
            scores.logprobs,
            strict=True,
        )
    )
    gap = float((exact - low).abs().mean())
    return (
        {"tokens": len(exact), "mean |bf16 - f32|": gap, "largest engine gap in f32": engine_gap},
        {
            "bfloat16 scores are within 0.05 nats on average": gap < 0.05,
            "engine and trainer agree within 1e-3 in float32": engine_gap < 1e-3,
        },
    )


def chunked_loss(device: str, sizes: Sizes) -> Result:
    """Time and memory of the chunked reverse KL against the dense form."""
    figures: dict[str, Any] = {}
    promises: dict[str, bool] = {}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for tokens in sizes.loss_tokens:
        torch.manual_seed(0)
        shape = (sizes.loss_vocab, sizes.loss_hidden)
        rows = (torch.randn(tokens, shape[1], device=device) * 0.5).to(dtype)
        theirs = (torch.randn(tokens, shape[1], device=device) * 0.5).to(dtype)
        ours, teacher = ((torch.randn(shape, device=device) * 0.05).to(dtype) for _ in range(2))
        runs = {
            name: partial(form, rows, ours, theirs, teacher)
            for name, form in (("dense", _dense), ("chunked", _chunked))
        }
        loss = {name: float(run()) for name, run in runs.items()}
        seconds = {
            n: statistics.median(_timed(device, r) for _ in range(5)) for n, r in runs.items()
        }
        extra = {n: _peak(device, r) for n, r in runs.items()}
        ratio = seconds["dense"] / seconds["chunked"]
        figures |= {
            f"{tokens} tokens: seconds dense, chunked": tuple(seconds.values()),
            f"{tokens} tokens: GiB dense, chunked": tuple(e / 2**30 for e in extra.values()),
            f"{tokens} tokens: times faster": ratio,
        }
        close = abs(loss["dense"] - loss["chunked"]) <= 2e-2 * abs(loss["dense"])
        promises[f"{tokens} tokens: both forms have one value"] = close
        if device == "cuda":
            wanted = 3.0 if tokens >= 8192 else 1.0
            promises[f"{tokens} tokens: at least {wanted:g} times as fast"] = ratio >= wanted
            share = extra["chunked"] / max(1, extra["dense"])
            if tokens >= 8192:
                promises["8192 tokens: a quarter of the memory"] = share <= 0.25
    return figures, promises


def _dense(rows: Any, ours: Any, theirs: Any, teacher: Any) -> torch.Tensor:
    rows, ours = rows.detach().requires_grad_(), ours.detach().requires_grad_()
    with torch.no_grad():
        nu = torch.log_softmax((theirs @ teacher.t()).float(), -1)
    pi = torch.log_softmax((rows @ ours.t()).float(), -1)
    loss = (pi.exp() * (pi - nu)).sum(-1).mean()
    loss.backward()
    return loss.detach()


def _chunked(rows: Any, ours: Any, theirs: Any, teacher: Any) -> torch.Tensor:
    rows, ours = rows.detach().requires_grad_(), ours.detach().requires_grad_()
    count, device = len(rows), rows.device
    wanted = Wanted(
        spec=DivergenceSpec(name="x", beta=1.0),
        target=HiddenDistribution(hidden=theirs, head=Head(weight=teacher)),
        rows=torch.arange(count, device=device),
        weights=torch.ones(count, device=device),
    )
    ids = torch.zeros(count, 1, dtype=torch.long, device=device)
    out = HeadPass(head=Head(weight=ours), token_ids=ids, divergences=(wanted,)).run(rows)
    loss = out.divergences[0].per_token.sum() / count
    loss.backward()
    return loss.detach()


def _stage(device: str, sizes: Sizes, **changes: Any) -> tuple[Parts, Policy]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    policy = Policy(_make(sizes.student, device, dtype), base="s", max_tokens=16384)
    frozen = Policy(_make(sizes.teacher, device, dtype, seed=1), base="t", trainable=False)
    chat = _chat()
    engine = HFEngine(policy, pad_id=chat.pad_id)
    # No reply may stop early: every step then has the same tokens.
    sampling = Sampling(num_samples=sizes.samples, max_new_tokens=sizes.reply)
    options = TrainerOptions(num_steps=10, lr=1e-5, **changes)

    def rows(tasks: Any, step: int) -> Any:
        return collect(tasks, _Env(), engine, chat, sampling, key=f"k/{step}")

    return Parts(
        tasks=lambda step: _tasks(sizes.prompts),
        rows=rows,
        policy=policy,
        objective=OBJECTIVES["gkd"](beta=1.0),
        trainer=Trainer(policy, options),
        engine=engine,
        teacher=LocalTeacher(frozen, name="t"),
        view=Plain(),
        num_steps=10,
        pad_id=chat.pad_id,
    ), policy


def step_against_floor(device: str, sizes: Sizes) -> Result:
    """Seconds of an on-policy step over what the device could do at best."""
    from distill.footprint import floor
    from distill.workload import Workload, built_shape

    parts, _ = _stage(device, sizes)
    on_policy_step(parts, 1)
    times = [_timed(device, lambda s=s: on_policy_step(parts, s)) for s in (2, 3, 4)]
    num_ids = len(char_tokenizer(ALPHABET))
    work = Workload(
        student=built_shape(sizes.student, num_ids),
        teacher=built_shape(sizes.teacher, num_ids),
        rollouts=sizes.prompts * sizes.samples,
        samples=sizes.samples,
        prompt=12,
        reply=sizes.reply,
        micro_tokens=16384,
        width=2 if device == "cuda" else 4,
    )
    least, took = floor(work, find_device(device_name(device))).total, statistics.median(times)
    # The reference engine decodes token by token without graphs: vllm is what the target is for.
    return {"seconds": took, "floor": least, "times the floor": took / least}, {}


def memory_options(device: str, sizes: Sizes) -> Result:
    """Gradient checkpointing and an optimizer on the host: less memory, the same first loss."""
    figures: dict[str, Any] = {}
    losses = {}
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "recomputed": {"gradient_checkpointing": True},
        "offloaded": {"offload": "optimizer"},
    }
    extra = {}
    for name, options in changes.items():
        parts, _ = _stage(device, sizes, **options)
        report: dict[str, Any] = {}

        def run(parts: Parts = parts, report: dict[str, Any] = report) -> None:
            report["loss"] = on_policy_step(parts, 1).update.loss

        extra[name] = _peak(device, run)
        losses[name] = report["loss"]
        figures[f"{name}: GiB beside weights, loss"] = (extra[name] / 2**30, losses[name])
        del parts
    same = max(abs(x - losses["plain"]) for x in losses.values()) < 1e-2 * abs(losses["plain"])
    promises = {"all three have one loss": same}
    if device == "cuda":
        promises["recomputing takes less memory"] = extra["recomputed"] < extra["plain"]
        promises["an optimizer on the host takes less memory"] = extra["offloaded"] < extra["plain"]
    return figures, promises


def vllm_engine(device: str, sizes: Sizes) -> Result:
    """Log-probabilities, an adapter that is reloaded, the canary, sleep and wake."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vllm is not installed")
    from distill.engines.publishing import publish
    from distill.engines.vllm import VLLMEngine
    from distill.engines.vllm_options import VLLMOptions

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = char_tokenizer(ALPHABET)
    model = _make(sizes.student, device, dtype)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        model.save_pretrained(str(base))
        tokenizer.save_pretrained(str(base))
        policy = Policy(new_adapter(model, AdapterSpec(rank=32), seed=0), base="s", kind="adapter")
        options = VLLMOptions(
            max_length=1024 if device == "cuda" else 64,
            dtype="bfloat16" if device == "cuda" else "float32",
            sleep=device == "cuda",
        )
        engine = VLLMEngine(base, options, max_rank=32)

        def sent(version: int) -> CheckpointRef:
            path = Path(folder) / f"a{version}"
            return publish(policy, tokenizer, path, step=version, policy_version=version)

        try:
            engine.load(sent(0))
            with torch.no_grad():
                for name, parameter in policy.trainable().items():
                    if "lora_B" in name:
                        parameter.normal_(std=0.02)
            took = _timed(device, lambda: engine.load(sent(1)))
            figures |= {"seconds to publish and load": took, "mean gap": engine.sync_gap}
            engine.canary(Path(folder) / "a1")
            if device == "cuda":
                figures |= _slept(engine, sent(1))
        finally:
            engine.close()
    promises = {
        "a new adapter arrives within 3 s": took <= 3.0,
        "log-probabilities agree within the tolerance": engine.sync_gap
        <= (0.05 if device == "cuda" else 1e-3),
        "the canary changed and changed back": True,
    }
    if "GiB freed by sleep" in figures:
        promises["sleep frees memory"] = figures["GiB freed by sleep"] > 1.0
    return figures, promises


def _slept(engine: Any, ref: CheckpointRef) -> dict[str, Any]:
    free = torch.cuda.mem_get_info()[0]
    down = _timed("cuda", engine.sleep)
    freed = torch.cuda.mem_get_info()[0] - free
    up = _timed("cuda", engine.wake)
    engine.load(ref)
    return {"GiB freed by sleep": freed / 2**30, "seconds to sleep, wake": (down, up)}
