"""A night in several processes: `torchrun --nproc-per-node N -m flows nightly FILE`.

The first process runs the night. The others take part in the training of each stage, in which they
hold their part of the weights, and wait in between.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from distill.errors import ConfigError, DistillError
from flows.progress import NoProgress

if TYPE_CHECKING:
    from distill.checkpoint import Keeper
    from distill.config import Stage
    from distill.following import Leader
    from distill.parts import Parts
    from distill.trainer import Trainer
    from flows.night import Night, Student


def num_processes() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_follower() -> bool:
    """Whether this is one of the processes that only take part in training."""
    return num_processes() > 1 and os.environ.get("RANK") != "0"


@contextmanager
def leading() -> Iterator[None]:
    """Around the work of the first process. Where it fails, torchrun ends the others."""
    if num_processes() == 1:
        yield
        return
    from distill import parallel

    group = parallel.init_from_env()
    yield
    group.share(None)
    parallel.destroy()


def follow() -> None:
    """What the other processes do: train whatever stage the first one trains, until it is done.

    DistillError when the first process ended before that.
    """
    try:
        _follow()
    except RuntimeError as error:
        if "by peer" not in str(error):  # how gloo and nccl name a connection that is gone
            raise
        raise DistillError(
            "another training process ended, and so does this one; the message of that process "
            "says why, and --resume goes on from the last checkpoint"
        ) from error


def _follow() -> None:
    from distill import parallel
    from distill.rundir import RunDir
    from flows.night import Night, set_threads

    group = parallel.init_from_env()
    while (asked := group.share()) is not None:
        os.chdir(asked["cwd"])  # relative paths mean the same everywhere
        run = RunDir(path=Path(asked["run"]))
        night = Night(config=run.read_config(), run=run, progress=NoProgress())
        set_threads(night)
        _follow_stage(night, night.config.stage(asked["stage"]))
    parallel.destroy()


def announce(night: Night, stage: Stage) -> None:
    """Tell the others that the training of a stage begins."""
    from distill import parallel

    cwd, run = str(Path.cwd()), str(night.run.path.absolute())
    parallel.current().share({"run": run, "stage": stage.name, "cwd": cwd})


def open_line(student: Student, trainer: Trainer, keeper: Keeper) -> Leader | None:
    """From now on the others make the calls that need every process; None without others."""
    from distill.following import Leader

    policy = student.policy
    if policy.group.is_alone:
        return None
    known = {"policy": policy, "trainer": trainer, "keeper": keeper}
    policy.line = line = Leader(policy.group, known, policy.device)
    return line


def close_line(line: Leader | None) -> None:
    """Let the others wait for the next stage."""
    if line is not None:
        line.end()


def require_in_step(line: Leader | None, parts: Parts) -> None:
    """Make the objective known to the others, who have their own. ConfigError for parts that call
    the student from a second thread."""
    if line is None:
        return
    line.know("objective", parts.objective)
    if parts.ahead is not None:
        raise ConfigError(
            "rollouts that run while a step trains need the student for themselves, which "
            "several processes share; set sampling.overlap = false or use one process"
        )


def _follow_stage(night: Night, stage: Stage) -> None:
    from distill.following import follow as follow_calls
    from flows import wiring
    from flows.training import begin_stage

    student, trainer, keeper = begin_stage(night, stage)
    policy = student.policy
    known = {"policy": policy, "trainer": trainer, "keeper": keeper}
    objective = wiring.build_objective(night.config.for_stage(stage))
    follow_calls(policy.group, {**known, "objective": objective}, policy.device)
