"""A few numbers per turn in memory, and one light row per turn on disk.

The numbers are what the boundary table and the stages need of all turns at once; the rows are what
a person asks about a single turn.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distill.curriculum.demand import Demand
from distill.curriculum.drops import REASONS
from distill.curriculum.examples import Place
from distill.curriculum.outcomes import Rung
from distill.curriculum.profile import DIMENSIONS
from distill.curriculum.walk import Found
from distill.rundir import clear_disk_errors

RESULTS = ("failure", "success", "unknown")
RUNGS: tuple[Rung, ...] = ("program", "rating", "tool", "next_turn", "system", "judge", "none")
GRADES = ("PASS", "WARN", "FAIL", "NOT_EVALUATED")
USABLE = -1
"""Stands for no reason: the turn is an example."""
WHY = tuple(REASONS)
ROWS = "turns.partial"
FORMAT = "distill-turns-1"

TURNS = pa.schema(
    [
        ("id", pa.string()),
        ("bucket", pa.int16()),
        ("session_id", pa.string()),
        ("source", pa.string()),
        ("ts", pa.int64()),
        ("scene", pa.string()),
        ("scene_by", pa.string()),
        ("band", pa.int8()),
        ("score", pa.float32()),
        ("probs", pa.list_(pa.float32())),
        ("demand_by", pa.string()),
        ("predicted", pa.int8()),
        ("decided", pa.int8()),
        ("served", pa.int8()),
        ("result", pa.string()),
        ("rung", pa.string()),
        ("evidence", pa.string()),
        ("verifiable", pa.bool_()),
        ("profile", pa.list_(pa.string())),
        ("label", pa.int8()),
        ("label_reason", pa.string()),
    ],
    metadata={"format": FORMAT},
)
"""What is known about a turn after the walk; the columns of AFTER follow once all are known."""
AFTER = (
    pa.field("reason", pa.string()),
    pa.field("under", pa.bool_()),
    pa.field("over", pa.bool_()),
    pa.field("stage", pa.int8()),
    pa.field("position", pa.int64()),
)

_KINDS: dict[str, Any] = {
    "id": np.uint64,
    "scene": np.int32,
    "band": np.int8,
    "score": np.float32,
    "tier": np.int8,
    "outcome": np.int8,
    "rung": np.int8,
    "verified": np.bool_,
    "cached": np.bool_,
    "propensity": np.float32,
    "weight": np.float32,
    "predicted": np.float32,
    "rescued": np.int8,
    "reason": np.int8,
    "sft": np.bool_,
    "opd": np.bool_,
    "spans": np.int16,
    "content": np.uint64,
    "ts": np.int64,
    "file": np.int16,
    "row": np.int32,
}


@dataclass(kw_only=True, slots=True)
class Table:
    """N turns in the order of the walk; see `_KINDS` for the columns [N]."""

    columns: dict[str, NDArray[Any]]
    scenes: list[str]
    profile: NDArray[np.int64]  # [6, 4] turns by dimension and grade

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.columns["id"])


@dataclass(kw_only=True, slots=True)
class Light:
    """The numbers of a bucket, or of several one after the other."""

    _parts: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    _scenes: dict[str, int] = field(default_factory=dict)
    _profile: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros((len(DIMENSIONS), len(GRADES)), dtype=np.int64)
    )

    def add(self, found: Sequence[Found], given: Sequence[Demand], places: Sequence[Place]) -> None:
        """`places` are those of the turns without a reason, in order."""
        at = iter(places)
        rows = [
            self._row(f, d, next(at) if f.reason is None else Place(-1, -1))
            for f, d in zip(found, given, strict=True)
        ]
        self._parts.append(
            {
                name: np.array([row[i] for row in rows], dtype=kind)
                for i, (name, kind) in enumerate(_KINDS.items())
            }
        )
        for one in found:
            for i, name in enumerate(DIMENSIONS):
                self._profile[i, GRADES.index(one.profile[name].grade)] += 1

    def extend(self, other: Light) -> None:
        """What another one collected comes after what this one has."""
        numbers = [self._scenes.setdefault(name, len(self._scenes)) for name in other._scenes]
        renamed = np.array(numbers, dtype=np.int32)
        for part in other._parts:
            part["scene"] = renamed[part["scene"]] if len(part["scene"]) else part["scene"]
            self._parts.append(part)
        self._profile += other._profile

    def _row(self, f: Found, demand: Demand, place: Place) -> tuple[Any, ...]:
        turn, scene = f.turn, f.scene.name
        return (
            int(turn.id, 16),
            self._scenes.setdefault(scene, len(self._scenes)),
            demand.hard,
            demand.score,
            _tier(turn.served),
            {"success": 1, "failure": 0}.get(f.judged.result, -1),
            RUNGS.index(f.judged.rung),
            f.judged.verifiable,
            turn.cached,
            _propensity(f),
            turn.weight,
            _expected(f),
            f.rescued,
            USABLE if f.reason is None else WHY.index(f.reason),
            f.sft,
            f.opd,
            sum(m.get("role") == "assistant" for m in f.response),
            f.content,
            -1 if turn.ts is None else turn.ts,
            place.file,
            place.row,
        )

    def table(self) -> Table:
        """All turns so far; what was collected is given away."""
        parts, self._parts = self._parts, []
        columns = {
            name: np.concatenate([np.zeros(0, kind), *(part.pop(name) for part in parts)])
            for name, kind in _KINDS.items()
        }
        return Table(columns=columns, scenes=list(self._scenes), profile=self._profile)


def _tier(layer: Any) -> int:
    return -1 if layer is None or layer.tier is None else int(layer.tier)


def _propensity(f: Found) -> float:
    """Chance of the tier that answered; nan where policy and service differ."""
    turn = f.turn
    if turn.decision is None or turn.decision.propensity is None:
        return float("nan")
    decided, served = _tier(turn.decision), _tier(turn.served)
    as_decided = decided == served or (decided < 0 and not turn.fallback_hops)
    return turn.decision.propensity if as_decided else float("nan")


def _expected(f: Found) -> float:
    """The router's own expected tier, or nan."""
    prediction = f.turn.prediction
    if prediction is None:
        return float("nan")
    if prediction.probs is not None:
        return sum(tier * p for tier, p in enumerate(prediction.probs))
    return float("nan") if prediction.tier is None else float(prediction.tier)


