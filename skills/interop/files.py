"""Reading folders and archives that somebody else made, without leaving them.

Links are never followed, special files never opened; the walk, every file and the sum of an
archive are bounded. Archives are read in memory: nothing is unpacked.
"""

from __future__ import annotations

import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from distill.errors import DataError

MAX_DEPTH = 6
MAX_FOLDERS = 2000
MAX_BYTES = 2**20
"""Of one SKILL.md."""
MAX_LOCK_BYTES = 2**28
MAX_MEMBERS = 20_000
MAX_TOTAL = 2**29
"""Bytes of everything in an archive."""
SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
PASSED_OVER = {
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    "node_modules",
    "__pycache__",
    "site-packages",
}
NAMES = ("SKILL.md", "skill.md")
LOCK = "bank.lock.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SkillFile:
    """A SKILL.md and the folder it names."""

    where: str
    folder: str
    text: str
    resources: int = 0
    """Other files beside it."""


@dataclass(slots=True)
class Found:
    files: list[SkillFile] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    lock: bytes | None = None


def walk(root: Path) -> Found:
    """Every SKILL.md of a folder; a skill's own folder is not searched for further skills."""
    found, folders = Found(), 0
    queue = [(root, 0)]
    while queue:
        folder, depth = queue.pop(0)
        folders += 1
        if folders > MAX_FOLDERS:
            found.warnings.append(
                f"{root}: stopped after {MAX_FOLDERS} folders; import parts of it"
            )
            break
        entries = _entries(folder, found)
        skill = next((e for name in NAMES for e in entries if e.name == name), None)
        if skill is not None:
            where = _below(root, Path(skill.path))
            _take(found, where, folder.resolve().name, Path(skill.path), _count(folder))
            continue
        for entry in entries:
            path = Path(entry.path)
            if entry.is_symlink():
                found.skipped.append(
                    (_below(root, path), "a symbolic link; links are not followed")
                )
            elif entry.is_dir() and entry.name not in PASSED_OVER:
                if depth < MAX_DEPTH:
                    queue.append((path, depth + 1))
                else:
                    found.warnings.append(
                        f"{_below(root, path)}: not searched, deeper than {MAX_DEPTH} folders"
                    )
    lock = root / LOCK
    if lock.is_file() and not lock.is_symlink():
        found.lock = _bytes(lock, MAX_LOCK_BYTES)
    return found


def _entries(folder: Path, found: Found) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda e: e.name)
    except OSError as error:
        found.skipped.append((str(folder), f"cannot be read: {error.strerror}"))
        return []


def _take(found: Found, where: str, folder: str, path: Path, resources: int) -> None:
    try:
        text = read_text(path)
    except DataError as error:
        found.skipped.append((where, str(error)))
        return
    found.files.append(SkillFile(where=where, folder=folder, text=text, resources=resources))


def _count(folder: Path) -> int:
    """Other files of a skill's folder, bounded; links are not followed."""
    count = 0
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in PASSED_OVER]
        count += len([name for name in files if name not in NAMES and name != LOCK])
        if count > MAX_MEMBERS:
            break
    return count


def read_text(path: Path) -> str:
    """The text of an ordinary file. DataError for links, special, large and binary files."""
    return _text(_bytes(path, MAX_BYTES))


def _bytes(path: Path, most: int) -> bytes:
    try:
        # No link at the end of the path, and no waiting for the writer of a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        is_link = path.is_symlink()
        raise DataError(
            "a symbolic link; links are not followed" if is_link else f"cannot be read: {error}"
        ) from error
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DataError("not an ordinary file")
        data = file.read(most + 1)
    if len(data) > most:
        raise DataError(f"larger than {most} bytes")
    return data


def _text(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text: {error.reason} at byte {error.start}") from error
    if "\0" in text:
        raise DataError("not text: it holds a zero byte")
    return text


def _below(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


_DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
    *(EOFError, OSError, RuntimeError, ArithmeticError, ValueError, KeyError),
)
"""What the standard library raises for archives that are broken, encrypted or odd."""


# -- archives -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    name: str
    kind: str  # file, folder, link, special
    size: int


def is_archive(path: Path) -> bool:
    if path.name.lower().endswith(SUFFIXES):
        return True
    try:
        return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)
    except _DAMAGE:
        return False


