"""One step ahead: the replies of the next step are sampled while this one trains.

They come from weights that are one step older than those which learn from them. Every row says so
(`policy_version`), and the correction weighs it by what the two say of its tokens. AsyncOPD (arXiv
2606.24143) reports that reverse KL bears this when its log-probabilities are those of the live
student, as they are here.

    step n      take the rows of n    start those of n + 1    train    wait    new weights
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from distill.types import Rollout

ROLLOUTS = "rollouts"


class Later(Protocol):
    """Where the rows of the next step are kept before anything that follows them is durable."""

    def holds(self, name: str) -> bool: ...

    def keep(self, name: str, rows: list[Rollout]) -> None: ...


class Ahead:
    """Samples one step ahead in a thread. `make` turns a step into its rows and must share nothing
    that training changes: the engine has weights of its own, which move between two steps."""

    def __init__(self, make: Callable[[int], list[Rollout]], *, num_steps: int) -> None:
        self._make = make
        self._num_steps = num_steps
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")
        self._running: tuple[int, Future[list[Rollout]]] | None = None
        self._ready: tuple[int, list[Rollout]] | None = None

    def start(self, step: int, later: Later | None = None) -> None:
        """Begin with the rows of `step`, unless there is no such step or they are kept already."""
        if step > self._num_steps or (later is not None and later.holds(ROLLOUTS)):
            return
        self._running = step, self._pool.submit(self._make, step)

    def finish(self, later: Later | None = None) -> None:
        """Wait for what was begun. Raises what went wrong there."""
        if self._running is None:
            return
        step, future = self._running
        self._running = None
        rows = future.result()
        if later is not None:
            later.keep(ROLLOUTS, rows)
        else:
            self._ready = step, rows

    def take(self, step: int) -> list[Rollout] | None:
        """The rows of a step that were kept here; None for a step that nobody began."""
        if self._ready is None or self._ready[0] != step:
            return None
        rows, self._ready = self._ready[1], None
        return rows

    def close(self) -> None:
        """Wait for what is still running, whatever became of it."""
        self._pool.shutdown(wait=True)
