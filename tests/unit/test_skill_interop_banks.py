"""Banks of others: SkillRL in its three shapes, lists of lessons, and our own lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill.errors import ConfigError, DataError
from skills.interop import FORMATS, export_path, import_path
from skills.items import Credit, Evidence, Lineage, SkillItem


def rule(number: str, **changes: Any) -> dict[str, Any]:
    return {
        "skill_id": number,
        "title": f"Title {number}",
        "principle": f"Principle {number}.",
        "when_to_apply": "Always.",
        **changes,
    }


def mistake(number: str, **changes: Any) -> dict[str, Any]:
    return {
        "mistake_id": number,
        "description": "Taking an object out of a closed box, again and again and again. " * 2,
        "why_it_happens": "Haste.",
        "how_to_avoid": "Open it first.",
        **changes,
    }


def released(key: str, distribution: str) -> dict[str, Any]:
    return {
        "general_skills": [rule("gen_001"), rule("dyn_001", example="optional")],
        key: {"clean": [rule("cle_001")], "cool": [rule("coo_001"), rule("coo_002")]},
        "common_mistakes": [mistake("err_001", severity=3)],
        "metadata": {"source": "o3", "total_memories_analyzed": 5, distribution: {"clean": 2}},
        "note": "kept",
    }


SHAPES = [
    released("task_specific_skills", "task_distribution"),
    released("task_specific_skills", "product_distribution"),
    released("query_type_skills", "query_type_distribution"),
]


def save(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize("bank", SHAPES)
def test_every_released_shape_is_read_whole_and_written_back(
    tmp_path: Path, bank: dict[str, Any]
) -> None:
    found = import_path(save(tmp_path / "in.json", bank))
    assert found.format == "skillrl"
    assert (found.skipped, found.warnings) == ((), ())
    by_id = {item.id: item for item in found.items}
    assert (by_id["coo_002"].category, by_id["coo_002"].level) == ("cool", "task")
    assert (by_id["gen_001"].level, by_id["err_001"].kind) == ("general", "mistake")
    assert by_id["err_001"].avoid == bank["common_mistakes"][0]["description"]
    assert len(by_id["err_001"].title) <= 80
    export_path(found.items, tmp_path / "out.json", "skillrl", extra=found.extra)
    assert json.loads((tmp_path / "out.json").read_text()) == bank
    again = import_path(tmp_path / "out.json")
    assert (again.items, again.extra) == (found.items, found.extra)


def test_ids_that_two_categories_share_stay_apart_and_go_back(tmp_path: Path) -> None:
    bank = {
        "task_specific_skills": {"cool": [rule("coo_001")], "cook": [rule("coo_001", title="T")]}
    }
    found = import_path(save(tmp_path / "in.json", bank))
    assert len({item.id for item in found.items}) == 2
    assert "coo_001" in found.warnings[0]
    export_path(found.items, tmp_path / "out.json", "skillrl", extra=found.extra)
    assert (
        json.loads((tmp_path / "out.json").read_text())["task_specific_skills"]
        == bank["task_specific_skills"]
    )


def test_entries_that_are_no_skills_are_counted_with_their_place(tmp_path: Path) -> None:
    bank = {
        "general_skills": [rule("a"), "text", rule("b", title=""), rule("c", principle=None)],
        "task_specific_skills": {"x": "nothing", "y": [rule("d", skill_id=None)]},
        "query_type_skills": [],
        "common_mistakes": [
            mistake("e", description=7),
            mistake("f", how_to_avoid="", why_it_happens=""),
        ],
    }
    found = import_path(save(tmp_path / "in.json", bank))
    assert [i.id for i in found.items] == ["a", "y_001"]
    assert [where for where, _ in found.skipped] == [
        *("general_skills[1]", "general_skills[2]", "general_skills[3]"),
        *(
            "task_specific_skills.x",
            "query_type_skills",
            "common_mistakes[0]",
            "common_mistakes[1]",
        ),
    ]


def test_steps_that_the_format_has_no_place_for_are_mentioned(tmp_path: Path) -> None:
    item = SkillItem(id="a", title="A", principle="p.", body="1. x")
    done = export_path([item], tmp_path / "out.json", "skillrl")
    assert "1 skills have steps" in done.warnings[0]


# -- lists --------------------------------------------------------------------------------------


def test_expel_rules_keep_their_counters(tmp_path: Path) -> None:
    rules = [["Look before you take.", 5], ["Open closed boxes.", 2]]
    found = import_path(save(tmp_path / "rules.json", rules))
    assert [(i.principle, i.credit.votes, i.level) for i in found.items] == [
        ("Look before you take.", 5, "general"),
        ("Open closed boxes.", 2, "general"),
    ]
    export_path(found.items, tmp_path / "out.json", "expel")
    assert json.loads((tmp_path / "out.json").read_text()) == rules
    assert import_path(tmp_path / "out.json").items == found.items


@pytest.mark.parametrize(
    "value",
    [
        ["Look.", "Open."],
        {"rules": [["Look.", 2], ["Open.", 2]]},
        [{"rule": "Look.", "count": 2}, {"rule": "Open.", "count": 2}],
        "1. Look.\n2) Open.\n",
    ],
)
def test_expel_rules_in_other_clothes(tmp_path: Path, value: Any) -> None:
    found = import_path(save(tmp_path / "rules.txt", value))
    assert [(i.id, i.principle) for i in found.items] == [
        ("expel_001", "Look."),
        ("expel_002", "Open."),
    ]


PLAYBOOK = """## STRATEGIES & INSIGHTS
[shr-00001] helpful=3 harmful=1 :: Check units: always [twice].
[shr-00002] helpful=0 harmful=0 :: Ask first.

