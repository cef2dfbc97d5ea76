"""Every mistake ends in one line that names it, exit code 2 or 20, and nothing half-written."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import Command
from distill.models import char_tokenizer
from distill.rundir import RunDir
from flows.cli import main
from helpers import make_chat, make_model

CUSTOM = """
[run]
preset = "mine"
orchestrator = "none"
[model]
name = "mine"
path = "{model}"
[data]
name = "jsonl"
path = "{data}"
columns = {{ prompt = "question", answer = "answer" }}
[sampling]
num_samples = 2
max_new_tokens = 4
[evals]
samples = 0
[[stage]]
name = "rl"
kind = "on_policy"
target = "student"
[stage.objective]
name = "grpo"
[stage.trainer]
steps = 1
batch = 2
"""


def refused(home: Path, capsys, *arguments: str) -> str:
    """The one line on stderr; nothing else may be left behind."""
    code = main(["nightly", *arguments, f"run.home={home}"])
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("distill: error")]
    assert code in (2, 20), lines
    assert len(lines) == 1
    assert not RunDir.all(home), "a refused night leaves no run folder"
    assert not list(home.rglob("*.partial-*"))
    return lines[0]


@pytest.fixture
def custom(tmp_path):
    """A complete configuration of one's own; tests break one thing in it."""
    model, data = tmp_path / "model", tmp_path / "tasks.jsonl"
    make_model().save_pretrained(model)
    make_chat().tokenizer.save_pretrained(model)
    rows = [{"question": f"a{c}=", "answer": c} for c in "abcdefghijklmnopqrstuvwxyz0123456789"]
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = tmp_path / "mine.toml"
    config.write_text(CUSTOM.format(model=model, data=data))
    home = tmp_path / "home"
    home.mkdir()
    return tmp_path, home


def test_the_unbroken_configuration_runs(custom, capsys):
    folder, home = custom
    assert main(["nightly", str(folder / "mine.toml"), f"run.home={home}"]) in (0, 3)
    assert RunDir.all(home)[0].is_finished


def test_an_unknown_key_names_the_nearest_one(tmp_path, capsys):
    line = refused(tmp_path, capsys, "micro", "trainer.stepz=3")
    assert "trainer.stepz" in line
    assert "'steps'" in line


def test_a_wrong_type_names_the_expected_one(tmp_path, capsys):
    line = refused(tmp_path, capsys, "micro", "trainer.steps=many")
    assert "trainer.steps" in line
    assert "integer" in line


def test_an_unknown_objective_option_is_named(tmp_path, capsys):
    assert "objective.betta" in refused(tmp_path, capsys, "micro", "stage.opd.objective.betta=1")


def test_an_unknown_objective_names_the_legal_ones(tmp_path, capsys):
    line = refused(tmp_path, capsys, "micro", "stage.opd.objective.name=gdk")
    assert "'gdk' is unknown, did you mean 'gkd'?" in line


def test_an_objective_without_its_teacher_is_refused_before_any_model_is_loaded(tmp_path, capsys):
    line = refused(tmp_path, capsys, "micro", "stage.opd.teacher.name=")
    assert "needs a teacher" in line


def test_a_group_method_with_one_sample_is_refused(tmp_path, capsys):
    line = refused(
        tmp_path, capsys, "micro", "stage.opd.objective.name=grpo", "sampling.num_samples=1"
    )
    assert "num_samples must be at least 2" in line


def test_truncated_sampling_is_refused_for_training(tmp_path, capsys):
    assert "top_p = 1" in refused(tmp_path, capsys, "micro", "sampling.top_p=0.9")


def test_a_missing_model_says_what_was_expected(custom, capsys):
    folder, home = custom
    line = refused(home, capsys, str(folder / "mine.toml"), f"model.path={folder / 'nowhere'}")
    assert "nowhere" in line


def test_corrupt_weights_name_the_file(custom, capsys):
    folder, home = custom
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert str(weights) in refused(home, capsys, str(folder / "mine.toml"))


def test_a_teacher_with_another_tokenizer_is_refused(custom, capsys):
    folder, home = custom
    other = folder / "other"
    make_model().save_pretrained(other)
    char_tokenizer("_$^zyxwvutsrqponmlkjihgfedcba9876543210=:").save_pretrained(other)
    line = refused(
        home,
        capsys,
        str(folder / "mine.toml"),
        "stage.rl.objective.name=gkd",
        "teacher.name=local",
        f"teacher.path={other}",
    )
    assert "another tokenizer" in line
    assert "first difference" in line


def test_a_prompt_over_the_limit_is_named(custom, capsys):
    folder, home = custom
    with (folder / "tasks.jsonl").open("a") as file:
        file.write(json.dumps({"question": "a" * 40 + "=", "answer": "a"}) + "\n")
    line = refused(home, capsys, str(folder / "mine.toml"), "model.max_length=20")
    assert "41 tokens, but model.max_length is 20" in line


def test_an_empty_data_file_is_named(custom, capsys):
    folder, home = custom
    (folder / "tasks.jsonl").write_text("")
    line = refused(home, capsys, str(folder / "mine.toml"))
    assert "tasks.jsonl" in line


def test_a_broken_line_is_named_with_its_number(custom, capsys):
    folder, home = custom
    lines = (folder / "tasks.jsonl").read_text().splitlines()
    lines[4] = lines[4][:-3]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    line = refused(home, capsys, str(folder / "mine.toml"))
    assert "tasks.jsonl" in line
    assert "line 5" in line


def test_a_stage_that_names_a_later_one_is_refused(tmp_path, capsys):
    line = refused(tmp_path, capsys, "micro", "stage.base.model.path=stage:opd")
    assert "must name an earlier stage" in line


def test_no_space_left_is_one_line_and_the_night_can_go_on(warm_home):
    """A file size limit makes every write beyond it fail, as a full disk does."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    command = Command(warm_home)
    done = subprocess.run(
        command.argv("nightly", "micro"),
        cwd=warm_home,
        env=command.env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 20, done.stderr
    errors = [x for x in done.stderr.splitlines() if x.startswith("distill: error")]
    assert len(errors) == 1
    assert "no space left" in errors[0]
    assert not list(warm_home.rglob("*.partial-*"))
    again = command("nightly", "micro")
    assert again.returncode in (0, 3), again.stderr


def test_an_error_keeps_its_traceback_for_those_who_ask(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "flows", "--debug", "nightly", "micro", "trainer.stepz=3"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=Command(tmp_path).env,
        check=False,
    )
    assert "Traceback" in done.stderr


def test_a_night_with_relative_paths_resumes_from_any_folder(custom, monkeypatch, capsys):
    folder, home = custom
    text = (folder / "mine.toml").read_text().replace(f"{folder}/", "")
    (folder / "mine.toml").write_text(text.replace("steps = 1\n", "steps = 3\n"))
    monkeypatch.chdir(folder)
    process = Command(folder).start("nightly", "mine.toml", "run.home=home")
    deadline = time.monotonic() + 120
    while not list(home.glob("runs/*/start")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    monkeypatch.chdir(home.parent.parent)
    assert main(["nightly", "--resume", "--home", str(home)]) in (0, 3), capsys.readouterr().err
    assert RunDir.all(home)[0].is_finished
