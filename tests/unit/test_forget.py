"""Erasing a user, a session or a source from everything that was made of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from distill.errors import ConfigError
from distill.lock import Lock
from distill.rundir import RunDir, digest_file, read_json
from distill.segments import stored
from distill.types import Note, Rollout
from evals.envs.routing import Routing
from flows import cli, forgetting, forgetting_curricula, forgetting_runs
from flows.cli import main
from flows.forgetting import Wanted, carry_out, counts, look
from flows.launch import LOCK_FILE
from logged_homes import (
    built,
    call,
    calls,
    example_ids,
    filled_store,
    id_of,
    light_app,
    lines,
    planned,
    promoted,
    rollout_tasks,
    run_on,
    stored_calls,
    tasks_of,
    taught,
    turn_ids,
    write_log,
)
from skills.bank import SkillBank

ANN = {id_of("gateway", session, turn) for session in (0, 3) for turn in range(2)}
WHO = Wanted(kind="user", name="ann")


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    path: Path
    store: Path
    run: RunDir
    next_run: RunDir
    digests: tuple[str, str]
    tasks: frozenset[str]
    """Of ann's turns."""

    @property
    def curriculum(self) -> Path:
        return self.run.stage_dir("curriculum") / "final"

    def skills(self) -> dict[str, str]:
        return {item.id: item.status for item in SkillBank.open(self.path, "main").items()}

    def traces(self) -> dict[str, set[str]]:
        """What is left of ann anywhere."""
        own = {f"g-{session}-{turn}" for session in (0, 3) for turn in range(2)}
        every = [self.curriculum, self.path / "curricula" / "mine"]
        return {
            "store": stored_calls(self.store) & own,
            "plan": {name for folder in every for name in planned(folder)} & ANN,
            "examples": {name for folder in every for name in example_ids(folder)} & ANN,
            "turns": {name for folder in every for name in turn_ids(folder)} & ANN,
            "rollouts": set(rollout_tasks(self.run)) & self.tasks,
            "skills": {"only"} if self.skills()["only"] != "retired" else set(),
        }


NOTHING: dict[str, set[str]] = {
    name: set() for name in ("store", "plan", "examples", "turns", "rollouts", "skills")
}


@pytest.fixture(autouse=True)
def _only_commands_about_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", light_app())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Built once; tests work on copies."""
    path = tmp_path_factory.mktemp("home")
    log = write_log(path / "gateway.jsonl", calls())
    store = path / "logs" / "main"
    filled_store(store, log)
    built(path / "curricula" / "mine", store)
    run = run_on(path, store)
    first = promoted(path, run)
    tasks = tasks_of(run, ANN)
    others = sorted(set(rollout_tasks(run)) - tasks)
    taught(
        path,
        run,
        {
            "only": sorted(tasks)[:2],
            "mixed": [sorted(tasks)[0], others[0]],
            "other": others[:2],
            "none": [],
        },
    )
    next_run = run_on(path, store, incumbent=first)
    # The next night reads nothing of its own: it only goes on from the champion.
    shutil.rmtree(next_run.stage_dir("curriculum"))
    second = promoted(path, next_run)
    return Home(
        path=path,
        store=store,
        run=run,
        next_run=next_run,
        digests=(first, second),
        tasks=frozenset(tasks),
    )


@pytest.fixture
def home(made: Home, tmp_path: Path) -> Home:
    path = tmp_path / "home"
    shutil.copytree(made.path, path)
    return Home(
        path=path,
        store=path / "logs" / "main",
        run=RunDir(path=path / "runs" / made.run.name),
        next_run=RunDir(path=path / "runs" / made.next_run.name),
        digests=made.digests,
        tasks=made.tasks,
    )


def files_of(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): digest_file(p) for p in folder.rglob("*") if p.is_file()}


# -- looking --------------------------------------------------------------------------------------


def test_the_small_home_has_everything_that_is_looked_for(home: Home) -> None:
    assert len(planned(home.curriculum)) == 12
    traces = home.traces()
    assert {name: len(found) for name, found in traces.items()} == {
        "store": 4,
        "plan": 4,
        "examples": 4,
        "turns": 4,
        "rollouts": 4,
        "skills": 1,
    }


