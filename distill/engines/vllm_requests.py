"""What vllm is asked for, and how its answers are read: by id, never by rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from distill.engines.choosing import Choices, check_choices, draw_choice
from distill.errors import EngineError
from distill.types import Completion, Sampling, StopReason

MOST_SAMPLES = 16384
"""Samples of one prompt that vllm takes as one request."""


def check_ids(
    prompts: Sequence[Sequence[int]], *, room: int, num_ids: int, max_length: int
) -> None:
    """EngineError for what the model cannot read, before any of it is computed."""
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise EngineError("every prompt needs at least one token, one has none")
        if min(prompt) < 0 or max(prompt) >= num_ids:
            bad = next(t for t in prompt if not 0 <= t < num_ids)
            raise EngineError(
                f"prompt {i} holds the id {bad}, the engine's model has the ids 0 to "
                f"{num_ids - 1}; prompt and model use different tokenizers"
            )
        if len(prompt) + room > max_length:
            raise EngineError(
                f"prompt {i} has {len(prompt)} tokens and may get {room} more, the engine "
                f"takes {max_length} in all; raise engine.max_length, or lower data.max_length "
                "or sampling.max_new_tokens"
            )


def choice_rows(
    prompts: Sequence[Sequence[int]], choices: Sequence[Choices], sampling: Sampling
) -> list[tuple[int, ...]]:
    """Every prompt with every reply that it allows, to be scored as sequences."""
    if sampling.temperature not in (0.0, 1.0):
        raise EngineError(
            "vllm scores given replies at temperature 1 only, and sampling.temperature is "
            f'{sampling.temperature}; set it to 1 (or 0), or use engine.name = "hf" for tasks that '
            "list their replies"
        )
    check_choices(choices, sampling)
    return [(*p, *ids) for p, allowed in zip(prompts, choices, strict=True) for ids in allowed]


def drawn(
    allowed: Choices, scores: Iterator[list[float]], sampling: Sampling, key: str
) -> list[Completion]:
    """The samples of one prompt among its replies; `scores` gives those of the next sequences."""
    own = [tuple(next(scores)[-len(ids) :]) for ids in allowed]
    totals = torch.tensor([math.fsum(one) for one in own], dtype=torch.float64)
    return [
        Completion(token_ids=tuple(allowed[i]), logprobs=own[i], stop=StopReason.STOP)
        for i in draw_choice(totals, sampling, key)
    ]


def seed_of(key: str) -> int:
    """Seed of a prompt's first sample; vllm gives sample g the seed g above it."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")


def sampling_params(sampling: Sampling, key: str) -> Any:
    """What vllm is asked for one prompt: no text, no eos but our own stops, the drawn log-probs."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy = sampling.temperature == 0
    if sampling.num_samples > MOST_SAMPLES:
        raise EngineError(
            f"vllm takes at most {MOST_SAMPLES} samples of a prompt, asked for "
            f"{sampling.num_samples}; lower sampling.num_samples"
        )
    return SamplingParams(
        n=1 if greedy else sampling.num_samples,
        temperature=sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k,
        seed=None if greedy else seed_of(key),
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> Any:
    """What vllm is asked for a sequence whose tokens are to be scored; it must add one to it."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        ignore_eos=True,
        flat_logprobs=True,
        detokenize=False,
    )


def completion(output: Any, stops: frozenset[int]) -> Completion:
    ids = list(output.token_ids)
    if not ids:
        raise EngineError(f"vllm ended a reply before its first token: {output.finish_reason!r}")
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(by_id(output.logprobs, ids, first=0)),
        stop=StopReason.STOP if ids[-1] in stops else StopReason.LENGTH,
    )


def by_id(found: Any, ids: list[int], *, first: int) -> list[float]:
    """Log-probabilities of `ids[first:]` out of vllm's flat lists, looked up by id."""
    if found is None or len(found) != len(ids):
        raise EngineError(
            f"vllm returned {0 if found is None else len(found)} log-probabilities for {len(ids)} "
            "tokens"
        )
    values = []
    for place in range(first, len(ids)):
        at = found.start_indices[place]
        end = found.end_indices[place]
        while at < end and found.token_ids[at] != ids[place]:
            at += 1
        if at == end or not math.isfinite(found.logprobs[at]):
            value = "none" if at == end else found.logprobs[at]
            raise EngineError(
                f"vllm gives token {place} (id {ids[place]}) the log-probability {value}; the "
                "weights or the dtype of the engine are not usable"
            )
        values.append(float(found.logprobs[at]))
    return values
