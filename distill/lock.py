"""One owner at a time, without a server: a lock file that a crash can never leave behind for good.

The file names its owner: process id and start time, boot id, process namespace, and an expiry that
the owner pushes back while it lives. When the owner's process can be looked up, that decides; on
another machine or in another container only the expiry can.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from distill.errors import ConfigError, DataError, DistillError
from distill.rundir import now, read_json, write_json

logger = logging.getLogger(__name__)

EXPIRES_AFTER = 600.0
HEARTBEAT = 60.0


class Lock:
    """Context manager around a lock file. ConfigError when somebody else holds it.

    `what` completes "another ... is running", such as `night on model 'tiny'`.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self.what = what
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True, name=f"lock {path.name}")

    def __enter__(self) -> Lock:
        with self._guard():
            owner = _owner(self.path)
            if owner is not None and _is_alive(owner):
                raise ConfigError(
                    f"another {self.what} is running (pid {owner.get('pid')} on "
                    f"{owner.get('host')}, since {owner.get('since')}); wait for it or stop it"
                )
            if owner is not None:
                logger.info("took over %s: its owner, pid %s, is gone", self.path, owner.get("pid"))
            self._record = _identity()
            self._write()
        self._heart.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._heart.join()
        with self._guard():
            owner = _owner(self.path)
            if owner is not None and _same(owner, self._record):
                self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            try:
                self._write()
            except (OSError, DistillError) as error:
                logger.warning("%s could not be renewed: %s", self.path, error)

    def _write(self) -> None:
        write_json(self.path, {**self._record, "expires": time.time() + EXPIRES_AFTER})

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Serialises look and take; the kernel releases it when the process dies."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name(f".{self.path.name}.guard").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def is_held(path: Path) -> bool:
    """Whether somebody alive holds the lock file `path`."""
    owner = _owner(path)
    return owner is not None and _is_alive(owner)


def _owner(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        owner = read_json(path)
    except DataError:
        return {}  # no writer of ours leaves half a file, so nobody living wrote it
    return owner if isinstance(owner, dict) else {}


def _identity() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "start": _start_time(os.getpid()),
        "boot": _boot_id(),
        "namespace": _namespace(),
        "host": socket.gethostname(),
        "since": now(),
    }


def _is_alive(owner: dict[str, Any]) -> bool:
    if owner.get("boot") == _boot_id() and owner.get("namespace") == _namespace():
        pid = owner.get("pid")
        # A process id alone proves nothing: it may have been given to somebody else since.
        return isinstance(pid, int) and _start_time(pid) == owner.get("start", "")
    if owner.get("host") == socket.gethostname() and owner.get("boot") != _boot_id():
        return False
    expires = owner.get("expires", 0.0)
    return isinstance(expires, int | float) and time.time() < expires


def _same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(left.get(key) == right[key] for key in ("pid", "start", "boot", "namespace"))


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _namespace() -> str:
    path = Path("/proc/self/ns/pid")
    return str(path.readlink()) if path.is_symlink() else ""


def _start_time(pid: int) -> str | None:
    """Start of a process in clock ticks since boot; None when there is no such process."""
    if not Path("/proc/self/stat").exists():
        return _start_unknown(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, in parentheses, may hold spaces; what follows has fixed places.
    state, *rest = stat.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]


def _start_unknown(pid: int) -> str | None:
    """Where the system shows no start times, a process that exists is taken to be the owner."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it exists and belongs to another user
    return "unknown"
