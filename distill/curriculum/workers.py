"""Chunks prepared here or by other processes; the results come in the order of the chunks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from distill.curriculum.prepare import Job, Prepared, Redact, prepare
from distill.errors import ConfigError, PreflightError

T = TypeVar("T")
AHEAD = 4
"""Chunks per process that are read ahead: enough to work on while a segment is written."""
_redact: Redact | None = None


@contextlib.contextmanager
def in_order(
    chunks: Iterator[T], job: Callable[[T], Job], redact: Redact | None, jobs: int
) -> Iterator[Iterator[tuple[T, Prepared]]]:
    """Pairs of a chunk and what became of it. With `jobs` > 1 so many processes work; few chunks
    wait for them, so that memory does not grow with the log. They start anew instead of as copies
    of this process, and end when it ends, however that happens."""
    if jobs == 1:
        yield ((chunk, prepare(job(chunk), redact)) for chunk in chunks)
        return
    if "<" in getattr(redact, "__qualname__", ""):
        raise ConfigError(
            f"the redactor {redact!r} cannot be sent to another process; define it at the top of a "
            "module, or use jobs = 1"
        )
    pool = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(redact,),
    )
    try:
        yield _pooled(pool, chunks, job, AHEAD * jobs)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _pooled(
    pool: ProcessPoolExecutor, chunks: Iterator[T], job: Callable[[T], Job], limit: int
) -> Iterator[tuple[T, Prepared]]:
    waiting: deque[tuple[T, Future[Prepared]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_work, job(chunk))))
            if len(waiting) >= limit:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise PreflightError(
            "a process of the import was ended from outside, probably for want of memory; "
            "try fewer jobs"
        ) from error


def _begin(redact: Redact | None) -> None:
    global _redact
    _redact = redact
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(job: Job) -> Prepared:
    return prepare(job, _redact)
