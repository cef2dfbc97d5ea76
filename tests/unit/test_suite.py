from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from distill.engines.scripted import ScriptedEngine
from distill.errors import ConfigError, DataError, EvalError
from distill.types import Message, Reward, Rollout, StopReason, Task, task_id
from evals.envs.base import LazyTasks, SingleTurn
from evals.suite import (
    EvalSettings,
    correctness,
    evaluate,
    measure,
    run_suite,
    select,
    suite_digest,
    summarise,
)

END = 0


class Letters:
    """A tokenizer of bytes, as far as the suite uses a chat."""

    stop_token_ids = (END,)
    max_length = 100

    def prompts(self, conversations: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
        return [tuple(talk[-1].content.encode()) for talk in conversations]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token != END).decode()


class Echo:
    """Tasks that ask for their own prompt."""

    name = "echo"
    domains = ("even", "odd")

    def __init__(self, repeats: int = 1) -> None:
        self.made: list[int] = []
        self._repeats = repeats

    def tasks(self, split: Any) -> Sequence[Task]:
        return LazyTasks(10_000 if split == "train" else 0, self._make)

    def start(self, task: Task) -> SingleTurn:
        return SingleTurn(task, self._grade)

    def _make(self, i: int) -> Task:
        self.made.append(i)
        prompt = (Message(role="user", content=f"q{i // self._repeats}"),)
        return Task(
            id=task_id("echo", prompt),
            env="echo",
            domain=self.domains[i % 2],
            split="train",
            prompt=prompt,
            answer=prompt[0].content,
        )

    def _grade(self, reply: str, task: Task) -> Reward:
        if reply == "crash":
            raise RuntimeError("boom")
        return Reward(value=float(reply == task.answer))


def script(prompt: Sequence[int], sample: int) -> Sequence[int]:
    """Even questions are always right; of odd ones the first two samples are right, and every
    tenth never ends."""
    number = int(bytes(prompt).decode()[1:])
    if number % 10 == 9:
        return [65] * 100
    return [*(prompt if number % 2 == 0 or sample < 2 else b"no"), END]


def rollout(**changes: Any) -> Rollout:
    values: dict[str, Any] = {
        "task_id": "t", "group_id": "g", "index": 0, "domain": "d", "policy_version": 0,
        "seed": "s", "token_ids": (1, 2), "completion_mask": (False, True),
        "logprobs": (0.0, -1.0), "stop": StopReason.STOP, "traj_id": "x", "reward": 1.0,
    }  # fmt: skip
    return Rollout(**(values | changes))


SETTINGS = EvalSettings(samples=4, k=(1, 4), max_new_tokens=8, max_batch=16)


def test_a_suite_counts_greedy_sampled_and_truncated_replies() -> None:
    env = Echo()
    tasks = select(env, "train", 10)
    chat: Any = Letters()
    report = evaluate(
        ScriptedEngine(script), env, tasks, chat, settings=SETTINGS, suite="train", model="m"
    )
    assert (report.num_tasks, report.samples_per_task) == (20, 4)
    assert report.metrics["even/greedy"].mean == 1.0
    assert report.metrics["odd/greedy"].mean == 0.8
    assert report.metrics["odd/truncated"].mean == 0.2
    assert report.metrics["odd/sampled"].mean == pytest.approx(0.4)
    assert report.metrics["odd/pass@1"].mean == pytest.approx(0.4)
    assert report.metrics["odd/pass@4"].mean == pytest.approx(0.8)
    assert report.metrics["greedy"].mean == 0.9
    assert report.metrics["greedy"].n == 20
    assert sum(outcome.truncated for outcome in report.outcomes.values()) == 2


def test_the_size_of_a_batch_does_not_change_the_outcomes() -> None:
    env = Echo()
    tasks = select(env, "train", 10)
    chat: Any = Letters()
    reports = [
        run_suite(
            ScriptedEngine(script),
            env,
            tasks,
            chat,
            settings=EvalSettings(samples=4, max_new_tokens=8, max_batch=size),
            suite="s",
            model="m",
        )
        for size in (1, 7, 1000)
    ]
    assert reports[0].report.outcomes == reports[1].report.outcomes == reports[2].report.outcomes
    assert [r.seed for r in reports[0].sampled] == [r.seed for r in reports[2].sampled]


