"""How demand is estimated, and that no estimate can see how a turn was served or how it ended."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math

import numpy as np
import pytest

from distill.curriculum.demand import (
    DemandInput,
    calibration_bins,
    demand_input,
    fallback_demand,
    given_demand,
    logged_demand,
    quality,
    text_of,
)
from distill.curriculum.demand_features import sketch
from distill.curriculum.demand_fit import DemandModel, fit_demand
from distill.curriculum.demand_sample import FitSample, Observation, fold_of, label_observations
from distill.curriculum.records import (
    Decision,
    Outcome,
    PolicyStep,
    Prediction,
    Request,
    RoutingTurn,
    Served,
    Verdict,
)
from distill.errors import ConfigError, DataError

THETA = np.array([-1.0, 0.3, 1.3, 2.5])
HARD = ["prove", "derive", "refactor", "concurrency", "integral", "deadlock"]
EASY = ["hello", "thanks", "weather", "colour", "capital", "lunch", "paper", "window", "table"]


def world(n, served, seed=0):
    """Requests of six words, of which more or fewer are hard; demand is latent and logistic.

    Returns inputs, true difficulty [n], served tiers [n] and outcomes [n].
    """
    rng = np.random.default_rng(seed)
    share = rng.random(n)
    hard = rng.random((n, 6)) < share[:, None]
    words = np.where(hard, rng.choice(HARD, (n, 6)), rng.choice(EASY, (n, 6)))
    difficulty = 0.8 * (hard.sum(1) - 3.0)
    if served == "selected":
        tier = np.clip(np.round(1.5 * difficulty + rng.normal(0, 0.5, n) + 1), 0, 3).astype(int)
    else:
        tier = rng.choice(served, n)
    success = difficulty + rng.logistic(size=n) <= THETA[tier]
    inputs = [
        DemandInput(
            request=" ".join(row),
            history=({"role": "assistant", "content": "so " * int(rng.integers(0, 40))},),
            tools=("search",) * int(rng.integers(0, 2)),
        )
        for row in words
    ]
    return inputs, difficulty, tier, success


def sample_of(inputs, tiers, successes, *, cap=20_000, order=None):
    sample = FitSample(cap)
    for i in order if order is not None else range(len(inputs)):
        seen = [Observation(int(tiers[i]), bool(successes[i]))]
        sample.add(f"t{i}", f"s{i // 3}", inputs[i], seen)
    return sample


def sessions(n):
    return [f"s{i // 3}" for i in range(n)]


@pytest.fixture(scope="module")
def fitted():
    inputs, difficulty, tier, success = world(2000, [0, 1, 2, 3])
    model, calibration = fit_demand(sample_of(inputs, tier, success))
    return inputs, difficulty, tier, success, model, calibration


def test_an_input_has_three_fields_and_estimators_take_nothing_else() -> None:
    assert [f.name for f in dataclasses.fields(DemandInput)] == ["request", "history", "tools"]
    for method in (DemandModel.probs, DemandModel.demands):
        names = inspect.signature(method).parameters
        assert list(names) == ["self", "given", "sessions"]
        assert "DemandInput" in str(names["given"].annotation)
    assert list(inspect.signature(sketch).parameters) == ["given"]


def make_turn() -> RoutingTurn:
    return RoutingTurn(
        source="s",
        source_id="1",
        format="f",
        session_id="s1",
        messages=(
            {"role": "user", "content": "hello lunch"},
            {"role": "assistant", "content": "served", "reasoning_content": "r", "model": "m"},
            {"role": "user", "content": "prove the integral"},
            {"role": "assistant", "content": "the answer"},
        ),
        tools=({"type": "function", "function": {"name": "search"}},),
    )


# Another value of every field that does not belong to request, history or tools.
OTHER = {
    "source": "other",
    "source_id": "2",
    "format": "other",
    "session_id": "s1",  # it only chooses the fold, see the test of flipped outcomes
    "turn_index": 7,
    "ts": 5,
    "trace_id": "x",
    "parent_id": "x",
    "user": "u",
    "scene": "code",
    "tags": ("a",),
    "request": Request(tokens_in=9, prompt_sha256="0", tools_sha256="0"),
    "prediction": Prediction(tier=3, probs=(0.0, 0.0, 0.0, 1.0), confidence=0.9),
    "decision": Decision(tier=3, propensity=0.1, policy=(PolicyStep(stage="x", applied=True),)),
    "served": Served(model="big", tier=3, kind="ensemble", fallback_hops=2, cache_hit=True),
    "outcome": Outcome(status="failure", verdicts=(Verdict(source="user", name="v", value=0.0),)),
    "num_prompt": 3,
    "truncated": True,
    "sample_rate": 0.1,
    "consent": False,
    "raw_sha256": "0",
}


def test_a_demand_is_the_same_bits_whatever_else_the_turn_says(fitted) -> None:
    model = fitted[4]

    def estimate(turn: RoutingTurn) -> bytes:
        given = demand_input(turn.messages or (), 2, turn.tools)
        return model.probs([given], [turn.session_id or ""]).tobytes()

    turn = make_turn()
    assert set(OTHER) == {f.name for f in dataclasses.fields(turn)} - {"messages", "tools"}
    plain = estimate(turn)
    for name, value in OTHER.items():
        assert estimate(dataclasses.replace(turn, **{name: value})) == plain, name
    assert estimate(dataclasses.replace(turn, **OTHER)) == plain
    # Neither the answer, nor thoughts of earlier answers, nor a model that a message names.
    first, earlier, asked, _ = turn.messages or ()
    hidden = {**earlier, "reasoning_content": "prove", "model": "big", "served_tier": 3}
    failed = {"role": "assistant", "content": "no", "error": "x"}
    assert estimate(dataclasses.replace(turn, messages=(first, hidden, asked, failed))) == plain
    shown = demand_input((first, hidden, asked), 2).history[1]
    assert shown == {"role": "assistant", "content": "served"}
    # The three that count do change it.
    other = {**asked, "content": "hello weather"}
    assert estimate(dataclasses.replace(turn, messages=(first, earlier, other))) != plain
    longer = {**earlier, "content": "served " * 50}
    assert estimate(dataclasses.replace(turn, messages=(first, longer, asked))) != plain
    assert estimate(dataclasses.replace(turn, tools=())) != plain


def test_an_estimate_never_holds_the_outcomes_of_its_own_session(fitted) -> None:
    inputs, _, tier, success, model, _ = fitted
    flipped = success.copy()
    own = [i for i in range(len(inputs)) if fold_of(f"s{i // 3}") == fold_of("s5")]
    flipped[own] = ~flipped[own]
    same, _ = fit_demand(sample_of(inputs, tier, flipped))
    mine, names = [inputs[i] for i in own], [f"s{i // 3}" for i in own]
    assert (same.probs(mine, names) == model.probs(mine, names)).all()
    rest = [i for i in range(len(inputs)) if i not in set(own)]
    mine, names = [inputs[i] for i in rest], [f"s{i // 3}" for i in rest]
    assert (same.probs(mine, names) != model.probs(mine, names)).all(1).all()
    assert same.digest != model.digest


def test_a_known_ordinal_model_is_recovered(fitted) -> None:
    inputs, difficulty, _, _, model, calibration = fitted
    probs = model.probs(inputs, sessions(len(inputs)))
    assert probs.sum(1) == pytest.approx(np.ones(len(inputs)))
    assert (probs >= 0).all()
    score = probs @ np.arange(4)
    assert np.corrcoef(score, difficulty)[0, 1] > 0.95
    assert np.diff(model.theta.mean(0)) == pytest.approx(np.diff(THETA), abs=0.35)
    true = np.diff(1 / (1 + np.exp(difficulty[:, None] - THETA[:3])), axis=1, prepend=0)
    assert np.abs(probs[:, :3] - true).mean() < 0.06
    assert calibration.model.ece < 0.05
    assert calibration.model.auc > calibration.tier.auc + 0.05 > 0.6
    assert calibration.constant.auc == 0.5
    assert calibration.is_useful
    assert model.identified == (True,) * 4
    assert sum(b.n for b in calibration.bins) == calibration.n == len(inputs)


def test_tiers_keep_their_order_when_the_router_sends_hard_turns_up() -> None:
    inputs, difficulty, tier, success = world(3000, "selected", seed=1)
    rates = [success[tier == t].mean() for t in range(3)]
    assert np.ptp(rates) < 0.1  # what the log shows at first sight: the tiers hardly differ
    model, _ = fit_demand(sample_of(inputs, tier, success))
    assert np.diff(model.theta.mean(0)) == pytest.approx(np.diff(THETA), abs=0.5)
    score = model.probs(inputs, sessions(len(inputs))) @ np.arange(4)
    assert np.corrcoef(score, difficulty)[0, 1] > 0.95


def test_one_served_tier_gives_the_order_and_says_that_the_other_tiers_are_a_guess() -> None:
    inputs, difficulty, tier, success = world(1500, [1], seed=2)
    model, calibration = fit_demand(sample_of(inputs, tier, success))
    score = model.probs(inputs, sessions(len(inputs))) @ np.arange(4)
    assert np.corrcoef(score, difficulty)[0, 1] > 0.9
    assert model.identified == (False, True, False, False)
    assert np.diff(model.theta, axis=1) == pytest.approx(np.ones((5, 3)), abs=0.05)
    assert calibration.tier.auc == 0.5 < calibration.model.auc


def test_labels_count_as_observations_and_stay_out_of_the_calibration() -> None:
    assert label_observations(0, 0.5) == (Observation(0, True, 0.5, True),)
    assert label_observations(2) == (
        Observation(1, False, 1.0, True),
        Observation(2, True, 1.0, True),
    )
    assert label_observations(3) == (Observation(2, False, 1.0, True),)
    inputs, difficulty, tier, success = world(1200, [0], seed=3)
    plain = sample_of(inputs[:300], tier, success)
    labelled = sample_of(inputs[:300], tier, success)
    for i in range(300, 1200):
        label = int(np.clip(np.round(difficulty[i] + 1), 0, 3))
        labelled.add(f"t{i}", f"s{i // 3}", inputs[i], label_observations(label, 2.0))
    (without, a), (with_labels, b) = fit_demand(plain), fit_demand(labelled)
    assert a.n == b.n == 300
    names = sessions(1200)
    found = [np.corrcoef(m.probs(inputs, names) @ np.arange(4), difficulty)[0, 1]
             for m in (without, with_labels)]  # fmt: skip
    assert found[1] > max(0.95, found[0])


def test_equal_logs_give_equal_models_in_any_order_and_a_cap_chooses_by_hash(fitted) -> None:
    inputs, _, tier, success, _, _ = fitted
    order = np.random.default_rng(0).permutation(len(inputs))
    ahead = fit_demand(sample_of(inputs, tier, success, cap=400))[0]
    mixed = fit_demand(sample_of(inputs, tier, success, cap=400, order=order))[0]
    assert ahead.digest == mixed.digest
    assert (ahead.num_turns, ahead.num_seen) == (400, 2000)
    with pytest.raises(ConfigError, match="cap = 0"):
        FitSample(0)


def test_an_estimate_does_not_depend_on_its_batch(fitted) -> None:
    inputs, model = fitted[0], fitted[4]
    some = [*inputs[:5], DemandInput(request=""), DemandInput(request="x" * 5000 + "?")]
    together = model.probs(some, ["a"] * 7)
    alone = np.concatenate([model.probs([one], ["a"]) for one in some])
    assert (together == alone).all()
    assert [d.method for d in model.demands(some[:1], ["a"])] == ["fitted"]
    assert model.probs([], []).shape == (0, 4)
    with pytest.raises(DataError, match="one session each"):
        model.probs(some, ["a"])


def test_a_model_survives_its_file_and_a_damaged_file_is_refused(fitted, tmp_path) -> None:
    inputs, model = fitted[0], fitted[4]
    path = tmp_path / "model.json"
    model.save(path)
    again = DemandModel.load(path)
    assert again.digest == model.digest
    names = sessions(len(inputs))
    assert (again.probs(inputs, names) == model.probs(inputs, names)).all()
    found = json.loads(path.read_text())
    record = json.loads(found["model"])
    record["theta"][0][0] += 0.5
    path.write_text(json.dumps({**found, "model": json.dumps(record)}))
    with pytest.raises(DataError, match="digest"):
        DemandModel.load(path)
    path.write_text(json.dumps({**found, "model": json.dumps({**record, "format": 0})}))
    with pytest.raises(DataError, match="another version"):
        DemandModel.load(path)
    path.write_text('{"digest": "x"}')
    with pytest.raises(DataError, match="no model of demand"):
        DemandModel.load(path)


@pytest.mark.parametrize(
    ("n", "change", "expected"),
    [
        (150, lambda s: s, "at least 200 turns.*has 150"),
        (300, lambda s: np.ones_like(s), "at least 20 failures.*has 0"),
        (300, lambda s: np.zeros_like(s), "at least 20 successes.*has 0"),
    ],
)
def test_too_little_data_is_refused_with_what_happens_instead(n, change, expected) -> None:
    inputs, _, tier, success = world(n, [0, 1, 2, 3])
    with pytest.raises(DataError, match=expected) as caught:
        fit_demand(sample_of(inputs, tier, change(success)))
    assert "logged is used, or a flat one" in str(caught.value)


def test_too_few_sessions_are_refused() -> None:
    inputs, _, tier, success = world(300, [0, 1])
    sample = FitSample()
    for i, given in enumerate(inputs):
        sample.add(f"t{i}", f"s{i % 4}", given, [Observation(int(tier[i]), bool(success[i]))])
    with pytest.raises(DataError, match="at least 10 sessions, the log has 4"):
        fit_demand(sample)


def test_an_observation_of_a_tier_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DataError, match="tier from 0 to 3"):
        FitSample().add("t", None, DemandInput(request="x"), [Observation(4, True)])
    sample = FitSample()
    sample.add("t", None, DemandInput(request="x"), [])
    assert sample.num_seen == 0


def test_a_logged_demand_is_the_routers_own_and_a_bare_tier_is_marked() -> None:
    found = logged_demand(Prediction(tier=3, probs=(0.1, 0.31, 0.44, 0.15)))
    assert found is not None
    assert (found.method, found.hard) == ("logged", 2)
    assert found.score == pytest.approx(0.31 + 0.88 + 0.45)
    tier = logged_demand(Prediction(tier=3))
    assert tier is not None
    assert (tier.method, tier.probs) == ("logged_tier", (0.0, 0.0, 0.0, 1.0))
    assert logged_demand(Prediction(score=0.3)) is logged_demand(None) is None
    flat = fallback_demand(None)
    assert (flat.method, flat.score, flat.hard) == ("flat", 1.5, 0)
    assert fallback_demand(Prediction(tier=1)).method == "logged_tier"


def test_given_probabilities_are_checked_and_rounding_is_evened_out() -> None:
    assert given_demand([0.33, 0.33, 0.33, 0.0]).probs == pytest.approx((1 / 3, 1 / 3, 1 / 3, 0))
    for bad in ([0.5, 0.5], [0.5, 0.6, 0.0, 0.0], [1.5, -0.5, 0.0, 0.0], [math.nan] * 4):
        with pytest.raises(DataError, match="one per tier"):
            given_demand(bad)
    with pytest.raises(DataError, match="tier must be within"):
        logged_demand(Prediction(tier=4))
    with pytest.raises(DataError, match="message 3"):
        demand_input([{"role": "user", "content": "x"}], 3)


def test_text_is_read_out_of_parts_and_anything_else_is_none() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, "b", {"text": "c"}]
    assert text_of(parts) == "a\nc"
    assert text_of(None) == text_of({"text": "a"}) == ""
    assert demand_input([{"role": "user"}], 0, [{"name": "plain"}, {}]).tools == ("plain",)


def test_quality_of_predictions_is_that_of_a_direct_count() -> None:
    rng = np.random.default_rng(0)
    predicted = rng.random(200).round(1)
    outcome = rng.random(200) < predicted
    found = quality(predicted, outcome)
    assert found.brier == pytest.approx(
        np.mean([(p - y) ** 2 for p, y in zip(predicted, outcome, strict=True)])
    )
    good, bad = predicted[outcome], predicted[~outcome]
    wins = [(g > b) + 0.5 * (g == b) for g in good for b in bad]
    assert found.auc == pytest.approx(np.mean(wins))
    bins = calibration_bins(predicted, outcome)
    ece = sum(b.n * abs(b.predicted - b.observed) for b in bins) / 200
    assert found.ece == pytest.approx(ece)
    assert all(b.low <= b.observed <= b.high for b in bins)
    assert math.isnan(quality(np.array([0.5]), np.array([True])).auc)
