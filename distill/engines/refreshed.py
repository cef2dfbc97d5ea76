"""An engine that samples from a frozen copy of the student, renewed now and then (NeoHorse-1,
arXiv 2609.08183).

The copy of an adapter is another adapter of the same base; that of full weights is a frozen model.
It is a role of the policy, so every checkpoint holds it. Rollouts carry the version of the weights
that wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distill.engines.hf import HFEngine
from distill.followers import FollowerSpec
from distill.policy import Policy
from distill.types import CheckpointRef, Completion, Sampling


class RefreshedEngine:
    """Samples from the copy. `is_due` says of a step whether the copy is renewed after it.

    The copy is always renewed at step 0. `load` is called after every step with the weights of the
    student in memory, and once before the first step of a process.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        is_due: Callable[[int], bool],
        pad_id: int = 0,
        max_batch: int = 256,
    ) -> None:
        role = policy.add_follower(FollowerSpec(name="sampling"))
        self._copy = policy.followers[role]
        self._engine = HFEngine(policy, role=role, pad_id=pad_id, max_batch=max_batch)
        self._is_due = is_due
        self.policy_version = 0

    def load(self, checkpoint: CheckpointRef) -> None:
        """Renew the copy if the step asks for it; else it stays what it was made after an earlier
        step, which a resumed process finds by looking back."""
        step = checkpoint.step
        if step == 0 or self._is_due(step):
            self._copy.renew()
            self.policy_version = checkpoint.policy_version
            return
        last = next((s for s in range(step - 1, 0, -1) if self._is_due(s)), 0)
        self.policy_version = checkpoint.policy_version - (step - last)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        return self._engine.generate(prompts, sampling)

    def close(self) -> None:
        self._engine.close()
