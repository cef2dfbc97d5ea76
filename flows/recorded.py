"""Recorded turns as the tasks of a stage: undamaged, some left out that do not fit, or none at all.

A night's own curriculum was built for its students, so that normally everything fits. A folder that
was built elsewhere may hold turns that are too long for this student, or that its template cannot
write: these are left out and counted, never cut.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from distill.checkpoint import verify_manifest
from distill.config import STAGE_PREFIX, Config, Stage
from distill.curriculum.examples import read_plan
from distill.errors import CheckpointError, DataError
from distill.rundir import read_json, write_json
from distill.tokens import Chat
from distill.types import Task
from distill.worked import demonstrate
from evals.envs.base import LazyTasks
from flows import compatibility
from flows.night import Night

logger = logging.getLogger(__name__)

CHECKED_TASKS = 20_000
"""Up to this many tasks are measured before the first step; of more, those of each step."""
LEFT_OUT = "left_out.json"
"""Beside a stage's checkpoints: which of its recorded tasks this student cannot read."""
TOO_LONG, UNWRITABLE = "turns/too_long", "turns/unwritable"

Told = Callable[[int], Mapping[str, float]]


class Kept(LazyTasks):
    """The tasks of a list at some positions, in the same order and with the same stages."""

    def __init__(self, tasks: Sequence[Task], positions: np.ndarray) -> None:
        super().__init__(len(positions), lambda index: tasks[int(positions[index])])
        self.left_out = len(tasks) - len(positions)
        stages = getattr(tasks, "stages", None)
        self.stages = None if stages is None else np.asarray(stages)[positions]


def is_recorded(config: Config) -> bool:
    return config.data.name == compatibility.RECORDED


def require_undamaged(night: Night, config: Config) -> None:
    """DataError unless the files of a curriculum are those that were built, where it says so."""
    if not is_recorded(config):
        return
    folder = _folder(night, config)
    if not (folder / "manifest.json").exists():
        return
    try:
        verify_manifest(folder)
    except CheckpointError as error:
        raise DataError(
            f"the curriculum in {folder} is not what was built: {error}; build it again"
        ) from error


def _folder(night: Night, config: Config) -> Path:
    path = str(config.data.options.get("path", ""))
    return night.locate(path) if path.startswith(STAGE_PREFIX) else Path(path).expanduser()


# -- what a student can read ----------------------------------------------------------------------


def readable(
    tasks: Sequence[Task], chat: Chat, *, worked: bool, left_out: Counter[str]
) -> Iterator[int]:
    """Positions of the tasks whose prompt fits, or with `worked` whose whole recorded turn does.
    The others are counted in `left_out`."""
    for position, task in enumerate(tasks):
        if worked and "turn" in task.meta:
            if demonstrate([task], chat, key="", left_out=left_out):
                yield position
            continue
        try:
            fits = chat.fits(task.prompt)
        except DataError:
            left_out[UNWRITABLE] += 1
            continue
        if fits:
            yield position
        else:
            left_out[TOO_LONG] += 1


def fitting_tasks(night: Night, stage: Stage, tasks: Sequence[Task], chat: Chat) -> Sequence[Task]:
    """The recorded tasks that the student of a stage can read, as `known_tasks` will tell again.

    A list of more than CHECKED_TASKS stays whole. DataError when none is left.
    """
    if len(tasks) > CHECKED_TASKS:
        return tasks
    left_out: Counter[str] = Counter()
    found = readable(tasks, chat, worked=stage.kind == "sft", left_out=left_out)
    positions = np.fromiter(found, dtype=np.int64)
    if len(positions) == len(tasks):
        return tasks
    told = words(left_out)
    if not len(positions):
        raise DataError(
            f"stage {stage.name}: none of {len(tasks)} recorded turns can be read by this student "
            f"({told}); raise model.max_length, or build the curriculum in the night"
        )
    record = {"of": len(tasks), "kept": positions.tolist(), "left_out": dict(left_out)}
    write_json(night.run.stage_dir(stage.name) / LEFT_OUT, record)
    logger.warning(
        "stage %s: %d of %d recorded turns are left out (%s); raise model.max_length to learn from "
        "them",
        *(stage.name, len(tasks) - len(positions), len(tasks), told),
    )
    return Kept(tasks, positions)


def known_tasks(night: Night, stage: Stage, tasks: Sequence[Task]) -> Sequence[Task]:
    """The tasks of a stage that began: without those that were left out then."""
    path = night.run.stage_dir(stage.name) / LEFT_OUT
    if not path.exists():
        return tasks
    record = read_json(path)
    if record["of"] != len(tasks):
        raise DataError(
            f"{path} tells of {record['of']} recorded turns, but there are {len(tasks)} now; "
            "restore the curriculum, or start a new run"
        )
    return Kept(tasks, np.array(record["kept"], dtype=np.int64))


def counted(told: Told | None, tasks: Sequence[Task]) -> Told | None:
    """The numbers of a step, and how many recorded turns the stage leaves out."""
    if not isinstance(tasks, Kept):
        return told
    number = float(tasks.left_out)
    return lambda step: {**(told(step) if told else {}), "turns/left_out": number}


def words(left_out: Counter[str]) -> str:
    """Counts by reason, for a sentence."""
    return ", ".join(
        f"{number} {name.removeprefix('turns/').replace('_', ' ')}"
        for name, number in sorted(left_out.items())
    )


# -- nothing to learn -----------------------------------------------------------------------------


def is_empty(night: Night, config: Config) -> bool:
    """Whether a curriculum of this run holds nothing for the use that a stage makes of it."""
    path = str(config.data.options.get("path", ""))
    if not (is_recorded(config) and path.startswith(STAGE_PREFIX)):
        return False
    plan = read_plan(_folder(night, config))
    column = "use_opd" if compatibility.uses_contexts(config) else "use_sft"
    usable = plan[column].to_numpy() & (plan["num_spans"].to_numpy() > 0)
    scenes = config.data.options.get("scenes")
    if scenes:
        usable = usable & np.isin(np.array(plan["scene"].to_pylist(), dtype=object), list(scenes))
    return not bool(usable.any())
