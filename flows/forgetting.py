"""Erasing a user, a session or a source: from log stores, curricula, rollouts and skills.

`look` finds what there is and changes nothing. `carry_out` removes it, the derived first and the
store last, and writes down beforehand what is going to go: a removal that was killed is finished by
the same call again, and one that is complete changes nothing more. Weights cannot forget; `look`
names the champions that saw the turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distill.curriculum import forgetting
from distill.errors import ConfigError
from distill.rundir import RunDir
from flows import forgetting_curricula as built
from flows import forgetting_ledger as ledger
from flows import forgetting_runs as runs
from flows.forgetting_curricula import Doomed
from flows.forgetting_places import places, sweep
from flows.logs_store import store_path

if TYPE_CHECKING:
    from distill.curriculum.store import LogStore

Kind = Literal["user", "session", "source"]
KINDS: tuple[Kind, ...] = ("user", "session", "source")
META = "store.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Who or what is to be forgotten."""

    kind: Kind
    name: str
    source: str = ""
    """A session of this source alone; without one, of every source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InStore:
    """What a store holds of it."""

    path: Path
    calls: int = 0
    others: int = 0
    """Calls of others in the same conversations: they quote what was said there."""
    doomed: Doomed = field(default_factory=Doomed)
    mixed: tuple[tuple[str, str], ...] = ()
    """(source, session) of conversations with such calls."""
    evidence: int = 0
    """Statements about these calls, or of the source."""
    sources: tuple[str, ...] = ()
    """Where the calls came from."""
    pending: bool = False
    """An earlier removal was interrupted."""
    strangers: int = 0
    """Files that a killed import left and no commit names."""
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
    leftovers: tuple[Path, ...] = ()
    """What killed builds of curricula left; it may hold anybody's texts."""
    unreached: tuple[tuple[Path, str], ...] = ()
    """Curricula that may hold some of it and could not be looked into, and why."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to erase."""
        held = any(s.calls + s.others + s.evidence + s.strangers or s.pending for s in self.stores)
        skills = any(self.skills.values())
        return not (held or self.curricula or self.stages or skills or self.leftovers)


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
        doomed |= _by_name(wanted, {wanted.name})
    where = places(home)
    folders = where.folders
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
        leftovers=where.leftovers,
        unreached=where.unreached,
    )


def carry_out(home: Path, found: Found, *, actor: str) -> None:
    """Erase what `look` found. ConfigError while a run that holds some of it is at work.

    Killed at any point, `look` and `carry_out` again finish it.
    """
    _require_idle(home, found)
    # Scores of teachers name nobody, so all of them go; they are computed again when needed.
    scores = home / "cache" / "scores"
    sweep([*found.leftovers, *([scores] if scores.is_dir() else [])])
    for one in found.stores:
        _note(one, found.wanted, pending=True)
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
        _note(one, found.wanted, pending=False)


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
        earlier = ledger.read(store, wanted)
        ids, sources = set(earlier.get("ids", ())), set()
        # Conversations of a removal that was interrupted may have lost the person's own calls.
        begun = {(source, name) for source, name in earlier.get("sessions", ())}
        talks, mixed, about = set(begun), set(), set()
        calls, others = 0, 0
        for bucket in range(store.num_buckets):  # a session lies wholly in one of them
            own, beside = _in_bucket(store, bucket, wanted, begun)
            calls, others = calls + len(own), others + len(beside)
            rows = [*own, *beside]
            ids |= {_id(row) for row in rows}
            about |= {(r["source"], ref) for r in rows for ref in _refs(r)}
            sources |= {row["source"] for row in rows}
            mixed |= {(row["source"], row["session_id"]) for row in beside}
            talks |= {(row["source"], row["session_id"]) for row in own if row["session_id"]}
        source = wanted.name if wanted.kind == "source" else None
        said = forgetting.statements(store, about, source)
        if source is not None and said:
            sources.add(source)
        return InStore(
            path=path,
            calls=calls,
            others=others,
            doomed=Doomed(
                ids=frozenset(ids),
                sessions=frozenset() if wanted.kind == "source" else frozenset(talks),
            )
            | _hashed(store, wanted),
            mixed=tuple(sorted(mixed)),
            evidence=forgetting.count_statements(store, said),
            sources=tuple(sorted(sources)),
            pending=bool(earlier.get("pending")),
            strangers=_strangers(store),
            files=tuple(file.path for file in store.files() if file.source in sources),
        )


