"""Erasing a user, a session or a source: from log stores, curricula, rollouts and skills.

`look` finds what there is and changes nothing. `carry_out` removes it, the derived first and the
store last, and writes down beforehand what is going to go: a removal that was killed is finished by
the same call again, and one that is complete changes nothing more. Weights cannot forget; `look`
names the champions that saw the turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distill.errors import ConfigError
from distill.rundir import RunDir, digest_json, now, read_json, write_json
from flows import forgetting_curricula as built
from flows import forgetting_runs as runs
from flows.forgetting_curricula import Doomed
from flows.logs_store import store_path

if TYPE_CHECKING:
    from distill.curriculum.store import LogStore

Kind = Literal["user", "session", "source"]
KINDS: tuple[Kind, ...] = ("user", "session", "source")
LEDGER = "forgotten"
"""Folder in a store: what was erased from it, as ids that say nothing about a person."""
META = "store.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Who or what is to be forgotten."""

    kind: Kind
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class InStore:
    """What a store holds of it."""

    path: Path
    calls: int = 0
    others: int = 0
    """Calls of others in the same conversations: they quote what was said there."""
    doomed: Doomed = field(default_factory=Doomed)
    mixed: tuple[str, ...] = ()
    """Conversations with such calls."""
    files: tuple[str, ...] = ()
    """Logs that its source was read from, which are not ours to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InCurriculum:
    """What a curriculum holds of it."""

    path: Path
    ids: frozenset[str]
    examples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InStage:
    """What a stage made of it."""

    reader: runs.Reader
    tasks: frozenset[str]
    trajectories: frozenset[str]
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Everything that has to go, and the weights that saw it."""

    wanted: Wanted
    stores: tuple[InStore, ...] = ()
    curricula: tuple[InCurriculum, ...] = ()
    stages: tuple[InStage, ...] = ()
    skills: Mapping[str, list[tuple[str, str]]] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    """Runs that trained on it, now or before it was erased."""
    champions: tuple[runs.Champion, ...] = ()
    unread: tuple[str, ...] = ()
    """Runs whose configuration cannot be read, so that nobody knows what they trained on."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to erase."""
        calls = any(store.calls + store.others for store in self.stores)
        return not (calls or self.curricula or self.stages or any(self.skills.values()))


def look(home: Path, wanted: Wanted, *, store: str = "") -> Found:
    """Everything in a home that holds, or was made of, the turns of a user, session or source.

    Without `store` all stores count, and curricula are searched by name as well. ConfigError for
    a store that does not exist, DataError for a damaged curriculum.
    """
    stores = tuple(_in_store(path, wanted) for path in _stores(home, store))
    doomed = Doomed()
    for one in stores:
        doomed |= one.doomed
    if not store:
        doomed |= _by_name(wanted)
    folders = built.curricula(home)
    if not stores and not folders:
        raise ConfigError(
            f"there is no log store and no curriculum in {home.resolve()}; name the folder that "
            "holds them with --home"
        )
    curricula = []
    touched: list[Path] = []
    for folder in folders:
        ids = built.held_ids(folder, doomed)
        if ids:
            examples = len(ids & built.planned_ids(folder))
            curricula.append(InCurriculum(path=folder, ids=ids, examples=examples))
        if ids or built.read_record(folder).ids & doomed.ids:
            touched.append(folder)
    readers, unread = runs.readers(home, touched)
    held = {one.path: one for one in curricula}
    stages = tuple(filter(None, (_in_stage(reader, held) for reader in readers)))
    trajectories = _by_run(stages)
    trained = tuple(dict.fromkeys(reader.run for reader in readers))
    return Found(
        wanted=wanted,
        stores=stores,
        curricula=tuple(curricula),
        stages=stages,
        skills=runs.derived_skills(home, trajectories) if trajectories else {},
        trained=trained,
        champions=tuple(runs.champions(home, trained)),
        unread=tuple(unread),
    )


