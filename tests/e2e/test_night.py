"""A whole `micro` night through the command line, and what it leaves behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import Command
from distill.checkpoint import verify_manifest
from distill.models import weights_file
from distill.rundir import RunDir, digest_file, read_json, read_jsonl
from flows import registry

STUDENT_STAGE = "opd"


@pytest.fixture(scope="module")
def run(micro_home: Path) -> RunDir:
    return RunDir.all(micro_home)[0]


def test_the_summary_keeps_its_contract_with_other_programs(micro_home, run):
    done = Command(micro_home)("runs", "show", run.name, "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["verdict"] in ("promote", "hold", "reject")
    assert shown["reasons"]
    assert set(shown["domains"]) == {"sort", "rewrite", "rule"}
    for domain in shown["domains"].values():
        assert set(domain) >= {"teacher", "before", "after", "difference", "low", "high", "n"}
    for stage in shown["stages"]:
        assert set(stage) >= {"name", "objective", "steps", "tokens", "seconds"}
    assert shown["seconds"] > 0
    assert shown["peak_rss_bytes"] > 100 * 2**20
    final = run.stage_dir(STUDENT_STAGE) / "final"
    assert shown["adapter_sha256"] == digest_file(weights_file(final))
    assert shown["bank_version"] is None
    assert isinstance(shown["warnings"], list)


def test_every_folder_of_weights_verifies(run):
    for stage in ("teacher", "base", STUDENT_STAGE):
        verify_manifest(run.stage_dir(stage) / "final")
    verify_manifest(run.path / "start")


def test_the_report_tells_the_verdict_and_needs_nothing_from_elsewhere(run):
    page = (run.path / "report.html").read_text()
    assert read_json(run.summary_path)["verdict"] in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert (run.path / "report.md").read_text().startswith("# ")


def test_every_step_has_a_row_of_metrics(run):
    rows = read_jsonl(run.metrics_path)
    steps = [r["step"] for r in rows if r["stage"] == STUDENT_STAGE]
    assert steps == list(range(1, len(steps) + 1))
    last = rows[-1]
    assert {"loss", "grad_norm", "lr", "num_tokens", "kl/mean", "reward/mean"} <= set(last)


def test_rollouts_are_readable_and_complete(run):
    (path,) = (run.stage_dir(STUDENT_STAGE) / "segments").glob("*.jsonl")
    rows = read_jsonl(path)
    assert {r["name"] for r in rows} == {"rollouts"}  # full distributions are never stored
    first = rows[0]["rows"][0]
    assert {"token_ids", "completion_mask", "logprobs", "reward", "task_id"} <= set(first)


def test_the_first_night_makes_its_start_the_first_champion(micro_home, run):
    entries = registry.history(micro_home, "micro")
    assert entries[0].action == "initial"
    assert entries[0].to_digest == read_json(run.summary_path)["start_sha256"]


def test_gate_tasks_were_never_trained_on(run):
    trained = {
        row["task_id"]
        for path in run.stage_dir(STUDENT_STAGE).glob("segments/*.jsonl")
        for line in read_jsonl(path)
        for row in line["rows"]
    }
    judged = set(read_json(run.eval_path("after"))["outcomes"])
    assert trained
    assert not trained & judged


def test_a_second_night_continues_the_champion_and_repeats_nothing(micro_home, tmp_path):
    home = tmp_path / "home"
    shutil.copytree(micro_home, home)
    first = RunDir.all(home)[0]
    champion = registry.current(home, "micro")
    done = Command(home)("nightly", "micro")
    assert done.returncode in (0, 3), done.stderr
    assert "from the cache" in done.stderr
    second = RunDir.all(home)[0]
    assert second.name != first.name
    assert read_json(second.summary_path)["start_sha256"] == champion.digest

    def trained(run):
        (path,) = (run.stage_dir(STUDENT_STAGE) / "segments").glob("*.jsonl")
        return [row["task_id"] for row in read_jsonl(path)[0]["rows"]]

    assert trained(first) != trained(second)


def test_the_same_seed_gives_the_same_weights(micro_home, warm_home):
    done = Command(warm_home)("nightly", "micro")
    assert done.returncode in (0, 3), done.stderr
    digests = [
        read_json(RunDir.all(home)[0].summary_path)["adapter_sha256"]
        for home in (micro_home, warm_home)
    ]
    assert digests[0] == digests[1]


def test_another_seed_gives_other_weights(micro_home, warm_home):
    done = Command(warm_home)("nightly", "micro", "run.seed=1", "stage.opd.trainer.steps=1")
    assert done.returncode in (0, 3), done.stderr
    ours = read_json(RunDir.all(warm_home)[0].summary_path)["adapter_sha256"]
    assert ours != read_json(RunDir.all(micro_home)[0].summary_path)["adapter_sha256"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["stage.opd.objective.name=opd", "stage.opd.objective.discount=0.5"],
        ["stage.opd.objective.name=grpo", "stage.opd.teacher.name="],
        [
            "stage.opd.objective.name=gkd",
            "stage.opd.teacher.name=self_teacher",
            "stage.opd.view.name=with_answer",
        ],
        ["stage.opd.trainer.epochs=2", "stage.opd.trainer.minibatches=2"],
    ],
    ids=["opd", "grpo", "self-distillation", "several updates"],
)
def test_other_methods_run_the_same_night(warm_home, overrides):
    done = Command(warm_home)("nightly", "micro", "stage.opd.trainer.steps=2", *overrides)
    assert done.returncode in (0, 3), done.stderr
