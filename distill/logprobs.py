"""The only causal shift, and the chunked output head.

A causal model's hidden state at position t-1 predicts the token at position t. Every per-token
array of this package is aligned with `input_ids` instead, so the shift happens here and nowhere
else: `predictor_rows` picks the hidden states that predict the trained tokens, `scatter` puts
their values back at the tokens they describe.

Never a [tokens x vocabulary] tensor for the whole batch: the head runs in chunks over trained
positions only, in float32, whatever the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distill.errors import AlignmentError

CHUNK_ELEMENTS = 2**23
"""Logits of one chunk, in elements (32 MiB in float32)."""


def predictor_rows(hidden: Tensor, mask: Tensor) -> Tensor:
    """Hidden states that predict the masked tokens, row-major.

    hidden [B, T, d], mask [B, T] bool -> [N, d], N = mask.sum(). Position 0 has no predictor.
    """
    if bool(mask[:, 0].any()):
        raise AlignmentError(
            "position 0 of a row is marked as trained, but nothing precedes it; "
            "a prompt must have at least one token"
        )
    return hidden[:, :-1][mask[:, 1:]]


def reply_shift(token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """What a model reads of replies [B, L] to predict their later tokens, and those: [B, L - 1]
    each. What comes before a reply predicts its first token."""
    return token_ids[:, :-1], token_ids[:, 1:]


def is_right_padded(attention_mask: Tensor) -> bool:
    """Whether no row has padding before one of its tokens: [B, T] bool -> bool."""
    return not bool((attention_mask[:, 1:] & ~attention_mask[:, :-1]).any())


def scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Values of the masked tokens back at their places: [N, ...] -> [B, T, ...], 0 elsewhere."""
    out = values.new_zeros(*mask.shape, *values.shape[1:])
    return out.masked_scatter(mask.view(*mask.shape, *[1] * (values.dim() - 1)), values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """An output head: hidden states to float32 logits.

    Covers tied, untied and biased heads, a logit scale, a soft cap, and the sampling temperature
    that the log-probabilities refer to.
    """

    weight: Tensor  # [V, d]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def cut(self, num_ids: int | None) -> Head:
        """The head of the first `num_ids` entries alone; of all with None."""
        bias = None if self.bias is None else self.bias[:num_ids]
        return replace(self, weight=self.weight[:num_ids], bias=bias)

    def raw(self, rows: Tensor) -> Tensor:
        """The linear layer alone: rows [n, d] -> [n, V] float32."""
        return torch.nn.functional.linear(rows, self.weight, self.bias).float()

    def finish(self, out: Tensor) -> Tensor:
        """What follows the linear layer: scale, soft cap, temperature."""
        if self.scale != 1.0:
            out = out * self.scale
        if self.soft_cap is not None:
            out = torch.tanh(out / self.soft_cap) * self.soft_cap
        if self.temperature != 1.0:
            out = out / self.temperature
        return out

    def logits(self, rows: Tensor) -> Tensor:
        """rows [n, d] -> [n, V] float32."""
        return self.finish(self.raw(rows))

    def log_probs(self, rows: Tensor) -> Tensor:
        """rows [n, d] -> [n, V] float32 log-probabilities."""
        return torch.log_softmax(self.logits(rows), dim=-1)


def token_entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats of each distribution: [n, V] -> [n]."""
    return -(log_probs.exp() * log_probs).sum(-1)


def chunk_bounds(num_rows: int, vocab_size: int) -> list[tuple[int, int]]:
    """Consecutive [start, stop) ranges whose logits stay below CHUNK_ELEMENTS."""
    size = max(1, CHUNK_ELEMENTS // max(1, vocab_size))
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)] or [(0, 0)]
