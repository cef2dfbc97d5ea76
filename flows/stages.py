"""Stages as plain functions over a run directory. Every one can be repeated safely: what is
finished is returned from disk or from the cache, what was interrupted continues."""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.checkpoint import verify_manifest, write_manifest
from distill.config import STAGE_PREFIX, Config, Stage
from distill.errors import CheckpointError, DataError
from distill.models import pick_device, weights_file
from distill.rundir import digest_file, digest_json, from_json, read_json, staged_dir, write_json
from distill.tables import leaves
from flows import data_stages, recorded, wiring
from flows.night import Night
from flows.training import StageResult, first_weights, train

logger = logging.getLogger(__name__)

CACHE_FORMAT = 1
"""Part of every cache key: raise it when equal settings lead to other weights than before."""


GENERATED = ("world", "gym", "textworld")
"""Environments whose options say everything about their tasks."""


def run_stage(night: Night, stage: Stage) -> StageResult:
    """Train one stage to its end, or return its stored result."""
    final = night.final(stage.name)
    if final.exists():
        verify_manifest(final)
        return read_result(final)
    if stage.target == "data":
        return data_stages.make(night, stage)
    if stage.target == "student" and recorded.is_empty(night, night.config.for_stage(stage)):
        return _handed_on(night, stage)
    key = cache_key(night, stage) if stage.cache else None
    kept = night.home / "cache" / "stages" / key if key else None
    if kept is not None and kept.exists():
        return _from_cache(night, stage, kept)
    result = train(night, stage)
    if kept is not None and not kept.exists():
        try:
            with staged_dir(kept) as partial:
                shutil.copytree(final, partial, dirs_exist_ok=True)
        except DataError:
            # A night of another model may have kept the same stage meanwhile: it serves both.
            if not kept.is_dir():
                raise
    return result


def _handed_on(night: Night, stage: Stage) -> StageResult:
    """A stage without a single recorded turn to learn from: it ends with the weights that it begins
    with, so that the night goes on to what it can learn."""
    began, config = time.monotonic(), night.config.for_stage(stage)
    use = config.data.options.get("use", "turns")
    told = (
        f"stage {stage.name} had nothing to learn: no turn of the curriculum can be used as {use}; "
        "it hands on the weights that it began with"
    )
    logger.warning("%s", told)
    weights = first_weights(night, stage)
    assert weights is not None, "a stage of the student begins with weights"
    verify_manifest(weights)
    with staged_dir(night.final(stage.name)) as partial:
        shutil.copytree(weights, partial, dirs_exist_ok=True)
        result = StageResult(
            name=stage.name,
            objective=wiring.build_objective(config).name,
            steps=0,
            tokens=0,
            seconds=time.monotonic() - began,
            warnings=(told,),
        )
        write_json(partial / "stage.json", result)
        write_manifest(partial)
    night.progress.stage_done(stage.name, result.seconds, "nothing to learn")
    return result


def read_result(final: Path) -> StageResult:
    path = final / "stage.json"
    return from_json(StageResult, read_json(path), where=str(path))


def cache_key(night: Night, stage: Stage) -> str:
    """Hash of everything that the weights of a stage depend on."""
    import torch
    import transformers

    own = night.config.for_stage(stage)
    config, acts = own.to_dict(), stage.kind == "on_policy"
    chosen = (
        *("model", "teacher", "view", "reference", "objective", "data", "sampler"),
        *("sampling", "correction", "trainer", "monitor"),
        *(("reward", "analyst", "skills") if acts or _has_analyst(stage, own) else ()),
    )
    parts = {name: config[name] for name in chosen}
    named = {value for _, value in leaves(parts) if isinstance(value, str)}
    # What makes data is part of the key by its tasks, see `_outer_inputs`.
    inputs = {
        other.name: digest_file(weights_file(night.final(other.name)))
        for other in night.bootstrap_stages
        if other.target != "data" and f"{STAGE_PREFIX}{other.name}" in named
    }
    parts["model"] = {k: v for k, v in parts["model"].items() if k != "name"}
    parts["monitor"] = {k: v for k, v in parts["monitor"].items() if k != "warn"}
    return digest_json(
        {
            "format": CACHE_FORMAT,
            "stage": [stage.kind, stage.name, parts],
            "seed": night.config.run.seed,
            "inputs": inputs | _outer_inputs(night, stage, own),
            "versions": [torch.__version__, transformers.__version__],
        }
    )[:32]


def _has_analyst(stage: Stage, own: Config) -> bool:
    """Whether somebody writes about attempts: a stage of worked solutions of a teacher or a base
    has none."""
    return bool(own.analyst.name) and (stage.kind == "on_policy" or stage.target == "student")


def _outer_inputs(night: Night, stage: Stage, own: Config) -> dict[str, Any]:
    """What a name in the configuration stands for today: files, weights, libraries, a device."""
    found: dict[str, Any] = {}
    named: dict[str, Mapping[str, Any]] = {
        "model": {"path": own.model.path, "revision": own.model.revision}
    }
    named |= _models_in("teacher", own.teacher.options)
    named |= _models_in("reference", own.reference.options)
    if _has_analyst(stage, own):
        named |= _models_in("analyst", own.analyst.options)
    for role, options in named.items():
        path, adapter = str(options.get("path", "")), str(options.get("adapter", ""))
        if path and not path.startswith(STAGE_PREFIX):
            folder = night.locate(path, options.get("revision"))
            files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])
            found[role] = {file.name: digest_file(file) for file in files}
        if adapter and not adapter.startswith(STAGE_PREFIX):
            found[f"{role}.adapter"] = digest_file(weights_file(Path(adapter)))
    if own.data.name not in GENERATED:
        env = wiring.build_env(own, night.locate)
        found["tasks"] = getattr(env, "digest", None) or digest_json(list(env.tasks("train")))
    first = first_weights(night, stage)
    if first is not None:
        found["first"] = [digest_file(weights_file(first)), night.key(stage.name)]
    if own.model.kind == "adapter":
        found["peft"] = importlib.metadata.version("peft")
    if stage.kind == "on_policy" or _has_analyst(stage, own):
        found["engine"] = own.to_dict()["engine"]
    device = pick_device(own.model.device).type
    return found if device == "cpu" else {**found, "device": device}


def _models_in(label: str, options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Every table of options that names a model, teachers inside teachers included."""
    found = {label: options}
    for key, value in options.items():
        if isinstance(value, Mapping):
            found |= _models_in(f"{label}.{key}", value)
    return found


def _from_cache(night: Night, stage: Stage, kept: Path) -> StageResult:
    began = time.monotonic()
    try:
        verify_manifest(kept)
    except CheckpointError as error:
        logger.warning("made stage %s anew, its cache is damaged: %s", stage.name, error)
        shutil.rmtree(kept)
        return run_stage(night, stage)
    result = replace(read_result(kept), cached=True, seconds=time.monotonic() - began)
    with staged_dir(night.final(stage.name)) as partial:
        shutil.copytree(kept, partial, dirs_exist_ok=True)
        write_json(partial / "stage.json", result)
        write_manifest(partial)
    night.progress.stage_done(stage.name, result.seconds, "from the cache")
    return result
