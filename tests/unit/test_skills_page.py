"""The page of a bank: it says what the bank says, and whatever a skill holds stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from distill.errors import ConfigError, SkillBankError
from distill.rundir import digest_bytes
from flows.cli import main
from skills.bank import SkillBank
from skills.codec import encode
from skills.intake import AddOptions
from skills.items import Credit, Evidence, Lineage, Safety, SkillItem
from skills.lifecycle import Use
from skills.ops import Op, append_ops
from skills.page import build_page, is_page
from skills.page_facts import CHANGES, EVENTS, LISTED, visible
from skills.versions import Version, row_of
from tree import ROOT

HOSTILE = "</script><!--<script><img src=x onerror=alert(1)>```\"'&$data${script}"
KEEP_ALL = AddOptions(dedup=False)
AT = "2026-01-01T00:00:00+00:00"


class Page(HTMLParser):
    """Checks that elements close in order; collects tags, attributes and inline texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[tuple[str, str]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.inline.append((self.open[-1], data))
        else:
            self.words += data

    @property
    def data(self) -> Any:
        return json.loads(next(text for tag, text in self.inline if tag == "script"))

    def meta(self, name: str) -> str:
        found = [a for tag, a in self.tags if tag == "meta" and name in a.values()]
        return str(found[0]["content"])


def skill(number: int, **fields: Any) -> SkillItem:
    values: dict[str, Any] = {
        "id": f"s{number}",
        "title": f"Skill {number}",
        "principle": f"Look {number} times.",
        "category": "kitchen",
    }
    return SkillItem(**(values | fields))


@pytest.fixture
def bank(tmp_path: Path) -> SkillBank:
    return SkillBank.create(tmp_path, "main", capacity=20, actor="test")


def page_of(bank: SkillBank, **options: Any) -> Page:
    return Page(build_page(bank, **options))


def found(page: Page, name: str) -> dict[str, Any]:
    (one,) = [skill for skill in page.data["skills"] if skill["id"] == name]
    return dict(one)


# -- numbers -------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_bank(bank: SkillBank) -> None:
    bank.add([skill(n, status="active" if n < 2 else "candidate") for n in range(5)], KEEP_ALL)
    uses = [
        Use(skill="s1", success=n < 3, num_without=2, num_success_without=1, interval=(-0.1, 0.6))
        for n in range(4)
    ]
    bank.record(uses)
    with bank.change(actor="lena") as change:
        change.retire("s4", reason="wrong")
    page = page_of(bank)
    item = bank.get("s1")
    credit = found(page, "s1")["credit"]
    assert credit["utility"] == item.credit.utility
    assert (credit["num_used"], credit["num_success"]) == (4, 3)
    assert (credit["num_without"], credit["num_success_without"]) == (8, 4)
    assert credit["gain"] == pytest.approx(0.75 - 0.5)
    assert (credit["gain_low"], credit["gain_high"], credit["measured"]) == (-0.1, 0.6, True)
    assert found(page, "s0")["credit"]["measured"] is False
    assert found(page, "s0")["credit"]["gain"] is None
    assert page.data["statuses"] == {"active": 2, "candidate": 2, "retired": 1}
    tiles = re.findall(r"<dd>(.*?)</dd><dt>(.*?)</dt>", build_page(bank))
    assert tiles == [
        ("2", "Active"),
        ("2", "Candidates"),
        ("0", "In quarantine"),
        ("1", "Retired"),
        ("1<small>of 5</small>", "Measured"),
        ("4<small>of 20 live</small>", "Capacity"),
    ]
    assert "2 active skills of 5" in page.words
    assert bank.snapshot()[:12] in page.words
    assert "Made by lena" in page.words


def test_a_skill_comes_with_its_text_evidence_lineage_reasons_and_history(bank: SkillBank) -> None:
    item = skill(
        1,
        when_to_apply="At night.",
        body="1. Open\n2. Look",
        avoid="Guessing.",
        evidence=(Evidence(traj_id="t1", outcome="failure", step=3),),
        safety=Safety(risk=4, reasons=("leak: it states the answer",)),
        lineage=Lineage(parents=("p",), author="m", run="r", prompt_version="v2", created_step=7),
        extra={"source": {"page": 4}},
    )
    bank.add([item], KEEP_ALL, actor="nightly", reason="learned")
    with bank.change(actor="lena") as change:
        change.edit(replace(change.get("s1"), avoid="Guessing twice."), reason="clearer")
    shown = found(page_of(bank), "s1")
    assert shown["when"] == "At night."
    assert shown["body"] == "1. Open\n2. Look"
    assert shown["avoid"] == "Guessing twice."
    assert shown["evidence"] == [["t1", "failure", 3]]
    assert shown["safety"]["reasons"] == ["leak: it states the answer"]
    assert shown["lineage"]["parents"] == ["p", item.sha256]
    assert [shown["lineage"][k] for k in ("author", "run", "created_step")] == ["m", "r", 7]
    assert json.loads(shown["extra"]) == {"source": {"page": 4}}
    assert [event[2:] for event in shown["history"]] == [
        ["ADD", "nightly", "learned"],
        ["EDIT", "lena", "clearer"],
    ]
    assert shown["since"] == shown["history"][0][1]


def test_a_long_history_is_cut_to_its_newest_lines(bank: SkillBank) -> None:
    bank.add([skill(1)], KEEP_ALL)
    for _ in range(EVENTS + 4):
        bank.record([Use(skill="s1", success=True)])
    shown = found(page_of(bank), "s1")
    assert [event[2] for event in shown["history"]] == ["CREDIT"] * EVENTS
    assert shown["num_earlier"] == 5


def test_an_older_version_is_shown_as_it_was_then(bank: SkillBank) -> None:
    bank.add([skill(1)], KEEP_ALL)
    old = bank.snapshot()
    bank.add([skill(2)], KEEP_ALL)
    bank.record([Use(skill="s1", success=True)])
    page = page_of(bank, version=old[:8])
    assert [one["id"] for one in page.data["skills"]] == ["s1"]
    assert found(page, "s1")["credit"]["measured"] is False
    assert [event[2] for event in found(page, "s1")["history"]] == ["ADD"]
    assert [change["ends"][1] for change in page.data["changes"]] == [old]


def test_a_rollback_is_told_to_every_skill_and_among_the_changes(bank: SkillBank) -> None:
    bank.add([skill(1)], KEEP_ALL)
    first = bank.snapshot()
    with bank.change() as change:
        change.edit(replace(change.get("s1"), principle="Something else."), reason="worse")
    bank.rollback(first, actor="lena", reason="it was worse")
    page = page_of(bank)
    ((_, _, op, actor, why),) = page.data["rollbacks"]
    assert (op, actor) == ("ROLLBACK", "lena")
    assert why == f"to version {first[:12]}: it was worse"
    assert found(page, "s1")["principle"] == "Look 1 times."
    newest = page.data["changes"][0]
    assert newest["ops"] == {"ROLLBACK": 1}
    assert ["principle", "Something else.", "Look 1 times."] in newest["edits"][0][3]


# -- what changed --------------------------------------------------------------------------


def test_a_change_names_what_was_added_removed_and_every_field_that_differs(
    bank: SkillBank,
) -> None:
    bank.add([skill(1), skill(2)], KEEP_ALL)
    with bank.change(actor="lena") as change:
        change.edit(replace(change.get("s1"), principle="Look twice."))
        change.remove("s2", reason="known")
        change.insert(skill(3))
    newest, first = page_of(bank).data["changes"]
    assert (newest["counts"], newest["actor"]) == ([1, 1, 1], "lena")
    assert newest["ops"] == {"EDIT": 1, "REMOVE": 1, "ADD": 1}
    assert newest["added"] == [["s3", "Skill 3", "candidate", "Look 3 times."]]
    assert newest["removed"] == [["s2", "Skill 2", "candidate", "Look 2 times."]]
    ((name, _, _, fields),) = newest["edits"]
    assert name == "s1"
    assert ["principle", "Look 1 times.", "Look twice."] in fields
    assert ["lineage.parents", "", skill(1).sha256] in fields
    assert first["counts"] == [2, 0, 0]


def test_against_puts_the_difference_that_was_asked_for_first(bank: SkillBank) -> None:
    for number in range(3):
        bank.add([skill(number)], KEEP_ALL)
    start = page_of(bank).data["changes"][-1]["ends"][0]
    changes = page_of(bank, against=start[:12]).data["changes"]
    assert len(changes) == 4
    assert changes[0]["ends"] == [start, bank.snapshot()]
    assert [entry[0] for entry in changes[0]["added"]] == ["s0", "s1", "s2"]
    with pytest.raises(ConfigError, match="stands for 0 versions"):
        build_page(bank, against="zzz")


def test_only_the_last_changes_are_there_and_a_huge_one_is_counted_not_listed(
    tmp_path: Path,
) -> None:
    bank = SkillBank.create(tmp_path, "big", capacity=0)
    bank.add([skill(n) for n in range(LISTED + 7)], KEEP_ALL)
    (only,) = page_of(bank).data["changes"]
    assert only["counts"] == [LISTED + 7, 0, 0]
    assert len(only["added"]) == LISTED
    for _ in range(CHANGES + 2):
        bank.record([Use(skill="s1", success=True)])
    assert len(page_of(bank).data["changes"]) == CHANGES


def test_an_older_version_that_is_damaged_is_named_in_its_place(bank: SkillBank) -> None:
    for number in range(3):
        bank.add([skill(number)], KEEP_ALL)
    old = page_of(bank).data["changes"][1]["ends"][1]
    bank.store.version_path(old).unlink()
    changes = page_of(bank).data["changes"]
    assert [f"version {old[:12]} is missing" in change["problem"] for change in changes] == [
        True,
        True,
        False,
    ]
    with pytest.raises(SkillBankError, match="is missing"):
        build_page(bank, version=old)


# -- untrusted text ------------------------------------------------------------------------


def test_hostile_text_adds_no_element_and_no_attribute(tmp_path: Path, bank: SkillBank) -> None:
    plain = page_of(bank)
    evil = SkillBank.create(tmp_path, "evil", actor=HOSTILE)
    item = skill(
        1,
        title=HOSTILE,
        category=HOSTILE,
        principle=HOSTILE,
        when_to_apply=HOSTILE,
        body=f"```\n{HOSTILE}",
        avoid=HOSTILE,
        evidence=(Evidence(traj_id=HOSTILE, outcome="success"),),
        lineage=Lineage(author=HOSTILE, parents=(HOSTILE,)),
        extra={HOSTILE: HOSTILE},
    )
    evil.add([item], KEEP_ALL, reason=HOSTILE)
    page = page_of(evil)
    ours = [tag for tag, _ in plain.tags if tag not in ("div", "p", "pre", "small", "noscript")]
    theirs = [tag for tag, _ in page.tags if tag not in ("div", "p", "pre", "small", "noscript")]
    assert theirs == ours
    assert not [name for _, attributes in page.tags for name in attributes if name[:2] == "on"]
    shown = found(page, "s1")
    assert shown["title"] == shown["principle"] == shown["lineage"]["author"] == HOSTILE
    assert "Made by distill" in page.words
    assert build_page(evil).count("</script>") == 2


def test_the_policy_allows_exactly_the_two_inline_parts_of_the_page(bank: SkillBank) -> None:
    bank.add([skill(1, body=HOSTILE)], KEEP_ALL)
    page = page_of(bank)
    (style,) = [text for tag, text in page.inline if tag == "style"]
    _, script = [text for tag, text in page.inline if tag == "script"]
    rules = dict(rule.split(" ", 1) for rule in page.meta("Content-Security-Policy").split("; "))
    for name, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert not [a for _, a in page.tags if {"src", "style"} & set(a)]
    assert [a["href"] for tag, a in page.tags if "href" in a] == ["#main"]


def test_the_script_never_parses_markup_and_asks_nobody() -> None:
    script = (ROOT / "skills" / "page.js").read_text(encoding="utf-8")
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert word not in script
    for word in ("fetch(", "XMLHttpRequest", "import(", "WebSocket", "localStorage", "cookie"):
        assert word not in script


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("one\r\ntwo\rthree", "one\ntwo\u27e8U+000D\u27e9three"),
        ("\x1b[31mred\x00", "\u27e8U+001B\u27e9[31mred\u27e8U+0000\u27e9"),
        ("a\u202eb\u2066c", "a\u27e8U+202E\u27e9b\u27e8U+2066\u27e9c"),
        ("zero\u200bwidth\ufeff", "zero\u27e8U+200B\u27e9width\u27e8U+FEFF\u27e9"),
        ("tag\U000e0041", "tag\u27e8U+E0041\u27e9"),
        ("filler\u3164\u2800", "filler\u27e8U+3164\u27e9\u27e8U+2800\u27e9"),
        ("half\ud800", "half\u27e8U+D800\u27e9"),
        ("a\ufe0fb\ufe01\U000e0100", "a\u27e8U+FE0F\u27e9b\u27e8U+FE01\u27e9\u27e8U+E0100\u27e9"),
        ("\u2714\ufe0f done", "\u2714\ufe0f done"),
        ("\u00e4\u00f6 \u062a\u062d \u4e2d\u6587 \U0001f600", None),
    ],
)
def test_what_a_reader_would_not_see_stands_as_its_code(text: str, shown: str | None) -> None:
    assert visible(text) == (text if shown is None else shown)


