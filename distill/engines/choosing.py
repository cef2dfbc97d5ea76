"""Choosing among given replies: every one is scored as a whole, then one is drawn.

The chance of a reply is the product of its tokens' chances, renormalised over the replies that are
allowed (at temperature T, its T-th root). The prompt is computed once for all of them. The recorded
log-probabilities are the model's of each token, as for free text.
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
    _check(choices, sampling)
    scores = _score(model, prompts, choices, prefill, head_logits, cache_name)
    out: list[Completion] = []
    for allowed, found, key in zip(choices, scores, keys, strict=True):
        totals = torch.stack([each.double().sum() for each in found])
        for index in _draw(totals, sampling, key):
            out.append(
                Completion(
                    token_ids=tuple(allowed[index]),
                    logprobs=tuple(found[index].tolist()),
                    stop=StopReason.STOP,
                )
            )
    return out


def _draw(totals: Tensor, sampling: Sampling, key: str) -> list[int]:
    if sampling.temperature == 0:
        return [int(totals.argmax())] * sampling.num_samples
    cumulative = torch.softmax(totals / sampling.temperature, 0).cumsum(0)
    wanted = torch.from_numpy(uniforms(key, sampling.num_samples, 1))[:, 0] * cumulative[-1].cpu()
    found = torch.searchsorted(cumulative.cpu(), wanted, right=True)
    return [int(i) for i in found.clamp(max=len(totals) - 1)]


def _check(choices: Sequence[Choices], sampling: Sampling) -> None:
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
    choices: Sequence[Choices],
    prefill: Prefill,
    head_logits: Callable[[Tensor], Tensor],
    cache_name: str,
) -> list[list[Tensor]]:
    """Log-probabilities of the tokens of every choice: [p][k] tensors [length]."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=model.config)
    hidden, mask = prefill(model, prompts, cache)
    device = hidden.device
    owner = torch.tensor([i for i, a in enumerate(choices) for _ in a], device=device)
    flat = [ids for allowed in choices for ids in allowed]
    width = max(len(ids) for ids in flat)
    tokens = torch.zeros(len(flat), width, dtype=torch.long, device=device)
    real = torch.zeros_like(tokens)
    for row, ids in enumerate(flat):
        tokens[row, : len(ids)] = torch.tensor(list(ids))
        real[row, : len(ids)] = 1
    first = torch.log_softmax(head_logits(hidden), -1)[owner]
    found = [first.gather(-1, tokens[:, :1])]
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
        ).last_hidden_state
        later = torch.log_softmax(head_logits(states.flatten(0, 1)), -1)
        found.append(later.gather(-1, targets.reshape(-1, 1)).view(len(flat), width - 1))
    table = torch.cat(found, 1)
    rows = iter(table[i, : len(ids)] for i, ids in enumerate(flat))
    return [[next(rows) for _ in allowed] for allowed in choices]