## COMMON MISTAKES
[err-00003] helpful=1 harmful=0 :: Never round early.
"""


def test_a_playbook_keeps_its_sections_and_counts(tmp_path: Path) -> None:
    found = import_path(save(tmp_path / "playbook.md", PLAYBOOK))
    assert found.format == "ace"
    first = found.items[0]
    assert (first.id, first.category) == ("shr-00001", "strategies_and_insights")
    assert first.credit == Credit(num_used=4, num_success=3)
    export_path(found.items, tmp_path / "out.md", "ace")
    assert (tmp_path / "out.md").read_text() == PLAYBOOK
    assert import_path(tmp_path / "out.md").items == found.items


def test_lines_that_are_no_bullets_are_counted(tmp_path: Path) -> None:
    found = import_path(save(tmp_path / "p.txt", PLAYBOOK + "stray\n[x] helpful=1 :: y\n"))
    assert len(found.items) == 3
    assert [where for where, _ in found.skipped] == ["line 7", "line 8"]


MEMORY = """# Memory Item 1
## Title
Sort first
## Description
Sorting saves pages.
## Content
Sort by date before reading.

# Memory Item 2
## Title Filter
## Description
x
## Content
Use the filter.
"""


def test_memories_of_a_reasoning_bank_are_found_in_rows_and_text(tmp_path: Path) -> None:
    row = {
        "task_id": 47,
        "query": "q",
        "status": "fail",
        "think_list": ["t"],
        "memory_items": MEMORY,
    }
    rows = json.dumps(row) + "\n" + json.dumps({"task_id": 1, "memory_items": "nothing"}) + "\n"
    found = import_path(save(tmp_path / "bank.jsonl", rows))
    assert [(i.id, i.title, i.principle) for i in found.items] == [
        ("mem_001", "Sort first", "Sort by date before reading."),
        ("mem_002", "Filter", "Use the filter."),
    ]
    assert found.items[0].evidence == (Evidence(traj_id="47", outcome="failure"),)
    assert found.items[0].extra == {"description": "Sorting saves pages."}
    assert found.skipped == (("line 2", "its memory has no title and content"),)
    assert "trajectories of 1 rows" in found.warnings[0]
    text = import_path(save(tmp_path / "bank.md", MEMORY))
    assert [i.title for i in text.items] == ["Sort first", "Filter"]
    export_path(text.items, tmp_path / "out.json", "reasoningbank")
    assert import_path(tmp_path / "out.json").items == text.items


def test_items_of_ucob_keep_utility_count_and_the_rest(tmp_path: Path) -> None:
    row = {
        **{"memory_id": "m1", "task_category": "heat", "title": "T", "principle": "P."},
        **{"when_to_apply": "W", "utility_score": 0.7, "count": 4, "reflection": "R"},
    }
    (item,) = import_path(save(tmp_path / "m.json", [row])).items
    assert (item.id, item.category, item.when_to_apply) == ("m1", "heat", "W")
    assert item.credit == Credit(utility=0.7, num_used=4)
    assert item.extra == {"reflection": "R"}


# -- lines --------------------------------------------------------------------------------------


def test_lines_hold_everything_and_keep_unknown_keys(tmp_path: Path) -> None:
    items = (
        SkillItem(
            id="a",
            title="A \u2028 title",
            body="x\ny",
            evidence=(Evidence(traj_id="t", outcome="failure"),),
            credit=Credit(utility=0.1 + 0.2, gain_low=-0.1),
            lineage=Lineage(parents=("p",), created_step=3),
            status="retired",
            extra={"k": [1, None, {"x": 2.5}]},
        ),
        SkillItem(id="b", title="B", principle="p."),
    )
    export_path(items, tmp_path / "bank.jsonl", "jsonl")
    assert import_path(tmp_path / "bank.jsonl").items == items
    rows = (tmp_path / "bank.jsonl").read_text().split("\n")
    changed = {**json.loads(rows[1]), "colour": "red"}
    save(tmp_path / "bank.jsonl", rows[0] + "\n" + json.dumps(changed) + "\n")
    assert import_path(tmp_path / "bank.jsonl").items[1].extra == {"colour": "red"}


def test_broken_lines_are_skipped_with_their_number(tmp_path: Path) -> None:
    good = json.dumps({"id": "a", "title": "A", "kind": "principle", "principle": "p."})
    bad = [
        "{",
        "7",
        json.dumps({"id": "b", "title": "B", "kind": "odd", "principle": "p."}),
        json.dumps({"id": "c", "title": "C"}),
        json.dumps({"id": "d", "title": "D", "principle": "p.", "format": 9}),
        json.dumps({"title": "E"}),
    ]
    found = import_path(save(tmp_path / "x.jsonl", "\n".join([good, *bad]) + "\n\n"))
    assert [i.id for i in found.items] == ["a"]
    assert sorted(where for where, _ in found.skipped) == [f"line {n}" for n in range(2, 8)]


def test_a_second_line_with_an_id_gets_another_one(tmp_path: Path) -> None:
    row = {"id": "a", "title": "A", "kind": "principle", "principle": "p."}
    rows = [row, {**row, "principle": "q."}, {**row, "principle": "q."}]
    found = import_path(save(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows))))
    assert len({i.id for i in found.items}) == 2
    assert len(found.skipped) == 1


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("x.json", "{", "not valid JSON"),
        ("x.json", '{"a": 1}', "no skill bank"),
        ("x.json", "[]", "no skill bank"),
        ("x.json", "[" * 100_000, "not valid JSON"),
        ("x.txt", "just prose", "no skill bank"),
    ],
)
def test_unknown_files_say_what_was_expected(
    tmp_path: Path, name: str, content: str, word: str
) -> None:
    with pytest.raises(DataError, match=word):
        import_path(save(tmp_path / name, content))


def test_paths_that_are_nothing_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        import_path(tmp_path / "none")
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        import_path(tmp_path / "x.json")
    unknown: Any = "xml"
    with pytest.raises(ConfigError, match=", ".join(FORMATS)):
        export_path([], tmp_path / "x", unknown)
