"""Where curricula of a home lie, those outside of it too, and what killed builds left of them.

A curriculum that the command line builds outside `curricula/` is written into a register before it
is built, so that forgetting finds it, and what is left of it when the build is killed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distill.leftovers import is_dead, partials
from distill.rundir import TEMPORARY, clear_disk_errors
from flows.forgetting_curricula import PLAN

REGISTER = "elsewhere.jsonl"
"""In `curricula/` of a home: one object with an absolute path per line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """What there is to look through."""

    folders: tuple[Path, ...]
    """Built curricula."""
    leftovers: tuple[Path, ...]
    """Files and folders of writers that are gone."""
    unreached: tuple[tuple[Path, str], ...]
    """Places that may hold something and cannot be looked into, and why."""


def places(home: Path) -> Places:
    """Every curriculum of a home: of runs, of the command line, and those of the register."""
    found = [*home.glob(f"runs/*/stages/*/final/{PLAN}"), *home.glob(f"curricula/*/{PLAN}")]
    folders = {path.parent.resolve(): path.parent for path in found}
    unreached: list[tuple[Path, str]] = []
    unfinished = [*home.glob("runs/*/stages/*/.final*"), *home.glob("curricula/.*")]
    for folder in registered(home):
        unfinished += folder.parent.glob(f".{_escaped(folder.name)}*")
        if (folder / PLAN).is_file():
            folders.setdefault(folder, folder)
        elif not any(_is_of(entry, folder) for entry in unfinished):
            why = "is no curriculum any more" if folder.exists() else "was moved or deleted"
            unreached.append((folder, why))
    entries = [entry for entry in unfinished if partials.match(entry.name)]
    for folder in folders.values():
        entries += [entry for entry in folder.rglob(".*") if partials.match(entry.name)]
    dead = {entry for entry in entries if is_dead(entry)}
    unreached += [(e, "is being written; repeat this when it is done") for e in set(entries) - dead]
    return Places(
        folders=tuple(sorted(folders.values())),
        leftovers=tuple(sorted(dead)),
        unreached=tuple(sorted(unreached)),
    )


def sweep(leftovers: Iterable[Path]) -> None:
    """Remove what writers that are gone have left."""
    for entry in leftovers:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def registered(home: Path) -> Iterator[Path]:
    """Folders outside of `curricula/` that a curriculum was built into; each once."""
    path = home / "curricula" / REGISTER
    if not path.is_file():
        return
    seen: set[str] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            name = json.loads(line)["path"]
        except (ValueError, KeyError, TypeError):
            continue  # a line that a crash cut; its build had not begun
        if isinstance(name, str) and name not in seen:
            seen.add(name)
            yield Path(name)


def register(home: Path, folder: Path) -> None:
    """Remember a folder that is about to be built, unless it lies where every curriculum does."""
    folder = folder.expanduser().resolve()
    if folder.parent == (home / "curricula").resolve() or folder in registered(home):
        return
    path = home / "curricula" / REGISTER
    with clear_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            # Begins with a newline: what a crash left of a line before it must not swallow it.
            file.write(b"\n" + json.dumps({"path": str(folder)}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def unregister(home: Path, folder: Path) -> None:
    """Take back what `register` wrote, of a build that failed."""
    folder = folder.expanduser().resolve()
    kept = [each for each in registered(home) if each != folder]
    path = home / "curricula" / REGISTER
    if path.is_file():
        lines = [json.dumps({"path": str(each)}) + "\n" for each in kept]
        partial = path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}")
        with clear_disk_errors(path):
            partial.write_text("".join(lines), encoding="utf-8")
            partial.replace(path)


def _escaped(name: str) -> str:
    """A name as a pattern that only it matches."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _is_of(entry: Path, folder: Path) -> bool:
    return entry.parent == folder.parent and entry.name.startswith(f".{folder.name}.")
