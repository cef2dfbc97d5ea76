"""Small logs in the normal form for tests, and short ways to import them and to look at a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distill.curriculum.ingest import IngestReport, SourceReport
from distill.curriculum.prepare import Source
from distill.curriculum.records import RoutingTurn
from distill.curriculum.store import LogStore

NOW = 1_790_000_000_000

SLOW = '''
from distill.curriculum.drops import RowError

class Slow:
    """Rows {text, done}: taken when they are done."""

    name = "slow"

    def recognises(self, row):
        return "done" in row

    def read(self, row, context):
        if not row["done"]:
            raise RowError("not_completed", "done is false")
        if row["done"] is not True:
            raise AttributeError("a mistake of the importer")
        yield context.turn(row, source_id=row["text"], format="slow")
'''


def row(n: int, *, session: str = "", text: str = "", **more: Any) -> dict[str, Any]:
    """A row in the normal form."""
    return {
        "source_id": f"id{n}",
        "format": "normal",
        "session_id": session or f"s{n // 3}",
        "user": f"user{n % 5}",
        "ts": NOW - 1_000_000 + n,
        "messages": [
            {"role": "user", "content": text or f"question {n}"},
            {"role": "assistant", "content": f"answer {n}"},
        ],
        "served": {"model": "m", "tier": n % 4},
        **more,
    }


def write(path: Path, rows: list[Any], mode: str = "w") -> Path:
    with path.open(mode) as file:
        for each in rows:
            file.write((each if isinstance(each, str) else json.dumps(each)) + "\n")
    return path


def take(store: LogStore, path: Path | str, **changes: Any) -> SourceReport:
    return whole(store, path, **changes).sources[0]


def whole(store: LogStore, path: Path | str, **changes: Any) -> IngestReport:
    options = {"redact": changes.pop("redact", None), "jobs": changes.pop("jobs", 1)}
    source = Source(**{"name": "log", "path": str(path), **changes})
    return store.ingest([source], now_ms=NOW, **options)


def all_turns(store: LogStore) -> list[RoutingTurn]:
    return [turn for bucket in range(store.num_buckets) for turn in store.turns(bucket)]


def ids(store: LogStore) -> list[str]:
    return sorted(turn.source_id for turn in all_turns(store))


def names(*numbers: int) -> list[str]:
    return sorted(f"id{n}" for n in numbers)
