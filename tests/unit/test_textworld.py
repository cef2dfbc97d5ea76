"""TextWorld games: scripted and random play in a real worker, and what happens when it dies."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from distill.errors import ConfigError, DataError, EngineError, MissingExtra
from distill.types import Task, Turn
from evals.envs import build_env
from evals.envs.base import check_disjoint
from evals.envs.textworld import Game, TextWorldEnv, lesson, owner_of
from evals.envs.textworld_episode import GameEpisode, shown
from evals.envs.textworld_process import GameProcess
from tree import ROOT

needs_textworld = pytest.mark.skipif(
    importlib.util.find_spec("textworld") is None,
    reason="textworld is not installed; try: make install",
)

TREASURE = ("treasure_hunter:4",)


@pytest.fixture(scope="module")
def env() -> Iterator[TextWorldEnv]:
    env = TextWorldEnv(games=TREASURE, gate_size=4, max_steps=6)
    yield env
    env.close()


def beside(env: TextWorldEnv, **options: Any) -> TextWorldEnv:
    """An environment with other options that asks the same worker, which takes long to start."""
    other = replace(env, **options)
    other.__dict__["_process"] = env._process
    return other


def walk_of(env: TextWorldEnv, task: Task) -> list[str]:
    """The game's own winning walk, asked of the worker."""
    game = Game(task.meta["kind"], task.meta["level"], task.meta["seed"])
    walk: list[str] = env._process.ask("make", **game._asdict())["walk"]
    return walk


def play(episode: GameEpisode, commands: list[str]) -> list[Turn]:
    return [episode.reply(command) for command in commands]


@needs_textworld
@pytest.mark.parametrize(
    ("game", "number"), [("treasure_hunter:4", 3), ("coin_collector:3", 1), ("cooking:1", 1)]
)
def test_the_games_own_winning_walks_win(env: TextWorldEnv, game: str, number: int) -> None:
    env = beside(env, games=(game,), max_steps=10)
    for task in env.tasks("train")[:number]:
        episode = env.start(task)
        walk = walk_of(env, task)
        turns = play(episode, walk)
        assert [turn.done for turn in turns] == [False] * (len(walk) - 1) + [True]
        assert all(turn.valid for turn in turns)
        assert [turn.reward for turn in turns] == [0.0] * (len(walk) - 1) + [1.0]
        reward = episode.reward()
        assert (reward.value, reward.parts["won"], reward.parts["progress"]) == (1.0, 1.0, 1.0)
        assert reward.parts["steps"] == len(walk) / 10
        assert turns[-1].choices == episode.choices == ()


@needs_textworld
def test_random_play_is_graded_and_its_turns_add_up_to_the_reward(env: TextWorldEnv) -> None:
    draw = random.Random(0)
    values, lost = [], 0
    for task in list(env.tasks("gate")) * 5:
        episode = env.start(task)
        total = 0.0
        while episode.choices:
            total += episode.reply(draw.choice(episode.choices)).reward
        reward = episode.reward()
        assert total == reward.value == reward.parts["won"]
        lost += reward.parts["lost"] == 1.0
        values.append(reward.value)
    assert set(values) == {0.0, 1.0}
    assert lost > 0


@needs_textworld
def test_step_rewards_follow_the_way_and_still_add_up(env: TextWorldEnv) -> None:
    env = beside(env, step_rewards=True, max_steps=4)
    for task in env.tasks("train")[:3]:
        walk = walk_of(env, task)
        won = play(env.start(task), walk)
        assert [turn.reward for turn in won] == pytest.approx([1 / len(walk)] * len(walk))
        episode = env.start(task)
        idle = play(episode, [walk[0], "sing", "sing", "sing"])
        if len(walk) > 1:
            assert idle[0].reward == pytest.approx(1 / len(walk))
            assert idle[-1].reward == pytest.approx(-1 / len(walk))
            assert sum(turn.reward for turn in idle) == episode.reward().value == 0.0


@needs_textworld
def test_an_impossible_command_changes_nothing_costs_a_step_and_names_what_is_possible(
    env: TextWorldEnv,
) -> None:
    task = env.tasks("gate")[0]
    episode = env.start(task)
    before = episode.choices
    turn = episode.reply("open the sky")
    assert not turn.valid
    assert not turn.done
    assert turn.choices == before
    assert turn.messages[-1].content == (
        f"That is not possible here. Commands: {', '.join(before)}"
    )
    assert episode.reply("look").valid is False  # a command that changes nothing is none
    assert play(episode, walk_of(env, task))[-1].reward == 1.0
    assert episode.reward().parts["invalid"] > 0