def test_looking_finds_everything_and_changes_nothing(home: Home) -> None:
    before = files_of(home.path)
    found = look(home.path, WHO)
    assert files_of(home.path) == before
    assert counts(found) == {
        "calls": 4,
        "calls_of_others": 0,
        "evidence": 0,
        "turns": 8,
        "examples": 8,
        "rollouts": 4,
        "skills": 1,
        "champions": 2,
    }
    assert {one.path for one in found.curricula} == {
        home.curriculum,
        home.path / "curricula" / "mine",
    }
    assert found.skills == {"main": [("only", "Skill only")]}
    first, second = found.champions
    assert (first.digest, first.run, first.is_current) == (home.digests[0], home.run.name, False)
    assert (second.digest, second.run, second.is_current) == (
        home.digests[1],
        home.next_run.name,
        True,
    )
    assert second.because == f"continues {home.digests[0][:12]}"
    assert [Path(path).name for path in found.stores[0].files] == ["gateway.jsonl"]


def test_a_session_and_a_source_are_found_by_their_names(home: Home) -> None:
    session = look(home.path, Wanted(kind="session", name="g-s1"))
    assert {name for one in session.curricula for name in one.ids} == {
        id_of("gateway", 1, 0),
        id_of("gateway", 1, 1),
    }
    source = look(home.path, Wanted(kind="source", name="gateway"))
    assert counts(source)["examples"] == 24
    assert counts(source)["calls"] == 12
    assert look(home.path, Wanted(kind="user", name="nobody")).is_empty


def test_curricula_are_searched_by_name_even_where_the_store_is_gone(home: Home) -> None:
    shutil.rmtree(home.store)
    found = look(home.path, Wanted(kind="session", name="g-s1"))
    assert counts(found)["examples"] == 4
    shutil.rmtree(home.path / "curricula")
    shutil.rmtree(home.path / "runs")
    with pytest.raises(ConfigError, match="no log store and no curriculum"):
        look(home.path, WHO)


# -- erasing --------------------------------------------------------------------------------------


def test_erasing_leaves_nothing_and_keeps_everything_else(home: Home) -> None:
    others = set(planned(home.curriculum)) - ANN
    rollouts = [task for task in rollout_tasks(home.run) if task not in home.tasks]
    carry_out(home.path, look(home.path, WHO), actor="t")
    assert home.traces() == NOTHING
    assert set(planned(home.curriculum)) == others
    assert example_ids(home.curriculum) == others
    assert rollout_tasks(home.run) == rollouts
    assert len(stored_calls(home.store)) == 8
    assert home.skills() == {
        "only": "retired",
        "mixed": "active",
        "other": "active",
        "none": "active",
    }


def test_the_curriculum_that_is_left_can_be_read_and_is_what_its_manifest_says(home: Home) -> None:
    before = {t.id: t.prompt for t in Routing(path=str(home.curriculum)).tasks("train")}
    carry_out(home.path, look(home.path, WHO), actor="t")
    after = {t.id: t.prompt for t in Routing(path=str(home.curriculum)).tasks("train")}
    assert after
    assert after.items() <= before.items()
    assert not {m.content for p in after.values() for m in p if "0-" in m.content}
    manifest = read_json(home.curriculum / "manifest.json")["files"]
    assert manifest == {name: digest_file(home.curriculum / name) for name in manifest}
    assert read_json(home.curriculum / "summary.json")["forgotten"] == 4
    assert "4 turns of these were erased" in (home.curriculum / "curriculum.html").read_text()


