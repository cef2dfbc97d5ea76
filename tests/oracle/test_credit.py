"""Step credit: GiGPO and G2PO on one graph of states."""

from __future__ import annotations

import math
import random

import pytest
import torch

from distill.credit import (
    Comparison,
    Graph,
    Visit,
    critical_scores,
    edges,
    node_values,
    step_credit,
    transition_graph,
)
from distill.errors import AlignmentError, ConfigError
from distill.ledger import Ledger
from distill.objectives import GRPO, SEED
from helpers import INFO, logits_batch, logits_view
from vectors import close, f64

CENTRED, SCORED = Comparison(std=False), Comparison()


def played(paths, *, penalty=0.1, order=None):
    """A batch of paths (group, states, outcome, invalid turns): one row per turn."""
    rows = []
    for number, (group, states, outcome, invalid) in enumerate(paths):
        for turn, state in enumerate(states):
            bad, last = turn in invalid, turn == len(states) - 1
            earned = (outcome if last else 0.0) - penalty * bad
            total = outcome - penalty * len(invalid)
            rows.append((group, number, turn, state, earned, total, not bad))
    rows = rows if order is None else [rows[i] for i in order]
    group, traj, turn, state, earned, total, valid = zip(*rows, strict=True)
    known = {key: i for i, key in enumerate(dict.fromkeys(zip(group, state, strict=True)))}
    return logits_batch(
        torch.zeros(len(rows), 1, dtype=torch.long),
        rewards=f64(total),
        step_rewards=f64(earned),
        row_group=torch.tensor(group),
        row_traj=torch.tensor(traj),
        row_step=torch.tensor(turn),
        row_state=torch.tensor([known[key] for key in zip(group, state, strict=True)]),
        row_valid=torch.tensor(valid),
    )


def values(found):
    return [found[row] for row in sorted(found)]


CARD = played([(0, ["s0", "s1"], 10.0, ()), (0, ["s0", "s2"], 0.0, ())])


def test_values_gains_and_local_parts_of_the_card_are_the_published_ones():
    # policy-gradient-family 4.21
    graph = transition_graph(CARD)
    close(values(node_values(graph, 0.95)), [4.5125, 9.5, 4.5125, 0.0])
    scores, gains = edges(graph, 0.95)
    close(values(gains), [4.9875, 0.5, -4.5125, 0.0])
    close(values(CENTRED(graph.nodes, scores)), [4.75, 0.0, -4.75, 0.0])


def test_step_credit_of_the_card_is_the_published_one():
    # policy-gradient-family 4.21
    found = step_credit(CARD, "g2po", gamma=0.95, compared=CENTRED)
    close(found.values, [9.49375, 0.25625, -9.50625, -0.24375])
    assert found.num_nodes == 3
    assert found.shared.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert found.steps.tolist() == [2.0] * 4


def test_the_objective_adds_it_to_the_advantage_of_the_trajectory():
    # policy-gradient-family 4.21: with episode +-5
    objective = GRPO(group="center", credit="g2po", credit_std=False)
    batch, _ = objective.prepare(CARD, INFO, {})
    found, _ = objective.advantages(view_of(batch, objective), batch)
    close(found[:, 1], [14.49375, 5.25625, -14.50625, -5.24375])
    half = GRPO(group="center", credit="g2po", credit_std=False, credit_weight=0.5)
    batch, _ = half.prepare(CARD, INFO, {})
    found, _ = half.advantages(view_of(batch, half), batch)
    close(found[:, 1], [9.746875, 5.128125, -9.753125, -5.121875])


def view_of(batch, objective):
    shape = (*batch.input_ids[:, 1:].shape, 3)
    return logits_view(torch.zeros(shape, dtype=torch.float64), batch, objective)


def test_the_discounted_return_of_a_step_meets_the_others_of_its_state():
    # s0: .95 * 10 against 0; s1 and s2 have one visit each
    found = step_credit(CARD, "gigpo", gamma=0.95, compared=CENTRED)
    close(found.values, [4.75, 0.0, -4.75, 0.0])
    found = step_credit(CARD, "gigpo", gamma=0.95, compared=SCORED)
    close(found.values, [1.0, 0.0, -1.0, 0.0], 1e-6)
    found = step_credit(CARD, "gigpo", gamma=0.95, compared=Comparison(ddof=1))
    close(found.values, [2**-0.5, 0.0, -(2**-0.5), 0.0], 1e-6)


