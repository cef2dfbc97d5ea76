"""Durable points of a stage: weights, optimizer, objective state, all or nothing.

    checkpoints/000012/  {adapter_model|model}.safetensors ...  optimizer.safetensors
                         state.json  manifest.json

A checkpoint is written into a temporary sibling and renamed; the manifest holds the digest of
every file. A damaged one is skipped with a warning and the one before it is used.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from distill.errors import CheckpointError, DataError
from distill.models import load_trained_weights, save_weights
from distill.policy import Policy
from distill.rundir import digest_file, read_json, staged_dir, write_json
from distill.trainer import Trainer

logger = logging.getLogger(__name__)

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a stage stands after `step` optimizer steps."""

    step: int = 0
    policy_version: int = 0
    tokens: int = 0
    seconds: float = 0.0
    monitor: Mapping[str, Any] = field(default_factory=dict)
    """What the collapse monitor remembers."""
    sampler: Mapping[str, Any] = field(default_factory=dict)
    """What the sampler of tasks remembers."""


def save_checkpoint(
    folder: Path, policy: Policy, trainer: Trainer, tokenizer: Any, progress: Progress
) -> Path:
    """Write `folder`/checkpoints/<step> durably and return it. An undamaged one is kept."""
    path = folder / "checkpoints" / f"{progress.step:06d}"
    if path.exists():
        try:
            verify_manifest(path)
            return path
        except CheckpointError as error:
            logger.warning("wrote a checkpoint anew: %s", error)
            shutil.rmtree(path)
    with staged_dir(path) as partial:
        save_weights(policy, tokenizer, partial)
        save_file(trainer.state_tensors(), str(partial / "optimizer.safetensors"))
        for role, follower in policy.followers.items():
            save_file(follower.tensors(), str(partial / f"role_{role}.safetensors"))
        write_json(
            partial / "state.json",
            {
                "step": progress.step,
                "policy_version": progress.policy_version,
                "tokens": progress.tokens,
                "seconds": progress.seconds,
                "objective": dict(trainer.state),
                "monitor": dict(progress.monitor),
                "sampler": dict(progress.sampler),
            },
        )
        write_manifest(partial)
    return path


def write_manifest(folder: Path) -> None:
    """Write the digests of all files of a folder, by their names relative to it."""
    found = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    names = sorted(name for name in found if name != "manifest.json")
    files = {name: digest_file(folder / name) for name in names}
    write_json(folder / "manifest.json", {"format": _FORMAT, "files": files})


def verify_manifest(folder: Path) -> None:
    """Raise CheckpointError unless every file has the digest that the manifest names."""
    try:
        manifest = read_json(folder / "manifest.json")
    except DataError as error:
        raise CheckpointError(f"{folder} has no readable manifest: {error}") from error
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{folder}/manifest.json has format {manifest.get('format')!r}, expected {_FORMAT}"
        )
    for name, digest in manifest["files"].items():
        try:
            found = digest_file(folder / name)
        except DataError as error:
            raise CheckpointError(f"{folder / name} is missing: {error}") from error
        if found != digest:
            raise CheckpointError(
                f"{folder / name} is damaged: its digest is {found[:12]}, the manifest says "
                f"{digest[:12]}"
            )


def load_newest(folder: Path, policy: Policy, trainer: Trainer) -> Progress:
    """Restore the newest undamaged checkpoint of a stage; step 0 when there is none."""
    for path in reversed(list_checkpoints(folder)):
        try:
            verify_manifest(path)
        except CheckpointError as error:
            logger.warning("skipped a checkpoint: %s", error)
            continue
        state = read_json(path / "state.json")
        load_trained_weights(policy, path)
        try:
            trainer.load_state_tensors(load_file(str(path / "optimizer.safetensors")))
            for role, follower in policy.followers.items():
                follower.load(load_file(str(path / f"role_{role}.safetensors")))
        except (SafetensorError, FileNotFoundError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        trainer.state = state["objective"]
        return Progress(
            step=state["step"],
            policy_version=state["policy_version"],
            tokens=state["tokens"],
            seconds=state["seconds"],
            monitor=state.get("monitor", {}),
            sampler=state.get("sampler", {}),
        )
    return Progress()


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints of a stage, oldest first."""
    parent = folder / "checkpoints"
    if not parent.is_dir():
        return []
    return sorted(p for p in parent.iterdir() if p.name.isdigit())


def drop_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of a stage that were made after `step`."""
    for path in list_checkpoints(folder):
        if int(path.name) > step:
            shutil.rmtree(path)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints of a stage."""
    for path in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(path)
