"""The skill bank of a night: how it begins, and what becomes of it with the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from distill.rundir import RunDir, append_jsonl, to_json, write_json
from flows import banking
from flows.keeping import LEARNED, Kept, Learned
from flows.looks import LOOKS, Look
from flows.night import Night
from flows.progress import NoProgress
from flows.stages import StageResult, cache_key
from skill_nights import (
    SKILLRL,
    TAGS,
    active_bank,
    order_skill,
    right_order,
    start_file,
    texts,
    tiny,
)
from skills.bank import SkillBank


def begun(home: Path, *changes: str) -> Night:
    """A night whose stage has not begun; its bank has one active skill."""
    config = tiny(home, *SKILLRL, *changes)
    run = RunDir.create(home, "hindsight", "20260801")
    bank = SkillBank.open(home, "calls")
    write_json(run.path / "night.json", {"number": 1, "bank_version": bank.snapshot()})
    return Night(config=config, run=run, progress=NoProgress())


def looked(night: Night, version: str, step: int = 2) -> None:
    """What a stage leaves whose bank grew to a version."""
    path = night.run.stage_dir("seed") / LOOKS
    append_jsonl(path, [to_json(Look(step=step, version=version, rates={}))])


def grown(home: Path, night: Night) -> str:
    bank = SkillBank.open(home, "calls")
    bank.add([order_skill("K", "dc", status="active")])
    looked(night, bank.snapshot())
    return bank.snapshot()


@pytest.fixture
def bank(tmp_path: Path) -> SkillBank:
    return active_bank(tmp_path, "calls", order_skill("A", right_order("A")))


def test_a_bank_that_does_not_exist_begins_with_the_given_skills(tmp_path):
    path = start_file(
        tmp_path, *(order_skill(t, right_order(t), id=t, status="active") for t in TAGS)
    )
    config = tiny(tmp_path, *SKILLRL, f"skills.start={path}")
    night = Night(config=config, run=RunDir.create(tmp_path, "p"), progress=NoProgress())
    found = banking.bank_of(night, config)
    assert found is not None
    assert texts(found, "active") == {tag: right_order(tag) for tag in TAGS}
    before = found.history()
    banking.bank_of(night, config)
    assert found.history() == before


def test_a_bank_that_was_killed_before_its_first_skills_gets_them(tmp_path):
    SkillBank.create(tmp_path, "calls")
    path = start_file(tmp_path, order_skill("A", right_order("A"), id="a", status="active"))
    config = tiny(tmp_path, *SKILLRL, f"skills.start={path}")
    night = Night(config=config, run=RunDir.create(tmp_path, "p"), progress=NoProgress())
    found = banking.bank_of(night, config)
    assert found is not None
    assert texts(found, "active") == {"A": right_order("A")}


def test_skills_that_were_there_are_never_replaced_by_the_given_ones(tmp_path, bank):
    path = start_file(tmp_path, order_skill("K", right_order("K"), id="k", status="active"))
    config = tiny(tmp_path, *SKILLRL, f"skills.start={path}")
    night = Night(config=config, run=RunDir.create(tmp_path, "p"), progress=NoProgress())
    assert banking.bank_of(night, config) is not None
    assert set(texts(bank)) == {"A"}


def test_a_held_night_takes_its_bank_back_once_and_without_a_warning(tmp_path, bank, caplog):
    night = begun(tmp_path)
    start = bank.snapshot()
    grown(tmp_path, night)
    banking.settle(night, "hold")
    assert bank.snapshot() == start
    ops = bank.history()
    banking.settle(night, "hold")  # as after a kill before the report
    assert bank.history() == ops
    assert caplog.messages == []


def test_a_promoted_night_keeps_its_bank(tmp_path, bank):
    night = begun(tmp_path)
    after = grown(tmp_path, night)
    banking.settle(night, "promote")
    assert bank.snapshot() == after
    assert banking.version_of(night, start=False) == f"calls@{after}"


def test_a_bank_that_somebody_else_changed_stays_as_it_is(tmp_path, bank, caplog):
    night = begun(tmp_path)
    grown(tmp_path, night)
    bank.add([order_skill("K", "ba")], actor="somebody")
    theirs = bank.snapshot()
    banking.settle(night, "hold")
    assert bank.snapshot() == theirs
    assert "changed by somebody else" in caplog.text


def test_what_a_held_night_kept_goes_back_with_the_skills_that_it_showed(tmp_path, bank, caplog):
    night = begun(tmp_path)
    start, after = bank.snapshot(), grown(tmp_path, night)
    (name,) = (o.id for o in bank.add([order_skill("K", "ea")], actor="night", reason="kept"))
    kept = Kept(version=bank.snapshot(), added=(name,))
    write_json(night.run.stage_dir("seed") / LEARNED, Learned(kept=kept))
    assert bank.snapshot() != after
    banking.settle(night, "hold")
    assert bank.snapshot() == start
    assert caplog.messages == []


def test_the_result_of_a_night_is_shown_and_registered_with_what_it_kept(tmp_path, bank):
    night = begun(tmp_path)
    grown(tmp_path, night)
    bank.add([order_skill("K", "ea", status="active")], actor="night", reason="kept")
    write_json(night.run.stage_dir("seed") / LEARNED, Learned(kept=Kept(version=bank.snapshot())))
    assert banking.version_of(night, start=False) == f"calls@{bank.snapshot()}"


def test_a_stage_that_was_ended_early_belongs_to_the_version_of_its_last_step(tmp_path, bank):
    night = begun(tmp_path)
    grown(tmp_path, night)
    seen = bank.snapshot()
    bank.add([order_skill("K", "ea", status="active")], actor="night", reason="a later look")
    looked(night, bank.snapshot(), step=5)
    ended = StageResult(name="seed", objective="grpo", steps=3, tokens=1, seconds=0.0)
    write_json(night.final("seed") / "stage.json", ended)
    assert banking.version_of(night, start=False) == f"calls@{seen}"
    banking.settle(night, "promote")
    assert bank.snapshot() == seen
    banking.settle(night, "promote")
    assert bank.snapshot() == seen


CACHED = ("stage.seed.cache=true", "skills.show=false", "skills.evolve_every=0")


@pytest.mark.parametrize(
    "change",
    [
        "reward.invalid_penalty=0.5",
        "stage.seed.analyst.steps=true",
        "skills.outcomes=failure",
        "skills.lend=true",
    ],
)
def test_a_stage_is_not_taken_from_the_cache_of_one_that_learned_otherwise(change, tmp_path, bank):
    keys = []
    for changes in ((), (change,)):
        night = begun(tmp_path, *CACHED, *changes)
        night.start.mkdir()
        (night.start / "model.safetensors").write_bytes(b"weights")
        final = night.final("base")
        final.mkdir(parents=True)
        (final / "model.safetensors").write_bytes(b"weights")
        keys.append(cache_key(night, night.config.stage("seed")))
    assert keys[0] != keys[1]
