"""A stage that collapses keeps the weights from before it and says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import Command
from distill.checkpoint import list_checkpoints, verify_manifest
from distill.errors import CollapseError
from distill.models import weights_file
from distill.rundir import RunDir, digest_file, read_json
from flows.configs import load_config
from flows.nightly import run_nightly
from flows.progress import NoProgress

ABSURD = ["stage.opd.objective.name=opd", "stage.opd.trainer.lr=5", "stage.opd.monitor.patience=3"]
GUARDED = ["stage.opd.objective.name=opsa", "stage.opd.teacher.name=", "stage.opd.trainer.lr=0.1"]
STEPS = "stage.opd.trainer.steps=30"


def night(home: Path, *overrides: str) -> RunDir:
    """A `micro` night in this process."""
    config = load_config(["micro", *overrides])
    run = RunDir.create(home, config.run.preset)
    run.write_config(config, "")
    run_nightly(config, run=run, progress=NoProgress())
    return run


def resume(run: RunDir) -> dict[str, Any]:
    run_nightly(run.read_config(), run=run, progress=NoProgress())
    return dict(read_json(run.summary_path))


def test_an_absurd_learning_rate_fails_the_night_and_keeps_the_weights_before_it(warm_home):
    done = Command(warm_home)("nightly", "micro", STEPS, *ABSURD)
    assert done.returncode == 1, done.stderr
    (run,) = RunDir.all(warm_home)
    (kept,) = list_checkpoints(run.stage_dir("opd"))
    verify_manifest(kept)
    said = done.stderr.splitlines()[-1]
    record = read_json(run.stage_dir("opd") / "collapse.json")
    assert f"stage opd collapsed: at step {record['step']}" in said
    assert "share of replies cut at the token limit is 1, above 0.9" in said
    assert f"are kept in {kept.relative_to(warm_home)}" in said
    assert "lower trainer.lr" in said
    # One such step ruins everything: the last healthy weights are those that the stage began with.
    assert kept.name == "000000"
    assert digest_file(weights_file(kept)) == digest_file(weights_file(run.path / "start"))

    shown = Command(warm_home)("runs", "show", "--json")
    facts = json.loads(shown.stdout)
    assert facts["state"] == "failed"
    assert "stage opd collapsed" in facts["error"]
    assert "Failed: stage opd collapsed" in (run.path / "report.md").read_text()

    with pytest.raises(CollapseError, match=f"at step {record['step']} "):
        resume(run)


def test_a_guarded_objective_ends_early_with_the_same_weights_whenever_checkpoints_were_due(
    warm_home,
):
    run = night(warm_home, STEPS, *GUARDED)
    summary = read_json(run.summary_path)
    stage = next(s for s in summary["stages"] if s["name"] == "opd")
    assert 1 <= stage["steps"] < 30
    assert [w for w in summary["warnings"] if "collapsed" in w] == [stage["stopped"]]
    assert stage["stopped"].startswith("stage opd collapsed: at step ")
    report = (run.path / "report.md").read_text()
    assert stage["stopped"] in report
    assert "Stopped early: stage opd (see the warnings)." in report

    # As if killed on the way back, and without any checkpoint to go back to.
    shutil.rmtree(run.stage_dir("opd") / "final")
    shutil.rmtree(run.stage_dir("opd") / "checkpoints")
    shutil.rmtree(run.path / "gates")
    for path in (run.summary_path, run.eval_path("after")):
        path.unlink()
    resumed = resume(run)
    assert resumed["adapter_sha256"] == summary["adapter_sha256"]
    assert [w for w in resumed["warnings"] if "collapsed" in w] == [stage["stopped"]]


def test_the_weights_of_an_early_end_are_those_of_a_stage_that_was_only_as_long(warm_home):
    other = warm_home / "other"
    shutil.copytree(warm_home / "cache", other / "cache")
    watched = read_json(night(warm_home, STEPS, *GUARDED).summary_path)
    steps = next(s["steps"] for s in watched["stages"] if s["name"] == "opd")
    short = f"stage.opd.trainer.steps={steps}"
    plain = read_json(night(other, short, *GUARDED, "stage.opd.monitor.mode=off").summary_path)
    assert watched["adapter_sha256"] == plain["adapter_sha256"]