def test_selecting_reads_no_more_of_a_lazy_split_than_needed() -> None:
    env = Echo()
    assert len(select(env, "train", 3)) == 6
    assert env.made == [0, 1, 2, 3, 4, 5]


def test_selecting_takes_every_prompt_once() -> None:
    chosen = select(Echo(repeats=2), "train", 3)
    assert len({task.id for task in chosen}) == len(chosen)


def test_an_empty_split_cannot_be_selected() -> None:
    with pytest.raises(DataError, match="no task to evaluate in split 'gate'"):
        select(Echo(), "gate", 3)


def test_repeated_and_missing_tasks_are_refused() -> None:
    env = Echo()
    task = env.tasks("train")[0]
    chat: Any = Letters()
    for tasks, message in (([task, task], "occur more than once"), ([], "has no task")):
        with pytest.raises(EvalError, match=message):
            evaluate(
                ScriptedEngine(script), env, tasks, chat, settings=SETTINGS, suite="s", model="m"
            )


def test_failed_episodes_count_as_wrong_until_there_are_too_many() -> None:
    env = Echo()
    tasks = select(env, "train", 10)
    chat: Any = Letters()

    def crash_below(limit: int) -> ScriptedEngine:
        def play(prompt: Sequence[int], sample: int) -> Sequence[int]:
            number = int(bytes(prompt).decode()[1:])
            return [*(b"crash" if number < limit else prompt), END]

        return ScriptedEngine(play)

    report = evaluate(crash_below(4), env, tasks, chat, settings=SETTINGS, suite="s", model="m")
    assert report.metrics["greedy"].mean == 0.8
    with pytest.raises(EvalError, match=r"25 of 100 episodes failed.*RuntimeError: boom"):
        evaluate(crash_below(5), env, tasks, chat, settings=SETTINGS, suite="s", model="m")


def test_the_digest_covers_questions_and_answers_but_not_their_order() -> None:
    tasks = select(Echo(), "train", 3)
    assert suite_digest(tasks) == suite_digest(tasks[::-1])
    assert suite_digest(tasks) != suite_digest(tasks[:-1])


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({}, 1.0),
        ({"reward": 0.25}, 0.25),
        ({"reward": -1.0}, 0.0),
        ({"reward": 1.2}, 1.0),
        ({"reward": 0.1, "reward_parts": {"correct": 1.0}}, 1.0),
        ({"reward": None, "error": "boom"}, 0.0),
    ],
)
def test_correctness_is_the_part_of_that_name_or_the_reward_within_zero_and_one(
    changes: dict[str, Any], value: float
) -> None:
    assert correctness(rollout(**changes)) == value


def test_partial_credit_counts_in_greedy_accuracy_and_not_in_pass_at_k() -> None:
    prompt = (Message(role="user", content="?"),)
    task = Task(id="t", env="e", domain="d", split="gate", prompt=prompt)
    half = rollout(reward=0.5)
    outcomes = summarise([task], [half], [replace(half, traj_id="y"), rollout()])
    metrics = measure(outcomes, EvalSettings(samples=2, k=(2,)))
    assert metrics["greedy"].mean == 0.5
    assert metrics["sampled"].mean == 0.5
    assert outcomes["t"].num_correct == 1


def test_without_samples_there_is_only_the_greedy_accuracy() -> None:
    env = Echo()
    chat: Any = Letters()
    report = evaluate(
        ScriptedEngine(script),
        env,
        select(env, "train", 2),
        chat,
        settings=EvalSettings(samples=0, max_new_tokens=8),
        suite="s",
        model="m",
    )
    assert "sampled" not in report.metrics
    assert "greedy" in report.metrics


def test_a_k_above_the_samples_is_refused_early() -> None:
    with pytest.raises(ConfigError, match=r"pass@8 is undefined with evals\.samples = 4"):
        EvalSettings(samples=4, k=(1, 8))
