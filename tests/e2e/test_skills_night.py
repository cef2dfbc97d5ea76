"""Whole nights with hindsight and with a bank in the prompts, and what they leave behind."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.models import load_tokenizer, weights_file
from distill.rundir import RunDir, read_json, read_jsonl
from distill.tokens import Chat
from distill.types import EvalReport, Rollout, Task
from flows import judging, registry
from flows.acting import SkillPrompts
from flows.building import tasks_at
from flows.cli import main
from flows.wiring import build_env
from skill_nights import (
    OPID,
    PLAIN,
    PROMOTED,
    RULES,
    SKILLRL,
    TAGS,
    home_with_base,
    night_of,
    notes_of,
    order_skill,
    right_order,
    rollouts_of,
    run_night,
    start_file,
)
from skills.bank import SkillBank
from skills.check import verify

UNREADABLE = 'stage.seed.analyst={name="policy", format="slot", max_tokens=8}'
NO_WORDS = "skills.min_words=90"
"""Longer than anything that the student can write: no note is valid."""
SHOWN = re.compile(r"[A-Z]\d+\[")
"""Begins a prompt that holds a skill; the student may write a bracket itself later on."""
STEP = 'stage.seed.view={name="with_skill", scope="episode_step"}'


@pytest.fixture(scope="module")
def seed_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a finished SEED night that kept its skills; do not write into it."""
    home = tmp_path_factory.mktemp("seed")
    run_night(home, RULES, "skills.keep=true")
    return home


@pytest.fixture(scope="module")
def seed_run(seed_home: Path) -> RunDir:
    return RunDir.all(seed_home)[0]


@pytest.fixture
def home(seed_home: Path, tmp_path: Path) -> Path:
    """An empty home whose cache holds the base."""
    return home_with_base(seed_home, tmp_path / "home")


