"""A small home with a log store, a curriculum, a run that trained on it, a bank and champions."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import typer

from distill.config import Layer, load
from distill.curriculum.build import build
from distill.curriculum.examples import read_plan
from distill.curriculum.options import CurriculumSection
from distill.curriculum.prepare import Source
from distill.curriculum.records import RoutingTurn
from distill.curriculum.store import LogStore
from distill.curriculum.turns import turn_id
from distill.rundir import RunDir, digest_file, write_json
from distill.segments import Segments
from distill.types import CheckpointRef, Note, Rollout, Scores
from evals.curriculum_page import write_page
from evals.envs.routing import Routing
from flows import cli as _whole  # noqa: F401, registers every verb
from flows import cli_curriculum, cli_forget, cli_logs, registry
from helpers import make_rollout
from skills.bank import SkillBank
from skills.intake import AddOptions
from skills.items import Evidence, Lineage, SkillItem


@functools.cache
def light_app() -> typer.Typer:
    """The commands about logs alone: building the parser of all others would take longer than most
    of these tests."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    # The groups have their verbs already, from when `flows.cli` was imported.
    app.add_typer(cli_logs.logs_app, name="logs")
    app.add_typer(cli_curriculum.curriculum_app, name="curriculum")
    cli_forget.register(app)
    return app


USERS = ("ann", "bob", "cho")
NUM_SESSIONS = 6
NIGHT = """
[run]
preset = "night"
[model]
name = "m"
path = "some-model"
[[stage]]
name = "curriculum"
kind = "curriculum"
target = "data"
[[stage.curriculum.sources]]
path = "gateway.jsonl"
[[stage]]
name = "opd"
kind = "on_policy"
target = "student"
[stage.data]
name = "routing"
path = "stage:curriculum"
use = "contexts"
"""


def call(session: int, turn: int, *, user: str, source: str = "g", **more: Any) -> dict[str, Any]:
    """A row of a LiteLLM spend log: one request of a session with what was said before."""
    said = []
    for n in range(turn + 1):
        said.append({"role": "user", "content": f"{source} question {session}-{n} of a kind"})
        if n < turn:
            said.append({"role": "assistant", "content": f"reply {session}-{n}"})
    answer = {"role": "assistant", "content": f"reply {session}-{turn}"}
    good = float((session + turn) % 3 != 0)
    row: dict[str, Any] = {
        "request_id": f"{source}-{session}-{turn}",
        "call_type": "acompletion",
        "model": "small" if turn == 0 else "large",
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "startTime": f"2026-09-01T{session:02d}:{turn:02d}:00Z",
        "endTime": f"2026-09-01T{session:02d}:{turn:02d}:02Z",
        "session_id": f"{source}-s{session}",
        "end_user": user,
        "status": "success",
        "cache_hit": "False",
        "messages": json.dumps(said),
        "response": json.dumps({"choices": [{"finish_reason": "stop", "message": answer}]}),
        "metadata": json.dumps(
            {"outcome": {"verdicts": [{"source": "program", "name": "graded", "value": good}]}}
        ),
    }
    return row | more


def calls(source: str = "g") -> list[dict[str, Any]]:
    """Two calls in each of six sessions, of three users in turn."""
    return [
        call(session, turn, user=USERS[session % 3], source=source)
        for session in range(NUM_SESSIONS)
        for turn in range(2)
    ]


