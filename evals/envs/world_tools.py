"""The several-step episode of the world: look values up in a store, then answer.

The model writes `?a` to ask for key a and reads `fc=` in a tool message; `!` opens the answer.
"""

from __future__ import annotations

from distill.errors import DataError
from distill.types import Message, Reward, Task, Turn
from evals.envs.world_families import TOOL_VALUE
from evals.envs.world_rules import LETTERS, store_value

CALL = "?"
ANSWER = "!"
REFUSED = "?="
"""What the store says to a call that it cannot read."""

SPARE_CALLS = 2


class ToolEpisode:
    """One attempt at a `tools` task; over with an answer or two calls more than it has keys."""

    def __init__(self, task: Task, *, seed: int) -> None:
        self._task = task
        self._seed = seed
        self._seen: set[str] = set()
        self._calls_left = int(task.meta["difficulty"]) + SPARE_CALLS
        self._value = 0.0
        self._done = False

    def reply(self, text: str) -> Turn:
        """Answer a call with a tool message, or grade the final answer."""
        if self._done:
            raise DataError(f"the episode of task {self._task.id} is over; start a new one")
        if text.startswith(ANSWER):
            self._done = True
            self._value = float(text[len(ANSWER) :] == self._task.answer)
            return Turn(reward=self._value, done=True, obs_key=self._key())
        key = text[len(CALL) :]
        valid = text.startswith(CALL) and len(key) == 1 and key in LETTERS
        self._calls_left -= 1
        self._done = self._calls_left == 0
        before = self._key()
        content = self._look_up(key) if valid else REFUSED
        messages = () if self._done else (Message(role="tool", content=content),)
        return Turn(messages=messages, valid=valid, done=self._done, obs_key=before)

    def reward(self) -> Reward:
        """1.0 for a right answer; `parts` says which share of the needed keys was asked for."""
        needed = {call[len(CALL) :] for call, _ in self._task.meta["turns"]}
        return Reward(value=self._value, parts={"asked": len(needed & self._seen) / len(needed)})

    def _look_up(self, key: str) -> str:
        self._seen.add(key)
        return f"{store_value(self._seed, self._task.meta['store'], key, TOOL_VALUE)}="

    def _key(self) -> str:
        """What the model knows when it acts: the task and the keys that it has seen."""
        return f"{self._task.id}:{''.join(sorted(self._seen))}"
