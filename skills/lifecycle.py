"""What becomes of a skill: credit, merging, promotion, retirement, eviction. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from distill.errors import SkillBankError
from skills.items import Credit, Evidence, Safety, SkillItem, Status, normal
from skills.utility import moved
from skills.versions import Row

LIVE: tuple[Status, ...] = ("candidate", "active")
"""Statuses that count against the capacity."""
Vote = Literal["ADD", "EDIT", "AGREE", "REMOVE"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """When a skill is promoted, retired or evicted."""

    ema: float = 0.2
    """Share of the newest credit in a utility."""
    min_sightings: int = 2
    """Distinct trajectories that must have shown it before it is used."""
    min_pairs: int = 16
    """Matched rollouts with and without, before a gain is believed."""
    min_gain_low: float = -0.02
    """Lower bound of the gain's interval that still promotes."""
    max_harm: int = 2
    """Harm events that retire it."""
    min_utility: float = 0.25
    """Less than this retires it ..."""
    min_uses: int = 20
    """... once it has been used so often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """One rollout that had a skill at hand, and what came of it."""

    skill: str
    success: bool
    credit: float | None = None
    """What the use was worth in [0, 1]; None: 1 for a success, else 0."""
    num_without: int = 0
    """Matched rollouts of the same task and seed without the skill ..."""
    num_success_without: int = 0
    """... and how many of them succeeded."""
    harm: bool = False
    tokens_saved: float | None = None
    """Tokens of the rollouts without it minus tokens with it."""
    interval: tuple[float, float] | None = None
    """The paired gain so far, from whoever measured it."""
    content: str = ""
    """Content hash of what was used; a skill whose text is another by now gets no credit."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.worth <= 1.0:
            raise SkillBankError(f"use of {self.skill}: credit must be in [0, 1], got {self.worth}")
        if not 0 <= self.num_success_without <= self.num_without:
            raise SkillBankError(
                f"use of {self.skill}: {self.num_success_without} successes among "
                f"{self.num_without} rollouts without it"
            )

    @property
    def worth(self) -> float:
        return float(self.success) if self.credit is None else self.credit


def credited(item: SkillItem, use: Use, rules: Thresholds) -> SkillItem:
    """The skill after one use: utility moves towards the credit, counts grow."""
    old, low_high = item.credit, use.interval or (item.credit.gain_low, item.credit.gain_high)
    saved = old.tokens_saved
    if use.tokens_saved is not None:
        saved += (use.tokens_saved - saved) / (old.num_used + 1)
    credit = replace(
        old,
        utility=moved(old.utility, use.worth, rules.ema),
        num_used=old.num_used + 1,
        num_success=old.num_success + use.success,
        num_without=old.num_without + use.num_without,
        num_success_without=old.num_success_without + use.num_success_without,
        gain_low=low_high[0],
        gain_high=low_high[1],
        tokens_saved=saved,
    )
    safety = replace(item.safety, num_harm=item.safety.num_harm + use.harm)
    return replace(item, credit=credit, safety=safety)


def gain(credit: Credit) -> float | None:
    """Success rate with the skill minus without; None before both were seen."""
    if not credit.num_used or not credit.num_without:
        return None
    return credit.num_success / credit.num_used - credit.num_success_without / credit.num_without


def may_promote(item: SkillItem, rules: Thresholds) -> str | None:
    """None when a candidate may become active, else what is missing."""
    seen = len({one.traj_id for one in item.evidence})
    credit, found = item.credit, gain(item.credit)
    pairs = min(credit.num_used, credit.num_without)
    if item.status != "candidate":
        return f"it is {item.status}, not a candidate"
    if seen < rules.min_sightings:
        return f"seen in {seen} of {rules.min_sightings} trajectories"
    if found is None or pairs < rules.min_pairs:
        return f"{pairs} of {rules.min_pairs} matched rollouts"
    if found <= 0:
        return f"no gain: {found:+.3f}"
    if credit.gain_low is None or credit.gain_low <= rules.min_gain_low:
        return f"lower bound of the gain {credit.gain_low} is not above {rules.min_gain_low}"
    return None


