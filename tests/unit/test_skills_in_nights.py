"""A bank that grows while a stage trains, with a scripted student in the generated world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distill.errors import DataError
from distill.rundir import append_jsonl, read_jsonl
from flows.evolving import LOOKS, Look, StageBank
from skill_nights import (
    SKILLRL,
    TAGS,
    WORLD,
    active_bank,
    held,
    order_skill,
    right_order,
    scripted_act,
    texts,
)
from skills.bank import SkillBank
from skills.check import verify
from skills.hindsight.rule_analyst import RuleAnalyst
from skills.items import Scope
from skills.ops import Op

GROWING = (*SKILLRL, "skills.update_threshold=0.9", "skills.evolve_tasks=4", "skills.pairs=8")
SPLITS = {t.id: split for split in ("evolve", "gate", "test") for t in WORLD.tasks(split)}
TRAIN = [WORLD.tasks("train")[i] for i in range(8)]
WRONG = RuleAnalyst(steps=False, wrong="random", pool=TRAIN)


# -- looks ----------------------------------------------------------------------------------------


def test_a_look_takes_in_what_helps_and_records_what_it_did(tmp_path):
    stage = held(tmp_path, *GROWING)
    before = stage.newest
    stage.look_if_due(2)
    look = stage.looks[-1]
    assert look.weak == tuple(TAGS)
    assert look.added == ("dyn_001", "dyn_002")
    assert look.version == stage.bank.snapshot() != before
    assert texts(stage.bank, "active") == {tag: right_order(tag) for tag in TAGS}
    assert all(0 < gain.low <= gain.gain and gain.num_pairs == 8 for gain in look.gains)
    assert [read_jsonl(tmp_path / "stage" / LOOKS)[-1]["version"]] == [look.version]
    numbers = stage.metrics(2)
    assert numbers["skills/added"] == 2.0
    assert numbers["skills/evolve_tokens"] == look.num_tokens > 0
    assert stage.metrics(3) == {}


def test_new_skills_are_credited_with_their_pairs(tmp_path):
    stage = held(tmp_path, *GROWING)
    stage.look_if_due(2)
    for item, gain in zip(stage.bank.items("active"), stage.looks[-1].gains, strict=True):
        assert item.sha256 == gain.content
        assert (item.credit.num_used, item.credit.num_without) == (8, 8)
        assert item.credit.num_success == 8
        assert (item.credit.gain_low, item.credit.gain_high) == (gain.low, gain.high)


def test_evidence_only_ever_comes_from_tasks_of_the_split_evolve(tmp_path):
    stage = held(tmp_path, *GROWING)
    stage.look_if_due(2)
    named = [e.traj_id for item in stage.bank.items() for e in item.evidence]
    found = [SPLITS[task] for name in named for task in SPLITS if f"/{task}/" in name]
    assert len(found) == len(named) > 0
    assert set(found) == {"evolve"}


def test_failures_of_tasks_that_judge_a_model_are_refused(tmp_path):
    class Judged:
        """A world whose tasks to learn from are those of the gate."""

        def tasks(self, split: str) -> Any:
            return WORLD.tasks("gate")

    stage = held(tmp_path, *GROWING, env=Judged())
    before = stage.bank.snapshot()
    with pytest.raises(DataError, match=r"is of the split 'gate'; only .*evolve.* may teach"):
        stage.look_if_due(2)
    assert stage.bank.snapshot() == before


def test_tasks_that_taught_a_skill_do_not_measure_it(tmp_path):
    act, asked = scripted_act()
    stage = held(tmp_path, *GROWING, act_once=act)
    stage.look_if_due(2)
    looked, *pairs = asked
    plain = {prompt for prompts in pairs for prompt in prompts if "[" not in prompt}
    assert plain
    assert not plain & set(looked)


def test_a_skill_that_does_not_help_is_refused_with_the_reason(tmp_path):
    stage = held(tmp_path, *GROWING, analyst=WRONG)
    before = stage.newest
    stage.look_if_due(2)
    look = stage.looks[-1]
    assert look.added == ()
    assert len(look.refused) == len(look.gains) == 2
    assert all("no gain in 8 pairs" in text for text in look.refused)
    assert look.version == before == stage.bank.snapshot()


def test_families_that_do_well_enough_are_left_alone(tmp_path):
    stage = held(tmp_path, *GROWING, "skills.update_threshold=0.0")
    stage.look_if_due(2)
    assert stage.looks[-1].weak == ()
    assert stage.bank.items() == []


def test_looks_are_due_every_so_many_steps_and_never_twice(tmp_path):
    act, asked = scripted_act()
    stage = held(tmp_path, *GROWING, "skills.evolve_every=2", act_once=act)
    for step in (1, 2, 3, 4, 5):
        stage.look_if_due(step)
    assert [look.step for look in stage.looks] == [0, 3, 5]
    num_plays = len(asked)
    again = held(tmp_path, *GROWING, "skills.evolve_every=2", act_once=act)
    for step in (3, 5):
        again.look_if_due(step)
    assert len(asked) == num_plays
    assert again.looks == stage.looks


def test_a_skill_for_all_families_is_measured_on_all_of_them(tmp_path):
    act, asked = scripted_act()
    stage = held(tmp_path, *GROWING, act_once=act)
    general = order_skill("general", "ab", level="general", id="g")
    gain = stage.measure(general, "test")
    assert gain is not None
    assert gain.num_pairs == 8
    tags = [prompt[0] for prompt in asked[-1]]
    assert {tag: tags.count(tag) for tag in TAGS} == {"A": 4, "K": 4}


# -- what each step shows -------------------------------------------------------------------------


def test_every_step_shows_the_version_that_it_had(tmp_path):
    start = order_skill("A", right_order("A"))
    active_bank(tmp_path, "calls", start)
    act, asked = scripted_act(num_samples=2)
    stage = held(tmp_path, *GROWING, act=act)
    first = stage.play(TRAIN, "0/1/seed/1", 1)
    stage.look_if_due(2)
    second = stage.play(TRAIN, "0/1/seed/2", 2)
    repeated = held(tmp_path, *GROWING, act=act).play(TRAIN, "0/1/seed/1", 1)
    assert repeated == first
    category = {t.id: t.meta["key"] for t in TRAIN}
    assert ["[" in prompt for prompt in asked[0]] == [c == "A" for c in category.values()]
    assert [prompt.partition("[")[2][:2] for prompt in asked[1]] == [
        right_order(c) for c in category.values()
    ]
    by_category = {item.category: item.id for item in stage.bank.items("active")}
    for row in first:
        expected = (by_category["A"],) if category[row.task_id] == "A" else ()
        assert row.skill_ids == expected
    assert all(row.skill_ids == (by_category[category[row.task_id]],) for row in second)


def test_a_look_sees_the_skills_that_its_step_shows(tmp_path):
    active_bank(tmp_path, "calls", order_skill("A", right_order("A")))
    act, asked = scripted_act()
    stage = held(tmp_path, *GROWING, act_once=act)
    stage.look_if_due(2)
    looked = asked[0]
    assert {p[0] for p in looked if f"[{right_order('A')}]" in p} == {"A"}
    assert stage.looks[-1].rates["A"] == 1.0
    assert stage.looks[-1].weak == ("K",)


# -- looks that are interrupted -------------------------------------------------------------------


def repeat_the_last(stage: StageBank, home: Path, *changes: str) -> tuple[Look, list[Op]]:
    """The last look again, as after a kill between the bank and the record."""
    ops, path = stage.bank.history(), home / "stage" / LOOKS
    rows = read_jsonl(path)[:-1]
    path.unlink()
    append_jsonl(path, rows)
    again = held(home, *changes)
    again.look_if_due(stage.looks[-1].step)
    assert again.bank.history() == ops, "the bank was changed a second time"
    return again.looks[-1], ops


def test_a_look_that_was_interrupted_before_its_record_ends_the_same(tmp_path):
    stage = held(tmp_path, *GROWING)
    stage.look_if_due(2)
    found, _ = repeat_the_last(stage, tmp_path, *GROWING)
    assert found == stage.looks[-1]
    assert verify(stage.bank.store).problems == ()


def test_a_look_that_merged_and_was_interrupted_ends_the_same(tmp_path):
    bank = SkillBank.create(tmp_path, "calls")
    known = {"title": right_order("A"), "scope": Scope(env="world")}
    bank.add([order_skill("A", right_order("A"), **known)])  # a candidate: not shown yet
    stage = held(tmp_path, *GROWING)
    stage.look_if_due(2)
    look = stage.looks[-1]
    assert len(look.added) == 2
    found, ops = repeat_the_last(stage, tmp_path, *GROWING)
    assert "MERGE" in {op.op for op in ops}
    assert found == look


def test_a_look_of_another_stage_with_a_longer_name_is_not_taken_for_ones_own(tmp_path):
    longer = held(tmp_path, *GROWING, key="0/1/seed2", folder=tmp_path / "longer")
    longer.look_if_due(2)
    with longer.bank.change() as change:
        for row in list(change.rows):
            change.remove(row)
    stage = held(tmp_path, *GROWING)
    stage.look_if_due(2)
    assert len(stage.looks[-1].added) == 2
    assert stage.looks[-1].version == stage.bank.snapshot()
    assert len(stage.bank.items("active")) == 2
