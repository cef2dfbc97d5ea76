from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from distill.errors import DataError
from distill.rundir import append_jsonl, write_json
from distill.sections import GateSection
from distill.types import EvalReport, Outcome
from evals.gate import decide
from evals.metrics import mean_interval
from evals.report import build
from evals.report_facts import duration, headline, read_facts, smooth

EVIL = '</pre><script>alert("1")</script>|`_[x](y)'
VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """Checks that elements close in order, and collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def evaluation(solved: int, model: str, n: int = 100) -> EvalReport:
    outcomes = {
        f"{domain}-{i}": Outcome(domain=domain, greedy=float(i < solved + 5 * shift))
        for shift, domain in enumerate(("copy", "sort"))
        for i in range(n)
    }
    by_domain = {
        f"{domain}/": [o.greedy for o in outcomes.values() if o.domain == domain]
        for domain in ("copy", "sort")
    }
    by_domain[""] = [o.greedy for o in outcomes.values()]
    return EvalReport(
        suite="gate",
        suite_digest="d" * 64,
        model=model,
        num_tasks=len(outcomes),
        samples_per_task=0,
        metrics={f"{prefix}greedy": mean_interval(v) for prefix, v in by_domain.items()},
        outcomes=outcomes,
    )


def made_up_run(path: Path, *, after: int = 80) -> Path:
    reports = {
        "before": evaluation(20, "old"),
        "after": evaluation(after, "new"),
        "teacher": evaluation(90, "teacher"),
    }
    for name, report in reports.items():
        write_json(path / "evals" / f"{name}.json", report)
    verdict = decide(reports["after"], reports["before"], GateSection(), reports["teacher"])
    write_json(path / "gates" / "verdict.json", verdict)
    append_jsonl(
        path / "metrics.jsonl",
        [{"stage": "base", "step": i, "loss": 2 / i, "lr": 0.1} for i in range(1, 41)]
        + [
            {
                "stage": "night",
                "step": i,
                "reward/mean": i / 60,
                "reward/copy": i / 60,
                "reward/sort": None if i == 7 else i / 60,
            }
            for i in range(1, 61)
        ],
    )
    sample: dict[str, Any] = {
        "task_id": "0",
        "domain": "sort",
        "prompt": EVIL,
        "answer": "ab",
        "before": "ba",
    }
    sample |= {"after": EVIL, "teacher": "", "before_ok": False, "after_ok": True}
    write_json(path / "samples.json", [sample] * 14)
    write_json(path / "summary.json", summary())
    write_json(path / "env.json", {"python": "3.12", "packages": {"torch": "2.13.0"}})
    return path


def summary() -> dict[str, Any]:
    return {
        "run": "tiny-20261130-1",
        "preset": "tiny",
        "model": "tiny-world",
        "seed": 3,
        "started": "2026-11-30T01:00:00+00:00",
        "verdict": "promote",
        "stages": [
            {"name": "base", "objective": "sft", "steps": 40, "tokens": 9000, "seconds": 30.2},
            {"name": "evaluate", "objective": "", "seconds": 4.0},
        ],
        "seconds": 291.0,
        "peak_rss_bytes": 2**30,
        "adapter_sha256": "9c" * 32,
        "warnings": [f"3 replies were cut off {EVIL}"],
        "command": "distill nightly tiny run.seed=3",
    }


def test_both_reports_hold_the_facts_of_the_run(tmp_path: Path) -> None:
    paths = build(made_up_run(tmp_path))
    assert paths == (tmp_path / "report.md", tmp_path / "report.html")
    for path in paths:
        text = path.read_text(encoding="utf-8").replace("\u00a0", " ")
        for fact in ("22.5 %", "82.5 %", "92.5 %", "+60.0", "200", "4 min 51 s"):
            assert fact in text, (path.name, fact)
        for fact in ("distill nightly tiny run.seed=3", "2.13.0", "1.00 GiB", "9,000", "9c9c9c9c"):
            assert fact in text, (path.name, fact)
        assert "12 of 14 are shown" in text


def test_the_page_opens_with_the_verdict_in_one_sentence(tmp_path: Path) -> None:
    page = build(made_up_run(tmp_path)).html.read_text(encoding="utf-8")
    found = re.search(r"<h1>(.*?)</h1>", page)
    assert found is not None
    words = re.sub(r"<.*?>", "", found[1]).replace("\u00a0", " ")
    assert words == (
        "Promoted: the student solves 82.5 % of 200 held-out tasks, up from 22.5 %; "
        "the teacher solves 92.5 %."
    )


def test_the_page_is_well_formed_and_escapes_every_text_of_the_run(tmp_path: Path) -> None:
    page = build(made_up_run(tmp_path)).html.read_text(encoding="utf-8")
    tags = Page(page).tags
    assert "script" not in tags
    assert page.count("&lt;script&gt;alert(&quot;1&quot;)") == 2 * 12 + 1


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = build(made_up_run(tmp_path)).html.read_text(encoding="utf-8")
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    links = [value for name, value in parsed.attributes if name in ("href", "src")]
    assert links
    assert all(str(link).startswith("#") for link in links)
    assert "http" not in page.replace("http-equiv", "")
    assert "url(" not in page
    assert "@import" not in page


def test_the_page_can_be_read_without_seeing_it(tmp_path: Path) -> None:
    page = build(made_up_run(tmp_path)).html.read_text(encoding="utf-8")
    parsed = Page(page)
    levels = [int(tag[1]) for tag in parsed.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    ids = [value for name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    named = [v for name, v in parsed.attributes if name == "aria-labelledby" and v is not None]
    assert {word for value in named for word in value.split()} <= set(ids)
    assert page.count('role="img"') == page.count("<title id=")
    heads = re.findall(r"<th(?: [^>]*)?>", page)
    assert heads
    assert all('scope="' in head for head in heads)
    assert page.count("<table>") == page.count("<caption>")


def test_markdown_fences_and_escapes_hold_against_hostile_text(tmp_path: Path) -> None:
    text = build(made_up_run(tmp_path)).markdown.read_text(encoding="utf-8")
    outside = re.sub(r"(?ms)^(`{3,})\w*\n.*?\n\1$", "", text)
    assert "```" not in outside
    assert "<script>" not in outside.replace("\\<script", "")
    tables = [line for line in outside.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_a_fence_is_longer_than_the_fences_of_the_text(tmp_path: Path) -> None:
    run = made_up_run(tmp_path)
    write_json(run / "samples.json", [{"prompt": "a\n````\nb", "after": "c"}])
    text = build(run).markdown.read_text(encoding="utf-8")
    assert "\n`````\na\n````\nb\n`````\n" in text


@pytest.mark.parametrize(
    "missing",
    [
        "summary.json",
        "gates/verdict.json",
        "evals/before.json",
        "evals/after.json",
        "evals/teacher.json",
        "metrics.jsonl",
        "samples.json",
        "env.json",
    ],
)
def test_a_report_is_made_of_what_is_there(tmp_path: Path, missing: str) -> None:
    run = made_up_run(tmp_path)
    (run / missing).unlink()
    page = build(run).html.read_text(encoding="utf-8")
    Page(page)
    assert "None" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)


def test_an_empty_run_says_that_it_has_not_finished(tmp_path: Path) -> None:
    paths = build(tmp_path)
    assert "This run has not finished yet." in paths.html.read_text(encoding="utf-8")
    assert "This run has not finished yet." in paths.markdown.read_text(encoding="utf-8")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"run": ')
    with pytest.raises(DataError, match=r"summary\.json"):
        build(tmp_path)
    with pytest.raises(DataError, match="expected the directory of a run"):
        build(tmp_path / "nowhere")


def test_held_and_rejected_runs_say_that_the_champion_stays(tmp_path: Path) -> None:
    held = read_facts(made_up_run(tmp_path / "a", after=20))
    assert held.headline.startswith("Held: ")
    assert "the same as before" in held.headline
    assert held.headline.endswith("so the previous champion stays.")
    rejected = read_facts(made_up_run(tmp_path / "b", after=5))
    assert rejected.headline.startswith("Rejected: ")
    assert "down from" in rejected.headline


def test_a_run_without_a_gate_is_not_judged() -> None:
    assert headline(None, None, True) == "Finished without an evaluation."
    assert headline("hold", None, True) == "Held."


def test_repeated_steps_of_a_resumed_run_count_once_with_their_last_value(tmp_path: Path) -> None:
    rows = [
        {"stage": "night", "step": step, "reward/mean": value}
        for step, value in ((1, 0.1), (2, 0.2), (2, 0.4), (3, 0.6))
    ]
    append_jsonl(tmp_path / "metrics.jsonl", rows)
    (curve,) = read_facts(tmp_path).curves
    assert curve.steps == (1, 2, 3)
    assert curve.series == {"all domains": (0.1, 0.4, 0.6)}


@pytest.mark.parametrize("rewards", [[0.5], [0.0, 0.0], [-3.0, 40.0], [1e-9, 2e-9], [math.pi] * 9])
def test_curves_of_any_range_are_drawn(tmp_path: Path, rewards: list[float]) -> None:
    rows = [{"stage": "s", "step": i, "reward/mean": r} for i, r in enumerate(rewards)]
    append_jsonl(tmp_path / "metrics.jsonl", rows)
    page = build(tmp_path).html.read_text(encoding="utf-8")
    paths = re.findall(r'<path d="([^"]+)"', page)
    assert paths
    numbers = [float(x) for path in paths for x in re.findall(r"-?[\d.]+", path)]
    assert all(0 <= x <= 1000 for x in numbers)


def test_a_very_long_curve_is_thinned(tmp_path: Path) -> None:
    rows = [{"stage": "s", "step": i, "reward/mean": (i % 7) / 7} for i in range(20_000)]
    append_jsonl(tmp_path / "metrics.jsonl", rows)
    assert build(tmp_path).html.stat().st_size < 60_000


def test_smoothing_keeps_constants_and_gaps() -> None:
    assert smooth([2.0] * 5, 3) == [2.0] * 5
    assert smooth([1.0, None, 3.0], 3) == [1.0, None, 3.0]
    assert smooth([0.0, 3.0, 6.0], 3) == [1.5, 3.0, 4.5]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (42.4, "42 s"),
        (291, "4 min 51 s"),
        (3599.8, "1 h 00 min"),
        (7260, "2 h 01 min"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
