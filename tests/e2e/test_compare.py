"""`distill compare` as people run it: start to end, killed and continued, its page in a browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import Command
from evals.compare_page_facts import Results
from flows.cli import main
from flows.compare import run_comparison
from flows.compare_config import load_comparison
from flows.compare_places import Places
from flows.progress import NoProgress

SMALL = """
[run]
preset = "small"
threads = 1

[compare]
tokens = 1600
points = 2
tasks_per_domain = 8
seeds = [0]

[model]
max_length = 64

[model.build]
hidden_size = 16
num_layers = 1
num_heads = 1
num_kv_heads = 1
head_dim = 16
intermediate_size = 32
max_positions = 64

[data]
name = "world"
domains = ["rule"]

[sampling]
num_samples = 4
max_new_tokens = 10

[evals]
samples = 1
k = []

[checkpoint]
every_steps = 3

[[stage]]
name = "base"
kind = "sft"
target = "base"
cache = true

[stage.objective]
name = "sft"

[stage.data]
domains = ["pretrain"]

[stage.trainer]
steps = 4
batch = 16
lr = 5e-3

[[stage]]
name = "teacher"
kind = "sft"
target = "teacher"
cache = true

[stage.objective]
name = "sft"

[stage.model]
path = "stage:base"

[stage.trainer]
steps = 2
batch = 16

[[stage]]
name = "student"
kind = "on_policy"
target = "student"

[stage.model]
path = "stage:base"

[stage.trainer]
batch = 4
lr = 1e-3

[[contender]]
name = "follow"
objective = {name = "gkd"}
teacher = {name = "local", path = "stage:teacher"}

[[contender]]
name = "hinted"
objective = {name = "rlsd"}
teacher = {name = "self_teacher", weights = "snapshot", every = 2}
view = {name = "with_context", context = "hint"}
"""


def what_must_be_equal(folder: Path) -> dict[str, Any]:
    """Results without times, sizes and the command."""
    found = json.loads((folder / "results.json").read_text())
    for key in ("seconds", "command", "name"):
        del found[key]
    for run in found["runs"]:
        del run["speed"]
    for row in found["table"]["rows"]:
        del row["seconds_per_step"], row["peak_rss_bytes"]
    return dict(found)


def run_here(home: Path, out: Path, jobs: int = 1) -> Results:
    comparison = load_comparison([str(home / "small.toml")])
    places = Places(out=out, home=home)
    return run_comparison(comparison, places=places, progress=NoProgress(), jobs=jobs)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Home and folder of a finished comparison."""
    home = tmp_path_factory.mktemp("compare")
    (home / "small.toml").write_text(SMALL)
    run_here(home, home / "first")
    return home, home / "first"


def test_every_contender_spends_its_tokens_and_is_measured_on_the_way(unbroken):
    found = what_must_be_equal(unbroken[1])
    assert [run["contender"] for run in found["runs"]] == ["follow", "hinted"]
    starts = {tuple(run["start"]) for run in found["runs"]}
    assert len(starts) == 1, "all start from the same weights"
    for run in found["runs"]:
        assert [p["point"] for p in run["curve"]] == [0, 1, 2]
        assert run["tokens"] >= 1600
        assert run["curve"][-1]["step"] == run["steps"] > 4
        assert run["curve"][-1]["tokens"] == run["tokens"]
        assert run["stopped"] is None
        assert len(run["end"]) == found["num_tasks"] == 8
        assert run["kept"] is not None
        assert run["end_turns"] == [], "an attempt at this world is a single reply"
    follow = found["runs"][0]
    assert 0 < follow["grad_norm"]["low"] < follow["grad_norm"]["high"]


def test_a_killed_comparison_continues_and_ends_with_the_same_results(unbroken, tmp_path):
    home, first = unbroken
    shutil.copy(home / "small.toml", tmp_path)
    shutil.copytree(home / "cache", tmp_path / "cache")
    process = Command(tmp_path).start("compare", "small.toml", "--out", "again")
    runs = tmp_path / "again" / "runs"
    deadline = time.monotonic() + 120
    while not (runs / "hinted-0/stages/student/checkpoints/000003").exists():
        assert process.poll() is None, (tmp_path / "output.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (runs / "hinted-0" / "result.json").exists()
    finished = (runs / "follow-0" / "result.json").stat().st_mtime_ns
    run_here(tmp_path, tmp_path / "again")
    assert (runs / "follow-0" / "result.json").stat().st_mtime_ns == finished
    assert what_must_be_equal(tmp_path / "again") == what_must_be_equal(first)


@pytest.mark.slow
def test_two_processes_find_what_one_finds(unbroken, tmp_path):
    home, first = unbroken
    run_here(home, tmp_path / "both", jobs=2)
    assert what_must_be_equal(tmp_path / "both") == what_must_be_equal(first)


def test_a_finished_comparison_is_shown_again_and_only_with_the_same_settings(unbroken, capsys):
    home, first = unbroken
    words = ["compare", str(home / "small.toml"), "--out", str(first), "--home", str(home)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "follow" in shown
    assert "smallest detectable difference" in shown
    assert main([*words, "--baseline", "hinted", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["table"]["baseline"] == "hinted"
    assert main([*words, "compare.tokens=1700"]) == 2
    assert "it differs in: compare.tokens" in capsys.readouterr().err
    assert main([*words, "contender.hinted.trainer.lr=0.5"]) == 2
    assert "it differs in: stage.student.trainer.lr" in capsys.readouterr().err


@pytest.mark.real
def test_the_page_opens_in_a_browser(unbroken, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "no browser found; install Debian's package chromium"
    done = subprocess.run(
        [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update"),
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            (unbroken[1] / "compare.html").as_uri(),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.count("<figure") == 2
    assert "Where each one ended" in done.stdout
