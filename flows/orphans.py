"""Servers that a killed night left running: found by their recorded id and ended.

Prefect's temporary server is a child process. SIGKILL of the night leaves it behind, so its id and
start time are written down, and the next night in the same home ends it when its owner is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import psutil

from distill.rundir import read_json, write_json

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 10.0
_POLL_SECONDS = 0.1


def record_children(path: Path, word: str) -> int:
    """Write down this process and its children with `word` in their command line; their number."""
    owner = psutil.Process()
    children = [_identity(c) for c in owner.children(recursive=True) if word in _command(c)]
    if children:
        write_json(path, {"owner": _identity(owner), "children": children})
    return len(children)


def record_as_they_start(path: Path, word: str, seconds: float) -> threading.Thread:
    """Record the children as soon as one is there, without waiting for it to be ready: a night may
    be killed while its server still starts."""

    def watch() -> None:
        deadline = time.monotonic() + seconds
        while not record_children(path, word) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    thread = threading.Thread(target=watch, daemon=True, name="record of servers")
    thread.start()
    return thread


def end_orphans(folder: Path) -> int:
    """End the recorded children of every owner that no longer lives; returns how many."""
    ended = 0
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if _living(record["owner"]) is not None:
            continue
        orphans = [p for p in map(_living, record["children"]) if p is not None]
        for orphan in orphans:
            logger.info("ended server %d, left behind by a killed night", orphan.pid)
            orphan.terminate()
        _, stubborn = psutil.wait_procs(orphans, timeout=_PATIENCE_SECONDS)
        for orphan in stubborn:
            orphan.kill()
        path.unlink(missing_ok=True)
        ended += len(orphans)
    return ended


def _identity(process: psutil.Process) -> dict[str, float]:
    return {"pid": process.pid, "created": process.create_time()}


def _living(identity: dict[str, float]) -> psutil.Process | None:
    """The very process of an identity; a recycled id has another start time."""
    try:
        process = psutil.Process(int(identity["pid"]))
        same = abs(process.create_time() - identity["created"]) < 1.0
        alive = process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return process if same and alive else None


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
