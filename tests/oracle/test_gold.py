"""GOLD against its published vectors, its definition, and finite differences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distill import logprobs
from distill.distributions import HiddenDistribution
from distill.divergence import DivergenceSpec, generalised_jsd
from distill.errors import AlignmentError, ConfigError, TeacherError
from distill.groups import (
    SKIPPED,
    UNMATCHED,
    GroupTarget,
    VocabularyMatch,
    hybrid,
    merged,
    uld,
    unnormalised,
)
from distill.headpass import HeadPass, Wanted
from distill.logprobs import Head
from distill.objectives import OBJECTIVES, Gold
from distill.objectives.base import PolicyView
from helpers import INFO, logits_batch
from vectors import F64, FB_STUDENT, FB_TEACHER, close, f64, numeric_gradient, prompted

BETAS = (0.0, 0.3, 0.5, 1.0)
V, W = 7, 9
MATCH = VocabularyMatch(
    student_ids=torch.tensor([1, 2, 4, 5]),
    teacher_ids=torch.tensor([8, 0, 3, 4]),
    student_rest=torch.tensor([0, 3, 6]),
    teacher_rest=torch.tensor([1, 2, 5, 6, 7]),
)
TOKENS = torch.tensor([[1, 4, 2, 5, 0, 6], [2, 2, 3, 1, 4, 0]])
"""Two rows; the last token of each ends the reply."""
FIRST = torch.tensor([0, 1, 1, 1, UNMATCHED, SKIPPED, 6, 7, 7, 9, 10, SKIPPED])
GROUP = torch.tensor([0, 1, -1, -1, -1, -1, 2, 3, -1, 4, 5, -1])


class Table:
    """A teacher's rows, as they are."""

    def __init__(self, log_probs):
        self.table = log_probs

    def log_probs(self, rows):
        return self.table[rows]


def draw(*shape, seed, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype) * 1.5


STUDENT = draw(2, 6, V, seed=0)
TEACHER = draw(6, W, seed=1).log_softmax(-1)
LATER = -draw(6, seed=2).abs() * torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0], dtype=F64)


def make_target(teacher=TEACHER, match=MATCH, **changes):
    values = {
        "teacher": Table(teacher),
        "logprobs": LATER - 0.5,
        "later": LATER,
        "first": FIRST,
        "group": GROUP,
        "match": match,
    }
    return GroupTarget(**(values | changes))


def loss(objective, logits, target, tokens=TOKENS):
    """Sum of the terms with their gradient, as the trainer adds them, and the prepared batch."""
    batch = logits_batch(tokens, targets={"teacher.distribution": target})
    batch, _ = objective.prepare(batch, INFO, {})
    log_probs = logits.log_softmax(-1)
    chosen = log_probs.gather(-1, tokens[..., None])[..., 0]
    rows = torch.arange(tokens.numel())
    members, places = target.behind_first(rows)
    later = torch.zeros(tokens.numel(), dtype=logits.dtype)
    later = later.index_add(0, places, chosen.detach().flatten()[members])
    (spec,) = objective.plan().divergences
    found = target.compare(log_probs.flatten(0, 1), rows, later, spec)
    shaped = replace(
        found,
        per_token=prompted(found.per_token.view(tokens.shape)),
        stats=prompted(found.stats.view(*tokens.shape, 3)),
    )
    view = PolicyView(logprobs=prompted(chosen), divergences={objective.name: shaped})
    (term,) = objective(view, batch)
    return (term.weights * term.per_token).sum() / term.weights.sum(), batch, term


def by_definition(objective, logits, target, tokens=TOKENS):
    """The same from the definition, group by group, with plain sums."""
    log_probs = logits.log_softmax(-1).flatten(0, 1)
    flat, total = tokens.flatten(), 0.0
    firsts = [i for i, g in enumerate(target.group.tolist()) if g >= 0]
    share = 4 / 9
    for number, i in enumerate(firsts):
        members = [j for j, f in enumerate(target.first.tolist()) if f == i]
        pi = log_probs[i].exp()
        for j in members[1:]:
            pi = pi * log_probs[j, flat[j]].exp()
        nu = target.teacher.table[number].exp() * target.later[number].exp()
        p, q = pi[MATCH.student_ids], nu[MATCH.teacher_ids]
        if objective.beta == 0.0:
            near = (q * (q / p).log() - q + p).sum()
        elif objective.beta == 1.0:
            near = (p * (p / q).log() - p + q).sum()
        else:
            m = (1 - objective.beta) * p + objective.beta * q
            near = (objective.beta * q * (q / m).log()).sum()
            near = near + ((1 - objective.beta) * p * (p / m).log()).sum()
        ours = pi[MATCH.student_rest].sort(descending=True).values
        theirs = nu[MATCH.teacher_rest].sort(descending=True).values
        far = (ours - theirs[:3]).abs().sum() + theirs[3:].sum()
        total = total + share * near + (1 - share) * far
    return total / len(firsts)


