"""The files of a bank: skills, versions, and the pointer to the active one.

    bank/<name>/
      bank.json         name, capacity, when it was made; never rewritten
      items/<sha>.json  one record each, named by its digest, written once
      versions/<id>.json  which records a version holds; the id is its digest
      ops.jsonl         what happened, one line per change (skills.ops)
      active            the id of the active version, one line
      tmp/              files on their way; emptied by the next writer
      index/            vectors for the search, if any; may be deleted at any time
      lock.json         who is writing, beside .lock.json.guard

Everything but `active` and `ops.jsonl` is immutable. A change becomes durable in the order items,
version, log, pointer, so that whoever dies in between leaves the old version active and whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distill.errors import SkillBankError
from distill.rundir import atomic_write, clear_disk_errors, digest_bytes
from skills.codec import decode
from skills.items import SkillItem

FORMAT = 1
SYNC_THREADS = 16
"""Files are synced side by side: the disk then writes its journal once for many of them."""

_FIRST, _LAST = b' "skills": [', b" ],"
"""The lines around the rows in the file of a version."""

Barrier = Callable[[str], None]
"""Called with a name at every moment where a crash would leave something half done. Tests die
there; everybody else passes nothing."""


class Row(NamedTuple):
    """What a version says about one skill: enough to filter, sort and evict without its file."""

    id: str
    item: str
    """Digest of the record, which is the name of its file."""
    status: str
    category: str
    utility: float
    content: str
    """Content hash: what a tombstone would name."""


def row_of(item: SkillItem, sha: str) -> Row:
    return Row(item.id, sha, item.status, item.category, item.credit.utility, item.sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tombstone:
    """Why a text must not come back."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """What a bank held at one moment. Equal content has the same id, whenever it was made."""

    rows: Mapping[str, Row] = field(default_factory=dict)
    """By skill id, in the order in which the skills came."""
    tombstones: Mapping[str, Tombstone] = field(default_factory=dict)
    """By content hash (`SkillItem.sha256`)."""

    def encode(self) -> bytes:
        """The content of its file, one skill per line."""
        write = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
        skills = ",\n".join("  " + write(row) for row in self.rows.values())
        graves = ",\n".join(
            f"  {write(sha)}: {write({'id': grave.id, 'reason': grave.reason})}"
            for sha, grave in sorted(self.tombstones.items())
        )
        text = f'{{\n "format": {FORMAT},\n "skills": [\n{skills}\n ],\n "tombstones": {{\n{graves}'
        return f"{text}\n }}\n}}\n".encode()

    @property
    def id(self) -> str:
        return digest_bytes(self.encode())

    @classmethod
    def decode(cls, data: bytes, where: str) -> Version:
        try:
            table = json.loads(data)
            if table["format"] != FORMAT:
                raise SkillBankError(
                    f"{where} has format {table['format']!r}, this program reads {FORMAT}: "
                    "update distill-nightly"
                )
            return cls(
                rows={row[0]: Row(*row) for row in table["skills"]},
                tombstones={sha: Tombstone(**grave) for sha, grave in table["tombstones"].items()},
            )
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise SkillBankError(f"{where} is not a version of a skill bank: {error}") from error


def no_barrier(point: str) -> None:
    """Nothing happens."""


class Store:
    """Reads and writes the immutable files of one bank and its pointer."""

    def __init__(self, path: Path, *, barrier: Barrier = no_barrier) -> None:
        self.path = path
        self.barrier = barrier

    @property
    def ops_path(self) -> Path:
        return self.path / "ops.jsonl"

    @property
    def lock_path(self) -> Path:
        return self.path / "lock.json"

    def item_path(self, sha: str) -> Path:
        return self.path / "items" / f"{sha}.json"

    def version_path(self, version: str) -> Path:
        return self.path / "versions" / f"{version}.json"

    def read_pointer(self) -> str:
        """Id of the active version."""
        path = self.path / "active"
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise SkillBankError(
                f"{path} should name the active version and cannot be read ({error}); "
                "the next change, or a rollback, writes it again"
            ) from error
        if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
            raise SkillBankError(
                f"{path} should hold the 64 hex digits of a version, found {text[:80]!r}; "
                "the next change, or a rollback, writes it again"
            )
        return text

    def write_pointer(self, version: str) -> None:
        self.barrier("before pointer")
        atomic_write(self.path / "active", version + "\n")
        self.barrier("after pointer")

    def read_version(self, version: str) -> Version:
        """A version, checked against its id. SkillBankError when it is missing or damaged."""
        path = self.version_path(version)
        return Version.decode(self._read(path, version, "version"), str(path))

    def read_page(
        self, version: str, start: int, count: int, status: str = ""
    ) -> tuple[list[Row], int]:
        """`count` rows of a version from `start` on, and how many there are in all; only those of
        a status when one is given. Takes the lines that it needs instead of the whole file."""
        path = self.version_path(version)
        lines = self._read(path, version, "version").split(b"\n")
        try:
            rows = [line for line in lines[lines.index(_FIRST) + 1 : lines.index(_LAST)] if line]
            if status:
                # Quotation marks inside of a value are escaped: this stands only in its own place.
                mark = f'", "{status}", "'.encode()
                rows = [line for line in rows if mark in line]
            page = [Row(*json.loads(line.rstrip(b","))) for line in rows[start : start + count]]
        except (ValueError, TypeError) as error:
            raise SkillBankError(f"{path} is not a version of a skill bank: {error}") from error
        return page, len(rows)

    def read_item(self, sha: str) -> SkillItem:
        """A record, checked against its digest. SkillBankError when it is missing or damaged."""
        path = self.item_path(sha)
        return decode(self._read(path, sha, "skill"), str(path))

    def read_items(self, rows: Iterable[Row]) -> Iterator[SkillItem]:
        return (self.read_item(row.item) for row in rows)

    def write_items(self, records: Mapping[str, bytes]) -> None:
        """Store records under their digests; those that are there already are kept."""
        if not records:
            return
        missing = {s: data for s, data in records.items() if not _same(self.item_path(s), data)}
        tmp, target = self.path / "tmp", self.path / "items"
        with clear_disk_errors(target):
            tmp.mkdir(exist_ok=True)
            target.mkdir(exist_ok=True)
            self.barrier("before items")

            def write(sha: str) -> None:
                with (tmp / sha).open("wb") as file:
                    file.write(missing[sha])
                    file.flush()
                    os.fsync(file.fileno())

            with ThreadPoolExecutor(SYNC_THREADS) as pool:
                list(pool.map(write, missing))
            self.barrier("items written")
            for number, sha in enumerate(missing):
                (tmp / sha).replace(self.item_path(sha))
                if number == len(missing) // 2:
                    self.barrier("half of the items named")
            _sync_dir(target)
            tmp.rmdir()
        self.barrier("after items")

    def write_version(self, version: Version) -> str:
        """Store a version; returns its id."""
        data = version.encode()
        name = digest_bytes(data)
        path = self.version_path(name)
        if not _same(path, data):
            self.barrier("before version")
            atomic_write(path, data)
        self.barrier("after version")
        return name

    def clear_leftovers(self) -> None:
        """Remove what killed writers left. Only under the lock."""
        shutil.rmtree(self.path / "tmp", ignore_errors=True)
        for folder in (self.path, self.path / "versions"):
            for entry in folder.glob(".*.partial-*"):
                # The lock that we hold renews itself from a thread of ours.
                if f".partial-{os.getpid()}-" not in entry.name:
                    entry.unlink(missing_ok=True)

    def _read(self, path: Path, digest: str, what: str) -> bytes:
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise SkillBankError(f"{what} {digest[:12]} is missing: {path}; {_ADVICE}") from error
        except OSError as error:
            raise SkillBankError(f"{path} cannot be read: {error.strerror}") from error
        found = digest_bytes(data)
        if found != digest:
            raise SkillBankError(
                f"{what} {digest[:12]} is damaged: {path} has the digest {found[:12]}; {_ADVICE}"
            )
        return data


_ADVICE = (
    "see `distill skills validate` for everything that is wrong and `distill skills rollback` "
    "for the way back to a whole version"
)


def _same(path: Path, data: bytes) -> bool:
    """Whether the file holds exactly this; a damaged one is written again."""
    try:
        return path.read_bytes() == data
    except FileNotFoundError:
        return False


def _sync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_bank_file(path: Path) -> dict[str, Any]:
    """The content of `bank.json`. SkillBankError when it is damaged."""
    try:
        table = json.loads((path / "bank.json").read_text(encoding="utf-8"))
        return {"name": str(table["name"]), "capacity": int(table["capacity"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SkillBankError(f"{path / 'bank.json'} cannot be read: {error}") from error
