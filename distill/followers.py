"""Weights that follow the student's: a moving average, or a snapshot taken now and then.

A follower of an adapter is another adapter of the same base, so it costs no second copy of the
model; a follower of full weights is a frozen copy of the model. The average of an adapter is taken
factor by factor, as other trainers do; it is not the average of the products. Of half-precision
weights the average itself is kept in float32: a small rate would round to no step at all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from distill.errors import CheckpointError, ConfigError
from distill.parallel import is_sharded, whole


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerSpec:
    """`ema`: copy <- (1 - rate) * copy + rate * student after every step (SDFT, SDPO: 0.01 to
    0.05). `snapshot`: copy <- student after every `every`-th step (RLSD: 10). `sampling`: copy <-
    student whenever its engine asks for it."""

    name: Literal["ema", "snapshot", "sampling"]
    rate: float = 0.05
    every: int = 10

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 1.0:
            raise ConfigError(f"teacher.rate must be within (0, 1], got {self.rate}")
        if self.every < 1:
            raise ConfigError(f"teacher.every must be at least 1, got {self.every}")


class Follower:
    """One following role. Its parameters never require a gradient."""

    def __init__(
        self,
        model: Any,
        spec: FollowerSpec,
        *,
        kind: Literal["full", "adapter"],
        twin: Any = None,
    ) -> None:
        """`twin` is a frozen copy of full weights that are spread over processes."""
        self.spec = spec
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}
        if kind == "full":
            self.model = copy.deepcopy(model).requires_grad_(False) if twin is None else twin
            theirs = dict(self.model.named_parameters())
            self._pairs = {n: (p, theirs[n]) for n, p in model.named_parameters()}
        else:
            self.model = model
            model.add_adapter(spec.name, model.peft_config["default"])
            named = dict(model.named_parameters())
            for name, parameter in named.items():
                if ".default." in name:
                    own = named[name.replace(".default.", f".{spec.name}.")]
                    own.requires_grad_(False)
                    self._pairs[name] = (parameter, own)
        self.renew()
        averaged = self._pairs.items() if spec.name == "ema" else ()
        self._exact: dict[str, Tensor] = {
            name: own.detach().float()
            for name, (_, own) in averaged
            if own.dtype in (torch.bfloat16, torch.float16)
        }

    @torch.no_grad()
    def renew(self) -> None:
        """Take over the student's weights as they are."""
        for theirs, own in self._pairs.values():
            own.copy_(_fitting(theirs, own))

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move once after optimizer step 1, 2, ..."""
        if self.spec.name == "ema":
            for name, (theirs, own) in self._pairs.items():
                average = self._exact.get(name, own)
                average.lerp_(_fitting(theirs, own).to(average.dtype), self.spec.rate)
                if average is not own:
                    own.copy_(average)
        elif self.spec.name == "snapshot" and step % self.spec.every == 0:
            self.renew()

    def tensors(self) -> dict[str, Tensor]:
        """Weights by the student's parameter names, for a checkpoint."""
        return {
            name: self._exact.get(name, own).detach().contiguous()
            for name, (_, own) in self._pairs.items()
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `tensors`. CheckpointError unless the names are the same."""
        if set(tensors) != set(self._pairs):
            raise CheckpointError(
                f"the weights of the role {self.spec.name} belong to another model: "
                f"{len(set(tensors) ^ set(self._pairs))} names differ"
            )
        for name, (_, own) in self._pairs.items():
            own.copy_(tensors[name])
            if name in self._exact:
                self._exact[name].copy_(tensors[name])


def _fitting(theirs: Tensor, own: Tensor) -> Tensor:
    """The student's tensor, whole where the follower's is: its adapter is on every process."""
    return theirs if is_sharded(own) else whole(theirs)
