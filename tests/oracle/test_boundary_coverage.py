"""Do the intervals of the boundary table cover what they claim? Tables that hold the outcome of
every model on every prompt (as RouterBench has) or of a weak and a strong one (as RouteLLM has)
know the truth: the mean of a column. A policy picks one model per prompt, and only that is seen.
"""

from __future__ import annotations

import numpy as np
import pytest

from distill.curriculum.boundary import Columns, boundary_table, wilson

LOGS = 500
"""Simulated logs per case, each a scene of its own in one table."""
# What chance does to the coverage of so many logs: 3 standard errors, 0.03.
ERROR = 3 * (0.95 * 0.05 / LOGS) ** 0.5


def full_table(thresholds, rows=2000, seed=0):
    """Difficulty [rows] and the outcome of each model on each prompt [rows, models]."""
    rng = np.random.default_rng(seed)
    difficulty = rng.normal(size=rows)
    chance = 1 / (1 + np.exp(1.5 * (difficulty[:, None] - np.array(thresholds))))
    return difficulty, rng.random(chance.shape) < chance


ROUTERBENCH = full_table([-0.8, 0.2, 0.9, 1.6])
ROUTELLM = full_table([0.3, 1.8])


def routed(table, n, *, pull, least):
    """LOGS logs of n prompts each, as columns. `pull` sends hard prompts to higher models, and no
    model has a chance below `least`."""
    difficulty, outcomes = table
    models = outcomes.shape[1]
    logits = pull * difficulty[:, None] * np.arange(models)
    policy = np.exp(logits - logits.max(1, keepdims=True))
    policy = policy / policy.sum(1, keepdims=True) * (1 - models * least) + least
    rng = np.random.default_rng(1)
    row = rng.integers(0, len(difficulty), LOGS * n)
    tier = (rng.random(len(row))[:, None] > policy[row].cumsum(1)[:, :-1]).sum(1)
    return Columns(
        scene=np.repeat(np.arange(LOGS), n),
        band=np.zeros(len(row), dtype=np.int64),
        tier=tier,
        outcome=outcomes[row, tier].astype(np.int64),
        verified=np.ones(len(row), dtype=bool),
        cached=np.zeros(len(row), dtype=bool),
        propensity=policy[row, tier],
        weight=np.ones(len(row)),
        predicted=difficulty[row],
        rescued=np.full(len(row), -1),
    )


def coverage(table, columns):
    """Share of the logs whose interval holds the mean of the model's whole column, per model, and
    the same for Wilson's interval of the turns as they came."""
    found = boundary_table(columns, [str(i) for i in range(LOGS)])
    truth = table[1].mean(0)
    cells = [c for c in found.cells if c.n >= 20]
    naive = wilson(np.array([c.k for c in cells]), np.array([c.n for c in cells]))
    tier = np.array([c.tier for c in cells])
    low, high = (np.array([getattr(c, end) for c in cells]) for end in ("low", "high"))
    models = range(len(truth))
    ours = [
        np.mean((low <= t) & (t <= high), where=tier == m)
        for m, t in zip(models, truth, strict=True)
    ]
    plain = [
        np.mean((naive[0] <= t) & (t <= naive[1]), where=tier == m)
        for m, t in zip(models, truth, strict=True)
    ]
    share = np.mean([c.basis == "weighted" for c in cells])
    return np.array(ours), np.array(plain), share


@pytest.mark.parametrize("table", [ROUTERBENCH, ROUTELLM], ids=["routerbench", "routellm"])
@pytest.mark.parametrize("n", [150, 600])
def test_intervals_of_a_policy_that_tosses_coins_cover_what_they_claim(table, n) -> None:
    models = table[1].shape[1]
    ours, plain, weighted = coverage(table, routed(table, n, pull=0.0, least=0.5 / models))
    assert ours == pytest.approx(np.full(models, 0.95), abs=ERROR)
    assert ours == pytest.approx(plain, abs=0.01)
    assert weighted > 0.97


@pytest.mark.parametrize(
    ("table", "least", "pull"),
    [(ROUTERBENCH, 0.1, 1.0), (ROUTELLM, 0.1, 2.0), (ROUTERBENCH, 0.1, -1.5)],
    ids=["routerbench", "routellm", "reversed"],
)
@pytest.mark.parametrize("n", [150, 600])
def test_weighted_intervals_cover_under_confounded_routing_and_plain_ones_do_not(
    table, least, pull, n
) -> None:
    ours, plain, weighted = coverage(table, routed(table, n, pull=pull, least=least))
    # Careful where the turns that count most are the ones that succeed, and never too narrow.
    assert (ours > 0.95 - ERROR).all()
    assert (ours < 0.995).all()
    assert plain[0] < 0.7
    assert weighted > 0.95


def test_what_the_cap_takes_away_never_costs_coverage() -> None:
    # Chances down to 0.03: weights up to 33 are cut to 10. The interval is wider, not wrong.
    ours, plain, _ = coverage(ROUTERBENCH, routed(ROUTERBENCH, 600, pull=1.0, least=0.03))
    assert (ours > 0.95 - ERROR).all()
    assert plain[0] < 0.3


def test_without_propensities_the_confounded_cells_are_labelled_and_noted() -> None:
    columns = routed(ROUTERBENCH, 150, pull=1.0, least=0.1)
    columns.propensity[:] = np.nan
    found = boundary_table(columns, [str(i) for i in range(LOGS)])
    assert {c.basis for c in found.cells} == {"observational"}
    assert np.mean([any("selection" in note for note in c.notes) for c in found.cells]) > 0.99
    columns.predicted[:] = np.random.default_rng(0).random(len(columns.predicted))
    unlinked = boundary_table(columns, [str(i) for i in range(LOGS)])
    assert np.mean([bool(c.notes) for c in unlinked.cells]) < 0.03
