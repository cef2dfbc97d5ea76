"""What killed writers leave behind, and how it goes away."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from distill.rundir import TEMPORARY

partials = re.compile(rf"\..*{re.escape(TEMPORARY)}")
"""Names of files and folders that are being written, or were when their writer was killed."""


def sweep_partial(folder: Path) -> int:
    """Remove what killed writers left below `folder`; returns how many entries. Only the owner of
    the folder's lock may call this: a live writer's file looks the same."""
    leftovers = sorted(folder.rglob(f".*{TEMPORARY}*"))
    for entry in leftovers:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    return len(leftovers)


def sweep_dead(folder: Path) -> int:
    """The same below a folder that others may be writing into: only what no living process of
    this machine can still be writing."""
    removed = 0
    for entry in folder.rglob(f".*{TEMPORARY}*"):
        if is_dead(entry):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
            removed += 1
    return removed


def is_dead(entry: Path) -> bool:
    """Whether no living process of this machine can still be writing a partial file or folder."""
    pid = entry.name.rpartition(TEMPORARY)[2].partition("-")[0]
    return pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists()
