"""Episodes and a scripted text model for the tests of hindsight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distill.types import Message, Note, Sampling, Task
from skills.hindsight.episodes import Episode, Step

SKILL = "Read the label first, then turn the valve slowly."


def make_task(name: str = "t0", *, prompt: str = "Open the valve.", **fields: Any) -> Task:
    values: dict[str, Any] = {
        "id": name,
        "env": "plant",
        "domain": "valves",
        "split": "train",
        "prompt": (Message(role="user", content=prompt),),
    }
    return Task(**(values | fields))


def make_episode(
    name: str = "a", outcome: str = "success", *, task: Task | None = None, **fields: Any
) -> Episode:
    """Three steps; the same group for all names."""
    steps = (
        Step(observation="Open the valve.", response="look", state="s0"),
        Step(observation="You see a blue label.", response="read label", state="s1"),
        Step(observation="The label says turn it left twice.", response="turn", state="s2"),
    )
    values: dict[str, Any] = {
        "traj_id": name,
        "group_id": "g",
        "task": task or make_task(),
        "outcome": outcome,
        "value": {"success": 1.0, "failure": 0.0}.get(outcome),
        "steps": steps,
        "ending": "The valve opens with a loud hiss.",
    }
    return Episode(**(values | fields))


def make_note(name: str = "a", outcome: Any = "success", **fields: Any) -> Note:
    values: dict[str, Any] = {"status": "ok", "episode_skill": SKILL, "author": "model"}
    return Note(traj_id=name, outcome=outcome, **(values | fields))


class ScriptedModel:
    """A `TextModel` that answers by a function of the prompt text and the number of the call."""

    def __init__(self, answer: Callable[[str, int], str]) -> None:
        self._answer = answer
        self.calls: list[list[tuple[Message, ...]]] = []
        self.samplings: list[Sampling] = []

    def complete(
        self, prompts: Sequence[Sequence[Message]], n: int, sampling: Sampling
    ) -> list[list[str]]:
        self.calls.append([tuple(p) for p in prompts])
        self.samplings.append(sampling)
        return [[self._answer(p[-1].content, len(self.calls))] * n for p in prompts]
