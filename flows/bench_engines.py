"""How fast rollouts are sampled: through our engines, and by calling vllm directly with the very
same requests, side by side in one run.

The runs alternate, so that a machine that slows down slows all of them, and medians are compared.
No reply stops early, so every run makes the same number of tokens.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from distill.engines.vllm_options import VLLMOptions
from distill.errors import ConfigError, EngineError
from distill.types import Sampling

OURS, DIRECT, REFERENCE = "vllm", "vllm, called directly", "hf"
TARGET = 0.95
"""Share of the direct calls' throughput that our engine should reach."""

Run = Callable[[], list[list[tuple[int, ...]]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutWork:
    """What is sampled in every run. Lengths count tokens."""

    model: str = ""
    """Folder of a model; empty builds a random one of 5 million parameters."""
    num_prompts: int = 16
    num_samples: int = 4
    prompt_length: int = 48
    new_tokens: int = 64
    rounds: int = 3

    def __post_init__(self) -> None:
        for key in ("num_prompts", "num_samples", "prompt_length", "new_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.rounds < 3:
            raise ConfigError(f"a median needs at least 3 rounds, got {self.rounds}")

    @property
    def num_tokens(self) -> int:
        return self.num_prompts * self.num_samples * self.new_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpeed:
    """Sampled tokens of a run, and the seconds of each."""

    engine: str
    num_tokens: int
    seconds: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Tokens per second in the median run."""
        return self.num_tokens / median(self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBench:
    speeds: tuple[EngineSpeed, ...]
    share: float | None = None
    """Our throughput in that of direct calls; None where vllm is not installed."""
    notes: tuple[str, ...] = field(default=())


def bench_engines(work: RolloutWork, options: VLLMOptions | None = None) -> EngineBench:
    """Measure every engine that is installed on the same work."""
    from distill.engines.hf import HFEngine
    from distill.engines.publishing import publish

    policy, tokenizer = _policy(work.model)
    num_ids = min(len(tokenizer), policy.head().vocab_size)
    prompts, sampling = _requests(work, num_ids)
    reference = HFEngine(policy, max_batch=work.num_prompts * work.num_samples)
    runs: dict[str, Run] = {REFERENCE: lambda: _ids(reference.generate(prompts, sampling))}
    if importlib.util.find_spec("vllm") is None:
        note = "vllm is not installed (make vllm-env): only the engine hf was measured"
        return EngineBench(speeds=_measured(runs, work), notes=(note,))
    from distill.engines.vllm import VLLMEngine

    options = options or VLLMOptions()
    length = max(work.prompt_length + work.new_tokens, 32)  # the probe of published weights too
    with tempfile.TemporaryDirectory(prefix="distill-bench-") as place:
        ref = publish(policy, tokenizer, Path(place) / "model", step=0, policy_version=0)
        engine = VLLMEngine(ref.path, replace(options, max_length=options.max_length or length))
        try:
            engine.load(ref)
            runs[OURS] = _fresh(engine, lambda: _ids(engine.generate(prompts, sampling)))
            runs[DIRECT] = _fresh(engine, _direct(engine, prompts, sampling))
            if runs[OURS]() != runs[DIRECT]():
                raise EngineError("our engine and vllm itself answered equal requests differently")
            speeds = _measured(runs, work)
        finally:
            engine.close()
    rates = {speed.engine: speed.rate for speed in speeds}
    return EngineBench(speeds=speeds, share=rates[OURS] / rates[DIRECT])


def bench_lines(found: EngineBench) -> list[str]:
    """The result for people, one line each."""
    lines = [
        f"{speed.engine}: {speed.rate:,.0f} tokens/s (median of {len(speed.seconds)} runs of "
        f"{speed.num_tokens:,} tokens, {min(speed.seconds):.2f} to {max(speed.seconds):.2f} s)"
        for speed in found.speeds
    ]
    if found.share is not None:
        verdict = "at least" if found.share >= TARGET else "below"
        lines.append(
            f"our engine reaches {found.share:.3f} of direct calls ({verdict} {TARGET:.2f})"
        )
    return [*lines, *found.notes]


def _measured(runs: dict[str, Run], work: RolloutWork) -> tuple[EngineSpeed, ...]:
    """Time every run, in turns; the order changes from round to round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for name in names:  # the first call of an engine prepares what later ones find
        runs[name]()
    for number in range(work.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            rows = runs[name]()
            seconds[name].append(time.perf_counter() - start)
            made = sum(len(ids) for group in rows for ids in group)
            if made != work.num_tokens:
                raise EngineError(f"{name} made {made} of {work.num_tokens} tokens")
    return tuple(
        EngineSpeed(engine=name, num_tokens=work.num_tokens, seconds=tuple(seconds[name]))
        for name in names
    )


def _fresh(engine: Any, run: Run) -> Run:
    """Start without the prompts of the run before: they would cost nothing the second time."""

    def started() -> list[list[tuple[int, ...]]]:
        engine.llm.reset_prefix_cache()
        return run()

    return started


def _direct(engine: Any, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Run:
    """The same requests, handed to vllm itself; they are made once, before any time is taken."""
    from distill.engines.vllm_requests import sampling_params

    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    params = [sampling_params(sampling, key) for key in sampling.keys]

    def run() -> list[list[tuple[int, ...]]]:
        outputs = engine.llm.generate(asked, params, use_tqdm=False)
        return [[tuple(one.token_ids) for one in output.outputs] for output in outputs]

    return run


def _ids(groups: Any) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def _requests(work: RolloutWork, num_ids: int) -> tuple[list[tuple[int, ...]], Sampling]:
    """Prompts that share no beginning, and how they are sampled."""
    import numpy as np

    drawn = np.random.Generator(np.random.Philox(key=0)).integers(
        num_ids, size=(work.num_prompts, work.prompt_length)
    )
    sampling = Sampling(
        num_samples=work.num_samples,
        max_new_tokens=work.new_tokens,
        keys=tuple(f"bench/{i}" for i in range(work.num_prompts)),
    )
    return [tuple(int(i) for i in row) for row in drawn], sampling


def _policy(model: str) -> tuple[Any, Any]:
    """A policy and its tokenizer, from a folder or made up."""
    from distill.models import build_model, char_tokenizer, load_model, load_tokenizer
    from distill.policy import Policy
    from distill.sections import ModelBuild
    from evals.envs.world import ALPHABET

    if model:
        return Policy(load_model(model), base=model, trainable=False), load_tokenizer(model)
    build = ModelBuild(
        hidden_size=256,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=768,
        max_positions=4096,
    )
    tokenizer = char_tokenizer(ALPHABET)
    made = build_model(build, tokenizer, seed=0)
    return Policy(made, base="random", trainable=False), tokenizer