@needs_textworld
def test_the_game_ends_when_the_steps_are_used_up(env: TextWorldEnv) -> None:
    episode = env.start(env.tasks("gate")[0])
    turns = play(episode, ["sing"] * 6)
    assert [turn.done for turn in turns] == [False] * 5 + [True]
    assert episode.reward().value == 0.0
    assert "No steps are left" in str(episode.reward().feedback)
    with pytest.raises(DataError, match="is over"):
        episode.reply("sing")


@needs_textworld
def test_case_spaces_and_a_full_stop_do_not_matter(env: TextWorldEnv) -> None:
    episode = env.start(env.tasks("gate")[0])
    assert episode.reply(f"  {episode.choices[0].upper()}.\n").valid


@needs_textworld
def test_equal_observations_have_one_key_and_others_another(env: TextWorldEnv) -> None:
    task = env.tasks("gate")[0]
    episode = env.start(task)
    first, again = episode.reply("sing"), episode.reply(walk_of(env, task)[0])
    after = episode.reply("sing") if episode.choices else None
    assert first.obs_key == again.obs_key
    assert str(first.obs_key).startswith(task.id)
    assert after is None or after.obs_key != first.obs_key
    assert env.start(task).reply("sing").obs_key == first.obs_key


@needs_textworld
def test_two_environments_of_one_seed_play_the_same_and_end_without_a_trace(
    env: TextWorldEnv,
) -> None:
    twin = TextWorldEnv(games=TREASURE, gate_size=4, max_steps=6)
    assert list(twin.tasks("gate")) == list(env.tasks("gate"))
    for task in env.tasks("gate"):
        a, b = env.start(task), twin.start(task)
        for episode in (a, b):
            draw = random.Random(task.id)
            while episode.choices:
                episode.reply(draw.choice(episode.choices))
        assert a.reward() == b.reward()
    child = twin._process._child
    assert child is not None
    pid, folder = child.process.pid, child.folder
    assert len(list(folder.glob("treasure_hunter-4-*.json"))) == 4
    del twin, b, episode, child
    gc.collect()
    assert not psutil.pid_exists(pid)
    assert not folder.exists()


@needs_textworld
def test_another_seed_makes_other_games(env: TextWorldEnv) -> None:
    other = beside(env, seed=1)
    assert other.tasks("gate")[0].meta["seed"] >= 1_000_000
    assert other.tasks("gate")[0].prompt != env.tasks("gate")[0].prompt


@needs_textworld
def test_a_worker_that_is_killed_or_hangs_is_a_clear_error_and_the_next_episode_works() -> None:
    env = TextWorldEnv(games=TREASURE)
    task = env.tasks("train")[0]
    walk = walk_of(env, task)
    broken, sibling = env.start(task), env.start(task)
    pid = env._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"exit code -9 .*next episode starts a new worker"):
        broken.reply(walk[0])
    assert play(env.start(task), walk)[-1].reward == 1.0
    with pytest.raises(EngineError, match="another has taken its place"):
        sibling.reply(walk[0])
    # A worker that hangs is ended too.
    process = env._process
    second = process.pid
    assert second not in (None, pid)
    os.kill(second, signal.SIGSTOP)
    process._timeout = 0.2
    with pytest.raises(EngineError, match=r"no answer to 'close' within 0.2 s"):
        process.ask("close", slots=[])
    assert process.pid is None
    assert not psutil.pid_exists(second)


@needs_textworld
def test_what_the_worker_cannot_do_is_an_answer_and_not_its_end(env: TextWorldEnv) -> None:
    process = env._process
    with pytest.raises(EngineError, match=r"could not make chess:1:1: KeyError"):
        process.ask("make", kind="chess", level=1, seed=1)
    pid = process.pid
    with pytest.raises(EngineError, match="no game is open in slot 7000"):
        process.ask("step", slot=7000, command="go north")
    with pytest.raises(EngineError, match="unknown request"):
        process.ask("dance")
    assert process.pid == pid


OWNER = """
import json, sys, time
from evals.envs.textworld import TextWorldEnv
env = TextWorldEnv(games=("treasure_hunter:1",))
episode = env.start(env.tasks("train")[0])
while episode.choices:
    episode.reply(episode.choices[-1])
process = env._process
print(json.dumps([process.pid, str(process._child.folder), sorted(sys.modules)]), flush=True)
time.sleep(60)
"""


@needs_textworld
def test_the_parent_imports_no_textworld_the_worker_no_torch_and_both_end_together() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, folder, modules = json.loads(owner.stdout.readline())
    owner.stdout.close()
    assert {"textworld", "jericho", "torch"} & set(modules) == set()
    mapped = {Path(part.path).name for part in psutil.Process(pid).memory_maps()}
    assert any("numpy" in name or "umath" in name for name in mapped)
    assert not any("torch" in name for name in mapped)
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)
    assert not Path(folder).exists()