def write_log(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def filled_store(path: Path, *logs: Path) -> None:
    """A store with the rows of these files; each is a source named after its file."""
    sources = [Source(name=log.stem, path=str(log), tiers={"small": 0, "large": 2}) for log in logs]
    with LogStore.open(path, create=True) as store:
        store.ingest(sources, redact=None, now_ms=1_788_400_000_000)


def built(folder: Path, store: Path) -> Path:
    """A curriculum of a store, with its page and a manifest as a stage leaves them."""
    folder.mkdir(parents=True)
    with LogStore.open(store) as held:
        build(held, CurriculumSection(near_duplicate=0.0), folder)
    write_page(folder)
    files = {p.name: digest_file(p) for p in sorted(folder.iterdir()) if p.is_file()}
    write_json(folder / "manifest.json", {"format": 1, "files": files})
    return folder


def id_of(source: str, session: int, turn: int) -> str:
    """Id of the turn that a call of `calls` makes."""
    name = f"{'g' if source == 'gateway' else source}-{session}-{turn}"
    return turn_id(RoutingTurn(source=source, source_id=name, format="litellm"))


def run_on(
    home: Path, store: Path, *, incumbent: str | None = None, finished: bool = True
) -> RunDir:
    """A run whose stage `opd` trained on its own curriculum of the store, two tasks a step."""
    run = RunDir.create(home, "night", "20260901")
    run.write_config(load([Layer(origin="t", text=NIGHT)]), NIGHT)
    start = None if incumbent is None else {"digest": incumbent, "path": "x"}
    write_json(run.path / "night.json", {"id": run.name, "number": 1, "incumbent": start})
    folder = built(run.stage_dir("curriculum") / "final", store)
    tasks = list(Routing(path=str(folder), use="contexts").tasks("train"))
    stage = run.stage_dir("opd")
    segments = Segments(stage, 1)
    for step in range(1, len(tasks) // 2 + 1):
        once, pair = segments.at(step), tasks[2 * step - 2 : 2 * step]
        rollouts = [
            make_rollout([1, 2], [3, 1], name=task.id, traj_id=f"{run.name}/{task.id}")
            for task in pair
        ]
        once("rollouts", Rollout, lambda made=rollouts: made)
        notes = [
            Note(traj_id=r.traj_id, outcome="success", status="ok", episode_skill="look")
            for r in rollouts
        ]
        once("notes", Note, lambda made=notes: made)
        scores = [Scores(logprobs=(-1.0, -2.0), source="t", view_id="v") for _ in rollouts]
        once("teacher", Scores, lambda made=scores: made)
    segments.sync()
    segments.close()
    (stage / "checkpoints" / "000001").mkdir(parents=True)
    if finished:
        (stage / "final").mkdir()
    return run


def promoted(home: Path, run: RunDir, *, model: str = "m") -> str:
    """A champion of a run; its digest."""
    weights = run.path / "weights"
    weights.mkdir()
    (weights / "adapter.bin").write_text(run.name)
    digest = digest_file(weights / "adapter.bin")
    write_json(weights / "manifest.json", {"format": 1, "files": {"adapter.bin": digest}})
    ref = CheckpointRef(
        path=weights, step=1, policy_version=1, base="b", kind="adapter", digest=digest
    )
    registry.promote(home, model, ref, run=run.name)
    return digest


def tasks_of(run: RunDir, turns: set[str]) -> set[str]:
    """Ids of the contexts that some turns of a run's curriculum give."""
    tasks = Routing(path=str(run.stage_dir("curriculum") / "final"), use="contexts").tasks("train")
    return {task.id for task in tasks if task.meta["turn_id"] in turns}


def taught(home: Path, run: RunDir, skills: Mapping[str, list[str]]) -> None:
    """A bank `main` with skills that rollouts at these tasks taught."""
    bank = SkillBank.create(home, "main")
    items = [
        SkillItem(
            id=name,
            title=f"Skill {name}",
            principle=f"Do {name}.",
            status="active",
            lineage=Lineage(run=run.name),
            evidence=tuple(
                Evidence(traj_id=f"{run.name}/{task}", outcome="success") for task in tasks
            ),
        )
        for name, tasks in skills.items()
    ]
    bank.add(items, AddOptions(dedup=False))


def planned(folder: Path) -> list[str]:
    return [str(name) for name in read_plan(folder)["id"].to_pylist()]


def example_ids(folder: Path) -> set[str]:
    return _ids(sorted((folder / "examples").glob("*.arrow")))


def turn_ids(folder: Path) -> set[str]:
    return _ids([folder / "turns.arrow"])


def _ids(paths: list[Path]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        options = pa.ipc.IpcReadOptions(use_threads=False)  # many batches of a few rows
        with pa.OSFile(str(path), "rb") as source:
            table = pa.ipc.open_file(source, options=options).read_all()
            found |= set(table["id"].to_pylist())
    return found - {""}


def stored_calls(store: Path) -> set[str]:
    with LogStore.open(store) as held:
        return set(held.table(None, ["source_id"])["source_id"].to_pylist())


def rollout_tasks(run: RunDir, stage: str = "opd") -> list[str]:
    return [row["task_id"] for line in lines(run, stage, "rollouts") for row in line["rows"]]


def lines(run: RunDir, stage: str, name: str) -> list[dict[str, Any]]:
    paths = sorted((run.stage_dir(stage) / "segments").glob("*.jsonl"))
    every = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [line for line in every if line["name"] == name]
