"""Small models that vllm can serve on a CPU: its attention wants heads at least 32 wide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.engines.publishing import publish
from distill.engines.vllm import VLLMEngine
from distill.engines.vllm_options import VLLMOptions
from distill.models import build_model, char_tokenizer, new_adapter
from distill.policy import AdapterSpec, Policy
from distill.sections import ModelBuild
from distill.types import CheckpointRef, Sampling
from helpers import ALPHABET

LENGTH = 192
"""Tokens of the engines' longest prompt and reply together. A block of vllm's cache has
128 on a CPU."""
LONG = tuple(3 + (5 * i) % 37 for i in range(LENGTH - 20))
MAX_RANK = 4


def make_model(seed: int = 0, **sizes: Any) -> Any:
    """A random two-layer model whose outputs are far from uniform."""
    build = ModelBuild(hidden_size=64, head_dim=32, intermediate_size=64, **sizes)
    model = build_model(build, char_tokenizer(ALPHABET), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


def make_full(seed: int = 0, **sizes: Any) -> Policy:
    return Policy(make_model(seed, **sizes), base="tiny")


def make_adapter(seed: int = 1, *, rank: int = 4, scale: float = 0.05, **sizes: Any) -> Policy:
    """An adapter of the model with seed 0, as if it had been trained."""
    spec = AdapterSpec(rank=rank, alpha=2 * rank)
    policy = Policy(
        new_adapter(make_model(0, **sizes), spec, seed=seed), base="tiny", kind="adapter"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.normal_(std=scale, generator=generator)
    return policy


class Holder:
    """Engines of a session, one alive at a time: `full` serves full weights, `adapters` those."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.tokenizer = char_tokenizer(ALPHABET)
        self.start = self.publish(make_full(), "start", 0)
        self._kind = ""
        self._engine: VLLMEngine | None = None

    def publish(self, policy: Policy, name: str, version: int) -> CheckpointRef:
        return publish(
            policy, self.tokenizer, self.home / name, step=version, policy_version=version
        )

    def engine(self, kind: str) -> VLLMEngine:
        if self._kind != kind:
            self.close()
            options = VLLMOptions(max_length=LENGTH, kv_cache_gib=0.25)
            rank = MAX_RANK if kind == "adapters" else 0
            self._engine = VLLMEngine(self.start.path, options, base="tiny", max_rank=rank)
            self._kind = kind
        assert self._engine is not None
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._kind, self._engine = "", None


class Deaf:
    """vllm that takes adapters and never uses them."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def generate(self, *given: Any, lora_request: Any, **named: Any) -> Any:
        return self._llm.generate(*given, lora_request=self.chosen(lora_request), **named)

    def chosen(self, adapter: Any) -> Any:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


class Sticky(Deaf):
    """vllm that stays with an adapter that it was told to drop."""

    last: Any = None

    def chosen(self, adapter: Any) -> Any:
        if "canary" in getattr(adapter, "lora_name", ""):
            self.last = self.stuck
            return adapter
        return self.last or adapter

    def __init__(self, llm: Any, stuck: Any) -> None:
        super().__init__(llm)
        self.stuck = stuck


def logits_after(policy: Policy, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
    """What the trainer's model says before each of `ids`: [len(ids), V]."""
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0].float()
    start = len(prompt) - 1
    return logits[start : start + len(ids)]


def expected(
    policy: Policy, prompt: Sequence[int], ids: Sequence[int], sampling: Sampling
) -> list[float]:
    """Log-probability of each of `ids` under the distribution it was drawn from, by hand."""
    found = []
    for logits, token in zip(logits_after(policy, prompt, ids), ids, strict=True):
        scaled = logits / (sampling.temperature or 1.0)
        order = scaled.argsort(descending=True).tolist()
        kept = order[: sampling.top_k] if sampling.top_k else order
        chances = torch.softmax(scaled[kept], 0)
        before = chances.cumsum(0) - chances
        nucleus = [t for t, b in zip(kept, before.tolist(), strict=True) if b < sampling.top_p]
        assert token in nucleus
        found.append(float(scaled[token] - scaled[nucleus].logsumexp(0)))
    return found
