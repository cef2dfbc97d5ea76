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
    """Hidden states of the trained positions and the head that reads them."""

    hidden: Tensor  # [N, d]
    head: Head

    @torch.no_grad()
    def log_probs(self, rows: Tensor) -> Tensor:
        return self.head.log_probs(self.hidden[rows])


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
        pieces = _same_width([part.log_probs(rows) for part in self.parts])
        weighted = [p + math.log(w) for p, w in zip(pieces, self.weights, strict=True)]
        return torch.logsumexp(torch.stack(weighted), dim=0)


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
        found = [part.log_probs(number[owner == i]) for i, part in enumerate(self.parts)]
        pieces = _same_width(found)
        out = pieces[0].new_empty(rows.shape[0], pieces[0].shape[-1])
        for i, piece in enumerate(pieces):
            out[owner == i] = piece
        return out


def _same_width(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Log-probabilities cut to the ids that all have; the others are padding."""
    width = min(p.shape[-1] for p in pieces)
    return [p if p.shape[-1] == width else p[:, :width].log_softmax(-1) for p in pieces]
