"""Training one stage: its steps from a checkpoint to the last one, and back before a collapse."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from distill import parallel
from distill.checkpoint import Keeper, Progress, drop_after, prune, write_manifest
from distill.config import Config, Stage
from distill.errors import CollapseError, DistillError
from distill.models import save_weights
from distill.monitor import Collapse, Monitor
from distill.objectives.base import option_of
from distill.protocols import Tracker
from distill.rundir import RunDir, from_json, read_json, staged_dir, write_json
from distill.segments import Segments
from distill.step import Once, Parts, StepReport, just_run, on_policy_step
from distill.tracking import FanOut, JsonlTracker, WandbTracker
from distill.trainer import Trainer
from flows import together
from flows.building import build_parts, trainer_options
from flows.keeping import Learned, read_learned
from flows.night import Night, Student, live_ref, load_student

logger = logging.getLogger(__name__)

COLLAPSE = "collapse.json"
"""Beside a stage's checkpoints: why it ended early, and where it went back to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """What a finished stage reports; stored as `stage.json` beside its weights."""

    name: str
    objective: str
    steps: int
    tokens: int
    seconds: float
    cached: bool = False
    stopped: str | None = None
    """Why the monitor ended it before its last step."""
    warnings: tuple[str, ...] = ()
    """What the monitor warned of."""
    learned: Learned | None = None
    """What it learned in words, where somebody wrote."""


def train(night: Night, stage: Stage) -> StageResult:
    """Train to the last step or, where the monitor finds a collapse, to the last healthy one.

    A collapse is recorded first, so that a stage that is killed on the way back goes back as well.
    """
    record = night.run.stage_dir(stage.name) / COLLAPSE
    done: StageResult | Collapse | None = None
    if not record.exists():
        done = _attempt(night, stage)
        if isinstance(done, Collapse):
            write_json(record, done)
    if not isinstance(done, StageResult):
        back = from_json(Collapse, read_json(record), where=str(record))
        if back.action == "stop":  # else the error says it
            logger.warning("%s", back.text)
        done = _attempt(night, stage, back, announce=done is None)
    assert isinstance(done, StageResult), "nothing is watched on the way back"
    return done


def _attempt(
    night: Night, stage: Stage, back: Collapse | None = None, *, announce: bool = True
) -> StageResult | Collapse:
    """Train from the newest checkpoint on; with `back`, only up to its last healthy step.

    The steps before a collapse are repeated from the stored rollouts: where a stage ends depends
    on what happened, never on when a checkpoint happened to be due.
    """
    config = night.config.for_stage(stage)
    folder = night.run.stage_dir(stage.name)
    if back is not None:
        drop_after(folder, back.healthy_step)
    together.announce(night, stage)
    student, trainer, keeper = begin_stage(night, stage)
    line = together.open_line(student, trainer, keeper)
    # Before the checkpoint is loaded: a self-teacher of full weights copies the first ones.
    parts = build_parts(night, stage, student, trainer)
    together.require_in_step(line, parts)
    progress = keeper.load()
    if parts.sampler is not None:
        parts.sampler.restore(progress.sampler)
    tracker = open_tracker(night.run, config, stage.name)
    segments = Segments(folder, progress.step + 1) if stage.kind == "on_policy" else None
    loop = _Loop(
        night=night,
        stage=stage,
        config=config,
        student=student,
        keeper=keeper,
        parts=parts,
        back=back,
    )
    try:
        if announce:
            night.progress.stage_started(stage.name, loop.last)
        progress, collapse = loop.run(progress, segments, tracker)
        fails = back is not None and back.action == "fail"
        if collapse is None and parts.closing is not None and not fails:
            parts.closing(progress.step)
    finally:
        tracker.close()
        if segments is not None:
            segments.close()
        if parts.ahead is not None:
            parts.ahead.close()
        if parts.engine is not None:
            parts.engine.close()
    if collapse is None and fails:
        assert back is not None
        raise _failure(back, keeper.save(progress))
    done = _finish(loop, progress) if collapse is None else collapse
    together.close_line(line)
    return done


def begin_stage(night: Night, stage: Stage) -> tuple[Student, Trainer, Keeper]:
    """The student of a stage with its first weights, spread over the processes where there are
    several, what trains it, and what keeps its checkpoints."""
    config = night.config.for_stage(stage)
    student = load_student(night, config, first_weights(night, stage))
    policy = student.policy
    policy.shard(parallel.current())
    trainer = Trainer(policy, trainer_options(config))
    folder, tokenizer = night.run.stage_dir(stage.name), student.chat.tokenizer
    keeper = Keeper(folder=folder, policy=policy, trainer=trainer, tokenizer=tokenizer)
    return student, trainer, keeper


