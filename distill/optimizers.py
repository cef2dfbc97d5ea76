"""The optimizer of a stage, and its state by parameter name, ready for a safetensors file.

Weights of half precision have too few digits for small updates: 1.0 + 0.001 is 1.0 in bfloat16. So
their gradients are summed, and their steps are taken, on float32 copies, the master weights, which
are rounded into the model after every step (arXiv 1710.03740). The copies, and the moments with
them, may live on the CPU, where a model of N weights then costs the device no 12 N bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distill.errors import CheckpointError, ConfigError, DistillError

MASTER = "master"
"""Key of the float32 copies in the state."""
_HALF = (torch.bfloat16, torch.float16)


class StageAdamW(torch.optim.AdamW):
    """AdamW over the trained parameters, or over copies of those that need one.

    `collect` after every backward pass, then clip the gradients of `stepped`, then `step`.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        *,
        master_weights: bool,
        offload: bool,
        **options: Any,
    ) -> None:
        self.stepped: dict[str, nn.Parameter] = {}
        """Name -> what is stepped on: the parameter itself or its float32 copy."""
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in named.items():
            own = parameter
            if offload or (master_weights and parameter.dtype in _HALF):
                own = _copy(parameter, offload=offload)
                self._pairs.append((parameter, own))
            self.stepped[name] = own
        super().__init__(list(self.stepped.values()), fused=True, **options)
        self.register_step_post_hook(StageAdamW._round)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the model to those of the copies, in float32, and free them."""
        for parameter, own in self._pairs:
            if parameter.grad is None:
                continue
            grad = parameter.grad.to(own.device).to(own.dtype)
            own.grad = grad if own.grad is None else own.grad.add_(grad)
            parameter.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter, _ in self._pairs:
            parameter.grad = None

    @torch.no_grad()
    def _round(self, args: Any, kwargs: Any) -> None:
        """Bring the model to the copies, rounded to its precision, after every step."""
        for parameter, own in self._pairs:
            parameter.copy_(own)


def build_optimizer(
    named: Mapping[str, nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    master_weights: bool = True,
    offload: Literal["none", "optimizer"] = "none",
) -> StageAdamW:
    """AdamW over the trained parameters, as they are when it is made.

    `master_weights`: float32 copies of those in half precision. `offload = "optimizer"`: copies of
    all, moments and steps are on the CPU. ConfigError for sharded parameters with an offload.
    """
    if offload == "optimizer" and any(hasattr(p, "device_mesh") for p in named.values()):
        raise ConfigError(
            'trainer.offload = "optimizer" is for one process, but the weights are sharded over '
            'several; set trainer.offload = "none", or use more processes'
        )
    return StageAdamW(
        named,
        lr=lr,
        betas=betas,
        weight_decay=weight_decay,
        master_weights=master_weights,
        offload=offload == "optimizer",
    )


def state_tensors(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Optimizer state as `key/parameter` -> tensor; float32 copies under the key `master`."""
    stepped = _stepped(optimizer, named)
    names = {id(p): name for name, p in stepped.items()}
    out = {}
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            out[f"{key}/{names[id(parameter)]}"] = value.detach().contiguous()
    for name, own in stepped.items():
        if own is not named[name]:
            out[f"{MASTER}/{name}"] = own.detach().contiguous()
    return out


def load_state_tensors(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Inverse of `state_tensors`, after the model has its weights.

    Raises DistillError for foreign parameter names, and CheckpointError where one side has float32
    copies and the other has none.
    """
    unknown = {n.split("/", 1)[1] for n in tensors} - set(named)
    if unknown:
        raise DistillError(
            f"the optimizer state holds {len(unknown)} parameters that this model does not "
            f"have (first: {sorted(unknown)[0]}); the checkpoint belongs to another model"
        )
    stepped = _stepped(optimizer, named)
    kept = {n.split("/", 1)[1] for n in tensors if n.startswith(f"{MASTER}/")}
    ours = {name for name, own in stepped.items() if own is not named[name]}
    if kept != ours:
        raise CheckpointError(
            f"the checkpoint holds float32 copies of {len(kept)} weights, this trainer keeps "
            f"{len(ours)}; resume with the model.dtype, trainer.master_weights and trainer.offload "
            "that it was made with"
        )
    for name, tensor in tensors.items():
        key, parameter = name.split("/", 1)
        owner = stepped[parameter]
        if key == MASTER:
            with torch.no_grad():
                owner.copy_(tensor)
        else:
            optimizer.state[owner][key] = tensor.to(owner.device, copy=True)


def _stepped(optimizer: torch.optim.Optimizer, named: Mapping[str, Any]) -> Mapping[str, Any]:
    return optimizer.stepped if isinstance(optimizer, StageAdamW) else named


def _copy(parameter: nn.Parameter, *, offload: bool) -> nn.Parameter:
    place = torch.device("cpu") if offload else parameter.device
    wide = torch.float32 if parameter.dtype in _HALF else parameter.dtype
    return nn.Parameter(parameter.detach().to(place, wide, copy=True))