def test_the_segments_that_are_left_are_segments(home: Home) -> None:
    stage = home.run.stage_dir("opd")
    touched = {
        line["step"]
        for line in lines(home.run, "opd", "rollouts")
        if any(row["task_id"] in home.tasks for row in line["rows"])
    }
    scored = {line["step"] for line in lines(home.run, "opd", "teacher")}
    carry_out(home.path, look(home.path, WHO), actor="t")
    rollouts, notes = stored(stage, "rollouts", Rollout), stored(stage, "notes", Note)
    assert list(rollouts) == list(notes) == sorted(scored)
    for step, rows in rollouts.items():
        assert [row.traj_id for row in rows] == [note.traj_id for note in notes[step]]
    # Scores stand row by row, so those of a step that lost a row are gone.
    assert {line["step"] for line in lines(home.run, "opd", "teacher")} == scored - touched


def test_of_an_interrupted_stage_nothing_stays_that_a_resume_would_draw_anew(home: Home) -> None:
    (home.run.stage_dir("opd") / "final").rmdir()
    found = look(home.path, WHO)
    assert not found.stages[0].reader.finished
    carry_out(home.path, found, actor="t")
    assert {line["step"] for line in lines(home.run, "opd", "rollouts")} == {1}


def test_a_turn_of_somebody_else_that_quotes_the_user_goes_too(home: Home) -> None:
    rows = [call(9, 0, user="ann"), call(9, 1, user="bob")]
    filled_store(home.store, write_log(home.path / "more.jsonl", rows))
    found = look(home.path, WHO)
    assert [one.others for one in found.stores] == [1]
    carry_out(home.path, found, actor="t")
    assert {"g-9-0", "g-9-1"} & stored_calls(home.store) == set()
    assert {"g-1-0", "g-4-1"} <= stored_calls(home.store)  # bob's own conversations stay


def test_what_was_erased_does_not_come_back_with_the_next_import(home: Home) -> None:
    carry_out(home.path, look(home.path, WHO), actor="t")
    again = write_log(home.path / "again.jsonl", calls())
    gateway = again.rename(home.path / "gateway.jsonl")
    filled_store(home.store, gateway)
    assert len(stored_calls(home.store)) == 8
    assert home.traces() == NOTHING


def test_doing_it_again_changes_nothing_and_still_names_the_champions(home: Home) -> None:
    carry_out(home.path, look(home.path, WHO), actor="t")
    before = files_of(home.path)
    found = look(home.path, WHO)
    assert found.is_empty
    assert [champion.digest for champion in found.champions] == list(home.digests)
    assert files_of(home.path) == before


KILLS: dict[str, tuple[Any, str, bool]] = {
    "after the announcement": (forgetting_runs, "announce", True),
    "before rollouts": (forgetting_runs, "erase_rollouts", False),
    "after rollouts": (forgetting_runs, "erase_rollouts", True),
    "after skills": (forgetting_runs, "retire_skills", True),
    "after the plan": (forgetting_curricula, "_rewrite", False),
    "before the summary": (forgetting_curricula, "_update_summary", False),
    "before the manifest": (forgetting_curricula, "_refresh_manifest", False),
    "before the store": (forgetting, "_forget", False),
    "after the store": (forgetting, "_forget", True),
}
"""Where a removal is killed: before or after the work of a function."""


