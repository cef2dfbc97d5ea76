"""`distill skills extract`: what the stored attempts of a run teach, as candidates of a bank."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from distill.rundir import RunDir
from flows.cli import main
from skill_nights import (
    PLAIN,
    TAGS,
    home_with_base,
    order_skill,
    right_order,
    rollouts_of,
    run_night,
)
from skills.bank import SkillBank
from skills.check import verify

RULES = "analyst.name=rules"
LESSONS = "analyst.steps=false"


@pytest.fixture(scope="module")
def grpo_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a finished GRPO night, which had no analyst and no bank; do not write into it."""
    home = tmp_path_factory.mktemp("grpo")
    run_night(home, *PLAIN)
    return home


@pytest.fixture
def home(grpo_home: Path, tmp_path: Path) -> Path:
    """A copy of it with an empty bank `calls`."""
    home = Path(shutil.copytree(grpo_home, tmp_path / "home"))
    SkillBank.create(home, "calls")
    return home


@pytest.fixture
def run(home: Path) -> RunDir:
    return RunDir.all(home)[0]


def extract(home: Path, *words: str) -> int:
    return main(["skills", "extract", *words, "--home", str(home)])


def test_stored_attempts_become_candidates_with_their_evidence(home, run):
    assert extract(home, run.name, RULES, LESSONS, "--bank", "calls") == 0
    bank = SkillBank.open(home, "calls")
    items = bank.items()
    assert {(i.category, i.principle) for i in items} == {(t, right_order(t)) for t in TAGS}
    assert {i.status for i in items} == {"candidate"}
    attempts = {row.traj_id for row in rollouts_of(run)}
    assert {e.traj_id for i in items for e in i.evidence} == attempts
    assert all(i.lineage.run == run.name and len(i.evidence) >= 2 for i in items)
    assert verify(bank.store).problems == ()


def test_doing_it_again_changes_nothing_more(home, run):
    assert extract(home, run.name, RULES, LESSONS) == 0
    before = SkillBank.open(home, "calls").history()
    assert extract(home, run.name, RULES, LESSONS) == 0
    assert SkillBank.open(home, "calls").history() == before


def test_a_dry_run_says_the_same_and_writes_nothing(home, run, capsys):
    bank = SkillBank.open(home, "calls")
    before = bank.history()
    assert extract(home, run.name, RULES, LESSONS, "--dry-run", "--json") == 0
    told, said = capsys.readouterr()
    assert bank.history() == before
    assert "dry run: nothing was changed" in said
    assert extract(home, run.name, RULES, LESSONS, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(told)


def test_the_facts_as_json(home, run, capsys):
    assert extract(home, run.name, RULES, LESSONS, "--json", "--last", "2") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["run"], facts["stage"], facts["steps"]) == (run.name, "seed", 2)
    assert facts["attempts"] == 2 * 4 * 4
    assert facts["notes"] == {"ok": facts["attempts"]}
    assert facts["waiting"] == 0
    assert "100 % of the first 32 notes could be read" in facts["verdict"]
    assert {(s["result"], s["title"]) for s in facts["skills"]} == {
        ("added", right_order(tag)) for tag in TAGS
    }
    items = SkillBank.open(home, "calls").items()
    assert [s["id"] for s in facts["skills"]] == [i.id for i in items]


def test_the_table_for_people(home, run, capsys):
    assert extract(home, run.name, RULES, LESSONS) == 0
    told, said = capsys.readouterr()
    assert all(right_order(tag) in told for tag in TAGS)
    assert "48 attempts of 3 steps: 100 % of the first 48 notes could be read" in said


def test_what_was_seen_too_rarely_is_not_kept_and_counted(home, run, capsys):
    assert extract(home, run.name, RULES, LESSONS, "skills.min_sightings=1000") == 0
    assert SkillBank.open(home, "calls").items() == []
    assert "skills were seen less than 1000 times: not kept" in capsys.readouterr().err


def test_exit_code_3_when_a_skill_was_refused(home, run, capsys):
    assert extract(home, run.name, RULES, LESSONS) == 0
    bank = SkillBank.open(home, "calls")
    with bank.change() as change:
        for item in list(change.items()):
            change.retire(item.id, reason="it misleads")
    before = bank.history()
    capsys.readouterr()
    assert extract(home, run.name, RULES, LESSONS, "--json") == 3
    facts = json.loads(capsys.readouterr().out)
    assert {s["result"] for s in facts["skills"]} == {"refused"}
    assert all("retired" in s["reason"] for s in facts["skills"])
    assert bank.history() == before


def test_the_student_itself_may_read_its_attempts(home, run, capsys):
    options = ["analyst.name=policy", "analyst.format=slot", "analyst.max_tokens=4"]
    assert extract(home, run.name, *options, "skills.min_words=90", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["notes"] == {"invalid": 48}
    assert facts["skills"] == []
    assert SkillBank.open(home, "calls").items() == []


ERRORS = {
    "an unknown run": (("nothing-1", RULES), r"no run 'nothing-1' in .*the newest are: hindsight"),
    "an unknown stage": (("{run}", RULES, "--stage", "sed"), r"sed.*seed"),
    "a stage without attempts": (
        ("{run}", RULES, "--stage", "base"),
        r"stage 'base' learns from worked solutions: nobody acts in it",
    ),
    "nobody who reads": (("{run}",), r"name an analyst: .*analyst.name=rules"),
    "an unknown analyst": (("{run}", "analyst.name=oracle"), r"analyst.*oracle"),
    "an unknown option": (("{run}", RULES, "analyst.stepz=false"), r"analyst.stepz"),
    "an unknown bank": (("{run}", RULES, "--bank", "others"), r"no bank 'others'.*calls"),
    "other tasks than the run had": (
        ("{run}", RULES, "data.seed=5"),
        r"step 1 of stage seed has .* tasks that this configuration does not draw.*leave data",
    ),
}


@pytest.mark.parametrize(("words", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_are_one_line_with_exit_code_2_and_change_nothing(words, message, home, run, capsys):
    bank = SkillBank.open(home, "calls")
    before = bank.history()
    assert extract(home, *(word.format(run=run.name) for word in words)) == 2
    told, said = capsys.readouterr()
    assert told == ""
    (line,) = said.strip().splitlines()
    assert re.search(message, line), line
    assert "unexpected" not in line
    assert bank.history() == before


def test_a_run_whose_attempts_are_gone_says_which_stages_act(home, run, capsys):
    shutil.rmtree(run.stage_dir("seed") / "segments")
    assert extract(home, run.name, RULES) == 2
    assert "has no stored attempts; the stages in which the student acts are: seed" in (
        capsys.readouterr().err
    )


def test_an_analyst_that_is_named_takes_the_place_of_that_of_the_stage(grpo_home, tmp_path, capsys):
    home = home_with_base(grpo_home, tmp_path / "home")
    run = run_night(home, 'skills.bank=""', "skills.keep=false")  # the preset names the student
    SkillBank.create(home, "calls")
    assert extract(home, run.name, RULES, LESSONS, "--json") == 0
    assert json.loads(capsys.readouterr().out)["notes"] == {"ok": 48}


def test_extracting_while_a_bank_holds_other_skills_leaves_those_alone(home, run):
    bank = SkillBank.open(home, "calls")
    bank.add([order_skill("A", "Look twice.", id="own_001", status="active")])
    own = bank.get("own_001")
    assert extract(home, run.name, RULES, LESSONS) == 0
    assert bank.get("own_001") == own
    assert len(bank.items()) == 1 + len(TAGS)
