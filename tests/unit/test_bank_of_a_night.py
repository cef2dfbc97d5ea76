"""The skill bank of a night: how it begins, and what becomes of it with the verdict."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from distill.config import Config
from distill.errors import ConfigError
from distill.rundir import RunDir, append_jsonl, read_json, to_json, write_json
from flows import banking, registry
from flows.changes import signed
from flows.checkpoints import find_checkpoint
from flows.embedding import embedder_for
from flows.keeping import LEARNED, Kept, Learned
from flows.looks import LOOKS, Look
from flows.night import Night, begin, load_student, prepare_start
from flows.progress import NoProgress
from flows.single import around
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
from skills.embed import PolicyEmbedder


def begun(home: Path, *changes: str, name: str = "") -> Night:
    """A night whose stage has not begun; its bank has one active skill."""
    config = tiny(home, *SKILLRL, *changes)
    run = RunDir.create(home, "hindsight", "20260801")
    versions = {"calls": SkillBank.open(home, "calls").snapshot()}
    record = {"id": name, "number": 1, "incumbent": None, "bank_versions": versions}
    write_json(run.path / "night.json", record)
    return Night(config=config, run=run, progress=NoProgress())


def looked(night: Night, version: str, step: int = 2) -> None:
    """What a stage leaves whose bank grew to a version."""
    path = night.run.stage_dir("seed") / LOOKS
    append_jsonl(path, [to_json(Look(step=step, version=version, rates={}))])


def taught(night: Night, order: str, why: str = "look of step 2", tag: str = "K") -> str:
    """The version of the bank after the night took in a skill."""
    bank = SkillBank.open(night.home, "calls")
    reason = signed(f"{why}, {night.run.name}, 0/1/seed", night.id)
    bank.add([order_skill(tag, order, status="active")], actor="night", reason=reason)
    return bank.snapshot()


def grown(home: Path, night: Night) -> str:
    version = taught(night, "dc")
    looked(night, version)
    return version


def with_a_last_stage(config: Config) -> Config:
    """Another student stage behind the one with a bank, which shows no skills."""
    seed = config.stage("seed")
    hidden = {"skills": {"show": False, "evolve_every": 0}}
    last = replace(seed, name="last", overrides={**seed.overrides, **hidden})
    return replace(config, stages=(*config.stages, last))


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


@pytest.mark.parametrize("name", ["", "n1"])
def test_a_held_night_takes_its_bank_back_once_and_without_a_warning(name, tmp_path, bank, caplog):
    night = begun(tmp_path, name=name)
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
    kept = Kept(version=taught(night, "ea", "hindsight"))
    write_json(night.run.stage_dir("seed") / LEARNED, Learned(kept=kept))
    assert bank.snapshot() != after
    banking.settle(night, "hold")
    assert bank.snapshot() == start
    assert caplog.messages == []


def test_the_result_of_a_night_is_shown_and_registered_with_what_it_kept(tmp_path, bank):
    night = begun(tmp_path)
    grown(tmp_path, night)
    taught(night, "ea", "hindsight")
    write_json(night.run.stage_dir("seed") / LEARNED, Learned(kept=Kept(version=bank.snapshot())))
    assert banking.version_of(night, start=False) == f"calls@{bank.snapshot()}"


def test_a_stage_that_was_ended_early_belongs_to_the_version_of_its_last_step(tmp_path, bank):
    night = begun(tmp_path)
    grown(tmp_path, night)
    seen = bank.snapshot()
    looked(night, taught(night, "ea", "look of step 5"), step=5)
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


@pytest.mark.parametrize("changed", ["path", "writer"])
def test_a_stage_is_not_taken_from_the_cache_of_another_analyst_model(changed, tmp_path, bank):
    """The writer's weights behind one and the same path, in either kind of stage."""
    folder = tmp_path / "writer"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text(json.dumps({"model_type": "llama"}))
    writer = f'{{name="model", writer={{name="text", path="{folder}"}}}}'
    kind = () if changed == "path" else ("stage.seed.kind=sft",)
    keys = []
    for number in (0.0, 1.0):
        save_file({"w": np.full(2, number, np.float32)}, folder / "model.safetensors")
        night = begun(tmp_path, *CACHED, *kind, f"stage.seed.analyst={writer}")
        for place in (night.start, night.final("base")):
            place.mkdir(parents=True)
            (place / "model.safetensors").write_bytes(b"weights")
        keys.append(cache_key(night, night.config.stage("seed")))
    assert keys[0] != keys[1]


