"""What training made of recorded turns: who read a curriculum, rollouts, skills, champions."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.config_check import STAGE_PREFIX
from distill.errors import DataError, DistillError
from distill.rundir import TEMPORARY, RunDir, clear_disk_errors, read_json, write_json
from flows import registry

RECORD = "forgotten.json"
"""Beside the checkpoints of a stage: what is to go from its rollouts, until it is gone."""
FINAL = "final"
ROLLOUTS, NOTES = "rollouts", "notes"
_HEAD = re.compile(rb'\{"step":(\d+),"name":"(\w+)",')


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """A stage that trained on a curriculum."""

    run: str
    stage: str
    path: Path
    """Its folder."""
    curriculum: Path

    @property
    def finished(self) -> bool:
        return (self.path / FINAL).is_dir()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """Rows of a stage's rollouts that came from certain tasks."""

    rows: int = 0
    trajectories: frozenset[str] = frozenset()
    steps: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Champion:
    """Promoted weights that saw a turn, by themselves or through those that they continue."""

    model: str
    digest: str
    run: str | None
    at: str
    because: str
    is_current: bool


# -- who read a curriculum ------------------------------------------------------------------------


def readers(home: Path, folders: Iterable[Path]) -> tuple[list[Reader], list[str]]:
    """Stages that train on one of these curricula, and runs whose configuration cannot be read."""
    wanted = {folder.resolve(): folder for folder in folders}
    found: list[Reader] = []
    unread: list[str] = []
    for run in RunDir.all(home):
        try:
            found += _of_run(run, home, wanted)
        except DistillError:
            unread.append(run.name)
    return sorted(found, key=lambda r: (r.run, r.stage)), sorted(unread)