def _finish(loop: _Loop, progress: Progress) -> StageResult:
    """Write the finished weights of a stage and what they are."""
    night, stage, student, back = loop.night, loop.stage, loop.student, loop.back
    if not progress.tokens and back is None:
        raise DistillError(
            f"stage {stage.name} trained on no token in {progress.step} steps: every reply failed "
            "or had no view; look at num_dropped in metrics.jsonl"
        )
    told = back.warnings if back else loop.monitor.warnings(progress.monitor, progress.step)
    result = StageResult(
        name=stage.name,
        objective=loop.parts.objective.name,
        steps=progress.step,
        tokens=progress.tokens,
        seconds=progress.seconds,
        stopped=f"{back.text}; it ended with the weights of step {progress.step}" if back else None,
        warnings=told,
        learned=read_learned(night.run.stage_dir(stage.name)),
    )
    with staged_dir(night.final(stage.name)) as partial:
        save_weights(student.policy, student.chat.tokenizer, partial)
        write_json(partial / "stage.json", result)
        write_manifest(partial)
    note = f"stopped after step {progress.step} of {loop.parts.num_steps}" if back else ""
    night.progress.stage_done(stage.name, result.seconds, note)
    return result


def _failure(back: Collapse, kept: Path) -> CollapseError:
    return CollapseError(
        f"{back.text}; the weights of step {back.healthy_step}, the last before it, are kept in "
        f"{kept}; start a new run with a lower trainer.lr, or with monitor.on_abort=stop to go on "
        "from those weights; monitor.mode=warn only warns. A resume ends here again"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loop:
    """The steps of a stage, from a checkpoint to the last one."""

    night: Night
    stage: Stage
    config: Config
    student: Student
    keeper: Keeper
    parts: Parts
    back: Collapse | None = None
    """Set when the steps before a collapse are repeated."""

    @property
    def last(self) -> int:
        return self.back.healthy_step if self.back else self.parts.num_steps

    @property
    def monitor(self) -> Monitor:
        guarded = bool(option_of(self.parts.objective, "guarded", False))
        return Monitor(options=self.config.monitor, stage=self.stage.name, guarded=guarded)

    def run(
        self, at: Progress, segments: Segments | None, tracker: Tracker
    ) -> tuple[Progress, Collapse | None]:
        folder = self.night.run.stage_dir(self.stage.name)
        if self.parts.engine is not None:
            self.parts.engine.load(live_ref(self.student, at.step))
        saved, saved_at, before = at.step, time.monotonic(), at.seconds
        began, monitor = saved_at, self.monitor
        while at.step < self.last:
            step = at.step + 1
            once: Once = segments.at(step) if segments is not None else just_run
            later = segments.later(step + 1) if segments is not None else None
            report = on_policy_step(self.parts, step, once, later)
            row = metrics_row(report, self.parts.objective.name)
            found = monitor.watch(step, row, at.monitor)
            at = Progress(
                step=step,
                policy_version=step,
                tokens=at.tokens + report.update.num_tokens,
                seconds=before + time.monotonic() - began,
                monitor=found.state,
                sampler=self.parts.sampler.state if self.parts.sampler else {},
            )
            tracker.log(row | {"seconds": at.seconds}, step)
            self.night.progress.step(self.stage.name, step, row)
            if self.back is None:
                for text in found.warnings:
                    logger.warning("%s", text)
                if found.collapse is not None:
                    if segments is not None:
                        segments.sync()
                    return at, found.collapse
            if step < self.last and self._due(step - saved, time.monotonic() - saved_at):
                if segments is not None:
                    segments.sync()
                self.keeper.save(at)
                if not found.is_suspect:
                    # The newest weights have not been seen at work yet: one before them stays.
                    least = 2 if monitor.can_abort else 1
                    prune(folder, max(least, self.config.checkpoint.keep))
                saved, saved_at = step, time.monotonic()
        if segments is not None:
            segments.sync()
        return at, None

    def _due(self, steps: int, seconds: float) -> bool:
        rule = self.config.checkpoint
        return steps >= rule.every_steps or seconds >= rule.every_seconds


def first_weights(night: Night, stage: Stage) -> Path | None:
    """Student stages continue one another, the first one the start of the night."""
    if stage.target != "student":
        return None
    names = [s.name for s in night.student_stages]
    position = names.index(stage.name)
    return night.final(names[position - 1]) if position else night.start


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
    for part in objective.split("+"):
        for name in (f"{part}/divergence", f"{part}/reverse_kl"):
            if name in row:
                row.setdefault("kl/mean", row[name])
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
