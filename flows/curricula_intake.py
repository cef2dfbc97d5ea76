"""What a night takes in of its logs: everything new, what could not be used, and a lasting record.

The record is written before the import begins and after it, so that a night that was killed between
import and curriculum still says how many calls were new.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from distill.curriculum.drops import REASONS
from distill.curriculum.ingest import IngestReport, SourceReport
from distill.curriculum.prepare import Redact, Source
from distill.curriculum.store import LogStore
from distill.errors import ConfigError, DataError
from distill.lock import is_held
from distill.rundir import read_json, write_json
from flows.logs_taking import HARMLESS

PATIENCE = 600.0
"""Seconds that a night waits for another import into its store."""
LOOK_AGAIN = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What came of an import, together with that of an interrupted one before it."""

    sources: tuple[SourceReport, ...]
    warnings: tuple[str, ...] = ()

    @property
    def new(self) -> int:
        """Calls that the store did not have before the night."""
        return sum(source.stored for source in self.sources)


def take(
    store: LogStore,
    sources: Sequence[Source],
    *,
    redact: Redact | None,
    record: Path,
    tell: Callable[[str], None],
) -> Taken:
    """Import everything new, patiently, and keep in `record` what it was.

    DataError when no source could be read, or when nothing came in and none of the rows of a source
    could be used.
    """
    if not record.exists():
        write_json(record, {"before": _held(store), "sources": {}})
    known = read_json(record)
    report = _patiently(store, sources, redact, tell)
    found = tuple(_with_earlier(own, known, store) for own in report.sources)
    counts = {
        own.source: {
            "read": own.read,
            "stored": own.stored,
            "evidence": own.evidence,
            "dropped": dict(own.dropped),
        }
        for own in found
    }
    write_json(record, {**known, "sources": counts})
    _require_something(found)
    return Taken(sources=found, warnings=tuple(_warnings(found)))


def _patiently(
    store: LogStore,
    sources: Sequence[Source],
    redact: Redact | None,
    tell: Callable[[str], None],
) -> IngestReport:
    """Import once nobody else does. ConfigError when that takes longer than PATIENCE."""
    began, told, lock = time.monotonic(), False, store.lock().path
    while True:
        try:
            return store.ingest(sources, redact=redact, now_ms=time.time_ns() // 1_000_000)
        except ConfigError:
            if time.monotonic() - began > PATIENCE or not is_held(lock):
                raise
        if not told:
            tell(
                f"another import into log store {store.path.name!r} is running; waiting for it, "
                f"{PATIENCE / 60:.0f} minutes at most"
            )
            told = True
        while is_held(lock) and time.monotonic() - began <= PATIENCE:
            time.sleep(LOOK_AGAIN)


# -- what was new -------------------------------------------------------------------------------


def _held(store: LogStore) -> dict[str, Any]:
    """Of each source how many calls the store has, and which rows it left out."""
    counts = pc.value_counts(store.table(None, ["source"])["source"]).to_pylist()
    return {
        "calls": {each["values"]: each["counts"] for each in counts},
        "drops": store.drop_counts(),
    }


def _with_earlier(own: SourceReport, known: Mapping[str, Any], store: LogStore) -> SourceReport:
    """The report of a source with what an interrupted import of the same night did.

    That one may have been killed before it could say so: the store knows what it has since.
    """
    earlier, before, now = known["sources"].get(own.source, {}), known["before"], _held(store)
    more = now["calls"].get(own.source, 0) - before["calls"].get(own.source, 0)
    own.stored = max(own.stored + earlier.get("stored", 0), more)
    own.evidence += earlier.get("evidence", 0)
    was = before["drops"].get(own.source, {})
    since = {
        reason: number - was.get(reason, 0)
        for reason, number in now["drops"].get(own.source, {}).items()
    }
    own.dropped += Counter(earlier.get("dropped", {}))
    for reason, number in since.items():
        if number > own.dropped[reason]:
            own.dropped[reason] = number
    # Every row that was read was stored, said something about another, or was left out.
    told = own.stored + own.evidence + own.dropped.total()
    own.read = max(own.read + earlier.get("read", 0), told)
    return own


# -- what could not be used -----------------------------------------------------------------------


def _require_something(sources: Sequence[SourceReport]) -> None:
    if all(_is_lost(own) for own in sources):
        told = "; ".join(_where(own) for own in sources)
        raise DataError(
            f"no source of the curriculum could be read: {told}; correct curriculum.sources, or "
            "remove the stage"
        )
    if any(own.stored or own.evidence for own in sources):
        return
    for own in sources:
        bad = _bad(own)
        if bad and bad.total() >= own.read - own.again:
            raise DataError(
                f"source {own.source!r}: none of {own.read:,} rows could be used "
                f"({_reasons(bad)}), and nothing else came in; see: distill logs drops; name the "
                'format of the source, or where its fields stand with format = "mapped"'
            )


def _warnings(sources: Sequence[SourceReport]) -> list[str]:
    found = []
    for own in sources:
        name = f"log source {own.source!r}"
        if own.unreadable:
            found.append(f"{name} could not be read{_partly(own)}: {_where(own)}")
        bad = _bad(own)
        if bad:
            found.append(
                f"{name}: {bad.total():,} of {own.read:,} rows were not used ({_reasons(bad)}); "
                "see: distill logs drops"
            )
        for stop in own.stopped:
            found.append(
                f"{name}: reading ended before the end of a file ({REASONS[stop.reason]}); the "
                f"next import goes on at {stop.place}"
            )
    if not any(own.stored or own.evidence for own in sources):
        found.append(
            "nothing was new in the logs of the curriculum; it is made of what earlier imports left"
        )
    return found


def _is_lost(own: SourceReport) -> bool:
    """Whether nothing of a source is there, nor was it when the night first looked."""
    return bool(own.unreadable) and not (own.files or own.skipped or own.read)


def _partly(own: SourceReport) -> str:
    return "" if _is_lost(own) else " in full"


def _where(own: SourceReport) -> str:
    first = own.unreadable[0]
    more = f" (and {len(own.unreadable) - 1} more)" if len(own.unreadable) > 1 else ""
    return f"{first.path}: {first.why}{more}"


def _bad(own: SourceReport) -> Counter[str]:
    return Counter({reason: n for reason, n in own.dropped.items() if reason not in HARMLESS})


def _reasons(bad: Counter[str]) -> str:
    return "; ".join(f"{n:,}: {REASONS.get(reason, reason)}" for reason, n in bad.most_common(3))
