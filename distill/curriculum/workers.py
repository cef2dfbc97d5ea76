"""Work that several processes share; the results come in the order of what was asked for."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import pyarrow as pa

from distill.curriculum.prepare import Job, Prepared, Redact, prepare
from distill.errors import ConfigError, PreflightError

T = TypeVar("T")
R = TypeVar("R")
AHEAD = 4
"""Chunks per process that are read ahead: enough to work on while a segment is written."""
_redact: Redact | None = None


@contextlib.contextmanager
def processes(jobs: int, begin: Callable[..., None], *given: Any) -> Iterator[ProcessPoolExecutor]:
    """So many processes, in each of which `begin(*given)` was called. They start anew instead of as
    copies of this one, which may hold threads of a tensor library, and end when it ends, however
    that happens. PreflightError when one is ended from outside."""
    pool = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(begin, *given),
    )
    try:
        yield pool
    except BrokenProcessPool as error:
        raise PreflightError(
            "a helping process was ended from outside, probably for want of memory; try fewer jobs"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_turn(
    pool: ProcessPoolExecutor, work: Callable[[T], R], given: Iterable[T], ahead: int
) -> Iterator[R]:
    """`work` of each of the given, in order. At most `ahead` are worked on or wait, so that neither
    they nor their results pile up."""
    waiting: deque[Future[R]] = deque()
    for each in given:
        waiting.append(pool.submit(work, each))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextlib.contextmanager
def in_order(
    chunks: Iterator[T], job: Callable[[T], Job], redact: Redact | None, jobs: int
) -> Iterator[Iterator[tuple[T, Prepared]]]:
    """Pairs of a chunk and what became of it. With `jobs` > 1 so many processes work; few chunks
    wait for them, so that memory does not grow with the log."""
    if jobs == 1:
        yield ((chunk, prepare(job(chunk), redact)) for chunk in chunks)
        return
    if "<" in getattr(redact, "__qualname__", ""):
        raise ConfigError(
            f"the redactor {redact!r} cannot be sent to another process; define it at the top of a "
            "module, or use jobs = 1"
        )
    with processes(jobs, _take, redact) as pool:
        taken: deque[T] = deque()

        def asked() -> Iterator[Job]:
            for chunk in chunks:
                taken.append(chunk)
                yield job(chunk)

        results = in_turn(pool, _work, asked(), AHEAD * jobs)
        yield ((taken.popleft(), prepared) for prepared in results)


def _begin(begin: Callable[..., None], *given: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Arrow's own allocator keeps what was freed, a good deal for each process.
    pa.set_memory_pool(pa.system_memory_pool())
    begin(*given)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _take(redact: Redact | None) -> None:
    global _redact
    _redact = redact


def _work(job: Job) -> Prepared:
    return prepare(job, _redact)
