"""Whole nights whose replies come from vllm, in the process and behind a server, on a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Command
from distill.pretrained import resolve_model
from distill.rundir import RunDir, read_json, read_jsonl
from flows.configs import load_config
from flows.night import built
from real.vllm_server import RealServer

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make vllm-env"
    ),
]

TINY = (
    "tiny",
    "run.orchestrator=none",
    "stage.teacher.trainer.steps=60",
    "stage.base.trainer.steps=40",
    "stage.traffic.traffic.requests=600",
    "stage.sft.trainer.steps=4",
    "stage.opd.trainer.steps=6",
    "stage.opd.trainer.batch=16",
    "stage.opd.sampling.refresh=0",
    "evals.tasks_per_domain=16",
)
SMOL = (
    "smol",
    "run.orchestrator=none",
    'data.generators=["chain_sum"]',
    "stage.expert.trainer.steps=1",
    "stage.opd.trainer.steps=2",
    "trainer.batch=4",
    "stage.expert.trainer.batch=4",
    "evals.tasks_per_domain=4",
    "evals.teacher=false",
)


def finished(home: Path, *arguments: str) -> RunDir:
    done = Command(home)("nightly", *arguments, timeout=800)
    assert done.returncode in (0, 3), done.stderr
    (run,) = RunDir.all(home)
    return run


def gaps(run: RunDir) -> list[float]:
    """Mean difference between the engine's log-probabilities and the trainer's, step by step."""
    rows = [r for r in read_jsonl(run.metrics_path) if r["stage"] == "opd"]
    return [row["sampler_gap/mean"] for row in rows]


def test_the_generated_night_samples_and_is_evaluated_with_vllm(tmp_path):
    run = finished(tmp_path, *TINY, "engine.name=vllm")
    found = gaps(run)
    assert len(found) == 6
    assert max(found) < 1e-3
    assert not (run.path / "published").exists()
    assert read_json(run.summary_path)["domains"]


def test_replies_sampled_ahead_by_vllm_are_one_update_old_and_corrected(tmp_path):
    ahead = ("stage.opd.sampling.overlap=true", "stage.opd.correction.level=token")
    run = finished(tmp_path, *TINY, "engine.name=vllm", *ahead)
    rows = [r for r in read_jsonl(run.metrics_path) if r["stage"] == "opd"]
    assert [r.get("staleness/mean") for r in rows] == [None, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rows[0]["sampler_gap/mean"] < 1e-3 < rows[-1]["sampler_gap/mean"]


def test_two_steps_of_the_real_model_sample_through_vllm_as_an_adapter(tmp_path):
    run = finished(tmp_path, *SMOL, "engine.name=vllm", "engine.max_length=256")
    found = gaps(run)
    assert len(found) == 2
    assert max(found) < 1e-3


def served(home: Path, *, max_length: int, max_rank: int) -> Iterator[str]:
    """The address of a server of the model in `home/base`; it ends with the block."""
    running = RealServer(
        home / "base", home / "server.log", max_length=max_length, max_rank=max_rank
    )
    try:
        running.start()
        yield running.url
    finally:
        running.stop()


@pytest.fixture
def tiny_server(tmp_path: Path) -> Iterator[str]:
    """Serves some weights of the student's shape: the night brings its own."""
    config = load_config(list(TINY))
    tokenizer, model = built(config.for_stage(config.stage("opd")))
    model.save_pretrained(str(tmp_path / "base"))
    tokenizer.save_pretrained(str(tmp_path / "base"))
    yield from served(tmp_path, max_length=128, max_rank=0)


def test_the_generated_night_sends_full_weights_to_a_server(tiny_server, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    engine = ("engine.name=server", f'engine.urls=["{tiny_server}"]', "engine.model=student")
    run = finished(home, *TINY, *engine, "engine.sync=reload", "engine.tolerance=1e-3")
    assert max(gaps(run)) < 1e-3


@pytest.fixture
def smol_server(tmp_path: Path) -> Iterator[str]:
    found = resolve_model("package:smollm2", home=tmp_path / "home", revision=None)
    (tmp_path / "base").symlink_to(found.dir_or_id)
    yield from served(tmp_path, max_length=256, max_rank=16)


def test_two_steps_of_the_real_model_send_adapters_to_a_server(smol_server, tmp_path):
    engine = ("engine.name=server", f'engine.urls=["{smol_server}"]', "engine.model=student")
    run = finished(tmp_path / "home", *SMOL, *engine, "engine.tolerance=1e-3")
    found = gaps(run)
    assert len(found) == 2
    assert max(found) < 1e-3
