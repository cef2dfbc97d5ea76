"""A sampler at work on the tasks of a stage: it holds the state between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill.curriculum.samplers.base import Draw, Pool, Sampler, Seen, State
from distill.curriculum.samplers.orders import Staged, Uniform
from distill.errors import CheckpointError
from distill.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Every task that a step may meet, by position, refills included; stored with its rollouts."""

    positions: tuple[int, ...]


class TaskSampler:
    """Chooses `batch` tasks per step. Steps count from 1.

    Samplers that read rewards are told of every step by `observe`, in order; the others are pure
    in the step. DataError without any task.
    """

    def __init__(
        self, tasks: Sequence[Task], *, batch: int, key: str, sampler: Sampler | None = None
    ) -> None:
        self.sampler: Sampler = sampler or Uniform()
        self._pool = Pool(tasks, batch=batch, key=key)
        self._state: State = {}
        self._step = 0
        self._draws: dict[int, Draw] = {}

    def __call__(self, step: int) -> list[Task]:
        return self._tasks(self._draw(step))

    def extra(self, step: int, number: int) -> list[Task]:
        """Another `batch` tasks for a step: refill 1, 2, ..."""
        return self._tasks(self._draw(step, number))

    def drawn(self, step: int, rounds: int) -> Drawn:
        """What a step draws, and what `rounds` refills of it would."""
        draws = [self._draw(step, extra) for extra in range(rounds + 1)]
        return Drawn(positions=tuple(p for draw in draws for p in draw.positions))

    def at(self, drawn: Drawn) -> list[Task]:
        """The tasks of a stored draw."""
        return [self._pool.tasks[p] for p in drawn.positions]

    def stage_of(self, step: int) -> Any:
        """Curriculum stage of the last task that a step draws; None where tasks have none, and for
        samplers that do not walk through stages."""
        if not isinstance(self.sampler, Staged):
            return None
        positions = self.sampler.draw(self._pool, self._state, step).positions
        return self._pool.stage(positions[-1]) if positions else None

    def enters_stage(self, step: int) -> bool:
        """Whether a step is the first one to draw tasks of a further stage of the curriculum."""
        return step > 1 and self.stage_of(step) not in (None, self.stage_of(step - 1))

    # -- what it learns ------------------------------------------------------------------------

    def observe(
        self, step: int, rewards: Mapping[str, Sequence[float]], change: float = 0.0
    ) -> dict[str, float]:
        """Learn from a step: task id -> rewards of its attempts, and the mean KL of the update.

        Returns numbers of the step, `sampler/...`; none for `uniform`.
        """
        draw = self._draw(step)
        positions: dict[str, int] = {}
        for extra in self._draws.values():
            for position in extra.positions:
                positions.setdefault(self._pool.tasks[position].id, position)
        found = {positions[name]: values for name, values in rewards.items() if name in positions}
        seen = Seen(step=step, rewards=found, change=change)
        self._state, told = self.sampler.observe(self._pool, self._state, seen)
        self._draws.clear()
        useful = {"useful_share": seen.useful_share} if self.sampler.reads_rewards else {}
        numbers = {**draw.metrics, **useful, **told}
        return {f"sampler/{name}": value for name, value in numbers.items()}

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain JSON, empty for samplers without a memory."""
        return {"num_tasks": self._pool.size, **self._state} if self._state else {}

    def restore(self, state: State) -> None:
        """Inverse of `state`. CheckpointError when the list of tasks has changed its length."""
        size = state.get("num_tasks", self._pool.size)
        if size != self._pool.size:
            raise CheckpointError(
                f"the sampler remembers {size} tasks, but there are {self._pool.size} now: its "
                "positions would mean other tasks; restore the data, or start a new run"
            )
        self._state = {key: value for key, value in state.items() if key != "num_tasks"}
        self._draws.clear()

    # -- inside --------------------------------------------------------------------------------

    def _draw(self, step: int, extra: int = 0) -> Draw:
        if step != self._step:
            self._step = step
            self._draws.clear()
        if extra not in self._draws:
            self._draws[extra] = self.sampler.draw(self._pool, self._state, step, extra)
        return self._draws[extra]

    def _tasks(self, draw: Draw) -> list[Task]:
        return [self._pool.tasks[p] for p in draw.positions]
