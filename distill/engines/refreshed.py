"""An engine that samples from a frozen copy of the student, renewed now and then (NeoHorse-1,
arXiv 2609.08183).

The copy of an adapter is another adapter of the same base; that of full weights is a frozen model.
It is a role of the policy, so every checkpoint holds it. Rollouts carry the version of the weights
that wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from distill.followers import FollowerSpec
from distill.policy import Policy
from distill.protocols import RolloutEngine
from distill.types import CheckpointRef, Completion, Sampling

SAMPLING: Literal["sampling"] = "sampling"
"""The role of the copy."""


class RefreshedEngine:
    """Samples from the copy through `engine`, which `make` makes for the copy's role. `is_due` says
    of a step whether the copy is renewed after it.

    The copy is always renewed at step 0. `load` is called after every step with the weights of the
    student in memory, and once before the first step of a process.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        make: Callable[[str], RolloutEngine],
        is_due: Callable[[int], bool],
    ) -> None:
        role = policy.add_follower(FollowerSpec(name=SAMPLING))
        self._policy = policy
        self._role = role
        self._engine = make(role)
        self._is_due = is_due
        self._is_fed = False
        self.policy_version = 0

    def load(self, checkpoint: CheckpointRef) -> None:
        """Renew the copy if the step asks for it; else it stays what it was made after an earlier
        step, which a resumed process finds by looking back."""
        step = checkpoint.step
        is_due = step == 0 or self._is_due(step)
        if is_due:
            self._policy.renew(self._role)
            self.policy_version = checkpoint.policy_version
        else:
            last = next((s for s in range(step - 1, 0, -1) if self._is_due(s)), 0)
            self.policy_version = checkpoint.policy_version - (step - last)
        if is_due or not self._is_fed:
            self._engine.load(replace(checkpoint, policy_version=self.policy_version))
            self._is_fed = True

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        return self._engine.generate(prompts, sampling)

    def rest(self) -> None:
        """Let the engine behind rest, where it can."""
        rest(self._engine)

    def close(self) -> None:
        self._engine.close()


def rest(engine: RolloutEngine) -> None:
    """Tell an engine that the replies of a step are there; most have nothing to give back."""
    own = getattr(engine, "rest", None)
    if own is not None:
        own()