# -- whose changes they are -----------------------------------------------------------------------


def test_a_night_has_an_id_of_its_own_which_it_keeps(tmp_path):
    seen = []
    for _ in range(2):
        config = tiny(tmp_path, *SKILLRL)
        run = RunDir.create(tmp_path, "p", "20260801")
        run.write_config(config, "")
        night = Night(config=config, run=run, progress=NoProgress())
        begin(night)
        seen.append(night.id)
        begin(night)
        assert night.id == seen[-1] != ""
    assert seen[0] != seen[1]


def test_nights_of_before_there_were_ids_go_back_all_the_same(tmp_path, bank):
    night = begun(tmp_path)
    start = bank.snapshot()
    write_json(night.run.path / "night.json", {"number": 1, "bank_version": start})
    grown(tmp_path, night)
    banking.settle(night, "hold")
    assert bank.snapshot() == start


def test_of_two_nights_on_one_bank_neither_takes_the_changes_of_the_other_back(
    tmp_path, bank, caplog
):
    one, two = begun(tmp_path, name="n1"), begun(tmp_path, name="n2")
    grown(tmp_path, one)
    looked(two, taught(two, "ea"))
    looked(one, taught(one, "ce", "look of step 3"), step=3)
    both = bank.snapshot()
    banking.settle(one, "hold")
    assert bank.snapshot() == both
    assert "changed by somebody else" in caplog.text


def test_a_later_run_with_the_same_name_does_not_own_what_the_deleted_one_changed(
    tmp_path, bank, caplog
):
    old = begun(tmp_path, name="n1")
    start = bank.snapshot()
    taught(old, "dc")
    record = {"id": "n2", "number": 1, "bank_versions": {"calls": start}}
    write_json(old.run.path / "night.json", record)
    grown_on = taught(old, "ea")
    looked(old, grown_on)
    banking.settle(old, "hold")
    assert bank.snapshot() == grown_on
    assert "changed by somebody else" in caplog.text


def test_a_skill_that_was_retired_meanwhile_stays_so_and_settling_again_changes_nothing(
    tmp_path, bank, caplog
):
    night = begun(tmp_path, name="n1")
    (name,) = (item.id for item in bank.items())
    reason = signed(f"look of step 2, {night.run.name}, 0/1/seed", "n1")
    with bank.change(actor="night") as change:
        change.retire(name, reason=reason)
    looked(night, bank.snapshot())
    banking.settle(night, "hold")
    assert [item.status for item in bank.items()] == ["retired"]
    ops = bank.history()
    banking.settle(night, "hold")
    assert bank.history() == ops
    assert caplog.messages == []


# -- several stages -------------------------------------------------------------------------------


def test_a_bank_of_a_stage_before_the_last_one_goes_back_with_a_held_night(tmp_path, bank):
    start, config = bank.snapshot(), with_a_last_stage(tiny(tmp_path, *SKILLRL))
    run = RunDir.create(tmp_path, "p", "20260801")
    night = Night(config=config, run=run, progress=NoProgress())
    assert [s.name for s in night.student_stages] == ["seed", "last"]
    begin(night)
    assert read_json(run.path / "night.json")["bank_versions"] == {"calls": start}
    grown(tmp_path, night)
    assert bank.snapshot() != start
    assert banking.version_of(night, start=False) is None, "the result is shown no skills"
    banking.settle(night, "hold")
    assert bank.snapshot() == start


# -- weights that are already there ---------------------------------------------------------------


