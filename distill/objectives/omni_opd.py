"""Distillation from a teacher that only writes text (OmniOPD, arXiv 2606.01476).

    pi_hat_c = (votes_c + prior exp(mean_{t in c} S_t)) / (num_continuations + prior)
    loss = sum_{audited c} sum_{t in c} -pi_hat_c S_t + kl_coefficient sum_{other t} KL(ref || pi)

Chunks of the student's reply that begin where it was least sure are shown to the teacher up to
their start; the votes are how much each of its continuations resembles the student's own words. The
rest of the reply is held near a frozen reference. No weight is negative: competition comes from the
softmax. The paper's numbers are known through one re-implementation; one update per batch only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from distill.batch import Batch
from distill.divergence import DivergenceSpec
from distill.errors import AlignmentError, ConfigError
from distill.objectives.base import (
    ForwardPlan,
    Metric,
    PolicyView,
    State,
    Term,
)
from distill.types import StepInfo

VOTES, CHUNK = "audit.votes", "audit.chunk"
"""Signals of the step's audit: votes of each token's chunk, and its number from 1 (0: none)."""


def greedy_peaks(entropy: Sequence[float], num_chunks: int, length: int) -> list[int]:
    """Starts of up to `num_chunks` disjoint chunks of `length` tokens, at the highest entropies.

    Greedy by entropy, earlier positions first among equals; a chunk must fit as a whole.
    """
    starts: list[int] = []
    for at in sorted(range(len(entropy)), key=lambda i: (-entropy[i], i)):
        if len(starts) == num_chunks:
            break
        fits = at + length <= len(entropy)
        if fits and all(abs(at - other) >= length for other in starts):
            starts.append(at)
    return sorted(starts)


def smoothed(votes: Tensor, mean_logprob: Tensor, num: int, prior: float) -> Tensor:
    """Posterior mean (votes + prior * exp(mean log-probability)) / (num + prior), in [0, 1]."""
    return ((votes + prior * mean_logprob.exp()) / (num + prior)).detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class OmniOPD:
    name: ClassVar[str] = "omni_opd"
    needs: ClassVar[frozenset[str]] = frozenset(
        {"text", "student.logprobs", "student.entropy", "reference.distribution"}
    )
    corrects: ClassVar[str | None] = None
    paper: ClassVar[str] = "2606.01476"
    formula: ClassVar[str] = "-pi_hat S on audited chunks, c KL(ref, pi) elsewhere"

    num_chunks: int = 10
    """Chunks audited per reply, at most."""

    num_continuations: int = 10
    """Continuations that the teacher writes per chunk."""

    chunk_length: int = 50
    """Tokens per chunk; a shorter reply has none and is only held near the reference."""

    prior: float = 1.0
    """Strength of the student's own likelihood in pi_hat, > 0."""

    kl_coefficient: float = 0.1
    """Weight of KL(reference || student) on the tokens that were not audited."""

    similarity: Literal["ned", "exact"] = "ned"
    """How a continuation resembles the student's words: normalised edit distance, or equality."""

    aggregate: ClassVar[str] = "sum over each row, mean over rows"

    def __post_init__(self) -> None:
        for name in ("num_chunks", "num_continuations", "chunk_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"objective.{name} must be at least 1, got {getattr(self, name)}")
        if not self.prior > 0 or self.kl_coefficient < 0:
            raise ConfigError(
                "objective.prior must be positive and kl_coefficient not negative, got "
                f"{self.prior} and {self.kl_coefficient}"
            )

    @property
    def _anchor(self) -> DivergenceSpec:
        return DivergenceSpec(name=f"{self.name}.anchor", beta=0.0, target="reference")

    def plan(self) -> ForwardPlan:
        return ForwardPlan(entropy=True, divergences=(self._anchor,))

    def prepare(self, batch: Batch, step: StepInfo, state: State) -> tuple[Batch, State]:
        for name in (VOTES, CHUNK):
            if name not in batch.signals:
                raise AlignmentError(f"the batch has no {name}: nobody audited the step's replies")
        mask = batch.completion_mask & batch.row_sampled[:, None]
        audited = mask & (batch.signals[CHUNK] > 0)
        return replace(
            batch,
            weights={
                **batch.weights,
                self.name: audited.float(),
                self._anchor.name: (mask & ~audited).float(),
            },
        ), state

    def __call__(self, policy: PolicyView, batch: Batch) -> tuple[Term, ...]:
        weights = batch.weights[self.name]
        votes, numbers = batch.signals[VOTES], batch.signals[CHUNK].long()
        means = _chunk_means(policy.logprobs.detach(), numbers)
        share = smoothed(votes, means, self.num_continuations, self.prior)
        share = share.masked_fill(weights == 0, 0.0)
        anchor = batch.weights[self._anchor.name]
        value = policy.divergences[self._anchor.name].per_token
        return (
            Term(
                name=self.name,
                per_token=-share * policy.logprobs,
                weights=weights,
                denominator="rows",
                metrics={
                    "pi_hat": Metric(values=share, weights=weights),
                    "votes": Metric(values=votes / self.num_continuations, weights=weights),
                    "audited_share": Metric(values=weights, weights=batch.completion_mask.float()),
                },
            ),
            Term(
                name=self._anchor.name,
                per_token=value,
                weights=anchor,
                denominator="rows",
                coefficient=self.kl_coefficient,
                metrics={"divergence": Metric(values=value.detach(), weights=anchor)},
            ),
        )


def _chunk_means(logprobs: Tensor, numbers: Tensor) -> Tensor:
    """Mean log-probability of each token's chunk: [B, T], chunk numbers from 1 -> [B, T]."""
    size = int(numbers.max()) + 1
    shape = (logprobs.shape[0], size)
    sums = logprobs.new_zeros(shape).scatter_add(1, numbers, logprobs)
    counts = logprobs.new_zeros(shape).scatter_add(1, numbers, torch.ones_like(logprobs))
    return (sums / counts.clamp(min=1)).gather(1, numbers)
