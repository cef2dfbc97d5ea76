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

from distill.errors import ConfigError, DataError, DistillError, EngineError, MissingExtra
from distill.types import Task, Turn
from evals.envs import build_env
from evals.envs.base import check_disjoint
from evals.envs.textworld import Game, TextWorldEnv, lesson, owner_of
from evals.envs.textworld_episode import GameEpisode, shown
from evals.envs.textworld_process import GameLost, GameProcess
from tree import ROOT

needs_textworld = pytest.mark.skipif(
    importlib.util.find_spec("textworld") is None,
    reason="textworld is not installed; try: make install",
)

TREASURE = ("treasure_hunter:4",)


@pytest.fixture(scope="module")
def env() -> Iterator[TextWorldEnv]:
    """Its worker takes seconds to start and serves the other environments of these tests too."""
    env = TextWorldEnv(games=TREASURE, gate_size=3, max_steps=6)
    yield env
    env.close()


@pytest.fixture
def light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that start at once, as they find a textworld without games: for what is the same
    whatever is played."""
    package = tmp_path / "textworld"
    package.mkdir()
    (package / "__init__.py").write_text("def EnvInfos(**wanted): ...\n")
    (package / "challenges.py").write_text("CHALLENGES = {}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def walk_of(env: TextWorldEnv, task: Task) -> list[str]:
    """The game's own winning walk, asked of the worker."""
    game = Game(task.meta["kind"], task.meta["level"], task.meta["seed"])
    walk: list[str] = env._process.make(game._asdict())["walk"]
    return walk


def play(episode: GameEpisode, commands: list[str]) -> list[Turn]:
    return [episode.reply(command) for command in commands]


