"""One contender with one seed: a resumable loop that ends when its tokens are spent.

A step is the step of a night. Everything that is not a time or a size depends on the configuration
alone: a run that was killed at any moment ends with the same bits.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distill.checkpoint import Progress as At
from distill.checkpoint import load_newest, prune, save_checkpoint
from distill.config import Config
from distill.errors import CollapseError, ConfigError, DistillError
from distill.lock import Lock
from distill.monitor import Monitor
from distill.objectives.base import option_of
from distill.parts import Parts
from distill.rundir import append_jsonl, atomic_write, from_json, read_json, read_jsonl, write_json
from distill.segments import Segments
from distill.step import on_policy_step
from distill.trainer import Trainer
from distill.types import EvalReport
from evals.compare_page_facts import Ends, Point, Range, Run, Speed
from flows.acting import SkillPrompts
from flows.banking import eval_prompts
from flows.building import build_parts, trainer_options
from flows.compare_config import Comparison
from flows.compare_places import Bout, Places
from flows.compare_suite import Suite
from flows.configs import to_toml
from flows.judging import peak_rss_bytes
from flows.keeping import Learned, read_learned
from flows.night import Student, live_ref, load_student, set_threads
from flows.progress import Progress
from flows.training import metrics_row

RULES = ("tokens", "points", "tasks_per_domain", "metric", "forgetting")
"""Settings of [compare] that a run depends on."""
LOCK_FILE = "lock.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a seed's student is before any training; every curve begins here."""

    report: EvalReport
    kept: float | None
    teachers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Teacher -> domain -> accuracy; `all` is the mean over all tasks."""


def run_contender(
    comparison: Comparison,
    name: str,
    seed: int,
    *,
    places: Places,
    suite: Suite,
    progress: Progress,
) -> Run:
    """Train and evaluate, continue, or return what is finished. The seed must be prepared."""
    run = places.run(name, seed)
    result = run.path / "result.json"
    config = comparison.config(name, seed)
    with Lock(run.path / LOCK_FILE, f"process on {run.path}"):
        run.write_config(config, to_toml(config, f"contender {name}, seed {seed}"))
        _same_rules(run.path / "rules.json", comparison)
        if result.exists():
            return from_json(Run, read_json(result), where=str(result))
        night = Bout(config=config, run=run, progress=progress, shared=places.seed(seed))
        set_threads(night)
        start = from_json(Start, read_json(places.start(seed)), where=str(places.start(seed)))
        bout = _Running.build(comparison, name, night, suite, start)
        try:
            found = bout.to_the_end()
        finally:
            bout.close()
        write_json(result, found)
        # The curve is the result; its rollouts would be the largest part of the folder.
        shutil.rmtree(run.stage_dir(comparison.student.name) / "segments")
    return found


def _same_rules(path: Path, comparison: Comparison) -> None:
    """A folder belongs to one budget and one way of measuring."""
    rules = {key: getattr(comparison.settings, key) for key in RULES}
    if not path.exists():
        write_json(path, rules)
        return
    before = read_json(path)
    changed = [f"compare.{key}" for key in RULES if before.get(key) != rules[key]]
    if changed:
        raise ConfigError(
            f"{path.parent} belongs to another comparison; it differs in: {', '.join(changed)}; "
            "choose another --out, or the same values"
        )


@dataclass(kw_only=True, slots=True)
class _Running:
    """A contender on its way. `rows` has one entry per step that was made."""

    comparison: Comparison
    name: str
    night: Bout
    config: Config
    suite: Suite
    start: Start
    student: Student
    parts: Parts
    monitor: Monitor
    at: At
    rows: list[dict[str, Any]]
    segments: Segments
    watched: Mapping[str, Any] = field(default_factory=dict)
    stopped: str | None = None
    unsaved: int = 0
    saved_at: float = field(default_factory=time.monotonic)

    @classmethod
    def build(
        cls, comparison: Comparison, name: str, night: Bout, suite: Suite, start: Start
    ) -> _Running:
        stage = night.config.stage(comparison.student.name)
        config = night.config.for_stage(stage)
        student = load_student(night, config, None)
        trainer = Trainer(student.policy, trainer_options(config))
        parts = build_parts(night, stage, student, trainer)
        folder = night.run.stage_dir(stage.name)
        at = load_newest(folder, student.policy, trainer)
        if parts.sampler is not None:
            parts.sampler.restore(at.sampler)
        running = cls(
            comparison=comparison,
            name=name,
            night=night,
            config=config,
            suite=suite,
            start=start,
            student=student,
            parts=parts,
            monitor=Monitor(
                options=config.monitor,
                stage=name,
                guarded=option_of(parts.objective, "guarded", False),
            ),
            at=at,
            rows=_rows_until(night.run.path / "steps.jsonl", at.step),
            segments=Segments(folder, at.step + 1),
        )
        for row in running.rows:
            running._watch(row)
        return running

    def close(self) -> None:
        self.segments.close()
        if self.parts.engine is not None:
            self.parts.engine.close()

    # -- the loop ------------------------------------------------------------------------------

    def to_the_end(self) -> Run:
        settings, label = self.comparison.settings, f"{self.name} (seed {self.config.run.seed})"
        began = time.monotonic()
        self.night.progress.stage_started(label, settings.points, "point")
        if self.parts.engine is not None:
            self.parts.engine.load(live_ref(self.student, self.at.step))
        self._evaluate_if_due()
        forget_peak()
        while not self.is_over:
            try:
                row = self._step(self.at.step + 1)
            except DistillError as error:
                if type(error) not in (DistillError, CollapseError):
                    raise
                # A broken run is a result: its curve counts up to here.
                self.stopped = str(error)
                break
            self.night.progress.step(label, self.point, row)
            if self._is_due() or self._checkpoint_due():
                self._save()
                self._evaluate_if_due()
                forget_peak()
        found = self._result()
        note = f"{found.curve[-1].greedy:.0%} greedy"
        self.night.progress.stage_done(label, time.monotonic() - began, found.stopped or note)
        return found

    @property
    def point(self) -> int:
        """How many of the evenly spaced points have been reached."""
        settings = self.comparison.settings
        return min(settings.points, self.at.tokens * settings.points // settings.tokens)

    @property
    def is_over(self) -> bool:
        """Budget spent, collapsed, or more steps than the configuration allows."""
        if self.stopped is None and self.point < self.comparison.settings.points:
            if self.at.step < self.parts.num_steps:
                return False
            self.stopped = (
                f"trainer.steps = {self.at.step} came first: {self.at.tokens:,} of "
                f"{self.comparison.settings.tokens:,} tokens"
            )
        return True

    def _step(self, step: int) -> dict[str, Any]:
        began = time.perf_counter()
        report = on_policy_step(self.parts, step, self.segments.at(step))
        seconds = time.perf_counter() - began
        row = metrics_row(report, self.parts.objective.name)
        spent = tokens_of(row)
        row |= {"step": step, "spent": spent, "seconds": seconds, "peak": peak_rss()}
        self.at = At(
            step=step,
            policy_version=step,
            tokens=self.at.tokens + spent,
            seconds=self.at.seconds + seconds,
            sampler=self.parts.sampler.state if self.parts.sampler else {},
        )
        self.rows.append(row)
        self.unsaved += 1
        self._watch(row)
        return row

    def _watch(self, row: Mapping[str, Any]) -> None:
        """Pure in the rows, so a resume repeats it instead of storing its state."""
        numbers = {k: float(v) for k, v in row.items() if isinstance(v, int | float)}
        found = self.monitor.watch(int(row["step"]), numbers, self.watched)
        self.watched = found.state
        if found.collapse is not None:
            self.stopped = found.collapse.text

    def _is_due(self) -> bool:
        """Whether the last step reached a point, or is the last one."""
        settings = self.comparison.settings
        if not self.rows or self.stopped is not None:
            return True
        before = self.at.tokens - int(self.rows[-1]["spent"])
        return self.point > min(settings.points, before * settings.points // settings.tokens)

    def _checkpoint_due(self) -> bool:
        rule = self.config.checkpoint
        waited = time.monotonic() - self.saved_at
        return self.unsaved >= rule.every_steps or waited >= rule.every_seconds

    # -- what is kept --------------------------------------------------------------------------

    def _save(self) -> None:
        """Rows, rollouts and weights become durable together."""
        folder = self.night.run.stage_dir(self.comparison.student.name)
        self.segments.sync()
        new = self.rows[len(self.rows) - self.unsaved :]
        append_jsonl(self.night.run.path / "steps.jsonl", new, sync=True)
        tokenizer = self.student.chat.tokenizer
        save_checkpoint(folder, self.student.policy, self.parts.trainer, tokenizer, self.at)
        prune(folder, self.config.checkpoint.keep)
        self.unsaved, self.saved_at = 0, time.monotonic()

    def _evaluate_if_due(self) -> None:
        if not self._is_due():
            return
        path = self._eval_path(self.at.step)
        if path.exists():
            return
        report, prompts = self.start.report, self._prompts()
        if self.at.step or prompts is not None:
            label = f"{self.name} step {self.at.step}"
            report = self.suite.measure(self.student, label, prompts)
        point = replace(_point(self.suite, report), step=self.at.step, tokens=self.at.tokens)
        found = {"values": self.suite.values(report), "turns": self.suite.turns(report)}
        write_json(path, {"point": replace(point, point=self.point), **found})

    def _prompts(self) -> SkillPrompts | None:
        """The skills that stand in the prompts of the present step."""
        stage, step = self.comparison.student, self.at.step
        return eval_prompts(self.night, self.config, stage, self.student, start=False, step=step)

    def _withheld(self) -> float | None:
        """Accuracy at the end without the skills; None where none are shown."""
        if self._prompts() is None:
            return None
        values = self.suite.values(self.suite.measure(self.student, f"{self.name} withheld"))
        return sum(values) / len(values)

    def _learned(self) -> Learned:
        """What was learned in words; nothing for a contender without it."""
        folder = self.night.run.stage_dir(self.comparison.student.name)
        if self.parts.closing is not None:
            self.parts.closing(self.at.step)
        return read_learned(folder) or Learned()

    def _eval_path(self, step: int) -> Path:
        return self.night.run.path / "evals" / f"{step:06d}.json"

    def _result(self) -> Run:
        if self.unsaved:  # a broken run ends between two points
            self._save()
        self._evaluate_if_due()
        stored = [read_json(p) for p in sorted((self.night.run.path / "evals").glob("*.json"))]
        curve = tuple(from_json(Point, e["point"], where="a stored evaluation") for e in stored)
        kept = None
        if self.start.kept is not None:
            end = self.suite.kept(self.student, self.name)
            kept = Ends(start=self.start.kept, end=self.start.kept if end is None else end)
        seconds = sum(float(row["seconds"]) for row in self.rows)
        learned = self._learned()
        return Run(
            contender=self.name,
            seed=self.config.run.seed,
            stopped=self.stopped,
            steps=self.at.step,
            tokens=self.at.tokens,
            num_dropped=int(sum(row["num_dropped"] for row in self.rows)),
            curve=curve,
            start=tuple(stored[0]["values"]),
            end=tuple(stored[-1]["values"]),
            grad_norm=_range(self.rows, "grad_norm") or Range(low=0.0, high=0.0),
            entropy=_range(self.rows, "entropy") or _range(self.rows, "rollout/surprise"),
            kept=kept,
            speed=Speed(
                seconds=seconds,
                seconds_per_step=seconds / max(1, len(self.rows)),
                peak_rss_bytes=int(max((row["peak"] for row in self.rows), default=0)),
            ),
            withheld=self._withheld(),
            notes_valid=learned.valid_rate,
            notes_correct=learned.correct_rate,
            skills_added=len(learned.evolved),
            end_turns=tuple(stored[-1].get("turns", ())),
        )


def tokens_of(row: Mapping[str, Any]) -> int:
    """What a step costs: every sampled token, of rows that a refill or a view dropped as well;
    worked solutions that are read; what a text-only teacher or an analyst wrote; and what was
    sampled to find and measure new skills."""
    wrote = ("rollout/tokens", "audit/teacher_tokens", "notes/tokens", "skills/evolve_tokens")
    return int(sum(row.get(name, 0) for name in wrote))


def _point(suite: Suite, report: EvalReport) -> Point:
    sampled = report.metrics.get("sampled")
    return Point(
        point=0,
        step=0,
        tokens=0,
        greedy=report.metrics["greedy"].mean,
        sampled=None if sampled is None else sampled.mean,
        domains=suite.by_domain(report),
        turns=report.metrics["turns"].mean if "turns" in report.metrics else None,
    )


def _rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The stored rows of the steps that the weights have made; later ones are cut off."""
    stored = read_jsonl(path) if path.exists() else []
    kept = [row for row in stored if row["step"] <= step]
    if len(kept) < len(stored):
        atomic_write(path, "")
        append_jsonl(path, kept, sync=True)
    return kept


def _range(rows: Sequence[Mapping[str, Any]], key: str) -> Range | None:
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return Range(low=min(values), high=max(values)) if values else None


def forget_peak() -> None:
    """Let the peak of resident memory start anew, where Linux allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_rss() -> int:
    """Largest resident memory since `forget_peak`; of the whole process on other systems."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    return peak_rss_bytes()
