"""Divergences between a student's and a teacher's next-token distribution, in nats.

pi is the student, nu the teacher. `beta` is the interpolation of GKD (arXiv 2306.13649):
0 = forward KL(nu||pi), 1 = reverse KL(pi||nu), between: the generalised Jensen-Shannon divergence
beta * KL(nu||M) + (1 - beta) * KL(pi||M) with M = (1 - beta) * pi + beta * nu. It is bounded and
does not tend to a KL at its ends: re-tune the learning rate whenever beta crosses 0 or 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.logprobs import Head


class Distribution(Protocol):
    """A teacher's full distributions, produced chunk by chunk, without gradient.

    Rows are numbered over the trained tokens of the whole optimizer step, row-major. Never
    written to disk; recomputed on resume.
    """

    def log_probs(self, rows: Tensor) -> Tensor: ...  # rows [n] int64 -> [n, V] float32


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenDistribution:
    """Hidden states of the trained positions and the head that reads them."""

    hidden: Tensor  # [N, d]
    head: Head

    @torch.no_grad()
    def log_probs(self, rows: Tensor) -> Tensor:
        return self.head.log_probs(self.hidden[rows])


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceSpec:
    """Which divergence one pass over the head returns, against which target role."""

    name: str
    beta: float = 1.0
    target: str = "teacher"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta <= 1.0:
            raise ConfigError(f"beta must be within [0, 1], got {self.beta}")
        if self.temperature <= 0.0:
            raise ConfigError(f"temperature must be positive, got {self.temperature}")


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(nu||pi) per position: log-probabilities [..., V] -> [...]."""
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(pi||nu) per position: log-probabilities [..., V] -> [...]."""
    return (student.exp() * (student - teacher)).sum(-1)


def generalised_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """beta KL(nu||M) + (1-beta) KL(pi||M), 0 < beta < 1, per position."""
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * forward_kl(mixture, teacher) + (1.0 - beta) * forward_kl(mixture, student)


def divergence(student: Tensor, teacher: Tensor, spec: DivergenceSpec) -> Tensor:
    """The divergence named by `spec`: log-probabilities [n, V] of both -> [n] float32.

    Vocabulary widths that differ by padding are cut to the shared ids and renormalised.
    """
    width = min(student.shape[-1], teacher.shape[-1])
    student = _rescale(student, width, spec.temperature)
    teacher = _rescale(teacher, width, spec.temperature).detach()
    if spec.beta == 0.0:
        return forward_kl(student, teacher)
    if spec.beta == 1.0:
        return reverse_kl(student, teacher)
    return generalised_jsd(student, teacher, spec.beta)


def _rescale(log_probs: Tensor, width: int, temperature: float) -> Tensor:
    if width == log_probs.shape[-1] and temperature == 1.0:
        return log_probs
    return torch.log_softmax(log_probs[..., :width] / temperature, dim=-1)


def k1(student: Tensor, teacher: Tensor) -> Tensor:
    """S - N at sampled tokens: unbiased for reverse KL; as a direct loss its expected gradient
    is zero, so it is only ever an advantage."""
    return student - teacher


def k2(student: Tensor, teacher: Tensor) -> Tensor:
    """(S - N)^2 / 2: biased in value, its expected gradient is that of the reverse KL."""
    return 0.5 * (student - teacher).square()


def k3(student: Tensor, teacher: Tensor) -> Tensor:
    """exp(N - S) - (N - S) - 1: unbiased for reverse KL and never negative; its expected gradient
    is that of the FORWARD KL, so it is a monitor."""
    gap = teacher - student
    return gap.exp() - gap - 1.0
