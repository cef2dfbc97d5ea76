"""What is generated must be current."""

from __future__ import annotations

from distill.objectives.table import README, render


def test_the_table_of_objectives_is_current():
    assert README.read_text(encoding="utf-8") == render(), "run: python -m distill.objectives.table"