@pytest.fixture(scope="module")
def skillrl_home(seed_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a promoted SkillRL night that began with the skill of one tag; do not write into
    it."""
    home = home_with_base(seed_home, tmp_path_factory.mktemp("skillrl") / "home")
    start = order_skill("A", right_order("A"), id="call_001", status="active")
    given = f"skills.start={start_file(home, start)}"
    run_night(home, *SKILLRL, *PROMOTED, given)
    return home


@pytest.fixture(scope="module")
def skillrl_run(skillrl_home: Path) -> RunDir:
    return RunDir.all(skillrl_home)[0]


def chat_of(run: RunDir) -> Chat:
    return Chat(load_tokenizer(str(run.stage_dir("seed") / "final")), max_length=96)


def met_tasks(run: RunDir) -> dict[str, Task]:
    """Every task of the stage `seed`, by id."""
    night = night_of(run)
    tasks_of = tasks_at(night, night.config.stage("seed"))
    return {t.id: t for step in (1, 2, 3) for t in tasks_of(step)}


def prompt_of(row: Rollout, chat: Chat) -> str:
    """What stood before the first token that the student wrote."""
    return chat.decode(row.token_ids[: row.completion_mask.index(True)])


def metrics(run: RunDir, name: str) -> list[float]:
    return [r[name] for r in read_jsonl(run.metrics_path) if r["stage"] == "seed"]


def tensors(run: RunDir) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(weights_file(run.stage_dir("seed") / "final"))


def equal(one: RunDir, other: RunDir) -> bool:
    left, right = tensors(one), tensors(other)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# -- the acting prompt ----------------------------------------------------------------------------


def never_shown(run: RunDir) -> None:
    """No prompt of a stage holds more than the task and the conversation so far."""
    chat, tasks = chat_of(run), met_tasks(run)
    rows = [r for r in rollouts_of(run) if r.num_trained]
    assert rows
    for row in rows:
        (own,) = chat.prompts([tasks[row.task_id].prompt])
        assert row.token_ids[: len(own)] == own
        assert SHOWN.match(prompt_of(row, chat)) is None
        assert row.skill_ids == ()


def test_a_seed_stage_never_shows_a_skill_to_the_student(seed_run):
    never_shown(seed_run)
    assert {n.status for n in notes_of(seed_run)} == {"ok"}
    assert min(metrics(seed_run, "view/built")) > 0, "the teacher has seen some"


def test_an_opid_stage_never_shows_a_skill_to_the_student(home):
    run = run_night(home, RULES, STEP, f"stage.seed.objective={{{OPID}}}")
    never_shown(run)
    assert sum(metrics(run, "view/from_step_skill")) > 0, "the teacher has seen some"


def test_no_evaluation_of_a_seed_night_shows_a_skill_although_its_bank_has_active_ones(seed_home):
    run = RunDir.all(seed_home)[0]
    samples = read_json(run.samples_path)
    assert len(samples) > 0
    assert not any(SHOWN.match(row["prompt"]) for row in samples)
    assert read_json(run.summary_path)["bank_version"] is None


def test_with_a_bank_every_prompt_of_a_family_with_an_active_skill_holds_it(skillrl_run):
    chat, tasks, run = chat_of(skillrl_run), met_tasks(skillrl_run), skillrl_run
    held = SkillBank.open(run.home, "calls")
    versions = {row["step"]: row["version"] for row in read_jsonl(looks_of(run))}
    assert sorted(versions) == [0, 2, 3]
    seen = set()
    for row in rollouts_of(run):
        step = int(row.seed.split("/")[3])
        family = tasks[row.task_id].meta["key"]
        version = versions[max(s for s in versions if s <= step)]
        active = {i.category: i for i in held.items("active", version=version)}
        if family in active:
            assert f"[{active[family].principle}]:" in prompt_of(row, chat)
            assert row.skill_ids == (active[family].id,)
        else:
            assert SHOWN.match(prompt_of(row, chat)) is None
            assert row.skill_ids == ()
        seen.add((step > 1, family, bool(row.skill_ids)))
    assert {(False, "A", True), (False, "K", False), (True, "A", True), (True, "K", True)} == seen


def test_evaluations_show_the_skills_that_belong_to_the_weights(skillrl_run):
    before, after = (
        read_json(skillrl_run.path / "evals" / f"{who}_samples.json") for who in ("before", "after")
    )
    assert {row["prompt"][0] for row in after} == set(TAGS)
    for row in before:
        tag = row["prompt"][0]
        assert (f"[{right_order('A')}]:" in row["prompt"]) == (tag == "A")
    for row in after:
        assert f"[{right_order(row['prompt'][0])}]:" in row["prompt"]


def looks_of(run: RunDir) -> Path:
    return run.stage_dir("seed") / "bank.jsonl"


def test_evolution_only_reads_tasks_of_its_own_split(skillrl_run):
    env = build_env(
        night_of(skillrl_run).config.for_stage(night_of(skillrl_run).config.stage("seed"))
    )
    split = {t.id: name for name in ("evolve", "gate", "test") for t in env.tasks(name)}
    held = SkillBank.open(skillrl_run.home, "calls")
    named = [e.traj_id for item in held.items() for e in item.evidence]
    assert named
    for name in named:
        assert split[name.split("/evolve2/")[1].split("/")[0]] == "evolve"
    judged = set(read_json(skillrl_run.eval_path("after"))["outcomes"])
    assert {split[task] for task in judged} == {"gate"}


# -- analyses that cannot be used -----------------------------------------------------------------


TWICE = ("stage.seed.trainer.epochs=2", "stage.seed.trainer.minibatches=2")


@pytest.mark.parametrize(
    ("objective", "trainer"),
    [((), ()), ((f"stage.seed.objective={{{OPID}}}",), ()), ((), TWICE)],
    ids=["seed", "opid", "several updates"],
)
def test_a_stage_without_a_valid_analysis_is_plain_grpo_bit_for_bit(
    objective, trainer, seed_home, tmp_path
):
    lazy_home, plain_home = (home_with_base(seed_home, tmp_path / n) for n in ("lazy", "plain"))
    lazy = run_night(lazy_home, UNREADABLE, NO_WORDS, *objective, *trainer)
    plain = run_night(plain_home, *PLAIN, *trainer)
    assert {n.status for n in notes_of(lazy)} == {"invalid"}
    assert metrics(lazy, "view/built") == [0.0] * 3
    assert [r.token_ids for r in rollouts_of(lazy)] == [r.token_ids for r in rollouts_of(plain)]
    assert min(metrics(plain, "grad_norm")) > 0, "both have learned something"
    assert equal(lazy, plain)
    summaries = [read_json(run.summary_path) for run in (lazy, plain)]
    assert summaries[0]["adapter_sha256"] == summaries[1]["adapter_sha256"]
    assert summaries[0]["adapter_sha256"] != summaries[0]["start_sha256"]


def test_with_valid_analyses_the_same_stage_ends_elsewhere(seed_home, seed_run, tmp_path):
    plain = run_night(home_with_base(seed_home, tmp_path / "plain"), *PLAIN)
    opid = run_night(
        home_with_base(seed_home, tmp_path / "opid"),
        RULES,
        f"stage.seed.objective={{{OPID}}}",
    )
    assert not equal(seed_run, plain)
    assert not equal(opid, plain)


def test_a_night_whose_analyst_cannot_write_is_held_and_says_why(home):
    run = run_night(home, UNREADABLE, NO_WORDS, *PROMOTED, "stage.seed.trainer.steps=4")
    verdict = read_json(run.gate_path())
    assert verdict["decision"] == "hold"
    (reason,) = (r for r in verdict["reasons"] if r["rule"] == "analyst")
    assert reason["passed"] is False
    assert (reason["observed"], reason["bound"]) == (0.0, 0.8)
    said = "Stage seed: 0 % of the first 64 notes could be read, 80 % are needed"
    summary = read_json(run.summary_path)
    assert summary["verdict"] == "hold"
    assert any(text.startswith(said) for text in summary["reasons"])
    (stage,) = (s for s in summary["stages"] if s["name"] == "seed")
    assert stage["learned"]["is_enough"] is False
    assert stage["learned"]["notes"] == {"invalid": 64}
    for page in ("report.md", "report.html"):
        assert said in (run.path / page).read_text()
    assert metrics(run, "seed.skill/token_share") == [0.0] * 4
    assert [e.action for e in registry.history(home, "hindsight")] == ["initial"]


def test_the_same_night_is_promoted_when_few_valid_notes_are_enough(home):
    changes = (UNREADABLE, NO_WORDS, *PROMOTED, "stage.seed.trainer.steps=4")
    run = run_night(home, *changes, "skills.min_valid_rate=0.0")
    assert read_json(run.gate_path())["decision"] == "promote"


def test_a_student_that_cannot_read_the_question_for_new_skills_does_not_end_the_night(home):
    asked = 'stage.seed.analyst={name="policy", format="json", max_tokens=4}'
    run = run_night(home, *SKILLRL, asked)
    summary = read_json(run.summary_path)
    assert any("no new skill: the question has" in text for text in summary["warnings"])
    assert metrics(run, "reward/mean")


# -- the bank and the champion --------------------------------------------------------------------


def test_a_promoted_night_registers_its_weights_with_its_skills(skillrl_home, skillrl_run):
    bank = SkillBank.open(skillrl_home, "calls")
    first, last = registry.history(skillrl_home, "hindsight")
    versions = [row["version"] for row in read_jsonl(looks_of(skillrl_run))]
    assert (first.action, first.bank) == ("initial", f"calls@{versions[0]}")
    assert (last.action, last.bank) == ("promote", f"calls@{versions[-1]}")
    assert versions[0] != versions[-1] == bank.snapshot()
    assert read_json(skillrl_run.summary_path)["bank_version"] == last.bank


@pytest.fixture
def grown(skillrl_home: Path, tmp_path: Path) -> Path:
    """A copy of the home after the promoted night."""
    return Path(shutil.copytree(skillrl_home, tmp_path / "grown"))


def test_a_held_night_leaves_the_bank_as_it_was(grown):
    bank = SkillBank.open(grown, "calls")
    with bank.change() as change:
        for item in change.items("active"):
            change.remove(item.id)
    start = bank.snapshot()
    run = run_night(grown, *SKILLRL)
    looks = read_jsonl(looks_of(run))
    assert looks[-1]["version"] != looks[0]["version"] == start, "it grew meanwhile"
    assert read_json(run.summary_path)["verdict"] == "hold"
    assert bank.snapshot() == start
    assert read_json(run.summary_path)["bank_version"] == f"calls@{start}"
    assert not any("somebody else" in text for text in read_json(run.summary_path)["warnings"])
    assert verify(bank.store).problems == ()


def test_a_rollback_moves_the_weights_and_the_skills(grown, capsys):
    bank, before = SkillBank.open(grown, "calls"), registry.history(grown, "hindsight")
    assert main(["rollback", "hindsight", "--yes", "--home", str(grown)]) == 0
    champion = registry.current(grown, "hindsight")
    assert champion is not None
    assert champion.digest == before[0].to_digest
    assert champion.bank == before[0].bank == f"calls@{bank.snapshot()}"
    assert {i.category for i in bank.items("active")} == {"A"}
    assert "the skill bank went with the weights" in capsys.readouterr().err
    assert verify(bank.store).problems == ()


def shown_by(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> set[str]:
    """The bank versions that stood in the prompts of a command."""
    seen, real = [], judging.run_report

    def spied(*values: Any, prompts: SkillPrompts | None = None, **more: Any) -> EvalReport:
        assert prompts is not None
        seen.append(prompts.retriever.bank_version)
        return real(*values, prompts=prompts, **more)

    monkeypatch.setattr(judging, "run_report", spied)
    assert main([*arguments]) in (0, 3)
    return set(seen)


def test_an_evaluation_of_a_champion_shows_its_own_skills(grown, skillrl_run, monkeypatch):
    first, last = registry.history(grown, "hindsight")
    at, name = ("--home", str(grown)), skillrl_run.name
    versions = [str(entry.bank).partition("@")[2] for entry in (first, last)]
    assert shown_by(monkeypatch, "eval", "hindsight", *at) == {versions[1]}
    assert main(["rollback", "hindsight", "--yes", *at]) == 0
    assert shown_by(monkeypatch, "eval", "hindsight", *at) == {versions[0]}
    assert shown_by(monkeypatch, "eval", name, *at) == {versions[1]}
    assert shown_by(monkeypatch, "gate", name, "hindsight", *at) == set(versions)


def test_a_champion_without_its_run_is_evaluated_with_its_skills_and_makes_none(
    grown, skillrl_run, monkeypatch
):
    champion = registry.current(grown, "hindsight")
    assert champion is not None
    run = grown / "runs" / skillrl_run.name
    preset, base = str(grown / "again.toml"), run / "stages" / "base" / "final"
    shutil.copytree(base, grown / "base")
    shutil.copy(run / "config.toml", preset)
    shutil.rmtree(run)
    more = (preset, f"stage.seed.model.path={grown / 'base'}", "--home", str(grown))
    version = champion.bank.partition("@")[2]
    assert shown_by(monkeypatch, "eval", "hindsight", *more) == {version}
    assert main(["eval", "hindsight", "skills.bank=none", *more]) == 2
    assert SkillBank.names(grown) == ["calls"]


def test_a_held_night_that_a_person_promotes_takes_its_skills_along(home, monkeypatch, capsys):
    run = run_night(home, *SKILLRL, "gate.min_gain=1.0")
    at, bank = ("--home", str(home)), SkillBank.open(home, "calls")
    assert read_json(run.summary_path)["verdict"] == "hold"
    start, grown = bank.snapshot(), read_jsonl(looks_of(run))[-1]["version"]
    assert shown_by(monkeypatch, "eval", "hindsight", *at) == {start}
    for _ in range(2):  # as after a kill between the weights and the skills
        assert main(["promote", run.name, "--yes", *at]) == 0
        champion = registry.current(home, "hindsight")
        assert champion is not None
        assert champion.bank == f"calls@{grown}" == f"calls@{bank.snapshot()}" != f"calls@{start}"
    assert capsys.readouterr().err.count("the skill bank went with the weights") == 1


def test_all_vectors_of_a_night_are_of_the_weights_that_it_started_from(home):
    embedded = ("skills.mode=embedding", "stage.seed.trainer.lr=1e-1")
    run = run_night(home, *SKILLRL, *embedded)
    assert not equal_files(run.path / "start", run.stage_dir("seed") / "final")
    seen = embedders(home)
    assert len(seen) == 1
    for name in ("hindsight", run.name):  # the start, as the night is held, and the result
        assert main(["eval", name, "--home", str(home)]) == 0
        assert embedders(home) == seen


def embedders(home: Path) -> set[str]:
    """Whose vectors a bank has: the name of an index begins with that."""
    return {path.name.partition("-")[0] for path in (home / "bank" / "calls" / "index").iterdir()}


def equal_files(one: Path, other: Path) -> bool:
    return weights_file(one).read_bytes() == weights_file(other).read_bytes()


def test_the_next_night_begins_with_the_skills_of_the_champion(grown):
    champion = registry.current(grown, "hindsight")
    run = run_night(grown, *SKILLRL[:4], "skills.show=true", "stage.seed.analyst.name=")
    assert champion is not None
    versions = read_json(run.path / "night.json")["bank_versions"]
    assert [f"{name}@{version}" for name, version in versions.items()] == [champion.bank]
    assert all(r.skill_ids for r in rollouts_of(run))


def test_what_hindsight_taught_waits_in_the_bank_as_a_candidate(seed_home, seed_run):
    bank = SkillBank.open(seed_home, "calls")
    learned = read_json(seed_run.stage_dir("seed") / "learned.json")
    items = bank.items()
    assert [i.id for i in items] == learned["kept"]["added"]
    assert {right_order(tag) for tag in TAGS} <= {i.principle for i in items}
    trained = {r.traj_id for r in rollouts_of(seed_run)}
    assert {e.traj_id for i in items for e in i.evidence} <= trained
    assert all(len({e.traj_id for e in i.evidence}) >= 2 for i in items)
    assert all(i.credit.num_used == i.credit.num_without == 2 for i in items)
    assert learned["kept"]["version"] == bank.snapshot()
