"""Group-relative policy optimisation and its relatives."""

from __future__ import annotations

import math

import pytest
import torch

from distill.advantages import (
    group_center,
    group_is_mixed,
    group_zscore,
    leave_one_out,
    once_per_trajectory,
    overlong_penalty,
)
from distill.divergence import k3
from distill.errors import AlignmentError, ConfigError
from distill.objectives import DAPO, GRPO, DrGRPO
from distill.objectives.base import Clip, importance_ratio
from helpers import INFO, logits_batch, objective_loss
from vectors import (
    F64,
    chosen,
    close,
    f64,
    full_scores,
    gradient,
    numeric_gradient,
    per_token,
    prompted,
    two_way,
)

EIGHT = f64([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
ONE_GROUP = torch.zeros(8, dtype=torch.long)


def spread_over(good, bad):
    return [good if r else bad for r in EIGHT.tolist()]


@pytest.mark.parametrize(
    ("ddof", "good", "bad", "epsilon"),
    [
        (0, 1.290994, -0.774597, 0.0),  # policy-gradient-family 4.1, without epsilon
        (1, 1.207615, -0.724569, 0.0),
    ],
)
def test_z_scores_have_their_published_values(ddof, good, bad, epsilon):
    found = group_zscore(EIGHT, ONE_GROUP, ddof=ddof, epsilon=epsilon)
    close(found, spread_over(good, bad))


def test_centred_rewards_have_their_published_values_and_the_identity_of_binary_rewards():
    # policy-gradient-family 4.1
    centred = group_center(EIGHT, ONE_GROUP)
    close(centred, spread_over(0.625, -0.375))
    scored = group_zscore(EIGHT, ONE_GROUP, epsilon=0.0)
    sigma = math.sqrt(0.375 * 0.625)
    close(centred.abs().mean(), 2 * sigma**2)
    close(centred.abs().mean(), 0.468750)
    close(scored.abs().mean(), 2 * sigma)
    close(scored.abs().mean(), 0.968246)


@pytest.mark.parametrize(
    ("ddof", "success", "fail"), [(0, 1.732047, -0.577349), (1, 1.620182, -0.540061)]
)
def test_a_group_of_two_successes_in_eight_has_its_published_z_scores(ddof, success, fail):
    # skills-and-routing 9.1
    rewards = f64([1.0, 1.0, *[0.0] * 6])
    close(group_zscore(rewards, ONE_GROUP, ddof=ddof), [success] * 2 + [fail] * 6)
    close(group_center(rewards, ONE_GROUP), [0.75] * 2 + [-0.25] * 6)


def trajectories(returns, steps, **changes):
    """One group of trajectories, each of so many rows with the return of the whole."""
    steps, size = torch.tensor(steps), sum(steps)
    values = {
        "rewards": f64(returns).repeat_interleave(steps),
        "row_group": torch.zeros(size, dtype=torch.long),
        "row_traj": torch.arange(len(steps)).repeat_interleave(steps),
    }
    return logits_batch(torch.zeros(size, 1, dtype=torch.long), **(values | changes))


def advantages(batch, **options):
    objective = GRPO(**options)
    return objective.prepare(batch, INFO, {})[0].signals["grpo"][:, 1]


@pytest.mark.parametrize(
    ("scope", "good", "bad"),
    [("rows", 1.249998, -0.749999), ("trajectories", 0.866024, -0.866024)],
)
def test_the_objective_takes_its_statistics_over_rows_or_trajectories(scope, good, bad):
    # skills-and-routing 9.1
    batch = trajectories([1.0, 0.0, 1.0, 0.0], [2, 6, 4, 4])
    found = advantages(batch, ddof=1, stat_scope=scope)
    close(found, torch.where(batch.rewards > 0, f64(good), f64(bad)))


@pytest.mark.parametrize("options", [{}, {"ddof": 1}, {"group": "center"}])
@pytest.mark.parametrize("returns", [[1.0, 1.0, *[0.0] * 6], [0.1, 0.7, 0.3, 0.3]])
def test_both_scopes_agree_where_every_trajectory_has_one_row(options, returns):
    batch = trajectories(returns, [1] * len(returns))
    both = [advantages(batch, stat_scope=s, **options) for s in ("rows", "trajectories")]
    close(both[0], both[1], 1e-12)


def test_trajectories_of_equal_return_but_different_length_have_no_spread():
    # a mean of equal floats need not be equal to them
    batch = trajectories([0.7, 0.7, 0.7], [3, 7, 1])
    batch.rewards.copy_(batch.rewards.float())
    for scope in ("rows", "trajectories"):
        assert not bool(advantages(batch, stat_scope=scope).any())


def test_rows_that_differ_inside_a_trajectory_count_with_their_mean():
    values, groups, entry = once_per_trajectory(
        f64([1.0, 0.5, 3.0, 0.0]), torch.tensor([4, 4, 4, -1]), torch.tensor([0, 0, 1, 1])
    )
    assert groups[entry].tolist() == [4, 4, 4, -1]
    close(values[entry], [0.75, 0.75, 3.0, 0.0])


@pytest.mark.parametrize("scope", ["rows", "trajectories"])
def test_a_group_of_one_has_its_published_raw_value_on_request(scope):
    # skills-and-routing 9.1: mean 0, deviation 1
    batch = trajectories([1.0], [1])
    close(advantages(batch, stat_scope=scope, lone_group="raw"), [0.999999], 5e-7)
    close(advantages(batch, stat_scope=scope, lone_group="raw", group="center"), [1.0])
    assert advantages(batch, stat_scope=scope).tolist() == [0.0]


def test_a_lone_trajectory_of_several_rows_is_a_group_of_one_only_among_trajectories():
    batch = trajectories([1.0], [3])
    assert advantages(batch, lone_group="raw").tolist() == [0.0] * 3
    found = advantages(batch, lone_group="raw", stat_scope="trajectories")
    close(found, [0.999999] * 3, 5e-7)


@pytest.mark.parametrize("scope", ["rows", "trajectories"])
def test_failed_rows_leave_their_trajectories_and_groups(scope):
    batch = trajectories([1.0, 0.0, math.nan], [2, 1, 2])
    batch.completion_mask[3:] = False
    found = advantages(batch, stat_scope=scope, group="center", lone_group="raw")
    mean = 2 / 3 if scope == "rows" else 0.5
    close(found, [1 - mean, 1 - mean, -mean, 0.0, 0.0])


def test_groups_are_apart_and_one_without_a_spread_gets_exactly_zero():
    # policy-gradient-family 4.1: a group of one returns 0 (SEED's code gives 0.999999)
    rewards = torch.tensor([1.0, 0.0, 0.1 + 0.2, 0.3, 0.3, 5.0])
    groups = torch.tensor([7, 7, 1, 1, 1, 2])
    found = group_zscore(rewards, groups)
    close(found[:2], [1.0, -1.0], 1e-5)
    assert found[2:].tolist() == [0.0] * 4
    close(group_zscore(rewards, groups, ddof=1)[:2], [2**-0.5, -(2**-0.5)], 1e-5)


@pytest.mark.parametrize("ddof", [0, 1])
def test_equal_rewards_whose_mean_rounds_away_from_them_get_exactly_zero(ddof):
    rewards, groups = torch.full((7,), 0.7), torch.zeros(7, dtype=torch.long)
    assert bool((rewards - rewards.sum() / 7).any())
    assert group_zscore(rewards, groups, ddof=ddof).tolist() == [0.0] * 7


def test_a_sample_is_compared_with_the_mean_of_the_others():
    found = leave_one_out(f64([1.0, 0.0, 0.0, 9.0]), torch.tensor([0, 0, 0, 1]))
    close(found, [1.0, -0.5, -0.5, 0.0])


@pytest.mark.parametrize(
    ("advantage", "expected"), [(1.0, [0.7, 1.1, 1.28]), (-1.0, [-0.8, -1.1, -1.35])]
)
def test_the_asymmetric_clip_has_its_published_values(advantage, expected):
    # policy-gradient-family 4.2
    found = Clip(low=0.2, high=0.28).surrogate(f64([0.7, 1.1, 1.35]), f64(advantage))
    close(-found, expected)


@pytest.mark.parametrize(
    ("advantage", "ratios", "expected"),
    [
        (0.2, [0.7, 1.0, 1.4], [-0.14, -0.2, -0.24]),  # objectives-b 6.1
        (-0.5, [0.7, 1.0, 1.4], [0.4, 0.5, 0.7]),
    ],
)
def test_the_symmetric_clip_has_its_published_values(advantage, ratios, expected):
    close(Clip().surrogate(f64(ratios), f64(advantage)), expected)


@pytest.mark.parametrize(
    ("ratio", "expected", "without"), [(10.0, 1.5, 5.0), (2.0, 1.0, 1.0), (0.5, 0.4, 0.4)]
)
def test_the_dual_clip_bounds_a_negative_advantage(ratio, expected, without):
    # skills-and-routing 9.2
    close(Clip(dual=3.0).surrogate(f64(ratio), f64(-0.5)), expected)
    close(Clip().surrogate(f64(ratio), f64(-0.5)), without)
    rising = Clip(dual=3.0).surrogate(f64(ratio), f64(0.5))
    close(rising, Clip().surrogate(f64(ratio), f64(0.5)), 0.0)


def surrogate_batch(rewards, **changes):
    """Two rows whose log-ratios are [0, .1, .3, -.4]; the tokens are all id 0."""
    s = f64([[-0.5, -1.2, -2.0, -0.1]]).expand(2, 4)
    values = {
        "rewards": f64(rewards),
        "row_group": torch.tensor([0, 0]),
        "behaviour_logprobs": prompted(s - f64([0.0, 0.1, 0.3, -0.4])),
    }
    return s, logits_batch(torch.zeros(2, 4, dtype=torch.long), **(values | changes))


@pytest.mark.parametrize(
    ("size", "row", "expected", "mean"),
    [
        (1.5, 0, [-1.5, -1.657756, -1.8, -1.005480], -1.490809),
        (0.5, 1, [0.5, 0.552585, 0.674929, 0.4], 0.531879),
    ],
)
def test_the_surrogate_of_a_row_has_its_published_values(size, row, expected, mean):
    # skills-and-routing 9.2: centred rewards +-size give advantages +-size
    s, batch = surrogate_batch([size, -size])
    found = per_token(DrGRPO(), two_way(s), batch)
    close(found[row], expected)
    close(found[row].mean(), mean)
    close(
        importance_ratio(s, batch.behaviour_logprobs[:, 1:])[0], [1.0, 1.105171, 1.349859, 0.670320]
    )


def test_the_penalty_toward_a_reference_has_its_published_values():
    # skills-and-routing 9.2
    reference = f64([-0.45, -1.0, -2.1, -0.2])
    s, batch = surrogate_batch([1.5, -1.5])
    values = k3(s[0], reference)
    close(values, [0.001271, 0.021403, 0.004837, 0.004837])
    close(values.mean(), 0.008087)
    batch.targets["reference"] = full_scores(
        two_way(reference.expand(2, 4)), torch.zeros(2, 4, dtype=torch.long)
    )
    with_penalty = GRPO(group="center", kl_coefficient=0.01)
    plain = objective_loss(GRPO(group="center"), two_way(s), batch)
    close(objective_loss(with_penalty, two_way(s), batch) - plain, 0.01 * 0.008087)


def test_a_penalty_without_a_reference_names_the_role():
    s, batch = surrogate_batch([1.0, 0.0])
    with pytest.raises(AlignmentError, match="'reference'"):
        objective_loss(GRPO(kl_coefficient=0.1), two_way(s), batch)


@pytest.mark.parametrize(
    ("objective", "expected"), [(DAPO(), -0.125), (GRPO(group="center"), 0.25)]
)
def test_token_and_sequence_means_have_their_published_values(objective, expected):
    # policy-gradient-family 4.2: 2 tokens of value 1, 6 of -0.5; value = -loss
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 1:3] = mask[1, 1:7] = True
    batch = logits_batch(torch.zeros(2, 6, dtype=torch.long), completion_mask=mask)
    batch, _ = objective.prepare(batch, INFO, {})
    weights = batch.weights[objective.name]
    values = f64([[1.0], [-0.5]])
    close((values * weights).sum() / weights.sum(), expected, 1e-6)


def test_the_soft_penalty_of_long_replies_has_its_published_values():
    # policy-gradient-family 4.2
    found = overlong_penalty(torch.tensor([10, 14, 15, 17]), 16, 4)
    close(found, [0.0, -0.5, -0.75, -1.0])
    close(overlong_penalty(torch.tensor([16, 17]), 16, 0), [0.0, -1.0])


def test_the_length_penalty_enters_the_reward_before_the_group_statistics():
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[:, 0] = mask[0, 3:] = False  # 2 and 4 tokens
    batch = logits_batch(
        torch.zeros(2, 4, dtype=torch.long),
        completion_mask=mask,
        rewards=f64([1.0, 1.0]),
        row_group=torch.tensor([0, 0]),
    )
    objective = GRPO(group="center", overlong_length=4, overlong_cache=2)
    prepared, _ = objective.prepare(batch, INFO, {})
    close(prepared.signals["grpo"][:, 1], [0.5, -0.5])


def test_groups_with_a_spread_are_the_published_ones():
    # policy-gradient-family 4.2: dynamic sampling keeps the middle group
    rewards = f64([1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0])
    groups = torch.arange(3).repeat_interleave(4)
    assert group_is_mixed(rewards, groups)[::4].tolist() == [False, True, False]


def test_the_relatives_differ_as_their_papers_say():
    assert (GRPO().aggregate, GRPO().group, GRPO().clip_high) == ("sequence", "zscore", 0.2)
    assert (DrGRPO().aggregate, DrGRPO().group) == ("sequence_sum", "center")
    assert (DAPO().aggregate, DAPO().clip_low, DAPO().clip_high) == ("token", 0.2, 0.28)


@pytest.mark.parametrize("objective", [GRPO(), GRPO(ddof=1), DrGRPO(), DAPO(clip_dual=3.0)])
def test_the_gradient_agrees_with_finite_differences(objective):
    s, batch = surrogate_batch([1.0, 0.0])

    def loss(logits):
        return objective_loss(objective, logits, batch)

    at = two_way(s) + 1e-3  # off the kink at ratio 1
    close(gradient(loss, at), numeric_gradient(loss, at), 1e-8)
    assert float(gradient(loss, at).abs().max()) > 1e-2


@pytest.mark.parametrize("make", [GRPO, DrGRPO, DAPO])
def test_equal_rewards_move_nothing(make):
    s, batch = surrogate_batch([0.1 + 0.2, 0.1 + 0.2])
    found = gradient(lambda z: objective_loss(make(), z, batch), two_way(s))
    assert not bool(found.any())


def test_both_rows_far_beyond_the_clip_leave_only_the_bad_one_moving():
    tokens, logits = torch.tensor([[0], [1]]), torch.zeros(2, 1, 3, dtype=F64)
    batch = logits_batch(
        tokens,
        rewards=f64([1.0, 0.0]),
        row_group=torch.tensor([0, 0]),
        behaviour_logprobs=prompted(f64([[-5.0], [-5.0]])),
    )
    ratio = float((chosen(logits, tokens)[0, 0] + 5.0).exp())
    close(objective_loss(GRPO(), logits, batch), (-1.2 + ratio) / 2, 1e-4)
    found = gradient(lambda z: objective_loss(GRPO(), z, batch), logits)
    assert not bool(found[0].any())
    assert float(found[1, 0, 1]) > 0.1


def test_a_failed_episode_does_not_shift_the_mean_of_its_group():
    batch = logits_batch(torch.tensor([[0], [1], [2]]))
    batch.completion_mask[2] = False
    batch.rewards.copy_(torch.tensor([1.0, 0.0, math.nan]))
    batch.row_group.zero_()
    prepared, _ = GRPO().prepare(batch, INFO, {})
    close(prepared.signals["grpo"][:, 1], [1.0, -1.0, 0.0], 1e-5)


def test_a_worked_solution_neither_enters_the_statistics_nor_the_loss():
    batch = logits_batch(
        torch.tensor([[0], [1], [2]]),
        rewards=f64([1.0, 0.0, math.nan]),
        row_group=torch.zeros(3, dtype=torch.long),
        row_sampled=torch.tensor([True, True, False]),
    )
    prepared, _ = GRPO(group="center").prepare(batch, INFO, {})
    close(prepared.signals["grpo"][:, 1], [0.5, -0.5, 0.0])
    close(prepared.weights["grpo"].sum(1), [1.0, 1.0, 0.0])


def test_a_rollout_without_a_reward_is_refused():
    _, batch = surrogate_batch([1.0, math.nan])
    with pytest.raises(ConfigError, match="1 have none"):
        GRPO().prepare(batch, INFO, {})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"ddof": 2}, "ddof"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"clip_dual": 1.0}, "clip_dual"),
        ({"group": "median"}, "group"),
        ({"stat_scope": "steps"}, "stat_scope"),
        ({"lone_group": "one"}, "lone_group"),
        ({"credit": "gae"}, "credit must be none or gigpo or g2po"),
        ({"credit_weight": -1.0}, "credit_weight"),
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": 1.1}, "gamma"),
        ({"kl_coefficient": -1.0}, "kl_coefficient"),
        ({"overlong_length": 4, "overlong_cache": 5}, "overlong_cache"),
    ],
)
def test_a_bad_hyper_parameter_is_named(options, word):
    with pytest.raises(ConfigError, match=word):
        GRPO(**options)


def test_a_bad_ddof_of_the_statistics_is_refused():
    with pytest.raises(ConfigError, match="ddof"):
        group_zscore(EIGHT, ONE_GROUP, ddof=2)