def test_looking_at_weights_never_makes_a_bank(tmp_path, bank):
    config = tiny(tmp_path, *SKILLRL, "skills.bank=other")
    stage = config.stage("seed")
    night = around(config, None, tmp_path)
    with pytest.raises(ConfigError, match=r"no bank 'other'.*banks: calls"):
        banking.shown_version(night, config.for_stage(stage), stage, start=False)
    assert SkillBank.names(tmp_path) == ["calls"]


def test_the_start_of_a_run_belongs_to_the_skills_that_it_began_with(tmp_path, bank):
    night = begun(tmp_path, 'stage.seed.model.path=""')
    night.run.write_config(night.config, "")
    ref, start = prepare_start(night), bank.snapshot()
    after = grown(tmp_path, night)
    found = find_checkpoint(tmp_path, str(night.start))
    assert found.bank == f"calls@{start}" != f"calls@{after}"
    registry.promote(tmp_path, "m", ref, run=night.run.name, bank=found.bank)
    for name in ("m", str(tmp_path / "registry" / "m" / "champions" / ref.digest[:12])):
        found = find_checkpoint(tmp_path, name)
        assert found.bank == f"calls@{start}"
        surroundings = around(found.config(), found.run, tmp_path)
        config, stage = surroundings.config, surroundings.config.stage("seed")
        student = load_student(surroundings, config.for_stage(stage), found.path)
        prompts = banking.eval_prompts(
            surroundings, config.for_stage(stage), stage, student, start=False, pinned=found.bank
        )
        assert prompts is not None
        assert prompts.retriever.bank_version == start


# -- vectors of the student itself ----------------------------------------------------------------


def moved(student) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in student.policy.trainable().values():
            weights.add_(torch.randn(weights.shape, generator=generator))


@pytest.mark.parametrize("kind", [(), ("model.kind=adapter", "model.rank=4")])
def test_vectors_are_those_of_the_start_however_far_the_student_went(kind, tmp_path, bank):
    night = begun(tmp_path, 'stage.seed.model.path=""', "skills.mode=embedding", *kind)
    prepare_start(night)
    stage = night.config.stage("seed")
    config = night.config.for_stage(stage)
    student = load_student(night, config, night.start)
    embedder = embedder_for(night, config, stage, student)
    assert embedder is not None
    before = embedder.embed(["ab", "c1"])
    own = PolicyEmbedder(student.policy, student.chat)
    assert np.array_equal(own.embed(["ab", "c1"]), before)
    moved(student)
    assert not np.allclose(own.embed(["ab", "c1"]), before, atol=1e-3)
    assert np.array_equal(embedder.embed(["ab", "c1"]), before)
    assert {name for name, p in student.policy.model.named_parameters() if p.requires_grad} == set(
        student.policy.trainable()
    )
    again = embedder_for(night, config, stage, student)  # as an evaluation asks for it
    other = load_student(night, config, night.start)
    moved(other)
    later = embedder_for(night, config, stage, other)  # as after a resume
    for found in (again, later):
        assert found is not None
        assert found.version == embedder.version
        assert np.array_equal(found.embed(["ab", "c1"]), before)


def test_a_frozen_copy_is_shared_while_it_is_used_and_made_only_for_vectors(tmp_path, bank):
    night = begun(tmp_path, 'stage.seed.model.path=""', "skills.mode=embedding")
    prepare_start(night)
    stage = night.config.stage("seed")
    config = night.config.for_stage(stage)
    student = load_student(night, config, night.start)
    one, two = (embedder_for(night, config, stage, student) for _ in range(2))
    assert isinstance(one, PolicyEmbedder)
    assert isinstance(two, PolicyEmbedder)
    assert one.policy is two.policy is not student.policy
    assert one.policy.trainable() == {}
    from flows import embedding

    del one, two
    gc.collect()
    assert len(embedding._frozen) == 0
    plain = tiny(tmp_path, *SKILLRL).for_stage(stage)
    assert embedder_for(night, plain, stage, student) is None
