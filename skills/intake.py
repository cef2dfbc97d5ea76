"""How offered skills get into a bank: checked, compared with what is there, stored or merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from distill.errors import DistillError
from skills.dedup import Match, Vectors, find_duplicates
from skills.items import SkillItem
from skills.lifecycle import LIVE, with_findings
from skills.safety import Finding, inspect, is_quarantined, risk_of

if TYPE_CHECKING:
    from skills.change import Change

Inspector = Callable[[SkillItem], Sequence[Finding]]
Result = Literal["added", "quarantined", "merged", "agreed", "unchanged", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one skill that was offered."""

    given: str
    """The id it came with."""
    id: str
    """The skill that stands for it now; empty when it was refused."""
    result: Result
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AddOptions:
    """How skills are taken in."""

    dedup: bool = True
    """Merge what repeats a skill of the bank. Off, an import keeps every skill."""
    inspect: Inspector = inspect
    """Checks on the text; partial of `safety.inspect` where answers are known."""
    vectors: Vectors | None = None
    """Also merge what is near in meaning."""
    limit: int | None = None
    """At most so many skills more; the rest is refused, first come, first served."""
    prefix: str = "dyn_"
    """For skills without an id, or whose id is taken."""


def take_in(
    change: Change, items: Sequence[SkillItem], options: AddOptions, reason: str
) -> list[Outcome]:
    """See `Change.add`."""
    old = change.items() if options.dedup and items else []
    offered = [_checked(item, options) for item in items]
    found: Sequence[Match | None] = [None] * len(items)
    if options.dedup:
        found = find_duplicates(old, offered, vectors=options.vectors)
    ids = [item.id for item in old]
    outcomes: list[Outcome] = []
    num_new = 0
    for given, item, match in zip(items, offered, found, strict=True):
        # A repeat of something that was itself refused stands for nothing: it is judged afresh.
        original = ids[match.index] if match else ""
        if match is not None and original:
            outcome = _repeat(change, item, match, original, reason)
        elif options.limit is not None and num_new >= options.limit:
            outcome = _refused(item, f"at most {options.limit} new skills per change")
        else:
            outcome = _new(change, item, options, reason)
            num_new += outcome.result != "refused"
        outcomes.append(replace(outcome, given=given.id))
        ids.append(outcome.id)
    gone = set(change.evict())
    if gone:
        outcomes = [
            replace(o, id="", result="refused", reason="worth less than what the bank holds")
            if o.id in gone and o.result in ("added", "merged", "agreed")
            else o
            for o in outcomes
        ]
    return outcomes


def _checked(item: SkillItem, options: AddOptions) -> SkillItem:
    findings = options.inspect(item)
    if not is_quarantined(findings) or item.status == "retired":
        return item
    return with_findings(item, [str(finding) for finding in findings], risk_of(findings))


def _new(change: Change, item: SkillItem, options: AddOptions, reason: str) -> Outcome:
    grave = change.tombstones.get(item.sha256)
    if grave is not None:
        return _refused(item, f"retired before as {grave.id} ({grave.reason})")
    if item.status == "retired":
        return _refused(item, "it comes as retired")
    note = ""
    if not item.id or item.id in change.rows:
        fresh = change.free_id(options.prefix)
        note = f"id {item.id} was taken" if item.id else ""
        item = replace(item, id=fresh)
    try:
        change.insert(item, reason=reason)
    except DistillError as error:
        return _refused(item, str(error))
    if item.status == "quarantined":
        return Outcome(
            given="", id=item.id, result="quarantined", reason="; ".join(item.safety.reasons)
        )
    return Outcome(given="", id=item.id, result="added", reason=note)


def _repeat(change: Change, item: SkillItem, match: Match, original: str, reason: str) -> Outcome:
    kept = change.get(original)
    if kept.status == "retired":
        grave = change.tombstones.get(kept.sha256)
        why = grave.reason if grave else "no reason known"
        return _refused(item, f"repeats {original} ({match.how}), which was retired: {why}")
    if item.status == "quarantined" and kept.status in LIVE:
        # Suspicious words must not reach a live skill as its evidence or lineage.
        text = "; ".join(item.safety.reasons)
        return _refused(item, f"repeats {original} ({match.how}) with suspicious text: {text}")
    if match.how == "content":
        grew = change.agree(original, item.evidence, reason=reason)
        return Outcome(given="", id=original, result="agreed" if grew else "unchanged")
    known = set(kept.lineage.parents)
    if item.sha256 in known and set(item.evidence) <= set(kept.evidence):
        return Outcome(given="", id=original, result="unchanged", reason="merged before")
    how = f"{match.how} {match.score:.2f}"
    change.absorb(original, item, reason=f"{reason + '; ' if reason else ''}repeat: {how}")
    return Outcome(given="", id=original, result="merged", reason=how)


def _refused(item: SkillItem, why: str) -> Outcome:
    return Outcome(given=item.id, id="", result="refused", reason=why)
