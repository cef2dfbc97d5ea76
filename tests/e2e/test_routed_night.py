"""A night that learns from the log of a router: served, imported, staged, trained, judged."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from conftest import Command
from distill.curriculum.light import read_rows
from distill.curriculum.store import LogStore
from distill.rundir import RunDir, read_json, read_jsonl
from evals.envs.routing import Routing

NAMED = "stage.curriculum.curriculum.store=kept"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nights in one home, with a store that is kept from one to the next."""
    home = tmp_path_factory.mktemp("routed")
    for _ in range(2):
        done = Command(home)("nightly", "micro_logs", NAMED)
        assert done.returncode in (0, 3), done.stderr
    return home


@pytest.fixture(scope="module")
def run(home: Path) -> RunDir:
    return nights(home)[0]


def nights(home: Path) -> list[RunDir]:
    return sorted(RunDir.all(home), key=lambda run: run.name)


def final(run: RunDir, stage: str) -> Path:
    return run.stage_dir(stage) / "final"


def plan(run: RunDir) -> list[dict[str, Any]]:
    with pa.memory_map(str(final(run, "curriculum") / "plan.arrow")) as source:
        found: list[dict[str, Any]] = pa.ipc.open_file(source).read_all().to_pylist()
    return found


def weights_hash(home: Path) -> str:
    digest: str = read_json(nights(home)[0].summary_path)["adapter_sha256"]
    return digest


def test_the_served_log_has_the_shape_of_a_gateway_and_its_outcomes_are_graded(run):
    rows = read_jsonl(final(run, "traffic") / "traffic.jsonl")
    told = read_json(final(run, "traffic") / "summary.json")
    assert len(rows) == told["calls"] >= 96
    graded = []
    for row in rows:
        meta = json.loads(row["metadata"])
        (verdict,) = meta["outcome"]["verdicts"]
        asked = json.loads(row["messages"])[0]["content"]
        said = json.loads(row["response"])["choices"][0]["message"]["content"]
        right = "".join(sorted(asked.removeprefix("sort:").removesuffix("=")))
        assert verdict["value"] == float(said == right)
        assert sum(meta["router"]["probs"]) == pytest.approx(1, abs=1e-4)
        assert 0 < meta["router"]["propensity"] <= 1
        graded.append(verdict["value"])
    assert sum(graded) == told["solved"]
    again = [json.loads(row["metadata"])["outcome"]["complaint"] for row in rows]
    assert sum(again) == told["asked_again"] > 0


def test_every_call_of_the_log_is_in_the_curriculum_or_has_a_reason(home, run):
    summary = read_json(final(run, "curriculum") / "summary.json")
    counts, left = summary["counts"], sum(summary["dropped"]["build"].values())
    assert counts["turns"] == counts["examples"] + left
    assert counts["calls"] == read_json(final(run, "traffic") / "summary.json")["calls"]
    assert summary["dropped"]["import"] == {}
    rows = list(read_rows(final(run, "curriculum")))
    assert len(rows) == counts["turns"]
    assert {r["verifiable"] for r in rows} == {True}


def test_the_store_grows_by_what_the_next_night_served(home):
    first, second = nights(home)
    calls = [read_json(final(r, "traffic") / "summary.json")["calls"] for r in (first, second)]
    summary = read_json(final(second, "curriculum") / "summary.json")
    assert summary["counts"]["calls"] == sum(calls)
    with LogStore.open(home / "logs" / "kept") as store:
        assert store.num_turns == sum(calls)


def test_contexts_are_met_once_per_pass_in_the_order_of_the_plan(run):
    tasks = Routing(path=str(final(run, "curriculum")), use="contexts").tasks("train")
    assert len(tasks) == sum(entry["use_opd"] for entry in plan(run))
    met = [
        row["task_id"]
        for path in sorted((run.stage_dir("opd") / "segments").glob("*.jsonl"))
        for line in read_jsonl(path)
        if line["name"] == "rollouts"
        for row in line["rows"]
    ]
    assert met == [tasks[i].id for i in range(24)]  # 6 steps of 4


def test_the_report_tells_of_the_log_and_of_the_traffic(home, run):
    summary = read_json(run.summary_path)
    traffic = summary["traffic"]
    assert traffic["requests"] == 16
    assert 0 < traffic["sent"] < 1
    change = traffic["after"]["solved"] - traffic["before"]["solved"]
    assert traffic["difference"] == pytest.approx(change)
    report = (run.path / "report.md").read_text()
    assert "## Yesterday's log" in report
    assert f"{summary['curricula'][0]['counts']['examples']:,} examples" in report
    assert "Yesterday&#x27;s log" in (run.path / "report.html").read_text()
    assert (final(run, "curriculum") / "curriculum.html").stat().st_size > 5000


def test_the_command_line_explains_a_turn_of_the_night(home, run):
    entry = plan(run)[0]
    done = Command(home)("curriculum", "explain", entry["id"][:10], "--in", run.name, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert entry["id"] in done.stdout
    assert told


def test_a_night_with_logs_that_is_killed_ends_with_the_same_weights(home, tmp_path):
    broken = tmp_path
    shutil.copytree(home / "cache", broken / "cache")
    draw, arguments = random.Random(3), ["nightly", "micro_logs", NAMED]
    command, hits = Command(broken), 0
    for _ in range(4):
        process = command.start(*arguments)
        try:
            process.wait(timeout=draw.uniform(2.0, 8.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            hits += 1
        runs = RunDir.all(broken)
        if runs and runs[0].is_finished:
            break
        if runs:
            arguments = ["nightly", "--resume"]
    else:
        done = command(*arguments)
        assert done.returncode in (0, 3), done.stderr
    assert hits
    assert weights_hash(broken) == weights_hash(home)
    (run,) = RunDir.all(broken)
    calls = read_json(final(run, "traffic") / "summary.json")["calls"]
    with LogStore.open(broken / "logs" / "kept") as store:
        assert store.num_turns == calls
