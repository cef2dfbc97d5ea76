"""Weights leave the product as one ordinary folder, and a champion says how it is served."""

from __future__ import annotations

import json
import shlex

import pytest
import torch

from conftest import Command
from distill.models import load_adapter, load_model
from distill.policy import Policy
from distill.rundir import RunDir
from distill.types import TeacherView

ADAPTER = ("micro", "stage.opd.model.kind=adapter", "stage.opd.model.rank=4", "gate.min_gain=-1")
VIEW = TeacherView(token_ids=(5, 6, 7, 8, 9), positions=(1, 2, 3, 4), kind="own", id="v")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home whose champion `micro` is full weights, and `low` an adapter."""
    home = tmp_path_factory.mktemp("export")
    for arguments in (("micro",), (*ADAPTER, "model.name=low")):
        done = Command(home)("nightly", *arguments)
        assert done.returncode in (0, 3), done.stderr
    return home


def logprobs(model) -> list[float]:
    return list(Policy(model.eval(), base="b", trainable=False).score([VIEW])[0].logprobs)


def test_a_merged_adapter_says_what_base_and_adapter_said(home, tmp_path):
    run = next(r for r in RunDir.all(home) if r.read_config().model.name == "low")
    weights = run.stage_dir("opd") / "final"
    base = run.stage_dir("base") / "final"
    before = {p.name: p.read_bytes() for p in (*weights.iterdir(), *base.iterdir())}
    done = Command(home)("export", run.name, str(tmp_path / "out"), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["gap"] < 1e-5
    expected = logprobs(load_adapter(load_model(str(base)), weights, trainable=False))
    assert logprobs(load_model(str(tmp_path / "out"))) == pytest.approx(expected, abs=1e-5)
    assert logprobs(load_model(str(base))) != pytest.approx(expected, abs=1e-5)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    after = {p.name: p.read_bytes() for p in (*weights.iterdir(), *base.iterdir())}
    assert after == before, "the original stays as it is"


def test_full_weights_are_written_in_the_type_that_is_asked_for(home, tmp_path):
    done = Command(home)("export", "micro", str(tmp_path / "out"), "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "out")
    model = load_model(str(tmp_path / "out"), dtype="bfloat16")
    assert next(model.parameters()).dtype == torch.bfloat16
    again = Command(home)("export", "micro", str(tmp_path / "out"))
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_the_serve_command_names_what_there_is(home):
    full = shlex.split(Command(home)("registry", "serve-command", "micro").stdout)
    assert full[full.index("--served-model-name") + 1] == "micro"
    assert (home / full[full.index("--model") + 1] / "model.safetensors").is_file()
    words = shlex.split(Command(home)("registry", "serve-command", "low", "--port", "81").stdout)
    name, _, folder = words[words.index("--lora-modules") + 1].partition("=")
    assert name == "low"
    assert (home / folder / "adapter_model.safetensors").is_file()
    assert (home / words[words.index("--model") + 1] / "model.safetensors").is_file()
    assert words[words.index("--max-lora-rank") + 1] == "4"
    assert "--enable-lora" in words
    none = Command(home)("registry", "serve-command", "other")
    assert none.returncode == 2
    assert "known: low, micro" in none.stderr
