"""The page of a curriculum: it says what the summary says, and whatever a log holds stays text."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from distill.curriculum.drops import REASONS
from distill.errors import DataError
from evals.curriculum_page import build_page, write_page
from evals.curriculum_page_tables import FIRST_ROWS
from evals.curriculum_page_words import part, plain

HOSTILE = "</style><script>alert(1)</script><img src=x onerror=y>\u202e\x07&\"'"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


def cell(scene: str, band: int, tier: int, **values: Any) -> dict[str, Any]:
    found = {"n": 40, "k": 38, "rate": 0.95, "low": 0.835, "high": 0.986, "verdict": "capable"}
    base = {"scene": scene, "band": band, "tier": tier, "n_effective": 21.4, "basis": "weighted"}
    base |= {"reach": 1.0, "notes": []}
    return base | found | values


def rich() -> dict[str, Any]:
    weak = {"n": 30, "k": 6, "rate": 0.2, "low": 0.095, "high": 0.373, "verdict": "weak"}
    few = {"n": 5, "k": 4, "rate": 0.8, "low": 0.376, "high": 0.964, "verdict": "uncertain"}
    return {
        "format": 1,
        "store": "abc",
        "counts": {
            "calls": 1400,
            "turns": 1200,
            "sessions": 300,
            "examples": 600,
            "sft": 410,
            "opd": 600,
            "contexts": 600,
        },
        "sources": {
            "gateway": {
                "rows": 1000,
                "prediction": 900,
                "decision": 1000,
                "served": 1000,
                "outcome": 250,
                "messages": 1000,
            },
            "chats": {"rows": 400, "served": 400},
        },
        "dropped": {"import": {"bad_json": 12, "duplicate": 100}, "build": {"near_duplicate": 7}},
        "outcomes": {
            "success": 500,
            "failure": 200,
            "unknown": 500,
            "rungs": {"program": 600, "rating": 100, "none": 500},
        },
        "labels": {"retrospective": 3},
        "profile": {
            "goal_attainment": {"PASS": 30, "WARN": 10, "FAIL": 10, "NOT_EVALUATED": 950},
            "termination": {"PASS": 0, "WARN": 0, "FAIL": 0, "NOT_EVALUATED": 1000},
        },
        "demand": {
            "method": "fitted",
            "note": "",
            "edges": [0.0, 1.0, 2.0, 3.0],
            "counts": [800, 300, 100],
            "calibration": {
                "bins": [{"predicted": 0.1, "observed": 0.2, "n": 10, "low": 0.05, "high": 0.5}],
                "n": 10,
                "model": {"brier": 0.1234, "ece": 0.031, "auc": 0.81},
                "constant": {"brier": 0.25, "ece": 0.0, "auc": 0.5},
                "tier": {"brier": 0.2, "ece": 0.0, "auc": 0.6},
            },
        },
        "tiers": [
            {"tier": 0, "success": 300, "failure": 150, "unknown": 50, "mean_score": 0.5},
            {"tier": 2, "success": 200, "failure": 50, "unknown": 450, "mean_score": 1.5},
        ],
        "boundary": {
            "cells": [
                cell("sort", 0, 0),
                cell("sort", 1, 0, **weak),
                cell("sort", 1, 2, basis="observational", notes=["easy turns only"], **few),
            ],
            "tiers": [{"scene": "sort", "band": 0, "tier": 0}],
            "under": 12,
            "over": 34,
            "note": "Success is conditional on the policy.",
        },
        "stages": [
            {
                "stage": 1,
                "n": 25,
                "mean_score": 0.4,
                "thirds": [20, 5, 0],
                "scenes": {"sort": 20, "": 5},
            },
            {
                "stage": 2,
                "n": 25,
                "mean_score": 1.1,
                "thirds": [3, 15, 7],
                "scenes": {f"s{n}": n + 1 for n in range(10)},
            },
        ],
        "allocation": [
            {
                "scene": "sort",
                "band": 0,
                "base": 0.4,
                "accuracy": 0.9,
                "share": 0.25,
                "picked": 10,
                "available": 20,
                "floored": True,
            }
        ],
    }


def nearly_empty() -> dict[str, Any]:
    return {
        "format": 1,
        "store": "",
        "counts": {"calls": 0, "turns": 0, "sessions": 0, "examples": 0, "sft": 0, "opd": 0},
        "sources": {},
        "dropped": {"import": {}, "build": {}},
        "outcomes": {"success": 0, "failure": 0, "unknown": 0, "rungs": {}},
        "labels": {},
        "profile": {},
        "demand": {
            "method": "flat",
            "note": "Too few verified outcomes.",
            "edges": [0.0, 3.0],
            "counts": [0],
            "calibration": None,
        },
        "tiers": [],
        "boundary": {"cells": [], "tiers": [], "under": 0, "over": 0, "note": ""},
        "stages": [],
        "allocation": [],
    }


class Page(HTMLParser):
    """Checks that elements close in order; collects tags and the text of every section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.section = ""
        self.words: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("section", "header"):
            self.section = dict(attrs).get("id") or tag
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            before = self.words.get(self.section, "")
            self.words[self.section] = f"{before} {data}".replace("\u00a0", " ")


