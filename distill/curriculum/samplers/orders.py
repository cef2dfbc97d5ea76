"""Samplers that follow an order: shuffled epochs, a curriculum, epochs that refill.

uniform   every task once per shuffled epoch
staged    the list as it is, pass after pass: what builds a curriculum has sorted it
          (arXiv 2609.08183)
refill    shuffled epochs that go on within a step while groups teach nothing: the dynamic sampling
          of DAPO (arXiv 2503.14476)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from distill.curriculum.samplers.base import EPOCH_LIMIT, Draw, Pool, Seen, State, generator
from distill.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform:
    """name = "uniform": shuffled epochs over a finite list, or draws from a huge one."""

    @property
    def reads_rewards(self) -> bool:
        return False

    @property
    def reads_change(self) -> bool:
        return False

    @property
    def rounds(self) -> int:
        return 0

    def draw(self, pool: Pool, state: State, step: int, extra: int = 0) -> Draw:
        if extra:
            key = f"{pool.key}/{step}/extra{extra}"
            picks = generator(key).integers(0, pool.size, pool.batch)
        elif pool.size > EPOCH_LIMIT:
            picks = generator(f"{pool.key}/{step}").integers(0, pool.size, pool.batch)
        else:
            return Draw(positions=_from_epochs(pool, (step - 1) * pool.batch))
        return Draw(positions=tuple(picks.tolist()))

    def observe(self, pool: Pool, state: State, seen: Seen) -> tuple[State, Mapping[str, float]]:
        return state, {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """name = "staged": the tasks in the order given, each exactly once per pass.

    Later passes keep the stages (`meta["stage"]`) in order and shuffle inside them. The last, short
    batch of a pass is filled up from the next one; that of the last pass stays short.
    """

    passes: float = 0.0
    """Passes over the list, which then decide how many steps the stage has; 0 takes
    `trainer.steps`."""

    def __post_init__(self) -> None:
        if self.passes < 0:
            raise ConfigError(f"sampler.passes must not be negative, got {self.passes}")

    @property
    def reads_rewards(self) -> bool:
        return False

    @property
    def reads_change(self) -> bool:
        return False

    @property
    def rounds(self) -> int:
        return 0

    def draw(self, pool: Pool, state: State, step: int, extra: int = 0) -> Draw:
        if extra:
            raise ConfigError(
                'sampler.name = "staged" gives every task exactly once, so it cannot draw others '
                "in place of groups that teach nothing; set objective.refill_rounds = 0, or use "
                'sampler.name = "refill"'
            )
        first = (step - 1) * pool.batch
        last = first + pool.batch
        if self.passes:
            last = min(last, num_draws(pool.size, self.passes))
        positions = tuple(pool.staged(*divmod(i, pool.size)) for i in range(first, last))
        if not positions:
            return Draw(positions=())
        metrics = {"pass": float(1 + (last - 1) // pool.size)}
        stage = pool.stage(positions[-1])
        if isinstance(stage, int | float):
            metrics["stage"] = float(stage)
        return Draw(positions=positions, metrics=metrics)

    def observe(self, pool: Pool, state: State, seen: Seen) -> tuple[State, Mapping[str, float]]:
        return state, {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Refill:
    """name = "refill": groups without any spread of rewards are dropped, and the next tasks of the
    epoch are tried until the batch is full or `rounds` more batches were drawn.

    Only tasks that were tried count as seen. State: `cursor`, how many were.
    """

    rounds: int = 3
    """Most further batches per step."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"sampler.rounds must be at least 1, got {self.rounds}")

    @property
    def reads_rewards(self) -> bool:
        return True

    @property
    def reads_change(self) -> bool:
        return False

    def draw(self, pool: Pool, state: State, step: int, extra: int = 0) -> Draw:
        first = int(state.get("cursor", 0)) + extra * pool.batch
        if pool.size <= EPOCH_LIMIT:
            return Draw(positions=_from_epochs(pool, first))
        picks = generator(f"{pool.key}/at{first}").integers(0, pool.size, pool.batch)
        return Draw(positions=tuple(picks.tolist()))

    def observe(self, pool: Pool, state: State, seen: Seen) -> tuple[State, Mapping[str, float]]:
        """A further batch was tried if a task that only it has earned rewards."""
        used, before = 0, set(self.draw(pool, state, seen.step).positions)
        for extra in range(1, self.rounds + 1):
            own = set(self.draw(pool, state, seen.step, extra).positions)
            if not (own - before) & seen.rewards.keys():
                break
            used, before = extra, before | own
        cursor = int(state.get("cursor", 0)) + (1 + used) * pool.batch
        told = {"rounds": float(used), "passes": cursor / pool.size}
        return {"cursor": cursor}, told


def num_draws(num_tasks: int, passes: float) -> int:
    """Tasks in so many passes; a part of a task counts as one."""
    return math.ceil(round(num_tasks * passes, 6))


def steps_for(num_tasks: int, batch: int, passes: float) -> int:
    """Steps that `passes` passes over a list take; the last one may be short.

    ConfigError unless all three are positive.
    """
    if num_tasks < 1 or batch < 1 or passes <= 0:
        raise ConfigError(
            "passes over a list need at least one task, a batch of at least one and a positive "
            f"number of passes, got {num_tasks}, {batch} and {passes}"
        )
    return math.ceil(num_draws(num_tasks, passes) / batch)


def _from_epochs(pool: Pool, first: int) -> tuple[int, ...]:
    return tuple(pool.shuffled(*divmod(first + i, pool.size)) for i in range(pool.batch))
