"""The numbers of the specification for routing logs: scores, stages, allocation, Wilson, losses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from distill.curriculum.allocation import allocate
from distill.curriculum.boundary import BoundaryOptions, status_of, wilson
from distill.curriculum.demand import given_demand
from distill.curriculum.stages import MIX, assign, stage_counts, stage_means
from distill.objectives import GKD, SFT
from helpers import logits_batch, objective_loss
from vectors import close, f64

P = [[0.5, 0.2, 0.15, 0.1, 0.05], [0.7, 0.1, 0.1, 0.05, 0.05]]
Q = [[0.25, 0.4, 0.1, 0.05, 0.2], [0.6, 0.2, 0.1, 0.05, 0.05]]
FIRST, SECOND = 0.161699, 0.038591
COARSE = GKD(beta=1.0, support="top_k", k=2, chosen_by="student", rest="tail")


@pytest.mark.parametrize(
    ("probs", "score", "hard"),
    [
        ([0.10, 0.45, 0.35, 0.10], 1.45, 1),
        ([0.30, 0.40, 0.20, 0.10], 1.10, 1),
        ([0.70, 0.20, 0.08, 0.02], 0.42, 0),
        ([0.05, 0.15, 0.50, 0.30], 2.05, 2),
        ([0.30, 0.20, 0.20, 0.30], 1.50, 0),  # a tie goes to the lower tier
    ],
)
def test_soft_and_hard_scores_are_the_published_ones(probs, score, hard) -> None:
    found = given_demand(probs)
    assert found.score == pytest.approx(score, abs=5e-7)
    assert found.hard == hard


def test_75_examples_are_mixed_as_published() -> None:
    expected = [[20, 5, 0], [3, 15, 7], [2, 5, 18]]
    assert stage_counts([25, 25, 25]).tolist() == expected
    scores = np.repeat([0.5, 1.5, 2.5], 25)
    found = assign(scores, [f"{i:016x}" for i in range(75)], seed=3)
    assert found.composition.tolist() == expected
    assert found.mean_score == pytest.approx([0.7, 1.66, 2.14], abs=5e-7)
    assert found.band_mean.tolist() == [0.5, 1.5, 2.5]


def test_expected_stage_means_are_the_published_ones() -> None:
    assert stage_means([0.5, 1.5, 2.5]) == pytest.approx([0.7, 1.66, 2.14], abs=5e-7)
    assert np.array(MIX).sum(0) == pytest.approx(np.ones(3), abs=5e-7)


def test_allocation_has_its_published_shares() -> None:
    found = allocate([0.4, 0.3, 0.2, 0.1], [0.9, 0.7, 0.5, 0.3], kappa=2.0, floor=0.5)
    tilted, floored = [0.246204, 0.275470, 0.273969, 0.204357], [0.323102, 0.287735, 0.236984, 0.152178]  # fmt: skip  # noqa: E501
    assert found.tilted == pytest.approx(tilted, abs=5e-7)
    assert found.share == pytest.approx(floored, abs=5e-7)


@pytest.mark.parametrize(
    ("k", "n", "low", "high", "status"),
    [
        (18, 20, 0.698966, 0.972134, "uncertain"),  # misses 0.70 by 0.001034
        (9, 20, 0.258198, 0.657915, "weak"),
        (3, 20, 0.052369, 0.360419, "weak"),
        (0, 5, 0.0, 0.434482, "weak"),
        (46, 50, 0.811618, 0.968450, "capable"),
        (30, 40, 0.598060, 0.858129, "uncertain"),
        (11, 30, 0.218739, 0.544864, "weak"),
    ],
)
def test_wilson_intervals_and_their_verdicts_are_the_published_ones(k, n, low, high, status):
    found = [float(x) for x in wilson(k, n)]
    assert found == pytest.approx([low, high], abs=5e-7)
    assert status_of(*found, n, BoundaryOptions()) == status


def test_supervised_loss_is_a_mean_over_the_tokens_of_the_batch() -> None:
    logprobs = f64([[-0.2, -0.4, 0.0, 0.0], [-1.0, -0.5, -0.3, -0.2]])
    # Two entries per position: the token, and what is left.
    logits = torch.stack([logprobs, torch.log1p(-logprobs.exp().clamp(max=1 - 1e-12))], -1)
    batch = masked(logits_batch(torch.zeros(2, 4, dtype=torch.long)), [2, 4])
    batch = replace(batch, row_sampled=torch.tensor([False, False]))
    close(objective_loss(SFT(), logits, batch), 0.433333)
    close(objective_loss(SFT(aggregate="sequence"), logits, batch), 0.4)


@pytest.mark.parametrize(("position", "coarse"), [(0, FIRST), (1, SECOND)])
def test_coarse_reverse_kl_has_its_published_value_and_never_exceeds_the_full_one(
    position, coarse
) -> None:
    # The second and third entry of the second position are equal: the lower id is in the support.
    student, teacher = f64([[P[position]]]).log(), f64([[Q[position]]]).log()
    batch = logits_batch(torch.tensor([[0]]))
    close(objective_loss(COARSE, student, batch, teacher), coarse)
    full = objective_loss(GKD(beta=1.0), student, batch, teacher)
    assert float(full) >= coarse - 1e-6
    if position == 0:
        close(full, 0.268764)


def distillation_loss(repeats: int, aggregate: str) -> torch.Tensor:
    """Responses {first, second} and {second}, the latter `repeats` times."""
    rows = [[0, 1], *[[1, 1]] * repeats]
    student = torch.stack([f64([P[i] for i in row]) for row in rows]).log()
    teacher = torch.stack([f64([Q[i] for i in row]) for row in rows]).log()
    batch = masked(logits_batch(torch.zeros(len(rows), 2, dtype=torch.long)), [2, *[1] * repeats])
    return objective_loss(replace(COARSE, aggregate=aggregate), student, batch, teacher)


def test_distillation_is_a_mean_over_responses() -> None:
    close(distillation_loss(1, "sequence"), 0.069368)
    close(distillation_loss(1, "token"), 0.079627)


def test_a_response_of_weight_three_counts_like_three_equal_ones() -> None:
    close(distillation_loss(3, "sequence"), 0.053979)


def masked(batch, lengths):
    """The batch with rows cut to so many trained tokens."""
    place = torch.arange(batch.input_ids.shape[1])
    inside = place <= torch.tensor(lengths)[:, None]
    return replace(
        batch,
        attention_mask=inside,
        completion_mask=batch.completion_mask & inside,
        row_offset=torch.tensor([0, *lengths]).cumsum(0)[:-1],
    )
