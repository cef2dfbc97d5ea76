"""The chunked head against the dense one: every divergence, every kind of head, both ways back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distill import logprobs
from distill.distributions import HiddenDistribution, LogitMix, ProbabilityMixture
from distill.divergence import Candidates, DivergenceSpec
from distill.headpass import HeadPass, Wanted
from distill.logprobs import Head

N, D, V = 13, 6, 17

SPECS = {
    "forward KL": DivergenceSpec(name="x", beta=0.0),
    "reverse KL": DivergenceSpec(name="x", beta=1.0),
    "JSD 0.3": DivergenceSpec(name="x", beta=0.3),
    "total variation": DivergenceSpec(name="x", kind="total_variation"),
    "temperature 2": DivergenceSpec(name="x", beta=1.0, temperature=2.0),
    "paper clip": DivergenceSpec(name="x", beta=0.0, entry_clip=0.05),
    "bregman clip": DivergenceSpec(name="x", beta=0.0, entry_clip=0.05, clip_form="bregman"),
    "student top-k, tail": DivergenceSpec(
        name="x", beta=1.0, support="top_k", k=4, chosen_by="student"
    ),
    "teacher top-k, renormalised": DivergenceSpec(
        name="x", beta=0.0, support="top_k", k=4, rest="renormalised"
    ),
    "teacher top-k, raw": DivergenceSpec(name="x", beta=0.0, support="top_k", k=4, rest="raw"),
    "union, tail": DivergenceSpec(name="x", beta=0.5, support="top_k", k=4, chosen_by="union"),
}


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1.5


def make_head(seed=0, **options):
    weight = draw(V, D, seed=seed).requires_grad_()
    return Head(weight=weight, **options)


TEACHER = HiddenDistribution(hidden=draw(N, D, seed=5), head=make_head(seed=6))
HEADS = {
    "plain": {},
    "biased": {"bias": True},
    "scaled": {"scale": 0.25},
    "soft cap": {"soft_cap": 3.0},
    "temperature": {"temperature": 0.7},
}


def run(spec, head_options, elements, monkeypatch, *, upstream=None, known=True, target=TEACHER):
    """Outputs and gradients of rows, weight and bias; `upstream` multiplies the divergence."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    options = dict(head_options)
    bias = draw(V, seed=8).requires_grad_() if options.pop("bias", False) else None
    head = make_head(bias=bias, **options)
    rows = draw(N, D, seed=1).requires_grad_()
    weights = draw(N, seed=2).abs()
    wanted = Wanted(
        spec=spec, target=target, rows=torch.arange(N), weights=weights if known else None
    )
    ids = torch.arange(N * 3).view(N, 3) % V
    out = HeadPass(head=head, token_ids=ids, entropy=True, divergences=(wanted,)).run(rows)
    scale = 0.37 * weights if upstream is None else upstream
    loss = (out.divergences[0].per_token * scale).sum()
    if upstream is not None:
        loss = loss + (out.tokens * draw(N, seed=3)).sum() + out.candidates.sum()
    inputs = [rows, head.weight] + ([bias] if bias is not None else [])
    return out, torch.autograd.grad(loss, inputs)


