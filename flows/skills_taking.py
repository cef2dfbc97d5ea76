"""How skills of a file get into a bank: what it says well of itself counts only when trusted.

Without trust a skill comes as a candidate without credit. Bad marks are believed: what is in
quarantine or retired where it comes from does not become a candidate by travelling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distill.errors import DistillError
from skills.intake import AddOptions, Outcome
from skills.interop.records import ORIGINAL_ID
from skills.items import slug
from skills.lifecycle import with_findings
from skills.safety import QUARANTINE

if TYPE_CHECKING:
    from skills.change import Change
    from skills.interop import Imported
    from skills.items import SkillItem, Status

ELSEWHERE = "retired where it comes from"
MAX_ID = 128
_UNFIT = re.compile(r"[\s/\\\x00-\x1f\x7f]")


def take(
    change: Change,
    found: Imported,
    graves: Mapping[str, str] | None,
    *,
    status: Status = "candidate",
    keep_repeats: bool = False,
    reason: str = "",
) -> list[Outcome]:
    """Take the skills of an import into a change, as `status`; one outcome each, in their order.

    `graves` is None for files of others. For one's own export it gives the reasons of retired
    texts by content hash; credit and status are kept then, and what is retired there is retired
    here. The text is checked either way. Doing it again changes nothing more.
    """
    own = [_with_fit_id(item) for item in found.items]
    if graves is not None:
        offered = own
    else:
        bare = replace(found, items=tuple(own)).unproven()
        offered = [_as_foreign(*pair, status) for pair in zip(bare, own, strict=True)]
    places = [i for i, item in enumerate(own) if item.status != "retired"]
    made = _add(change, [offered[i] for i in places], keep_repeats, reason)
    outcomes = dict(zip(places, made, strict=True))
    for i, item in enumerate(own):
        if item.status == "retired" and graves is None:
            outcomes[i] = Outcome(given=item.id, id="", result="refused", reason=ELSEWHERE)
        elif item.status == "retired":
            why = graves.get(item.sha256, "") if graves else ""
            outcomes[i] = _retire(change, item, why or reason or ELSEWHERE)
    return [outcomes[i] for i in range(len(own))]


def _with_fit_id(item: SkillItem) -> SkillItem:
    """Names of others may hold spaces or slashes, which no id of a bank does."""
    if len(item.id) <= MAX_ID and not _UNFIT.search(item.id):
        return item
    return replace(item, id=slug(item.id), extra={ORIGINAL_ID: item.id, **item.extra})


def _as_foreign(bare: SkillItem, given: SkillItem, status: Status) -> SkillItem:
    if given.status != "quarantined":
        return bare.with_status(status)
    reasons = given.safety.reasons or ("in quarantine where it comes from",)
    return with_findings(bare, reasons, max(QUARANTINE, given.safety.risk))


def _add(
    change: Change, items: Sequence[SkillItem], keep_repeats: bool, reason: str
) -> list[Outcome]:
    if not keep_repeats:
        return change.add(items, reason=reason)
    # What is there word for word is the same skill: else each import would add it once more.
    known = {row.content: row.id for row in change.rows.values() if row.status != "retired"}
    fresh = [item for item in items if item.sha256 not in known]
    added = iter(change.add(fresh, AddOptions(dedup=False), reason=reason))
    return [
        _seen(change, known[item.sha256], item, reason) if item.sha256 in known else next(added)
        for item in items
    ]


def _seen(change: Change, skill: str, item: SkillItem, reason: str) -> Outcome:
    grew = skill in change.rows and change.agree(skill, item.evidence, reason=reason)
    return Outcome(given=item.id, id=skill, result="agreed" if grew else "unchanged")


def _retire(change: Change, item: SkillItem, why: str) -> Outcome:
    """Put the text of a retired skill beyond the bank's reach, and keep the skill to look at."""
    grave = change.tombstones.get(item.sha256)
    if grave is not None:
        text = f"retired before ({grave.reason})"
        return Outcome(given=item.id, id=grave.id, result="unchanged", reason=text)
    twin = next((row.id for row in change.rows.values() if row.content == item.sha256), "")
    try:
        if not twin:
            taken = item.id in change.rows
            twin = change.free_id(AddOptions().prefix) if taken else item.id
            change.insert(replace(item, id=twin, status="candidate"), reason=why)
        change.retire(twin, reason=why)
    except DistillError as error:
        return Outcome(given=item.id, id="", result="refused", reason=str(error))
    return Outcome(given=item.id, id=twin, result="added", reason=f"retired: {why}")
