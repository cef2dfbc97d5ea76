"""Weights on their way to vllm: compared with the base model before anything is sent.

vllm copies an adapter into slots that are large enough and asks nothing: one for a smaller model
leaves the rest of a slot at zero. So every shape is compared here, where a file can still be
refused without loss.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distill.engines.publishing import HEAD
from distill.errors import EngineError
from distill.models import ADAPTER_WEIGHTS

ADAPTER_CONFIG = "adapter_config.json"
FILES = "model*.safetensors"
_PREFIX = "base_model.model."
_SIDES = (".lora_A.weight", ".lora_B.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")

Shapes = Mapping[str, tuple[int, ...]]


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the safetensors files of a folder."""
    files = sorted(folder.glob(FILES))
    if not files:
        raise EngineError(f"{folder} holds no {FILES}; give a folder of saved weights")
    return {name: shape for path in files for name, shape in _shapes_in(path).items()}


def adapter_targets(base: Shapes) -> list[str]:
    """Names of the layers that an adapter may change: every linear one but the head.

    A head that could take adapters costs, and on a CPU breaks the scoring of prompts in vllm 0.32.
    """
    return sorted(
        {
            name.removesuffix(".weight").rpartition(".")[2]
            for name, shape in base.items()
            if len(shape) == 2 and name != HEAD and not name.endswith(_EMBEDDINGS)
        }
    )


def check_adapter(folder: Path, base: Shapes, *, max_rank: int) -> None:
    """EngineError unless the adapter in `folder` fits this base and the engine's slots."""
    if not (folder / ADAPTER_CONFIG).is_file() or not (folder / ADAPTER_WEIGHTS).is_file():
        raise EngineError(
            f"{folder} is no adapter: expected {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS} there"
        )
    targets = adapter_targets(base)
    found = _shapes_in(folder / ADAPTER_WEIGHTS)
    if not found:
        raise EngineError(f"the adapter in {folder} holds no tensor")
    for name, shape in found.items():
        side = next((s for s in _SIDES if name.endswith(s)), None)
        module = name.removeprefix(_PREFIX).removesuffix(side or "")
        weight = _layer(base, f"{module}.weight")
        if side is None or weight is None:
            raise EngineError(
                f"the adapter in {folder} has {name}, which does not belong to a layer of the "
                "engine's base model; it was made for another base"
            )
        if module.rpartition(".")[2] not in targets:
            raise EngineError(
                f"the adapter in {folder} changes {module}, the engine serves adapters of "
                f'{", ".join(targets)}; train it without that layer, or use engine.name = "hf"'
            )
        # A is [rank, inputs], B is [outputs, rank], the layer itself [outputs, inputs].
        inner = side == _SIDES[0]
        rank, width = shape if inner else shape[::-1]
        own = weight[1 if inner else 0]
        if width != own:
            raise EngineError(
                f"the adapter in {folder} was made for another base: {name} is {width} wide, the "
                f"layer {module} of the engine's model {own}"
            )
        if rank > max_rank:
            raise EngineError(
                f"the adapter in {folder} has rank {rank}, the engine was started for at most "
                f"{max_rank}; start it with the rank of this adapter (model.rank)"
            )


def _layer(base: Shapes, name: str) -> tuple[int, ...] | None:
    """Shape of a layer, which a file of several models may hold under a longer name."""
    if name in base:
        return base[name]
    found = [shape for known, shape in base.items() if known.endswith(f".{name}")]
    return found[0] if len(found) == 1 else None


def check_full(folder: Path, base: Shapes) -> None:
    """EngineError unless the full weights in `folder` are those of the same architecture."""
    found = weight_shapes(folder)
    for name, shape in found.items():
        if name != HEAD and name not in base:
            raise EngineError(
                f"the weights in {folder} have {name}, which the engine's model does not; they "
                "belong to another model"
            )
        if name in base and shape != base[name]:
            raise EngineError(
                f"{name} in {folder} is {shape}, in the engine's model {base[name]}; the weights "
                "belong to another model"
            )
    missing = sorted(set(base) - set(found) - {HEAD})
    if missing:
        raise EngineError(
            f"the weights in {folder} lack {len(missing)} tensors of the engine's model (first: "
            f"{missing[0]}); the checkpoint is not whole"
        )


def full_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Names and tensors of full weights, one at a time, always with an output head.

    A tied head is saved under the name of the embedding alone; an engine that packs its head into a
    layout of its own keeps the old one unless it is sent by name.
    """
    shapes = weight_shapes(folder)
    tied = None
    if HEAD not in shapes:
        tied = next((n for n in shapes if n.endswith(_EMBEDDINGS)), None)
        if tied is None:
            raise EngineError(
                f"the weights in {folder} have neither {HEAD} nor an embedding known by name; "
                "publish them with distill.engines.publishing.publish"
            )
    for path in sorted(folder.glob(FILES)):
        for file in _opened(path):
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                tensor = file.get_tensor(name)
                yield name, tensor
                if name == tied:
                    yield HEAD, tensor


def exaggerate(folder: Path, target: Path, *, largest: float) -> None:
    """Write the adapter of `folder` with every B scaled until its largest entry is `largest`.

    A fresh adapter, whose B is zero, gets that value everywhere.
    """
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    for file in _opened(folder / ADAPTER_WEIGHTS):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        if name.endswith(_SIDES[1]):
            top = float(tensor.abs().max())
            full = torch.full_like(tensor, largest)
            tensors[name] = tensor * (largest / top) if top > 0 else full
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / ADAPTER_CONFIG, target / ADAPTER_CONFIG)
    save_file(tensors, str(target / ADAPTER_WEIGHTS), metadata={"format": "pt"})


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(file.get_slice(name).get_shape())
        for file in _opened(path)
        for name in file.keys()  # noqa: SIM118  (not a mapping)
    }


def _opened(path: Path) -> Iterator[Any]:
    """The file at `path`, once. EngineError for one that cannot be read to its end."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"{path} cannot be read: {error}; it is damaged or was cut off, take another checkpoint"
        ) from error
