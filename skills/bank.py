"""A bank of skills on disk: many readers without a lock, one writer, every version kept.

    bank = SkillBank.open(home, "main")
    with bank.change(actor="me") as change:
        change.add([item])
        change.pin("gen_001")

A change is one new version and one run of lines in the log. It appears as a whole or not at all,
whatever happens to the process; what a killed writer left is dropped by the next one.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from distill.errors import ConfigError, SkillBankError
from distill.lock import Lock
from distill.rundir import now, staged_dir, write_json
from distill.tables import did_you_mean
from skills.change import Change, check_text, unknown
from skills.intake import AddOptions, Outcome
from skills.items import SkillItem, Status
from skills.lexical import lexical_search
from skills.lifecycle import Thresholds, Use
from skills.ops import (
    Op,
    append_ops,
    cut_uncommitted,
    find_version,
    read_ops,
    replay,
)
from skills.versions import Barrier, Row, Store, Version, no_barrier, read_bank_file

logger = logging.getLogger(__name__)
CAPACITY = 100
"""Live skills of a new bank; 0 is no limit."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Search = Callable[[str, int], Sequence[tuple[str, float]]]
"""A query and k -> at most k ids with their similarity, best first."""


class SkillBank:
    """One bank. Reading takes no lock and always sees one whole version."""

    def __init__(
        self, path: Path, *, search: Search | None = None, barrier: Barrier = no_barrier
    ) -> None:
        self.path = path
        self.store = Store(path, barrier=barrier)
        self.capacity: int = read_bank_file(path)["capacity"]
        self._search = search

    # -- finding and making ----------------------------------------------------------------

    @classmethod
    def create(
        cls, home: Path, name: str, *, capacity: int = CAPACITY, actor: str = "distill"
    ) -> SkillBank:
        """A new, empty bank. ConfigError for a bad name or one that is taken."""
        check_text(actor, "an actor")
        path = _folder(home, name)
        if path.exists():
            raise ConfigError(f"there is a bank {name!r} already in {home / 'bank'}")
        if capacity < 0:
            raise ConfigError(f"capacity must be 0 (no limit) or more, got {capacity}")
        with staged_dir(path) as partial:
            store = Store(partial)
            bank = {"format": 1, "name": name, "capacity": capacity, "created": now()}
            write_json(partial / "bank.json", bank)
            (partial / "items").mkdir()
            version = store.write_version(Version())
            line = Op(seq=1, at=now(), actor=actor, op="ACTIVATE", reason="init", version=version)
            append_ops(store.ops_path, [line])
            store.write_pointer(version)
        return cls(path)

    @classmethod
    def open(
        cls,
        home: Path,
        name: str,
        *,
        search: Search | None = None,
        barrier: Barrier = no_barrier,
    ) -> SkillBank:
        """An existing bank. ConfigError naming those that exist."""
        path = _folder(home, name)
        if not (path / "bank.json").is_file():
            known = cls.names(home)
            listed = ", ".join(known) or "none; make one with: distill skills init"
            near = did_you_mean(name, known)
            raise ConfigError(f"no bank {name!r} in {home / 'bank'}{near}; banks: {listed}")
        return cls(path, search=search, barrier=barrier)

    @staticmethod
    def names(home: Path) -> list[str]:
        return sorted(path.parent.name for path in (home / "bank").glob("*/bank.json"))

    @property
    def name(self) -> str:
        return self.path.name

    # -- reading ---------------------------------------------------------------------------

    def snapshot(self) -> str:
        """Id of the active version: name it in a run, and the same skills can be read later."""
        return self.store.read_pointer()

    def version(self, prefix: str | None = None) -> Version:
        """The active version, or the one whose id begins with `prefix`."""
        return self.store.read_version(self.resolve(prefix))

    def resolve(self, prefix: str | None = None) -> str:
        """The full id of a version; of the active one without a prefix."""
        if prefix is None:
            return self.snapshot()
        return find_version(read_ops(self.store.ops_path), prefix)

    def rows(self, *statuses: Status, version: str | None = None) -> list[Row]:
        """What a version says about its skills, without reading them."""
        rows = self.version(version).rows.values()
        return [row for row in rows if not statuses or row.status in statuses]

    def page(
        self, start: int, count: int, *, status: str = "", version: str | None = None
    ) -> tuple[list[Row], int]:
        """Some rows in the order in which the skills came, and how many there are."""
        return self.store.read_page(self.resolve(version), start, count, status)

    def items(self, *statuses: Status, version: str | None = None) -> list[SkillItem]:
        """Skills of these statuses (of all without), in the order in which they came."""
        return list(self.store.read_items(self.rows(*statuses, version=version)))

    def get(self, skill_id: str, *, version: str | None = None) -> SkillItem:
        rows = self.version(version).rows
        if skill_id not in rows:
            raise unknown(skill_id, rows)
        return self.store.read_item(rows[skill_id].item)

    def history(self, skill_id: str = "") -> list[Op]:
        """Every committed line of the log, oldest first; those of one skill with an id."""
        ops = read_ops(self.store.ops_path)
        return [op for op in ops if op.item == skill_id] if skill_id else ops

    def search(self, query: str, k: int = 6) -> list[tuple[SkillItem, float]]:
        """The best live skills for a query: by the index that was handed in, else by words."""
        version = self.version()
        if self._search is None:
            live = [row for row in version.rows.values() if row.status in ("active", "candidate")]
            return lexical_search(list(self.store.read_items(live)), query, k)
        found = [(version.rows.get(name), score) for name, score in self._search(query, k)]
        return [(self.store.read_item(row.item), score) for row, score in found if row]

    # -- changing --------------------------------------------------------------------------

    @contextlib.contextmanager
    def change(
        self, *, actor: str = "distill", dry_run: bool = False, wait: float = 0.0
    ) -> Iterator[Change]:
        """A transaction: committed when the block ends without an error. With `dry_run` it is
        thought through and forgotten. ConfigError when another writer holds the bank for longer
        than `wait` seconds."""
        if dry_run:
            yield Change(self.store, self.version(), actor=actor, capacity=self.capacity)
            return
        with self._writing(wait) as (last, base):
            change = Change(self.store, base, actor=actor, capacity=self.capacity)
            yield change
            self._commit(change, last)

    def add(
        self,
        items: Iterable[SkillItem],
        options: AddOptions | None = None,
        *,
        actor: str = "distill",
        reason: str = "",
    ) -> list[Outcome]:
        """Take skills in; one outcome each, in order. Doing it again changes nothing more."""
        with self.change(actor=actor) as change:
            return change.add(items, options, reason=reason)

    def record(
        self,
        uses: Iterable[Use],
        rules: Thresholds | None = None,
        *,
        actor: str = "distill",
        reason: str = "",
    ) -> list[Use]:
        """Count uses into the credit of the skills. Returns those that could not be counted,
        because the skill is gone or says something else by now."""
        with self.change(actor=actor) as change:
            return change.credit(uses, rules, reason=reason)

    def rollback(
        self, to: str | None = None, *, actor: str = "distill", reason: str = ""
    ) -> tuple[str, list[str]]:
        """Make an earlier version the active one again; by default the one before the last change.

        Returns the id that is active now, and the skills that stay retired although that version
        still had them: a skill that was taken out for good does not come back by accident."""
        with self.change(actor=actor) as change:
            kept = self.undo(change, to, reason=reason)
        return change.version().id, kept

    def undo(self, change: Change, to: str | None = None, *, reason: str = "") -> list[str]:
        """The rollback inside of a change; returns the skills that stay retired."""
        ops = read_ops(self.store.ops_path)
        target = find_version(ops, to) if to is not None else before_last(ops)
        version = self.store.read_version(target)
        return [] if version == change.base else change.go_back(target, version, reason=reason)

    def recover(self, *, wait: float = 0.0) -> str:
        """What every change does first: drop what a killed writer left, and rebuild from the log
        what is missing. Returns the id of the active version."""
        with self._writing(wait) as (last, _):
            return str(last.version)

    @contextlib.contextmanager
    def _writing(self, wait: float) -> Iterator[tuple[Op, Version]]:
        """The lock, and a bank without leftovers: its last ACTIVATE line and that version."""
        with self._lock(wait):
            dropped, last = cut_uncommitted(self.store.ops_path)
            if dropped:
                logger.info("%s: dropped %d bytes of an unfinished change", self.path, dropped)
            self.store.clear_leftovers()
            active = str(last.version)
            try:
                base = self.store.read_version(active)
            except SkillBankError as error:
                base = self._rebuilt(active, error)
            if not self._points_to(active):
                self.store.write_pointer(active)
            yield last, base

    @contextlib.contextmanager
    def _lock(self, wait: float) -> Iterator[None]:
        deadline = time.monotonic() + wait
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(
                        Lock(self.store.lock_path, f"writer of skill bank {self.name!r}")
                    )
                    break
                except ConfigError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.05)
            yield

    def _points_to(self, version: str) -> bool:
        try:
            return self.store.read_pointer() == version
        except SkillBankError:
            return False

    def _rebuilt(self, wanted: str, error: SkillBankError) -> Version:
        """The active version out of the log, when its file is missing or damaged."""
        *_, (_, version) = replay(self.store, read_ops(self.store.ops_path))
        if self.store.write_version(version) != wanted:
            raise error
        logger.warning("%s: rebuilt version %s from the log: %s", self.path, wanted[:12], error)
        return version

    def _commit(self, change: Change, last: Op) -> None:
        if not change.ops:
            return
        self.store.write_items(change.records)
        version = self.store.write_version(change.version())
        end = Op(
            seq=0,
            at=now(),
            actor=change.actor,
            op="ACTIVATE",
            version=version,
            previous=last.version,
        )
        lines = [replace(op, seq=last.seq + n) for n, op in enumerate([*change.ops, end], start=1)]
        self.store.barrier("before log")
        append_ops(self.store.ops_path, lines)
        self.store.barrier("after log")
        self.store.write_pointer(version)


def before_last(ops: Sequence[Op]) -> str:
    """The version that a rollback leads to: undoing goes further back each time, never forward."""
    line: list[str] = []
    target: str | None = None
    for op in ops:
        if op.op == "ROLLBACK":
            target = op.version
        elif op.op == "ACTIVATE":
            version = str(op.version)
            if target is not None and target in line:
                del line[line.index(target) :]
            if not line or line[-1] != version:
                line.append(version)
            target = None
    if len(line) < 2:
        raise ConfigError("the bank has had no version before this one; nothing to roll back")
    return line[-2]


def require_name(name: str) -> None:
    """ConfigError for what cannot be the name of a bank."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "the name of a bank has 1 to 64 letters, digits, dots, hyphens and underscores and "
            f"begins with a letter or digit, got {name!r}"
        )


def _folder(home: Path, name: str) -> Path:
    require_name(name)
    return home / "bank" / name