def test_the_published_vector_of_sorted_distances():
    student, teacher = FB_STUDENT[0].softmax(-1), FB_TEACHER[0].softmax(-1)
    close(uld(student, teacher)[0], [0.306856, 1.152675])


def test_the_shorter_side_is_filled_up_with_zeros_on_either_side():
    long, short = f64([[0.1, 0.4, 0.3]]), f64([[0.5, 0.2]])
    close(uld(long, short)[0], [0.1 + 0.1 + 0.1])
    close(uld(short, long)[0], [0.1 + 0.1 + 0.1])


def test_the_published_vector_of_a_merged_row():
    row = merged(f64([[0.6, 0.3, 0.1]]).log(), f64([0.9]).log()).exp()
    close(row, [[0.54, 0.27, 0.09]])
    close(row.sum(), 0.9)


@pytest.mark.parametrize("beta", BETAS)
def test_the_loss_is_the_definition_group_by_group(beta):
    objective, target = Gold(beta=beta), make_target()
    found, _, _ = loss(objective, STUDENT, target)
    close(found, by_definition(objective, STUDENT, target), 1e-12)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("weights", [{}, {"matched_weight": 0.7, "unmatched_weight": 0.2}])
def test_the_gradient_is_that_of_the_whole_merged_row(beta, weights):
    objective, target = Gold(beta=beta, **weights), make_target()
    logits = STUDENT.clone().requires_grad_()
    value, _, _ = loss(objective, logits, target)
    (slope,) = torch.autograd.grad(value, logits)
    expected = numeric_gradient(lambda z: loss(objective, z, target)[0], STUDENT)
    close(slope, expected, 1e-7)
    later = slope.flatten(0, 1)[[2, 3, 8]]  # tokens behind the first of their group
    assert bool((later.abs().amax(-1) > 1e-6).all())
    nothing = slope.flatten(0, 1)[[4, 5, 11]]  # unmatched, and the ends of replies
    close(nothing, torch.zeros_like(nothing), 0.0)


