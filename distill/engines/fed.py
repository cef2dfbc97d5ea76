"""An engine with weights of its own, fed with the student's.

`load` is told of weights in memory, as every engine of a stage is. They are published into a folder
that the engine behind can read, and it has them before `load` returns.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distill.engines.publishing import publish
from distill.policy import STUDENT, Policy
from distill.protocols import RolloutEngine
from distill.types import CheckpointRef, Completion, Sampling


class FedEngine:
    """Publishes a role of a policy to `engine`, which `start` makes from the first publication.

    The folder of the newest version stays, those before it are removed once the engine has moved
    on. `close` leaves the engine behind running: whoever started it ends it. With `sleeps` the
    engine behind has `sleep` and `wake`, and gives its memory to the trainer while it `rest`s.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        folder: Path,
        *,
        start: Callable[[CheckpointRef], RolloutEngine],
        role: str = STUDENT,
        sleeps: bool = False,
    ) -> None:
        self.policy_version = 0
        self._sleeps = sleeps
        self._policy = policy
        self._tokenizer = tokenizer
        self._folder = folder
        self._start = start
        self._role = role
        self._engine: RolloutEngine | None = None

    @property
    def engine(self) -> RolloutEngine:
        """The engine behind. Only after the first `load`."""
        assert self._engine is not None, "an engine is fed before it samples"
        return self._engine

    def load(self, checkpoint: CheckpointRef) -> None:
        version = checkpoint.policy_version
        path = self._folder / f"{version:06d}"
        ref = publish(
            self._policy,
            self._tokenizer,
            path,
            step=checkpoint.step,
            policy_version=version,
            role=self._role,
        )
        if self._engine is None:
            self._engine = self._start(ref)
        self._wake()
        self._engine.load(ref)
        self.policy_version = self._engine.policy_version
        for old in self._folder.iterdir():
            if old != path:
                shutil.rmtree(old)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        self._wake()
        return self.engine.generate(prompts, sampling)

    def rest(self) -> None:
        """The replies of a step are there: the trainer may have the memory."""
        engine: Any = self._engine
        if self._sleeps and engine is not None:
            engine.sleep()

    def close(self) -> None:
        """Remove what was published; the engine keeps the weights that it has."""
        try:
            self.rest()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wake(self) -> None:
        engine: Any = self.engine
        if self._sleeps:
            engine.wake()
