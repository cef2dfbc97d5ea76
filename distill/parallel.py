"""Training in several processes: who takes part, and how weights and results are shared.

`torchrun` starts the processes, torch.distributed carries the tensors (gloo on a CPU, nccl on a
GPU) and FSDP2 (`fully_shard`) spreads weights, gradients and optimizer state. Every process makes
the same calls in the same order. Without torchrun there is one process, and nothing here acts.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from distill.errors import AlignmentError, ConfigError

PATIENCE = timedelta(days=1)
"""How long a process waits for what the first one does alone, such as an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The processes that train together. `rank` is this one's number, 0 the first."""

    rank: int = 0
    size: int = 1
    mesh: Any = None
    """Device mesh of torch, one dimension of `size` entries."""
    control: Any = None
    """Process group for CPU tensors: messages that are no weights."""

    @property
    def is_alone(self) -> bool:
        """Whether nothing is spread: no torchrun, one process."""
        return self.mesh is None

    @property
    def is_first(self) -> bool:
        """Whether this process writes what all share."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every process is here."""
        if not self.is_alone:
            _dist().all_reduce(torch.zeros(1), group=self.control)

    def share(self, value: Any = None) -> Any:
        """The JSON value of the first process, in every process."""
        if self.is_alone:
            return value
        data = bytearray(json.dumps(value).encode()) if self.is_first else bytearray()
        size = torch.tensor([len(data)])
        _dist().broadcast(size, src=0, group=self.control)
        if not self.is_first:
            data = bytearray(int(size))
        found = torch.frombuffer(data, dtype=torch.uint8)  # shares the memory of `data`
        _dist().broadcast(found, src=0, group=self.control)
        return json.loads(bytes(data))

    def gather(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The named tensors of every process, by rank, on the CPU."""
        if self.is_alone:
            return [dict(tensors)]
        from safetensors.torch import load, save

        data = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        _dist().all_gather(sizes, torch.tensor([len(data)]), group=self.control)
        width = max(int(size) for size in sizes)
        mine = torch.frombuffer(bytearray(data.ljust(width)), dtype=torch.uint8)
        pieces = [torch.empty_like(mine) for _ in range(self.size)]
        _dist().all_gather(pieces, mine, group=self.control)
        return [
            load(piece[: int(size)].numpy().tobytes())
            for piece, size in zip(pieces, sizes, strict=True)
        ]

    def most(self, number: int) -> int:
        """The largest of the processes' numbers."""
        return max(int(found["n"]) for found in self.gather({"n": torch.tensor(number)}))

    def require_same(self, digest: str, what: str) -> None:
        """AlignmentError naming the processes whose digest is not that of the first one."""
        if self.is_alone:
            return
        mine = torch.frombuffer(bytearray(digest.encode()), dtype=torch.uint8)
        found = [bytes(row["digest"].tolist()).decode() for row in self.gather({"digest": mine})]
        other = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
        if other:
            raise AlignmentError(
                f"{what} of process {', '.join(map(str, other))} of {self.size} is not that of "
                f"process 0 ({found[other[0]][:12]}, expected {found[0][:12]}); every process "
                "must be given the same rows: look for a draw that is not keyed by the step"
            )

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Fill contiguous tensors of the device with those of the first process."""
        for tensor in tensors:
            if tensor.numel():  # as bytes, which every backend carries
                _dist().broadcast(tensor.detach().reshape(-1).view(torch.uint8), src=0)

    def deal(self, items: Sequence[int]) -> list[int]:
        """This process's share of the items."""
        return list(items[self.rank :: self.size])

    def spread(self, made: Tensor | None, number: int, weight: Tensor, count: int) -> Tensor:
        """Item `number` of what was dealt, from the process that made it: [count, d] of the width
        and type of a head's `weight` [V, d]."""
        owner = number % self.size
        rows = made.contiguous() if made is not None else weight.new_empty(count, weight.shape[1])
        if not self.is_alone:
            _dist().broadcast(rows, src=owner)
        return rows


ALONE = Group()
_current = ALONE


def single() -> Group:
    """The group of a program that nobody started with torchrun."""
    return ALONE


def current() -> Group:
    """The group that `init_from_env` made in this process, else that of a single one."""
    return _current


def init_from_env(device: str = "auto", *, even_one: bool = False) -> Group:
    """Join the processes that torchrun started, by its environment; alone without it.

    `device` is `model.device`: each process of a host takes the GPU of its local rank. With
    `even_one` a single process of torchrun shards as well, which only checks that it can.
    """
    global _current
    size = int(os.environ.get("WORLD_SIZE", "0"))
    if size < (1 if even_one else 2) or not _current.is_alone:
        return _current
    from torch.distributed.device_mesh import init_device_mesh

    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if cuda:
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise ConfigError(
                f"process {local} of this host has no GPU, there are {there}; start torchrun with "
                f"--nproc-per-node {there}"
            )
        torch.cuda.set_device(local)
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size) and _has_loopback():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no name of this host is looked up
    _dist().init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    _current = Group(
        rank=_dist().get_rank(),
        size=size,
        mesh=init_device_mesh("cuda" if cuda else "cpu", (size,)),
        control=_dist().new_group(backend="gloo", timeout=PATIENCE),
    )
    return _current


