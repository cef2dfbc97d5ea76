"""Nights whose draws depend on rewards, or whose rollouts come from a copy, are continued."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from distill.checkpoint import list_checkpoints
from distill.curriculum.samplers import Drawn
from distill.rundir import RunDir, read_json, read_jsonl
from distill.segments import stored
from distill.types import Rollout
from flows.building import tasks_at
from flows.configs import load_config
from flows.night import Night
from flows.nightly import run_nightly
from flows.progress import NoProgress

COMMON = (
    "stage.opd.trainer.steps=7",
    "stage.opd.checkpoint.every_steps=2",
    "stage.opd.checkpoint.every_seconds=1000",
    "stage.opd.checkpoint.keep=9",
)
NIGHTS = {
    "kalman": ('stage.opd.sampler={name="kalman", candidates=40}',),
    "refill": ('stage.opd.sampler={name="refill", rounds=2}',),
    "edge": ('stage.opd.sampler={name="edge", low=0.1, high=0.9}', "stage.opd.sampling.refresh=3"),
    "staged": ('stage.opd.sampler={name="staged"}', "stage.opd.sampling.refresh=4"),
}


def night(home: Path, *overrides: str) -> RunDir:
    config = load_config(["micro", *COMMON, *overrides])
    run = RunDir.create(home, config.run.preset)
    run.write_config(config, "")
    run_nightly(config, run=run, progress=NoProgress())
    return run


def sha(run: RunDir) -> str:
    return str(read_json(run.summary_path)["adapter_sha256"])


def states(run: RunDir) -> dict[str, Any]:
    folder = run.stage_dir("opd")
    return {p.name: read_json(p / "state.json")["sampler"] for p in list_checkpoints(folder)}


def undo(run: RunDir, step: int) -> None:
    """As if the process had been killed after the checkpoint of a step, before the end."""
    shutil.rmtree(run.stage_dir("opd") / "final")
    shutil.rmtree(run.path / "gates", ignore_errors=True)
    for path in (run.summary_path, run.eval_path("after")):
        path.unlink()
    for path in list_checkpoints(run.stage_dir("opd")):
        if int(path.name) > step:
            shutil.rmtree(path)


def forget_rollouts(run: RunDir, step: int) -> None:
    """As if what was stored after a step had not reached the disk."""
    for path in (run.stage_dir("opd") / "segments").glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(x for x in lines if int(x.split(",")[0].split(":")[1]) <= step))


@pytest.mark.parametrize("name", NIGHTS)
def test_a_resumed_night_draws_the_same_prompts_and_ends_with_the_same_weights(name, warm_home):
    run = night(warm_home, *NIGHTS[name])
    expected, kept = sha(run), states(run)
    rollouts = dict(stored(run.stage_dir("opd"), "rollouts", Rollout))
    remembers = name not in ("staged",)
    assert all(bool(state) is remembers for state in kept.values())

    undo(run, 2)  # steps 3 to 7 are repeated from their stored rollouts
    run_nightly(run.read_config(), run=run, progress=NoProgress())
    assert (sha(run), states(run)) == (expected, kept)

    undo(run, 4)
    forget_rollouts(run, 5)  # and steps 6 and 7 are played again
    run_nightly(run.read_config(), run=run, progress=NoProgress())
    assert (sha(run), states(run)) == (expected, kept)
    assert dict(stored(run.stage_dir("opd"), "rollouts", Rollout)) == rollouts
    told = [row for row in read_jsonl(run.metrics_path) if row["stage"] == "opd"]
    assert any(key.startswith("sampler/") for key in told[-1])


def test_what_a_sampler_of_rewards_drew_is_known_afterwards(warm_home):
    run = night(warm_home, *NIGHTS["refill"])
    config = run.read_config()
    tasks_of = tasks_at(Night(config=config, run=run, progress=NoProgress()), config.stage("opd"))
    rollouts = stored(run.stage_dir("opd"), "rollouts", Rollout)
    assert len(stored(run.stage_dir("opd"), "draws", Drawn)) == 7
    for step in rollouts:
        met = {t.id for t in tasks_of(step)}
        assert {r.task_id for r in rollouts[step]} <= met
        assert len(met) <= 12