def carry_out(home: Path, found: Found, *, actor: str) -> None:
    """Erase what `look` found. ConfigError while a run that holds some of it is at work.

    Killed at any point, `look` and `carry_out` again finish it.
    """
    _require_idle(home, found)
    for one in found.stores:
        _note_in_ledger(one, found.wanted, pending=True)
    for stage in found.stages:
        runs.announce(stage.reader.path, stage.tasks, stage.trajectories)
    for stage in found.stages:
        runs.erase_rollouts(stage.reader, stage.tasks)
    runs.retire_skills(home, found.skills, actor=actor)
    source = found.wanted.name if found.wanted.kind == "source" else ""
    for curriculum in found.curricula:
        built.erase(curriculum.path, curriculum.ids, source=source)
    for stage in found.stages:
        runs.settled(stage.reader.path)
    for one in found.stores:
        _forget(one, found.wanted)
        _note_in_ledger(one, found.wanted, pending=False)


# -- stores ---------------------------------------------------------------------------------------


def _stores(home: Path, name: str) -> list[Path]:
    """The named store, or all of a home: those that last, and those of single runs."""
    if name:
        return [store_path(home, name)]
    found = [*home.glob(f"logs/*/{META}"), *home.glob(f"runs/*/stages/*/store/{META}")]
    return sorted(path.parent for path in found)


def _in_store(path: Path, wanted: Wanted) -> InStore:
    from distill.curriculum.store import LogStore

    with LogStore.open(path) as store:
        names, earlier = _names(store, wanted), _ledger(path, store, wanted)
        ids, sources = set(earlier.get("ids", ())), set()
        talks = {(source, name) for source, name in earlier.get("sessions", ())}
        calls, others, mixed = 0, 0, set()
        for bucket in range(store.num_buckets):  # a session lies wholly in one of them
            own, beside = _in_bucket(store, bucket, wanted.kind, names)
            calls, others = calls + len(own), others + len(beside)
            ids |= {_id(row) for row in [*own, *beside]}
            sources |= {row["source"] for row in own}
            mixed |= {row["session_id"] for row in beside}
            talks |= {(row["source"], row["session_id"]) for row in own if row["session_id"]}
        return InStore(
            path=path,
            calls=calls,
            others=others,
            doomed=Doomed(
                ids=frozenset(ids),
                sessions=frozenset() if wanted.kind == "source" else frozenset(talks),
            ),
            mixed=tuple(sorted(mixed)),
            files=tuple(file.path for file in store.files() if file.source in sources),
        )