def _of_run(run: RunDir, home: Path, wanted: Mapping[Path, Path]) -> Iterator[Reader]:
    """Read as plain JSON: whether an older version's settings are still valid does not matter."""
    config = read_json(run.path / "config.json")
    try:
        stages = [(str(stage["name"]), _data_path(stage, config)) for stage in config["stage"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{run.path / 'config.json'} is no configuration: {error}") from error
    for name, path in stages:
        if path.startswith(STAGE_PREFIX):
            places = [run.stage_dir(path.removeprefix(STAGE_PREFIX)) / FINAL]
        else:
            places = [Path(path).expanduser(), home / path] if path else []
        hits = [wanted[place.resolve()] for place in places if place.resolve() in wanted]
        if hits:
            yield Reader(run=run.name, stage=name, path=run.stage_dir(name), curriculum=hits[0])


def _data_path(stage: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Where the tasks of a stage come from; its own [data] wins over the shared one."""
    path = stage.get("data", {}).get("path", config.get("data", {}).get("path", ""))
    return path if isinstance(path, str) else ""


def task_ids(curriculum: Path, turns: frozenset[str]) -> frozenset[str]:
    """Ids of the tasks that these turns of a curriculum give: as worked answers and as contexts.

    DataError for a damaged curriculum."""
    import numpy as np

    from distill.curriculum.examples import read_plan
    from evals.envs.routing import RecordedTasks, Routing

    plan = read_plan(curriculum)
    names = plan["id"].to_pylist()
    hits = np.array([i for i, name in enumerate(names) if name in turns], dtype=np.int64)
    if not len(hits):
        return frozenset()
    # Built by hand: a curriculum may hold these turns and none that is of use in another way.
    spans = plan["num_spans"].to_numpy().astype(np.int64)[hits]
    found: set[str] = set()
    worked = RecordedTasks(
        Routing(path=str(curriculum), use="turns"), plan, hits, np.zeros(len(hits), np.int64)
    )
    found |= {task.id for task in worked}
    rows = np.repeat(hits, spans)
    starts = np.repeat(spans.cumsum() - spans, spans)
    numbers = np.arange(len(rows)) - starts
    contexts = RecordedTasks(Routing(path=str(curriculum), use="contexts"), plan, rows, numbers)
    found |= {task.id for task in contexts}
    return frozenset(found)


# -- rollouts -------------------------------------------------------------------------------------


def find_rollouts(stage: Path, tasks: frozenset[str]) -> Rollouts:
    """What of a stage's stored rollouts came from these tasks."""
    rows, trajectories, steps = 0, set(), set()
    for path in _segments(stage):
        for step, name, line in _lines(path):
            if name != ROLLOUTS:
                continue
            hits = [r for r in _rows(line, path) if r["task_id"] in tasks]
            if hits:
                rows += len(hits)
                steps.add(step)
                trajectories |= {str(row["traj_id"]) for row in hits}
    return Rollouts(rows=rows, trajectories=frozenset(trajectories), steps=frozenset(steps))


def pending(stage: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Tasks whose rollouts still have to go, and trajectories whose skills still have to."""
    path = stage / RECORD
    if not path.exists():
        return frozenset(), frozenset()
    table = read_json(path)
    return frozenset(table["tasks"]), frozenset(table["trajectories"])


def announce(stage: Path, tasks: frozenset[str], trajectories: frozenset[str]) -> None:
    """Write down what is about to go, so that a removal that is killed can be finished."""
    value = {"tasks": sorted(tasks), "trajectories": sorted(trajectories)}
    write_json(stage / RECORD, value)


def settled(stage: Path) -> None:
    """Everything that was announced is gone."""
    (stage / RECORD).unlink(missing_ok=True)


def erase_rollouts(reader: Reader, tasks: frozenset[str]) -> None:
    """Take the rows of these tasks out of the segments of a stage.

    What was stored beside them (scores, which stand row by row, and draws) goes for the whole step.
    In an interrupted stage everything after its last checkpoint goes: the tasks that it would draw
    again are others now. Each file is replaced as a whole, and the lines stay those of `Segments`.
    """
    found = find_rollouts(reader.path, tasks)
    last = None
    if not reader.finished:
        names = [path.name for path in (reader.path / "checkpoints").glob("*")]
        last = max((int(name) for name in names if name.isdigit()), default=0)
    for path in _segments(reader.path):
        kept = list(_kept(path, found, tasks, last))
        data = b"".join(kept)
        if len(data) != path.stat().st_size:
            _replace(path, data)


def _kept(path: Path, found: Rollouts, tasks: frozenset[str], last: int | None) -> Iterator[bytes]:
    for step, name, line in _lines(path):
        if last is not None and step > last:
            continue
        if step not in found.steps:
            yield line
        elif name == ROLLOUTS:
            rows = [r for r in _rows(line, path) if r["task_id"] not in tasks]
            yield _line(step, name, rows)
        elif name == NOTES:
            rows = [r for r in _rows(line, path) if r["traj_id"] not in found.trajectories]
            yield _line(step, name, rows)


def _line(step: int, name: str, rows: list[Any]) -> bytes:
    table = {"step": step, "name": name, "rows": rows}
    return json.dumps(table, separators=(",", ":")).encode() + b"\n"


def _segments(stage: Path) -> list[Path]:
    return sorted((stage / "segments").glob("*.jsonl"))


def _lines(path: Path) -> Iterator[tuple[int, str, bytes]]:
    """Step, name and bytes of every complete line; what a kill left at the end is dropped."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            head = _HEAD.match(line)
            if head is not None:
                yield int(head[1]), head[2].decode(), line
            elif line.strip():
                table = _table(line, path)
                yield int(table["step"]), str(table["name"]), line


def _table(line: bytes, path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}: not a line of valid JSON: {error}") from error
    return table


def _rows(line: bytes, path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _table(line, path)["rows"]
    return rows


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}")
    with clear_disk_errors(path), partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


# -- skills ---------------------------------------------------------------------------------------


def derived_skills(
    home: Path, trajectories: Mapping[str, frozenset[str]]
) -> dict[str, list[tuple[str, str]]]:
    """Bank -> (id, title) of skills that only these trajectories taught, by run of their making.

    A skill with other evidence stays; so does one of a run that has no such trajectory.
    """
    from skills.bank import SkillBank

    every = frozenset().union(*trajectories.values())
    found: dict[str, list[tuple[str, str]]] = {}
    for name in SkillBank.names(home) if every else ():
        for item in SkillBank.open(home, name).items("candidate", "active", "quarantined"):
            known = {one.traj_id for one in item.evidence}
            run = item.lineage.run
            if known and known <= every and (not run or run in trajectories):
                found.setdefault(name, []).append((item.id, item.title))
    return found


def retire_skills(home: Path, skills: Mapping[str, list[tuple[str, str]]], *, actor: str) -> None:
    """Retire them with the reason; those that are retired already stay so."""
    from skills.bank import SkillBank

    for name, items in skills.items():
        with SkillBank.open(home, name).change(actor=actor, wait=10.0) as change:
            for skill, _ in items:
                row = change.rows.get(skill)
                if row is not None and row.status != "retired":
                    change.retire(skill, reason="forgotten on request: only such turns taught it")


# -- champions ------------------------------------------------------------------------------------


def champions(home: Path, runs: Iterable[str]) -> list[Champion]:
    """Champions, past and present, whose run trained on a turn, and those that go on from one."""
    saw = dict.fromkeys(runs, "trained on such turns")
    entries = [e for model in registry.models(home) for e in registry.history(home, model)]
    promoted = [entry for entry in entries if entry.action == "promote"]
    found: dict[tuple[str, str], str] = {}
    while True:
        new = {
            (e.model, e.to_digest): saw[e.run]
            for e in promoted
            if e.run in saw and (e.model, e.to_digest) not in found
        }
        found |= new
        more = {name: why for name, why in _continued(home, found).items() if name not in saw}
        saw |= more
        if not new and not more:
            break
    last = {e.model: e.to_digest for e in entries}
    first = {(e.model, e.to_digest): e for e in reversed(promoted)}
    return [
        Champion(
            model=model,
            digest=digest,
            run=first[model, digest].run,
            at=first[model, digest].at,
            because=why,
            is_current=last[model] == digest,
        )
        for (model, digest), why in sorted(found.items(), key=lambda f: first[f[0]].at)
    ]


def _continued(home: Path, digests: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Runs that started from one of these weights."""
    known = {digest for _, digest in digests}
    found = {}
    for run in RunDir.all(home):
        path = run.path / "night.json"
        start = (read_json(path).get("incumbent") or {}) if path.exists() else {}
        digest = str(start.get("digest", ""))
        if digest in known:
            found[run.name] = f"continues {digest[:12]}"
    return found
