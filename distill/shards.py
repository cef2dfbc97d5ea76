"""Named tensors on disk, where each process may hold a part of them.

One process writes `NAME.safetensors`. Several write one file each, and an index says what lies
where, in words and numbers, so that any number of processes can read it again:

    NAME-00001-of-00002.safetensors   NAME-00002-of-00002.safetensors
    NAME.index.json   {"processes": 2, "tensors": {"exp_avg/x": {"shape": [48, 32], "dtype":
                       "float32", "pieces": [{"file": 1, "start": 0, "stop": 24}, ...]}}}

Tensors are cut along their first dimension.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.errors import CheckpointError
from distill.parallel import Group, is_sharded, rows_of
from distill.rundir import read_json, write_json


def save_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor], group: Group) -> None:
    """Write tensors; every process calls it with its own parts. They are on the disk afterwards."""
    from safetensors.torch import save_file

    if group.is_alone:
        save_file(dict(tensors), str(folder / f"{name}.safetensors"))
        return
    mine: dict[str, Tensor] = {}
    index: dict[str, Any] = {}
    part: Tensor | None
    for key, tensor in tensors.items():
        if is_sharded(tensor):
            part = _own_part(key, tensor, group)
            bounds = [rows_of(tensor.shape[0], rank, group.size) for rank in range(group.size)]
        else:
            part = tensor if group.is_first else tensor[:0] if tensor.dim() else None
            bounds = [(0, tensor.shape[0] if tensor.dim() else 1)]
        if part is not None and part.numel():
            mine[key] = part.detach().cpu().contiguous()
        index[key] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "pieces": [
                {"file": number, "start": start, "stop": stop}
                for number, (start, stop) in enumerate(bounds, start=1)
                if start < stop
            ],
        }
    path = folder / _file(name, group.rank + 1, group.size)
    save_file(mine, str(path))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    if group.is_first:
        write_json(folder / f"{name}.index.json", {"processes": group.size, "tensors": index})


def load_tensors(
    folder: Path, name: str, like: Callable[[str], Any], group: Group
) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote, in any number of processes. A tensor is cut as the one that
    `like` returns for its name is; it is whole where that is not sharded or None.

    CheckpointError for files that are missing or do not fit.
    """
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        try:
            index, files = _index(folder, name)
            opened = {
                number: stack.enter_context(safe_open(str(path), framework="pt"))
                for number, path in files.items()
            }
            return {
                key: _read(key, entry, opened, like(key), group) for key, entry in index.items()
            }
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(
                f"the tensors {name} in {folder} cannot be read: {error}; remove this checkpoint, "
                "and the one before it is used"
            ) from error


def read_rows(path: Path, tensors: Mapping[str, Any], group: Group) -> set[str]:
    """Fill tensors in place from a file of whole ones, by name, each process its own rows.

    Returns the names that the file has and nobody asked for.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file, torch.no_grad():
            stored = set(file.keys())
            for name in stored & set(tensors):
                own = tensors[name]
                if is_sharded(own):
                    start, stop = rows_of(own.shape[0], group.rank, group.size)
                    own.to_local().copy_(file.get_slice(name)[start:stop])
                else:
                    own.copy_(file.get_tensor(name))
            return stored - set(tensors)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _own_part(key: str, tensor: Any, group: Group) -> Tensor:
    start, stop = rows_of(tensor.shape[0], group.rank, group.size)
    part: Tensor = tensor.to_local()
    if part.shape[0] != stop - start:
        raise CheckpointError(
            f"process {group.rank} holds {part.shape[0]} rows of {key}, expected rows {start} to "
            f"{stop} of {tensor.shape[0]}; this torch cuts tensors in a way that is not known here"
        )
    return part


def _file(name: str, number: int, count: int) -> str:
    return f"{name}-{number:05d}-of-{count:05d}.safetensors"


def _index(folder: Path, name: str) -> tuple[dict[str, Any], dict[int, Path]]:
    """What is stored, and the files by number; one file of whole tensors needs no index."""
    from safetensors import safe_open

    path = folder / f"{name}.index.json"
    if path.exists():
        found = read_json(path)
        count = found["processes"]
        return found["tensors"], {n: folder / _file(name, n, count) for n in range(1, count + 1)}
    single = folder / f"{name}.safetensors"
    index = {}
    with safe_open(str(single), framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            shape = file.get_slice(key).get_shape()
            piece = {"file": 1, "start": 0, "stop": shape[0] if shape else 1}
            index[key] = {"shape": shape, "pieces": [piece]}
    return index, {1: single}


def _read(key: str, entry: Any, files: Mapping[int, Any], like: Any, group: Group) -> Tensor:
    shape = list(entry["shape"])
    if not shape:
        (piece,) = entry["pieces"]
        scalar: Tensor = files[piece["file"]].get_tensor(key)
        return scalar
    cut = like is not None and is_sharded(like)
    if like is not None and list(like.shape) != shape:
        raise CheckpointError(
            f"{key} has the shape {shape} on disk and {list(like.shape)} in this model; the "
            "checkpoint belongs to another model"
        )
    start, stop = rows_of(shape[0], group.rank, group.size) if cut else (0, shape[0])
    parts = []
    for piece in entry["pieces"]:
        first, last = max(start, piece["start"]), min(stop, piece["stop"])
        if first < last:
            stored = files[piece["file"]].get_slice(key)
            parts.append(stored[first - piece["start"] : last - piece["start"]])
    if parts:
        rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    else:  # a process may own no row of a short tensor
        some = entry["pieces"][0]
        rows = files[some["file"]].get_slice(key)[0:0]
    if not cut:
        return rows
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows.to(like.device),
        like.device_mesh,
        like.placements,
        shape=like.shape,
        stride=like.stride(),
    )