@pytest.mark.parametrize("beta", BETAS)
def test_with_one_tokenizer_it_is_the_plain_divergence(beta):
    teacher = draw(12, V, seed=4).log_softmax(-1)
    ids, none = torch.arange(V), torch.arange(0)
    same = VocabularyMatch(student_ids=ids, teacher_ids=ids, student_rest=none, teacher_rest=none)
    target = make_target(
        teacher,
        same,
        logprobs=torch.zeros(12, dtype=F64),
        later=torch.zeros(12, dtype=F64),
        first=torch.arange(12),
        group=torch.arange(12),
    )
    logits = STUDENT.clone().requires_grad_()
    found, _, _ = loss(Gold(beta=beta), logits, target)
    ours = logits.log_softmax(-1).flatten(0, 1)
    if beta == 0.0:
        plain = (teacher.exp() * (teacher - ours)).sum(-1)
    elif beta == 1.0:
        plain = (ours.exp() * (ours - teacher)).sum(-1)
    else:
        plain = generalised_jsd(ours, teacher, beta)
    close(found, plain.mean(), 1e-12)
    close(*(torch.autograd.grad(x, logits)[0] for x in (found, plain.mean())), 1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_merged_rows_give_zero_and_no_other_row_gives_less(beta):
    rows = merged(draw(5, V, seed=3).log_softmax(-1), -draw(5, seed=6).abs())
    close(unnormalised(rows, rows, beta)[0], torch.zeros(5), 1e-12)
    for seed in range(10, 40):
        other = merged(draw(5, V, seed=seed).log_softmax(-1), -draw(5, seed=seed).abs())
        assert float(unnormalised(other, rows, beta)[0].min()) > 0.0


def test_an_entry_that_cannot_happen_is_finite_on_both_sides():
    ours, theirs = draw(1, V, seed=0).log_softmax(-1), draw(1, W, seed=1).log_softmax(-1)
    ours[0, 1] = theirs[0, 0] = -torch.inf
    ours.requires_grad_()
    for beta in BETAS:
        found = hybrid(ours, theirs, MATCH, DivergenceSpec(name="x", kind="hybrid", beta=beta))
        (slope,) = torch.autograd.grad(found.per_token.sum(), ours)
        assert bool(torch.isfinite(found.per_token).all() & torch.isfinite(slope).all())


def test_the_default_weights_are_the_matched_share_of_the_teachers_vocabulary():
    ours, theirs = draw(3, V, seed=0).log_softmax(-1), draw(3, W, seed=1).log_softmax(-1)
    near, far, _ = hybrid(
        ours, theirs, MATCH, DivergenceSpec(name="x", kind="hybrid", beta=0.5)
    ).stats.unbind(-1)
    found = hybrid(ours, theirs, MATCH, DivergenceSpec(name="x", kind="hybrid", beta=0.5))
    close(found.per_token, 4 / 9 * near + 5 / 9 * far, 1e-12)


def test_tokens_in_no_group_weigh_nothing_and_are_counted():
    _, batch, term = loss(Gold(), STUDENT, make_target())
    weights = batch.weights["gold"]
    assert weights.sum() == 6
    assert weights[:, 1:].flatten().nonzero()[:, 0].tolist() == [0, 1, 6, 7, 9, 10]
    shares = {
        name: float((m.values * m.weights).sum() / m.weights.sum())
        for name, m in term.metrics.items()
    }
    close(shares["unmatched_share"], 1 / 12)
    close(shares["skipped_share"], 2 / 12)
    close(shares["merged_share"], 3 / 12)
    close(shares["teacher_logprob"], float((LATER - 0.5).mean()))
    chosen = STUDENT.log_softmax(-1).gather(-1, TOKENS[..., None])[..., 0].flatten()
    close(shares["student_logprob"], float(chosen[FIRST >= 0].sum() / 6), 1e-6)


def test_every_row_weighs_the_same_where_the_mean_is_over_sequences():
    _, batch, _ = loss(Gold(aggregate="sequence"), STUDENT, make_target())
    close(batch.weights["gold"].sum(1), [1.0, 1.0])


@pytest.mark.parametrize("elements", [10**6, 3 * V, V])
@pytest.mark.parametrize("beta", BETAS)
def test_the_chunked_pass_has_the_value_and_the_gradient_of_the_dense_one(
    beta, elements, monkeypatch
):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    objective, target = Gold(beta=beta), make_target(TEACHER.float(), later=LATER.float())
    batch = logits_batch(TOKENS, targets={"teacher.distribution": target})
    batch, _ = objective.prepare(batch, INFO, {})
    mask = batch.completion_mask
    rows = draw(12, 5, seed=7, dtype=torch.float32).requires_grad_()
    head = Head(weight=draw(V, 5, seed=8, dtype=torch.float32).requires_grad_(), temperature=0.8)
    (spec,) = objective.plan().divergences
    wanted = Wanted(
        spec=spec, target=target, rows=torch.arange(12), weights=batch.weights["gold"][mask]
    )
    out = HeadPass(
        head=head, token_ids=batch.input_ids[mask][:, None], entropy=True, divergences=[wanted]
    ).run(rows)
    (found,) = out.divergences

    def place(values):
        return logprobs.scatter(values, mask)

    shaped = replace(found, per_token=place(found.per_token), stats=place(found.stats))
    view = PolicyView(logprobs=place(out.tokens), divergences={"gold": shaped})
    (term,) = objective(view, batch)
    value = (term.weights * term.per_token).sum() / 6
    slopes = torch.autograd.grad(value, [rows, head.weight])
    logits = (rows @ head.weight.t() / 0.8).view(2, 6, V)
    dense = by_definition(objective, logits, target)
    torch.testing.assert_close(value, dense.float(), atol=1e-6, rtol=1e-5)
    for mine, theirs in zip(slopes, torch.autograd.grad(dense, [rows, head.weight]), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


def test_only_rows_that_begin_a_group_are_asked_of_the_teacher():
    asked = []

    class Watched(Table):
        def log_probs(self, rows):
            asked.extend(rows.tolist())
            return super().log_probs(rows)

    target = replace(make_target(), teacher=Watched(TEACHER))
    loss(Gold(), STUDENT, target)
    assert asked == [0, 1, 2, 3, 4, 5]


def test_a_cut_batch_finds_its_groups_by_their_numbers_in_the_step():
    target = make_target()
    members, places = target.behind_first(torch.arange(6, 12))
    assert (members.tolist(), places.tolist()) == ([2], [1])


def test_groups_that_begin_nowhere_are_refused():
    with pytest.raises(AlignmentError, match="6 groups must each begin at one of 12"):
        make_target(group=torch.full_like(GROUP, -1))


def test_a_target_of_token_ids_and_one_of_another_step_are_refused():
    head = Head(weight=draw(V, 5, seed=8))
    ids_only = HiddenDistribution(hidden=draw(12, 5, seed=0), head=head)
    batch = logits_batch(TOKENS, targets={"teacher.distribution": ids_only})
    with pytest.raises(TeacherError, match=r'teacher.name = "cross_tokenizer"'):
        Gold().prepare(batch, INFO, {})
    short = logits_batch(TOKENS[:, :4], targets={"teacher.distribution": make_target()})
    with pytest.raises(AlignmentError, match="cover 12 trained tokens, the step has 8"):
        Gold().prepare(short, INFO, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.5}, "beta must be within"),
        ({"on_policy_share": 2.0}, "on_policy_share must be within"),
        ({"matched_weight": -0.1}, "must not be negative"),
        ({"matched_weight": 0.0, "unmatched_weight": 0.0}, "not both 0"),
    ],
)
def test_options_that_cannot_mean_anything_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Gold(**options)


def test_the_name_stands_in_the_table():
    assert OBJECTIVES["gold"] is Gold
