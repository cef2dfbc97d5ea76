"""What hindsight taught at the end of a stage: candidates, measured, promoted or not."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.rows import trajectories
from distill.segments import Segments
from distill.types import Note, Rollout, Task
from flows.evolving import StageBank
from flows.keeping import Kept, Learned, _read, close_stage, keep, read_learned
from skill_nights import (
    CHAT,
    RIGHT,
    SKILLRL,
    TAGS,
    WORLD,
    held,
    order_skill,
    right_order,
    scripted_act,
    seen_in,
    texts,
)
from skills.bank import SkillBank
from skills.change import Change
from skills.check import verify
from skills.hindsight.analysts import Analyst, Selected, written
from skills.hindsight.episodes import episodes_of
from skills.hindsight.rule_analyst import RuleAnalyst

TRAIN = [WORLD.tasks("train")[i] for i in range(8)]
WRONG = RuleAnalyst(steps=False, wrong="random", pool=TRAIN)
KEEPING = ("skills.pairs=8",)
GROWING = (*SKILLRL, "skills.update_threshold=0.9", "skills.evolve_tasks=4", "skills.pairs=8")


def attempts(analyst: Analyst, *, samples: int = 4, key: str = "0/1/seed/1") -> Any:
    """Rows of one step, and what an analyst writes about them."""
    rows = scripted_act(num_samples=samples)[0](TRAIN, key)
    by_id = {t.id: t for t in TRAIN}
    episodes = episodes_of(rows, by_id.__getitem__, CHAT.decode)
    return rows, written(analyst, episodes, 1)


def store(folder: Path, rows: list[Rollout], notes: list[Note], step: int = 1) -> None:
    segments = Segments(folder, step)
    segments.at(step)("rollouts", Rollout, lambda: rows)
    segments.at(step)("notes", Note, lambda: notes)
    segments.close()


def tasks_of(step: int) -> list[Task]:
    return TRAIN


def kept_by(stage: StageBank) -> Kept:
    return keep(stage, tasks_of=tasks_of, last_step=1, reason="hindsight of night-1, stage seed")


SUCCESSES = Selected(RIGHT, outcomes="success")


def test_what_hindsight_taught_is_measured_and_what_helps_is_promoted(tmp_path):
    stage = held(tmp_path, *KEEPING)
    rows, notes = attempts(SUCCESSES)
    store(stage.folder, rows, notes)
    found = kept_by(stage)
    won = {t.meta["key"] for t in TRAIN if any(r.task_id == t.id and r.reward for r in rows)}
    assert won
    assert texts(stage.bank, "active") == {tag: right_order(tag) for tag in won}
    assert found.promoted == found.added == tuple(i.id for i in stage.bank.items("active"))
    assert found.version == stage.bank.snapshot()
    winners = {rows[0].traj_id for rows in trajectories(rows) if rows[-1].reward == 1.0}
    for item in stage.bank.items():
        assert {e.traj_id for e in item.evidence} <= winners
        assert (item.credit.num_used, item.credit.num_without) == (8, 8)
        assert item.credit.gain_low is not None


def test_what_does_not_help_stays_a_candidate_with_its_numbers(tmp_path):
    stage = held(tmp_path, *KEEPING)
    store(stage.folder, *attempts(Selected(WRONG, outcomes="success")))
    found = kept_by(stage)
    assert found.added
    assert found.promoted == ()
    items = stage.bank.items()
    assert {item.status for item in items} == {"candidate"}
    assert all(item.credit.num_used == 8 and item.credit.num_success == 0 for item in items)


def test_a_skill_must_be_seen_in_enough_attempts(tmp_path):
    rows, notes = attempts(SUCCESSES)
    wins = sum(note.status == "ok" for note in notes)
    stage = held(tmp_path, *KEEPING, f"skills.min_sightings={wins + 1}")
    store(stage.folder, rows, notes)
    before = stage.bank.snapshot()
    found = kept_by(stage)
    assert found.added == ()
    assert found.num_waiting > 0
    assert stage.bank.snapshot() == before


def test_notes_that_are_not_valid_and_lent_ones_teach_nothing(tmp_path):
    stage = held(tmp_path, *KEEPING)
    rows, notes = attempts(RIGHT)
    broken: list[Note] = [replace(n, status="invalid", episode_skill="") for n in notes]
    store(stage.folder, rows, broken)
    assert kept_by(stage).added == ()


def test_sightings_of_several_steps_are_united(tmp_path):
    stage = held(tmp_path, *KEEPING, "skills.min_sightings=7", "skills.pairs=0")
    analyst = Selected(RIGHT, outcomes="success")
    for step in (1, 2):
        rows, notes = attempts(analyst, samples=4, key=f"0/1/seed/{step}")
        store(stage.folder, rows, notes, step)
    most = max(
        sum(n.status == "ok" and n.episode_skill == right_order(tag) for n in notes) for tag in TAGS
    )
    assert most < 7, "one step alone would be enough"
    found = keep(stage, tasks_of=tasks_of, last_step=2, reason="r")
    assert len(found.added) == sum(2 * most >= 7 for _ in (1,))
    assert keep(stage, tasks_of=tasks_of, last_step=2, reason="r").added == found.added


def test_the_attempts_of_a_stage_are_read_one_step_at_a_time(tmp_path):
    stage = held(tmp_path, *KEEPING)
    rows, notes = attempts(SUCCESSES, samples=8)

    def peak() -> int:
        tracemalloc.start()
        items, _ = _read(stage, tasks_of, 8)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert items
        return size

    store(stage.folder, rows, notes, 1)
    peak()  # what is imported on first use
    alone = peak()
    for step in range(2, 9):
        store(stage.folder, rows, notes, step)
    assert peak() < 2 * alone


def test_keeping_a_second_time_changes_nothing_and_says_the_same(tmp_path):
    stage = held(tmp_path, *KEEPING)
    rows, notes = attempts(SUCCESSES)
    store(stage.folder, rows, notes)
    first = kept_by(stage)
    ops = stage.bank.history()
    assert kept_by(held(tmp_path, *KEEPING)) == first
    assert stage.bank.history() == ops


class Contended(SkillBank):
    """A bank that another night changes as soon as the lock is free."""

    @contextmanager
    def change(self, **more: Any) -> Iterator[Change]:
        with super().change(**more) as change:
            yield change
        with SkillBank(self.path).change(actor="night") as other:
            other.add([order_skill("K", "ea")], reason="look of step 9, night-2, 0/2/seed, n2")


def test_a_version_is_that_of_ones_own_change_whatever_another_night_does_next(tmp_path):
    SkillBank.create(tmp_path, "calls")
    stage = held(tmp_path, *KEEPING, bank=Contended(tmp_path / "bank" / "calls"))
    store(stage.folder, *attempts(SUCCESSES))
    found = kept_by(stage)
    assert {row.id for row in stage.bank.rows(version=found.version)} == set(found.added)
    assert found.version != stage.bank.snapshot()
    home = tmp_path / "grows"
    SkillBank.create(home, "calls")
    growing = held(home, *GROWING, bank=Contended(home / "bank" / "calls"))
    growing.look_if_due(2)
    _, own, other = activated(growing.bank)
    assert growing.looks[-1].version == own != other


def activated(bank: SkillBank) -> list[str]:
    """Every version that was the active one, oldest first."""
    return [str(op.version) for op in bank.history() if op.op == "ACTIVATE"]


def test_a_new_run_with_the_name_of_a_deleted_one_keeps_and_looks_for_itself(tmp_path):
    for night in ("n1", "n2"):
        stage = held(tmp_path, *GROWING, night=night, folder=tmp_path / night)
        store(stage.folder, *attempts(SUCCESSES))
        stage.look_if_due(2)
        assert stage.looks[-1].added
        assert kept_by(stage).version == stage.bank.snapshot()
        again = held(tmp_path, *GROWING, night=night, folder=tmp_path / f"{night}-again")
        store(again.folder, *attempts(SUCCESSES))
        ops = stage.bank.history()
        again.look_if_due(2)
        found, own = again.looks[-1], stage.looks[-1]
        assert (found.version, found.added) == (own.version, own.added), "as a resume finds it"
        kept_by(again)
        assert stage.bank.history() == ops
        with stage.bank.change() as change:
            for item in change.items():
                change.remove(item.id)


def test_waiting_skills_are_counted_the_same_a_second_time(tmp_path):
    stage = held(tmp_path, *KEEPING)
    rows, notes = attempts(SUCCESSES)
    lone = next(i for i, n in enumerate(notes) if n.status == "ok")
    notes[lone] = replace(notes[lone], episode_skill="cb")
    store(stage.folder, rows, notes)
    first = kept_by(stage)
    assert first.num_waiting == 1
    assert kept_by(held(tmp_path, *KEEPING)) == first


def test_a_retired_skill_is_not_taken_in_again(tmp_path):
    rows, notes = attempts(SUCCESSES)
    stage = held(tmp_path, *KEEPING)
    store(stage.folder, rows, notes)
    first = kept_by(stage)
    for name in first.added:
        with stage.bank.change() as change:
            change.retire(name, reason="it misleads")
    again = keep(stage, tasks_of=tasks_of, last_step=1, reason="hindsight of night-2, stage seed")
    assert again.added == ()
    assert again.promoted == ()
    assert {item.status for item in stage.bank.items()} == {"retired"}
    assert verify(stage.bank.store).problems == ()


def test_a_retired_skill_does_not_come_back_by_a_look(tmp_path):
    stage = held(tmp_path, *GROWING)
    stage.look_if_due(2)
    for name in stage.looks[-1].added:
        with stage.bank.change() as change:
            change.retire(name, reason="it misleads")
    after = stage.bank.snapshot()
    again = held(tmp_path, *GROWING, key="0/2/seed", folder=tmp_path / "second", run="night-2")
    again.look_if_due(2)
    assert again.looks[-1].added == ()
    assert again.bank.snapshot() == after


def test_what_another_stage_with_a_longer_name_kept_does_not_stop_ones_own(tmp_path):
    stage = held(tmp_path, *KEEPING)
    bank = stage.bank
    bank.add(
        [order_skill("K", "ea", evidence=seen_in("a", "b"))],
        actor="night",
        reason="hindsight of night-1, stage seed2",
    )
    store(stage.folder, *attempts(SUCCESSES))
    assert kept_by(stage).added


def test_what_a_person_extracted_from_an_unfinished_run_does_not_stop_its_end(tmp_path):
    stage = held(tmp_path, *KEEPING)
    reason = "hindsight of night-1, stage seed"
    stage.bank.add([order_skill("K", "ea")], actor="somebody", reason=reason)
    store(stage.folder, *attempts(SUCCESSES))
    assert kept_by(stage).added


def test_the_end_of_a_stage_is_written_down_and_repeating_it_changes_nothing(tmp_path):
    stage = held(tmp_path, "skills.keep=true", *KEEPING)
    store(stage.folder, *attempts(SUCCESSES))

    def close() -> Learned:
        close_stage(
            stage.config, stage.folder, stage, tasks_of=tasks_of, last_step=1, reason="the end"
        )
        found = read_learned(stage.folder)
        assert found is not None
        return found

    first = close()
    assert first.kept is not None
    assert first.kept.added
    assert first.notes["ok"] > 0
    assert first.notes["skipped"] > 0
    assert first.valid_rate == 1.0
    assert first.is_enough is True  # of fewer notes than are asked for, all decide
    assert close() == first


def test_skills_that_a_look_showed_are_credited_and_useless_ones_go():
    from flows.acting import Shown
    from flows.evolving import uses_of

    shown = Shown(tasks=[], skills={"a": ("s1", "s2"), "b": ()})
    won, lost, bare = (
        [rollout_of(task, reward)] for task, reward in (("a", 1.0), ("a", 0.0), ("b", 1.0))
    )
    uses = uses_of(shown, [won, lost, bare], 1.0)
    assert [(u.skill, u.success) for u in uses] == [
        ("s1", True), ("s2", True), ("s1", False), ("s2", False),
    ]  # fmt: skip


def rollout_of(task, reward):
    from distill.types import Rollout, StopReason

    return Rollout(
        task_id=task, group_id=task, index=0, domain="d", policy_version=0, seed="s",
        token_ids=(1,), completion_mask=(True,), logprobs=(-1.0,), stop=StopReason.STOP,
        traj_id=f"{task}/{reward}", reward=reward,
    )  # fmt: skip
