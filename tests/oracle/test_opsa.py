"""On-policy self-adaptation: which tokens are pushed, and how hard."""

from __future__ import annotations

import pytest
import torch

from distill.errors import AlignmentError, ConfigError
from distill.objectives import OPSA
from distill.objectives.opsa import entropy_advantage, least_likely
from helpers import INFO, logits_batch, objective_loss
from vectors import FB_STUDENT, close, coefficients, f64, gradient, prompted

A_LOGPROBS, A_ENTROPY = [-0.01, -2.0, -0.5, -4.0, -0.02], [0.05, 1.2, 0.8, 0.3, 0.1]
B_LOGPROBS, B_ENTROPY = [-0.3, -1.0, -0.02, -3.0, -0.4], [0.6, 1.6, 0.1, 2.0, 0.7]


def run(objective, logprobs, entropy, **changes):
    """Advantages [B, C], REINFORCE losses of the rows [B] and their mean, read off the gradient."""
    logprobs = f64(logprobs)
    batch = logits_batch(
        torch.zeros(logprobs.shape, dtype=torch.long),
        **{
            "behaviour_logprobs": prompted(logprobs),
            "behaviour_entropy": prompted(f64(entropy)),
            **changes,
        },
    )
    prepared, _ = objective.prepare(batch, INFO, {})
    found = coefficients(objective, logprobs, batch)
    losses = (found * logprobs).sum(1) * len(logprobs)
    return prepared.signals["opsa"][:, 1:], losses, losses.mean()


BOTH = ([A_LOGPROBS, B_LOGPROBS], [A_ENTROPY, B_ENTROPY])

# objectives-b 4.8
PUBLISHED = [
    (
        {"scope": "batch", "fraction": 0.2},
        [[0, 0, 0, -0.5, 0], [0, 0, 0, -1.0, 0]],
        [-2.0, -3.0],
        -2.5,
    ),
    (
        {"scope": "batch", "fraction": 0.4},
        [[0, -0.764706, 0, -0.5, 0], [0, -0.882353, 0, -1.0, 0]],
        [-1.764706, -1.941176],
        -1.852941,
    ),
    (
        {"scope": "response", "fraction": 0.4},
        [[0, -1.0, 0, -0.5, 0], [0, -0.5, 0, -1.0, 0]],
        [-2.0, -1.75],
        -1.875,
    ),
    (
        {"scope": "response", "fraction": 0.2},
        [[0, 0, 0, -1.0, 0], [0, 0, 0, -1.0, 0]],
        [-4.0, -3.0],
        -3.5,
    ),
    (
        {"scope": "batch", "fraction": 0.2, "mode": "fixed"},
        [[0, 0, 0, -0.5, 0], [0, 0, 0, -0.5, 0]],
        [-2.0, -1.5],
        -1.75,
    ),
]


@pytest.mark.parametrize(("options", "advantages", "losses", "mean"), PUBLISHED)
def test_selection_advantages_and_losses_have_their_published_values(
    options, advantages, losses, mean
):
    found, rows, total = run(OPSA(**options), *BOTH)
    close(found, advantages)
    close(rows, losses)
    close(total, mean)


def test_equal_entropies_give_every_selected_token_the_lowest_advantage():
    # objectives-b 4.8
    found, _, _ = run(OPSA(fraction=0.7), [[-1.0, -3.0, -2.0]], [[0.7, 0.7, 0.7]])
    close(found, [[0.0, -1.0, -1.0]])


def test_ten_tokens_of_the_inventory_select_the_published_two():
    # policy-gradient-family 4.25; its entropy range is that of the whole reply, ours (objectives-b)
    # is that of the selected tokens, so the second advantage is -0.5 and not -0.615385
    logprobs = [[-0.01, -0.2, -3.0, -0.05, -0.4, -0.02, -1.6, -0.1, -0.03, -0.3]]
    entropy = [[0.05, 0.6, 2.0, 0.2, 1.1, 0.08, 0.5, 0.4, 0.1, 0.9]]
    found, _, total = run(OPSA(), logprobs, entropy)
    assert found.nonzero()[:, 1].tolist() == [2, 6]
    close(found[0, [2, 6]], [-1.0, -0.5])
    close(total, -(3.0 + 0.5 * 1.6) / 2)