def _in_bucket(
    store: LogStore, bucket: int, wanted: Wanted, begun: set[tuple[str, str]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The calls of a bucket that are meant, and those of others in the same conversations."""
    table = store.table(bucket, _COLUMNS)
    hits = forgetting.meant(store, wanted.kind, wanted.name, wanted.source or None).hits(table)
    rows = table.to_pylist()
    own = [row for row, hit in zip(rows, hits, strict=True) if hit]
    rest = [row for row, hit in zip(rows, hits, strict=True) if not hit]
    talks = set(begun)
    if wanted.kind == "user":
        talks |= {(row["source"], row["session_id"]) for row in own}
    inside = [row for row in rest if row["session_id"] is not None]
    return own, [row for row in inside if (row["source"], row["session_id"]) in talks]


_COLUMNS = ("source", "format", "source_id", "trace_id", "session_id", "user")


def _refs(row: Mapping[str, Any]) -> list[str]:
    """What evidence may call it."""
    return [ref for ref in (row["source_id"], row["trace_id"]) if ref]


def _id(row: Mapping[str, Any]) -> str:
    """Id of the turn that begins with this call; of a call that opens none it does no harm."""
    from distill.curriculum.records import RoutingTurn
    from distill.curriculum.turns import turn_id

    return turn_id(
        RoutingTurn(source=row["source"], source_id=row["source_id"], format=row["format"])
    )


def _strangers(store: LogStore) -> int:
    """Files that a killed import left; none while one is at work, whose files look the same."""
    from distill.curriculum.segments import strangers
    from distill.lock import is_held

    return 0 if is_held(store.lock().path) else len(strangers(store.path, store.segments))


def _hashed(store: LogStore, wanted: Wanted) -> Doomed:
    """A session under the name that the store's redactor gave it."""
    if wanted.kind != "session":
        return Doomed()
    return _by_name(wanted, forgetting.stored_names(store, "session", wanted.name) - {wanted.name})


def _by_name(wanted: Wanted, names: Set[str]) -> Doomed:
    """What curricula themselves say about a session or a source; users are not in them."""
    if wanted.kind == "session":
        return Doomed(sessions=frozenset((wanted.source or None, name) for name in names))
    return Doomed(source=wanted.name) if wanted.kind == "source" else Doomed()


def _forget(one: InStore, wanted: Wanted) -> None:
    from distill.curriculum.segments import remove_strangers
    from distill.curriculum.store import LogStore

    with LogStore.open(one.path) as store:
        if not one.calls + one.others + one.evidence:
            if one.strangers:
                with store.lock():
                    remove_strangers(store.path, store.segments)
            return
        kind, name = wanted.kind, wanted.name
        store.forget(
            user=name if kind == "user" else None,
            session=name if kind == "session" else None,
            source=name if kind == "source" else wanted.source or None,
            talks=one.mixed,
        )


def _note(one: InStore, wanted: Wanted, *, pending: bool) -> None:
    from distill.curriculum.store import LogStore

    if one.doomed.ids:
        with LogStore.open(one.path) as store:
            ledger.note(store, wanted, one.doomed.ids, one.doomed.sessions, pending=pending)


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
        total["evidence"] += store.evidence
    for curriculum in found.curricula:
        total["turns"] += len(curriculum.ids)
        total["examples"] += curriculum.examples
    total["rollouts"] = sum(stage.rows for stage in found.stages)
    total["skills"] = sum(map(len, found.skills.values()))
    total["champions"] = len(found.champions)
    names = (
        "calls",
        "calls_of_others",
        "evidence",
        "turns",
        "examples",
        "rollouts",
        "skills",
        "champions",
    )
    return {name: total[name] for name in names}