class RowWriter:
    """Writes the light rows of a bucket, part by part, for `finish_rows`. A context manager."""

    def __init__(self, folder: Path, bucket: int) -> None:
        self._bucket = bucket
        self._path = _partial(folder, bucket)
        with clear_disk_errors(self._path):
            self._path.parent.mkdir(exist_ok=True)
            options = _packed("lz4", use_threads=False)  # other buckets have the processors
            self._out = pa.ipc.new_file(str(self._path), TURNS, options=options)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with clear_disk_errors(self._path):
            self._out.close()

    def add(self, found: Sequence[Found], given: Sequence[Demand]) -> None:
        rows = [_light(self._bucket, f, d) for f, d in zip(found, given, strict=True)]
        cells = zip(*rows, strict=True) if rows else [()] * len(TURNS)
        arrays = [
            pa.array(list(values), type=kind)
            for values, kind in zip(cells, TURNS.types, strict=True)
        ]
        with clear_disk_errors(self._path):
            self._out.write_batch(pa.RecordBatch.from_arrays(arrays, schema=TURNS))


def _partial(folder: Path, bucket: int) -> Path:
    return folder / ROWS / f"{bucket:03d}.arrow"


def _packed(method: str = "zstd", *, use_threads: bool = True) -> Any:
    return pa.ipc.IpcWriteOptions(compression=method, use_threads=use_threads)


def _light(bucket: int, f: Found, demand: Demand) -> tuple[Any, ...]:
    turn, scene = f.turn, f.scene
    return (
        turn.id,
        bucket,
        turn.session_id,
        turn.source,
        turn.ts,
        scene.name,
        scene.method,
        demand.hard,
        demand.score,
        demand.probs,
        demand.method,
        None if turn.prediction is None else turn.prediction.tier,
        None if turn.decision is None else turn.decision.tier,
        None if turn.served is None else turn.served.tier,
        f.judged.result,
        f.judged.rung,
        f.judged.evidence,
        f.judged.verifiable,
        [f.profile[name].grade for name in DIMENSIONS],
        f.aligned.label,
        f.aligned.reason,
    )


def finish_rows(folder: Path, num_buckets: int, after: dict[str, NDArray[Any]]) -> None:
    """Join the light rows with what is known in the end, as `turns.arrow`.

    `after` has the columns of AFTER [N] in the order of the walk: reasons as numbers of WHY or
    USABLE, stage and position -1 where there is none.
    """
    path = folder / "turns.arrow"
    schema = pa.schema([*TURNS, *AFTER], metadata=TURNS.metadata)
    first = 0
    with clear_disk_errors(path), pa.ipc.new_file(str(path), schema, options=_packed()) as out:
        for bucket in range(num_buckets):
            with pa.memory_map(str(_partial(folder, bucket))) as source:
                reader = pa.ipc.open_file(source)
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    part = slice(first, first + batch.num_rows)
                    more = [_column(name, after[name.name][part]) for name in AFTER]
                    columns = [*batch.columns, *more]
                    out.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
                    first = part.stop
    shutil.rmtree(folder / ROWS)


def _column(kind: Any, values: NDArray[Any]) -> Any:
    if kind.name == "reason":
        return pa.array(WHY, pa.string()).take(pa.array(values, mask=values == USABLE))
    if kind.name in ("stage", "position"):
        return pa.array(values, type=kind.type, mask=values < 0)
    return pa.array(values, type=kind.type)


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of `turns.arrow`, a batch in memory at a time."""
    with pa.memory_map(str(folder / "turns.arrow")) as source:
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            yield from reader.get_batch(number).to_pylist()