def test_the_ascent_on_the_logits_has_its_published_direction():
    # objectives-b 4.8: A = -1, token 1 of fixture row 1
    student = FB_STUDENT[:, 1:]
    batch = logits_batch(
        torch.tensor([[1]]),
        behaviour_logprobs=prompted(student.log_softmax(-1)[..., 1]),
        behaviour_entropy=f64([[0.0, 1.0]]),
    )
    found = -gradient(lambda z: objective_loss(OPSA(), z, batch), student)
    close(found, [[[0.388326, -0.648628, 0.260303]]])


def test_a_row_without_a_selected_token_counts_in_the_mean_over_rows():
    # objectives-b 4.2: pooled ranking may leave a row out; the mean is still over both
    found, rows, total = run(
        OPSA(scope="batch", fraction=0.1), [[-5.0, -0.1], [-0.2, -0.3]], [[1.0, 1.0]] * 2
    )
    close(found, [[-1.0, 0.0], [0.0, 0.0]])
    close(rows, [-5.0, 0.0])
    close(total, -2.5)


def test_the_end_token_is_never_selected_unless_asked():
    ended = {"row_ended": torch.tensor([True])}
    logprobs, entropy = [[-1.0, -2.0, -9.0]], [[0.5, 0.5, 0.5]]
    found, _, _ = run(OPSA(fraction=0.3), logprobs, entropy, **ended)
    close(found, [[0.0, -1.0, 0.0]])
    found, _, _ = run(OPSA(fraction=0.3, exclude_end=False), logprobs, entropy, **ended)
    close(found, [[0.0, 0.0, -1.0]])
    found, _, _ = run(OPSA(fraction=0.3), logprobs, entropy)  # cut off: the last token is no end
    close(found, [[0.0, 0.0, -1.0]])


def test_the_end_token_of_an_earlier_turn_is_never_selected_either():
    trained = torch.tensor([[False, True, True, False, True, True]])
    for ended, expected in ((True, [0, 0, 0, -1.0, 0]), (False, [0, 0, 0, 0, -1.0])):
        found, _, _ = run(
            OPSA(fraction=0.3),
            [[-1.0, -9.0, 0.0, -2.0, -8.0]],
            [[0.5] * 5],
            completion_mask=trained,
            row_ended=torch.tensor([ended]),
        )
        close(found, [expected])


def test_worked_solutions_are_not_pushed():
    sampled = {"row_sampled": torch.tensor([True, False])}
    found, _, _ = run(OPSA(scope="batch", fraction=0.2), *BOTH, **sampled)
    close(found, [[0, 0, 0, -1.0, 0], [0] * 5])


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9, 10, 11, 99, 1000])
@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.7, 1.0])
def test_the_number_of_selected_tokens_is_the_floor_of_the_share_and_at_least_one(count, fraction):
    generator = torch.Generator().manual_seed(count)
    logprobs = -torch.rand(count, generator=generator)
    found = least_likely(logprobs, torch.ones(count, dtype=torch.bool), fraction)
    tenths = round(10 * fraction)
    assert int(found.sum()) == max(1, count * tenths // 10)
    if bool((~found).any()):
        assert float(logprobs[found].max()) <= float(logprobs[~found].min())


def test_ties_keep_their_order():
    found = least_likely(torch.full((5,), -1.0), torch.ones(5, dtype=torch.bool), 0.4)
    assert found.tolist() == [True, True, False, False, False]


def test_advantages_lie_between_their_bounds_and_fall_with_entropy():
    generator = torch.Generator().manual_seed(0)
    entropy = 3 * torch.rand(200, generator=generator)
    chosen = torch.rand(200, generator=generator) < 0.3
    found = entropy_advantage(entropy, chosen, -1.0, -0.5)
    assert bool((found[~chosen] == 0).all())
    assert bool(((found[chosen] >= -1.0) & (found[chosen] <= -0.5)).all())
    order = entropy[chosen].argsort()
    assert bool((found[chosen][order].diff() <= 0).all())


def test_scores_of_the_student_are_needed():
    with pytest.raises(AlignmentError, match="before the update"):
        OPSA().prepare(logits_batch(torch.tensor([[0]])), INFO, {})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"fraction": 0.0}, "fraction"),
        ({"fraction": 1.1}, "fraction"),
        ({"a_max": 0.0}, "a_max"),
        ({"a_min": -0.5}, "a_min"),
        ({"fixed_advantage": 0.2}, "collapses"),
    ],
)
def test_a_bad_hyper_parameter_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        OPSA(**options)
