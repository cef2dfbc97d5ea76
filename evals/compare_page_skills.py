"""What a comparison says about turns and skills, where some contender has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evals.compare_page_facts import Results, Row
from evals.compare_page_words import changed, share, signed, signed_count
from evals.markup import Html, el, none_cell, number_cell, section, table


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    name: str
    about: str
    tell: Callable[[Row], Html | None]
    """A cell, or None for a row that has nothing to say."""


def skills_section(results: Results) -> Html | None:
    """A table of turns and skills; None when no contender has any of it."""
    columns = _columns(results)
    if not columns:
        return None
    rows = results.table.rows
    body = [
        el(
            "tr",
            el("th", row.name, scope="row"),
            *(column.tell(row) or none_cell() for column in columns),
        )
        for row in rows
    ]
    caption = "At the end, mean of the seeds, in the order of the table above"
    grid = table(caption, ["Contender"], [column.name for column in columns], body, kind="ranks")
    about_turns = any(row.turns is not None for row in rows)
    about_skills = any(_has_skills(row) for row in rows)
    title = "Turns and skills" if about_turns and about_skills else "Skills"
    return section("skills", title if about_skills else "Turns", None, grid)


def skills_facts(results: Results) -> list[tuple[str, str]]:
    """What the columns mean, those that are shown."""
    return [(column.name, column.about) for column in _columns(results)]


def _columns(results: Results) -> list[_Column]:
    rows = results.table.rows
    columns = [
        _Column(
            name="Turns",
            about="mean turns of the greedy attempt at a task, failed ones included",
            tell=lambda row: None if row.turns is None else number_cell(f"{row.turns:.2f}"),
        ),
        _Column(
            name=f"Turns against {results.table.baseline}",
            about="the difference in turns, paired task by task, seeds pooled; 95 % interval",
            tell=_fewer,
        ),
        _Column(
            name="Skills withheld",
            about="accuracy without the skills that the prompts otherwise show; below, in points, "
            "the difference to the end: what is in the prompt and not in the weights",
            tell=_withheld,
        ),
        _Column(
            name="Notes valid",
            about="share of the hindsight that could be read",
            tell=lambda row: _share(row.notes_valid),
        ),
        _Column(
            name="Notes right",
            about="share of the hindsight that says what the tasks' own lessons say",
            tell=lambda row: _share(row.notes_correct),
        ),
        _Column(
            name="Skills added",
            about="to the bank while training",
            tell=lambda row: number_cell(f"{row.skills_added:.3g}") if row.skills_added else None,
        ),
    ]
    return [column for column in columns if any(column.tell(row) for row in rows)]


def _has_skills(row: Row) -> bool:
    known = (row.withheld, row.notes_valid, row.notes_correct)
    return row.skills_added > 0 or any(value is not None for value in known)


def _fewer(row: Row) -> Html | None:
    return None if row.turns_against is None else changed(row.turns_against, signed_count)


def _share(value: float | None) -> Html | None:
    return None if value is None else number_cell(share(value))


def _withheld(row: Row) -> Html | None:
    if row.withheld is None:
        return None
    return number_cell(share(row.withheld), f"{signed(row.withheld - row.end)} points")
