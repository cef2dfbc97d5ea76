"""`distill teacher serve`: started as a process, used by nights, ended by signals."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import Command
from distill.models import weights_file
from distill.rundir import RunDir, digest_file, read_jsonl

STAGE = "opd"
NAME, TOKEN = "SCORING_TOKEN", "sesame-4711"


@contextmanager
def served(home: Path, *arguments: str, **env: str) -> Iterator[tuple[str, Any]]:
    """A started server: its address and its process."""
    command = Command(home)
    with (home / "serve.log").open("a") as log:
        process = subprocess.Popen(
            command.argv("teacher", "serve", *arguments),
            cwd=home,
            env={**command.env, **env},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), (home / "serve.log").read_text()
        yield url, process
    finally:
        process.kill()
        process.communicate()


def teacher_of(home: Path) -> Path:
    (run,) = RunDir.all(home)
    return run.stage_dir("teacher") / "final"


def get(url: str, **headers: str) -> httpx.Response:
    return httpx.get(url, headers=headers, trust_env=False)


def segments(run: RunDir, name: str) -> list[Any]:
    paths = sorted((run.stage_dir(STAGE) / "segments").glob("*.jsonl"))
    return [line["rows"] for path in paths for line in read_jsonl(path) if line["name"] == name]


def run_of(verb: str, home: Path, *arguments: str) -> RunDir:
    done = Command(home)(verb, "micro", *arguments)
    assert done.returncode in (0, 3), done.stderr
    return max(RunDir.all(home), key=lambda run: run.name)


@pytest.mark.parametrize(("verb", "objective"), [("nightly", "gkd"), ("train", "opd")])
def test_a_night_with_a_served_teacher_equals_the_night_with_a_local_one(
    micro_home, warm_home, tmp_path_factory, verb, objective
):
    """Log-probabilities (opd) and full distributions (gkd, reverse KL) both travel."""
    twin = tmp_path_factory.mktemp("twin")
    os.symlink(warm_home / "cache", twin / "cache")
    settings = [f"stage.{STAGE}.objective.name={objective}", "evals.tasks_per_domain=4"]
    if objective == "opd":
        settings.append(f"stage.{STAGE}.objective.beta=")
    settings = settings[:2]
    local = run_of(verb, twin, *settings)
    with served(warm_home, str(teacher_of(micro_home)), "--port", "0", "--threads", "1") as (
        url,
        _,
    ):
        remote = run_of(
            verb,
            warm_home,
            *settings,
            f"stage.{STAGE}.teacher.name=remote",
            f'stage.{STAGE}.teacher.urls=["{url}"]',
        )
    if objective == "opd":
        ours, theirs = segments(remote, "teacher"), segments(local, "teacher")
        assert len(ours) == len(theirs) > 1
        gaps = [
            abs(x - y)
            for mine, expected in zip(ours, theirs, strict=True)
            for a, b in zip(mine, expected, strict=True)
            for x, y in zip(a["logprobs"], b["logprobs"], strict=True)
        ]
        assert len(gaps) > 100
        assert max(gaps) <= 1e-5
    assert segments(remote, "rollouts") == segments(local, "rollouts")
    losses = [
        [row["loss"] for row in read_jsonl(run.metrics_path) if row["stage"] == STAGE]
        for run in (remote, local)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    finals = [run.stage_dir(STAGE) / "final" for run in (remote, local)]
    assert len({digest_file(weights_file(final)) for final in finals}) == 1


def test_it_prints_its_address_and_nothing_else_and_ends_cleanly(micro_home, tmp_path):
    arguments = [str(teacher_of(micro_home)), "--port", "0", "--name", "mine"]
    with served(tmp_path, *arguments) as (url, process):
        assert get(f"{url}/health").json() == {"status": "ok"}
        info = get(f"{url}/info").json()
        assert (info["model"], info["dtype"], info["protocol"]) == ("mine", "float32", 1)
        assert info["limits"]["max_request_bytes"] == 64 * 2**20
        end(process, signal.SIGTERM)
    assert "Traceback" not in (tmp_path / "serve.log").read_text()


def test_a_token_guards_everything_but_health(micro_home, tmp_path):
    arguments = [str(teacher_of(micro_home)), "--port", "0", "--token-env", NAME]
    with served(tmp_path, *arguments, "--host", "0.0.0.0", **{NAME: TOKEN}) as (url, process):
        here = url.replace("0.0.0.0", "127.0.0.1")
        assert get(f"{here}/health").status_code == 200
        assert get(f"{here}/info").status_code == 401
        assert get(f"{here}/info", authorization=f"Bearer {TOKEN}").status_code == 200
        end(process, signal.SIGINT)
    assert TOKEN not in (tmp_path / "serve.log").read_text()


def end(process: Any, number: int) -> None:
    """It ends soon, without a word on stdout, and calls that a success."""
    began = time.monotonic()
    process.send_signal(number)
    rest, _ = process.communicate(timeout=20)
    assert (process.returncode, rest) == (0, "")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "lets other machines in"),
        (["--token-env", "UNSET_TOKEN"], "names the variable UNSET_TOKEN, which is not set"),
        (["--token-env", "sesame-4711"], "must be the name of an environment variable"),
        (["--host", "no such host", "--token-env", NAME], "cannot listen on no such host"),
        (["--device", "tpu"], "'tpu' cannot be used"),
        (["--port", "70000"], "65535"),
        (["--dtype", "float8"], "float8"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    micro_home, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.setenv(NAME, TOKEN)
    done = Command(tmp_path)(
        "teacher", "serve", str(teacher_of(micro_home)), "--port", "0", *arguments
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert TOKEN not in done.stderr


def test_a_port_that_is_taken_and_a_model_that_is_none_are_named(micro_home, tmp_path):
    model = str(teacher_of(micro_home))
    with served(tmp_path, model, "--port", "0") as (url, _):
        port = url.rpartition(":")[2]
        done = Command(tmp_path)("teacher", "serve", model, "--port", port)
        assert (done.returncode, f"port {port}" in done.stderr) == (2, True)
    done = Command(tmp_path)("teacher", "serve", str(tmp_path / "none"), "--port", "0")
    assert (done.returncode, "no such directory" in done.stderr) == (2, True)
