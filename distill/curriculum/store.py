"""The log store: turns of all sources, redacted, each exactly once, in a folder of plain files.

    store.json        format, number of buckets, key for the hashes of users; readable by its owner
    state.sqlite      what is committed: files and how far they were read, dropped rows, evidence
    turns/N.arrow     segments, see `segments`

One writer at a time; readers need no lock and see what the last commit left.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from distill.curriculum import columns, segments
from distill.curriculum.prepare import user_key
from distill.curriculum.records import LAYERS, Evidence, RoutingTurn
from distill.curriculum.state import NAME as STATE
from distill.curriculum.state import Drop, FileState, Segment, State
from distill.errors import ConfigError, DataError
from distill.lock import Lock
from distill.rundir import TEMPORARY, clear_disk_errors, read_json

if TYPE_CHECKING:
    from distill.curriculum.ingest import IngestReport, Progress
    from distill.curriculum.prepare import Redact, Source

FORMAT = 1
NUM_BUCKETS = 128
META = "store.json"
_TRIES = 5
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """What a source tells, counted in turns."""

    turns: int = 0
    sessions: int = 0
    messages: int = 0
    """Turns with the text of their conversation."""
    layers: dict[str, int] = field(default_factory=dict)
    """Turns that have the layer prediction, decision, served or outcome."""
    first: int | None = None
    last: int | None = None
    """Earliest and latest time, milliseconds since 1970 UTC."""
    tiers: dict[str, dict[int, int]] = field(default_factory=dict)
    """Layer -> tier -> turns."""
    models: dict[str, int] = field(default_factory=dict)
    """Model that answered -> turns, most frequent first."""
    formats: dict[str, int] = field(default_factory=dict)
    evidence: int = 0


class LogStore:
    """An open store. Close it, or use it in a `with`."""

    def __init__(self, path: Path) -> None:
        meta = read_json(path / META)
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            found = meta.get("format") if isinstance(meta, dict) else meta
            raise DataError(
                f"{path / META}: expected format {FORMAT}, found {found!r}; "
                "another version of this program wrote it: use that one, or import again"
            )
        self.path = path
        self.num_buckets: int = meta["buckets"]
        self.salt = bytes.fromhex(meta["salt"])
        self.state = State(path)

    @classmethod
    def open(cls, path: str | Path, create: bool = False) -> LogStore:
        """The store in a folder; `create` makes one where there is none. DataError without one."""
        path = Path(path)
        if not (path / META).is_file():
            if not create:
                raise DataError(f"{path} is no log store; `distill logs import` makes one")
            _require_free(path)
            _create(path)
        return cls(path)

    def __enter__(self) -> LogStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.state.close()

    def lock(self) -> Lock:
        return Lock(self.path / ".lock.json", f"import into log store {self.path.name!r}")

    def user_key(self, name: str) -> str:
        """What the store keeps instead of a user's name."""
        return user_key(self.salt, name)

    # -- writing ----------------------------------------------------------------------------------

    def ingest(
        self,
        sources: Sequence[Source],
        *,
        redact: Redact | None,
        now_ms: int,
        progress: Callable[[Progress], None] | None = None,
        jobs: int = 1,
    ) -> IngestReport:
        """Read what is new in the sources; see `distill.curriculum.ingest`."""
        from distill.curriculum.ingest import ingest

        return ingest(self, sources, redact=redact, now_ms=now_ms, progress=progress, jobs=jobs)

    def forget(
        self,
        *,
        user: str | None = None,
        session: str | None = None,
        source: str | None = None,
        talks: Iterable[tuple[str, str]] = (),
        now_ms: int | None = None,
    ) -> list[str]:
        """Remove turns for good; see `distill.curriculum.forgetting`."""
        from distill.curriculum.forgetting import forget

        return forget(self, user=user, session=session, source=source, talks=talks, now_ms=now_ms)

    # -- reading ----------------------------------------------------------------------------------

    def turns(self, bucket: int) -> list[RoutingTurn]:
        """All turns of one bucket, in the order in which they were stored."""
        return self._whole(
            lambda: [
                turn
                for segment in self.state.segments()
                for batch in segments.read(self.path, segment, bucket)
                for turn in columns.decode(batch)
            ]
        )

    def table(self, bucket: int | None, names: Sequence[str]) -> Any:
        """Some columns of one bucket, or of all, as an Arrow table: for counting without turns."""
        schema = pa.schema([columns.SCHEMA.field(name) for name in names])

        def read() -> Any:
            batches = [
                batch.select(list(names))
                for segment in self.state.segments()
                for batch in segments.read(self.path, segment, bucket, names)
            ]
            return pa.Table.from_batches(batches, schema=schema)

        return self._whole(read)

    def _whole(self, read: Callable[[], T]) -> T:
        """A writer that forgets replaces segments: then look again what is there."""
        for last in range(_TRIES):
            try:
                return read()
            except FileNotFoundError as error:
                if last == _TRIES - 1:
                    raise DataError(
                        f"{error.filename or error} of log store {self.path} is missing; "
                        "was it deleted? Import again into a new store"
                    ) from error
        raise AssertionError("unreachable")

    @property
    def num_turns(self) -> int:
        return sum(segment.rows for segment in self.state.segments())

    @property
    def segments(self) -> list[Segment]:
        return self.state.segments()

    def files(self, source: str | None = None) -> list[FileState]:
        """Files and how far they were read."""
        return self.state.files(source)

    def evidence_for(self, refs: Iterable[str]) -> dict[str, list[Evidence]]:
        """Evidence by the source id or trace id that it speaks about."""
        return self.state.evidence(refs)

    def drops(self, reason: str | None = None) -> Iterator[Drop]:
        return self.state.drops(reason)

    def drop_counts(self) -> dict[str, dict[str, int]]:
        """Source -> reason -> rows."""
        return self.state.drop_counts()

    def digest(self) -> str:
        """64 hex digits for the turns and evidence, whatever the order they came in. Fast."""
        digest = hashlib.sha256(segments.add_totals([s.total for s in self.state.segments()]))
        for each in self.state.all_evidence():
            digest.update(each)
        return digest.hexdigest()

    def coverage(self) -> dict[str, Coverage]:
        """Source -> what it tells. Reads the whole store once, a bucket at a time."""
        found: dict[str, _Counts] = {}
        names = ("source", "session_id", "ts", "format", "messages", *LAYERS)
        for bucket in range(self.num_buckets):
            table = self.table(bucket, names)
            for source in pc.unique(table["source"]).to_pylist():
                part = table.filter(pc.equal(table["source"], source))
                found.setdefault(source, _Counts()).add(part)
        evidence = self.state.count_evidence()
        return {
            source: counts.finish(evidence.get(source, 0))
            for source, counts in sorted(found.items())
        }