def test_unseen_characters_of_a_skill_reach_the_page_as_codes(bank: SkillBank) -> None:
    bank.add([skill(1, title="Safe\u202e", principle="Zero\u200bwidth \u2028 line")], KEEP_ALL)
    text = build_page(bank)
    assert not set("\u202e\u200b\u2028") & set(text)
    shown = found(Page(text), "s1")
    assert shown["title"] == "Safe\u27e8U+202E\u27e9"
    assert shown["status"] == "quarantined"


# -- the page itself -----------------------------------------------------------------------


def test_an_empty_bank_says_what_to_do(bank: SkillBank) -> None:
    page = page_of(bank)
    assert "This bank is empty" in page.words
    assert "distill skills add skills.toml --bank main" in page.words
    assert page.data["skills"] == page.data["changes"] == []
    (finder,) = [a for _, a in page.tags if a.get("id") == "finder"]
    assert "hidden" in finder


def test_the_same_bank_gives_the_same_page(bank: SkillBank) -> None:
    bank.add([skill(n) for n in range(3)], KEEP_ALL)
    assert build_page(bank) == build_page(SkillBank(bank.path))


def sheet(path: str) -> list[dict[str, str]]:
    """The colours of a style sheet: light, dark and print."""
    text = (ROOT / path).read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", text, flags=re.DOTALL)
    return [dict(re.findall(r"--(\w+): (#\w+);", block)) for block in blocks]


