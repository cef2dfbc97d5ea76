"""The command line: light help, one-line errors with the agreed exit codes, JSON where promised."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import distill
from distill.errors import ConfigError, DataError, PreflightError
from distill.rundir import RunDir, append_jsonl, digest_file, write_json
from flows.cli import main
from flows.configs import load_config
from flows.doctor import Check, examine, require_ready
from flows.identity import PACKAGES, foreign_packages, places
from flows.launch import LOCK_FILE, TRAINED, choose_run, is_over, open_run, unfinished
from flows.progress import PlainProgress, open_progress
from flows.registry import model_lock

HEAVY = (
    "torch",
    "transformers",
    "peft",
    "prefect",
    "wandb",
    "faiss",
    "datasets",
    "vllm",
    "pydantic",
    "numpy",
    "rich",
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr; nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("distill: error: ")
    assert err.count("\n") == 1, err
    return err


def make_run(home: Path, *, finished: bool = True, subcommand: str = "nightly") -> RunDir:
    run = RunDir.create(home, "micro")
    run.write_config(load_config(["micro"]), "")
    write_json(run.path / "env.json", {"subcommand": subcommand, "started": "2026-01-01"})
    rows = [{"stage": "opd", "step": step, "loss": 0.5 / step} for step in (1, 2, 3)]
    append_jsonl(run.metrics_path, rows)
    if finished:
        domain = {"teacher": 1.0, "before": 0.1, "after": 0.9, "difference": 0.8}
        summary = {
            "verdict": "promote",
            "reasons": ["it is better"],
            "domains": {"sort": {**domain, "low": 0.7, "high": 0.9, "n": 256}},
            "stages": [{"name": "opd", "objective": "gkd", "steps": 3, "seconds": 1.0}],
            "seconds": float("nan"),
        }
        write_json(run.summary_path, summary)
        (run.path / "report.html").write_text("<p>report</p>")
    return run


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = f"""
import sys, time
from flows.cli import main
code = main(["--help"])
print("code", code, "cpu", time.process_time())
print("heavy", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *help_text, cpu, heavy = done.stdout.splitlines()
    assert heavy == "heavy []"
    assert cpu.startswith("code 0 cpu ")
    assert float(cpu.rsplit(" ", 1)[1]) < 0.5
    for command in ("nightly", "init", "doctor", "registry", "rollback", "report"):
        assert any(line.strip().startswith(command) for line in help_text)


@pytest.mark.parametrize(
    "command",
    [
        *("nightly", "train", "sample", "eval", "gate", "promote", "rollback", "report", "init"),
        *("doctor", "registry list", "registry show", "runs list", "runs show", "runs tail"),
        *("config show", "config check"),
    ],
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert f"Usage: distill {command}" in capsys.readouterr().out


def test_the_module_and_the_version_answer(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "flows", "--version"], capture_output=True)
    assert done.stdout.decode() == f"distill-nightly {distill.__version__}\n"
    assert main([]) == 2
    assert "Usage: distill" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "No such command 'nope'"),
        (["nightly", "--nope"], "No such option: --nope"),
        (["nightly"], "name a preset (agents, hindsight, micro, micro_logs, smol, tiny)"),
        (["nightly", "tinny"], "did you mean 'tiny'"),
        (["config", "show", "tiny", "trainer.stps=3"], "did you mean 'steps'"),
        (["rollback", "toy"], "confirm with --yes"),
        (["runs", "tail", "-n", "0"], "'-n' / '--lines'"),
        (["eval", "tiny", "--suite", "train"], "'train' is not one of"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in error_line(capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs", "show"], "no runs in"),
        (["runs", "show", "gone"], "no run 'gone'"),
        (["registry", "show", "toy"], "no champion of 'toy'"),
        (["rollback", "toy", "--yes"], "no champion of 'toy'"),
        (["eval", "toy"], "'toy' is no folder with"),
        (["nightly", "--resume"], "nothing to resume"),
        (["nightly", "micro-1", "--resume"], "no run 'micro-1'"),
    ],
)
def test_what_does_not_exist_is_one_line_and_exit_code_2(
    words: list[str], message: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--home", str(home)]) == 2
    assert message in error_line(capsys)


def test_an_unexpected_error_is_one_line_and_debug_shows_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = "def Env():\n    raise ZeroDivisionError('two\\nlines')\n"
    (tmp_path / "users_env.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["config", "check", "micro", "data.name=users_env:Env"]
    assert main(words) == 1
    assert "unexpected ZeroDivisionError: two lines; the same command with --debug" in error_line(
        capsys
    )
    with pytest.raises(ZeroDivisionError):
        main([*words, "--debug"])


def test_runs_show_as_json_has_the_agreed_fields_also_before_the_end(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agreed = {"verdict", "reasons", "domains", "stages", "seconds", "peak_rss_bytes"}
    agreed |= {"adapter_sha256", "bank_version", "warnings"}
    for run in (make_run(home), make_run(home, finished=False)):
        assert main(["runs", "show", run.name, "--json", "--home", str(home)]) == 0
        facts = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        assert agreed <= facts.keys()
        assert facts["verdict"] == ("promote" if run.is_finished else None)


def test_runs_list_and_tail_tell_the_state_and_the_last_rows(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(home)
    open_one = make_run(home, finished=False)
    assert main(["runs", "list", "--json", "--home", str(home)]) == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows[open_one.name]["state"] == "interrupted"
    assert {row["verdict"] for row in rows.values()} == {"promote", None}
    assert main(["runs", "tail", open_one.name, "-n", "2", "--json", "--home", str(home)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 3]
    assert main(["runs", "list", "--home", str(home)]) == 0
    assert "interrupted" in capsys.readouterr().out


def test_config_show_names_the_origin_of_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "micro", "trainer.lr=1", "--json"]) == 0
    values = {v["key"]: v for v in json.loads(capsys.readouterr().out)["values"]}
    assert values["trainer.lr"] == {"key": "trainer.lr", "value": 1.0, "origin": "command line"}
    assert values["model.name"]["origin"] == "preset micro"
    assert main(["config", "show", "micro", "--toml"]) == 0
    assert 'name = "micro"' in capsys.readouterr().out


def test_registry_list_and_rollback_work_from_the_command_line(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from distill.types import CheckpointRef
    from flows import registry

    for name in ("a", "b"):
        folder = home / name
        folder.mkdir()
        (folder / "model.safetensors").write_text(name)
        digest = digest_file(folder / "model.safetensors")
        write_json(folder / "manifest.json", {"format": 1, "files": {"model.safetensors": digest}})
        ref = CheckpointRef(
            path=folder, step=1, policy_version=1, base="full", kind="full", digest=digest
        )
        registry.promote(home, "toy", ref, run=name)
    at = ["--json", "--home", str(home)]
    assert main(["registry", "list", *at]) == 0
    (champion,) = json.loads(capsys.readouterr().out)
    assert (champion["model"], champion["run"]) == ("toy", "b")
    assert main(["rollback", "toy", "--yes", *at]) == 0
    assert json.loads(capsys.readouterr().out)["action"] == "rollback"
    with model_lock(home, "toy"):
        assert main(["rollback", "toy", "--yes", "--home", str(home)]) == 2
    assert "another night on model 'toy' is running" in error_line(capsys)
    assert main(["registry", "show", "toy", *at]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["current"]["run"] == "a"
    assert [e["action"] for e in shown["history"]] == ["promote", "promote", "rollback"]


def open_and_fail(error: Exception, config: Any, *, with_work: bool = False) -> None:
    with open_run(config, subcommand="nightly", argv=["distill", "nightly"]) as run:
        if with_work:
            (run.stage_dir("opd") / "checkpoints").mkdir(parents=True)
        raise error


def test_a_run_that_bad_input_stopped_at_the_start_leaves_no_folder(home: Path) -> None:
    config = load_config(["micro", f"run.home={home}"])
    with pytest.raises(DataError):
        open_and_fail(DataError("empty file"), config)
    assert list((home / "runs").iterdir()) == []
    with pytest.raises(DataError):
        open_and_fail(DataError("broken line"), config, with_work=True)
    with pytest.raises(RuntimeError):
        open_and_fail(RuntimeError("a bug"), config)
    runs = RunDir.all(home)
    assert len(runs) == 2
    assert "RuntimeError: a bug" in (runs[0].path / "logs" / "latest").read_text()
    assert all(not (run.path / LOCK_FILE).exists() for run in runs)


def test_a_run_records_how_it_was_started(home: Path) -> None:
    config = load_config(["micro", f"run.home={home}", "run.seed=7"])
    argv = ["distill", "nightly", "micro", "run.seed=7", "model.path=a b"]
    with open_run(config, subcommand="nightly", argv=argv) as run, open_progress() as progress:
        progress.message("hello")
    env = json.loads((run.path / "env.json").read_text())
    assert (env["argv"], env["seed"], env["subcommand"]) == (argv, 7, "nightly")
    assert env["command"] == "distill nightly micro run.seed=7 'model.path=a b'"
    assert env["versions"]["torch"] == importlib.metadata.version("torch")
    assert "hello" in (run.path / "logs" / "attempt_1.log").read_text()
    assert run.read_config() == config
    assert load_config([str(run.path / "config.toml")]) == config


def test_resume_finds_the_newest_unfinished_night_and_refuses_other_settings(home: Path) -> None:
    night = make_run(home, finished=False)
    make_run(home, finished=False, subcommand="train")
    make_run(home)
    assert unfinished(home, "nightly") == night
    assert choose_run("nightly", [], True, home) == (night.read_config(), night)
    assert choose_run("nightly", [night.name], True, home)[1] == night
    assert choose_run("nightly", ["micro"], True, home)[1] == night
    with pytest.raises(ConfigError, match="nothing to resume: every run of preset 'tiny'"):
        choose_run("nightly", ["tiny"], True, home)
    config, run = choose_run("nightly", ["trainer.lr=5"], True, home)
    with (
        pytest.raises(ConfigError, match=r"differs in: trainer\.lr;"),
        open_run(config, subcommand="nightly", argv=[], resume=run),
    ):
        pass
    assert run == night


def test_a_finished_training_is_not_resumed(home: Path) -> None:
    run = make_run(home, finished=False, subcommand="train")
    assert unfinished(home, "train") == run
    run.add_event(TRAINED, stage="opd")
    assert is_over(run)
    with pytest.raises(ConfigError, match="nothing to resume"):
        unfinished(home, "train")
    with pytest.raises(ConfigError, match=f"{run.name} is finished"):
        choose_run("train", [run.name], True, home)


def test_two_processes_cannot_work_on_one_run(home: Path) -> None:
    run = make_run(home, finished=False)
    with (
        open_run(run.read_config(), subcommand="nightly", argv=[], resume=run),
        pytest.raises(ConfigError, match=f"another process on run {run.name} is running"),
        open_run(run.read_config(), subcommand="nightly", argv=[], resume=run),
    ):
        pass
    assert run.path.exists()


def test_a_second_night_on_the_same_model_ends_with_exit_code_2_and_no_folder(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with model_lock(home, "micro"):
        assert main(["nightly", "micro", "--home", str(home)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "distill: error: another night on model 'micro' is running" in err
    assert list((home / "runs").iterdir()) == []


def test_packages_of_another_distribution_are_noticed() -> None:
    ours = places()
    assert tuple(ours) == PACKAGES
    assert foreign_packages() == ""
    foreign = foreign_packages({**ours, "evals": Path("/elsewhere")})
    assert "evals from /elsewhere" in foreign
    assert "skills from None" in foreign_packages({**ours, "skills": None})


def test_doctor_checks_the_tokenizers_of_a_configuration(home: Path) -> None:
    checks = examine(load_config(["micro"]), home)
    assert all(check.status != "fail" for check in checks)
    details = [(check.name, check.detail) for check in checks]
    assert any(n == "teacher: model" and "replies end with '$'" in d for n, d in details)
    assert any(n == "opd: teacher" and "reads the same" in d for n, d in details)
    config = load_config(["micro", "stage.opd.model.path=./nowhere"])
    missing = [c for c in examine(config, home) if c.status == "fail"]
    assert {c.name for c in missing} == {"opd: model", "opd: teacher"}


def test_doctor_ends_with_exit_code_20_when_something_is_missing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", "micro", "stage.opd.model.path=./nowhere", "--json", "--home", str(home)]
    assert main(words) == 20
    checks = [Check(**check) for check in json.loads(capsys.readouterr().out)]
    assert any(check.status == "fail" and "nowhere" in check.detail for check in checks)


def test_a_home_without_space_fails_the_preflight() -> None:
    with pytest.raises(PreflightError, match=r"^disk: .*/proc.*run\.home"):
        require_ready(Path("/proc/nowhere"))


def test_plain_progress_prints_lines_and_never_more_than_one_per_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = PlainProgress(sys.stderr)
    progress.stage_started("opd", 100)
    for step in range(100):
        progress.step("opd", step, {"loss": 0.5})
    progress.stage_done("opd", 12.34, "reward 0.9")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["opd: started, 100 steps", "opd: done in 12.3 s, reward 0.9"]


def test_a_home_that_is_a_file_is_not_ready(tmp_path: Path) -> None:
    file = tmp_path / "home"
    file.write_text("x")
    with pytest.raises(PreflightError, match="is no folder"):
        require_ready(file / "below")


def test_doctor_reads_the_data_of_a_configuration(home: Path) -> None:
    words = ["data.name=jsonl", f"data.path={home / 'missing.jsonl'}"]
    checks = examine(load_config(["micro", *words]), home)
    assert [c.status for c in checks if c.name.endswith(": data")][:1] == ["fail"]


def test_a_damaged_run_is_listed_as_such_and_hides_no_other(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = make_run(home), make_run(home)
    bad.summary_path.write_text("[]")
    assert main(["runs", "list", "--json", "--home", str(home)]) == 0
    states = {row["run"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert states == {good.name: "finished", bad.name: "damaged"}
