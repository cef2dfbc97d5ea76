"""Full-vocabulary divergences of one chunk with their gradient, in closed form and in place.

Four buffers of the chunk's size serve every chunk of a pass: nothing of that size is allocated in
between, which is what the time and the memory of a large vocabulary hang on.

    forward KL   sum_v nu (log nu - log pi)      d / d logits = pi - nu
    reverse KL   sum_v pi (log pi - log nu)      d / d logits = pi (log pi - log nu - KL)
    JSD          see `distill.divergence`        d / d logits = pi (g - sum_v pi g),
                                                 g = (1 - beta) (log pi - log m)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.distributions import HiddenDistribution
from distill.divergence import Candidates, Distribution, DivergenceSpec
from distill.logprobs import Head

_TINY = 1e-38
"""Smallest probability of a mixture whose logarithm is taken."""


def has_closed_form(spec: DivergenceSpec, target: Distribution | Candidates, head: Head) -> bool:
    """Whether `Buffers` can do it: KL or JSD over the full vocabulary, a head without a soft cap,
    and a teacher of the same width in hidden states."""
    return (
        spec.kind == "kl"
        and spec.support == "full"
        and spec.temperature == 1.0
        and not spec.entry_clip
        and head.soft_cap is None
        and isinstance(target, HiddenDistribution)
        and target.head.vocab_size == head.vocab_size
    )


@dataclass(slots=True)
class Buffers:
    """Scratch of one pass: [rows of a chunk, V] float32 each."""

    logits: Tensor
    ours: Tensor
    theirs: Tensor
    extra: Tensor

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device) -> Buffers:
        shape = (num_rows, vocab_size)
        return cls(*(torch.empty(shape, dtype=torch.float32, device=device) for _ in range(4)))

    def cut(self, num_rows: int) -> Buffers:
        """The same memory for a shorter chunk."""
        return Buffers(*(x[:num_rows] for x in (self.logits, self.ours, self.theirs, self.extra)))

    def read(self, head: Head, rows: Tensor, out: Tensor) -> None:
        """Log-probabilities of `rows` [n, d] under `head` into `out` [n, V]."""
        if rows.dtype == torch.float32:
            torch.mm(rows, head.weight.detach().t(), out=self.logits)
            if head.bias is not None:
                self.logits.add_(head.bias.detach())
        else:
            self.logits.copy_(head.raw(rows))
        if head.soft_cap is not None:
            self.logits.copy_(head.finish(self.logits))
        elif head.scale != head.temperature:
            self.logits.mul_(head.scale / head.temperature)
        torch.log_softmax(self.logits, dim=-1, out=out)

    def divergence(self, beta: float) -> tuple[Tensor, Tensor]:
        """Value [n] and gradient by the logits [n, V], from log-probabilities in `ours` and
        `theirs`; both, and `extra`, are overwritten."""
        ours, theirs, extra = self.ours, self.theirs, self.extra
        if beta == 0.0:
            torch.exp(theirs, out=extra)
            value = row_dot(extra, theirs.sub_(ours))
            return value, ours.exp_().sub_(extra)
        if beta == 1.0:
            torch.exp(ours, out=extra)
            value = row_dot(extra, theirs.neg_().add_(ours))
            return value, theirs.sub_(value[:, None]).mul_(extra)
        # log m in `extra`, from the probabilities of both sides.
        mixed, nu = self.logits, extra
        torch.exp(ours, out=mixed)
        torch.exp(theirs, out=nu)
        value = beta * row_dot(nu, theirs)
        pi = theirs.copy_(mixed)
        mixed.mul_(1.0 - beta).add_(nu, alpha=beta).clamp_(min=_TINY).log_()
        value -= beta * row_dot(nu, mixed)
        gap = ours.sub_(mixed).mul_(1.0 - beta)
        mean = row_dot(pi, gap)
        return value + mean, gap.sub_(mean[:, None]).mul_(pi)


def row_dot(left: Tensor, right: Tensor) -> Tensor:
    """Row-wise inner products without a product of the full size: [n, V] x [n, V] -> [n]."""
    return torch.bmm(left.unsqueeze(1), right.unsqueeze(2)).view(-1)
