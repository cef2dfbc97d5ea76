"""Trajectories as an analyst reads them, whatever rows they lie in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distill.engines.scripted import ScriptedEngine
from distill.rollout import TurnRules, collect
from distill.types import Message, Reward, Sampling, Task, Turn
from helpers import ALPHABET, make_chat, make_rollout
from skills.hindsight.episodes import Step, episodes_of, outcome_of, read_episodes

CHAT = make_chat()
TASK = Task(
    id="t0",
    env="e",
    domain="d",
    split="train",
    prompt=(Message(role="system", content="sys"), Message(role="user", content="ask")),
)


def ids(text: str) -> list[int]:
    return [ALPHABET.index(c) for c in text]


def row(*parts: str, name: str = "x", **changes):
    """A row of alternating context and replies; a reply ends with the stop token."""
    tokens, mask = [], []
    for place, part in enumerate(parts):
        new = ids(part + "$") if place % 2 else ids(part)
        tokens += new
        mask += [bool(place % 2)] * len(new)
    return make_rollout(
        (), tokens, traj_id=name, **({"reward": 1.0, "completion_mask": tuple(mask)} | changes)
    )


def read(*rows, threshold=1.0):
    return read_episodes(
        rows, lambda name: replace(TASK, id=name), CHAT.decode, threshold=threshold
    )


def test_a_row_of_several_turns_becomes_one_step_per_turn():
    (episode,) = read(row("sysask", "go", "see:a", "stop", num_steps=2)).episodes
    assert [(s.observation, s.response) for s in episode.steps] == [
        ("ask", "go"),
        ("see:a", "stop"),
    ]
    assert episode.outcome == "success"
    assert episode.task.id == "t0"
    assert episode.text == "gosee:astop"


def test_what_a_row_says_about_its_observations_is_read_before_its_tokens():
    (episode,) = read(
        row("sysask", "go", "userseeaassistant", "stop", observations=("see a", "the end"))
    ).episodes
    assert [s.observation for s in episode.steps] == ["ask", "see a"]
    assert episode.ending == "the end"


def test_rows_of_single_turns_become_the_same_steps_with_what_each_earned():
    rows = [
        row("sysask", "go", observations=("see a",), step=0, num_steps=2, step_reward=0.25,
            obs_key="s0"),
        row("sysasksee", "stop", step=1, num_steps=2, step_reward=0.75, obs_key="s1",
            action_valid=False, observations=("bye",), feedback=" well done "),
    ]  # fmt: skip
    (episode,) = read(*reversed(rows)).episodes
    assert episode.steps == (
        Step(observation="ask", response="go", reward=0.25, valid=True, state="s0"),
        Step(observation="see a", response="stop", reward=0.75, valid=False, state="s1"),
    )
    assert (episode.ending, episode.feedback) == ("bye", "well done")


def test_rewritten_rows_that_tell_no_observation_show_their_own_context():
    (episode,) = read(
        row("sysask", "go", step=0, num_steps=2), row("nowb", "stop", step=1, num_steps=2)
    ).episodes
    assert [s.observation for s in episode.steps] == ["ask", "nowb"]


def test_what_a_row_of_several_turns_cannot_tell_of_one_turn_is_unknown():
    (episode,) = read(
        row("ask", "go", "x", "stop", action_valid=False, step_reward=1.0, obs_key="s0")
    ).episodes
    assert [s.reward for s in episode.steps] == [None, None]
    assert [s.valid for s in episode.steps] == [None, None]
    assert [s.state for s in episode.steps] == ["s0", None]


def test_a_single_turn_earned_what_the_trajectory_earned():
    (episode,) = read(row("ask", "go", reward=0.5)).episodes
    assert episode.steps[0].reward == 0.5


def test_trajectories_keep_the_order_in_which_they_appear():
    rows = [row("ask", "go", name=n) for n in ("b", "a", "c")]
    assert [e.traj_id for e in read(*rows).episodes] == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([row("ask", "go", error="boom")], "num_failed"),
        ([row("ask", "go", completion_mask=(False,) * 6)], "num_empty"),
        ([row("ask", "go", step=1, num_steps=2)], "num_incomplete"),
        ([row("ask", "go", step=0, num_steps=2)], "num_incomplete"),
    ],
    ids=["failed", "empty", "without its first row", "without its last row"],
)
def test_what_is_no_whole_trajectory_is_left_out_and_counted(rows, count):
    good = row("ask", "go", name="good")
    reading = read(*rows, good)
    assert [e.traj_id for e in reading.episodes] == ["good"]
    assert {
        name: getattr(reading, name) for name in ("num_failed", "num_empty", "num_incomplete")
    } == {"num_failed": 0, "num_empty": 0, "num_incomplete": 0} | {count: 1}
    assert episodes_of([*rows, good], lambda _: TASK, CHAT.decode) == [
        replace(reading.episodes[0], task=TASK)
    ]


@pytest.mark.parametrize(
    ("value", "threshold", "outcome"),
    [
        (None, 1.0, "unknown"),
        (1.0, 1.0, "success"),
        (0.99, 1.0, "failure"),
        (0.5, 0.5, "success"),
        (-1.0, 0.0, "failure"),
    ],
)
def test_the_outcome_follows_from_the_threshold(value, threshold, outcome):
    assert outcome_of(value, threshold) == outcome


class Counting:
    """Says a digit after every reply; over after the third."""

    def __init__(self) -> None:
        self.turns = 0

    def reply(self, text: str) -> Turn:
        self.turns += 1
        said = Message(role="user", content=str(self.turns))
        return Turn(
            messages=(said,),
            reward=0.5,
            valid=text != "b",
            obs_key=f"k{self.turns}",
            done=self.turns == 3,
        )

    def reward(self) -> Reward:
        return Reward(value=1.5)


class CountingEnv:
    name = "counting"

    def tasks(self, split):
        return [TASK]

    def start(self, task):
        return Counting()


@pytest.mark.parametrize(
    ("rules", "num_rows"),
    [
        (TurnRules(), 1),
        (TurnRules(rows="turns"), 3),
        (TurnRules(history=1), 2),
        (TurnRules(invalid_penalty=0.1), 1),
    ],
    ids=["one row", "a row per turn", "rewritten history", "penalty"],
)
def test_the_rows_of_a_real_rollout_give_the_same_conversation_in_every_shape(rules, num_rows):
    script = {"": "a", "1": "b", "2": "c"}
    engine = ScriptedEngine(
        lambda prompt, g: ids(
            script["".join(c for c in CHAT.decode(prompt) if c in "12")[-1:]] + "$"
        )
    )
    rows = collect(
        [TASK], CountingEnv(), engine, CHAT, Sampling(num_samples=1), key="k", turns=rules
    )
    (episode,) = read(*rows).episodes
    assert [(s.observation, s.response) for s in episode.steps] == [
        ("ask", "a"),
        ("1", "b"),
        ("2", "c"),
    ]
    assert episode.ending == "3"
    assert episode.outcome == "success"
    assert episode.text == "a1b2c"
    assert len(rows) == num_rows
