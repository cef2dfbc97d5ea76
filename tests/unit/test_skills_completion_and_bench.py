"""What a shell offers for `distill skills`, and what `distill bench` measures."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import main
from skill_banks import make_own, skill
from skills.bank import SkillBank
from tree import ROOT


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own(home: Path) -> SkillBank:
    return make_own(home)


# -- completion -----------------------------------------------------------------------------------


class Shell:
    """A shell whose user asks for the rest of the last word of a line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, line: str) -> list[str]:
        for name, value in asked_by_bash(line).items():
            self.monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as left:
            main([])
        out, err = self.capsys.readouterr()
        assert (left.value.code, err) == (0, "")
        return out.split()


def asked_by_bash(line: str) -> dict[str, str]:
    place = str(len(line.split(" ")) - 1)
    return {"_DISTILL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": place}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


def in_a_process(line: str, code: str = "") -> str:
    """What a new process prints, which is what a shell starts at every key press."""
    start = "import sys; from flows.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", start + code],
        env={**os.environ, **asked_by_bash(line), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_shell_is_offered_skills_banks_and_versions(
    own: SkillBank, home: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell("distill skills retr") == ["retrieve"]
    assert shell("distill skills show he") == ["heat_001", "held_001"]
    assert shell("distill skills merge gen_001 co") == ["cool_001"]
    SkillBank.create(home, "other")
    assert shell("distill skills list --bank o") == ["other", "own"]
    assert shell("distill skills show he") == []  # which bank is not clear
    assert shell("distill skills show --bank own ge") == ["gen_001"]
    first = own.snapshot()
    assert shell(f"distill skills diff --bank own {first[:3]}") == [first[:12]]
    assert shell(f"distill skills stats --bank own --version {first[:20]}") == [first[:20]]
    assert shell("distill skills list --status q") == ["quarantined"]
    monkeypatch.chdir(home.parent)
    assert shell(f"distill skills show --home {home} --bank own ge") == ["gen_001"]
    assert shell("distill skills show ge") == []


def test_completion_offers_no_name_that_a_shell_would_run_and_no_error(
    own: SkillBank, shell: Shell
) -> None:
    with own.change() as change:
        for name in ("a$(reboot)", "a`id`", "a;b", "a_1", "-a", 'a"b'):
            change.insert(skill(name))
    assert shell("distill skills show a") == ["a_1"]
    assert "-a" not in shell("distill skills show -")
    (own.path / "active").write_text("damaged")
    assert shell("distill skills show a") == []
    (own.path / "active").unlink()
    assert shell("distill skills show a") == []


def test_completion_is_not_much_more_work_than_a_help_page(home: Path) -> None:
    bank = SkillBank.create(home, "main", capacity=0)
    with bank.change() as change:
        for n in range(500):
            change.insert(skill(f"s_{n:04d}"))
    helped, offered = [], []
    for _ in range(3):  # side by side, since other processes may hold the cores
        start = work_of_children()
        assert in_a_process("distill skills show --hel") == "--help\n"
        helped.append(work_of_children() - start)
        start = work_of_children()
        assert in_a_process("distill skills show s_0499") == "s_0499\n"
        offered.append(work_of_children() - start)
    assert min(offered) < 1.5 * min(helped)


def work_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_completion_loads_no_code_of_the_bank(own: SkillBank) -> None:
    names = ("skills.bank", "distill.rundir", "numpy", "torch", "rich")
    code = f"print([name for name in {names!r} if name in sys.modules])"
    assert in_a_process("distill skills show g", code).split() == ["gen_001", "[]"]


def test_the_shell_script_can_be_shown(home: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = "import sys; from flows.cli import main; sys.exit(main(['--show-completion', 'bash']))"
    env["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert "_DISTILL_COMPLETE=complete_bash" in done.stdout


# -- bench ----------------------------------------------------------------------------------------


def test_bench_lists_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert "distill bench skills" in capsys.readouterr().out
    assert main(["bench", "skills", "--help"]) == 0
    assert "Example: distill bench skills" in capsys.readouterr().out
    assert main(["bench", "skills", "--size", "5"]) == 2


def test_bench_measures_search_list_and_add(capsys: pytest.CaptureFixture[str]) -> None:
    words = "skills --size 600 --dimension 16 --queries 20 --listed 150 --held 150 --offered 40"
    assert main(["bench", *words.split(), "--json"]) == 0
    parts = {row["part"]: row["speed"] for row in json.loads(capsys.readouterr().out)}
    search, listed, add = parts["search"], parts["list"], parts["add"]
    assert (search["size"], search["kind"], search["recall"]) == (600, "flat", 1.0)
    assert 0 < search["p50"] <= search["p95"] < search["build"] + 1
    assert 0 < listed["page"] < listed["command"]
    assert (add["repeats"], add["held"]) == (4, 150)
    assert add["merged"] >= 4
    assert add["added"] + add["merged"] == 40
    assert add["cpu"] > 0
