"""The exact reference engine: batched, KV-cached sampling from the live student.

The prompt is computed once per group, rows leave the batch when they finish, and the
log-probability of every sampled token is recorded. The engine shares its weights with the policy
under training, so it is current at once; `load` only moves the version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.body import backbone
from distill.engines.choosing import choose
from distill.engines.sampling import check, draw, uniforms
from distill.errors import EngineError
from distill.policy import STUDENT, Policy
from distill.types import CheckpointRef, Completion, Sampling, StopReason

RETIRE_SHARE = 0.25
"""Finished rows are dropped from the cache once they are this share of the batch."""

MIN_SHARED = 8
"""A common beginning of the prompts is computed once when it has at least this many tokens."""


class HFEngine:
    """Samples from a role of a policy in this process."""

    def __init__(
        self, policy: Policy, *, role: str = STUDENT, pad_id: int = 0, max_batch: int = 256
    ) -> None:
        self.policy = policy
        self.policy_version = 0
        self._role = role
        self._pad_id = pad_id
        self._max_batch = max_batch
        body = backbone(policy.model)
        names = inspect.signature(type(body).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def load(self, checkpoint: CheckpointRef) -> None:
        self.policy_version = checkpoint.policy_version

    def close(self) -> None:
        """Nothing to release: the weights belong to the policy."""

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        check(sampling, len(prompts))
        if not all(len(p) for p in prompts):
            raise EngineError("every prompt needs at least one token, one has none")
        results: list[list[Completion]] = [[] for _ in prompts]
        per_call = max(1, self._max_batch // sampling.num_samples)
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        with self.policy.as_role(self._role) as model:
            allowed = sampling.choices or ((),) * len(prompts)
            free = [i for i in order if not allowed[i]]
            for start in range(0, len(free), per_call):
                chosen = free[start : start + per_call]
                self._fill(results, model, prompts, sampling, chosen, bound=False)
            bound = [i for i in order if allowed[i]]
            for chosen in _cuts(bound, [len(allowed[i]) for i in bound], self._max_batch):
                self._fill(results, model, prompts, sampling, chosen, bound=True)
        return results

    def _fill(
        self,
        results: list[list[Completion]],
        model: Any,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        chosen: Sequence[int],
        *,
        bound: bool,
    ) -> None:
        """Complete some prompts in one batch, freely or among their choices."""
        asked = [prompts[i] for i in chosen]
        keys = [sampling.keys[i] if sampling.keys else "" for i in chosen]
        if bound:
            rows = choose(
                model,
                asked,
                [sampling.choices[i] for i in chosen],
                sampling,
                keys,
                prefill=self._prefill,
                head_logits=self._head_logits(),
                cache_name=self._cache_name,
            )
        else:
            rows = self._run(model, asked, sampling, keys)
        for slot, i in enumerate(chosen):
            first = slot * sampling.num_samples
            results[i] = rows[first : first + sampling.num_samples]

    def _head_logits(self) -> Callable[[Tensor], Tensor]:
        head = self.policy.head(self._role)
        logits: Callable[[Tensor], Tensor] = head.logits
        return logits if head.temperature == 1.0 else _untempered(head)

    def _run(
        self, model: Any, prompts: list[Sequence[int]], sampling: Sampling, keys: list[str]
    ) -> list[Completion]:
        """Decode one batch: [p] prompts -> p * num_samples completions, prompt-major."""
        from transformers.cache_utils import DynamicCache

        repeats, limit = sampling.num_samples, sampling.max_new_tokens
        device = self.policy.device
        stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
        head_logits = self._head_logits()
        cache = DynamicCache(config=model.config)
        hidden, mask = self._prefill(model, prompts, cache)
        logits = head_logits(hidden)
        if repeats > 1:
            cache.batch_repeat_interleave(repeats)
            logits, mask = logits.repeat_interleave(repeats, 0), mask.repeat_interleave(repeats, 0)
        noise = _noise(keys, repeats, limit, sampling.temperature).to(device)
        num_rows = len(prompts) * repeats
        tokens = torch.full((num_rows, limit), self._pad_id, device=device)
        logprobs = torch.zeros(num_rows, limit, device=device)
        length = torch.zeros(num_rows, dtype=torch.long, device=device)
        stopped = torch.zeros(num_rows, dtype=torch.bool, device=device)
        alive = torch.arange(num_rows, device=device)  # rows still in the cache, by number
        done = torch.zeros_like(stopped)  # of the rows in the cache
        for t in range(limit):
            sampled, scores = draw(logits, noise[alive, t], sampling)
            live = alive[~done]
            tokens[live, t], logprobs[live, t] = sampled[~done], scores[~done]
            length[live] = t + 1
            ended = torch.isin(sampled, stops) & ~done
            stopped[alive[ended]] = True
            done = done | ended
            if t == limit - 1 or bool(done.all()):
                break
            if int(done.sum()) >= RETIRE_SHARE * len(done):
                keep = (~done).nonzero()[:, 0]
                cache.batch_select_indices(keep)
                alive, sampled, mask, done = alive[keep], sampled[keep], mask[keep], done[keep]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            logits = head_logits(self._step(model, sampled[:, None], mask, cache))
        return [
            Completion(
                token_ids=tuple(tokens[i, : int(length[i])].tolist()),
                logprobs=tuple(logprobs[i, : int(length[i])].tolist()),
                stop=StopReason.STOP if bool(stopped[i]) else StopReason.LENGTH,
            )
            for i in range(num_rows)
        ]

    def _prefill(
        self, model: Any, prompts: list[Sequence[int]], cache: Any
    ) -> tuple[Tensor, Tensor]:
        """Fill the cache with the prompts: hidden state after each [p, d], mask of the cache.

        What all prompts begin with (a system message, an example) is computed once.
        """
        device = self.policy.device
        shared = common_prefix(prompts)
        if shared < MIN_SHARED or len(prompts) == 1:
            shared = 0
        ids, mask = (x.to(device) for x in _pad_left([p[shared:] for p in prompts], self._pad_id))
        if shared:
            start = torch.tensor([list(prompts[0][:shared])], device=device)
            self._step(model, start, torch.ones_like(start), cache)
            cache.batch_repeat_interleave(len(prompts))
            mask = torch.cat([mask.new_ones(len(prompts), shared), mask], 1)
        return self._step(model, ids, mask, cache), mask

    def _step(self, model: Any, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Hidden state after the last of `ids` [b, n], given the cache: [b, d]."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = backbone(model)(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: cache},
        )
        last: Tensor = out.last_hidden_state[:, -1]
        return last


def _cuts(items: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Neighbours whose sizes add up to at most `most`; one that is larger stands alone."""
    cut: list[int] = []
    load = 0
    for item, size in zip(items, sizes, strict=True):
        if cut and load + size > most:
            yield cut
            cut, load = [], 0
        cut.append(item)
        load += size
    if cut:
        yield cut


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many leading tokens all prompts share; every prompt keeps at least one of its own."""
    shortest = min(len(p) for p in prompts) - 1
    first = prompts[0]
    for i in range(shortest):
        if any(p[i] != first[i] for p in prompts):
            return i
    return shortest


def _untempered(head: Any) -> Callable[[Tensor], Tensor]:
    from dataclasses import replace

    plain: Callable[[Tensor], Tensor] = replace(head, temperature=1.0).logits
    return plain


def _pad_left(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _noise(keys: Sequence[str], repeats: int, limit: int, temperature: float) -> Tensor:
    """Uniforms of each row and token: [len(keys) * repeats, limit] float64."""
    if temperature == 0:
        return torch.zeros(len(keys) * repeats, limit, dtype=torch.float64)
    return torch.from_numpy(np.concatenate([uniforms(key, repeats, limit) for key in keys]))
