"""Every step shows every domain: for teachers that each answer for their own domain.

Where the tasks of one domain follow the other, one teacher alone would teach for a long stretch and
the student would forget what the others taught. Here each step takes the same number of tasks of
every domain, or one more of some: which ones changes from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from distill.curriculum.samplers.base import EPOCH_LIMIT, Draw, Pool, Seen, State, generator
from distill.errors import ConfigError

_groups: WeakKeyDictionary[Pool, dict[str, np.ndarray]] = WeakKeyDictionary()
"""What a pool's tasks are sorted into; read once, because a task may lie on disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balanced:
    """name = "balanced": shuffled epochs over the tasks of each domain, equally many per step.

    A domain with fewer tasks than the others begins its next epoch sooner. ConfigError when a step
    has fewer tasks than there are domains, or the list is too long to be read.
    """

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
        groups = groups_of(pool)
        if pool.batch < len(groups):
            raise ConfigError(
                f'sampler.name = "balanced" shows all {len(groups)} domains in every step, but a '
                f"step has {pool.batch} tasks; set trainer.batch to {len(groups)} or more"
            )
        # Extra draws of a step are numbered behind every step that a night can have.
        number = step - 1 if not extra else step - 1 + extra * 2**32
        share, more = divmod(pool.batch, len(groups))
        positions: list[int] = []
        for place, (name, members) in enumerate(groups.items()):
            # Of `more` further tasks per step each domain gets its turn.
            before = number * share + _turns(number * more, place, len(groups))
            after = (number + 1) * share + _turns((number + 1) * more, place, len(groups))
            positions += _members(pool, name, members, range(before, after))
        order = generator(f"{pool.key}/balanced/{step}/{extra}").permutation(len(positions))
        return Draw(
            positions=tuple(positions[i] for i in order), metrics={"domains": float(len(groups))}
        )

    def observe(self, pool: Pool, state: State, seen: Seen) -> tuple[State, Mapping[str, float]]:
        return state, {}


def groups_of(pool: Pool) -> dict[str, np.ndarray]:
    """Domain -> positions of its tasks, in alphabetical order."""
    found = _groups.get(pool)
    if found is None:
        if pool.size > EPOCH_LIMIT:
            raise ConfigError(
                f'sampler.name = "balanced" reads the domain of every task, at most {EPOCH_LIMIT}, '
                f'but there are {pool.size}; use sampler.name = "uniform", which mixes them too'
            )
        domains = [t.domain for t in pool.tasks]
        names, numbers = np.unique(np.asarray(domains), return_inverse=True)
        found = {str(name): np.flatnonzero(numbers == i) for i, name in enumerate(names)}
        _groups[pool] = found
    return found


def _turns(count: int, place: int, size: int) -> int:
    """How many of the first `count` turns, handed out round and round, fall to a place."""
    whole, rest = divmod(count, size)
    return whole + (place < rest)


def _members(pool: Pool, domain: str, members: np.ndarray, numbers: range) -> list[int]:
    """Positions of the tasks that are drawn as a domain's first, second, ...: shuffled epochs."""
    orders: dict[int, np.ndarray] = {}
    found = []
    for number in numbers:
        epoch, offset = divmod(number, len(members))
        if epoch not in orders:
            name = f"{pool.key}/{domain}/epoch{epoch}"
            orders[epoch] = generator(name).permutation(len(members))
        found.append(int(members[orders[epoch][offset]]))
    return found
