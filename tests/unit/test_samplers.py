"""Which tasks a step trains on: orders, refills, the edge, and what a checkpoint keeps of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from distill.curriculum.samplers import (
    EPOCH_LIMIT,
    SAMPLERS,
    Edge,
    Kalman,
    Refill,
    Staged,
    TaskSampler,
    Uniform,
    keyed_uniform,
    steps_for,
)
from distill.engines.scripted import ScriptedEngine
from distill.errors import CheckpointError, ConfigError
from distill.objectives import GRPO, SFT
from distill.rollout import collect
from distill.step import Parts, mean_change, on_policy_step, rewards_of
from distill.trainer import Trainer, TrainerOptions
from distill.types import Message, Reward, Sampling, Task, Turn
from flows.compatibility import refill_rounds
from helpers import make_chat, make_policy, random_rollouts


def task(i: int, stage: int | None = None) -> Task:
    meta = {} if stage is None else {"stage": stage}
    prompt = (Message(role="user", content=f"{i}"),)
    return Task(id=f"t{i}", env="e", domain="d", split="train", prompt=prompt, meta=meta)


def tasks(count: int, stages: int = 0) -> list[Task]:
    return [task(i, i * stages // count if stages else None) for i in range(count)]


def ids(found: list[Task]) -> list[int]:
    return [int(t.id[1:]) for t in found]


def drawn(sampler: TaskSampler, steps: int) -> list[int]:
    return [i for step in range(1, steps + 1) for i in ids(sampler(step))]


# -- uniform --------------------------------------------------------------------------------------


def test_uniform_draws_are_those_of_every_earlier_night():
    # Golden values of the first release of the sampler: nights must be able to repeat themselves.
    sampler = TaskSampler(list(range(10)), batch=4, key="a")
    assert [sampler(step) for step in range(1, 7)] == [
        [5, 1, 9, 3],
        [2, 6, 0, 8],
        [4, 7, 5, 3],
        [7, 4, 8, 0],
        [2, 6, 9, 1],
        [8, 6, 1, 0],
    ]
    assert [sampler.extra(2, 1), sampler.extra(2, 2)] == [[5, 7, 8, 4], [5, 9, 5, 7]]
    small = TaskSampler(list(range(3)), batch=5, key="b")
    assert [small(step) for step in (1, 2, 3)] == [
        [0, 2, 1, 0, 1],
        [2, 0, 2, 1, 1],
        [0, 2, 0, 1, 2],
    ]
    huge = TaskSampler(range(EPOCH_LIMIT + 1), batch=5, key="7/1/opd")
    assert huge(1) == [143535, 60192, 191359, 158250, 174201]
    assert huge(2) == [36513, 66932, 2044, 25714, 82623]
    assert huge.extra(2, 1) == [52997, 58014, 33446, 134194, 135179]
    assert keyed_uniform("a/1") == pytest.approx(0.6559470879971967, abs=1e-16)


# -- staged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "batch"), [(1, 1), (5, 5), (7, 3), (10, 4), (3, 8), (100, 7)])
def test_every_pass_of_a_curriculum_gives_every_task_exactly_once(size, batch):
    sampler = TaskSampler(tasks(size, stages=3), batch=batch, key="k", sampler=Staged())
    seen = drawn(sampler, 3 * size)[: 3 * size]
    assert seen[:size] == list(range(size)), "the first pass is the order of the list"
    for start in (0, size, 2 * size):
        assert sorted(seen[start : start + size]) == list(range(size))


def test_later_passes_keep_the_stages_in_order_and_shuffle_inside_them():
    sampler = TaskSampler(tasks(30, stages=3), batch=6, key="k", sampler=Staged())
    seen = drawn(sampler, 15)
    second, third = seen[30:60], seen[60:90]
    for order in (second, third):
        assert [i // 10 for i in order] == sorted(i // 10 for i in order)
        assert order != sorted(order)
    assert second != third
    again = TaskSampler(tasks(30, stages=3), batch=6, key="k", sampler=Staged())
    assert ids(again(8)) == seen[42:48], "a step does not depend on those before it"
    plain = TaskSampler(tasks(6), batch=6, key="k", sampler=Staged())
    assert ids(plain(2)) == list(range(6)), "without stages the list is repeated as it is"


@pytest.mark.parametrize(
    ("size", "batch", "passes", "steps"),
    [
        (10, 4, 1.0, 3),
        (8, 4, 1.0, 2),
        (10, 4, 2.0, 5),
        (10, 4, 0.5, 2),
        (3, 8, 1.0, 1),
        (7, 2, 1.5, 6),
    ],
)
def test_a_number_of_passes_decides_the_steps_and_ends_with_a_short_batch(
    size, batch, passes, steps
):
    assert steps_for(size, batch, passes) == steps
    sampler = TaskSampler(tasks(size), batch=batch, key="k", sampler=Staged(passes=passes))
    count = Counter(drawn(sampler, steps))
    assert sum(count.values()) == -(-size * passes // 1)
    assert max(count.values()) - min(count.get(i, 0) for i in range(size)) <= (passes % 1 > 0)
    assert sampler(steps)
    assert sampler(steps + 1) == []


def test_passes_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match=r"sampler.passes must not be negative, got -1"):
        Staged(passes=-1)
    with pytest.raises(ConfigError, match="positive number of passes, got 10, 4 and 0"):
        steps_for(10, 4, 0)


def test_the_first_step_that_draws_from_a_further_stage_is_known():
    sampler = TaskSampler(tasks(12, stages=3), batch=5, key="k", sampler=Staged())
    # positions 0-4 | 5-9 | 10-11, 0-2: stages 0,0,0,0,1 | 1,1,1,2,2 | 2,2,0,0,0
    assert [sampler.stage_of(step) for step in (1, 2, 3, 4)] == [1, 2, 0, 1]
    straight = TaskSampler(tasks(12, stages=3), batch=2, key="k", sampler=Staged())
    entered = [s for s in range(1, 14) if straight.enters_stage(s)]
    assert entered == [3, 5, 7, 9, 11, 13]
    mixed = TaskSampler(tasks(12, stages=3), batch=2, key="k")
    assert not any(mixed.enters_stage(s) for s in range(1, 9)), "shuffled tasks enter no stage"


# -- refill ---------------------------------------------------------------------------------------


def test_refill_goes_on_where_it_stopped_and_counts_only_what_was_tried():
    pool = tasks(12)
    uniform = TaskSampler(pool, batch=2, key="k")
    order = drawn(uniform, 12)
    sampler = TaskSampler(pool, batch=2, key="k", sampler=Refill(rounds=3))
    first = [*sampler(1), *sampler.extra(1, 1)]
    assert ids(first) == order[:4]
    sampler.drawn(1, 3)
    told = sampler.observe(1, {t.id: [0.0, 0.0] for t in first[:3]} | {first[3].id: [0.0, 1.0]})
    assert told["sampler/rounds"] == 1
    assert told["sampler/useful_share"] == 0.25
    assert sampler.state == {"num_tasks": 12, "cursor": 4}
    assert ids(sampler(2)) == order[4:6]
    told = sampler.observe(2, {t.id: [0.0, 1.0] for t in sampler(2)})
    assert told["sampler/rounds"] == 0
    assert ids(sampler(3)) == order[6:8]


def test_a_refilled_step_trains_on_a_full_batch_of_groups_that_teach():
    # Of eight tasks only those with an even number can be won and lost.
    pool, policy = tasks(8), make_policy()
    sampler = TaskSampler(pool, batch=2, key="k", sampler=Refill(rounds=4))
    tried: list[int] = []

    def attempts(t, number):
        rewards = (0.0, 1.0 - int(t.id[1:]) % 2)
        name = f"{t.id}/{number}"
        return [
            replace(row, task_id=t.id, group_id=name, traj_id=f"{name}/{i}", reward=rewards[i])
            for i, row in enumerate(random_rollouts(2, seed=int(t.id[1:])))
        ]

    def rows(chosen, step):
        made = []
        for number in range(5):
            group = sampler.extra(step, number) if number else chosen
            tried.extend(ids(group))
            made += [row for t in group for row in attempts(t, number)]
            if sum(i % 2 == 0 for i in tried) >= 2:
                break
        return made

    parts = Parts(
        tasks=sampler,
        rows=rows,
        policy=policy,
        objective=GRPO(),
        trainer=Trainer(policy, TrainerOptions(num_steps=1, lr=1e-3)),
        sampler=sampler,
        rounds=4,
        num_groups=2,
    )
    report = on_policy_step(parts, 1)
    assert report.update.num_tokens > 0
    assert report.num_dropped == 2 * (len(tried) - 2)
    assert sampler.state["cursor"] == len(tried) > 2
    useful = sum(i % 2 == 0 for i in tried)
    assert report.sampled["sampler/useful_share"] == useful / len(tried)


def test_the_sampler_and_the_objective_never_both_refill():
    assert refill_rounds(Uniform(), GRPO(refill_rounds=2)) == 2
    assert refill_rounds(Refill(rounds=5), SFT()) == 5
    for sampler in (Refill(), Staged()):
        with pytest.raises(ConfigError, match=r"objective\.refill_rounds = 2 draws other tasks"):
            refill_rounds(sampler, GRPO(refill_rounds=2))
    with pytest.raises(ConfigError, match='"staged" gives every task exactly once'):
        TaskSampler(tasks(4), batch=2, key="k", sampler=Staged()).extra(1, 1)


# -- edge -----------------------------------------------------------------------------------------


def test_prompts_inside_the_band_are_preferred_and_new_ones_are_explored():
    sampler = TaskSampler(tasks(20), batch=8, key="k", sampler=Edge(explore=0.25))
    told = sampler.observe(1, {})
    assert told["sampler/fallbacks"] == 1, "nothing was tried, so nothing qualifies"
    first = {t.id for t in sampler(2)}
    assert len(first) == 8
    rewards = {name: [1.0, 0.0] for name in sorted(first)[:6]}
    rewards |= {name: [0.0, 0.0] for name in sorted(first)[6:]}
    told = sampler.observe(2, rewards)
    assert told["sampler/fallbacks"] == 2
    found = [t.id for t in sampler(3)]
    assert len(set(found)) == 8
    assert set(found[:6]) == set(sorted(first)[:6])
    assert not set(found[6:]) & first, "a quarter is new"
    told = sampler.observe(3, {})
    assert told["sampler/fallbacks"] == 2
    assert (told["sampler/edge_share"], told["sampler/new_share"]) == (0.75, 0.25)


def test_old_attempts_fade_and_the_band_is_closed():
    sampler = TaskSampler(tasks(1), batch=1, key="k", sampler=Edge(low=0.25, high=0.75, decay=0.5))
    rates = []
    for step, wins in enumerate([4, 2, 4, 4], start=1):
        sampler.observe(step, {"t0": [1.0] * wins + [0.0] * (4 - wins)})
        won, tried = sampler.state["seen"]["0"]
        rates.append(round(won / tried, 6))
    # 4/4 | (2+2)/(2+4) | (2+4)/(3+4) | (3+4)/(3.5+4)
    assert rates == [1.0, 0.666667, 0.857143, 0.933333]


def test_a_share_of_new_prompts_ends_when_all_were_tried():
    sampler = TaskSampler(tasks(4), batch=4, key="k", sampler=Edge(explore=1.0))
    sampler.observe(1, {f"t{i}": [0.0, 1.0] for i in range(4)})
    assert sorted(ids(sampler(2))) == [0, 1, 2, 3]
    assert sampler.observe(2, {})["sampler/edge_share"] == 1.0


# -- all of them ----------------------------------------------------------------------------------


def play(sampler: TaskSampler, steps: range) -> list[list[int]]:
    """Steps whose rewards depend on task and step alone."""
    found = []
    for step in steps:
        chosen = sampler(step)
        found.append(ids(chosen))
        sampler.drawn(step, sampler.sampler.rounds)
        rewards = {
            t.id: [float(keyed_uniform(f"{t.id}/{step}/{g}") > 0.5) for g in range(4)]
            for t in chosen
        }
        sampler.observe(step, rewards, change=0.01 * step)
    return found


@pytest.mark.parametrize("size", [2, 30, EPOCH_LIMIT + 5])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_state_that_went_through_json_draws_the_same(name, size):
    if name == "balanced" and size > EPOCH_LIMIT:
        pytest.skip("it looks at every task, which a larger pool does not allow")
    pool = tasks(size) if size < 100 else Lazy(size)
    options = {"candidates": 10} if name == "kalman" else {}
    whole = TaskSampler(pool, batch=4, key="k", sampler=SAMPLERS[name](**options))
    expected = play(whole, range(1, 13))
    first = TaskSampler(pool, batch=4, key="k", sampler=SAMPLERS[name](**options))
    play(first, range(1, 7))
    kept = json.loads(json.dumps(first.state, sort_keys=True))
    second = TaskSampler(pool, batch=4, key="k", sampler=SAMPLERS[name](**options))
    second.restore(kept)
    assert play(second, range(7, 13)) == expected[6:]
    assert second.state == whole.state
    assert all(len(batch) == 4 for batch in expected)


class Lazy:
    """A list of tasks that are made when they are asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Task:
        return task(i)


