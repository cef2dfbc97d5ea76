"""SKILL.md folders: what is exported is valid everywhere, and comes back as it was."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distill.errors import DataError
from skills.interop import export_folder, import_path
from skills.interop.skillmd import cut, from_text, to_text
from skills.interop.validate import validate_folder
from skills.items import (
    KINDS,
    LEVELS,
    STATUSES,
    Credit,
    Evidence,
    Lineage,
    Safety,
    Scope,
    SkillItem,
)


def full_item(**changes: Any) -> SkillItem:
    values: dict[str, Any] = {
        "id": "pic_004",
        "title": "Verify container: before pickup",
        "kind": "workflow",
        "level": "step",
        "category": "pick_and_place",
        "principle": "Open a closed container first.",
        "when_to_apply": "a target may be inside furniture",
        "body": '# Steps\n1. Open it.\n\n2. Look: "inside".',
        "avoid": "Taking blindly.",
        "evidence": (Evidence(traj_id="t1", outcome="success", step=3),),
        "scope": Scope(env="kitchen", tools=("open", "take"), models=("m",)),
        "credit": Credit(utility=0.62, num_used=9, num_success=5, gain_low=-0.01, gain_high=0.3),
        "safety": Safety(risk=2, lineage_risk=3),
        "status": "active",
        "pinned": True,
        "lineage": Lineage(parents=("a", "b"), op="MERGE", run="tiny-1", author="policy"),
        "extra": {"license": "MIT", "metadata": {"author-site": "x"}, "model": ["a", {"b": 1}]},
    }
    return SkillItem(**(values | changes))


def write_skill(folder: Path, name: str, text: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "SKILL.md").write_text(text, encoding="utf-8")
    return folder / name


def test_every_field_comes_back_from_an_exported_folder(tmp_path: Path) -> None:
    items = (full_item(), SkillItem(id="x", title="Plain", principle="Just this."))
    done = export_folder(items, tmp_path / "out", bank_version="17")
    assert (done.num_written, done.refused) == (2, ())
    found = import_path(tmp_path / "out")
    assert sorted(found.items, key=lambda i: i.id) == list(items)
    assert (found.skipped, found.warnings, found.format) == ((), (), "skillmd")


def test_an_exported_skill_reads_well(tmp_path: Path) -> None:
    export_folder([full_item(extra={})], tmp_path / "out", bank_version="17")
    text = (tmp_path / "out" / "verify-container-before-pickup" / "SKILL.md").read_text()
    assert text.startswith(
        "---\nname: verify-container-before-pickup\n"
        "description: Open a closed container first. Use when a target may be inside furniture\n"
        "metadata:\n"
    )
    assert '  utility: "0.620000"\n  uses: "9"\n' in text
    assert '  bank-version: "17"\n' in text
    assert text.endswith('Look: "inside".\n\n## Avoid <!-- skill:avoid -->\nTaking blindly.\n')


def test_what_the_file_itself_holds_survives_without_the_lock(tmp_path: Path) -> None:
    item = full_item()
    export_folder([item], tmp_path / "out")
    (tmp_path / "out" / "bank.lock.json").unlink()
    (found,) = import_path(tmp_path / "out").items
    assert found.sha256 == item.sha256
    for name in ("id", "title", "kind", "level", "category", "principle", "when_to_apply", "body"):
        assert getattr(found, name) == getattr(item, name), name
    assert (found.status, found.pinned, found.scope) == (item.status, item.pinned, item.scope)
    assert (found.credit.utility, found.credit.num_used, found.safety.risk) == (0.62, 9, 2)
    assert (found.lineage.parents, found.lineage.run) == (("a", "b"), "tiny-1")
    assert found.extra == item.extra


def test_an_edited_file_loses_the_credit_of_its_former_text(tmp_path: Path) -> None:
    export_folder([full_item()], tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*/SKILL.md")
    path.write_text(path.read_text().replace("Taking blindly", "Taking fast"))
    (found,) = import_path(tmp_path / "out").items
    assert found.avoid == "Taking fast."
    assert found.evidence == ()


@pytest.mark.parametrize(
    "lock", ["{", "[]", '{"format": 2, "skills": {}}', '{"format":1,"skills":{"a":1}}']
)
def test_a_damaged_lock_is_a_warning(tmp_path: Path, lock: str) -> None:
    export_folder([full_item()], tmp_path / "out")
    (tmp_path / "out" / "bank.lock.json").write_text(lock)
    found = import_path(tmp_path / "out")
    assert len(found.items) == 1
    assert "damaged" in found.warnings[0]


def test_a_lock_with_a_wrong_entry_skips_that_skill(tmp_path: Path) -> None:
    export_folder([full_item()], tmp_path / "out")
    path = tmp_path / "out" / "bank.lock.json"
    lock = json.loads(path.read_text())
    lock["skills"][full_item().sha256]["pic_004"]["credit"] = "much"
    path.write_text(json.dumps(lock))
    ((where, reason),) = import_path(tmp_path / "out").skipped
    assert where.endswith("SKILL.md")
    assert "credit" in reason


def random_item(draw: random.Random, number: int) -> SkillItem:
    letters = "abc de. :#'\"\\[]{}&|>%@`\n漢é-_/<!*~ Use when "

    def text(most: int) -> str:
        made = "".join(draw.choice(letters) for _ in range(draw.randint(0, most)))
        return made.replace("---", "-").strip("\n")

    return SkillItem(
        id=f"s{number}",
        title=text(20) + "t",
        kind=draw.choice(KINDS),
        level=draw.choice(LEVELS),
        category=text(8) or "general",
        principle=text(40) if draw.random() < 0.8 else text(3000),
        when_to_apply=text(30),
        body=text(200) + "b",
        avoid=text(30),
        credit=Credit(utility=round(draw.random(), 6), num_used=draw.randint(0, 9)),
        status=draw.choice(STATUSES),
        extra={"k": [text(5), {"x": None}], "metadata": {"site": text(5) + "x"}},
    )


def test_import_after_export_is_the_identity_on_random_skills(tmp_path: Path) -> None:
    draw = random.Random(1)
    items = {f"s{n}": random_item(draw, n) for n in range(120)}
    done = export_folder(list(items.values()), tmp_path / "out")
    assert done.num_written + len(done.refused) == 120
    assert done.num_written > 112
    found = import_path(tmp_path / "out")
    assert found.skipped == ()
    assert len(found.items) == done.num_written
    assert all(item == items[item.id] for item in found.items)
    for folder in (tmp_path / "out").iterdir():
        if folder.is_dir():
            assert [p for p in validate_folder(folder) if p.is_error] == []


@pytest.mark.parametrize("field", ["title", "category", "principle", "id"])
def test_three_hyphens_in_the_front_matter_are_refused_and_counted(
    tmp_path: Path, field: str
) -> None:
    done = export_folder(
        [full_item(**{field: "before --- after"}), full_item(id="good")], tmp_path / "out"
    )
    assert done.num_written == 1
    assert "---" in done.refused[0][1]


def test_three_hyphens_in_the_body_are_fine(tmp_path: Path) -> None:
    item = full_item(body="above\n---\nbelow")
    export_folder([item], tmp_path / "out")
    assert import_path(tmp_path / "out").items == (item,)


def test_a_body_that_imitates_our_marks_comes_back(tmp_path: Path) -> None:
    item = full_item(body="## Avoid <!-- skill:avoid -->\n<!-- skill::x --> <!-- skill:")
    export_folder([item], tmp_path / "out")
    assert import_path(tmp_path / "out").items == (item,)


def test_a_long_principle_is_cut_at_a_word_and_kept_in_full_below(tmp_path: Path) -> None:
    item = full_item(principle="word " * 400 + "end.")
    export_folder([item], tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*/SKILL.md")
    description = path.read_text().splitlines()[2].removeprefix("description: ")
    assert 1019 <= len(description) <= 1024
    assert description.endswith("word")
    assert import_path(tmp_path / "out").items == (item,)
    assert cut("x" * 30, 10) == "x" * 10


def test_equal_titles_get_different_folders_and_come_back(tmp_path: Path) -> None:
    items = (full_item(id="a"), full_item(id="b", body="other"), full_item(id="c", title="漢"))
    items = (*items, full_item(id="d", title="字"))
    done = export_folder(items, tmp_path / "out")
    assert done.num_written == 4
    assert sorted(import_path(tmp_path / "out").items, key=lambda i: i.id) == list(items)


def test_a_finished_folder_is_never_overwritten(tmp_path: Path) -> None:
    export_folder([full_item()], tmp_path / "out")
    with pytest.raises(DataError, match="exists already"):
        export_folder([], tmp_path / "out")


# -- files of others ----------------------------------------------------------------------------


def test_a_foreign_skill_keeps_what_we_do_not_know(tmp_path: Path) -> None:
    text = (
        "---\nname: pdf-tools\ndescription: Fill forms. Use when there is a PDF.\nversion: 1.2\n"
        "license: MIT\nallowed-tools: Bash Read\nmetadata:\n  author: someone\n  kind: odd\n"
        "user-invocable: true\nhooks:\n  - a\n---\n# PDF\nDo it.\n"
    )
    write_skill(tmp_path, "pdf-tools", text)
    found = import_path(tmp_path)
    (item,) = found.items
    assert (item.id, item.title, item.kind, item.status) == (
        *("pdf-tools", "Pdf tools", "workflow", "candidate"),
    )
    assert (item.principle, item.when_to_apply) == ("Fill forms.", "there is a PDF.")
    assert item.extra["version"] == "1.2"
    assert item.extra["hooks"] == ["a"]
    assert item.extra["metadata"] == {"kind": "odd"}
    assert item.lineage.author == "someone"
    assert "has no meaning" in found.warnings[0]
    export_folder(found.items, tmp_path / "out")
    assert validate_folder(tmp_path / "out" / "pdf-tools") == []
    assert import_path(tmp_path / "out").items == (item,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("---\nname: a\n---\nbody", "no description"),
        ("---\nname: a\ndescription:\n---\nbody", "no description"),
        ("no front matter", "must begin"),
        ("---\nname: a\ndescription: d\n\tx\n---\n", "tab"),
        ("---\nname: a\ndescription: d\n", "no closing"),
    ],
)
def test_an_unusable_file_is_skipped_and_counted(tmp_path: Path, text: str, reason: str) -> None:
    write_skill(tmp_path, "a", text)
    write_skill(tmp_path, "b", "---\nname: b\ndescription: good\n---\n")
    found = import_path(tmp_path)
    assert [i.id for i in found.items] == ["b"]
    ((where, why),) = found.skipped
    assert where == "a/SKILL.md"
    assert reason in why


@pytest.mark.parametrize(
    ("folder", "text", "warning"),
    [
        ("other", "---\nname: a\ndescription: d\n---\n", "must be equal"),
        ("a", "---\ndescription: d\n---\n", "no name"),
        ("a" * 70, f"---\nname: {'a' * 70}\ndescription: d\n---\n", "70 characters"),
        ("a", "---\nname: a\ndescription: Run: now\n---\n", "quotes"),
        ("a", f"---\nname: a\ndescription: {'d' * 1100}\n---\n", "1100 characters"),
    ],
)
def test_what_lenient_clients_accept_is_a_warning(
    tmp_path: Path, folder: str, text: str, warning: str
) -> None:
    write_skill(tmp_path, folder, text)
    found = import_path(tmp_path)
    assert len(found.items) == 1
    assert any(warning in w for w in found.warnings), found.warnings


def test_a_single_file_is_a_skill_too(tmp_path: Path) -> None:
    folder = write_skill(tmp_path, "a", "---\nname: a\ndescription: d\n---\nBody")
    (folder / "SKILL.md").rename(folder / "skill.md")
    assert import_path(folder / "skill.md").items == import_path(folder).items
    assert import_path(folder).items[0].body == "Body"


def test_other_files_of_a_skill_are_mentioned(tmp_path: Path) -> None:
    folder = write_skill(tmp_path, "a", "---\nname: a\ndescription: d\n---\n")
    (folder / "scripts").mkdir()
    (folder / "scripts" / "run.sh").write_text("x")
    (warning,) = import_path(tmp_path).warnings
    assert "1 other files were not imported" in warning


def test_strangers_start_as_candidates_without_credit(tmp_path: Path) -> None:
    export_folder([full_item()], tmp_path / "out")
    (item,) = import_path(tmp_path / "out").unproven()
    assert (item.status, item.pinned, item.credit) == ("candidate", False, Credit())
    assert replace(item, status="active", pinned=True, credit=full_item().credit) == full_item()


def test_text_and_item_are_inverse_without_any_folder() -> None:
    item = full_item(evidence=(), safety=Safety(risk=2), lineage=Lineage())
    item = replace(item, credit=Credit(utility=0.62, num_used=9, num_success=5))
    found, warnings = from_text(to_text(item, item.slug), item.slug)
    assert found == item
    assert warnings == []
