"""What `distill doctor` says, in which order, with which exit code; and what only --full sees."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from flows import doctor, doctor_engines, doctor_rehearsals, doctor_scoring
from flows.cli import main
from flows.configs import load_config
from flows.doctor_checks import Subject, named_tables
from flows.doctor_models import loader


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


def test_an_unknown_gpu_is_named(site: Path) -> None:
    with_device = replace(subject_of(site), device="Abacus 9")
    (check,) = doctor.guarded("memory", lambda: _fits(with_device))
    assert check.status == "fail"
    assert "'Abacus 9'" in check.detail
    assert "H200" in check.detail


def _fits(subject: Subject) -> Sequence[Any]:
    from flows.doctor_resources import check_fits

    return check_fits(subject)


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
