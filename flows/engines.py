"""Engines of a night: one table, and one way to an engine that samples from the student.

An engine that shares the student's weights is made anew wherever one is needed. One with weights of
its own takes long to start: it lives until the process ends or another one is needed, and is fed.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.config import Config
from distill.engines.fed import FedEngine
from distill.engines.hf import HFEngine
from distill.engines.server_options import ServerOptions
from distill.engines.vllm_options import VLLMOptions
from distill.policy import STUDENT
from distill.protocols import RolloutEngine
from distill.rundir import digest_json, staged_dir, to_json
from distill.types import CheckpointRef
from flows.naming import construct
from flows.night import Night, Student, built, live_ref


@dataclass(frozen=True, kw_only=True, slots=True)
class HFOptions:
    """[engine] name = "hf": the exact reference engine in this process."""

    max_batch: int = 256
    """Replies generated at once."""


ENGINES: dict[str, type[Any]] = {"hf": HFOptions, "vllm": VLLMOptions, "server": ServerOptions}

_running: dict[str, RolloutEngine] = {}
"""At most one engine with weights of its own, by what it was started from."""


def engine_options(config: Config) -> Any:
    """The options of [engine], checked."""
    return construct(config.engine, ENGINES, "engine", config)


def shares_weights(options: Any) -> bool:
    """Whether an engine samples from the very tensors under training."""
    return isinstance(options, HFOptions)


def student_engine(
    night: Night,
    config: Config,
    student: Student,
    *,
    role: str = STUDENT,
    max_batch: int = 0,
) -> RolloutEngine:
    """An engine over a role of the student, which has its weights after the first `load`.

    `max_batch` replaces the option of the engine `hf`.
    """
    options = engine_options(config)
    if shares_weights(options):
        size = max_batch or options.max_batch
        return HFEngine(student.policy, role=role, pad_id=student.chat.pad_id, max_batch=size)
    return FedEngine(
        student.policy,
        student.chat.tokenizer,
        _folder(night),
        start=lambda ref: _started(night, config, student, options, ref),
        role=role,
        sleeps=getattr(options, "sleep", False) is True,  # an engine of one's own has a method
    )


def loaded_engine(
    night: Night, config: Config, student: Student, *, max_batch: int = 0
) -> RolloutEngine:
    """An engine that has the student's weights as they are now."""
    engine = student_engine(night, config, student, max_batch=max_batch)
    try:
        engine.load(live_ref(student, 0))
    except BaseException:
        engine.close()
        raise
    return engine


def close_engines() -> None:
    """End the engine that is still running, if any."""
    while _running:
        _, engine = _running.popitem()
        engine.close()


def _started(
    night: Night, config: Config, student: Student, options: Any, ref: CheckpointRef
) -> RolloutEngine:
    """The running engine that fits, or a new one in its place."""
    shape = {
        "engine": to_json(options),
        "model": to_json(config.model),
        "base": student.policy.base,
        "run": str(night.run.path),
    }
    key = digest_json(shape)
    if key not in _running:
        close_engines()
        _running[key] = _new_engine(night, config, student, options, ref)
    return _running[key]


def _new_engine(
    night: Night, config: Config, student: Student, options: Any, ref: CheckpointRef
) -> RolloutEngine:
    if isinstance(options, VLLMOptions):
        from distill.engines.vllm import VLLMEngine

        is_full = ref.kind == "full"
        return VLLMEngine(
            ref.path if is_full else _base_folder(night, config),
            options,
            base=student.policy.base,
            max_rank=0 if is_full else config.model.rank,
            trust_remote_code=config.model.trust_remote_code,
        )
    if isinstance(options, ServerOptions):
        from distill.engines.server import ServerEngine

        vocab_size, tokenizer = student.policy.head().vocab_size, student.chat.tokenizer
        return ServerEngine(options, vocab_size=vocab_size, tokenizer=tokenizer)
    own: RolloutEngine = options
    return own


def _base_folder(night: Night, config: Config) -> Path:
    """The folder of the model that adapters belong to; one that is made is written down first."""
    if config.model.path:
        return night.locate(config.model.path, config.model.revision)
    folder = night.run.path / "base"
    if not folder.exists():
        tokenizer, model = built(config)
        with staged_dir(folder) as partial:
            model.save_pretrained(str(partial))
            tokenizer.save_pretrained(str(partial))
    return folder


def _folder(night: Night) -> Path:
    """Where weights are published: in the run, or for weights that belong to none beside it."""
    if night.read_only or not night.run.path.is_dir():
        return Path(tempfile.mkdtemp(prefix="distill-engine-"))
    return night.run.path / "published"
