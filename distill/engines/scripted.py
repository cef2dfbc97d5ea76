"""An engine that says what it is told: for tests and dry runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distill.engines.sampling import check
from distill.errors import EngineError
from distill.types import CheckpointRef, Completion, Sampling, StopReason

Script = Callable[[Sequence[int], int], Sequence[int]]
"""(prompt ids, sample number) -> response ids, the stop token included if it should end."""


class ScriptedEngine:
    """Plays a script, token by token, with log-probability `logprob` each."""

    def __init__(self, script: Script, *, logprob: float = -0.5) -> None:
        self.policy_version = 0
        self._script = script
        self._logprob = logprob

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        check(sampling, len(prompts))
        allowed = sampling.choices or ((),) * len(prompts)
        return [
            [
                self._completion(self._said(p, g, only), sampling)
                for g in range(sampling.num_samples)
            ]
            for p, only in zip(prompts, allowed, strict=True)
        ]

    def load(self, checkpoint: CheckpointRef) -> None:
        self.policy_version = checkpoint.policy_version

    def close(self) -> None:
        """Nothing to release."""

    def _said(
        self, prompt: Sequence[int], sample: int, only: Sequence[Sequence[int]]
    ) -> Sequence[int]:
        said = tuple(self._script(prompt, sample))
        if only and said not in only:
            raise EngineError(f"the script says {said}, but only {list(only)} are allowed")
        return said

    def _completion(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        kept: list[int] = []
        for token in list(ids)[: sampling.max_new_tokens]:
            kept.append(int(token))
            if token in sampling.stop_token_ids:
                break
        ended = bool(kept) and kept[-1] in sampling.stop_token_ids
        return Completion(
            token_ids=tuple(kept),
            logprobs=(self._logprob,) * len(kept),
            stop=StopReason.STOP if ended else StopReason.LENGTH,
        )
