"""Training stages as plain functions over a run directory. Every one can be repeated safely: what
is finished is returned from disk, what was interrupted continues at its last checkpoint."""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill.checkpoint import (
    Progress,
    load_newest,
    prune,
    save_checkpoint,
    verify_manifest,
    write_manifest,
)
from distill.config import Config, Stage
from distill.engines.hf import HFEngine
from distill.errors import CheckpointError, DataError
from distill.models import pick_device, save_weights, weights_file
from distill.protocols import RolloutEngine, Tracker
from distill.rollout import collect, demonstrate
from distill.rundir import (
    RunDir,
    digest_file,
    digest_json,
    from_json,
    read_json,
    staged_dir,
    write_json,
)
from distill.sampler import TaskSampler
from distill.segments import Segments
from distill.step import Once, Parts, StepReport, just_run, on_policy_step
from distill.tracking import FanOut, JsonlTracker, WandbTracker
from distill.trainer import Trainer, TrainerOptions
from distill.types import CheckpointRef, Rollout, Sampling, Task
from flows import wiring
from flows.night import FINAL, Night, Student, load_student

logger = logging.getLogger(__name__)

CACHE_FORMAT = 1
"""Part of every cache key: raise it when equal settings lead to other weights than before."""


GENERATED = ("world", "gym")
"""Environments whose options say everything about their tasks."""
CHECKED_TASKS = 20_000
"""Up to this many prompts are measured before the first step, so that a night fails at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """What a finished stage reports; stored as `stage.json` beside its weights."""

    name: str
    objective: str
    steps: int
    tokens: int
    seconds: float
    cached: bool = False


def run_stage(night: Night, stage: Stage) -> StageResult:
    """Train one stage to its end, or return its stored result."""
    final = night.final(stage.name)
    if final.exists():
        verify_manifest(final)
        return read_result(final)
    key = cache_key(night, stage) if stage.cache else None
    kept = night.home / "cache" / "stages" / key if key else None
    if kept is not None and kept.exists():
        return _from_cache(night, stage, kept)
    result = _train(night, stage)
    if kept is not None and not kept.exists():
        try:
            with staged_dir(kept) as partial:
                shutil.copytree(final, partial, dirs_exist_ok=True)
        except DataError:
            # A night of another model may have kept the same stage meanwhile: it serves both.
            if not kept.is_dir():
                raise
    return result


def read_result(final: Path) -> StageResult:
    path = final / "stage.json"
    return from_json(StageResult, read_json(path), where=str(path))


def cache_key(night: Night, stage: Stage) -> str:
    """Hash of everything that the weights of a stage depend on."""
    import torch
    import transformers

    own = night.config.for_stage(stage)
    config = own.to_dict()
    chosen = ("model", "teacher", "view", "objective", "data", "sampling", "trainer")
    inputs = {
        other.name: digest_file(weights_file(night.final(other.name)))
        for other in night.bootstrap_stages
        if f"{wiring.STAGE}{other.name}" in str(config)
    }
    parts = {name: config[name] for name in chosen}
    parts["model"] = {k: v for k, v in parts["model"].items() if k != "name"}
    return digest_json(
        {
            "format": CACHE_FORMAT,
            "stage": [stage.kind, stage.name, parts],
            "seed": night.config.run.seed,
            "inputs": inputs | _outer_inputs(night, stage, own),
            "versions": [torch.__version__, transformers.__version__],
        }
    )[:32]


def _outer_inputs(night: Night, stage: Stage, own: Config) -> dict[str, Any]:
    """What a name in the configuration stands for today: files, weights, libraries, a device."""
    found: dict[str, Any] = {}
    local = own.teacher.options if own.teacher.name == "local" else {}
    paths = {
        "model": (own.model.path, own.model.revision),
        "teacher": (str(local.get("path", "")), local.get("revision")),
    }
    for role, (path, revision) in paths.items():
        if path and not path.startswith(wiring.STAGE):
            folder = night.locate(path, revision)
            files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])
            found[role] = {file.name: digest_file(file) for file in files}
    adapter = str(local.get("adapter", ""))
    if adapter and not adapter.startswith(wiring.STAGE):
        found["adapter"] = digest_file(weights_file(Path(adapter)))
    if own.data.name not in GENERATED:
        found["tasks"] = digest_json(list(wiring.build_env(own).tasks("train")))
    first = _first_weights(night, stage)
    if first is not None:
        found["first"] = [digest_file(weights_file(first)), night.key(stage.name)]
    if own.model.kind == "adapter":
        found["peft"] = importlib.metadata.version("peft")
    if stage.kind == "on_policy":
        found["engine"] = own.to_dict()["engine"]
    device = pick_device(own.model.device).type
    return found if device == "cpu" else {**found, "device": device}


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


def _train(night: Night, stage: Stage) -> StageResult:
    config = night.config.for_stage(stage)
    folder = night.run.stage_dir(stage.name)
    student = load_student(night, config, _first_weights(night, stage))
    trainer = Trainer(student.policy, trainer_options(config))
    # Before the checkpoint is loaded: a self-teacher of full weights copies the first ones.
    parts = build_parts(night, stage, student, trainer)
    progress = load_newest(folder, student.policy, trainer)
    tracker = open_tracker(night.run, config, stage.name)
    segments = Segments(folder, progress.step + 1) if stage.kind == "on_policy" else None
    loop = _Loop(night=night, stage=stage, config=config, student=student, parts=parts)
    try:
        night.progress.stage_started(stage.name, config.trainer.steps)
        progress = loop.run(progress, segments, tracker)
    finally:
        tracker.close()
        if segments is not None:
            segments.close()
        if parts.engine is not None:
            parts.engine.close()
    result = StageResult(
        name=stage.name,
        objective=config.objective.name,
        steps=progress.step,
        tokens=progress.tokens,
        seconds=progress.seconds,
    )
    with staged_dir(folder / FINAL) as partial:
        save_weights(student.policy, student.chat.tokenizer, partial)
        write_json(partial / "stage.json", result)
        write_manifest(partial)
    night.progress.stage_done(stage.name, result.seconds)
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loop:
    """The steps of a stage, from a checkpoint to the last one."""

    night: Night
    stage: Stage
    config: Config
    student: Student
    parts: Parts

    def run(self, at: Progress, segments: Segments | None, tracker: Tracker) -> Progress:
        folder = self.night.run.stage_dir(self.stage.name)
        if self.parts.engine is not None:
            self.parts.engine.load(self._live(at.step))
        saved, saved_at, before = at.step, time.monotonic(), at.seconds
        began = saved_at
        while at.step < self.config.trainer.steps:
            step = at.step + 1
            once: Once = segments.at(step) if segments is not None else just_run
            report = on_policy_step(self.parts, step, once)
            at = Progress(
                step=step,
                policy_version=step,
                tokens=at.tokens + report.update.num_tokens,
                seconds=before + time.monotonic() - began,
            )
            row = metrics_row(report, self.config.objective.name)
            tracker.log(row | {"seconds": at.seconds}, step)
            self.night.progress.step(self.stage.name, step, row)
            last = step == self.config.trainer.steps
            if not last and self._due(step - saved, time.monotonic() - saved_at):
                if segments is not None:
                    segments.sync()
                save_checkpoint(
                    folder, self.student.policy, self.parts.trainer, self.student.chat.tokenizer, at
                )
                prune(folder, self.config.checkpoint.keep)
                saved, saved_at = step, time.monotonic()
        if segments is not None:
            segments.sync()
        return at

    def _due(self, steps: int, seconds: float) -> bool:
        rule = self.config.checkpoint
        return steps >= rule.every_steps or seconds >= rule.every_seconds

    def _live(self, step: int) -> CheckpointRef:
        return live_ref(self.student, step)


def live_ref(student: Student, step: int) -> CheckpointRef:
    """Names the weights in memory, for engines that share them."""
    return CheckpointRef(
        path=Path("live"),
        step=step,
        policy_version=step,
        base=student.policy.base,
        kind=student.policy.kind,
        digest="live",
    )


def _first_weights(night: Night, stage: Stage) -> Path | None:
    """Student stages continue one another, the first one the start of the night."""
    if stage.target != "student":
        return None
    names = [s.name for s in night.student_stages]
    position = names.index(stage.name)
    return night.final(names[position - 1]) if position else night.start


def trainer_options(config: Config) -> TrainerOptions:
    trainer = config.trainer
    return TrainerOptions(
        num_steps=trainer.steps,
        lr=trainer.lr,
        betas=(trainer.betas[0], trainer.betas[1]),
        weight_decay=trainer.weight_decay,
        warmup_steps=trainer.warmup_steps,
        schedule=trainer.schedule,
        min_lr_ratio=trainer.min_lr_ratio,
        grad_clip=trainer.grad_clip,
        micro_batch_tokens=trainer.micro_batch_tokens,
        epochs=trainer.epochs,
        minibatches=trainer.minibatches,
    )


def build_engine(config: Config, student: Student) -> RolloutEngine:
    options = wiring.engine_options(config)
    return HFEngine(student.policy, pad_id=student.chat.pad_id, max_batch=options.max_batch)


def build_parts(night: Night, stage: Stage, student: Student, trainer: Trainer) -> Parts:
    """Everything one step of the stage needs."""
    config = night.config.for_stage(stage)
    env = wiring.build_env(config)
    key = night.key(stage.name)
    tasks = env.tasks("train")
    if len(tasks) <= CHECKED_TASKS:
        student.chat.prompts([t.prompt for t in tasks])  # raises for one that does not fit
    sampler = TaskSampler(tasks, batch=config.trainer.batch, key=key)
    shared: dict[str, Any] = {
        "policy": student.policy,
        "objective": wiring.build_objective(config),
        "trainer": trainer,
        "stage": stage.name,
        "num_steps": config.trainer.steps,
        "seed": config.run.seed,
        "pad_id": student.chat.pad_id,
        "max_error_share": config.run.max_error_share,
    }
    if stage.kind == "sft":

        def worked(tasks: Sequence[Task], step: int) -> list[Rollout]:
            return demonstrate(tasks, student.chat, key=f"{key}/{step}")

        return Parts(tasks=sampler, rows=worked, **shared)
    current: dict[str, Task] = {}
    engine = build_engine(config, student)
    sampling = sampling_of(config)

    def act(tasks: Sequence[Task], step: int) -> list[Rollout]:
        return collect(tasks, env, engine, student.chat, sampling, key=f"{key}/{step}")

    def tasks_of(step: int) -> list[Task]:
        chosen = sampler(step)
        current.clear()
        current.update({t.id: t for t in chosen})
        return chosen

    teacher = wiring.build_teacher(config, student.policy, student.chat, night.locate)
    view = wiring.build_view(config, student.chat, current.__getitem__) if teacher else None
    return Parts(
        tasks=tasks_of,
        rows=act,
        engine=engine,
        publish=lambda step: live_ref(student, step),
        teacher=teacher,
        view=view,
        **shared,
    )


def sampling_of(config: Config) -> Sampling:
    sampling = config.sampling
    return Sampling(
        num_samples=sampling.num_samples,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )


def metrics_row(report: StepReport, objective: str) -> dict[str, float]:
    """One row of metrics.jsonl: the update, the rows it came from, and the divergence as `kl/mean`
    where the objective measures one."""
    update = report.update
    row = {
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "lr": update.lr,
        "num_tokens": update.num_tokens,
        "num_dropped": report.num_dropped,
        **report.sampled,
        **update.metrics,
    }
    for name in (f"{objective}/divergence", f"{objective}/reverse_kl"):
        if name in row:
            row["kl/mean"] = row[name]
    return row


def open_tracker(run: RunDir, config: Config, stage: str) -> Tracker:
    trackers: list[Tracker] = []
    if config.tracking.jsonl:
        trackers.append(JsonlTracker(run.metrics_path, stage=stage))
    if config.tracking.wandb != "off":
        trackers.append(
            WandbTracker(
                mode=config.tracking.wandb,
                project=config.tracking.project,
                run=run.name,
                stage=stage,
                folder=run.path,
                config=config.to_dict(),
            )
        )
    return FanOut(trackers)
