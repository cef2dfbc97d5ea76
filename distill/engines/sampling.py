"""How one token is drawn: from a row's own stream of uniforms, never from a global generator."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.types import Sampling


def uniforms(key: str, rows: int, count: int) -> np.ndarray:
    """Uniforms in [0, 1) of the samples of one prompt: [rows, count] float64.

    Row g depends on (key, g, count) only, not on the number of rows.
    """
    digest = hashlib.sha256(key.encode()).digest()
    seed = int.from_bytes(digest[:16], "little")
    return np.random.Generator(np.random.Philox(key=seed)).random((rows, count))


def check(sampling: Sampling, num_prompts: int) -> None:
    """Raise ConfigError for settings no engine can honour."""
    if sampling.num_samples < 1 or sampling.max_new_tokens < 1:
        raise ConfigError(
            "sampling.num_samples and sampling.max_new_tokens must be at least 1, got "
            f"{sampling.num_samples} and {sampling.max_new_tokens}"
        )
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise ConfigError(
            "sampling needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0, got "
            f"{sampling.temperature}, {sampling.top_p} and {sampling.top_k}"
        )
    if sampling.temperature > 0 and len(sampling.keys) != num_prompts:
        raise ConfigError(
            f"sampling.keys needs one key per prompt ({num_prompts}), got {len(sampling.keys)}"
        )
    if sampling.choices and len(sampling.choices) != num_prompts:
        raise ConfigError(
            f"sampling.choices needs one entry per prompt ({num_prompts}), got "
            f"{len(sampling.choices)}"
        )


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability under the distribution it was drawn from.

    logits [B, V] float32, uniform [B] float64 -> ids [B] int64, log-probs [B] float32. At
    temperature 0 the most likely token, with its untempered log-probability.
    """
    if sampling.temperature == 0:
        log_probs = torch.log_softmax(logits, dim=-1)
        best = log_probs.argmax(-1)
        return best, log_probs.gather(-1, best[:, None])[:, 0]
    scaled = logits if sampling.temperature == 1.0 else logits / sampling.temperature
    log_probs = torch.log_softmax(_truncate(scaled, sampling), dim=-1)
    cumulative = log_probs.double().exp().cumsum(-1)
    wanted = (uniform * cumulative[:, -1])[:, None]
    ids = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    # Rounding may leave the last entries without mass: stay on the last one that has some.
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    ids = torch.minimum(ids, last)
    return ids, log_probs.gather(-1, ids[:, None])[:, 0]


def _truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    if 0 < sampling.top_k < logits.shape[-1]:
        bound = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < bound, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, index = logits.softmax(-1).sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        logits = logits.masked_fill(beyond.scatter(-1, index, beyond), float("-inf"))
    return logits