class _Counts:
    def __init__(self) -> None:
        self.turns = self.sessions = self.messages = 0
        self.layers: Counter[str] = Counter({layer: 0 for layer in LAYERS})
        self.tiers: dict[str, Counter[int]] = {layer: Counter() for layer in LAYERS[:3]}
        self.models: Counter[str] = Counter()
        self.formats: Counter[str] = Counter()
        self.times: list[int] = []

    def add(self, table: Any) -> None:
        self.turns += table.num_rows
        self.sessions += pc.count_distinct(table["session_id"]).as_py()
        self.messages += table.num_rows - table["messages"].null_count
        for layer in LAYERS:
            self.layers[layer] += table.num_rows - table[layer].null_count
        for layer, tiers in self.tiers.items():
            tiers.update(_tally(pc.struct_field(table[layer], "tier")))
        self.models.update(_tally(pc.struct_field(table["served"], "model")))
        self.formats.update(_tally(table["format"]))
        ends = pc.min_max(table["ts"]).as_py()
        self.times += [time for time in ends.values() if time is not None]
        self.times = [min(self.times), max(self.times)] if self.times else []

    def finish(self, evidence: int) -> Coverage:
        return Coverage(
            turns=self.turns,
            sessions=self.sessions,
            messages=self.messages,
            layers=dict(self.layers),
            first=self.times[0] if self.times else None,
            last=self.times[-1] if self.times else None,
            tiers={layer: dict(sorted(tiers.items())) for layer, tiers in self.tiers.items()},
            models=dict(self.models.most_common()),
            formats=dict(self.formats.most_common()),
            evidence=evidence,
        )


def _tally(column: Any) -> dict[Any, int]:
    counts = pc.value_counts(column).to_pylist()
    return {each["values"]: each["counts"] for each in counts if each["values"] is not None}


def _require_free(path: Path) -> None:
    """ConfigError for a folder with files of somebody else."""
    own = {META, STATE, f"{STATE}-journal", segments.FOLDER}  # perhaps of one being made right now
    if path.exists() and any(
        not p.name.startswith(".") and p.name not in own for p in path.iterdir()
    ):
        raise ConfigError(f"{path} is not empty and no log store; name another folder")


def _create(path: Path) -> None:
    """The key and the conversations are for their owner's eyes only. The small file comes last:
    with it the folder is a store. Of two that make it at once the first one wins: rows are told
    apart under its key."""
    with clear_disk_errors(path):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (path / f".{META}.guard").open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)  # released when the process ends, however it does
            if (path / META).is_file():
                return
            State(path, create=True).close()
            meta = {"format": FORMAT, "buckets": NUM_BUCKETS, "salt": secrets.token_hex(32)}
            partial = path / f".{META}{TEMPORARY}{os.getpid()}"
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(json.dumps(meta, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path / META)
