"""A night that is killed continues where it was and ends with the same weights."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conftest import Command
from distill.rundir import RunDir, read_json, read_jsonl

STEPS = "stage.opd.trainer.steps=12"


def weights_hash(home: Path) -> str:
    (run,) = RunDir.all(home)
    return read_json(run.summary_path)["adapter_sha256"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Hash and duration of a night that nobody disturbs."""
    home = tmp_path_factory.mktemp("unbroken")
    began = time.monotonic()
    done = Command(home)("nightly", "micro", STEPS)
    assert done.returncode in (0, 3), done.stderr
    return weights_hash(home), time.monotonic() - began


def kill_until_done(home: Path, kills: int, duration: float, seed: int) -> int:
    """SIGKILL a night at random moments, resuming each time; returns how many hit a living one."""
    draw, command, hits = random.Random(seed), Command(home), 0
    arguments = ["nightly", "micro", STEPS]
    for _ in range(kills):
        process = command.start(*arguments)
        try:
            process.wait(timeout=draw.uniform(0.05, 0.9) * duration)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            hits += 1
        runs = RunDir.all(home)
        if runs and runs[0].is_finished:
            return hits
        if runs:
            arguments = ["nightly", "--resume"]
    done = command(*arguments)
    assert done.returncode in (0, 3), done.stderr
    return hits


def test_a_night_killed_three_times_ends_with_the_same_weights(unbroken, tmp_path):
    expected, duration = unbroken
    hits = kill_until_done(tmp_path, 3, duration, seed=1)
    assert hits >= 1
    assert weights_hash(tmp_path) == expected
    (run,) = RunDir.all(tmp_path)
    assert not list(tmp_path.rglob(".*tmp*")), "a temporary file was left behind"
    steps = {r["step"] for r in read_jsonl(run.metrics_path) if r["stage"] == "opd"}
    assert steps == set(range(1, 13))


@pytest.mark.real
@pytest.mark.timeout(900)
def test_a_night_killed_at_ten_random_moments_ends_with_the_same_weights(unbroken, tmp_path):
    expected, duration = unbroken
    hits = total = 0
    for round_number in range(10):
        home = tmp_path / str(round_number)
        home.mkdir()
        hits += kill_until_done(home, 10 - hits, duration, seed=100 + round_number)
        assert weights_hash(home) == expected
        total += 1
        if hits >= 10:
            break
    print(json.dumps({"kills": hits, "nights": total}))
    assert hits >= 10


def test_a_kill_inside_the_student_stage_reuses_the_stored_rollouts(unbroken, warm_home):
    expected, _ = unbroken
    command = Command(warm_home)
    process = command.start("nightly", "micro", STEPS, "checkpoint.every_steps=1000")
    segments = "runs/*/stages/opd/segments/*.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        lines = [line for p in warm_home.glob(segments) for line in p.read_text().splitlines()]
        if len(lines) >= 3:
            break
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    stored = len([line for p in warm_home.glob(segments) for line in p.read_text().splitlines()])
    assert stored >= 3
    done = command("nightly", "--resume")
    assert done.returncode in (0, 3), done.stderr
    (run,) = RunDir.all(warm_home)
    rows = [r for p in sorted(warm_home.glob(segments)) for r in _complete_lines(p)]
    assert len(rows) == 12, "every step is stored exactly once"
    assert weights_hash(warm_home) == expected
    assert run.is_finished


def test_resuming_a_finished_night_says_so(micro_home):
    (run, *_) = RunDir.all(micro_home)
    done = Command(micro_home)("nightly", "--resume", run.name)
    assert done.returncode == 2
    assert "is finished" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_resuming_with_another_configuration_names_the_keys(warm_home):
    command = Command(warm_home)
    process = command.start("nightly", "micro", STEPS)
    deadline = time.monotonic() + 120
    while not list(warm_home.glob("runs/*/start")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    done = command("nightly", "--resume", "stage.opd.trainer.lr=0.5")
    assert done.returncode == 2
    assert "stage.opd.trainer.lr" in done.stderr


def test_two_nights_at_once_on_one_model_are_refused(warm_home):
    command = Command(warm_home)
    first = command.start("nightly", "micro", "stage.opd.trainer.steps=500")
    try:
        deadline = time.monotonic() + 120
        while not list(warm_home.glob("runs/*/start")) and time.monotonic() < deadline:
            time.sleep(0.02)
        second = command("nightly", "micro")
        assert second.returncode == 2
        assert f"pid {first.pid}" in second.stderr
        assert "is running" in second.stderr
        assert len(RunDir.all(warm_home)) == 1, "the refused night left no folder"
    finally:
        first.kill()
        first.wait()


def _complete_lines(path: Path) -> list[object]:
    return [r for r in read_jsonl(path) if r["name"] == "rollouts"]