def page_of(summary: dict[str, Any], title: str = "night / curriculum") -> Page:
    return Page(build_page(summary, title))


def cells_of(page: str) -> list[list[str]]:
    """The table rows of a page as the texts of their cells."""
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    plain_rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    return [[re.sub(r"<[^>]+>", " ", one).strip() for one in row] for row in plain_rows]


def test_the_title_and_the_tiles_are_the_counts() -> None:
    words = page_of(rich()).words["header"]
    for text in ("600 examples in 2 stages", "1,200 turns of 300 sessions", "1,400", "410", "50 %"):
        assert text in " ".join(words.split())


def test_a_page_says_how_many_turns_were_erased_since() -> None:
    assert "erased on request" not in page_of(rich()).words["header"]
    assert "3 turns of these were erased" in page_of(rich() | {"forgotten": 3}).words["header"]


def test_stages_show_their_thirds_scores_and_scenes() -> None:
    page = build_page(rich(), "t")
    words = " ".join(page_of(rich()).words["stages"].split())
    assert "stage 1 0.40; stage 2 1.10" in words
    assert "Stage 1: sort 20, no scene named 5" in words
    assert "s9 10, s8 9, s7 8, s6 7, s5 6, s4 5, s3 4, s2 3, 2 other scenes 3" in words
    assert "Stage 2: 3 of the easy third, 15 of the middle third, 7 of the hard third" in page
    assert re.findall(r"flex:(\d+) 1 0", page)[:5] == ["20", "5", "3", "15", "7"]


def test_the_histogram_is_as_high_as_its_counts() -> None:
    page = build_page(rich(), "t")
    heights = re.findall(r'<rect[^>]*height="([\d.]+)"><title>', page)
    assert [float(h) for h in heights] == pytest.approx([300, 300 * 3 / 8, 300 / 8], abs=0.1)
    assert "0.00 to 1.00: 800 turns" in page


def test_calibration_marks_what_was_estimated_and_seen() -> None:
    page, words = build_page(rich(), "t"), page_of(rich()).words["demand"]
    (mark,) = re.findall(r'<circle cx="([\d.]+)%" cy="([\d.]+)%"[^>]*class="mark"', page)
    assert mark == ("10.00", "80.00")
    (bar,) = re.findall(r'y1="([\d.]+)%" y2="([\d.]+)%" class="bar"', page)
    assert bar == ("95.00", "50.00")
    told = "Brier score 0.123, against 0.200 for the rate of its tier and 0.250 for one rate"
    assert told in words
    assert "never read" in words


def test_the_heat_map_shades_each_count_by_its_share_of_the_tier() -> None:
    page = build_page(rich(), "t")
    rows = [row for row in cells_of(page) if row[0].startswith("Tier ") and len(row) == 4]
    assert [" ".join(one.replace("\u00a0", " ").split()) for one in rows[0]] == [
        "Tier 0 mean score 0.50",
        "300 60 %",
        "150 30 %",
        "50 10 %",
    ]
    shades = re.findall(r'<i class="(?:success|failure|unknown)" style="opacity:([\d.]+)"', page)
    assert [float(s) for s in shades[:3]] == pytest.approx([0.33, 0.165, 0.055], abs=0.006)


def test_the_boundary_table_has_a_row_per_cell_and_a_column_per_tier() -> None:
    page = build_page(rich(), "t")
    (easy, hard) = [row for row in cells_of(page) if row[0].startswith("sort") and len(row) == 4]
    easy, hard = ([" ".join(c.replace("\u00a0", " ").split()) for c in r] for r in (easy, hard))
    assert easy[0] == "sort demand 0"
    assert easy[1].startswith("95 % \u2713 capable 84 to 99; 38 of 40 weighted, as good as 21 ")
    assert easy[2:] == ["\u2013", "tier 0"]
    assert hard[1].startswith("20 % \u2717 weak")
    assert "? uncertain" in hard[2]
    assert hard[2].endswith("observational")
    assert "easy turns only" in page_of(rich()).words["boundary"]
    assert hard[3] == "none known"
    words = page_of(rich()).words["boundary"]
    assert "Success is conditional on the policy." in words
    assert "12" in words
    assert "34" in words


def test_a_long_boundary_table_unfolds_and_leaves_nothing_out() -> None:
    summary = rich()
    summary["boundary"]["cells"] = [cell(f"scene-{n:03d}", 0, 0) for n in range(FIRST_ROWS + 7)]
    page = build_page(summary, "t")
    assert len(set(re.findall(r"scene-\d{3}", page))) == FIRST_ROWS + 7
    assert "7 more rows" in page


def test_dropped_rows_have_their_reason_in_words_most_frequent_first() -> None:
    page = build_page(rich(), "t")
    rows = [row for row in cells_of(page) if len(row) == 4 and row[1] in set(REASONS.values())]
    found = [(row[0], row[1], row[3]) for row in rows]
    assert found == [
        ("duplicate", REASONS["duplicate"], "100"),
        ("bad json", REASONS["bad_json"], "12"),
        ("near duplicate", REASONS["near_duplicate"], "7"),
    ]
    unknown = rich()
    unknown["dropped"]["build"] = {"of_tomorrow": 3}
    assert "of_tomorrow" in build_page(unknown, "t")


