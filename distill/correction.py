"""Rollout-to-trainer correction: the engine that sampled is not bit for bit the model that trains.

    w_t = exp(S_behaviour_t - S_sampler_t)         token
    w   = prod_t w_t over the row                  sequence

It corrects the edge sampler -> behaviour and nothing else; the ratio of an objective corrects
behaviour -> current. Weights are detached. Truncation bounds a weight from above and keeps the
denominator; masking drops tokens or rows whose weight leaves a band, from the sum and the
denominator. Source: verl, `rollout_correction`; arXiv 2606.24143 for token against sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from distill.batch import Batch
from distill.errors import AlignmentError, ConfigError

_EXPONENT = 20.0
"""Largest |log w|: exp(20) is finite in float32, and so is its square."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """How the difference between engine and trainer is corrected."""

    level: Literal["none", "token", "sequence"] = "none"
    """One weight per token, one per row, or none."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Bound the weights from above, or leave out what lies outside [low, cap]."""
    cap: float = 2.0
    """Largest weight (usual: 1.5 to 5 per token, 2 to 10 per row)."""
    low: float = 0.0
    """Smallest weight of the band; with truncation 0, because only large weights are unstable."""

    def __post_init__(self) -> None:
        if not self.cap >= 1.0:
            raise ConfigError(f"correction.cap must be at least 1, got {self.cap}")
        if not 0.0 <= self.low <= 1.0:
            raise ConfigError(f"correction.low must be within [0, 1], got {self.low}")

    def raw(self, batch: Batch) -> Tensor:
        """Uncapped weights [B, T]: 1 where sampler and trainer agree, 0 outside the mask."""
        if batch.behaviour_logprobs is None:
            raise AlignmentError("a correction needs the student's log-probabilities of the step")
        mask = batch.completion_mask
        gap = (batch.behaviour_logprobs - batch.sampler_logprobs).detach()
        gap = gap.masked_fill(~mask, 0.0)
        if self.level == "sequence":
            gap = gap.sum(1, keepdim=True).expand_as(gap)
        weights = gap.clamp(-_EXPONENT, _EXPONENT).exp()
        # Worked solutions were sampled by nobody.
        weights = weights.where(batch.row_sampled[:, None], torch.ones_like(weights))
        return weights.masked_fill(~mask, 0.0)

    def apply(self, batch: Batch) -> Batch:
        """The batch with `correction` set and, for masking, weights emptied; after `prepare`."""
        if self.level == "none":
            return batch
        raw = self.raw(batch)
        if self.mode == "truncate":
            return replace(batch, correction=raw.clamp(min=self.low, max=self.cap))
        kept = (raw >= self.low) & (raw <= self.cap)
        weights = {name: w.masked_fill(~kept, 0.0) for name, w in batch.weights.items()}
        return replace(batch, correction=raw.masked_fill(~kept, 0.0), weights=weights)


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2) over the masked tokens, in (0, 1]; 1 when all weights are equal."""
    found = weights[mask].double()
    if not found.numel():
        return torch.ones(())
    return found.sum().square() / (found.numel() * found.square().sum()).clamp(min=1e-30)
