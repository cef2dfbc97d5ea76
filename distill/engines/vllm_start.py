"""Starting vllm in this process, and ending it so that another can follow."""

from __future__ import annotations

import gc
import importlib.util
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill.engines.vllm_options import GIB, VLLMOptions, prepare_environment
from distill.errors import EngineError, MissingExtra

FAILURES = (ValueError, RuntimeError, TypeError, AssertionError, KeyError, OSError)
"""What vllm raises for a request, a file or a machine that it cannot work with."""


@contextmanager
def without_deprecations() -> Iterator[None]:
    """vllm touches names of torch that are on their way out; nobody here can act on that."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", category)
        yield


def import_vllm() -> Any:
    """The module. MissingExtra without the package, EngineError for one that cannot be imported."""
    prepare_environment()
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra(
            'engine.name = "vllm" needs the package vllm, which is not installed; try: make '
            "vllm-env (an environment without a GPU), or pip install 'distill-nightly[vllm]'"
        )
    try:
        with without_deprecations():
            import vllm
    except (ImportError, RuntimeError, OSError) as error:
        raise EngineError(
            f"vllm is installed and cannot be imported: {line(error)}; packages that only serve "
            "images and sound often are why, try: pip uninstall torchvision torchaudio torchcodec"
        ) from error
    return vllm


def device_kind() -> str:
    """Where vllm computes here: `cpu` or `cuda`."""
    import_vllm()
    with without_deprecations():
        from vllm.platforms import current_platform
    return "cpu" if current_platform.is_cpu() else "cuda"


def start(
    model: Path,
    options: VLLMOptions,
    *,
    slots: int,
    targets: Sequence[str],
    trust_remote_code: bool,
) -> Any:
    """A `vllm.LLM` over the model in a folder, with options made for this device.

    `slots` is the rank of its adapter slots, or 0, and `targets` names the layers that have them.
    """
    vllm = import_vllm()
    is_cpu = device_kind() == "cpu"
    if torch.distributed.is_initialized():
        raise EngineError(
            "vllm makes its own process group, and this process already has one; close the other "
            'engine first, or under torchrun use engine.name = "server"'
        )
    cache = options.kv_cache_gib or (1.0 if is_cpu else 0.0)
    # vllm seeds every global generator, and on a CPU takes this function away.
    set_num_threads = torch.set_num_threads
    kept = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), without_deprecations():
            return vllm.LLM(
                model=str(model),
                skip_tokenizer_init=True,
                generation_config="vllm",
                trust_remote_code=trust_remote_code,
                dtype=options.dtype,
                max_model_len=options.max_length or None,
                max_num_seqs=options.max_batch,
                gpu_memory_utilization=options.gpu_memory_utilization,
                kv_cache_memory_bytes=int(cache * GIB) if cache else None,
                enforce_eager=options.enforce_eager or is_cpu,
                tensor_parallel_size=options.tensor_parallel,
                distributed_executor_backend="uni" if options.tensor_parallel == 1 else "mp",
                enable_sleep_mode=options.sleep,
                use_tqdm_on_load=False,
                logprobs_mode="processed_logprobs",
                **_optional(options, slots, targets),
            )
    except FAILURES as error:
        stop(None)
        raise EngineError(
            f"vllm could not start on {model}: {line(error)}; {_advice(str(error))}"
        ) from error
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(kept[0])
        np.random.set_state(kept[1])


def _optional(options: VLLMOptions, slots: int, targets: Sequence[str]) -> dict[str, Any]:
    """Arguments of vllm that are left out where they are not asked for."""
    found: dict[str, Any] = {}
    if slots:
        found["enable_lora"] = True
        found["max_lora_rank"] = slots
        found["max_loras"] = 2  # the one that answers, and the next one while it is checked
        found["lora_target_modules"] = list(targets)
    if options.attention_backend:
        found["attention_backend"] = options.attention_backend
    return found


def stop(llm: Any) -> None:
    """End an engine with its process group and memory; `None` for one that failed to start."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if llm is not None:
        llm.llm_engine.engine_core.shutdown()
        del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def line(error: BaseException) -> str:
    """What an error says, on one line; vllm's own may fill a screen."""
    return " ".join(str(error).split())[:400] or type(error).__name__


def _advice(message: str) -> str:
    if "max_model_len" in message:
        return "lower engine.max_length"
    if "memory" in message.lower():
        return "lower engine.gpu_memory_utilization, engine.kv_cache_gib or engine.max_length"
    return "check the folder and the [engine] section"
