"""Full next-token distributions of a teacher, made chunk by chunk from hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.divergence import Distribution
from distill.errors import ConfigError
from distill.logprobs import Head


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenDistribution:
    """Hidden states of the trained positions and the head that reads them.

    `num_ids` cuts the vocabulary to the ids that both sides share (padding rows left out).
    """

    hidden: Tensor  # [N, d]
    head: Head
    num_ids: int | None = None

    @torch.no_grad()
    def log_probs(self, rows: Tensor) -> Tensor:
        logits = self.head.logits(self.hidden[rows])
        return torch.log_softmax(logits[:, : self.num_ids], dim=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitMix:
    """q proportional to first^(1 - mix) * second^mix: the trust region of SDPO (arXiv 2601.20802).

    Interpolating logits and interpolating log-probabilities give the same q.
    """

    first: Distribution
    second: Distribution
    mix: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.mix <= 1.0:
            raise ConfigError(f"mix must be within [0, 1], got {self.mix}")

    @torch.no_grad()
    def log_probs(self, rows: Tensor) -> Tensor:
        mixed = torch.lerp(self.first.log_probs(rows), self.second.log_probs(rows), self.mix)
        return torch.log_softmax(mixed, dim=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbabilityMixture:
    """sum_i weight_i * nu_i over teachers of one vocabulary; the weights sum to 1."""

    parts: Sequence[Distribution]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.weights) or min(self.weights, default=0.0) <= 0.0:
            raise ConfigError(
                f"a mixture needs one positive weight per teacher, got {len(self.parts)} teachers "
                f"and weights {list(self.weights)}"
            )
        if abs(sum(self.weights) - 1.0) > 1e-6:
            raise ConfigError(f"mixture weights must sum to 1, got {list(self.weights)}")

    @torch.no_grad()
    def log_probs(self, rows: Tensor) -> Tensor:
        pieces = [
            part.log_probs(rows) + math.log(weight)
            for part, weight in zip(self.parts, self.weights, strict=True)
        ]
        return torch.logsumexp(torch.stack(pieces), dim=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedDistribution:
    """Rows of several teachers, each answering for its own: `owner[i]` names row i's teacher and
    `number[i]` is the row's number within that teacher's distribution."""

    parts: Sequence[Distribution]
    owner: Tensor  # [N] int64
    number: Tensor  # [N] int64

    @torch.no_grad()
    def log_probs(self, rows: Tensor) -> Tensor:
        places = rows.to(self.owner.device)
        owner, number = self.owner[places], self.number[places]
        pieces = [(i, part.log_probs(number[owner == i])) for i, part in enumerate(self.parts)]
        width = min(p.shape[-1] for _, p in pieces)
        out = pieces[0][1].new_empty(rows.shape[0], width)
        for i, piece in pieces:
            cut = piece if piece.shape[-1] == width else piece[:, :width].log_softmax(-1)
            out[owner == i] = cut
        return out