def test_a_state_of_another_list_of_tasks_is_refused():
    sampler = TaskSampler(tasks(5), batch=2, key="k", sampler=Kalman())
    sampler.observe(1, {"t1": [1.0]})
    with pytest.raises(CheckpointError, match="remembers 5 tasks, but there are 6 now"):
        TaskSampler(tasks(6), batch=2, key="k", sampler=Kalman()).restore(sampler.state)
    assert TaskSampler(tasks(5), batch=2, key="k").state == {}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("refill", {"rounds": 0}, "sampler.rounds must be at least 1"),
        ("edge", {"low": 0.9, "high": 0.1}, "must be ordered within"),
        ("edge", {"explore": 1.5}, r"sampler.explore must be within \[0, 1\], got 1.5"),
        ("kalman", {"prior_var": 0.0}, "sampler.prior_var must be positive"),
        ("kalman", {"candidates": 1}, "sampler.candidates must be at least 2"),
    ],
)
def test_options_without_a_meaning_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        SAMPLERS[name](**options)


def test_only_the_students_own_finished_attempts_have_rewards():
    rows = random_rollouts(4)
    worked = random_rollouts(2, seed=3, worked=True)
    assert rewards_of(rows) == {"t0": [0.0, 1.0], "t1": [0.0, 1.0]}
    assert rewards_of(worked) == {}


