"""Objectives side by side: the same student, teacher, tasks and number of sampled tokens.

`run_comparison` is the whole of it, as a library call: prepare each seed, run every contender,
write `results.json` and `compare.html`. Every part can be repeated; what is finished is read from
disk.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from distill.config import Config
from distill.errors import ConfigError
from distill.leftovers import sweep_dead
from distill.lock import Lock
from distill.rundir import atomic_write, from_json, read_json, write_json
from evals.compare_page import render
from evals.compare_page_facts import About, Results, Run
from flows import wiring
from flows.compare_config import Comparison
from flows.compare_places import Bout, Places
from flows.compare_pool import run_in_processes
from flows.compare_run import LOCK_FILE, Start, run_contender
from flows.compare_suite import Suite, build_suite
from flows.compare_table import summarise
from flows.configs import to_toml
from flows.night import Night, Student, load_student, set_threads
from flows.nightly import quiet_transformers
from flows.progress import Progress
from flows.stages import run_stage


def check(comparison: Comparison) -> None:
    """Refuse what cannot run, before any model is built. Errors name the contender."""
    seed = comparison.settings.seeds[0]
    template = comparison.template(seed)
    for stage in template.stages:
        if stage.target != "student":
            wiring.check_stage(template.for_stage(stage), stage)
    for name in comparison.names:
        config = comparison.config(name, seed)
        stage = config.stage(comparison.student.name)
        try:
            wiring.check_stage(config.for_stage(stage), stage)
        except ConfigError as error:
            raise ConfigError(f"contender {name!r}: {error}") from error


def run_comparison(
    comparison: Comparison, *, places: Places, progress: Progress, jobs: int = 1, command: str = ""
) -> Results:
    """Run or continue a comparison and write what it found. Raises DistillError subclasses.

    With `jobs` > 1 contenders run in as many processes, each with its own number of threads.
    """
    check(comparison)
    quiet_transformers()
    with Lock(places.out / LOCK_FILE, f"comparison in {places.out}"):
        for folder in (places.out, places.home / "cache"):
            sweep_dead(folder)
        pairs = [(name, s) for s in comparison.settings.seeds for name in comparison.names]
        for seed in comparison.settings.seeds:
            prepare_seed(comparison, seed, places=places, progress=progress)
        if jobs > 1:
            run_in_processes(comparison, pairs, places=places, progress=progress, jobs=jobs)
        runs = run_all(comparison, pairs, places=places, progress=progress)
        results = gather(comparison, runs, places=places, command=command)
        write_json(places.results, results)
        atomic_write(places.page, render(results))
    return results


def run_all(
    comparison: Comparison,
    pairs: Sequence[tuple[str, int]],
    *,
    places: Places,
    progress: Progress,
) -> list[Run]:
    """The runs of these contenders and seeds, one after the other; finished ones from disk."""
    suites: dict[int, Suite] = {}
    runs = []
    for name, seed in pairs:
        if seed not in suites:
            suites[seed] = build_suite(comparison, seed)
        run = run_contender(
            comparison, name, seed, places=places, suite=suites[seed], progress=progress
        )
        runs.append(run)
    return runs


def prepare_seed(comparison: Comparison, seed: int, *, places: Places, progress: Progress) -> None:
    """Bootstrap the models of a seed and measure where its student starts. Idempotent."""
    path = places.start(seed)
    config = comparison.template(seed)
    run = places.seed(seed)
    with ExitStack() as stack:
        stack.enter_context(Lock(run.path / LOCK_FILE, f"process on {run.path}"))
        run.write_config(config, to_toml(config, f"bootstrap of seed {seed}"))
        night = Night(config=config, run=run, progress=progress)
        set_threads(night)
        for stage in night.bootstrap_stages:
            run_stage(night, stage)
        if path.exists():
            return
        suite = build_suite(comparison, seed)
        own = config.for_stage(config.stage(comparison.student.name))
        bout = Bout(config=config, run=run, progress=progress, shared=run)
        began = time.monotonic()
        label = f"evaluate seed {seed}"
        progress.stage_started(label, 0)
        student = load_student(bout, own, None)
        start = Start(
            report=suite.measure(student, "start"),
            kept=suite.kept(student, "start"),
            teachers={
                stage.name: _accuracy(suite, _teacher(night, stage.name))
                for stage in night.bootstrap_stages
                if stage.target == "teacher"
            },
        )
        write_json(path, start)
        told = {"start": start.report.metrics["greedy"].mean}
        told |= {name: found["all"] for name, found in start.teachers.items()}
        note = ", ".join(f"{name} {value:.0%}" for name, value in told.items())
        progress.stage_done(label, time.monotonic() - began, note)


def gather(
    comparison: Comparison, runs: Sequence[Run], *, places: Places, command: str = ""
) -> Results:
    """Everything that `results.json` holds."""
    settings = comparison.settings
    starts = {
        str(seed): from_json(Start, read_json(places.start(seed)), where="start.json")
        for seed in settings.seeds
    }
    return Results(
        name=places.out.name,
        metric=settings.metric,
        level=settings.level,
        tokens=settings.tokens,
        num_tasks=len(runs[0].start),
        seeds=settings.seeds,
        contenders=tuple(
            about(name, comparison.config(name, settings.seeds[0]), comparison.student.name)
            for name in comparison.names
        ),
        runs=tuple(runs),
        table=summarise(
            runs,
            comparison.names,
            baseline=comparison.baseline,
            level=settings.level,
            metric=settings.metric,
        ),
        teachers={seed: start.teachers for seed, start in starts.items()},
        seconds=sum(run.speed.seconds for run in runs),
        command=command,
    )


def about(name: str, config: Config, stage: str) -> About:
    own = config.for_stage(config.stage(stage))
    return About(
        name=name,
        objective=_told(own.objective.name, own.objective.options),
        teacher=_told(own.teacher.name, own.teacher.options) if own.teacher.name else "none",
        view=_told(own.view.name, own.view.options) if own.teacher.name else "none",
        lr=own.trainer.lr,
    )


def _told(name: str, options: Any) -> str:
    values = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"{name} ({values})" if values else name


def _teacher(night: Night, stage: str) -> Student:
    own = night.config.for_stage(night.config.stage(stage))
    return load_student(night, own, night.final(stage))


def _accuracy(suite: Suite, student: Student) -> Mapping[str, float]:
    report = suite.measure(student, "teacher")
    return {"all": report.metrics[suite.metric].mean, **suite.by_domain(report)}
