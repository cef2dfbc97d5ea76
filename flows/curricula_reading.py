"""Reading a built curriculum: which one is meant, one turn of it, the first examples of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import ConfigError, DataError

if TYPE_CHECKING:
    from distill.curriculum.examples import Example
    from distill.curriculum.turns import UserTurn

PLAN = "plan.arrow"
FINAL = "final"
STORE = "store"
META = "store.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """An example as the student meets it."""

    stage: int
    position: int
    score: float
    use_sft: bool
    use_opd: bool
    example: Example


def find_curriculum(home: Path, where: str = "") -> Path:
    """Folder of a curriculum: a folder, a name under `curricula/`, a run; the newest without a
    name. ConfigError when there is none, or a run has several."""
    if not where:
        found = [*home.glob(f"curricula/*/{PLAN}"), *home.glob(f"runs/*/stages/*/{FINAL}/{PLAN}")]
        if not found:
            raise ConfigError(
                f"no curriculum in {home.resolve()}; build one: distill curriculum build --store "
                "NAME"
            )
        return max(found, key=lambda path: (path.stat().st_mtime_ns, str(path))).parent
    for folder in (Path(where), home / "curricula" / where):
        if (folder / PLAN).is_file():
            return folder
    for run in (home / "runs" / where, Path(where)):
        inside = sorted(path.parent for path in run.glob(f"stages/*/{FINAL}/{PLAN}"))
        if len(inside) > 1:
            listed = ", ".join(str(path) for path in inside)
            raise ConfigError(f"run {where} has several curricula; name one: --in {listed}")
        if inside:
            return inside[0]
    raise ConfigError(
        f"{where!r} is no folder of a curriculum and no run with one; those of this home lie in "
        f"{home / 'curricula'} and {home / 'runs'}"
    )


def row_of(folder: Path, turn: str) -> dict[str, Any]:
    """What is known about a turn, whether it is an example or not; the beginning of its id is
    enough. ConfigError for none or several."""
    import pyarrow as pa

    path = folder / "turns.arrow"
    if not path.is_file():
        raise DataError(f"{path} does not exist; build the curriculum again")
    hits: list[dict[str, Any]] = []
    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_file(source) as reader:
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            names = batch.column("id").to_pylist()
            places = [i for i, name in enumerate(names) if name.startswith(turn)]
            hits += [batch.slice(i, 1).to_pylist()[0] for i in places]
    if len(hits) == 1:
        return hits[0]
    if not hits:
        raise ConfigError(
            f"no turn of {folder} begins with {turn!r}; ids are 16 hex digits, as in: distill logs "
            "inspect"
        )
    listed = ", ".join(hit["id"] for hit in hits[:5])
    raise ConfigError(f"{turn!r} stands for {len(hits)} turns: {listed}; write more of it")


def example_of(folder: Path, turn: str) -> Shown | None:
    """A turn as an example; None where it is none."""
    from distill.curriculum.examples import read_plan

    plan = read_plan(folder)
    names = plan["id"].to_pylist()
    return _shown(folder, plan, names.index(turn)) if turn in names else None


def first_examples(folder: Path, count: int, stage: int | None = None) -> Iterator[Shown]:
    """The first examples of each stage, or of one, in training order. ConfigError for a stage that
    the curriculum does not have."""
    import numpy as np

    from distill.curriculum.examples import read_plan

    plan = read_plan(folder)
    stages = plan["stage"].to_numpy()
    known = np.unique(stages).tolist()
    if stage is not None and stage not in known:
        listed = ", ".join(map(str, known)) or "none"
        raise ConfigError(f"--stage {stage}: {folder} has the stages {listed}")
    for number in known if stage is None else [stage]:
        for row in np.flatnonzero(stages == number)[:count].tolist():
            yield _shown(folder, plan, row)


def _shown(folder: Path, plan: Any, row: int) -> Shown:
    from distill.curriculum.examples import ExampleReader, Place

    planned = {name: plan[name][row].as_py() for name in plan.column_names}
    return Shown(
        stage=planned["stage"],
        position=planned["position"],
        score=planned["score"],
        use_sft=planned["use_sft"],
        use_opd=planned["use_opd"],
        example=ExampleReader(folder)(Place(planned["file"], planned["row"])),
    )


def recorded(home: Path, folder: Path, row: Mapping[str, Any]) -> UserTurn | None:
    """The calls of a turn, out of whichever log store of a home still has them."""
    from distill.curriculum.store import LogStore
    from distill.curriculum.turns import split, turn_id

    own = folder.parent / STORE
    paths = [path.parent for path in sorted(home.glob(f"logs/*/{META}"))]
    for path in [*([own] if (own / META).is_file() else []), *paths]:
        with LogStore.open(path) as store:
            if row["bucket"] >= store.num_buckets:
                continue
            calls = store.turns(row["bucket"])
        hits = [call for call in calls if turn_id(call) == row["id"]]
        if not hits:
            continue
        first = hits[0]
        inside = [call for call in calls if call.session_id == first.session_id]
        family = inside if first.session_id is not None else [first]
        return next((turn for turn in split(family) if turn.id == row["id"]), None)
    return None


def messages_of(shown: Shown) -> list[tuple[Mapping[str, Any], str]]:
    """The conversation as the student meets it, each message with what becomes of it."""
    uses = (["learnt word for word"] if shown.use_sft else []) + (
        ["answered by the student"] if shown.use_opd else []
    )
    told = [(message, "") for message in shown.example.prompt]
    for message in shown.example.turn:
        is_answer = message.get("role") == "assistant"
        told.append((message, ", ".join(uses) if is_answer else ""))
    return told
