"""Commands that train: nightly, train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.options import Arguments, Home, Json
from flows.output import print_json, print_verdict

if TYPE_CHECKING:
    from distill.config import Config

Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue a run, named as the first argument, or else the newest unfinished one.",
    ),
]
StageName = Annotated[str, typer.Option(help="Only this stage, and what it needs.")]


def register(app: typer.Typer) -> None:
    app.command()(nightly)
    app.command()(train)


def nightly(
    arguments: Arguments = None, resume: Resume = False, as_json: Json = False, home: Home = Path()
) -> int:
    """The main job: train, evaluate, judge, promote or not, report. Exit code 3: not promoted."""
    from flows.launch import choose_run, open_run
    from flows.progress import open_progress
    from flows.together import follow, is_follower, leading

    if is_follower():
        follow()
        return 0
    config, old = choose_run("nightly", arguments or [], resume, home)
    from flows import wiring  # loads torch, so what can be wrong without it is said before
    from flows.nightly import run_nightly

    wiring.check(config)
    argv = ["distill", *sys.argv[1:]]
    with (
        leading(),
        open_run(config, subcommand="nightly", argv=argv, resume=old) as run,
        open_progress() as progress,
    ):
        progress.message(f"run {run.path}; if interrupted: distill nightly --resume {run.name}")
        verdict = run_nightly(config, run=run, progress=progress)
    if as_json:
        print_json({"run": run.name, "path": run.path, "verdict": verdict})
    else:
        if verdict is not None:
            print_verdict(verdict)
        print(f"report: {run.path / 'report.html'}")
    return 0 if verdict is None or verdict.decision == "promote" else 3


def train(
    arguments: Arguments = None,
    stage: StageName = "",
    resume: Resume = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would run.")] = False,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Train one stage without evaluation, gate or promotion."""
    from flows.launch import TRAINED, choose_run, open_run
    from flows.progress import open_progress
    from flows.together import follow, is_follower, leading

    if is_follower():
        return follow()
    config, old = choose_run("train", arguments or [], resume, home)
    chosen = config.stage(stage) if stage else config.last_student()
    from flows import single, wiring  # loads torch, so what can be wrong without it is said before

    wiring.check(config)
    if dry_run:
        _describe(config.for_stage(chosen), as_json)
        return
    argv = ["distill", *sys.argv[1:]]
    with (
        leading(),
        open_run(config, subcommand="train", argv=argv, resume=old) as run,
        open_progress() as progress,
    ):
        progress.message(f"run {run.path}; if interrupted: distill train --resume {run.name}")
        weights = single.train(config, chosen, run=run, progress=progress)
        run.add_event(TRAINED, stage=chosen.name)
    if as_json:
        print_json({"run": run.name, "stage": chosen.name, "weights": weights})
    else:
        print(weights)


def _describe(config: Config, as_json: bool) -> None:
    stage = config.stages[0]
    facts = {
        "stage": stage.name,
        "kind": stage.kind,
        "model": config.model.path or "built from [model.build]",
        "teacher": config.teacher.name or None,
        "view": config.view.name,
        "objective": config.objective.name,
        "data": config.data.name,
        "steps": config.trainer.steps,
        "replies_per_step": config.trainer.batch * config.sampling.num_samples,
    }
    if as_json:
        print_json(facts)
    else:
        for name, value in facts.items():
            print(f"{name}: {value}")
