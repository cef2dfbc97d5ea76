"""What a skill is worth: matched attempts with it and without it, under the same draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from distill.engines.scripted import ScriptedEngine
from distill.errors import DataError
from distill.rollout import TurnRules, collect
from distill.rows import trajectories
from distill.types import Completion, Sampling, StopReason
from evals.metrics import paired_bootstrap
from flows.paired import PairedGain, is_success, measure, num_tokens
from skill_nights import (
    CHAT,
    WORLD,
    follow,
    order_skill,
    right_order,
    scripted_act,
    seen_in,
)
from skills.lifecycle import Thresholds, credited, gain, may_promote

TASKS = [t for t in WORLD.tasks("evolve") if t.meta["key"] == "K"][:16]
RIGHT = order_skill("K", right_order("K"), id="k")
WRONG = order_skill("K", right_order("K")[::-1], id="w")


def knows(task) -> bool:
    """Whether the scripted student solves a task by itself."""
    return int(task.prompt[-1].content[1:].partition(":")[0]) % 4 == 0


def test_some_tasks_are_solved_without_help_and_some_are_not():
    assert 0 < sum(map(knows, TASKS)) < len(TASKS)


def test_a_right_skill_gains_what_was_lost_without_it():
    found = measure(RIGHT, TASKS, scripted_act()[0], CHAT, key="k")
    without = [knows(task) for task in TASKS]
    assert found.outcomes == tuple((True, x) for x in without)
    assert (found.skill, found.content) == ("k", RIGHT.sha256)
    assert found.num_pairs == len(TASKS)
    assert found.rate_with == 1.0
    assert found.rate_without == pytest.approx(sum(without) / len(without))
    assert found.gain == pytest.approx(1.0 - sum(without) / len(without))


def test_a_wrong_skill_loses_what_was_won_without_it():
    found = measure(WRONG, TASKS, scripted_act()[0], CHAT, key="k")
    assert found.rate_with == 0.0
    assert found.gain == pytest.approx(-found.rate_without)
    assert found.high <= 0.0


def test_the_interval_is_the_paired_bootstrap_of_with_minus_without_at_90_percent():
    found = measure(RIGHT, TASKS, scripted_act()[0], CHAT, key="k")
    expected = paired_bootstrap(
        [float(knows(task)) for task in TASKS], [1.0] * len(TASKS), confidence=0.9
    )
    assert (found.gain, found.low, found.high) == (expected.mean, expected.low, expected.high)
    assert 0 < found.low < found.gain < found.high <= 1.0


def test_tokens_are_those_that_the_student_sampled_per_attempt():
    found = measure(RIGHT, TASKS, scripted_act()[0], CHAT, key="k")
    # A call is a tool, a key and the end token; two calls win, four use up the turns.
    assert found.tokens_with == 6.0
    share = found.rate_without
    assert found.tokens_without == pytest.approx(6.0 * share + 12.0 * (1 - share))


def test_every_pair_is_one_use_of_the_text_that_was_measured():
    found = measure(RIGHT, TASKS, scripted_act()[0], CHAT, key="k")
    assert len(found.uses) == len(TASKS)
    for use, task in zip(found.uses, TASKS, strict=True):
        assert (use.skill, use.success, use.content) == ("k", True, RIGHT.sha256)
        assert (use.num_without, use.num_success_without) == (1, int(knows(task)))
        assert use.interval == (found.low, found.high)
        assert use.tokens_saved == pytest.approx(found.tokens_without - 6.0)


def test_credit_of_the_uses_is_the_measured_gain_and_promotes_a_candidate():
    item = replace(RIGHT, evidence=seen_in("a", "b"))
    found = measure(item, TASKS, scripted_act()[0], CHAT, key="k")
    rules = Thresholds(min_pairs=len(TASKS))
    assert may_promote(item, rules) is not None
    for use in found.uses:
        item = credited(item, use, rules)
    assert gain(item.credit) == pytest.approx(found.gain)
    assert (item.credit.gain_low, item.credit.gain_high) == (found.low, found.high)
    assert item.credit.tokens_saved == pytest.approx(found.tokens_without - found.tokens_with)
    assert may_promote(item, rules) is None


class _Recorder:
    """Plays the script and keeps the key of every draw."""

    def __init__(self) -> None:
        self.keys: list[list[str]] = []
        self.prompts: list[list[Sequence[int]]] = []
        self._inner = ScriptedEngine(follow)
        self.policy_version = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        self.keys.append(list(sampling.keys))
        self.prompts.append([tuple(p) for p in prompts])
        return self._inner.generate(prompts, sampling)


def test_both_sides_play_the_same_tasks_with_the_same_draws():
    engine, rows = _Recorder(), []

    def act(tasks, key):
        found = collect(
            tasks,
            WORLD,
            engine,
            CHAT,
            Sampling(num_samples=1, max_new_tokens=4),
            key=key,
            turns=TurnRules(max_turns=1),
        )
        rows.append(found)
        return found

    repeated = [*TASKS[:3], TASKS[0]]
    measure(RIGHT, repeated, act, CHAT, key="night/pairs")
    own, plain = rows
    assert [r.traj_id for r in own] == [r.traj_id for r in plain]
    assert len({r.traj_id for r in own}) == 4, "a repeated task has draws of its own"
    assert engine.keys[0] == engine.keys[1]
    assert all(key.startswith("night/pairs/") for key in engine.keys[0])
    assert [CHAT.decode(p) for p in engine.prompts[1]] == [t.prompt[-1].content for t in repeated]
    shown = [t.meta["views"]["skill"].replace("{context}", RIGHT.principle) for t in repeated]
    assert [CHAT.decode(p) for p in engine.prompts[0]] == shown


def test_rows_that_were_played_already_are_not_played_again():
    act, asked = scripted_act()
    fresh = measure(RIGHT, TASKS, act, CHAT, key="k")
    plain = scripted_act()[0](TASKS, "k")
    asked.clear()
    assert measure(RIGHT, TASKS, act, CHAT, key="k", without=plain) == fresh
    assert len(asked) == 1


def test_sides_that_do_not_match_are_an_error():
    act = scripted_act()[0]
    with pytest.raises(DataError, match=r"skill k: 16 attempts with it and 16 without .* not of"):
        measure(RIGHT, TASKS, act, CHAT, key="k", without=act(TASKS, "another key"))
    with pytest.raises(DataError, match=r"16 attempts with it and 15 without"):
        measure(RIGHT, TASKS, act, CHAT, key="k", without=act(TASKS[:-1], "k"))
    with pytest.raises(DataError, match="skill k: there is no task to measure it on"):
        measure(RIGHT, [], act, CHAT, key="k")


def test_a_failed_or_cut_episode_is_no_success():
    (rows,) = trajectories(scripted_act()[0](TASKS[:1], "k"))
    last = rows[-1]
    assert not is_success([replace(last, reward=None, error="broken")], 0.0)
    assert not is_success([replace(last, reward=0.0, stop=StopReason.LENGTH)], 0.5)
    assert is_success([replace(last, reward=0.5)], 0.5)
    assert num_tokens([rows]) == sum(row.num_trained for row in rows) > 0


def test_the_threshold_of_success_decides_a_pair():
    found: PairedGain = measure(RIGHT, TASKS, scripted_act()[0], CHAT, key="k", success=0.0)
    assert found.rate_with == found.rate_without == 1.0
    assert (found.gain, found.low, found.high) == (0.0, 0.0, 0.0)
