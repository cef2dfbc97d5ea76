"""One pass over the output head, in chunks: everything that a plan names, from hidden states.

A chunk's logits live only while the chunk is worked on. With gradient and more than one chunk:

- a divergence whose weights are known beforehand forms the gradients of hidden states and head in
  the forward pass; the upstream gradient is then one scalar times those weights, so the backward
  pass only scales. Where it is something else, the chunk is computed again;
- log-probabilities of tokens are computed again, chunk by chunk, in the backward pass, because
  their upstream gradient depends on their values.

A teacher with another tokenizer is compared group by group (`distill.groups`). What a group's row
owes to its later tokens is found in a first pass over those tokens alone, without gradient; the
objective adds their gradient through the log-probabilities of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from distill.distributions import HiddenDistribution
from distill.divergence import Candidates, Distribution, Divergence, DivergenceSpec, divergence
from distill.fused import Buffers, has_closed_form, row_dot
from distill.groups import GroupTarget
from distill.logprobs import Head, chunk_bounds, token_entropy


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One divergence of a pass: against what, and with which weights it will be summed."""

    spec: DivergenceSpec
    target: Distribution | Candidates
    rows: Tensor  # [N] the number of each row in the target
    weights: Tensor | None = None  # [N]
    later: Tensor | None = None  # [N] log-probability of the tokens behind the first of a group

    def on(self, log_probs: Tensor, start: int, stop: int) -> Divergence:
        if isinstance(self.target, GroupTarget):
            assert self.later is not None, "the pass fills it in first"
            rows, later = self.rows[start:stop], self.later[start:stop]
            return self.target.compare(log_probs, rows, later, self.spec)
        if isinstance(self.target, Candidates):
            ids, known = self.target.ids[start:stop], self.target.logprobs[start:stop]
            return divergence(log_probs, Candidates(ids=ids, logprobs=known), self.spec)
        return divergence(log_probs, self.target.log_probs(self.rows[start:stop]), self.spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOutput:
    """What a pass found for its N rows."""

    tokens: Tensor  # [N] log-probabilities of the first id of each row
    candidates: Tensor  # [N, K] and of the others
    entropy: Tensor | None = None  # [N]
    divergences: Sequence[Divergence] = ()
    top_ids: Tensor | None = None  # [N, k]
    top_logprobs: Tensor | None = None  # [N, k]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPass:
    """What to compute from hidden states: log-probabilities of `token_ids` [N, 1 + K], and more."""

    head: Head
    token_ids: Tensor  # [N, 1 + K] int64
    entropy: bool = False
    divergences: Sequence[Wanted] = field(default_factory=tuple)
    top_k: int = 0
    """Also the k most likely entries of each row, without gradient."""

    def run(self, rows: Tensor) -> HeadOutput:
        """rows [N, d] -> the output, with gradient where `rows` or the head have one."""
        if any(isinstance(w.target, GroupTarget) and w.later is None for w in self.divergences):
            made = [self._with_later(w, rows) for w in self.divergences]
            return replace(self, divergences=made).run(rows)
        bounds = chunk_bounds(rows.shape[0], self.head.vocab_size)
        weight = self.head.weight
        differentiable = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
        if differentiable and len(bounds) > 1:
            columns: Sequence[Tensor] = _Chunked.apply(  # type: ignore[no-untyped-call]
                rows, weight, self.head.bias, self, bounds
            )
            return self._output(columns)
        pieces = [self._columns(self.head.raw(rows[a:b]), a, b) for a, b in bounds]
        if len(pieces) == 1:
            return self._output(pieces[0])
        return self._output([torch.cat(column) for column in zip(*pieces, strict=True)])

    @torch.no_grad()
    def _with_later(self, wanted: Wanted, rows: Tensor) -> Wanted:
        """The same with what the groups' later tokens add, for a target that has groups."""
        if not isinstance(wanted.target, GroupTarget):
            return wanted
        members, places = wanted.target.behind_first(wanted.rows)
        found = replace(self, token_ids=self.token_ids[members, :1], divergences=(), entropy=False)
        later = torch.zeros(rows.shape[0], dtype=torch.float32, device=rows.device)
        if len(members):
            later.index_add_(0, places, found.run(rows[members]).tokens)
        return replace(wanted, later=later)

    def _columns(self, raw: Tensor, start: int, stop: int) -> list[Tensor]:
        """Columns of one chunk; those of divergences come in pairs: value and statistics."""
        log_probs = torch.log_softmax(self.head.finish(raw), dim=-1)
        out = [log_probs.gather(-1, self.token_ids[start:stop])]
        with torch.no_grad():
            if self.entropy:
                out.append(token_entropy(log_probs))
            if self.top_k:
                best = log_probs.topk(self.top_k, dim=-1)
                out += [best.indices, best.values]
        for wanted in self.divergences:
            found = wanted.on(log_probs, start, stop)
            out += [found.per_token, found.stats]
        return out

    def _buffers(self, bounds: Sequence[tuple[int, int]], rows: Tensor) -> Buffers | None:
        """Scratch for the closed form, where the pass has one divergence that has one."""
        if len(self.divergences) != 1 or self.top_k:
            return None
        (wanted,) = self.divergences
        if wanted.weights is None or not has_closed_form(wanted.spec, wanted.target, self.head):
            return None
        size = max(b - a for a, b in bounds)
        return Buffers.empty(size, self.head.vocab_size, rows.device)

    def _closed_form(
        self, rows: Tensor, scratch: Buffers, start: int, stop: int
    ) -> tuple[list[Tensor], Tensor]:
        """The columns of `_columns`, and the gradient of the weighted divergence by the linear
        output [n, V], which lives in the scratch."""
        (wanted,) = self.divergences
        target = wanted.target
        assert isinstance(target, HiddenDistribution)
        assert wanted.weights is not None
        scratch.read(self.head, rows, scratch.ours)
        out = [scratch.ours.gather(-1, self.token_ids[start:stop])]
        if self.entropy:
            torch.exp(scratch.ours, out=scratch.extra)
            out.append(-row_dot(scratch.extra, scratch.ours))
        scratch.read(target.head, target.hidden[wanted.rows[start:stop]], scratch.theirs)
        value, d_raw = scratch.divergence(wanted.spec.beta)
        stats = value.new_tensor([1.0, 1.0, 0.0]).expand(stop - start, 3)
        factor = self.head.scale / self.head.temperature
        d_raw.mul_(wanted.weights[start:stop, None] * factor)
        return [*out, value, stats], d_raw

    @property
    def _first_divergence(self) -> int:
        """Number of the column where the pairs begin."""
        return 1 + self.entropy + 2 * bool(self.top_k)

    def _output(self, columns: Sequence[Tensor]) -> HeadOutput:
        rest = iter(columns)
        tokens, candidates = next(rest).split([1, self.token_ids.shape[1] - 1], dim=1)
        entropy = next(rest) if self.entropy else None
        top = (next(rest), next(rest)) if self.top_k else (None, None)
        pairs = [Divergence(per_token=next(rest), stats=next(rest)) for _ in self.divergences]
        return HeadOutput(
            tokens=tokens[:, 0],
            candidates=candidates,
            entropy=entropy,
            divergences=tuple(pairs),
            top_ids=top[0],
            top_logprobs=top[1],
        )


@dataclass(slots=True)
class _Sums:
    """Gradients of hidden states and head, summed over chunks in float32."""

    rows: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(cls, like: Sequence[Tensor | None], needs: Sequence[bool]) -> _Sums:
        """Empty sums for rows, weight and bias, those that need a gradient."""
        rows, weight, bias = (
            torch.zeros_like(x, dtype=torch.float32) if x is not None and need else None
            for x, need in zip(like, (True, *needs[1:3]), strict=True)
        )
        assert rows is not None
        return cls(rows=rows, weight=weight, bias=bias)

    def add(self, d_raw: Tensor, rows: Tensor, weight: Tensor, at: slice) -> None:
        """d_raw [n, V] float32 is the gradient of a chunk's linear output."""
        low = d_raw.to(weight.dtype)
        self.rows[at] += low @ weight
        if self.weight is not None:
            if rows.dtype == torch.float32:
                self.weight.addmm_(d_raw.t(), rows)
            else:
                self.weight += low.t() @ rows
        if self.bias is not None:
            self.bias += d_raw.sum(0)

    def plus(self, other: _Sums, factor: float) -> None:
        for name in ("rows", "weight", "bias"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None:
                mine.add_(theirs, alpha=factor)


class _Chunked(torch.autograd.Function):
    """The pass over several chunks. Not twice differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        what: HeadPass,
        bounds: Sequence[tuple[int, int]],
    ) -> tuple[Tensor, ...]:
        needs = ctx.needs_input_grad
        known = [w for w in what.divergences if w.weights is not None]
        ahead = {id(w): _Sums.zeros((rows, weight, bias), needs) for w in known}
        first = what._first_divergence
        buffers = what._buffers(bounds, rows)
        pieces = []
        for a, b in bounds:
            if buffers is not None:
                scratch = buffers.cut(b - a)
                columns, d_raw = what._closed_form(rows[a:b], scratch, a, b)
                if bool(torch.isfinite(columns[first]).all()):  # else the general form clamps
                    pieces.append(columns)
                    ahead[id(known[0])].add(d_raw, rows[a:b], weight, slice(a, b))
                    continue
            raw = what.head.raw(rows[a:b])
            if not ahead:
                pieces.append(what._columns(raw, a, b))
                continue
            with torch.enable_grad():
                leaf = raw.requires_grad_()
                columns = what._columns(leaf, a, b)
                for i, wanted in enumerate(what.divergences):
                    if wanted.weights is None:
                        continue
                    value = (columns[first + 2 * i] * wanted.weights[a:b]).sum()
                    more = wanted is not known[-1]
                    (d_raw,) = torch.autograd.grad(value, leaf, retain_graph=more)
                    ahead[id(wanted)].add(d_raw, rows[a:b], weight, slice(a, b))
            pieces.append([c.detach() for c in columns])
        outputs = tuple(torch.cat(column) for column in zip(*pieces, strict=True))
        ctx.save_for_backward(rows, weight, bias)
        ctx.what, ctx.bounds, ctx.ahead, ctx.first = what, bounds, ahead, first
        ctx.set_materialize_grads(False)
        fixed = [
            out
            for i, out in enumerate(outputs)
            if 0 < i < first or (i >= first and (i - first) % 2)
        ]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        rows, weight, bias = ctx.saved_tensors
        what: HeadPass = ctx.what
        sums = _Sums.zeros((rows, weight, bias), ctx.needs_input_grad)
        again = [] if grads[0] is None else [(0, grads[0])]
        unknown: list[Wanted] = []
        for i, wanted in enumerate(what.divergences):
            upstream = grads[ctx.first + 2 * i]
            if upstream is None:
                continue
            factor = None if wanted.weights is None else _one_scalar(upstream, wanted.weights)
            if factor is None:
                again.append((1 + 2 * len(unknown), upstream))
                unknown.append(wanted)
            else:
                sums.plus(ctx.ahead[id(wanted)], factor)
        if again:
            less = replace(what, entropy=False, top_k=0, divergences=unknown)
            for a, b in ctx.bounds:
                raw = what.head.raw(rows[a:b])
                with torch.enable_grad():
                    leaf = raw.requires_grad_()
                    columns = less._columns(leaf, a, b)
                    value = torch.stack([(columns[c] * g[a:b]).sum() for c, g in again]).sum()
                (d_raw,) = torch.autograd.grad(value, leaf)
                sums.add(d_raw, rows[a:b], weight, slice(a, b))
        return (
            sums.rows.to(rows.dtype),
            None if sums.weight is None else sums.weight.to(weight.dtype),
            None if sums.bias is None else sums.bias.to(bias.dtype),
            None,
            None,
        )


def _one_scalar(upstream: Tensor, weights: Tensor) -> float | None:
    """c with upstream = c * weights, or None when there is none."""
    norm = float(weights.square().sum())
    if not norm > 0.0:
        return None if bool(upstream.any()) else 0.0
    factor = float((upstream * weights).sum()) / norm
    close = torch.allclose(upstream, factor * weights, rtol=1e-5, atol=1e-12)
    return factor if close else None
