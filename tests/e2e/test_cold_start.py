"""A policy that cannot read its attempts learns it from labels (SEED, stage 1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Command
from distill.rundir import RunDir, read_json

BASE = """
[data]
analyst_share = 0.0

[evals]
tasks_per_domain = 16
samples = 0
k = []

[run]
orchestrator = "none"

[skills]
keep = false
bank = ""

[stage.base.trainer]
steps = 60

[stage.seed.trainer]
steps = 3

[stage.seed.analyst]
truth = "answer"
"""
LABELS = """
[[stage]]
name = "labels"
kind = "sft"
target = "student"

[stage.model]
path = "stage:base"

[stage.objective]
name = "sft"

[stage.analyst]
name = "rules"
steps = false
format = "slot"
truth = "answer"

[stage.trainer]
steps = {steps}
batch = 16
lr = 3e-3
warmup_steps = 5
schedule = "linear"
"""


def learned(home: Path, *layers: str) -> dict:
    done = Command(home)("nightly", "hindsight", *layers, timeout=900)
    assert done.returncode in (0, 3), done.stderr
    (run,) = RunDir.all(home)
    stages = read_json(run.summary_path)["stages"]
    return next(s for s in stages if s["name"] == "seed")["learned"]


def night_with_labels(folder: Path, steps: int) -> str:
    """The packaged night with a stage of labels before the one that acts."""
    from flows.configs import presets

    head, base, seed = presets()["hindsight"].split("[[stage]]")
    path = folder / "labels.toml"
    parts = [head, base, LABELS.format(steps=steps).replace("[[stage]]", "", 1), seed]
    path.write_text("[[stage]]".join(parts))
    return path.name


@pytest.mark.slow
def test_an_analyst_that_cannot_write_learns_it_from_labels(tmp_path):
    cold, warm = tmp_path / "cold", tmp_path / "warm"
    for folder in (cold, warm):
        folder.mkdir()
        (folder / "small.toml").write_text(BASE)
    before = learned(cold, "small.toml")
    assert before["valid_rate"] < 0.5
    assert before["is_enough"] is False
    done = Command(warm)("nightly", night_with_labels(warm, 150), "small.toml", timeout=900)
    assert done.returncode in (0, 3), done.stderr
    (run,) = RunDir.all(warm)
    stages = {s["name"]: s for s in read_json(run.summary_path)["stages"]}
    after = stages["seed"]["learned"]
    assert after["valid_rate"] >= 0.8
    assert after["correct_rate"] > 0.5
    assert stages["labels"]["tokens"] > 0