def random_paths(seed):
    draw = random.Random(seed)
    paths = []
    for number in range(24):
        states = [draw.choice("abcd") for _ in range(draw.randint(1, 6))]
        good = draw.random() < 0.4
        # The last action of a success could be read.
        invalid = [t for t in range(len(states) - good) if draw.random() < 0.3]
        paths.append((number // 8, states, float(good), tuple(invalid)))
    return paths


def standardised(found):
    mean = math.fsum(found) / len(found)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in found) / len(found))
    return [(x - mean) / (sigma + 1e-6) if sigma > 1e-6 else 0.0 for x in found]


def brute_force(method, paths, gamma=0.95, penalty=0.1):
    """Written down again, step by step and in quadratic time, without a graph."""
    steps = [(i, t) for i, path in enumerate(paths) for t in range(len(path[1]))]

    def place(step):
        return paths[step[0]][0], paths[step[0]][1][step[1]]

    def bad(i, t):
        return penalty * (t in paths[i][3])

    def forward(i, t):
        length, outcome = len(paths[i][1]), paths[i][2]
        costs = sum(gamma ** (k - t) * bad(i, k) for k in range(t, length))
        return gamma ** (length - 1 - t) * outcome - costs

    def value(where):
        seen = [s for s in steps if place(s) == where]
        return sum(gamma ** (len(paths[i][1]) - t) * paths[i][2] for i, t in seen) / len(seen)

    def behind(i, t):
        last = t == len(paths[i][1]) - 1
        return paths[i][2] if last else value(place((i, t + 1)))

    def relative(score, step, key):
        peers = [s for s in steps if key(s) == key(step)]
        return standardised([score(*s) for s in peers])[peers.index(step)]

    def net(i, t):
        return behind(i, t) - bad(i, t)

    def gain(i, t):
        return behind(i, t) - value(place((i, t)))

    if method == "gigpo":
        return [relative(forward, step, place) for step in steps]
    prompt = [path[0] for path in paths]
    return [
        relative(net, step, place) + relative(gain, step, lambda s: prompt[s[0]]) for step in steps
    ]


