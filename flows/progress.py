"""What a person sees while a night runs: bars in a terminal, plain lines elsewhere, on stderr."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

logger = logging.getLogger(__name__)

SHOWN = ("reward/mean", "kl/mean", "loss")
"""Metrics worth a place in the line, in this order; the others are in the metrics file."""
SECONDS_PER_LINE = 10.0


class Progress(Protocol):
    """Stages report to it. No call may change what a night computes."""

    def stage_started(self, name: str, num_steps: int, unit: str = "step") -> None: ...

    def step(self, name: str, step: int, metrics: Mapping[str, float]) -> None: ...

    def stage_done(self, name: str, seconds: float, note: str = "") -> None: ...

    def message(self, text: str) -> None: ...


class NoProgress:
    """For the library and for tests: says nothing."""

    def stage_started(self, name: str, num_steps: int, unit: str = "step") -> None:
        return None

    def step(self, name: str, step: int, metrics: Mapping[str, float]) -> None:
        return None

    def stage_done(self, name: str, seconds: float, note: str = "") -> None:
        return None

    def message(self, text: str) -> None:
        return None


class PlainProgress:
    """One line when a stage starts and ends, and at most one every ten seconds in between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._steps: dict[str, tuple[int, str]] = {}
        self._last_line = 0.0

    def stage_started(self, name: str, num_steps: int, unit: str = "step") -> None:
        self._steps[name] = (num_steps, unit)
        self._last_line = time.monotonic()
        self.message(f"{name}: started" + (f", {num_steps} {unit}s" if num_steps else ""))

    def step(self, name: str, step: int, metrics: Mapping[str, float]) -> None:
        if time.monotonic() - self._last_line >= SECONDS_PER_LINE:
            self._last_line = time.monotonic()
            total, unit = self._steps.get(name, (0, "step"))
            self.message(f"{name}: {unit} {step}/{total} {_numbers(metrics)}")

    def stage_done(self, name: str, seconds: float, note: str = "") -> None:
        self.message(_done(name, seconds, note))

    def message(self, text: str) -> None:
        print(text, file=self._stream, flush=True)
        logger.info("%s", text)


class RichProgress:
    """One live bar per running stage; what is finished scrolls up as plain lines."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def stage_started(self, name: str, num_steps: int, unit: str = "step") -> None:
        self._tasks[name] = self._bars.add_task(name, total=num_steps or None, numbers="")

    def step(self, name: str, step: int, metrics: Mapping[str, float]) -> None:
        if name in self._tasks:
            self._bars.update(self._tasks[name], completed=step, numbers=_numbers(metrics))

    def stage_done(self, name: str, seconds: float, note: str = "") -> None:
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
        self.message(_done(name, seconds, note))

    def message(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        logger.info("%s", text)


@contextlib.contextmanager
def open_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Bars when `stream` (default: stderr) is a terminal, plain lines otherwise. Warnings of the
    log appear between them."""
    stream = stream or sys.stderr
    if not stream.isatty():
        with _warnings_to(PlainProgress(stream)) as progress:
            yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    console = Console(file=stream)
    with Bars(*columns, console=console) as bars, _warnings_to(RichProgress(bars)) as progress:
        yield progress


class _ToProgress(logging.Handler):
    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        if text not in self._said:
            self._said.add(text)
            self._progress.message(text)


@contextlib.contextmanager
def _warnings_to(progress: Progress) -> Iterator[Progress]:
    handler = _ToProgress(progress)
    logging.getLogger().addHandler(handler)
    try:
        yield progress
    finally:
        logging.getLogger().removeHandler(handler)


def _numbers(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {metrics[name]:.3g}" for name in SHOWN if name in metrics)


def _done(name: str, seconds: float, note: str) -> str:
    return f"{name}: done in {seconds:.1f} s" + (f", {note}" if note else "")
