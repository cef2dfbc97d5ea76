"""Contenders in several processes. Each writes only into the folders of its own runs.

A process takes runs from a queue that holds all of them, so it never waits; it ends when the queue
is empty, when a run failed, or when the process that started it is gone.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from distill.errors import DistillError
from flows.compare_config import Comparison
from flows.compare_places import Places
from flows.progress import NoProgress, Progress

Pair = tuple[str, int]


class _Orphaned(Exception):
    """The process that started this one is gone."""


class _Child(NoProgress):
    """Ends the process between two steps when nobody waits for it any more."""

    def step(self, name: str, step: int, metrics: Mapping[str, float]) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise _Orphaned


def run_in_processes(
    comparison: Comparison,
    pairs: Sequence[Pair],
    *,
    places: Places,
    progress: Progress,
    jobs: int,
) -> None:
    """Finish these runs on disk. The first failure ends the others and is raised."""
    context = multiprocessing.get_context("spawn")
    left = [p for p in pairs if not (places.run(*p).path / "result.json").exists()]
    jobs = min(jobs, len(left))
    tasks: Any = context.SimpleQueue()
    reader, writer = context.Pipe(duplex=False)
    lock = context.Lock()
    processes = [
        context.Process(target=_work, args=(comparison, places, tasks, writer, lock), daemon=True)
        for _ in range(jobs)
    ]
    for process in processes:
        process.start()
    for pair in [*left, *[None] * jobs]:
        tasks.put(pair)
    writer.close()
    try:
        for number in range(1, len(left) + 1):
            name, seconds, error = _next(reader, processes)
            if error is not None:
                raise error
            progress.stage_done(f"{name} ({number} of {len(left)})", seconds)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _next(reader: Any, processes: Sequence[Any]) -> tuple[str, float, Exception | None]:
    """What the next run to end reports, or an error when a process died without a word."""
    while True:
        ready = wait([reader, *(p.sentinel for p in processes if p.is_alive())], timeout=1.0)
        if reader in ready:
            found: tuple[str, float, Exception | None] = reader.recv()
            return found
        dead = [p for p in processes if p.exitcode not in (None, 0)]
        if dead or not any(p.is_alive() for p in processes):
            codes = ", ".join(str(p.exitcode) for p in processes)
            raise DistillError(
                f"a process of the comparison ended without a result (exit codes {codes}); what is "
                "finished is on disk: the same command continues, and fewer --jobs need less memory"
            )


def _work(comparison: Comparison, places: Places, tasks: Any, writer: Any, lock: Any) -> None:
    """The main function of a process."""
    from flows.compare_run import run_contender
    from flows.compare_suite import Suite, build_suite
    from flows.nightly import quiet_transformers

    quiet_transformers()
    suites: dict[int, Suite] = {}
    while (pair := tasks.get()) is not None:
        name, seed = pair
        seconds, error = 0.0, None
        try:
            if seed not in suites:
                suites[seed] = build_suite(comparison, seed)
            run = run_contender(
                comparison, name, seed, places=places, suite=suites[seed], progress=_Child()
            )
            seconds = run.speed.seconds
        except _Orphaned:
            return
        except Exception as found:  # it travels to the parent, which raises it
            error = found
        with lock:
            writer.send((f"{name} (seed {seed})", seconds, error))
        if error is not None:
            return
