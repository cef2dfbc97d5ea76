"""Skills and a bank with every kind of them, for the tests of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skills.bank import SkillBank
from skills.items import Credit, Safety, SkillItem


def skill(name: str, text: str = "", **more: Any) -> SkillItem:
    title = more.pop("title", f"About {name}")
    return SkillItem(id=name, title=title, principle=text or f"Say {name} aloud.", **more)


def make_own(home: Path) -> SkillBank:
    """A bank with skills of every status, some of which were measured."""
    bank = SkillBank.create(home, "own", actor="tester")
    credit = Credit(utility=0.75, num_used=9, num_success=6)
    with bank.change() as change:
        change.insert(skill("gen_001", status="active", credit=credit, level="general"))
        change.insert(skill("heat_001", category="heat", status="active", pinned=True))
        change.insert(skill("cool_001", "Let it stand.", category="cool"))
        safety = Safety(risk=4, reasons=("leak: it states the answer of a task",))
        change.insert(skill("held_001", "The answer is 42.", status="quarantined", safety=safety))
        change.insert(skill("old_001", "Always turn left."))
        change.retire("old_001", reason="it ran in circles")
    return bank