@pytest.mark.parametrize("method", ["gigpo", "g2po"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_credit_agrees_with_its_definition_written_down_again(method, seed):
    paths = random_paths(seed)
    found = step_credit(played(paths), method, gamma=0.95, compared=SCORED)
    close(found.values, brute_force(method, paths), 1e-5)
    assert float(found.values.abs().max()) > 1.0
    assert 0.5 < float(found.shared.mean()) <= 1.0


@pytest.mark.parametrize("method", ["gigpo", "g2po"])
def test_the_order_of_the_rows_changes_nothing(method):
    paths = random_paths(5)
    plain = step_credit(played(paths), method, gamma=0.9, compared=SCORED)
    order = list(range(len(plain.values)))
    random.Random(0).shuffle(order)
    mixed = step_credit(played(paths, order=order), method, gamma=0.9, compared=SCORED)
    close(mixed.values, plain.values[order], 1e-6)


def test_states_of_the_same_number_in_other_groups_are_other_nodes():
    batch = played([(0, ["a"], 1.0, ()), (1, ["a"], 0.0, ()), (1, ["a"], 1.0, ())])
    batch.row_state.zero_()
    found = step_credit(batch, "gigpo", gamma=1.0, compared=CENTRED)
    close(found.values, [0.0, -0.5, 0.5])
    assert found.num_nodes == 2


def test_a_penalty_costs_its_own_step_and_no_state_its_value():
    batch = played([(0, ["a", "b"], 1.0, (0,)), (0, ["a", "b"], 1.0, ())])
    graph = transition_graph(batch)
    close([v.penalty for v in graph.visits], [0.1, 0.0, 0.0, 0.0])
    close(values(node_values(graph, 0.5)), [0.25, 0.5, 0.25, 0.5])
    found = step_credit(batch, "g2po", gamma=0.5, compared=CENTRED)
    close(found.values, [-0.05 - 0.125, 0.125, 0.05 - 0.125, 0.125], 1e-6)


def test_what_an_environment_takes_for_a_readable_action_is_no_penalty():
    batch = played([(0, ["a"], -1.0, ())])
    (visit,) = transition_graph(batch).visits
    assert (visit.earned, visit.penalty) == (-1.0, 0.0)


def test_the_mean_gain_of_a_prompt_runs_over_steps_so_that_long_runs_weigh_more():
    # the mean of four steps, not of the means of two runs
    paths = [(0, ["a", "b", "c"], 1.0, ()), (0, ["z"], 0.0, ())]
    graph = transition_graph(played(paths))
    _, gains = edges(graph, 0.5)
    close(values(gains), [0.125, 0.25, 0.5, 0.0])
    found = step_credit(played(paths), "g2po", gamma=0.5, compared=CENTRED)
    close(found.values, [x - 0.875 / 4 for x in (0.125, 0.25, 0.5, 0.0)])


def test_equal_returns_give_no_credit_however_they_are_rounded():
    rows = [Visit(row=i, node=(0, 0), earned=0.1 + 0.2 if i else 0.3) for i in range(2)]
    graph = Graph(trajectories=tuple((row,) for row in rows))
    returns = {row.row: row.earned for row in rows}
    assert SCORED(graph.nodes, returns) == {0: 0.0, 1: 0.0}


def test_a_trained_row_in_an_unknown_state_is_refused():
    batch = played([(0, ["a", "b"], 1.0, ()), (0, ["a"], 0.0, ())])
    batch.row_state[1] = -1
    objective = GRPO(credit="gigpo")
    assert "turns" in objective.needs
    assert "turns" not in GRPO().needs
    with pytest.raises(ConfigError, match=r"1 of 3 trained rows name none; .* one row per turn"):
        objective.prepare(batch, INFO, {})
    GRPO().prepare(batch, INFO, {})


def test_two_rows_of_the_same_turn_are_refused():
    batch = played([(0, ["a", "b"], 1.0, ())])
    batch.row_step.zero_()
    with pytest.raises(AlignmentError, match="rows 0 and 1 are both turn 0"):
        transition_graph(batch)


def test_failed_episodes_and_worked_solutions_are_no_visits():
    paths = [(0, ["a"], 1.0, ()), (0, ["a"], 0.0, ()), (0, ["a"], 5.0, ()), (0, ["a"], 5.0, ())]
    batch = played(paths)
    batch.rewards[2] = math.nan
    batch.row_state[2] = -1
    batch.completion_mask[2] = False
    batch.row_sampled[3] = False
    found = step_credit(batch, "gigpo", gamma=1.0, compared=CENTRED)
    close(found.values, [0.5, -0.5, 0.0, 0.0])
    assert found.num_nodes == 1


def test_a_row_that_is_not_trained_still_carries_its_return_back():
    batch = played([(0, ["a", "b"], 1.0, ()), (0, ["a", "b"], 0.0, ())])
    batch.completion_mask[1] = False
    batch.row_state[1] = -1
    found = step_credit(batch, "gigpo", gamma=0.5, compared=CENTRED)
    close(found.values, [0.25, 0.0, -0.25, 0.0])
    assert found.num_nodes == 3


def test_the_term_reports_the_graph_and_the_size_of_each_part():
    objective = SEED(
        skill_coefficient=0.0, kl_coefficient=0.0, group="center", credit="g2po", credit_std=False
    )
    batch, _ = objective.prepare(CARD, INFO, {})
    ledger = Ledger()
    ledger.add(0.0, objective(view_of(batch, objective), batch))
    found = ledger.metrics()
    assert found["seed/nodes"] == 3.0
    assert found["seed/shared_share"] == 0.5
    assert found["seed/steps/p50"] == 2.0
    close(found["seed/trajectory_size"], 5.0)
    close(found["seed/credit_size"], (9.49375 + 0.25625 + 9.50625 + 0.24375) / 4)


def test_the_statistical_selector_has_its_published_values():
    # skills-and-routing 9.3, and a state whose returns differ less, which is left out
    returns = f64([1.0, 0.0, 0.5, 0.0, 0.4, 0.5, 0.7])
    states = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    scores = critical_scores(returns, states)
    close(scores, [0.171875e-6, 0.064453, 0.171875e-6, 0.064453, 0.0, 0.0, 0.0])
    assert critical_scores(returns, torch.arange(7)).tolist() == [0.0] * 7