@needs_textworld
@pytest.mark.parametrize(
    ("game", "number"), [("treasure_hunter:4", 2), ("coin_collector:3", 1), ("cooking:1", 1)]
)
def test_the_games_own_winning_walks_win(env: TextWorldEnv, game: str, number: int) -> None:
    env = replace(env, games=(game,), max_steps=10)
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
    for task in list(env.tasks("gate")) * 7:
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
    env = replace(env, step_rewards=True, max_steps=4)
    for task in env.tasks("train")[:2]:
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
def test_environments_of_a_program_make_each_game_once_in_one_worker(
    env: TextWorldEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = list(env.tasks("gate"))
    asked: list[str] = []
    ask = GameProcess.ask

    def noted(process: GameProcess, op: str, **fields: Any) -> Any:
        asked.append(op)
        return ask(process, op, **fields)

    monkeypatch.setattr(GameProcess, "ask", noted)
    twin = TextWorldEnv(games=TREASURE, gate_size=3, max_steps=6)
    assert list(twin.tasks("gate")) == tasks
    for task in tasks:
        a, b = env.start(task), twin.start(task)
        for episode in (a, b):
            draw = random.Random(task.id)
            while episode.choices:
                episode.reply(draw.choice(episode.choices))
        assert a.reward() == b.reward()
    assert set(asked) == {"reset", "step"}
    assert twin._process is env._process
    assert "textworld" not in sys.modules


@needs_textworld
@pytest.mark.usefixtures("light")
def test_a_worker_ends_when_the_last_environment_is_closed_and_not_before() -> None:
    a, b, dropped = (TextWorldEnv(timeout=59.0) for _ in range(3))
    other = TextWorldEnv(timeout=58.0)
    assert a._process is b._process is dropped._process is not other._process
    del dropped
    gc.collect()
    b._process.ask("close", slots=[])
    child = b._process._child
    assert child is not None
    a.close()
    a.close()
    assert b._process.ask("close", slots=[]) == 0
    assert child.process.poll() is None
    b.close()
    assert not psutil.pid_exists(child.process.pid)
    assert not child.folder.exists()
    assert other._process.ask("close", slots=[]) == 0
    other.close()


@needs_textworld
def test_another_seed_makes_other_games(env: TextWorldEnv) -> None:
    other = replace(env, seed=1)
    assert other.tasks("gate")[0].meta["seed"] >= 1_000_000
    assert other.tasks("gate")[0].prompt != env.tasks("gate")[0].prompt


@needs_textworld
def test_what_the_worker_cannot_do_is_an_answer_and_not_its_end(env: TextWorldEnv) -> None:
    process = env._process
    with pytest.raises(EngineError, match=r"could not make chess:1:1: KeyError"):
        process.make({"kind": "chess", "level": 1, "seed": 1})
    pid = process.pid
    with pytest.raises(GameLost, match="no game is open in slot 7000"):
        process.ask("step", generation=process.generation, slot=7000, command="go north")
    with pytest.raises(GameLost, match="unknown request"):
        process.ask("dance")
    assert process.pid == pid


OWNER = """
import json, sys
from evals.envs.textworld import TextWorldEnv
process = TextWorldEnv()._process
process.ask("close", slots=[])
print(json.dumps([process.pid, str(process._child.folder), sorted(sys.modules)]), flush=True)
sys.stdin.read()
"""


def owner_of_worker() -> tuple[subprocess.Popen[str], int, Path, set[str]]:
    """A program with a worker: it, the worker's id and folder, and what it has imported itself."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    pid, folder, modules = json.loads(owner.stdout.readline())
    owner.stdout.close()
    return owner, pid, Path(folder), set(modules)


def end_together(owner: subprocess.Popen[str], pid: int, folder: Path) -> int:
    """Wait for both; the exit code of the program."""
    assert owner.stdin is not None
    owner.stdin.close()
    code = owner.wait()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)
    assert not folder.exists()
    return code


@needs_textworld
def test_the_parent_imports_no_textworld_the_worker_no_torch_and_both_die_together() -> None:
    owner, pid, folder, modules = owner_of_worker()
    assert {"textworld", "jericho", "torch"} & modules == set()
    mapped = {Path(part.path).name for part in psutil.Process(pid).memory_maps()}
    assert any("numpy" in name or "umath" in name for name in mapped)
    assert not any("torch" in name for name in mapped)
    owner.kill()
    assert end_together(owner, pid, folder) == -signal.SIGKILL


@needs_textworld
@pytest.mark.usefixtures("light")
def test_a_program_that_closes_nothing_leaves_no_worker_behind() -> None:
    assert end_together(*owner_of_worker()[:3]) == 0


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
    told = replace(env, route=True, list_commands=False)
    way = told.tasks("gate")[0].prompt[-1].content
    assert all(command.split()[1] in way for command in walk)
    assert "Commands:" not in way


@needs_textworld
def test_splits_share_no_game_and_kinds_take_turns(env: TextWorldEnv) -> None:
    env = replace(env, games=(*TREASURE, "treasure_hunter:1"))
    splits = {split: env.tasks(split)[:1] for split in ("train", "evolve", "gate", "test")}
    check_disjoint(splits)
    for split, tasks in splits.items():
        assert {owner_of(task.meta["seed"]) for task in tasks} == {split}
    pair = env.tasks("train")[:2]
    assert [task.domain for task in pair] == ["treasure_hunter_4", "treasure_hunter_1"]
    assert pair[0].meta["seed"] == pair[1].meta["seed"]


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


@needs_textworld
def test_a_worker_that_dies_ends_its_games_and_the_next_episode_works(
    env: TextWorldEnv,
) -> None:
    """The last test of this worker, as the games would have to be made again for others."""
    task = env.tasks("train")[0]
    walk = walk_of(env, task)
    process = env._process
    broken, sibling = env.start(task), env.start(task)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(GameLost, match=r"exit code -9 .*next episode starts a new worker") as lost:
        broken.reply(walk[0])
    assert not isinstance(lost.value, DistillError), "it would end the night"
    assert process.pid is None
    with pytest.raises(GameLost, match="the next episode starts a new worker"):
        sibling.reply(walk[0])
    assert process.pid is None, "a game that is over starts nothing"
    assert play(env.start(task), walk)[-1].reward == 1.0
    with pytest.raises(GameLost, match="has ended, and the game with it"):
        sibling.reply(walk[0])


@needs_textworld
@pytest.mark.usefixtures("light")
def test_a_worker_that_died_while_nobody_asked_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = GameProcess(timeout=30.0)
    assert process.ask("close", slots=[]) == 0
    first = process._child
    assert first is not None
    first.process.kill()
    first.process.wait()
    assert process.ask("close", slots=[]) == 0
    assert "exit code -9 while nobody asked" in caplog.text
    assert not first.folder.exists()
    assert process.pid not in (None, first.process.pid)
    process.close()
    assert process.pid is None


@needs_textworld
@pytest.mark.usefixtures("light")
def test_a_worker_that_hangs_costs_a_game_but_one_that_makes_none_is_an_error() -> None:
    process = GameProcess(timeout=30.0)
    game = {"kind": "treasure_hunter", "level": 4, "seed": 1}
    for failure, ask in (
        (GameLost, lambda: process.open(game, process)),
        (EngineError, lambda: process.make(game)),
    ):
        process._timeout = 30.0
        process.ask("close", slots=[])
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        process._timeout = 0.2
        with pytest.raises(failure, match=r"no answer to '(reset|make)' within 0.2 s"):
            ask()
        assert process.pid is None
        assert not psutil.pid_exists(pid)
    process._timeout = 0.001
    with pytest.raises(EngineError, match="no answer to 'start'"):
        process.open(game, process)