def _in_bucket(
    store: LogStore, bucket: int, kind: Kind, names: set[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The calls of a bucket that are meant, and those of others in the same conversations."""
    column = {"user": "user", "session": "session_id", "source": "source"}[kind]
    rows = store.table(bucket, ("source", "format", "source_id", "session_id", "user")).to_pylist()
    own = [row for row in rows if row[column] in names]
    if not own or kind == "source":
        return own, []
    talks = {(row["source"], row["session_id"]) for row in own if row["session_id"] is not None}
    inside = [row for row in rows if (row["source"], row["session_id"]) in talks]
    return own, [row for row in inside if row[column] not in names]


def _id(row: Mapping[str, Any]) -> str:
    """Id of the turn that begins with this call; of a call that opens none it does no harm."""
    from distill.curriculum.records import RoutingTurn
    from distill.curriculum.turns import turn_id

    return turn_id(
        RoutingTurn(source=row["source"], source_id=row["source_id"], format=row["format"])
    )


def _names(store: LogStore, wanted: Wanted) -> set[str]:
    """How a store may have written it: a user by a key, or by what the caller gave."""
    if wanted.kind == "user":
        return {wanted.name, store.user_key(wanted.name)}
    return {wanted.name}


def _by_name(wanted: Wanted) -> Doomed:
    """What curricula themselves say about a session or a source; users are not in them."""
    if wanted.kind == "session":
        return Doomed(sessions=frozenset({(None, wanted.name)}))
    return Doomed(source=wanted.name) if wanted.kind == "source" else Doomed()


def _forget(one: InStore, wanted: Wanted) -> None:
    from distill.curriculum.store import LogStore

    if not one.calls + one.others:
        return
    with LogStore.open(one.path) as store:
        kind, name = wanted.kind, wanted.name
        store.forget(
            user=name if kind == "user" else None,
            session=name if kind == "session" else None,
            source=name if kind == "source" else None,
        )
        for session in one.mixed:
            store.forget(session=session)


# -- the ledger of a store ------------------------------------------------------------------------


def _ledger_path(path: Path, store: LogStore, wanted: Wanted) -> Path:
    """Named by a keyed digest, so that the file's name tells nobody who was forgotten."""
    name = store.user_key(f"{wanted.kind}/{wanted.name}")
    return path / LEDGER / f"{digest_json([wanted.kind, name])[:16]}.json"


def _ledger(path: Path, store: LogStore, wanted: Wanted) -> Mapping[str, Any]:
    """What an earlier call erased, or meant to: turn ids; sessions only while it is unfinished."""
    file = _ledger_path(path, store, wanted)
    return dict(read_json(file)) if file.exists() else {}


def _note_in_ledger(one: InStore, wanted: Wanted, *, pending: bool) -> None:
    from distill.curriculum.store import LogStore

    if not one.doomed.ids:
        return
    with LogStore.open(one.path) as store:
        file = _ledger_path(one.path, store, wanted)
    sessions = sorted([source, name] for source, name in one.doomed.sessions) if pending else []
    write_json(
        file,
        {
            "kind": wanted.kind,
            "at": now(),
            "pending": pending,
            "ids": sorted(one.doomed.ids),
            "sessions": sessions,
        },
    )


# -- runs -----------------------------------------------------------------------------------------


def _in_stage(reader: runs.Reader, held: Mapping[Path, InCurriculum]) -> InStage | None:
    curriculum = held.get(reader.curriculum)
    tasks, trajectories = runs.pending(reader.path)
    if curriculum is not None:
        tasks |= runs.task_ids(reader.curriculum, curriculum.ids)
    if not tasks:
        return None
    rollouts = runs.find_rollouts(reader.path, tasks)
    return InStage(
        reader=reader,
        tasks=tasks,
        trajectories=trajectories | rollouts.trajectories,
        rows=rollouts.rows,
    )


def _by_run(stages: tuple[InStage, ...]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for stage in stages:
        if stage.trajectories:
            run = stage.reader.run
            found[run] = found.get(run, frozenset()) | stage.trajectories
    return found


def _require_idle(home: Path, found: Found) -> None:
    """ConfigError while somebody works in a run whose files would change under it."""
    from distill.lock import is_held
    from flows.launch import LOCK_FILE

    names = {stage.reader.run for stage in found.stages}
    folders = [*(one.path for one in found.curricula), *(one.path for one in found.stores)]
    for run in RunDir.all(home):
        inside = any(run.path in folder.parents for folder in folders)
        if (run.name in names or inside) and is_held(run.path / LOCK_FILE):
            raise ConfigError(
                f"run {run.name} is at work and holds some of it; wait for it or stop it, then "
                "repeat the command"
            )


def counts(found: Found) -> dict[str, int]:
    """Numbers of what is there, for people and programs."""
    total: Counter[str] = Counter()
    for store in found.stores:
        total["calls"] += store.calls
        total["calls_of_others"] += store.others
    for curriculum in found.curricula:
        total["turns"] += len(curriculum.ids)
        total["examples"] += curriculum.examples
    total["rollouts"] = sum(stage.rows for stage in found.stages)
    total["skills"] = sum(map(len, found.skills.values()))
    total["champions"] = len(found.champions)
    names = ("calls", "calls_of_others", "turns", "examples", "rollouts", "skills", "champions")
    return {name: total[name] for name in names}
