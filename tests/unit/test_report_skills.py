"""What a report says about turns, conversations and skills."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from distill.rundir import append_jsonl, write_json
from distill.types import EvalReport, Outcome
from evals.report import build
from evals.report_facts import read_facts
from evals.report_samples import Exchange, exchanges
from evals.suite import EvalSettings, measure

EVIL = '</pre><script>alert("1")</script>|`_[x](y)\u202e'


def evaluation(turns: dict[str, list[int]]) -> EvalReport:
    """Every task is solved; the greedy attempts of a domain take these numbers of turns."""
    outcomes = {
        f"{domain}-{i}": Outcome(domain=domain, greedy=1.0, num_turns=count)
        for domain, counts in turns.items()
        for i, count in enumerate(counts)
    }
    return EvalReport(
        suite="gate",
        suite_digest="d" * 64,
        model="m",
        num_tasks=len(outcomes),
        samples_per_task=0,
        metrics=measure(outcomes, EvalSettings(samples=0, k=())),
        outcomes=outcomes,
    )


def evaluated(path: Path, **reports: dict[str, list[int]]) -> Path:
    for who, turns in reports.items():
        write_json(path / "evals" / f"{who}.json", evaluation(turns))
    return path


def learned(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "notes": {"ok": 90, "invalid": 6, "empty": 24},
        "valid_rate": 0.9375,
        "correct_rate": 0.72,
        "is_enough": True,
        "verdict": "94 % of the first 64 notes could be read: the analyst can be used",
        "looks": 2,
        "evolved": ["dyn_001"],
        "kept": {"version": "ab" * 32, "added": ["dyn_002", "dyn_003"], "promoted": ["dyn_002"]},
    }
    values["kept"]["num_waiting"] = 7
    return values | changes


def night_of_skills(
    path: Path, found: dict[str, Any] | None, looks: list[Any] | None = None
) -> Path:
    row = {"objective": "seed", "steps": 40, "tokens": 9, "seconds": 1.0}
    stages = [{"name": "base", **row, "learned": None}, {"name": "seed", **row, "learned": found}]
    write_json(path / "summary.json", {"stages": stages, "bank_version": "calls@" + "cd" * 32})
    if looks is not None:
        append_jsonl(path / "stages" / "seed" / "bank.jsonl", looks)
    return path


def look(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "version": "v", "rates": {"tag K": 0.125, "tag A": 0.9}, **more}


def texts(run: Path) -> tuple[str, str]:
    """Both renderings; of the page only the words."""
    paths = build(run)
    page = re.sub(r"<style>.*?</style>", "", paths.html.read_text(encoding="utf-8"), flags=re.S)
    words = re.sub(r"<[^>]*>", " ", page).replace("\u00a0", " ").replace("\u2212", "-")
    return words, paths.markdown.read_text(encoding="utf-8").replace("\u00a0", " ")


def test_turns_are_shown_with_intervals_and_their_paired_change(tmp_path: Path) -> None:
    before = {"calls": [4, 6] * 20, "rooms": [9] * 40}
    run = evaluated(tmp_path, before=before, after={"calls": [3] * 40, "rooms": [9] * 40})
    calls, rooms, whole = read_facts(run).turns
    assert (calls.name, rooms.name, whole.name, whole.n) == ("calls", "rooms", "all domains", 80)
    assert calls.before is not None
    assert calls.before.low < calls.before.mean == 5.0 < calls.before.high
    assert calls.change is not None
    assert calls.change.mean == -2.0
    assert calls.change.low < -2.0 < calls.change.high < 0
    assert rooms.change is not None
    assert (rooms.change.low, rooms.change.high) == (0.0, 0.0)
    for text in texts(run):
        for fact in ("Turns", "5.00", "9.00", "-2.00", "+0.00"):
            assert fact in text


def test_a_domain_of_single_turns_beside_others_has_a_mean_of_one(tmp_path: Path) -> None:
    run = evaluated(
        tmp_path, before={"a": [1] * 9, "b": [5] * 9}, after={"a": [1] * 9, "b": [1] * 9}
    )
    first, second, _ = read_facts(run).turns
    assert first.before is not None
    assert first.before.mean == 1.0
    assert second.after is not None
    assert second.after.mean == 1.0
    assert second.change is not None
    assert second.change.mean == -4.0


def test_one_domain_is_told_once_and_single_turns_not_at_all(tmp_path: Path) -> None:
    one = evaluated(tmp_path / "one", before={"calls": [4] * 9}, after={"calls": [3] * 9})
    assert [row.name for row in read_facts(one).turns] == ["all domains"]
    single = evaluated(tmp_path / "single", before={"calls": [1] * 9}, after={"calls": [1] * 9})
    assert read_facts(single).turns == ()
    assert all("Turns" not in text for text in texts(single))


def test_a_conversation_is_read_turn_by_turn() -> None:
    text = "look\n  -> A room.\n  -> \n  -> A door.\n\n  -> What?\ngo\neast"
    assert exchanges(text, 3) == (
        Exchange(reply="look", answer="A room.\n\nA door."),
        Exchange(reply="", answer="What?"),
        Exchange(reply="go\neast", answer=""),
    )


@pytest.mark.parametrize(("text", "num_turns"), [("a\n  -> b", 1), ("a\n  -> b\nc\n  -> d\ne", 2)])
def test_a_reply_that_only_looks_like_a_conversation_stays_whole(text: str, num_turns: int) -> None:
    assert exchanges(text, num_turns) == ()


def talking(path: Path, num_turns: int, reply: str, answer: str) -> Path:
    evaluated(path, before={"calls": [num_turns] * 9}, after={"calls": [1] * 9})
    talk = "\n".join(f"{reply}{i}\n  -> {answer}" for i in range(num_turns))
    sample = {"task_id": "calls-0", "domain": "calls", "prompt": "p", "before": talk, "after": "q"}
    write_json(path / "samples.json", [sample])
    return path


def test_the_page_sets_the_words_of_the_environment_apart(tmp_path: Path) -> None:
    run = talking(tmp_path, 3, "go ", EVIL)
    page = build(run).html.read_text(encoding="utf-8")
    assert page.count('<pre class="said">') == 3
    assert page.count("Environment: ") == 3
    assert "<pre>go 2</pre>" in page
    assert "-&gt;" not in page
    assert "<script" not in page
    assert "<details" not in page.partition('id="samples"')[2].partition("</section>")[0]


def test_a_long_conversation_unfolds_and_a_very_long_one_ends(tmp_path: Path) -> None:
    page = build(talking(tmp_path / "a", 20, "go ", "A room.")).html.read_text(encoding="utf-8")
    assert "<summary>14 more turns</summary>" in page
    assert '<ol class="talk" start="7">' in page
    assert page.count('<pre class="said">') == 20
    endless = build(talking(tmp_path / "b", 50, "go ", "x" * 1000)).html.read_text(encoding="utf-8")
    assert endless.count('<pre class="said">') == 11
    assert "39 more in samples.json" in endless


def test_skills_are_told_by_stage_with_what_became_of_the_notes(tmp_path: Path) -> None:
    refused = ["Order of K: no gain in 16 pairs (+0.00)", EVIL]
    looks = [
        look(0),
        look(11, weak=["tag K"], added=["dyn_001"], refused=refused),
        look(21),
        look(99, weak=["after the end"]),
    ]
    run = night_of_skills(tmp_path, learned(), looks)
    (stage,) = read_facts(run).learned
    assert (stage.stage, stage.num_notes, stage.num_added, stage.num_waiting) == ("seed", 120, 3, 7)
    assert [k.step for k in stage.looks] == [11, 21]
    for text in texts(run):
        for fact in (
            "94 % of the first 64 notes",
            "93.8 %",
            "72.0 %",
            "nothing to say",
            "no gain in",
        ):
            assert fact in text
        assert re.search(r"tag K \(12.5 %\)", text)
        assert re.search(r"nothing was weak", text)
        assert "calls@" + "cd" * 32 in text
        assert "ab" * 32 in text
        assert "after the end" not in text
        assert "\u202e" not in text, "what turns the direction of a line is written as its code"
    assert "<script" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_an_analyst_that_cannot_be_used_and_a_stage_without_a_bank_are_told(tmp_path: Path) -> None:
    found = learned(is_enough=False, correct_rate=None, kept=None, looks=0, evolved=[])
    words, markdown = texts(night_of_skills(tmp_path, found))
    assert re.search("\u2717 +not passed", words)
    for text in (words, markdown):
        assert "Skills added" not in text
        assert "72.0 %" not in text
        assert "Bank after" not in text


def test_without_the_record_of_its_looks_their_number_is_told(tmp_path: Path) -> None:
    words, markdown = texts(night_of_skills(tmp_path, learned()))
    assert "Looks at what fails: 2; skills added: 1." in words
    assert "Skills added: 3 (1 from looks at what fails, of which there were 2)" in markdown


def test_a_night_without_hindsight_says_nothing_of_skills(tmp_path: Path) -> None:
    run = night_of_skills(tmp_path, None)
    assert read_facts(run).learned == ()
    page, markdown = build(run).html.read_text(encoding="utf-8"), texts(run)[1]
    assert 'id="skills"' not in page
    assert "## Skills" not in markdown