def must_retire(item: SkillItem, rules: Thresholds) -> str | None:
    """Why a skill must go, or None."""
    credit = item.credit
    if item.safety.num_harm >= rules.max_harm:
        return f"{item.safety.num_harm} harm events"
    if credit.num_used >= rules.min_uses and credit.utility < rules.min_utility:
        return f"utility {credit.utility:.3f} after {credit.num_used} uses"
    return None


def merged(into: SkillItem, other: SkillItem) -> SkillItem:
    """`into` with what was learned about `other`: its text, id and status stay.

    Utility is weighted by uses (equally when neither was used), counts add up, evidence is united,
    both become parents, and the higher risk counts."""
    weight = other.credit.num_used / max(1, into.credit.num_used + other.credit.num_used)
    if not into.credit.num_used and not other.credit.num_used:
        weight = 0.5
    a, b = into.credit, other.credit
    credit = replace(
        a,
        utility=(1 - weight) * a.utility + weight * b.utility,
        num_used=a.num_used + b.num_used,
        num_success=a.num_success + b.num_success,
        num_without=a.num_without + b.num_without,
        num_success_without=a.num_success_without + b.num_success_without,
        # The interval belonged to other counts: whoever measures gives a new one.
        gain_low=a.gain_low if not b.num_used else None,
        gain_high=a.gain_high if not b.num_used else None,
        tokens_saved=(1 - weight) * a.tokens_saved + weight * b.tokens_saved,
        votes=voted(a.votes, "AGREE"),
    )
    x, y = into.safety, other.safety
    safety = replace(
        x,
        risk=max(x.risk, y.risk),
        lineage_risk=max(x.lineage_risk, y.lineage_risk, y.risk),
        num_harm=x.num_harm + y.num_harm,
        reasons=_united(x.reasons, y.reasons) if into.status == "quarantined" else x.reasons,
    )
    parents = _united(into.lineage.parents, (into.sha256, other.sha256), other.lineage.parents)
    return replace(
        into,
        evidence=_evidence(into.evidence, other.evidence),
        credit=credit,
        safety=safety,
        pinned=into.pinned or other.pinned,
        lineage=replace(into.lineage, parents=parents, op="MERGE"),
    )


def agreed(item: SkillItem, evidence: Sequence[Evidence]) -> SkillItem:
    """The skill with more evidence for the same text; itself when nothing of it is new."""
    union = _evidence(item.evidence, evidence)
    if len(union) == len(item.evidence):
        return item
    credit = replace(item.credit, votes=voted(item.credit.votes, "AGREE"))
    return replace(item, evidence=union, credit=credit)


def voted(votes: int, op: Vote, *, full: bool = False) -> int:
    """ExpeL's counter after one more vote. A rule whose counter is not positive is deleted."""
    if op == "ADD":
        return 2
    return votes + 1 if op in ("AGREE", "EDIT") else votes - (3 if full else 1)


def with_findings(item: SkillItem, reasons: Sequence[str], risk: int) -> SkillItem:
    """The skill in quarantine for these reasons."""
    safety: Safety = replace(
        item.safety,
        risk=max(item.safety.risk, risk),
        reasons=_united(item.safety.reasons, tuple(reasons)),
    )
    return replace(item, status="quarantined", safety=safety)


def to_evict(rows: Iterable[Row], items: dict[str, SkillItem], capacity: int) -> list[str]:
    """Ids to drop so that at most `capacity` live skills remain, the least valuable first.

    Value is utility - risk/5. Pinned skills and the last one of a category stay, so more than
    `capacity` may be left. Among equals the less used goes, then the younger."""
    live = [row for row in rows if row.status in LIVE]
    excess = len(live) - capacity
    if capacity <= 0 or excess <= 0:
        return []
    order = sorted(
        range(len(live)),
        key=lambda i: (value(items[live[i].id]), items[live[i].id].credit.num_used, -i),
    )
    left = Counter(normal(row.category) for row in live)
    gone: list[str] = []
    for i in order:
        category = normal(live[i].category)
        if len(gone) == excess:
            break
        if not items[live[i].id].pinned and left[category] > 1:
            left[category] -= 1
            gone.append(live[i].id)
    return gone


def value(item: SkillItem) -> float:
    return item.credit.utility - item.safety.risk / 5


def _united(*groups: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry for group in groups for entry in group))


def _evidence(*groups: Sequence[Evidence]) -> tuple[Evidence, ...]:
    return tuple(dict.fromkeys(entry for group in groups for entry in group))