def read_archive(path: Path) -> Found:
    """Every SKILL.md of a .zip or .tar. DataError for an archive whose names leave it: whoever
    made that is not to be trusted with the rest."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return _from_zip(path, archive)
        with tarfile.open(path) as tar:
            return _from_tar(path, tar)
    except DataError:
        raise
    except _DAMAGE as error:
        raise DataError(f"{path} is not a readable archive: {error}") from error


def _from_zip(path: Path, archive: zipfile.ZipFile) -> Found:
    def members() -> Iterator[_Member]:
        for info in archive.infolist():
            mode = info.external_attr >> 16
            kind = "link" if stat.S_ISLNK(mode) else "folder" if info.is_dir() else "file"
            yield _Member(name=info.filename, kind=kind, size=info.file_size)

    def content(name: str, most: int) -> bytes:
        with archive.open(name) as file:
            return file.read(most + 1)

    return _collect(path, list(members()), content)


def _from_tar(path: Path, tar: tarfile.TarFile) -> Found:
    kept: dict[str, tarfile.TarInfo] = {}
    members, total = [], 0
    for info in tar:
        kind = "file" if info.isreg() else "folder" if info.isdir() else "special"
        kind = "link" if info.issym() or info.islnk() else kind
        members.append(_Member(name=info.name, kind=kind, size=info.size))
        kept[info.name] = info
        total += max(0, info.size)
        # What is passed over is still unpacked, so an honest sum is asked for before that.
        if total > MAX_TOTAL:
            raise DataError(f"{path} unpacks to more than {MAX_TOTAL} bytes; import parts of it")
        if len(members) > MAX_MEMBERS:
            break

    def content(name: str, most: int) -> bytes:
        file = tar.extractfile(kept[name])
        return file.read(most + 1) if file is not None else b""

    return _collect(path, members, content)


def _collect(path: Path, members: list[_Member], content: Callable[[str, int], bytes]) -> Found:
    if len(members) > MAX_MEMBERS:
        raise DataError(f"{path} has more than {MAX_MEMBERS} members; import parts of it")
    for member in members:
        _check_name(path, member.name)
    found = Found()
    files = {str(PurePosixPath(m.name)): m for m in members if m.kind == "file"}
    for member in members:
        if member.kind in ("link", "special"):
            found.skipped.append((member.name, f"a {member.kind} in the archive; not followed"))
    roots: set[str] = set()
    beside = Counter(
        str(up) for n in files if PurePosixPath(n).name != LOCK for up in PurePosixPath(n).parents
    )
    for name in sorted(files, key=lambda n: (n.count("/"), n)):
        pure = PurePosixPath(name)
        folder = str(pure.parent)
        hidden = PASSED_OVER & set(pure.parts)
        below = any(str(up) in roots for up in PurePosixPath(folder).parents)
        if pure.name not in NAMES or folder in roots or hidden or below:
            continue
        roots.add(folder)
        if len(pure.parts) > MAX_DEPTH + 2:
            found.warnings.append(f"{name}: not read, deeper than {MAX_DEPTH} folders")
            continue
        data = content(files[name].name, MAX_BYTES)
        try:
            if len(data) > MAX_BYTES:
                raise DataError(f"larger than {MAX_BYTES} bytes")
            text = _text(data)
        except DataError as error:
            found.skipped.append((name, str(error)))
            continue
        own = PurePosixPath(folder).name or path.name.split(".")[0]
        found.files.append(
            SkillFile(where=name, folder=own, text=text, resources=beside[folder] - 1)
        )
    locks = sorted((n for n in files if PurePosixPath(n).name == LOCK), key=lambda n: n.count("/"))
    if locks and files[locks[0]].size <= MAX_LOCK_BYTES:
        found.lock = content(files[locks[0]].name, MAX_LOCK_BYTES)[:MAX_LOCK_BYTES]
    return found


def _check_name(path: Path, name: str) -> None:
    pure = PurePosixPath(name.replace("\\", "/"))
    drive = len(name) > 1 and name[1] == ":" and name[0].isalpha()
    if pure.is_absolute() or drive or ".." in pure.parts or "\0" in name:
        raise DataError(
            f"{path} is refused: its member {name!r} lies outside the archive's own folder; "
            "nothing was read"
        )
