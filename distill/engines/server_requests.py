"""What is sent to a completion server: everything said outright, nothing left to its defaults."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from distill.types import Sampling

COMPLETIONS = "/v1/completions"


def sampling_body(
    model: str, prompt: Sequence[int], sampling: Sampling, *, n: int, seed: int | None
) -> dict[str, Any]:
    """A request for n samples of a prompt, with the log-probability of every sampled id.

    What is not said, a server takes from the model's generation settings: penalties, a minimum
    probability, further stop tokens.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "n": n,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    return body if seed is None else {**body, "seed": seed}


def scoring_body(model: str, prompt: Sequence[int], k: int = 0) -> dict[str, Any]:
    """A request for the log-probabilities of a prompt's tokens, and of the k best beside each.

    A server has to sample one token for it; at temperature 0 and without log-probabilities that
    costs nothing.
    """
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": k,
    }


def seed_of(key: str) -> int:
    """The seed of the first sample of a prompt; vLLM adds the number of the sample to it."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 2
