"""The run directory: files that a person can read and that survive a crash at any moment.

A file appears under its name complete or not at all: it is written to a temporary sibling, synced,
then renamed. A temporary sibling that a killed process left behind is never read.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from distill.config import Config, differences
from distill.errors import ConfigError, DataError, DistillError, PreflightError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
logger = logging.getLogger(__name__)

TEMPORARY = ".partial-"
"""Marks what an interrupted write may leave behind: `.NAME.partial-PID`."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RUN_NAME = re.compile(r"(?P<preset>.+)-(?P<date>\d{8})-(?P<number>\d+)")


@contextlib.contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    """Turn "disk full", "quota" and "read-only" into one line that names the path."""
    try:
        yield
    except DistillError:
        raise
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        # Native writers and copies of trees raise types of their own; only their text says it.
        if code in _DISK_FULL or any(os.strerror(full) in str(error) for full in _DISK_FULL):
            raise PreflightError(
                f"no space left while writing {path}; nothing half-written was kept: "
                "free some space, then resume the run"
            ) from error
        if code in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise PreflightError(f"cannot write {path}: {os.strerror(code)}") from error
        raise


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replace the content of `path`: readers see the old file or the new one, never a part."""
    data = content.encode() if isinstance(content, str) else content
    partial = _partial(path)
    with clear_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync_dir(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value or one of our records, indented, atomically."""
    atomic_write(path, json.dumps(to_json(value), indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The value of a JSON file. DataError naming the file when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except (ValueError, OSError) as error:
        raise DataError(f"{path} is not a readable JSON file: {error}") from error


def append_jsonl(path: Path, rows: Iterable[Any], *, sync: bool = False) -> None:
    """Append one JSON object per row. `sync` returns only after the rows are on the disk.

    A broken last line, left by a crash, is cut off first: the new rows start on a clean line.
    """
    lines = "".join(json.dumps(to_json(row), ensure_ascii=False) + "\n" for row in rows).encode()
    with clear_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "w+b") as file:
            end = _end_of_last_line(file)
            file.truncate(end)
            file.seek(end)
            try:
                file.write(lines)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise


def read_jsonl(path: Path) -> list[Any]:
    """The rows of a JSONL file. A broken last line, as an interrupted write leaves it, is dropped
    with a warning; a broken line before it is a DataError."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                logger.warning("%s: dropped the incomplete last line %d", path, number)
                break
            raise DataError(f"{path}, line {number}: not valid JSON: {error}") from error
    return rows


@contextlib.contextmanager
def staged_dir(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends without an error.

    DataError when `path` exists already: a finished folder is never overwritten.
    """
    if path.exists():
        raise DataError(f"{path} exists already; a finished folder is never overwritten")
    partial = _partial(path)
    with clear_disk_errors(path):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            for entry in sorted(partial.rglob("*")):
                sync = _sync_dir if entry.is_dir() else _sync_file
                sync(entry)
            _sync_dir(partial)
            _rename_new(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync_dir(path.parent)


def digest_bytes(data: bytes) -> str:
    """SHA-256 as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def digest_json(value: Any) -> str:
    """Digest of a JSON value or record; the order of keys does not matter."""
    text = json.dumps(to_json(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return digest_bytes(text.encode())


def to_json(value: Any) -> Any:
    """Records, tuples, paths and mappings as plain JSON values. NaN and infinities stay floats."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    if isinstance(value, frozenset | set):
        return sorted(to_json(entry) for entry in value)
    return str(value) if isinstance(value, os.PathLike) else value


def from_json(cls: type[T], value: Any, *, where: str = "record") -> T:
    """The record of type `cls` that `to_json` made `value` of. DataError when it does not fit."""
    from pydantic import ValidationError

    try:
        return cast(T, _adapter(cast(Any, cls)).validate_python(value))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{where} is not a valid {cls.__name__}: {key}: {first['msg']}") from error


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDir:
    """The folder of one night, `HOME/runs/PRESET-DATE-N`, and the names of what lies in it."""

    path: Path

    @classmethod
    def create(cls, home: Path, preset: str, date: str | None = None) -> RunDir:
        """A new folder with the next free number; safe against other processes doing the same."""
        runs, date = home / "runs", date or datetime.now().strftime("%Y%m%d")
        with clear_disk_errors(runs):
            runs.mkdir(parents=True, exist_ok=True)
            number = 1 + max(
                (n for p, d, n in map(_split_name, _names(runs)) if (p, d) == (preset, date)),
                default=0,
            )
            while True:
                path = runs / f"{preset}-{date}-{number}"
                try:
                    path.mkdir()
                    return cls(path=path)
                except FileExistsError:
                    number += 1

    @classmethod
    def open(cls, home: Path, run: str | Path) -> RunDir:
        """An existing run by name or path. DataError naming the newest ones when there is none."""
        for path in (home / "runs" / run, Path(run)):
            if (path / "config.json").is_file():
                return cls(path=path)
        newest = ", ".join(other.name for other in cls.all(home)[:3]) or "none"
        raise DataError(f"no run {str(run)!r} in {home / 'runs'}; the newest are: {newest}")

    @classmethod
    def all(cls, home: Path) -> list[RunDir]:
        """Every run of `home`, newest first."""
        runs = home / "runs"
        known = [n for n in _names(runs) if (runs / n / "config.json").is_file()]
        known.sort(key=lambda n: ((runs / n / "config.json").stat().st_mtime_ns, n), reverse=True)
        return [cls(path=runs / name) for name in known]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def home(self) -> Path:
        return self.path.parent.parent

    @property
    def is_finished(self) -> bool:
        return self.summary_path.exists() and (self.path / "report.html").exists()

    def stage_dir(self, stage: str) -> Path:
        return self.path / "stages" / stage

    def eval_path(self, name: str) -> Path:
        """Where the EvalReport `before`, `teacher` or `after` lies."""
        return self.path / "evals" / f"{name}.json"

    def gate_path(self, name: str = "verdict") -> Path:
        return self.path / "gates" / f"{name}.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.json"

    @property
    def summary_path(self) -> Path:
        """What other programs read of a finished night; only the report is written later."""
        return self.path / "summary.json"

    def read_config(self) -> Config:
        path = self.path / "config.json"
        return Config.from_dict(read_json(path), origin=str(path))

    def write_config(self, config: Config, given: str) -> None:
        """Store the configuration as given and resolved. ConfigError naming the keys when the
        folder belongs to another configuration."""
        path = self.path / "config.json"
        if path.exists():
            self.check_config(config)
            return
        atomic_write(self.path / "config.toml", given)
        write_json(path, config.to_dict())

    def check_config(self, config: Config) -> None:
        changed = differences(self.read_config(), config)
        if changed:
            raise ConfigError(
                f"{self.path} belongs to another configuration; it differs in: "
                f"{', '.join(changed)}; start a new run, or resume without changes"
            )

    def add_event(self, event: str, **values: Any) -> None:
        """Append one line to `events.jsonl`, with the time in UTC."""
        row = {"at": now(), "event": event, **values}
        append_jsonl(self.events_path, [row], sync=True)

    def new_log(self) -> Path:
        """`logs/attempt_N.log` for this process; the link `logs/latest` moves to it."""
        logs = self.path / "logs"
        with clear_disk_errors(logs):
            logs.mkdir(parents=True, exist_ok=True)
            path = logs / f"attempt_{len(list(logs.glob('attempt_*.log'))) + 1}.log"
            path.touch()
            link = _partial(logs / "latest")
            link.unlink(missing_ok=True)
            link.symlink_to(path.name)
            link.replace(logs / "latest")
        return path


def now() -> str:
    """The time in UTC as ISO 8601 with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _names(runs: Path) -> list[str]:
    return [entry.name for entry in runs.iterdir() if entry.is_dir()] if runs.is_dir() else []


def _split_name(name: str) -> tuple[str, str, int]:
    match = _RUN_NAME.fullmatch(name)
    return (match["preset"], match["date"], int(match["number"])) if match else ("", "", 0)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}-{threading.get_native_id()}")


def _rename_new(partial: Path, path: Path) -> None:
    try:
        partial.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise DataError(f"{path} was made by another process in the meantime") from error
        raise


def _end_of_last_line(file: BinaryIO) -> int:
    """Offset behind the last newline; what follows it was never completed."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