def test_layers_are_shares_of_the_rows_of_their_source() -> None:
    rows = {row[0].split()[0]: row[1:] for row in cells_of(build_page(rich(), "t")) if row}
    assert [c.replace("\u00a0", " ") for c in rows["gateway"]] == [
        "90 %",
        "100 %",
        "100 %",
        "25 %",
        "100 %",
    ]
    assert [c.replace("\u00a0", " ") for c in rows["chats"]] == [
        "0 %",
        "0 %",
        "100 %",
        "0 %",
        "0 %",
    ]


def test_the_profile_counts_what_was_not_looked_at_as_nothing() -> None:
    words = " ".join(page_of(rich()).words["profile"].split())
    assert "60 % passed" in words  # 30 of the 50 that were looked at
    assert words.count("passed") == 3  # note, legend, one share; the other dimension has none
    assert words.endswith("\u2013")


def test_a_nearly_empty_summary_says_that_nothing_came_of_it() -> None:
    page = page_of(nearly_empty(), "empty")
    assert "No example came out of 0 turns" in " ".join(page.words["header"].split())
    assert "Too few verified outcomes." in page.words["demand"]
    assert "nothing can be said" in page.words["boundary"]
    assert set(page.words) == {"", "header", "demand", "boundary"}


def test_untrusted_text_stays_text_and_nothing_is_fetched() -> None:
    summary = rich()
    summary["sources"] = {HOSTILE: {"rows": 1}}
    summary["stages"][0]["scenes"] = {HOSTILE: 1}
    summary["boundary"]["cells"][0]["scene"] = HOSTILE
    summary["boundary"]["note"] = summary["demand"]["note"] = HOSTILE
    summary["allocation"][0]["scene"] = HOSTILE
    summary["dropped"]["build"] = {HOSTILE: 1}
    summary["profile"][HOSTILE] = {"PASS": 1}
    summary["outcomes"]["rungs"][HOSTILE] = 1
    text = build_page(summary, HOSTILE)
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert names & {"script", "img", "link", "iframe", "form", "object"} == set()
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]
    links = [attrs.get(k) for _, attrs in page.tags for k in ("href", "src") if attrs.get(k)]
    assert all(str(link).startswith("#") for link in links)
    assert "\u202e" not in text
    assert "\x07" not in text
    assert "url(" not in text
    policy = [a["content"] for _, a in page.tags if a.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_small_shares_do_not_read_as_nothing() -> None:
    assert part(1, 1000) == "<\u00a01\u00a0%"
    assert part(0, 10).startswith("0")
    assert part(3, 0) == "\u2013"
    assert plain("a" * 100, 10) == "aaaaaaa..."


def test_a_summary_is_not_changed_by_showing_it() -> None:
    summary = rich()
    before = copy.deepcopy(summary)
    build_page(summary, "t")
    assert summary == before


def test_the_page_is_written_beside_the_summary(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(rich()))
    path = write_page(tmp_path, "night")
    assert path == tmp_path / "curriculum.html"
    assert "night" in page_of(rich(), "night").words["header"]
    assert path.read_text(encoding="utf-8") == build_page(rich(), "night")


def test_a_page_of_a_run_is_called_after_the_run_and_its_stage(tmp_path: Path) -> None:
    for name in ("final", ".final.partial-12-34"):
        folder = tmp_path / "runs" / "tiny-1" / "stages" / "lessons" / name
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(rich()))
        assert "<title>Curriculum - tiny-1 \u00b7 lessons</title>" in write_page(folder).read_text()
    assert "<title>Curriculum - mine</title>" in _written(tmp_path / "mine")
    assert "<title>Curriculum - mine</title>" in _written(tmp_path / ".mine.partial-1-2")


def _written(folder: Path) -> str:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(rich()))
    return write_page(folder).read_text()


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "does not exist"), ('{"format": 9}', "format 1, found 9"), ("[]", "found 'list'")],
)
def test_a_folder_without_a_readable_summary_is_an_error(
    tmp_path: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(DataError, match=words):
        write_page(tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; install Debian's package chromium")
def test_a_browser_lays_the_page_out_without_sideways_scrolling(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    path = tmp_path / "page.html"
    # Only this test needs to measure, so the script comes in here, past the page's own policy.
    probe = (
        "<script>addEventListener('load', () => document.title = "
        "document.documentElement.scrollWidth + ' ' + innerWidth)</script>"
    )
    text = re.sub(
        r'<meta http-equiv="Content-Security-Policy"[^>]*>', probe, build_page(rich(), "t")
    )
    path.write_text(text, encoding="utf-8")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")
    done = subprocess.run(
        [
            CHROMIUM,
            *flags,
            "--disable-background-networking",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=500,900",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (title,) = re.findall(r"<title>(\d+ \d+)</title>", done.stdout)
    wide, window = map(int, title.split())
    assert wide <= window
