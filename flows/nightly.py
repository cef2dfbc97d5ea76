"""The main job as a Prefect flow, and the same plan without Prefect.

A night is a list of named, idempotent steps. Prefect adds a view, task names and artifacts; the
truth is on disk, so a restart never needs Prefect's database. The temporary local server talks to
nobody else and sends no telemetry.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distill.config import Config
from distill.errors import DistillError, PreflightError
from distill.leftovers import sweep_dead, sweep_partial
from distill.rundir import RunDir
from distill.types import Verdict
from evals.report import build
from flows import judging, registry, wiring
from flows.engines import close_engines
from flows.launch import FAILED
from flows.night import Night, begin, register_start, set_threads
from flows.orphans import end_orphans, record_as_they_start
from flows.progress import Progress
from flows.stages import run_stage

logger = logging.getLogger(__name__)

SERVER_PATIENCE = 180
"""Seconds that Prefect's local server may take to start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStep:
    """One task of the flow."""

    name: str
    run: Callable[[], Any]


def plan(night: Night, warnings: Sequence[str]) -> list[PlanStep]:
    """The steps of a night in order; each returns at once when its result is on disk."""
    steps = [
        PlanStep(name=s.name, run=partial(run_stage, night, s)) for s in night.bootstrap_stages
    ]
    steps.append(PlanStep(name="start", run=partial(register_start, night)))
    steps.append(PlanStep(name="evaluate before", run=partial(judging.evaluate, night, "before")))
    steps.append(PlanStep(name="evaluate teacher", run=partial(judging.evaluate, night, "teacher")))
    steps += [PlanStep(name=s.name, run=partial(run_stage, night, s)) for s in night.student_stages]
    steps.append(PlanStep(name="evaluate after", run=partial(judging.evaluate, night, "after")))
    steps.append(PlanStep(name="gate", run=partial(judging.judge, night)))
    steps.append(PlanStep(name="promote", run=partial(judging.promote, night)))
    steps.append(PlanStep(name="report", run=partial(judging.report, night, warnings)))
    return steps


def run_nightly(config: Config, *, run: RunDir, progress: Progress) -> Verdict:
    """Run or continue a night and return its verdict. Raises DistillError subclasses.

    One night at a time per model: the lock of the model is held throughout.
    """
    wiring.check(config)
    quiet_transformers()
    night = Night(config=config, run=run, progress=progress)
    with registry.model_lock(night.home, config.model.name), _collected_warnings() as warnings:
        sweep_partial(run.path)
        for shared in ("cache", "registry"):
            sweep_dead(night.home / shared)
        begin(night)
        set_threads(night)
        run.add_event("started")
        execute = _with_prefect if config.run.orchestrator == "prefect" else _plain
        try:
            execute(night, plan(night, warnings))
        except DistillError as error:
            run.add_event(FAILED, error=str(error))
            _report_failure(run)
            raise
        finally:
            close_engines()
        verdict = judging.judge(night)
        run.add_event("finished", verdict=verdict.decision)
    return verdict


def _report_failure(run: RunDir) -> None:
    """What there is of a report: why the night ended, and the curve up to there."""
    try:
        build(run.path)
    except DistillError as error:
        logger.warning("no report of the failed night: %s", error)


def _plain(night: Night, steps: list[PlanStep]) -> None:
    for step in steps:
        step.run()


def _with_prefect(night: Night, steps: list[PlanStep]) -> None:
    """The plan as a Prefect flow: one task run per step, artifacts for gate table and report."""
    quiet_prefect(night.home)
    servers = night.home / "cache" / "servers"
    end_orphans(servers)
    from prefect import flow, task
    from prefect.artifacts import create_markdown_artifact, create_table_artifact

    @flow(name="nightly", flow_run_name=night.run.name, validate_parameters=False)
    def nightly() -> None:
        for step in steps:
            # Results stay on disk where the stages put them; Prefect keeps none of its own.
            task(name=step.name, task_run_name=step.name, persist_result=False)(_only(step.run))()
        verdict = judging.judge(night)
        create_table_artifact(
            key="gate",
            table=[
                {
                    "domain": name,
                    "before": d.before,
                    "after": d.after,
                    "difference": d.difference,
                    "low": d.low,
                    "high": d.high,
                    "n": d.n,
                }
                for name, d in verdict.domains.items()
            ],
            description=f"{night.run.name}: {verdict.decision}",
        )
        report = (night.run.path / "report.md").read_text(encoding="utf-8")
        create_markdown_artifact(key="report", markdown=report)

    record = servers / f"{night.run.name}.json"
    record_as_they_start(record, "prefect.server", SERVER_PATIENCE)
    try:
        nightly()
    except RuntimeError as error:
        if "Prefect API server" not in str(error):
            raise
        raise PreflightError(
            f"Prefect's local server did not start ({error}); look into "
            f"{os.environ['PREFECT_HOME']}, or run the night without it: run.orchestrator=none"
        ) from error


def _only(run: Callable[[], Any]) -> Callable[[], None]:
    def call() -> None:
        run()

    return call


def quiet_prefect(home: Path) -> None:
    """Settings that must be in the environment before Prefect is imported; the user's own win."""
    defaults = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_CLI_PROMPT": "false",
        # The first start makes a database; a busy machine needs longer than the default 20 s.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(SERVER_PATIENCE),
        "PREFECT_HOME": str((home / "cache" / "prefect").resolve()),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)


def quiet_transformers() -> None:
    """Our own progress is enough: no bars for loading and saving a few tensors."""
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Warnings of the library while a night runs, for its report."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text not in found:
                found.append(text)

    handler = Collector(level=logging.WARNING)
    loggers = [logging.getLogger(n) for n in ("distill", "flows", "evals", "teachers", "skills")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield found
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
