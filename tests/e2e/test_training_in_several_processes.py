"""`torchrun -m flows train`: one run, two processes, the weights of one process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from conftest import ROOT, Command
from distill.rundir import RunDir, read_json, read_jsonl
from parallel_worker import gaps

# Two layers: layers that are gathered ahead of their turn must be the same in every process.
ARGUMENTS = (
    *("train", "micro", "stage.opd.trainer.steps=16", "checkpoint.every_steps=4"),
    "model.build.num_layers=2",
)


def start(home: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Two processes by torchrun, whose output is kept in a file of the home folder."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with (home / "output.log").open("a", encoding="utf-8") as log:
        return subprocess.Popen(
            [*launcher, "--nproc-per-node", "2", "-m", "flows", *arguments],
            cwd=home,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )


def finish(home: Path, *arguments: str) -> None:
    assert start(home, *arguments).wait(timeout=150) == 0, (home / "output.log").read_text()


def weights(home: Path) -> dict[str, object]:
    (run,) = RunDir.all(home)
    return load_file(str(run.stage_dir("opd") / "final" / "model.safetensors"))


def home_after(source: Path, home: Path) -> Path:
    """An empty home whose cache holds the models that the student's stage begins with."""
    home.mkdir()
    shutil.copytree(source / "cache", home / "cache")
    return home


@pytest.fixture(scope="module")
def alone(micro_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process ends with."""
    home = home_after(micro_home, tmp_path_factory.mktemp("alone") / "home")
    done = Command(home)(*ARGUMENTS)
    assert done.returncode == 0, done.stderr
    return home


def members(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := entry / "stat").exists():
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def kill_after_rows(process: subprocess.Popen[bytes], home: Path, rows: int) -> None:
    """SIGKILL torchrun and its processes once so many steps are on file."""
    until = time.monotonic() + 100
    while sum(len(read_jsonl(run.metrics_path)) for run in ready(home)) < rows:
        assert process.poll() is None, (home / "output.log").read_text()
        assert time.monotonic() < until
        time.sleep(0.01)
    for pid in members(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def ready(home: Path) -> list[RunDir]:
    return [run for run in RunDir.all(home) if run.metrics_path.exists()]


def test_two_processes_end_with_the_weights_of_one(alone, tmp_path):
    home = home_after(alone, tmp_path / "two")
    finish(home, *ARGUMENTS)
    assert max(gaps(weights(home), weights(alone)).values()) < 1e-5
    (run,), (one,) = RunDir.all(home), RunDir.all(alone)
    rows, expected = (
        [row for row in read_jsonl(found.metrics_path) if row["stage"] == "opd"]
        for found in (run, one)
    )
    assert len(rows) == 16
    assert [set(row) for row in rows] == [set(row) for row in expected]
    assert len(list((run.path / "logs").glob("attempt_*.log"))) == 1, "only one process writes"


@pytest.mark.real
@pytest.mark.timeout(400)
def test_two_processes_that_were_killed_go_on_and_so_does_one(alone, tmp_path):
    expected = weights(alone)
    for name in ("two", "one"):
        home = home_after(alone, tmp_path / name)
        kill_after_rows(start(home, *ARGUMENTS), home, rows=6)
        (run,) = RunDir.all(home)
        state = read_json(sorted(run.stage_dir("opd").glob("checkpoints/*/state.json"))[-1])
        assert 4 <= state["step"] < 16
        if name == "two":
            finish(home, "train", "--resume")
        else:
            done = Command(home)("train", "--resume")
            assert done.returncode == 0, done.stderr
        assert max(gaps(weights(home), expected).values()) < 1e-5