@needs_textworld
def test_an_episode_that_is_dropped_gives_its_slot_back(env: TextWorldEnv) -> None:
    gc.collect()
    task = env.tasks("gate")[0]
    before = env._process.ask("close", slots=[])
    episodes = [env.start(task) for _ in range(3)]
    assert env._process.ask("close", slots=[]) == before + 3
    episodes.clear()
    gc.collect()
    env._process.ask("close", slots=[])
    assert env._process.ask("close", slots=[]) == before


@needs_textworld
def test_a_prompt_names_the_game_the_goal_and_what_is_there_but_not_the_way(
    env: TextWorldEnv,
) -> None:
    task = env.tasks("gate")[0]
    system, user = task.prompt
    assert "You have 6 steps" in system.content
    assert user.content.startswith(f"Game {task.meta['seed']}. Goal: find and take ")
    assert "\nRoom: " in user.content
    assert task.domain == task.meta["key"] == "treasure_hunter_4"
    walk = walk_of(env, task)
    assert ", ".join(walk) not in task.meta["lesson"]
    told = beside(env, route=True, list_commands=False)
    way = told.tasks("gate")[0].prompt[-1].content
    assert all(command.split()[1] in way for command in walk)
    assert "Commands:" not in way


@needs_textworld
def test_splits_share_no_game_and_kinds_take_turns(env: TextWorldEnv) -> None:
    env = beside(env, games=("treasure_hunter:1", "treasure_hunter:2"))
    splits = {split: env.tasks(split)[:2] for split in ("train", "evolve", "gate", "test")}
    check_disjoint(splits)
    for split, tasks in splits.items():
        assert {owner_of(task.meta["seed"]) for task in tasks} == {split}
        assert [task.domain for task in tasks] == ["treasure_hunter_1", "treasure_hunter_2"]


@needs_textworld
def test_a_state_reads_as_a_short_line_and_marks_old_exits() -> None:
    view: dict[str, Any] = {"room": "attic", "see": ["coin"], "exits": ["east", "north"]}
    view |= {"carry": [], "commands": ["go east", "go north", "take coin"]}
    plain = TextWorldEnv(list_commands=False)
    assert shown(view, plain) == "Room: attic. See: coin. Exits: east, north. Carry: nothing."
    marked = TextWorldEnv(mark_exits=True)
    assert shown(view, marked, frozenset({("attic", "east"), ("hall", "north")})) == (
        "Room: attic. See: coin. Exits: east (old), north (new). Carry: nothing.\n"
        "Commands: go east, go north, take coin"
    )


def test_a_lesson_is_a_rule_read_off_the_walk() -> None:
    coin = lesson(Game("coin_collector", 3, 1), ["go east", "go south", "take coin"])
    assert coin.startswith("The coin is 2 rooms away. Do not go back through the door")
    assert "dead end" in lesson(Game("coin_collector", 103, 1), ["go east", "take coin"])
    chest = ["unlock chest with key", "open chest", "take lamp from chest"]
    treasure = lesson(Game("treasure_hunter", 25, 1), chest)
    assert "take lamp when you see it" in treasure
    assert "unlock" in treasure
    assert "chest" not in treasure


@needs_textworld
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"games": ["coin_colector:5"]}, "did you mean 'coin_collector'"),
        ({"games": ["coin_collector"]}, "level of coin_collector must be from 1 to 300"),
        ({"games": ["treasure_hunter:31"]}, "from 1 to 30"),
        ({"games": []}, "each game once"),
        ({"games": ["cooking:1", "cooking:1"]}, "each game once"),
        ({"max_steps": 0}, "max_steps must be from 1"),
        ({"gate_size": 0}, "gate_size must be from 1"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"max_step": 3}, "did you mean 'max_steps'"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_env("textworld", options, seed=0)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(MissingExtra, match=r"distill-nightly\[textworld\]"):
        TextWorldEnv()


@needs_textworld
def test_a_dependency_that_the_worker_misses_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "jericho.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MissingExtra, match=r"a_package_that_is_not_there.*\[textworld\]"):
        GameProcess(timeout=30.0).ask("close", slots=[])


@needs_textworld
def test_a_foreign_task_is_refused(env: TextWorldEnv) -> None:
    foreign = Task(id="0" * 16, env="world", domain="sort", split="train", prompt=())
    with pytest.raises(DataError, match="belongs to 'world'"):
        env.start(foreign)
