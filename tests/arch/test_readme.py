"""The README is true: its commands exist, the quick ones run, its library example works."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tree import ROOT, project

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ALPHABET = "_$?" + "0123456789+= abcdefghijklmnopqrstuvwxyz"
QUICK = (
    "distill doctor",
    "distill init my.toml --model owner/name --data questions.jsonl",
    "distill config check my.toml",
    "distill config show tiny",
    "distill runs list --json",
    "distill registry list --json",
)
"""Read-only or small commands, run in this order in an empty folder."""


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def command_lines(text: str) -> list[str]:
    """One command per entry, out of the bash blocks; comments and `&&` are taken apart."""
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    parts = [part for line in lines for part in line.split(" #")[0].split("&&")]
    return [part.strip() for part in parts if part.strip()]


def distill_commands() -> list[str]:
    """Every `distill ...` of the README: in bash blocks, and in backticks."""
    inline = re.findall(r"`(distill [^`]*)`", README)
    found = [*(line for line in command_lines(README) if line.startswith("distill ")), *inline]
    return sorted({line for line in found if line != "distill COMMAND --help"})


def run_distill(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from flows.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def subcommand(line: str) -> list[str]:
    """The lower-case words after `distill`, up to the first argument or option."""
    words = []
    for word in shlex.split(line.replace("[", " ["))[1:]:
        if not re.fullmatch(r"[a-z][a-z-]*", word) or len(words) == 2:
            break
        words.append(word)
    groups = {"bench", "config", "curriculum", "logs", "registry", "runs", "skills", "teacher"}
    return words[: 2 if words and words[0] in groups else 1]


@pytest.mark.parametrize("line", distill_commands())
def test_a_documented_command_exists_with_its_options(line: str, tmp_path: Path) -> None:
    done = run_distill([*subcommand(line), "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    for option in re.findall(r"--[a-z-]+", line):
        assert option in done.stdout


def test_the_commands_of_the_help_are_documented(tmp_path: Path) -> None:
    from typer.main import get_command

    from flows.cli import app

    commands = get_command(app).commands
    visible = {name for name, command in commands.items() if not command.hidden}
    documented = {words[0] for line in distill_commands() if (words := subcommand(line))}
    assert visible == documented


def test_the_quick_commands_run_in_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for line in QUICK:
        done = run_distill(shlex.split(line)[1:], tmp_path)
        assert done.returncode == 0, f"{line}: {done.stderr}"


def test_the_make_targets_exist() -> None:
    lines = [*command_lines(README), *command_lines(CONTRIBUTING)]
    inline = re.findall(r"`(make [a-z -]+)`", README + CONTRIBUTING)
    targets = {
        word for line in [*lines, *inline] if line.startswith("make ") for word in line.split()[1:]
    }
    assert {"nightly", "test", "install"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert targets <= set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))


def test_every_variable_of_the_makefile_is_set_in_it() -> None:
    makefile = (ROOT / "Makefile").read_text()
    used = set(re.findall(r"\$\(([A-Z_]+)\)", makefile)) - {"MAKEFILE_LIST"}
    known = set(re.findall(r"^([A-Z_]+) *[?:]?=", makefile, flags=re.M))
    assert {"PYTEST", "VLLM_VENV"} <= used
    assert used <= known


def test_the_extras_and_files_that_are_named_exist() -> None:
    extras = set(project()["project"]["optional-dependencies"])
    named = {
        extra
        for group in re.findall(r'-e "\.\[([a-z,-]+)\]"', README + CONTRIBUTING)
        for extra in group.split(",")
    }
    assert named
    assert named <= extras
    linked = re.findall(r"\]\(([^)#]+)\)", README + CONTRIBUTING)
    assert [link for link in linked if not (ROOT / link).is_file()] == []


def save_models(folder: Path) -> None:
    """A student and a bigger teacher with one tokenizer, as ordinary model folders."""
    from distill.models import build_model, char_tokenizer
    from distill.sections import ModelBuild

    tokenizer = char_tokenizer(ALPHABET)
    for name, width in (("student", 32), ("teacher", 64)):
        build = ModelBuild(
            hidden_size=width,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            intermediate_size=width,
        )
        build_model(build, tokenizer, seed=0).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def test_the_library_example_runs_and_the_divergence_falls(tmp_path: Path) -> None:
    save_models(tmp_path / "models")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (example,) = blocks(README, "python")
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(values) == 10
    assert values[-1] < values[0]


def test_the_session_with_skills_runs_as_written(tmp_path: Path) -> None:
    text = README[README.index("**3. A library") :]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    session, serving = blocks(text, "bash")[0], blocks(text, "py")[0]
    for words in (["bash", "-e", "-c", session], [sys.executable, "-c", serving]):
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "expel_001" in done.stdout
