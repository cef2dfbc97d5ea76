"""Recorded conversations as tasks: what `distill curriculum build` made of routing logs.

    [stage.data]
    name = "routing"
    path = "stage:curriculum"          # or a folder
    use = "turns"                      # or "contexts"
    order = "staged"                   # or "shuffled", "reverse"

With `turns` a task is a user turn with the answers that were given, for a stage of kind `sft`.
With `contexts` a task is a state right before an answer of the assistant, which the student gives
itself, in a stage of kind `on_policy`. Source of both: NeoHorse-1, arXiv 2609.08183.

All tasks are of the split `train`, in the order of the curriculum; the domain is the scene. They
are read from disk when they are asked for. One reply ends an episode; it is graded where the log
knew what is right, else it has no reward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from distill.curriculum.examples import Example, ExampleReader, Place, file_name, read_plan
from distill.errors import ConfigError, DataError
from distill.messages import message_from, messages_from
from distill.rundir import digest_file
from distill.types import SPLITS, Message, Split, Task, task_id
from evals.envs import world
from evals.envs.base import Grader, LazyTasks, SingleTurn
from evals.graders import GRADERS, build_grader


@dataclass(frozen=True, kw_only=True)
class Routing:
    """A built curriculum. Nothing is read before the first task is asked for."""

    name: ClassVar[str] = "routing"

    path: str
    """The folder that holds `plan.arrow` and `examples`."""
    use: Literal["turns", "contexts"] = "turns"
    """Turns with the recorded answers, or the states before each of those answers."""
    order: Literal["staged", "shuffled", "reverse"] = "staged"
    """As planned, easy stages first; all tasks mixed; or the last stage first, each in its own
    order. The other two are controls of what the order is worth."""
    scenes: tuple[str, ...] = ()
    """Only turns of these scenes; empty takes all."""
    seed: int = 0
    """Fixes the order `shuffled`."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The recorded tasks for `train`; nothing for other splits. DataError for a folder that no
        curriculum was built in, and when no example is left for this use."""
        if split not in SPLITS:
            raise DataError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
        return self._tasks if split == "train" else ()

    def start(self, task: Task) -> SingleTurn:
        """A fresh attempt at one reply."""
        return SingleTurn(task, _grader(task))

    @property
    def domains(self) -> tuple[str, ...]:
        """The scenes that have tasks."""
        names = self._plan["scene"].take(np.unique(self._tasks.rows)).unique()
        return tuple(sorted(names.to_pylist()))

    @property
    def digest(self) -> str:
        """Digest of all files of the curriculum: what its tasks depend on besides the options."""
        folder = Path(self.path).expanduser()
        numbers = sorted(set(self._plan["file"].to_pylist()))
        files = [folder / "plan.arrow", *(folder / "examples" / file_name(n) for n in numbers)]
        return hashlib.sha256("\n".join(map(digest_file, files)).encode()).hexdigest()

    @cached_property
    def _plan(self) -> Any:
        return read_plan(Path(self.path).expanduser())

    @cached_property
    def _tasks(self) -> RecordedTasks:
        column = {"turns": "use_sft", "contexts": "use_opd"}[self.use]
        chosen = self._plan[column].to_numpy() & self._of_scenes()
        spans = self._plan["num_spans"].to_numpy().astype(np.int64)
        rows = np.flatnonzero(chosen & (spans > 0))
        counts = spans[rows] if self.use == "contexts" else np.ones(len(rows), np.int64)
        if not counts.sum():
            raise DataError(self._nothing(column))
        starts = np.repeat(counts.cumsum() - counts, counts)
        rows, numbers = np.repeat(rows, counts), np.arange(counts.sum()) - starts
        ordered = self._ordered(self._plan["stage"].to_numpy()[rows])
        rows, numbers = rows[ordered], numbers[ordered]
        return RecordedTasks(self, self._plan, rows, numbers)

    def _ordered(self, stages: np.ndarray) -> np.ndarray:
        """Positions in the order in which the tasks are met."""
        if self.order == "shuffled":
            key = hashlib.sha256(f"routing/{self.seed}/{self.use}".encode()).digest()
            generator = np.random.Generator(np.random.Philox(int.from_bytes(key[:16], "big")))
            return generator.permutation(len(stages))
        if self.order == "reverse":
            return np.argsort(-stages.astype(np.int64), kind="stable")
        return np.arange(len(stages))

    def _of_scenes(self) -> np.ndarray:
        if not self.scenes:
            return np.ones(self._plan.num_rows, dtype=bool)
        known = self._plan["scene"].to_pylist()
        unknown = sorted(set(self.scenes) - set(known))
        if unknown:
            raise ConfigError(
                f"data.scenes: {self.path} has no scene {unknown[0]!r}; its scenes are: "
                f"{', '.join(sorted(set(known)))}"
            )
        return np.isin(np.array(known, dtype=object), self.scenes)

    def _nothing(self, column: str) -> str:
        usable = self._plan[column].to_numpy()
        where = f" of the scenes {', '.join(self.scenes)}" if self.scenes else ""
        return (
            f"{self.path}: none of {self._plan.num_rows} examples{where} can be used as "
            f"{self.use} ({int(usable.sum())} of all scenes can); read the curriculum's page for "
            "why turns were left out, or import more logs"
        )


class RecordedTasks(LazyTasks):
    """Tasks of a curriculum, read when they are asked for.

    `rows` are the rows of the plan that the tasks come from, and `stages` their stages of the
    curriculum, or 0 for all where the order leaves none: both are known without reading an example.
    """

    def __init__(self, env: Routing, plan: Any, rows: np.ndarray, numbers: np.ndarray) -> None:
        super().__init__(len(rows), self._task)
        self.rows, self._numbers = rows, numbers
        stages = plan["stage"].to_numpy()[rows]
        self.stages = np.zeros_like(stages) if env.order == "shuffled" else stages
        self._env, self._plan = env, plan.combine_chunks()
        self._read = ExampleReader(Path(env.path).expanduser())

    def _task(self, index: int) -> Task:
        row = int(self.rows[index])
        planned = {name: self._plan[name][row].as_py() for name in _PLANNED}
        example = self._read(Place(planned["file"], planned["row"]))
        where = f"{self._env.path}: example {planned['id']}"
        if example.id != planned["id"]:
            raise DataError(
                f"{where} is planned, but {example.id} lies in its place; the files of the folder "
                "do not belong together, so build the curriculum again"
            )
        try:
            prompt = messages_from(example.prompt, example.tools)
            turn = tuple(map(message_from, example.turn))
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        replies = [i for i, message in enumerate(turn) if message.role == "assistant"]
        if not prompt or len(replies) != planned["num_spans"]:
            raise DataError(
                f"{where}: expected a prompt and {planned['num_spans']} answers, found "
                f"{len(prompt)} messages and {len(replies)}; build the curriculum again"
            )
        meta = {"turn_id": example.id, "stage": int(self.stages[index]), "score": planned["score"]}
        if self._env.use == "turns":
            return self._made(example, prompt, meta | {"turn": turn}, is_last=True)
        number = int(self._numbers[index])
        prompt, meta["span"] = (*prompt, *turn[: replies[number]]), number
        return self._made(example, prompt, meta, is_last=number == len(replies) - 1)

    def _made(
        self,
        example: Example,
        prompt: tuple[Message, ...],
        meta: dict[str, Any],
        *,
        is_last: bool,
    ) -> Task:
        # What is right is known of the turn's result alone, not of the calls on the way.
        if example.grader is not None and example.answer is not None and is_last:
            meta["grader"] = example.grader
        return Task(
            id=task_id(Routing.name, prompt),
            env=Routing.name,
            domain=example.scene,
            split="train",
            prompt=prompt,
            answer=example.answer if is_last else None,
            meta=meta,
        )


_PLANNED = ("id", "score", "file", "row", "num_spans")


def _grader(task: Task) -> Grader | None:
    """Who judges a reply. Only graders of this package: their names come from data."""
    name = task.meta.get("grader")
    if name is None:
        return None
    if name == world.World.name:
        return world.grade
    if name not in GRADERS:
        raise DataError(
            f"recorded turn {task.meta.get('turn_id')} names the grader {name!r}; expected one of "
            f"{', '.join([*GRADERS, world.World.name])}"
        )
    return build_grader(name)
