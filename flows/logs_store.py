"""Looking into a log store: its sources, its newest calls, one call, models without a tier."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import ConfigError

if TYPE_CHECKING:
    from distill.curriculum.records import RoutingTurn
    from distill.curriculum.store import LogStore

META = "store.json"


def store_path(home: Path, name: str) -> Path:
    """Folder of a store by name; without one the only store of a home, or a path to one.

    ConfigError naming those that exist."""
    names = sorted(path.parent.name for path in (home / "logs").glob(f"*/{META}"))
    if name:
        found = home / "logs" / name
        if (found / META).is_file():
            return found
        if (Path(name) / META).is_file():
            return Path(name)
        raise ConfigError(
            f"no log store {name!r} in {home / 'logs'}; stores: {', '.join(names) or 'none'}; make "
            f"one: distill logs import FILES --store {name}"
        )
    if not names:
        raise ConfigError(
            f"no log store in {home / 'logs'}; make one: distill logs import FILES --store main"
        )
    if len(names) > 1:
        raise ConfigError(f"there are several log stores; choose: --store {' | '.join(names)}")
    return home / "logs" / names[0]


def facts(store: LogStore) -> dict[str, Any]:
    """Counts, and per source the calls, sessions, time and formats. Reads no conversation."""
    import pyarrow.compute as pc

    found: dict[str, dict[str, Any]] = {}
    sessions = 0
    for bucket in range(store.num_buckets):
        table = store.table(bucket, ("source", "session_id", "ts", "format"))
        sessions += pc.count_distinct(table["session_id"]).as_py()
        for name in pc.unique(table["source"]).to_pylist():
            part = table.filter(pc.equal(table["source"], name))
            one = found.setdefault(
                name, {"turns": 0, "sessions": 0, "first": None, "last": None, "formats": {}}
            )
            one["turns"] += part.num_rows
            one["sessions"] += pc.count_distinct(part["session_id"]).as_py()
            ends = pc.min_max(part["ts"]).as_py()
            for key, best, value in (("first", min, ends["min"]), ("last", max, ends["max"])):
                if value is not None:
                    one[key] = value if one[key] is None else best(one[key], value)
            for each in pc.value_counts(part["format"]).to_pylist():
                formats = one["formats"]
                formats[each["values"]] = formats.get(each["values"], 0) + each["counts"]
    return {
        "path": str(store.path),
        "turns": store.num_turns,
        "sessions": sessions,
        "digest": store.digest(),
        "sources": dict(sorted(found.items())),
    }


def newest(store: LogStore, count: int) -> list[RoutingTurn]:
    """The calls that began last, newest first; those without a time come after all others."""
    best: list[tuple[int, int, int]] = []
    for bucket in range(store.num_buckets):
        times = store.table(bucket, ("ts",))["ts"].to_pylist()
        rows = ((-1 if ts is None else ts, bucket, row) for row, ts in enumerate(times))
        best = heapq.nlargest(count, [*best, *heapq.nlargest(count, rows)])
    held = {bucket: store.turns(bucket) for bucket in {bucket for _, bucket, _ in best}}
    return [held[bucket][row] for _, bucket, row in best]


def find_call(store: LogStore, name: str) -> RoutingTurn:
    """The call with this id of the log, or whose id as a turn begins so. ConfigError for none or
    several."""
    hits: list[tuple[int, int, str]] = []
    for bucket in range(store.num_buckets):
        for row, (turn, source_id) in enumerate(_ids(store, bucket)):
            if source_id == name or turn.startswith(name):
                hits.append((bucket, row, turn))
    exact = [hit for hit in hits if hit[2] == name] or hits
    if len({turn for _, _, turn in exact}) != 1:
        if not exact:
            raise ConfigError(
                f"no call of {store.path} has the id {name!r}, and no turn begins so; see: distill "
                "logs inspect"
            )
        listed = ", ".join(turn for _, _, turn in exact[:5])
        raise ConfigError(f"{name!r} stands for {len(exact)} calls: {listed}; write more of it")
    bucket, row, _ = exact[0]
    return store.turns(bucket)[row]


def _ids(store: LogStore, bucket: int) -> Iterator[tuple[str, str]]:
    from distill.curriculum.records import RoutingTurn
    from distill.curriculum.turns import turn_id

    table = store.table(bucket, ("source", "source_id", "format"))
    for row in table.to_pylist():
        yield turn_id(RoutingTurn(**row)), row["source_id"]


def evidence_of(store: LogStore, turn: RoutingTurn) -> list[Any]:
    """What other records say about a call."""
    refs = [ref for ref in (turn.source_id, turn.trace_id) if ref]
    found = store.evidence_for(refs)
    return [e for ref in refs for e in found.get(ref, ()) if e.source == turn.source]


def models_without_tier(store: LogStore) -> dict[str, dict[str, int]]:
    """Source -> model that answered and that no tier is known of -> calls, most frequent first."""
    import pyarrow.compute as pc

    found: dict[str, Counter[str]] = {}
    for bucket in range(store.num_buckets):
        table = store.table(bucket, ("source", "served"))
        served = table["served"]
        unknown = pc.and_(
            pc.is_valid(pc.struct_field(served, "model")),
            pc.is_null(pc.struct_field(served, "tier")),
        )
        part = table.filter(unknown)
        models = pc.struct_field(part["served"], "model").to_pylist()
        for source, model in zip(part["source"].to_pylist(), models, strict=True):
            found.setdefault(source, Counter())[model] += 1
    return {source: dict(models.most_common()) for source, models in sorted(found.items())}