def test_the_change_of_a_policy_is_the_kl_of_its_tokens():
    # d = (0.5, -0.5): exp(d) - 1 - d = 0.148721, 0.106531
    assert mean_change([-1.0, -1.0], [-0.5, -1.5]) == pytest.approx(0.127626, abs=1e-6)
    assert mean_change([-1.0], [-1.0]) == 0.0
    assert mean_change([], []) == 0.0


def test_a_step_measures_how_far_it_moved_the_policy_where_somebody_asks():
    policy, chat = make_policy(), make_chat()

    class One:
        def tasks(self, split):
            return tasks(4)

        def start(self, task):
            return self

        def reply(self, text):
            return Turn(done=True, reward=float(len(text) > 3))

        def reward(self):
            return Reward(value=1.0)

    engine = ScriptedEngine(lambda prompt, g: [5 + g, 6, 1])
    sampler = TaskSampler(tasks(4), batch=2, key="k", sampler=Kalman())
    asked = Sampling(num_samples=2, max_new_tokens=4)

    def parts(lr):
        return Parts(
            tasks=sampler,
            rows=lambda chosen, step: collect(chosen, One(), engine, chat, asked, key=str(step)),
            policy=policy,
            objective=SFT(),
            trainer=Trainer(policy, TrainerOptions(num_steps=1, lr=lr, warmup_steps=0)),
            sampler=sampler,
        )

    still = on_policy_step(parts(0.0), 1).sampled
    assert still["policy_change"] == 0.0
    assert still["sampler/seen"] == 0
    assert sampler.state["drift"] == 0.0
    assert len(sampler.state["seen"]) == 2