def destroy() -> None:
    """Leave the group; without one nothing happens."""
    global _current
    if not _current.is_alone:
        _dist().destroy_process_group()
    _current = ALONE


class Line(Protocol):
    """How the first process tells the others what it is about to do, where it alone runs a night
    and they only follow."""

    def telling(
        self, owner: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[None]: ...


class OnLine(Protocol):
    @property
    def line(self) -> Line | None: ...


S = TypeVar("S", bound=OnLine)
P = ParamSpec("P")
R = TypeVar("R")


def together(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that every process must call. With a line the others are told of it first."""

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.line is None:
            return method(self, *args, **kwargs)
        with self.line.telling(self, method.__name__, args, kwargs):
            return method(self, *args, **kwargs)

    functools.update_wrapper(call, method)
    return call


# -- weights -------------------------------------------------------------------------------


def is_sharded(tensor: Any) -> bool:
    """Whether a process holds only a part of a tensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Tensor:
    """All of a tensor; every process must ask for it."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def shard(
    root: nn.Module, blocks: Iterable[nn.Module], group: Group, *, like: nn.Module | None = None
) -> None:
    """Spread the parameters of a module over the processes: each block by itself, and the rest,
    which `root` gathers for as long as it runs. Gradients are summed, never averaged.

    `root` may be a skeleton; it then gets the weights of `like`, which is spread already.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    blocks = list(blocks)
    if not blocks:
        raise ConfigError(
            "the model names no layers that can be spread over processes (_no_split_modules); "
            "train it in one process"
        )
    # Half-precision gradients are summed in float32.
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in root.parameters())
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)
    for block in blocks:
        fully_shard(block, mesh=group.mesh, mp_policy=precision)
    fully_shard(root, mesh=group.mesh, mp_policy=precision)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # A sum at once: averages, and factors before a sum, are not in gloo.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if like is not None:
        _fill(root, like)
    with torch.no_grad():
        root(_nothing)  # the first call says which module is the root
    root.reshard()  # type: ignore[operator]


def _nothing() -> None:
    return None


@contextmanager
def gathered(root: nn.Module) -> Iterator[None]:
    """Whole weights in every process, for calls without gradient below `root`.

    Inside, a process may call the model as often as it likes, whatever the others do.
    """
    from torch.distributed.fsdp import FSDPModule

    modules = [m for m in root.modules() if isinstance(m, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(module is not root, recurse=False)
            _forget_passes(module)


def _forget_passes(module: Any) -> None:
    """Drop what FSDP noted of forward passes that no backward pass follows: it would gather layers
    ahead in that order, and each process made passes of its own, so that they would wait for ever
    for different layers. There is no public call for it."""
    state = module._get_fsdp_state()
    state._comm_ctx.post_forward_order.clear()
    for part in state._fsdp_param_groups:
        part._post_forward_indices.clear()


def skeleton(model: Any) -> Any:
    """A copy of a model that is not sharded yet, with parameters that take no memory."""
    hollow = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        for p in model.parameters()
    }
    return copy.deepcopy(model, hollow)


@torch.no_grad()
def _fill(empty: nn.Module, model: nn.Module) -> None:
    kept = {name: b.clone() for name, b in empty.named_buffers()}
    empty.to_empty(device=next(model.parameters()).device)
    for name, buffer in empty.named_buffers():
        buffer.copy_(kept[name])
    theirs = dict(model.named_parameters())
    for name, parameter in empty.named_parameters():
        parameter.copy_(theirs[name])


def rows_of(length: int, rank: int, size: int) -> tuple[int, int]:
    """[start, stop) of the rows of a tensor that a process holds, as FSDP2 cuts them."""
    step = -(-length // size)
    return min(rank * step, length), min((rank + 1) * step, length)


def _dist() -> Any:
    import torch.distributed

    return torch.distributed


def _has_loopback() -> bool:
    return "lo" in {name for _, name in socket.if_nameindex()}
