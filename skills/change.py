"""One transaction on a bank, in memory until it is committed.

Every change of a skill goes through `_put` or `_drop`, which keep the rows, the log lines and the
records to be written in step. Nothing here touches the disk except to read records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from distill.errors import ConfigError
from distill.rundir import digest_bytes, now
from skills.codec import encode
from skills.dedup import LEXICAL_RATIO, Vectors, find_duplicates
from skills.intake import AddOptions, Inspector, Outcome, take_in
from skills.items import Evidence, SkillItem, Status
from skills.lifecycle import (
    LIVE,
    Thresholds,
    Use,
    agreed,
    credited,
    may_promote,
    merged,
    must_retire,
    to_evict,
    voted,
    with_findings,
)
from skills.ops import Op, OpName
from skills.safety import inspect, is_quarantined, risk_of
from skills.utility import next_id
from skills.versions import Row, Store, Tombstone, Version, row_of

TEXTS = ("id", "title", "category", "principle", "when_to_apply", "body", "avoid")

_ID = re.compile(r"[^\s/\\\x00-\x1f\x7f]{1,128}")


class Change:
    """The bank as it will be. Made by `SkillBank.change`."""

    def __init__(self, store: Store, base: Version, *, actor: str, capacity: int) -> None:
        check_text(actor, "an actor")
        self.store = store
        self.base = base
        self.actor = actor
        self.capacity = capacity
        self.rows: dict[str, Row] = dict(base.rows)
        self.tombstones: dict[str, Tombstone] = dict(base.tombstones)
        self.ops: list[Op] = []
        self.records: dict[str, bytes] = {}
        self.evicted: list[str] = []
        self._items: dict[str, SkillItem] = {}

    # -- reading ---------------------------------------------------------------------------

    def get(self, skill_id: str) -> SkillItem:
        """A skill by id. ConfigError naming near ones when there is none."""
        row = self.rows.get(skill_id)
        if row is None:
            raise unknown(skill_id, self.rows)
        if row.item not in self._items:
            self._items[row.item] = self.store.read_item(row.item)
        return self._items[row.item]

    def items(self, *statuses: Status) -> list[SkillItem]:
        """Skills of these statuses, of all without."""
        rows = [row for row in self.rows.values() if not statuses or row.status in statuses]
        return [self.get(row.id) for row in rows]

    @property
    def num_live(self) -> int:
        return sum(row.status in LIVE for row in self.rows.values())

    def version(self) -> Version:
        return Version(rows=dict(self.rows), tombstones=dict(self.tombstones))

    # -- taking in -------------------------------------------------------------------------

    def add(
        self, items: Iterable[SkillItem], options: AddOptions | None = None, *, reason: str = ""
    ) -> list[Outcome]:
        """Take skills in: check, find repeats, store or merge. One outcome each, in order.

        The same call again changes nothing more."""
        return take_in(self, [_checked(i) for i in items], options or AddOptions(), reason)

    def insert(self, item: SkillItem, *, reason: str = "") -> None:
        """Store a new skill under its id without further questions."""
        _checked(item)
        if item.id in self.rows:
            raise ConfigError(f"there is a skill {item.id!r} already; edit or merge it")
        if not _ID.fullmatch(item.id):
            raise ConfigError(
                f"a skill id has 1 to 128 characters without spaces or slashes, got {item.id!r}"
            )
        self._refuse_retired(item)
        self._put("ADD", item.check(), reason)

    def free_id(self, prefix: str) -> str:
        return next_id(self.rows, prefix)

    # -- changing one skill ----------------------------------------------------------------

    def edit(
        self, item: SkillItem, *, reason: str = "", check: Inspector | None = inspect
    ) -> SkillItem:
        """Replace the skill with this id by `item`; returns what is stored now. Suspicious text
        goes to quarantine; status, credit and safety are not for editing."""
        old = self.get(_checked(item).id)
        if old.status == "retired":
            raise ConfigError(f"skill {item.id!r} is retired; restore it before editing it")
        new = replace(
            item, status=old.status, credit=old.credit, safety=old.safety, lineage=old.lineage
        )
        if new == old:
            return old
        if new.sha256 != old.sha256:
            self._refuse_retired(new)
            lineage = replace(
                old.lineage,
                op="EDIT",
                parents=tuple(dict.fromkeys((*old.lineage.parents, old.sha256))),
            )
            new = replace(new, lineage=lineage)
            findings = check(new) if check else ()
            if is_quarantined(findings):
                new = with_findings(new, [str(f) for f in findings], risk_of(findings))
        self._put("EDIT", new.check(), reason)
        return new

    def agree(self, skill_id: str, evidence: Sequence[Evidence], *, reason: str = "") -> bool:
        """More trajectories that show the same. False when they were known already."""
        old = self.get(skill_id)
        new = agreed(old, evidence)
        if new != old:
            self._put("AGREE", new, reason)
        return new != old

    def vote_down(self, skill_id: str, *, reason: str = "") -> bool:
        """ExpeL's REMOVE: one vote less, three when the bank is full. True if that was its end."""
        item = self.get(skill_id)
        full = 0 < self.capacity <= self.num_live
        votes = voted(item.credit.votes, "REMOVE", full=full)
        if votes <= 0:
            self._drop("REMOVE", skill_id, reason or "voted out")
        else:
            self._put("REMOVE", replace(item, credit=replace(item.credit, votes=votes)), reason)
        return votes <= 0

    def merge(self, into: str, others: Sequence[str], *, reason: str = "") -> SkillItem:
        """Skills of the bank become one: `into` keeps its text, the others go."""
        for other in dict.fromkeys(others):
            if other == into:
                raise ConfigError(f"skill {into!r} cannot be merged with itself")
            loser, item = self.get(other), self.get(into)
            for one in (loser, item):
                if one.status not in LIVE:
                    raise ConfigError(f"skill {one.id!r} is {one.status}; only live ones merge")
            self._put("MERGE", merged(item, loser), reason, other=self.rows[other].item)
            self._drop("REMOVE", other, f"merged into {into}")
        return self.get(into)

    def dedupe(
        self, *, lexical_ratio: float = LEXICAL_RATIO, vectors: Vectors | None = None
    ) -> list[tuple[str, str, str]]:
        """Merge live skills that repeat each other; pinned, active, useful and old ones keep
        their text. Returns (id that is gone, id that took it in, how alike they were)."""
        live = sorted(
            self.items(*LIVE),
            key=lambda i: (not i.pinned, i.status != "active", -i.credit.utility),
        )
        done: list[tuple[str, str, str]] = []
        into = [item.id for item in live]
        matches = find_duplicates([], live, vectors=vectors, lexical_ratio=lexical_ratio)
        for place, match in enumerate(matches):
            if match is not None:
                into[place] = into[match.index]
                how = f"{match.how} {match.score:.2f}"
                self.merge(into[place], [live[place].id], reason=f"repeat: {how}")
                done.append((live[place].id, into[place], how))
        return done

    def absorb(self, into: str, item: SkillItem, *, reason: str = "") -> None:
        """A skill that was offered becomes part of one of the bank."""
        data = encode(item)
        sha = digest_bytes(data)
        self.records[sha] = data
        self._put("MERGE", merged(self.get(into), item), reason, other=sha)

    def remove(self, skill_id: str, *, reason: str = "") -> None:
        """Drop a skill; its text may come back."""
        self.get(skill_id)
        self._drop("REMOVE", skill_id, reason)

    def retire(self, skill_id: str, *, reason: str) -> list[str]:
        """Take a skill out for good: its text cannot come back except by `restore`. Others with
        the very same text go with it; returns all ids."""
        _need(reason, "to retire")
        item = self.get(skill_id)
        if item.status == "retired":
            raise ConfigError(f"skill {skill_id!r} is retired already")
        content = item.sha256
        rows = self.rows.values()
        twins = [r.id for r in rows if r.content == content and r.status != "retired"]
        for twin in sorted(twins, key=lambda name: name == skill_id):
            self.tombstones[content] = Tombstone(id=twin, reason=reason)
            self._put("RETIRE", self.get(twin).with_status("retired"), reason, content=content)
        return twins

    def restore(self, skill_id: str, *, reason: str, status: Status = "candidate") -> SkillItem:
        """A retired or quarantined skill becomes a candidate again, because a person says so."""
        _need(reason, "to restore")
        if skill_id not in self.rows and any(g.id == skill_id for g in self.tombstones.values()):
            raise ConfigError(
                f"skill {skill_id!r} was retired, and the present version is older than it; go to "
                "one that holds it with: distill skills rollback (see: distill skills history), "
                "then restore it"
            )
        item = self.get(skill_id)
        if item.status in LIVE:
            raise ConfigError(f"skill {skill_id!r} is {item.status}; there is nothing to restore")
        if status not in LIVE:
            raise ConfigError(f"a restored skill is one of {', '.join(LIVE)}, got {status!r}")
        self.tombstones.pop(item.sha256, None)
        self._put("RESTORE", item.with_status(status), reason, content=item.sha256)
        return self.get(skill_id)

    def set_status(self, skill_id: str, status: Status, *, reason: str = "") -> None:
        """Candidate, active or quarantined. What is retired or in quarantine comes out only by
        `restore`."""
        item = self.get(skill_id)
        if status == "retired":
            self.retire(skill_id, reason=reason)
        elif item.status == status:
            return
        elif item.status not in LIVE:
            raise ConfigError(f"skill {skill_id!r} is {item.status}; restore it with a reason")
        else:
            self._put("STATUS", item.with_status(status), reason)

    def pin(self, skill_id: str, *, pinned: bool = True, reason: str = "") -> None:
        """Exempt a skill from eviction, or no longer."""
        item = self.get(skill_id)
        if item.pinned != pinned:
            self._put("PIN" if pinned else "UNPIN", replace(item, pinned=pinned), reason)

    # -- what measurements say -------------------------------------------------------------

    def credit(
        self, uses: Iterable[Use], rules: Thresholds | None = None, *, reason: str = ""
    ) -> list[Use]:
        """Count uses; returns those of skills that are gone or have another text by now."""
        rules, lost = rules or Thresholds(), []
        new: dict[str, SkillItem] = {}
        for use in uses:
            item = new.get(use.skill)
            if item is None and use.skill in self.rows:
                item = self.get(use.skill)
            if item is None or (use.content and use.content != item.sha256):
                lost.append(use)
                continue
            new[use.skill] = credited(item, use, rules)
        for item in new.values():
            self._put("CREDIT", item, reason)
        return lost

    def judge(self, rules: Thresholds | None = None) -> dict[str, str]:
        """Promote and retire what the thresholds say; returns the reason by id."""
        rules, done = rules or Thresholds(), {}
        for item in self.items(*LIVE):
            against = must_retire(item, rules)
            if against:
                self.retire(item.id, reason=against)
                done[item.id] = f"retired: {against}"
            elif item.status == "candidate" and may_promote(item, rules) is None:
                self.set_status(item.id, "active", reason="measured gain")
                done[item.id] = "promoted: measured gain"
        return done

    def evict(self, *, reason: str = "over capacity") -> list[str]:
        """Drop the least valuable skills above the capacity; returns their ids."""
        if self.capacity <= 0 or self.num_live <= self.capacity:
            return []
        live = {item.id: item for item in self.items(*LIVE)}
        gone = to_evict(self.rows.values(), live, self.capacity)
        for skill_id in gone:
            self._drop("EVICT", skill_id, reason)
        self.evicted += gone
        return gone

    # -- going back ------------------------------------------------------------------------

    def go_back(self, version_id: str, target: Version, *, reason: str = "") -> list[str]:
        """Become an earlier version. A skill that was retired since, or whose text was, stays
        retired; returns those ids."""
        check_text(reason, "a reason")
        self._log("ROLLBACK", reason, version=version_id)
        out = {row.id for row in self.rows.values() if row.status == "retired"}
        self.rows = dict(target.rows)
        self.tombstones = {**target.tombstones, **self.tombstones}
        kept = []
        for row in list(self.rows.values()):
            grave = self.tombstones.get(row.content)
            if self.rows[row.id].status != "retired" and (grave is not None or row.id in out):
                kept += self.retire(row.id, reason=grave.reason if grave else "retired since")
        return kept

    # -- the only two ways in which a row changes ------------------------------------------

    def _put(
        self,
        op: OpName,
        item: SkillItem,
        reason: str,
        *,
        other: str | None = None,
        content: str | None = None,
    ) -> None:
        check_text(reason, "a reason")
        data = encode(item)
        sha = digest_bytes(data)
        before = self.rows.get(item.id)
        self.records[sha] = data
        self._items[sha] = item
        self.rows[item.id] = row_of(item, sha)
        old = before.item if before else None
        self._log(op, reason, item=item.id, before=old, after=sha, other=other, content=content)

    def _drop(self, op: OpName, skill_id: str, reason: str) -> None:
        check_text(reason, "a reason")
        self._log(op, reason, item=skill_id, before=self.rows.pop(skill_id).item)

    def _log(self, op: OpName, reason: str, **what: str | None) -> None:
        line = Op(seq=0, at=now(), actor=self.actor, op=op, reason=reason)
        self.ops.append(replace(line, **what))  # type: ignore[arg-type]

    def _refuse_retired(self, item: SkillItem) -> None:
        grave = self.tombstones.get(item.sha256)
        if grave is not None:
            raise ConfigError(
                f"this text was retired as skill {grave.id!r} ({grave.reason}) and cannot come "
                f"back by adding it; if it should: distill skills restore {grave.id} --reason ..."
            )


def unknown(skill_id: str, known: Iterable[str]) -> ConfigError:
    from distill.tables import did_you_mean

    names = list(known)
    near = did_you_mean(skill_id, names)
    return ConfigError(
        f"no skill {skill_id!r} among the {len(names)} of the bank{near}; see: distill skills list"
    )


def _need(reason: str, what: str) -> None:
    if not reason.strip():
        raise ConfigError(f"{what} a skill needs a reason; it is kept in the history")
    check_text(reason, "a reason")


def _checked(item: SkillItem) -> SkillItem:
    """Itself. ConfigError when a text of it is no valid Unicode, so that it has no content hash."""
    for name in TEXTS:
        check_text(getattr(item, name), f"the {name} of a skill")
    for text in (item.scope.env, *item.scope.tools, *item.scope.models):
        check_text(text, "the scope of a skill")
    return item


def check_text(text: str, what: str) -> None:
    """ConfigError for what no file in UTF-8 can hold, such as bytes of another encoding that came
    from a command line."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} must be valid Unicode text, found {text[:60]!a} (at character "
            f"{error.start}); write it in UTF-8"
        ) from None
