"""Where the numbers of a run go: a file, Weights & Biases, several places, or nowhere.

A tracker never stops a night. What goes wrong while it records is logged once and then counted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from distill.errors import MissingExtra
from distill.protocols import Tracker
from distill.rundir import append_jsonl, to_json

logger = logging.getLogger(__name__)


class _Guarded:
    """Catches what a tracker's own code raises: warns the first time, counts the rest."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_failures = 0

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.num_failures += 1
            if self.num_failures == 1:
                logger.warning("%s: numbers are being lost: %s", self.name, error)


class NullTracker:
    """Drops everything."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        return None

    def close(self) -> None:
        return None


class JsonlTracker:
    """Appends one row per step to a JSONL file: `stage`, `step`, then the metrics.

    Numbers that JSON cannot hold (NaN, infinities) are written as null. After a resume the rows of
    repeated steps appear twice; the last one counts.
    """

    def __init__(self, path: Path, *, stage: str = "") -> None:
        self.path = path
        self.stage = stage
        self._guarded = _Guarded(f"metrics file {path}")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self._guarded.guard():
            row: dict[str, Any] = {"stage": self.stage, "step": step}
            for name, value in metrics.items():
                number = float(value)
                whole = isinstance(value, int)
                row[name] = (value if whole else number) if math.isfinite(number) else None
            append_jsonl(self.path, [row])

    def close(self) -> None:
        return None


class WandbTracker:
    """Sends numbers to Weights & Biases; `offline` writes them below `folder` without a network.

    One W&B run per stage of a night: `run` is its group and `stage` its name.
    """

    def __init__(
        self,
        *,
        project: str,
        run: str,
        stage: str,
        folder: Path,
        config: Mapping[str, Any],
        mode: Literal["offline", "online"] = "offline",
    ) -> None:
        self._guarded = _Guarded("wandb")
        self._run: Any = None
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra(
                "tracking.wandb needs the package 'wandb', which is not installed; "
                "try: pip install wandb, or set tracking.wandb=off"
            ) from error
        with self._guarded.guard():
            folder.mkdir(parents=True, exist_ok=True)
            settings = wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
            )
            self._run = wandb.init(
                project=project,
                group=run,
                name=f"{run}/{stage}",
                dir=os.fspath(folder),
                config=to_json(config),
                mode=mode,
                settings=settings,
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._run is not None:
            with self._guarded.guard():
                self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            with self._guarded.guard():
                self._run.finish()
            self._run = None


class FanOut:
    """Hands every number to several trackers; one that fails does not keep it from the others."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)
        self._guarded = _Guarded("tracker")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._each(lambda tracker: tracker.log(metrics, step))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            with self._guarded.guard():
                call(tracker)