@pytest.mark.parametrize("where", KILLS)
def test_a_removal_that_is_killed_anywhere_is_finished_by_the_next(
    home: Home, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    owner, name, late = KILLS[where]
    real = getattr(owner, name)

    def killed(*given: Any, **named: Any) -> None:
        if late:
            real(*given, **named)
        raise KeyboardInterrupt

    planned_to_go = look(home.path, WHO)
    monkeypatch.setattr(owner, name, killed)
    with pytest.raises(KeyboardInterrupt):
        carry_out(home.path, planned_to_go, actor="t")
    monkeypatch.undo()
    found = look(home.path, WHO)
    assert [champion.digest for champion in found.champions] == list(home.digests)
    carry_out(home.path, found, actor="t")
    assert home.traces() == NOTHING
    assert not list(home.path.rglob("*.partial-*"))
    assert not forgetting_curricula.read_record(home.curriculum).pending
    assert not (home.run.stage_dir("opd") / forgetting_runs.RECORD).exists()
    assert look(home.path, WHO).is_empty
    Routing(path=str(home.curriculum)).tasks("train")[0]


def test_a_run_at_work_is_not_touched(home: Home) -> None:
    found = look(home.path, WHO)
    before = home.traces()
    with (
        Lock(home.run.path / LOCK_FILE, "process"),
        pytest.raises(ConfigError, match=r"is at work"),
    ):
        carry_out(home.path, found, actor="t")
    assert home.traces() == before


# -- provenance -----------------------------------------------------------------------------------


def test_a_stage_reads_a_curriculum_of_its_run_or_by_its_folder(home: Home) -> None:
    mine = home.path / "curricula" / "mine"
    readers, unread = forgetting_runs.readers(home.path, [home.curriculum, mine])
    assert [(r.run, r.stage, r.curriculum) for r in readers] == [
        (home.run.name, "opd", home.curriculum)
    ]
    config = json.loads((home.next_run.path / "config.json").read_text())
    (stage,) = [s for s in config["stage"] if s["name"] == "opd"]
    stage["data"]["path"] = "curricula/mine"
    (home.next_run.path / "config.json").write_text(json.dumps(config))
    readers, _ = forgetting_runs.readers(home.path, [mine])
    assert [(r.run, r.curriculum) for r in readers] == [(home.next_run.name, mine)]
    assert unread == []
    (home.next_run.path / "config.json").write_text("{}x")
    assert forgetting_runs.readers(home.path, [mine]) == ([], [home.next_run.name])


def test_tasks_of_a_turn_are_its_worked_answer_and_its_contexts(home: Home) -> None:
    found = forgetting_runs.task_ids(home.curriculum, frozenset(ANN))
    assert home.tasks <= found
    assert found & (set(rollout_tasks(home.run)) - home.tasks) == set()
    assert forgetting_runs.task_ids(home.curriculum, frozenset({"x"})) == frozenset()


def test_champions_of_champions_are_followed_to_the_end(home: Home) -> None:
    last = RunDir.create(home.path, "night", "20260902")
    shutil.copy(home.run.path / "config.json", last.path / "config.json")
    (last.path / "night.json").write_text(json.dumps({"incumbent": {"digest": home.digests[1]}}))
    digest = promoted(home.path, last)
    other = RunDir.create(home.path, "night", "20260903")
    shutil.copy(home.run.path / "config.json", other.path / "config.json")
    promoted(home.path, other, model="another")
    found = forgetting_runs.champions(home.path, [home.run.name])
    assert [c.digest for c in found] == [*home.digests, digest]
    assert [c.is_current for c in found] == [False, False, True]


# -- the command ----------------------------------------------------------------------------------


def test_without_yes_the_command_says_what_it_would_do_and_ends_with_two(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(home.path)
    assert main(["forget", "--user", "ann", "--home", str(home.path)]) == 2
    out = capsys.readouterr()
    assert "user ann: to erase" in out.out
    assert "4 calls" in out.out
    assert "skill only of bank main" in out.out
    assert home.digests[0][:12] in out.out
    assert "confirm with --yes" in out.err
    assert main(["forget", "--user", "ann", "--dry-run", "--home", str(home.path)]) == 0
    assert files_of(home.path) == before


def test_the_command_erases_and_says_so_as_json(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["forget", "--user", "ann", "--yes", "--json", "--home", str(home.path)]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["done"], told["calls"], told["examples"], told["rollouts"]) == (True, 4, 8, 4)
    assert [one["digest"] for one in told["seen_by"]] == list(home.digests)
    assert home.traces() == NOTHING
    assert main(words) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["done"], again["calls"], again["turns"]) == (True, 0, 0)
    assert [one["digest"] for one in again["seen_by"]] == list(home.digests)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "exactly one of"),
        (["--user", "a", "--source", "b"], "found --user, --source"),
        (["--user", "a", "--store", "no"], "no log store 'no'"),
    ],
)
def test_a_wrong_call_ends_with_two(
    home: Home, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["forget", *words, "--home", str(home.path)]) == 2
    assert told in capsys.readouterr().err