class Known(list[Task]):
    """Tasks that know their stages without being read."""

    def __init__(self, stages: list[int]) -> None:
        super().__init__(tasks(len(stages)))
        self.stages = np.array(stages, dtype=np.int8)


def test_a_list_that_knows_its_stages_is_walked_like_one_whose_tasks_say_them():
    stages = [1] * 5 + [2] * 3 + [3] * 4
    known = Known(stages)
    told = [task(i, stage) for i, stage in enumerate(stages)]
    one = TaskSampler(known, batch=4, key="k", sampler=Staged())
    two = TaskSampler(told, batch=4, key="k", sampler=Staged())
    for step in range(1, 10):
        assert [t.id for t in one(step)] == [t.id for t in two(step)]
        assert one.enters_stage(step) == two.enters_stage(step)


def test_a_shuffled_list_has_no_stages_to_enter_and_is_shuffled_anew_in_every_pass():
    sampler = TaskSampler(Known([0] * 12), batch=4, key="k", sampler=Staged())
    assert not any(sampler.enters_stage(step) for step in range(1, 10))
    passes = [[t.id for step in range(3 * p + 1, 3 * p + 4) for t in sampler(step)] for p in (0, 1)]
    assert sorted(passes[0]) == sorted(passes[1])
    assert passes[0] != passes[1]
