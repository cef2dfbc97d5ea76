"""Finished trajectories as an analyst reads them: what was seen, what was replied, what came of it.

A trajectory lies in one row (its conversation only grew) or in several (its history was rewritten).
Both become the same list of steps, one per turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from distill.types import Rollout, Task

Outcome = Literal["success", "failure", "unknown"]
TaskOf = Callable[[str], Task]
"""Finds the task of a rollout by id."""
Decode = Callable[[Sequence[int]], str]
"""Text of token ids without special tokens, such as `Chat.decode`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One turn. What a row of several turns does not tell about a single one is None."""

    observation: str
    """What the policy had just been told; at the first turn the task's last user message."""
    response: str
    reward: float | None = None
    """What the turn earned, after penalties."""
    valid: bool | None = None
    """Whether the environment could read the action."""
    state: str | None = None
    """`obs_key` of the state in which the policy acted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One finished trajectory with at least one step."""

    traj_id: str
    group_id: str
    task: Task
    outcome: Outcome
    value: float | None
    """What the environment gave for the whole trajectory; None where it gave nothing."""
    steps: tuple[Step, ...]
    ending: str = ""
    """What the environment said to the last reply."""
    feedback: str = ""
    """What it said about the finished attempt, in words."""

    @property
    def text(self) -> str:
        """The conversation after the task's prompt up to the last reply, nothing in between."""
        first, *later = self.steps
        return first.response + "".join(s.observation + s.response for s in later)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The episodes of a step's rows, and how many trajectories are none."""

    episodes: tuple[Episode, ...]
    num_failed: int = 0
    """The environment failed."""
    num_empty: int = 0
    """No trained token is left, as in a group that was not kept."""
    num_incomplete: int = 0
    """A row is missing, so that turns could not be numbered."""


def read_episodes(
    rollouts: Sequence[Rollout], task_of: TaskOf, decode: Decode, *, threshold: float = 1.0
) -> Reading:
    """One episode per trajectory, in the order in which they first appear.

    A trajectory that earned `threshold` or more is a success, one without a reward unknown.
    """
    rows: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        rows.setdefault(rollout.traj_id, []).append(rollout)
    episodes: list[Episode] = []
    num_failed = num_empty = num_incomplete = 0
    for parts in rows.values():
        parts.sort(key=lambda row: row.step)
        if any(row.error is not None for row in parts):
            num_failed += 1
        elif not any(row.num_trained for row in parts):
            num_empty += 1
        else:
            episode = _episode(parts, task_of(parts[0].task_id), decode, threshold)
            num_incomplete += episode is None
            episodes += [] if episode is None else [episode]
    return Reading(
        episodes=tuple(episodes),
        num_failed=num_failed,
        num_empty=num_empty,
        num_incomplete=num_incomplete,
    )


def episodes_of(
    rollouts: Sequence[Rollout], task_of: TaskOf, decode: Decode, *, threshold: float = 1.0
) -> list[Episode]:
    """`read_episodes` without the counts."""
    return list(read_episodes(rollouts, task_of, decode, threshold=threshold).episodes)


def _episode(
    rows: Sequence[Rollout], task: Task, decode: Decode, threshold: float
) -> Episode | None:
    """None when the rows are not all the turns of the trajectory."""
    steps: list[Step] = []
    said = last_user_text(task)
    for row in rows:
        replies, answers, opening = _read_row(row, decode)
        if row.step != len(steps) or not replies:
            return None
        alone = len(replies) == 1
        if steps and not said:
            said = opening
        for place, (reply, answer) in enumerate(zip(replies, answers, strict=True)):
            steps.append(
                Step(
                    observation=said,
                    response=reply,
                    reward=_earned(row) if alone else None,
                    valid=row.action_valid if alone or row.action_valid else None,
                    state=row.obs_key if place == 0 else None,
                )
            )
            said = answer
    last = rows[-1]
    if last.num_steps > len(steps):
        return None
    return Episode(
        traj_id=last.traj_id,
        group_id=last.group_id,
        task=task,
        outcome=outcome_of(last.reward, threshold),
        value=last.reward,
        steps=tuple(steps),
        ending=said,
        feedback=(last.feedback or "").strip(),
    )


def _read_row(row: Rollout, decode: Decode) -> tuple[list[str], list[str], str]:
    """The replies of a row, what the environment said to each, and the context before them.

    Where the row does not tell what was said, it is decoded from the tokens between the replies."""
    replies: list[str] = []
    answers: list[str] = []
    opening = ""
    pairs = zip(row.token_ids, row.completion_mask, strict=True)
    for trained, run in groupby(pairs, key=lambda pair: pair[1]):
        text = decode([token for token, _ in run])
        if trained:
            replies.append(text)
            answers.append("")
        elif replies:
            answers[-1] = text
        else:
            opening = text
    told = row.observations[: len(answers)]
    return replies, [*told, *answers[len(told) :]], opening


def _earned(row: Rollout) -> float | None:
    alone = row.step == 0 and row.num_steps == 1
    return row.reward if row.step_reward is None and alone else row.step_reward


def outcome_of(value: float | None, threshold: float) -> Outcome:
    if value is None:
        return "unknown"
    return "success" if value >= threshold else "failure"


def last_user_text(task: Task) -> str:
    """The last user message of a prompt; its last message when no user speaks."""
    spoken = [m.content for m in task.prompt if m.role == "user"]
    return spoken[-1] if spoken else task.prompt[-1].content if task.prompt else ""