def compare(left, right):
    for field in ("tokens", "candidates", "entropy"):
        torch.testing.assert_close(getattr(left[0], field), getattr(right[0], field))
    ours, theirs = left[0].divergences[0], right[0].divergences[0]
    torch.testing.assert_close(ours.per_token, theirs.per_token, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.stats, theirs.stats, atol=1e-5, rtol=1e-5)
    for a, b in zip(left[1], right[1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_chunks_with_known_weights_equal_the_dense_pass(spec, monkeypatch):
    dense = run(spec, {}, 10**6, monkeypatch)
    compare(run(spec, {}, 3 * V, monkeypatch), dense)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_chunks_are_computed_again_where_the_upstream_gradient_is_another(spec, monkeypatch):
    upstream = draw(N, seed=4)
    dense = run(spec, {}, 10**6, monkeypatch, upstream=upstream)
    compare(run(spec, {}, 3 * V, monkeypatch, upstream=upstream), dense)
    compare(run(spec, {}, 3 * V, monkeypatch, upstream=upstream, known=False), dense)


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS.keys())
def test_every_kind_of_head_has_the_same_chunked_gradients(options, monkeypatch):
    spec = SPECS["reverse KL"]
    compare(run(spec, options, 3 * V, monkeypatch), run(spec, options, 10**6, monkeypatch))
    upstream = draw(N, seed=4)
    compare(
        run(spec, options, 3 * V, monkeypatch, upstream=upstream),
        run(spec, options, 10**6, monkeypatch, upstream=upstream),
    )


def test_a_soft_cap_changes_the_divergence_and_its_gradient(monkeypatch):
    spec = SPECS["forward KL"]
    plain, capped = (run(spec, o, 3 * V, monkeypatch) for o in ({}, {"soft_cap": 3.0}))
    assert not torch.allclose(plain[0].divergences[0].per_token, capped[0].divergences[0].per_token)


@pytest.mark.parametrize(
    "target",
    [
        LogitMix(first=TEACHER, second=replace(TEACHER, hidden=draw(N, D, seed=9)), mix=0.3),
        ProbabilityMixture(
            parts=(TEACHER, replace(TEACHER, hidden=draw(N, D, seed=9))), weights=(0.4, 0.6)
        ),
        HiddenDistribution(hidden=draw(N, D, seed=5), head=make_head(seed=6).cut(V - 3)),
        HiddenDistribution(
            hidden=draw(N, D, seed=5), head=make_head(seed=6, soft_cap=2.0, scale=0.5)
        ),
    ],
    ids=["trust region", "mixture", "fewer ids", "soft cap"],
)
def test_every_kind_of_teacher_distribution_works_in_chunks(target, monkeypatch):
    spec = SPECS["JSD 0.3"]
    compare(
        run(spec, {}, 3 * V, monkeypatch, target=target),
        run(spec, {}, 10**6, monkeypatch, target=target),
    )


def test_a_candidate_teacher_equals_the_full_one_on_its_own_support(monkeypatch):
    spec = SPECS["teacher top-k, renormalised"]
    full = TEACHER.log_probs(torch.arange(N)).topk(4, dim=-1)
    few = Candidates(ids=full.indices, logprobs=full.values)
    compare(run(spec, {}, 3 * V, monkeypatch, target=few), run(spec, {}, 10**6, monkeypatch))


def test_a_teacher_that_rules_entries_out_leaves_value_and_gradient_finite(monkeypatch):
    bias = torch.zeros(V)
    bias[3] = -torch.inf
    target = HiddenDistribution(
        hidden=draw(N, D, seed=5), head=Head(weight=draw(V, D, seed=6), bias=bias)
    )
    for name in ("forward KL", "reverse KL", "JSD 0.3"):
        dense = run(SPECS[name], {}, 10**6, monkeypatch, target=target)
        chunked = run(SPECS[name], {}, 3 * V, monkeypatch, target=target)
        assert bool(torch.isfinite(chunked[0].divergences[0].per_token).all())
        assert all(bool(torch.isfinite(grad).all()) for grad in chunked[1])
        compare(chunked, dense)


def test_the_teacher_is_read_once_where_only_tokens_are_computed_again(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 3 * V)
    asked = []

    class Counted:
        def log_probs(self, rows):
            asked.append(len(rows))
            return TEACHER.log_probs(rows)

    rows, weights = draw(N, D, seed=1).requires_grad_(), draw(N, seed=2).abs()
    wanted = Wanted(
        spec=SPECS["forward KL"], target=Counted(), rows=torch.arange(N), weights=weights
    )
    ids = torch.zeros(N, 1, dtype=torch.long)
    out = HeadPass(head=make_head(), token_ids=ids, divergences=(wanted,)).run(rows)
    (out.tokens.square().sum() + (out.divergences[0].per_token * weights).sum()).backward()
    assert sum(asked) == N


def test_a_frozen_head_gets_no_gradient(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 3 * V)
    head = Head(weight=draw(V, D, seed=0))
    rows = draw(N, D, seed=1).requires_grad_()
    wanted = Wanted(
        spec=SPECS["reverse KL"], target=TEACHER, rows=torch.arange(N), weights=torch.ones(N)
    )
    out = HeadPass(
        head=head, token_ids=torch.zeros(N, 1, dtype=torch.long), divergences=(wanted,)
    ).run(rows)
    out.divergences[0].per_token.sum().backward()
    assert head.weight.grad is None
    assert bool(rows.grad.any())


def test_the_teachers_side_gets_no_gradient(monkeypatch):
    for elements in (3 * V, 10**6):
        run(SPECS["forward KL"], {}, elements, monkeypatch)
        assert TEACHER.head.weight.grad is None
