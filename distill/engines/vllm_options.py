"""Options of the engine `vllm`, and what its process needs to know before vllm is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from distill.errors import ConfigError

ENVIRONMENT = {
    # Nothing is reported to anybody.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # One process: weights are handed over in memory, and errors arrive as what they are.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # By default a CPU build takes one core for the model and keeps the others idle.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Results of a command go to stdout, what an engine has to say does not.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Set where the user has not set them."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of the slots that vllm makes for adapters."""
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
"""Mean gap to the trainer's log-probabilities that is still rounding, in nats per token."""
GIB = 2**30
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMOptions:
    """[engine] name = "vllm": vllm in this process, with weights of its own."""

    gpu_memory_utilization: float = 0.3
    """Share of a GPU that weights and cache may take; the rest belongs to the trainer."""
    kv_cache_gib: float = 0.0
    """Size of the cache; 0 takes what the share leaves, on a CPU 1 GiB."""
    max_length: int = 0
    """Longest prompt and reply together, in tokens; 0 is the model's own limit."""
    max_batch: int = 64
    """Replies generated at once."""
    dtype: Dtype = "auto"
    """Of the engine's weights. auto is bfloat16 on a GPU, whose log-probabilities differ a little
    from the trainer's, and float32 on a CPU."""
    enforce_eager: bool = False
    """Do without CUDA graphs: starts sooner, samples slower. Always so on a CPU."""
    tensor_parallel: int = 1
    """GPUs that share one copy of the model."""
    attention_backend: str = ""
    """Name of a vllm attention backend; empty leaves the choice to vllm."""
    sleep: bool = False
    """Free the GPU's memory while the trainer works. Not on a CPU."""
    tolerance: float = 0.0
    """Largest mean gap between the engine's and the trainer's log-probabilities after weights were
    sent, in nats; 0 chooses by dtype."""

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "engine.gpu_memory_utilization is a share of the memory, above 0 and at most 1, "
                f"got {self.gpu_memory_utilization}"
            )
        for key, least in (
            ("kv_cache_gib", 0),
            ("max_length", 0),
            ("max_batch", 1),
            ("tensor_parallel", 1),
            ("tolerance", 0),
        ):
            value = getattr(self, key)
            if not value >= least:
                raise ConfigError(f"engine.{key} must be at least {least}, got {value}")
        if self.dtype not in ("auto", *TOLERANCES):
            raise ConfigError(
                f"engine.dtype must be one of auto, {', '.join(TOLERANCES)}, got {self.dtype!r}"
            )

    def on(self, kind: str) -> VLLMOptions:
        """The same with everything chosen for a device (`cpu`, `cuda`). ConfigError for what vllm
        refuses there."""
        self.require_device(kind)
        dtype: Dtype = "float32" if kind == "cpu" else "bfloat16"
        chosen = self.dtype if self.dtype != "auto" else dtype
        return replace(self, dtype=chosen, tolerance=self.tolerance or TOLERANCES[chosen])

    def require_device(self, kind: str) -> None:
        """ConfigError for what vllm refuses on a device (`cpu`, `cuda`)."""
        if kind == "cpu" and self.sleep:
            raise ConfigError(
                "engine.sleep = true frees the memory of a GPU, and vllm refuses it on a CPU; set "
                "engine.sleep = false"
            )
        if kind == "cpu" and self.tensor_parallel > 1:
            raise ConfigError(
                f"engine.tensor_parallel = {self.tensor_parallel} shares a model between GPUs, and "
                "there is none; set it to 1"
            )


def slot_rank(rank: int) -> int:
    """The smallest adapter slot that holds `rank`. ConfigError above the largest."""
    for size in RANKS:
        if rank <= size:
            return size
    raise ConfigError(
        f"vllm serves adapters up to rank {RANKS[-1]}, model.rank is {rank}; lower it, or use "
        'engine.name = "hf"'
    )


def prepare_environment() -> None:
    """Set what vllm reads from the environment, where nobody has set it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
