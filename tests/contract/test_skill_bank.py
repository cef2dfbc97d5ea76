"""What everything that calls itself a skill bank promises (`distill.protocols.SkillBank`)."""

from __future__ import annotations

import pytest

from distill.protocols import SkillBank as Seam
from skills.bank import SkillBank
from skills.items import SkillItem
from skills.lifecycle import Use


@pytest.fixture
def bank(tmp_path) -> Seam[SkillItem, Use]:
    return SkillBank.create(tmp_path, "main")


def skill(name: str, says: str) -> SkillItem:
    return SkillItem(id=name, title=says.split(".")[0], principle=says, status="active")


HEAT = skill("gen_001", "Warm the soup on the stove. Then serve it.")
OPEN = skill("gen_002", "Open a drawer before you look for keys in it.")


def test_what_was_added_is_found_best_first_and_again_adds_nothing(bank):
    before = bank.snapshot()
    assert len(bank.add([HEAT, OPEN])) == 2
    found = bank.search("where are the keys in the drawer", k=2)
    assert found[0][0].id == "gen_002"
    assert [score for _, score in found] == sorted((s for _, s in found), reverse=True)
    named = bank.snapshot()
    assert named != before
    bank.add([HEAT, OPEN])
    assert bank.snapshot() == named


def test_uses_move_the_credit_and_those_of_unknown_skills_are_given_back(bank):
    bank.add([HEAT])
    lost = bank.record([Use(skill="gen_001", success=True), Use(skill="nobody", success=True)])
    assert [use.skill for use in lost] == ["nobody"]
    (item, _) = bank.search("warm soup", k=1)[0]
    assert (item.credit.num_used, item.credit.num_success) == (1, 1)
