"""Files behind `distill skills import`, `export` and `validate PATH`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import ConfigError, DataError
from distill.rundir import TEMPORARY, clear_disk_errors
from skills.interop import Exported, Format, Imported, export_path, import_path
from skills.interop.files import LOCK, NAMES, walk
from skills.interop.validate import validate_folder
from skills.pack import KIND, read_pack

if TYPE_CHECKING:
    from skills.items import SkillItem

_FILE_ENDINGS = (".json", ".jsonl", ".ndjson", ".md", ".txt", ".zip", ".tar", ".gz", ".tgz")


# -- in -------------------------------------------------------------------------------------------


def read_foreign(path: Path) -> tuple[Imported, Mapping[str, str]]:
    """What a path holds, and why texts were retired where it says so: content hash -> reason.

    DataError when nothing is recognised, or a packed bank was changed.
    """
    if not _is_pack(path):
        return import_path(path), {}
    packed = read_pack(path)
    graves = {sha: grave.reason for sha, grave in packed.tombstones.items()}
    return Imported(items=packed.items, format="pack"), graves


def _is_pack(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            head = json.loads(file.readline(1 << 20))
    except (OSError, ValueError, RecursionError):
        return False  # something else, or unreadable: `import_path` says which
    return isinstance(head, Mapping) and head.get("kind") == KIND


# -- out ------------------------------------------------------------------------------------------


def choose_format(path: Path, wanted: Format | None) -> Format:
    """The format that was asked for, or that the path asks for. ConfigError when they disagree."""
    if wanted is None and path.suffix.lower() == ".jsonl":
        return "jsonl"
    chosen: Format = wanted or "skillmd"
    if chosen == "skillmd" and path.suffix.lower() in _FILE_ENDINGS:
        raise ConfigError(
            f"skillmd writes a folder, but {path} looks like a file; name a folder, or choose "
            "another --format"
        )
    return chosen


def write_export(
    items: Sequence[SkillItem], path: Path, format: Format, *, bank_version: str, replace: bool
) -> Exported:
    """Write an export; an old one is replaced only where `replace` says so. ConfigError for a
    target that holds anything else: a folder of other files is never removed."""
    if format != "skillmd":
        _require_file(path, replace)
        return export_path(items, path, format, bank_version=bank_version)
    if not (path.exists() or path.is_symlink()):
        return export_path(items, path, format, bank_version=bank_version)
    _require_own_folder(path, replace)
    target = path.resolve()
    fresh = target.with_name(f".{target.name}{TEMPORARY}new-{os.getpid()}")
    old = target.with_name(f".{target.name}{TEMPORARY}old-{os.getpid()}")
    with clear_disk_errors(path):
        done = export_path(items, fresh, format, bank_version=bank_version)
        target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old)
    return Exported(
        path=path, num_written=done.num_written, refused=done.refused, warnings=done.warnings
    )


def _require_file(path: Path, replace: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, but this format is one file; name a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no ordinary file; name a file to write")
    if path.exists() and not replace:
        raise ConfigError(f"{path} exists; replace it with --yes, or choose another name")


def _require_own_folder(path: Path, replace: bool) -> None:
    if not path.is_dir():
        raise ConfigError(f"{path} exists and is no folder; skillmd writes a folder")
    if path.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise ConfigError(f"{path} is the folder that you are in; name a new folder")
    entries = sorted(path.iterdir())
    strange = next((e for e in entries if not _is_exported(e)), None)
    if strange is not None or (entries and path / LOCK not in entries):
        found = f"it holds {(strange or entries[0]).name!r}"
        raise ConfigError(
            f"{path} is not an export of skills ({found}) and is not replaced; name a new folder"
        )
    if entries and not replace:
        raise ConfigError(f"{path} exists; replace it with --yes, or choose another name")


def _is_exported(entry: Path) -> bool:
    """Whether an export writes such an entry: the lock file, or a folder with a SKILL.md alone."""
    if entry.is_symlink():
        return False
    if entry.is_dir():
        inside = list(entry.iterdir())
        return [e.name for e in inside] == ["SKILL.md"] and not inside[0].is_symlink()
    return entry.name == LOCK


# -- checking -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderProblem:
    """Something that the open format forbids or frowns upon, and in which skill."""

    where: str
    text: str
    is_error: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedFolders:
    path: Path
    num_skills: int
    problems: tuple[FolderProblem, ...]


def check_folders(path: Path) -> CheckedFolders:
    """The strict validator on a skill's folder, its SKILL.md, or every skill below a folder.

    DataError when there is none.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a folder with SKILL.md files")
    root = path.parent if path.name in NAMES and path.is_file() else path
    if not root.is_dir():
        raise DataError(f"{path} is no folder; expected FOLDER/NAME/SKILL.md")
    found = walk(root)
    problems = [
        FolderProblem(where=where, text=text, is_error=True) for where, text in found.skipped
    ]
    if not found.files and not problems:
        raise DataError(f"{path} holds no SKILL.md; expected FOLDER/NAME/SKILL.md")
    for file in found.files:
        for problem in validate_folder((root / file.where).parent):
            problems.append(_problem(file.where, problem))
    return CheckedFolders(path=path, num_skills=len(found.files), problems=tuple(problems))


def _problem(where: str, problem: Any) -> FolderProblem:
    return FolderProblem(where=where, text=str(problem), is_error=problem.is_error)
