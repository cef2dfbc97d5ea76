"""Choosing among given replies: every one is scored as a whole, then one is drawn.

The chance of a reply is the product of its tokens' chances, renormalised over the replies that are
allowed (at temperature T, its T-th root). The prompt is computed once for all of them. The recorded
log-probabilities are those of each token at that temperature, as for free text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from distill.body import backbone
from distill.engines.sampling import uniforms
from distill.errors import EngineError
from distill.logprobs import reply_shift
from distill.types import Completion, Sampling, StopReason

Choices = Sequence[Sequence[int]]
POSITIONS = 512
"""Positions whose distributions over the vocabulary are held at once."""


class Prefill(Protocol):
    """Fills a cache with prompts: hidden state after each [p, d], mask of the cache [p, w]."""

    def __call__(
        self, model: Any, prompts: list[Sequence[int]], cache: Any
    ) -> tuple[Tensor, Tensor]: ...


def choose(
    model: Any,
    prompts: list[Sequence[int]],
    choices: Sequence[Choices],
    sampling: Sampling,
    keys: Sequence[str],
    *,
    prefill: Prefill,
    head_logits: Callable[[Tensor], Tensor],
    cache_name: str,
) -> list[Completion]:
    """[p] prompts and their choices -> p * num_samples completions, prompt-major.

    Raises EngineError for an empty choice, and for one that does not end with a stop token.
    """
    check_choices(choices, sampling)
    flat = [ids for allowed in choices for ids in allowed]
    plain, recorded = _score(
        model,
        prompts,
        flat,
        [i for i, allowed in enumerate(choices) for _ in allowed],
        temperature=sampling.temperature,
        prefill=prefill,
        head_logits=head_logits,
        cache_name=cache_name,
    )
    rows = iter(range(len(flat)))
    out: list[Completion] = []
    for allowed, key in zip(choices, keys, strict=True):
        own = [next(rows) for _ in allowed]
        totals = torch.stack([plain[i, : len(flat[i])].double().sum() for i in own])
        for index in draw_choice(totals, sampling, key):
            row = own[index]
            out.append(
                Completion(
                    token_ids=tuple(flat[row]),
                    logprobs=tuple(recorded[row, : len(flat[row])].tolist()),
                    stop=StopReason.STOP,
                )
            )
    return out


def draw_choice(totals: Tensor, sampling: Sampling, key: str) -> list[int]:
    """Which reply each sample takes: log-probabilities of whole replies [k] float64 -> indices."""
    if sampling.temperature == 0:
        return [int(totals.argmax())] * sampling.num_samples
    cumulative = torch.softmax(totals / sampling.temperature, 0).cumsum(0)
    wanted = torch.from_numpy(uniforms(key, sampling.num_samples, 1))[:, 0] * cumulative[-1].cpu()
    found = torch.searchsorted(cumulative.cpu(), wanted, right=True)
    return [int(i) for i in found.clamp(max=len(totals) - 1)]


def check_choices(choices: Sequence[Choices], sampling: Sampling) -> None:
    """EngineError for an empty reply, and for one that does not end with a stop token."""
    for allowed in choices:
        for ids in allowed:
            if not ids or ids[-1] not in sampling.stop_token_ids:
                raise EngineError(
                    "a reply to choose from must end with a stop token "
                    f"({', '.join(map(str, sampling.stop_token_ids))}), found {tuple(ids)[-3:]}"
                )


def _score(
    model: Any,
    prompts: list[Sequence[int]],
    flat: Choices,
    owners: Sequence[int],
    *,
    temperature: float,
    prefill: Prefill,
    head_logits: Callable[[Tensor], Tensor],
    cache_name: str,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens of every reply, `flat[i]` to prompt `owners[i]`: [k, width]
    as the model has them, and at the temperature. What lies behind a reply's end is no number."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=model.config)
    hidden, mask = prefill(model, prompts, cache)
    device = hidden.device
    owner = torch.tensor(owners, device=device)
    width = max(len(ids) for ids in flat)
    tokens = torch.zeros(len(flat), width, dtype=torch.long, device=device)
    real = torch.zeros_like(tokens)
    for row, ids in enumerate(flat):
        tokens[row, : len(ids)] = torch.tensor(list(ids))
        real[row, : len(ids)] = 1
    logits = head_logits(hidden)
    found = [[each[owner, tokens[:, 0]][:, None]] for each in _both(logits, temperature)]
    if width > 1:
        cache.batch_select_indices(owner)
        inputs, targets = reply_shift(tokens)
        whole = torch.cat([mask[owner], reply_shift(real)[0]], 1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)[:, -(width - 1) :]
        states = backbone(model)(
            input_ids=inputs,
            attention_mask=whole,
            position_ids=positions,
            use_cache=True,
            **{cache_name: cache},
        ).last_hidden_state.flatten(0, 1)
        wanted = targets.reshape(-1, 1)
        parts: list[list[Tensor]] = [[], []]
        for start in range(0, len(states), POSITIONS):
            logits = head_logits(states[start : start + POSITIONS])
            own = wanted[start : start + POSITIONS]
            for side, each in zip(parts, _both(logits, temperature), strict=True):
                side.append(each.gather(-1, own))
        for side, pieces in zip(found, parts, strict=True):
            side.append(torch.cat(pieces).view(len(flat), width - 1))
    plain, recorded = (torch.cat(side, 1) for side in found)
    return plain, recorded


def _both(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities as they are and at the temperature; greedy draws record the former."""
    plain = torch.log_softmax(logits, -1)
    if temperature in (0.0, 1.0):
        return plain, plain
    return plain, torch.log_softmax(logits / temperature, -1)
