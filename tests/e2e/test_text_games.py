"""The night of text games, from the first command to the bank, with a model of a few thousand
weights that plays at random."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from conftest import Command
from distill.rundir import RunDir, read_json
from distill.segments import stored
from distill.types import Note, Rollout
from skills.bank import SkillBank

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("textworld") is None, reason="needs the extra textworld"
)

SMALL = """
[model]
path = ""
kind = "full"
max_length = 900

[model.build]
hidden_size = 32
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 16
intermediate_size = 64
max_positions = 1024

[run]
orchestrator = "none"
threads = 1

[data]
games = ["treasure_hunter:2"]
train_size = 2
gate_size = 2
max_steps = 4

[evals]
tasks_per_domain = 2

[stage.seed.trainer]
steps = 2
batch = 1
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("games")
    (folder / "small.toml").write_text(SMALL)
    done = Command(folder)("nightly", "agents", "small.toml", "skills.min_sightings=1")
    assert done.returncode in (0, 3), done.stderr
    return folder


@pytest.fixture(scope="module")
def run(home) -> RunDir:
    return RunDir.all(home)[0]


def test_games_are_played_turn_by_turn_among_the_possible_commands(run):
    rollouts = [
        r for rows in stored(run.stage_dir("seed"), "rollouts", Rollout).values() for r in rows
    ]
    assert len({r.traj_id for r in rollouts}) == 2 * 4
    assert all(r.action_valid and r.error is None for r in rollouts)
    assert all(r.num_trained and len(r.observations) == 1 for r in rollouts)
    assert max(r.step for r in rollouts) >= 1


def test_finished_games_are_read_and_what_they_teach_is_kept(home, run):
    notes = [n for rows in stored(run.stage_dir("seed"), "notes", Note).values() for n in rows]
    assert len(notes) == 2 * 4
    assert all(note.status == "ok" and note.correct for note in notes)
    learned = read_json(run.summary_path)["stages"][0]["learned"]
    bank = SkillBank.open(home, "agents")
    assert learned["kept"]["added"] == [row.id for row in bank.rows()]
    item = bank.items()[0]
    assert item.scope.env == "textworld"
    assert {e.traj_id for e in item.evidence} <= {note.traj_id for note in notes}


def test_the_report_shows_the_games_as_conversations(run):
    page = (run.path / "report.md").read_text()
    assert "-> Room: " in page