def test_colours_are_those_of_the_other_pages_and_easy_to_read() -> None:
    for ours, theirs in zip(sheet("skills/page.css"), sheet("evals/report.css"), strict=True):
        common = set(ours) & set(theirs)
        assert common >= {"page", "card", "line", "grid", "ink", "soft", "code", "after"}
        assert {name: ours[name] for name in common} == {name: theirs[name] for name in common}
        for name in ("ink", "soft", "good", "wait", "bad"):
            for ground in ("page", "card"):
                assert contrast(ours[name], ours[ground]) >= 4.5
        assert contrast(ours["ink"], ours["code"]) >= 4.5
        for name in ("edge", "after"):
            assert contrast(ours[name], ours["card"]) >= 3


def contrast(one: str, other: str) -> float:
    """Ratio of two colours by WCAG 2."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> SkillBank:
    """5,000 skills and their log, written as a change writes them but without its checks."""
    bank = SkillBank.create(tmp_path_factory.mktemp("large"), "large", capacity=0)
    rows, ops = {}, []
    for number in range(5000):
        item = skill(
            number,
            body="Open it, look, close it.\n" * 10,
            evidence=tuple(Evidence(traj_id=f"t{number}-{k}", outcome="success") for k in range(3)),
            credit=Credit(num_used=4, num_success=3, num_without=4, num_success_without=1),
        )
        data = encode(item)
        sha = digest_bytes(data)
        bank.store.item_path(sha).write_bytes(data)
        rows[item.id] = row_of(item, sha)
        ops.append(Op(seq=number + 2, at=AT, actor="a", op="ADD", item=item.id, after=sha))
    old, new = bank.snapshot(), bank.store.write_version(Version(rows=rows))
    end = Op(seq=5002, at=AT, actor="a", op="ACTIVATE", version=new, previous=old)
    append_ops(bank.store.ops_path, [*ops, end])
    bank.store.write_pointer(new)
    return bank


def test_five_thousand_skills_are_a_page_in_less_than_three_seconds(large: SkillBank) -> None:
    start = time.process_time()
    text = build_page(large)
    assert time.process_time() - start < 3
    assert len(Page(text).data["skills"]) == 5000
    assert len(text) < 12_000_000


# -- the command ---------------------------------------------------------------------------


def test_the_command_writes_the_page_and_prints_path_and_counts(
    bank: SkillBank, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bank.add([skill(1), skill(2, status="active")], KEEP_ALL)
    out = tmp_path / "deep" / "page.html"
    words = ["skills", "html", str(out), "--home", str(tmp_path), "--json"]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["path"] == str(out)
    assert (facts["skills"], facts["candidate"], facts["active"]) == (2, 1, 1)
    assert facts["version"] == bank.snapshot()
    assert out.read_text(encoding="utf-8") == build_page(bank)
    bank.add([skill(3)], KEEP_ALL)
    assert main(words) == 0
    assert out.read_text(encoding="utf-8") == build_page(bank)


def test_the_command_replaces_only_its_own_pages_unless_told_to(
    bank: SkillBank,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "report.html"
    other.write_text("<!doctype html><title>mine</title>", encoding="utf-8")
    assert main(["skills", "html", "report.html"]) == 2
    assert "is not a page of distill skills html" in capsys.readouterr().err
    assert "mine" in other.read_text(encoding="utf-8")
    assert main(["skills", "html", "report.html", "--yes"]) == 0
    assert is_page(other.read_text(encoding="utf-8"))
    assert main(["skills", "html", "bank"]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["skills", "html"]) == 0
    assert is_page((tmp_path / "main.skills.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("more", [[], ["--yes"]])
def test_a_pipe_is_refused_and_not_waited_for(
    bank: SkillBank,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.html")
    # A writer lets a command that reads the pipe go on, so that a fault fails and does not hang.
    writer = os.open("pipe.html", os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, b"x" * 5000)
    try:
        assert main(["skills", "html", "pipe.html", *more]) == 2
    finally:
        os.close(writer)
    assert "pipe.html is no regular file" in capsys.readouterr().err
    assert not Path("pipe.html").is_file()


def test_a_browser_opens_only_when_asked_for(
    bank: SkillBank,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or False)
    out = tmp_path / "page.html"
    assert main(["skills", "html", str(out), "--home", str(tmp_path)]) == 0
    assert opened == []
    assert main(["skills", "html", str(out), "--home", str(tmp_path), "--open"]) == 0
    assert opened == [out.as_uri()]
    assert "no browser could be started" in capsys.readouterr().err
