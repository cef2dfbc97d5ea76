"""A built curriculum as an environment, and the files that it is made of."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from distill.curriculum.examples import (
    BATCH_ROWS,
    PLAN,
    Example,
    ExampleReader,
    ExampleWriter,
    Place,
    read_plan,
    write_plan,
)
from distill.errors import ConfigError, DataError
from distill.rollout import collect
from distill.types import Completion, Message, Sampling, StopReason, task_id
from distill.worked import demonstrate
from evals.envs import build_env
from evals.envs.routing import Routing
from helpers import make_chat

SCENES = ("code", "sort")
STAGES = (1, 1, 2, 2, 3, 3)


def example(number, **changes):
    scene = SCENES[number % 2]
    values = {
        "id": f"{number:016x}",
        "session_id": None if number % 2 else f"s{number}",
        "source": "logs",
        "scene": scene,
        "prompt": [{"role": "user", "content": f"q{number}="}],
        "turn": [{"role": "assistant", "content": f"{number}"}],
        "tools": [],
        "answer": str(number),
        "grader": "exact",
    }
    return Example(**values | changes)


def plan_of(examples, places, **changes):
    count = len(examples)
    columns = {
        "id": [e.id for e in examples],
        "stage": [STAGES[i % 6] for i in range(count)],
        "position": np.arange(count),
        "file": [p.file for p in places],
        "row": [p.row for p in places],
        "score": np.arange(count) / 2,
        "scene": [e.scene for e in examples],
        "band": [0] * count,
        "tier": [None, *[1] * (count - 1)],
        "use_sft": [True] * count,
        "use_opd": [True] * count,
        "num_spans": [sum(m["role"] == "assistant" for m in e.turn) for e in examples],
    }
    return columns | changes


def built(folder, examples=None, **changes):
    """A curriculum whose plan turns the order of its examples around."""
    examples = [example(i) for i in range(6)] if examples is None else examples
    with ExampleWriter(folder) as writer:
        places = writer.add(examples)
    write_plan(folder, plan_of(examples[::-1], places[::-1], **changes))
    return folder


def ids(env):
    return [int(t.meta["turn_id"], 16) for t in env.tasks("train")]


class Scripted:
    """Says the next of its replies whatever it is asked."""

    policy_version = 0

    def __init__(self, chat, *replies):
        self._chat, self._replies = chat, itertools.cycle(replies)

    def generate(self, prompts, sampling):
        out = []
        for _ in prompts:
            text = next(self._replies)
            (said,) = self._chat.replies([text])
            cut = text == "cut"
            ids, stop = (said[:-1], StopReason.LENGTH) if cut else (said, StopReason.STOP)
            out.append([Completion(token_ids=ids, logprobs=(0.0,) * len(ids), stop=stop)])
        return out


def test_examples_come_back_as_they_were_from_any_place_in_many_files(tmp_path):
    examples = [
        example(i, prompt=[{"role": "user", "content": "é\n" * i}], answer=None if i % 3 else "a")
        for i in range(3 * BATCH_ROWS + 5)
    ]
    with ExampleWriter(tmp_path, file_rows=2 * BATCH_ROWS) as writer:
        places = [p for e in examples for p in writer.add([e])]
    assert [(p.file, p.row) for p in places[-2:]] == [(1, 67), (1, 68)]
    names = sorted(path.name for path in (tmp_path / "examples").iterdir())
    assert names == ["000.arrow", "001.arrow"]
    read = ExampleReader(tmp_path)
    for i in (*range(0, len(examples), 17), 0, len(examples) - 1):
        assert read(places[i]) == examples[i]
    with pytest.raises(DataError, match=r"001.arrow has no row 69"):
        read(Place(1, 69))
    with pytest.raises(DataError, match=r"007.arrow does not exist, but the plan names it"):
        read(Place(7, 0))


def test_what_a_failed_write_leaves_behind_is_never_read(tmp_path):
    some = [example(i) for i in range(BATCH_ROWS + 1)]
    with pytest.raises(DataError), ExampleWriter(tmp_path) as writer:
        writer.add([*some, example(99, answer="\ud800")])
    assert list((tmp_path / "examples").iterdir()) == []
    with ExampleWriter(tmp_path):
        pass
    assert list((tmp_path / "examples").iterdir()) == []


def test_examples_are_written_into_new_folders_only_and_bad_text_is_named(tmp_path):
    built(tmp_path)
    with pytest.raises(DataError, match="already holds examples"):
        ExampleWriter(tmp_path)
    with (
        pytest.raises(DataError, match=r"example '0{15}1' of logs cannot be stored"),
        ExampleWriter(tmp_path / "other") as writer,
    ):
        writer.add([example(1, prompt=[{"role": "user", "content": "\ud800"}])])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": [5, 4, 3, 2, 1, 0]}, "must count 0, 1, 2"),
        ({"scene": [None] * 6}, "'scene' of the plan has 6 nulls"),
        ({"stage": [1000] * 6}, "do not fit"),
        ({"stage": [1]}, "do not fit"),
        ({"extra": [1]}, "missing or unknown: extra"),
    ],
)
def test_a_plan_that_cannot_be_right_is_not_written(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        built(tmp_path, **changes)
    assert not (tmp_path / "plan.arrow").exists()


def test_a_plan_comes_back_with_its_types(tmp_path):
    table = read_plan(built(tmp_path))
    assert table.schema.equals(PLAN)
    assert table["row"].to_pylist() == [5, 4, 3, 2, 1, 0]
    assert table["tier"].to_pylist() == [None, 1, 1, 1, 1, 1]


def test_turns_are_tasks_in_the_order_of_the_plan_with_what_is_known_of_them(tmp_path):
    env = build_env("routing", {"path": str(built(tmp_path))}, seed=3)
    assert isinstance(env, Routing)
    tasks = env.tasks("train")
    assert ids(env) == [5, 4, 3, 2, 1, 0]
    task = tasks[1]
    assert task.prompt == (Message(role="user", content="q4="),)
    assert task.id == task_id("routing", task.prompt)
    assert (task.env, task.domain, task.split, task.answer) == ("routing", "code", "train", "4")
    assert task.meta == {
        "turn_id": f"{4:016x}",
        "stage": 1,
        "score": 0.5,
        "turn": (Message(role="assistant", content="4"),),
        "grader": "exact",
    }
    assert list(tasks.stages) == [t.meta["stage"] for t in tasks] == [1, 1, 2, 2, 3, 3]
    assert tasks[-1] == tasks[5]
    assert [len(env.tasks(split)) for split in ("evolve", "gate", "test")] == [0, 0, 0]
    assert env.domains == ("code", "sort")


def test_the_orders_give_every_task_once(tmp_path):
    path = str(built(tmp_path))
    assert ids(Routing(path=path, order="reverse")) == [1, 0, 3, 2, 5, 4]
    shuffled = [ids(Routing(path=path, order="shuffled", seed=seed)) for seed in (0, 0, 1)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert all(sorted(found) == [0, 1, 2, 3, 4, 5] for found in shuffled)
    assert shuffled[0] not in ([5, 4, 3, 2, 1, 0], [1, 0, 3, 2, 5, 4])


def test_only_examples_for_the_use_and_of_the_scenes_are_tasks(tmp_path):
    path = str(
        built(tmp_path, use_sft=[True, False] * 3, use_opd=[False, False, True, True, True, True])
    )
    assert ids(Routing(path=path)) == [5, 3, 1]
    assert ids(Routing(path=path, use="contexts")) == [3, 2, 1, 0]
    assert ids(Routing(path=path, use="contexts", scenes=("code",))) == [2, 0]
    assert Routing(path=path).domains == ("sort",)
    with pytest.raises(DataError, match="none of 6 examples of the scenes code can be"):
        Routing(path=path, scenes=("code",)).tasks("train")
    with pytest.raises(ConfigError, match="no scene 'cod'; its scenes are: code, sort"):
        Routing(path=path, scenes=("cod",)).tasks("train")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
LONG = [
    {"role": "assistant", "reasoning_content": "r", "tool_calls": [{"function": {"name": "f"}}]},
    {"role": "tool", "content": "t"},
    {"role": "assistant", "content": "1"},
]


def test_contexts_are_the_states_right_before_each_answer(tmp_path):
    path = built(tmp_path, [example(0), example(1, turn=LONG, tools=[TOOL])])
    env = Routing(path=str(path), use="contexts")
    tasks = env.tasks("train")
    assert [(t.meta["turn_id"][-1], t.meta["span"]) for t in tasks] == [
        ("1", 0),
        ("1", 1),
        ("0", 0),
    ]
    assert [[m.role for m in t.prompt] for t in tasks] == [
        ["user"],
        ["user", "assistant", "tool"],
        ["user"],
    ]
    assert tasks[1].prompt[1].reasoning == "r"
    assert [json.loads(text) for text in tasks[1].prompt[0].tools] == [TOOL]
    assert all("turn" not in t.meta for t in tasks)
    # A call on the way to the answer cannot be compared with the answer.
    assert [t.answer for t in tasks] == [None, "1", "0"]
    assert [env.start(t).graded for t in tasks] == [False, True, True]
    (turn,) = Routing(path=str(path), scenes=("sort",)).tasks("train")
    assert [m.role for m in turn.meta["turn"]] == ["assistant", "tool", "assistant"]
    assert len(list(tasks)) == 3


def test_replies_are_graded_where_the_log_knew_what_is_right_and_have_no_reward_elsewhere(tmp_path):
    examples = [
        example(3, grader="world"),
        example(1),
        example(2, answer=None),
        example(4, grader=None),
    ]
    env = Routing(path=str(built(tmp_path, examples)), use="contexts")
    tasks = env.tasks("train")
    assert [t.prompt[0].content for t in tasks] == ["q4=", "q2=", "q1=", "q3="]
    chat = make_chat()
    rows = collect(
        tasks, env, Scripted(chat, "4", "2", "1", "3"), chat, Sampling(num_samples=1), key="k"
    )
    assert [r.reward for r in rows] == [None, None, 1.0, 1.0]
    assert [r.return_ for r in rows] == [None, None, 1.0, 1.0]
    assert [r.num_trained for r in rows] == [2, 2, 2, 2]
    assert [r.error for r in rows] == [None] * 4
    wrong = collect(tasks, env, Scripted(chat, "9"), chat, Sampling(num_samples=1), key="k")
    assert [r.reward for r in wrong] == [None, None, 0.0, 0.0]
    cut = collect(tasks, env, Scripted(chat, "cut"), chat, Sampling(num_samples=1), key="k")
    assert [r.reward for r in cut] == [None, None, 0.0, 0.0]
    episode = env.start(tasks[0])
    assert episode.reply("4").done
    with pytest.raises(DataError, match="no reward because it has no grader"):
        episode.reward()
    with pytest.raises(DataError, match="takes one reply and got a second"):
        episode.reply("5")


def test_a_turn_of_the_generated_world_is_learnt_like_its_worked_solution(tmp_path):
    world = build_env("world", {"domains": ["sort"]}, seed=0)
    tasks = [world.tasks("train")[i] for i in range(4)]
    examples = [
        example(
            i,
            scene="sort",
            prompt=[t.prompt[0].as_dict()],
            turn=[{"role": "assistant", "content": t.meta["solution"]}],
            answer=t.answer,
            grader="world",
        )
        for i, t in enumerate(tasks)
    ]
    env, chat = Routing(path=str(built(tmp_path, examples))), make_chat()
    recorded = demonstrate(env.tasks("train")[::-1], chat, key="k", left_out=Counter())
    worked = demonstrate(tasks, chat, key="k")
    assert [r.token_ids for r in recorded] == [r.token_ids for r in worked]
    assert [r.completion_mask for r in recorded] == [r.completion_mask for r in worked]


def test_a_grader_that_data_names_must_be_one_of_ours(tmp_path):
    env = Routing(path=str(built(tmp_path, [example(0, grader="os:system")])))
    with pytest.raises(DataError, match="names the grader 'os:system'; expected one of exact"):
        env.start(env.tasks("train")[0])


def test_missing_and_foreign_folders_are_named(tmp_path):
    with pytest.raises(DataError, match="distill curriculum build"):
        Routing(path=str(tmp_path / "no")).tasks("train")
    (tmp_path / "plan.arrow").write_text("not arrow")
    with pytest.raises(DataError, match="not a readable Arrow file"):
        Routing(path=str(tmp_path)).tasks("train")
    built(tmp_path / "a")
    # A folder put together from two curricula.
    with ExampleWriter(tmp_path / "b") as writer:
        writer.add([example(7)] * 6)
    write_plan(tmp_path / "b", plan_of([example(0)], [Place(0, 0)]))
    with pytest.raises(DataError, match=r"0{16} is planned, but 0{15}7 lies in its place"):
        Routing(path=str(tmp_path / "b")).tasks("train")[0]
    (tmp_path / "a" / "plan.arrow").write_bytes(
        (tmp_path / "a" / "examples" / "000.arrow").read_bytes()
    )
    with pytest.raises(DataError, match="is no file of a curriculum of this version"):
        Routing(path=str(tmp_path / "a")).tasks("train")


def test_a_message_that_cannot_be_read_and_a_wrong_count_name_the_example(tmp_path):
    picture = {"role": "user", "content": [{"type": "image_url"}]}
    path = built(tmp_path / "a", [example(3, prompt=[picture])])
    with pytest.raises(DataError, match=r"example 0{15}3: .*'image_url'"):
        Routing(path=str(path)).tasks("train")[0]
    path = built(tmp_path / "b", [example(3)], num_spans=[2])
    with pytest.raises(DataError, match=r"example 0{15}3: expected a prompt and 2 answers"):
        Routing(path=str(path)).tasks("train")[0]


def test_the_digest_follows_the_content_of_the_files(tmp_path):
    same = [Routing(path=str(built(tmp_path / name))).digest for name in "ab"]
    other = Routing(path=str(built(tmp_path / "c", [example(i) for i in range(1, 7)]))).digest
    assert same[0] == same[1] != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option 'path'"),
        ({"path": "x", "use": "rows"}, "option 'use' has the wrong type"),
        ({"path": "x", "scene": ["a"]}, "did you mean 'scenes'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(options, message):
    with pytest.raises(ConfigError, match=message):
        build_env("routing", options, seed=0)
