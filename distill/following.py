"""One night, several processes: the first runs it, the others make the calls that need them all.

The first process acts, asks teachers, writes files and judges as if it were alone. Before a call
that needs every process (`parallel.together`: an update, a score, a checkpoint) it says which one
it is and with what; the others wait for that, make the same call, and wait again. So environments,
skill banks, paid teachers and files exist once, and nothing has to agree by luck.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill import (
    batch,
    correction,
    distributions,
    divergence,
    followers,
    groups,
    logprobs,
    types,
)
from distill.checkpoint import Progress
from distill.errors import ConfigError
from distill.parallel import Group

_MODULES = (batch, correction, distributions, divergence, followers, groups, logprobs, types)
RECORDS: dict[str, type[Any]] = {
    record.__name__: record
    for record in [*(v for module in _MODULES for v in vars(module).values()), Progress]
    if isinstance(record, type) and is_dataclass(record)
}
"""What may be an argument of a call besides plain values and tensors."""


class Leader:
    """The line of the first process. `known` names objects that every process has by itself."""

    def __init__(self, group: Group, known: Mapping[str, Any], device: torch.device) -> None:
        self._group = group
        self._names = {id(value): name for name, value in known.items()}
        self._known = dict(known)  # keeps the ids valid
        self._device = device
        self._depth = 0

    @contextmanager
    def telling(
        self, owner: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[None]:
        """Announce a call, unless it is a part of one that was announced."""
        if self._depth == 0:
            tensors: list[Tensor] = []
            packed = self._pack([list(args), dict(kwargs)], tensors)
            shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
            self._group.share([self._names[id(owner)], name, packed, shapes])
            self._group.send([t.to(self._device).contiguous() for t in tensors])
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def know(self, name: str, value: Any) -> None:
        """A further object that every process has by itself."""
        self._known[name] = value
        self._names[id(value)] = name

    def end(self) -> None:
        """Let the others go on to what comes after this work."""
        self._group.share(None)

    def _pack(self, value: Any, tensors: list[Tensor]) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if id(value) in self._names:
            return {"known": self._names[id(value)]}
        if isinstance(value, Tensor):
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        if isinstance(value, Path):
            return {"path": str(value)}
        if isinstance(value, Mapping):
            return {"map": {str(k): self._pack(v, tensors) for k, v in value.items()}}
        if isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self._pack(v, tensors) for v in value]}
        name = type(value).__name__
        if RECORDS.get(name) is not type(value):
            raise ConfigError(
                f"a value of type {name} cannot be handed to the other training processes; "
                "train this stage in one process"
            )
        entries = {
            f.name: self._pack(getattr(value, f.name), tensors) for f in fields(value) if f.init
        }
        return {"record": name, "fields": entries}


def follow(group: Group, known: Mapping[str, Any], device: torch.device) -> None:
    """Make the calls that the first process announces, until it ends this work."""
    while (message := group.share()) is not None:
        owner, name, packed, shapes = message
        tensors = [torch.empty(s, dtype=getattr(torch, d), device=device) for d, s in shapes]
        group.send(tensors)
        args, kwargs = _unpack(packed, tensors, known)
        method = getattr(known[owner], name)
        method(*args, **kwargs)


def _unpack(value: Any, tensors: Sequence[Tensor], known: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, content), *rest = value.items()
    if kind == "known":
        return known[content]
    if kind == "tensor":
        return tensors[content]
    if kind == "path":
        return Path(content)
    if kind == "map":
        return {k: _unpack(v, tensors, known) for k, v in content.items()}
    if kind == "record":
        ((_, entries),) = rest
        return RECORDS[content](**{k: _unpack(v, tensors, known) for k, v in entries.items()})
    items = [_unpack(v, tensors, known) for v in content]
    return tuple(items) if kind == "tuple" else items
