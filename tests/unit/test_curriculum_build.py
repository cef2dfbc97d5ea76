"""From stored calls to a curriculum: what becomes an example, in which order, and why not."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from distill.curriculum import build as building
from distill.curriculum import columns, walk
from distill.curriculum.build import build
from distill.curriculum.contamination import Suites
from distill.curriculum.examples import ExampleReader, Place
from distill.curriculum.light import read_rows
from distill.curriculum.options import CurriculumSection
from distill.curriculum.prepare import Source
from distill.curriculum.profile import DIMENSIONS, Finding
from distill.curriculum.store import LogStore
from distill.curriculum.walk import Fit
from distill.errors import DataError

NOW = 1_790_000_000_000
BEGAN = 1_780_000_000
TIERS = {"small": 0, "large": 2}


def asks(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def row(number: int, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A spend row of LiteLLM whose last message is the answer; `good` is what a check said."""
    good, tier = more.pop("good", None), more.pop("tier", 0)
    router = {"tier": tier, "decided_tier": tier, **more.pop("router", {})}
    outcome: dict[str, Any] = {"complaint": more.pop("complaint", False)}
    if good is not None:
        outcome["verdicts"] = [{"source": "program", "name": "graded", "value": float(good)}]
    return {
        "request_id": f"rq-{number:06d}",
        "trace_id": f"t-{number}",
        "call_type": "acompletion",
        "model_group": "auto",
        "model": "large" if tier else "small",
        "startTime": BEGAN + number,
        "session_id": f"s-{number}",
        "status": "success",
        "cache_hit": "False",
        "request_tags": ["scene:letters"],
        "metadata": {"router": router, "outcome": outcome},
        "messages": list(messages[:-1]),
        "response": {"choices": [{"finish_reason": "stop", "message": messages[-1]}]},
        **more,
    }


def stored(folder: Path, rows: list[dict[str, Any]], name: str = "store") -> LogStore:
    log = folder / f"{name}.jsonl"
    log.write_text("".join(json.dumps(r) + "\n" for r in rows))
    store = LogStore.open(folder / name, create=True)
    report = store.ingest(
        [Source(name="gateway", path=str(log), tiers=TIERS)], redact=None, now_ms=NOW
    )
    assert not report.dropped
    return store


def made(folder: Path, rows: list[dict[str, Any]], name: str = "c", **options: Any) -> Any:
    """(summary, rows of turns.arrow by source id of ... their request, plan)"""
    more = {key: options.pop(key) for key in ("suites", "fits", "seed") if key in options}
    out = folder / name
    out.mkdir()
    with stored(folder, rows, f"{name}-store") as store:
        summary = build(store, CurriculumSection(**options), out, **more)
    return summary, {r["session_id"]: r for r in read_rows(out)}, plan(out)


def plan(out: Path) -> list[dict[str, Any]]:
    with pa.memory_map(str(out / "plan.arrow")) as source:
        found: list[dict[str, Any]] = pa.ipc.open_file(source).read_all().to_pylist()
    return found


def random_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Requests of 1 to 12 letters; the small model fails from about six, the large from twelve."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        length = draw.randint(1, 12)
        text = " ".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=length))
        tier = draw.choice((0, 2))
        limit = 6 if tier == 0 else 12
        good = draw.random() < 1 / (1 + math.exp(1.2 * (length - limit)))
        reply = says(f"answer {number}")
        rows.append(
            row(number, asks(f"sort {number} {text}"), reply, good=good, tier=tier,
                session_id=f"s-{number // 3}", router={"propensity": 0.5})
        )  # fmt: skip
    return rows


def test_every_turn_is_an_example_or_has_a_reason(tmp_path):
    long = "the very long and winding question about nothing in particular that nobody asked yet"
    tool = says("", tool_calls=[{"id": "c1", "function": {"name": "f", "arguments": "{}"}}])
    rows = [
        row(1, asks("good"), says("fine"), good=True),
        row(2, asks("bad"), says("wrong"), good=False),
        row(3, asks("who knows"), says("maybe")),
        row(4, asks("cached"), says("old"), good=True, cache_hit="True"),
        row(5, asks(long), says("leaked"), good=True),
        row(6, asks("use a tool"), tool, good=True),
        row(7, asks("good"), says("fine"), good=True),
        row(8, asks("silent"), says(""), good=True),
        row(9, asks("x" * 50), says("too long"), good=True),
    ]
    rows.append({**row(10, asks("no text"), says("x"), good=True), "messages": [], "response": {}})
    summary, turns, order = made(
        tmp_path,
        rows,
        suites=Suites([("gate", "task 1", [f"please answer {long}"])]),
        fits=lambda prompt, turn, tools: Fit(
            sft=len(prompt[-1]["content"]) < 50,
            opd=len(prompt[-1]["content"]) < 50,
            reason="too_long" if len(prompt[-1]["content"]) >= 50 else None,
        ),
    )
    reasons = {name: turn["reason"] for name, turn in turns.items()}
    assert reasons == {
        "s-1": None,
        "s-2": None,
        "s-3": None,
        "s-4": "cached",
        "s-5": "contaminated",
        "s-6": "quarantined",
        "s-7": "repeated",
        "s-8": "quarantined",
        "s-9": "too_long",
        "s-10": "no_messages",
    }
    uses = {entry["id"]: (entry["use_sft"], entry["use_opd"]) for entry in order}
    by_session = {name: uses.get(turn["id"]) for name, turn in turns.items()}
    # A failed turn is never imitated, but the student may try it itself.
    assert by_session["s-1"] == (True, True)
    assert by_session["s-2"] == (False, True)
    assert by_session["s-3"] == (False, True)
    assert summary["counts"]["turns"] == 10
    assert summary["counts"]["examples"] == len(order) == 3
    assert sum(summary["dropped"]["build"].values()) == 7


def test_only_successes_give_contexts_where_that_is_asked_for(tmp_path):
    rows = [row(i, asks(f"q{i}"), says(f"a{i}"), good=i % 2) for i in range(8)]
    _, turns, order = made(tmp_path, rows, contexts="success")
    assert len(order) == 4
    assert {t["reason"] for t in turns.values()} == {None, "failed_outcome"}


def test_examples_stand_in_the_plan_once_each_and_from_easy_to_hard(tmp_path):
    summary, turns, order = made(tmp_path, random_rows(900))
    names = [entry["id"] for entry in order]
    usable = [t["id"] for t in turns_of(tmp_path / "c") if t["reason"] is None]
    assert sorted(names) == sorted(usable)
    assert len(set(names)) == len(names)
    assert [entry["position"] for entry in order] == list(range(len(order)))
    assert [e["stage"] for e in order] == sorted(e["stage"] for e in order)
    means = [stage["mean_score"] for stage in summary["stages"]]
    assert means[0] < means[1] < means[2]
    assert turns
    read = ExampleReader(tmp_path / "c")
    for entry in order[:: len(order) // 20]:
        example = read(Place(entry["file"], entry["row"]))
        assert example.id == entry["id"]
        assert [m["role"] for m in (*example.prompt, *example.turn)] == ["user", "assistant"]


def turns_of(out: Path) -> list[dict[str, Any]]:
    return list(read_rows(out))


def test_the_demand_that_is_fitted_grows_with_what_makes_requests_fail(tmp_path):
    summary, _, _ = made(tmp_path, random_rows(2400))
    assert summary["demand"]["method"] == "fitted"
    short = [t["score"] for t in turns_of(tmp_path / "c") if letters(tmp_path, t) <= 3]
    long = [t["score"] for t in turns_of(tmp_path / "c") if letters(tmp_path, t) >= 10]
    assert sum(short) / len(short) + 0.5 < sum(long) / len(long)
    assert sum(summary["demand"]["counts"]) == summary["counts"]["turns"]
    calibration = summary["demand"]["calibration"]
    assert calibration["model"]["brier"] < calibration["tier"]["brier"]


_texts: dict[str, int] = {}


def letters(folder: Path, turn: dict[str, Any]) -> int:
    """Letters that a turn asked to sort."""
    if not _texts:
        for line in (folder / "c-store.jsonl").read_text().splitlines():
            found = json.loads(line)
            name = f"{found['session_id']} {found['startTime'] * 1000}"
            _texts[name] = len(found["messages"][0]["content"].split()) - 2
    return _texts[f"{turn['session_id']} {turn['ts']}"]


def test_the_result_depends_on_the_turns_and_not_on_how_they_came(tmp_path):
    rows = random_rows(400)
    mixed = random.Random(5).sample(rows, len(rows))
    first, _, one = made(tmp_path, rows, "one", demand="logged")
    second, _, two = made(tmp_path, mixed, "two", demand="logged")
    cells = ("id", "stage", "position", "score", "use_sft")
    assert [[e[c] for c in cells] for e in one] == [[e[c] for c in cells] for e in two]
    assert first == second
    other, _, three = made(tmp_path, rows, "three", demand="logged", seed=1)
    assert [e["id"] for e in three] != [e["id"] for e in one]
    assert other["counts"] == first["counts"]


def test_several_processes_make_the_same_curriculum(tmp_path, monkeypatch):
    rows = random_rows(300)
    first, _, one = made(tmp_path, rows, "one")
    monkeypatch.setattr(building, "WORTH_JOBS", 1)
    monkeypatch.setattr(building.os, "cpu_count", lambda: 2)
    second, _, two = made(tmp_path, rows, "two")
    assert first == second
    assert one == two
    assert turns_of(tmp_path / "one") == turns_of(tmp_path / "two")


def test_a_large_bucket_is_worked_on_in_parts_and_the_curriculum_stays_the_same(
    tmp_path, monkeypatch
):
    rows = random_rows(300)
    first, turns, order = made(tmp_path, rows, "whole", demand="logged")
    parts = []
    decode = columns.decode
    monkeypatch.setattr(walk.columns, "decode", lambda t: parts.append(t.num_rows) or decode(t))
    monkeypatch.setattr(walk, "PART", 1)
    second, also, again = made(tmp_path, rows, "parts", demand="logged")
    assert (second, also) == (first, turns)
    # Only where in its file an example lies may differ.
    assert [one | {"row": 0} for one in again] == [one | {"row": 0} for one in order]
    assert sum(parts) == 300
    assert len(parts) > 128


def test_a_limited_curriculum_gives_more_to_cells_in_which_the_student_fails(tmp_path):
    rows = [
        row(i, asks(f"{kind} {i}"), says(f"a{i}"), good=good,
            request_tags=[f"scene:{kind}"])
        for i in range(600)
        for kind, good in [("easy", True) if i % 2 else ("hard", i % 20 == 0)]
    ]  # fmt: skip
    summary, turns, order = made(tmp_path, rows, examples=200, demand="logged")
    assert len(order) == summary["counts"]["examples"] == 200
    picked = {cell["scene"]: cell for cell in summary["allocation"]}
    assert picked["easy"]["accuracy"] == 1.0
    assert picked["hard"]["accuracy"] < 0.2
    assert picked["hard"]["picked"] > 1.5 * picked["easy"]["picked"]
    assert picked["easy"]["picked"] >= 50  # half of its base share
    assert summary["dropped"]["build"]["not_picked"] == 400
    reasons = [t["reason"] for t in turns.values()]
    assert reasons.count("not_picked") == 400
    even, _, _ = made(tmp_path, rows, "even", examples=200, demand="logged", kappa=0.0)
    assert {c["picked"] for c in even["allocation"]} == {100}


def test_a_complaint_speaks_about_the_turn_before_and_marks_it_under_routed(tmp_path):
    rows = []
    for i in range(30):
        asked = asks(f"task {i}")
        rows += [
            row(2 * i, asked, says("wrong"), good=False, session_id=f"s{i}"),
            row(2 * i + 1, asked, says("right"), good=True, tier=2, complaint=True,
                session_id=f"s{i}"),
        ]  # fmt: skip
    summary, _, _ = made(tmp_path, rows, demand="logged")
    assert summary["counts"]["turns"] == 60
    assert summary["labels"]["retrospective"] == 30
    assert summary["boundary"]["under"] == 30
    first = next(t for t in turns_of(tmp_path / "c") if t["result"] == "failure")
    assert (first["label"], first["under"]) == (2, True)


def test_evidence_that_came_in_another_file_counts_for_its_turn(tmp_path):
    log, scores = tmp_path / "spans.jsonl", tmp_path / "scores.jsonl"
    span = {
        "id": "o1", "trace_id": "t1", "type": "GENERATION", "name": "llm",
        "start_time": "2026-05-01 02:13:00.000000", "provided_model_name": "small",
        "input": json.dumps([asks("hello")]), "output": "hi", "session_id": "s-7",
    }  # fmt: skip
    log.write_text(json.dumps(span) + "\n")
    scores.write_text(
        json.dumps({"id": "sc1", "trace_id": "t1", "name": "user-thumb", "value": 1,
                    "data_type": "BOOLEAN", "source": "ANNOTATION"}) + "\n"
    )  # fmt: skip
    out = tmp_path / "c"
    out.mkdir()
    with LogStore.open(tmp_path / "store", create=True) as store:
        for path in (scores, log):
            store.ingest(
                [Source(name=path.stem, path=str(path), format="langfuse", tiers=TIERS)],
                redact=None,
                now_ms=NOW,
            )
        store.ingest(
            [
                Source(name="both", path=str(path), format="langfuse", tiers=TIERS)
                for path in (log,)
            ],
            redact=None,
            now_ms=NOW,
        )
        build(store, CurriculumSection(demand="logged"), out)
    results = {t["source"]: (t["result"], t["rung"]) for t in turns_of(out)}
    assert results["spans"] == ("success", "rating")


@pytest.mark.parametrize("rows", [[], [row(1, asks("a"), says("b"), cache_hit="True")]])
def test_a_log_without_anything_to_learn_is_an_error_that_says_why(tmp_path, rows):
    with pytest.raises(DataError, match=r"none of the \d turns .* can be learnt from"):
        made(tmp_path, rows)


class Judging:
    """A judge that finds fault with every turn that says `awful`, and demand by length."""

    def profiles(self, turns: Any) -> list[Any]:
        views = []
        for turn, _ in turns:
            bad = "awful" in turn.messages[-1]["content"]
            finding = Finding(grade="FAIL" if bad else "PASS", coverage=1.0, evidence=(1,))
            views.append({name: finding for name in DIMENSIONS})
        return views

    def demands(self, wanted: Any) -> list[tuple[float, ...] | None]:
        hard = (0.0, 0.0, 0.0, 1.0)
        return [hard if len(one.request) > 10 else None for one in wanted]


def test_a_judge_can_only_lower_what_rules_found_and_say_what_they_could_not(tmp_path):
    rows = [
        row(1, asks("short"), says("nice"), good=True),
        row(2, asks("a rather long one"), says("awful"), good=True),
        row(3, asks("wrong"), says("nice"), good=False),
    ]
    out = tmp_path / "c"
    out.mkdir()
    with stored(tmp_path, rows) as store:
        build(store, CurriculumSection(demand="judge"), out, judge=Judging())
    turns = {t["session_id"]: t for t in turns_of(out)}
    uses = {e["id"]: e["use_sft"] for e in plan(out)}
    assert [uses[turns[f"s-{i}"]["id"]] for i in (1, 2, 3)] == [True, False, False]
    assert [turns[f"s-{i}"]["demand_by"] for i in (1, 2)] == ["logged_tier", "judge"]
    assert turns["s-2"]["score"] == 3.0
    goal = DIMENSIONS.index("goal_attainment")
    assert turns["s-3"]["profile"][goal] == "FAIL"


def test_a_cascade_counts_what_the_weak_tier_could_not_do(tmp_path):
    rows = []
    for i in range(60):
        common = {"session_id": f"s-{i}", "trace_id": f"t-{i}"}
        fails = i % 2
        rows.append(row(2 * i, asks(f"task {i}"), says("weak"), good=not fails, **common))
        if fails:
            rows.append(
                row(2 * i + 1, asks(f"task {i}"), says("strong"), good=True, tier=2, **common)
            )
    summary, _, order = made(tmp_path, rows, demand="logged")
    cells = summary["boundary"]["cells"]
    weak = (
        sum(c["k"] for c in cells if c["tier"] == 0),
        sum(c["n"] for c in cells if c["tier"] == 0),
    )
    assert weak == (30, 60)
    assert summary["boundary"]["under"] == 30
    assert summary["boundary"]["over"] == 0
    assert len(order) == 60  # an attempt that was replaced is no example
    assert summary["dropped"]["build"]["superseded"] == 30


def test_a_whole_trajectory_goes_with_the_evaluation_prompt_in_it(tmp_path):
    prompt = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    rows = [
        row(1, asks("innocent"), says("a"), good=True, session_id="s"),
        row(2, asks(f"please: {prompt}"), says("b"), good=True, session_id="s"),
        row(3, asks("explain your answer"), says("c"), good=True, session_id="s"),
        row(4, asks("elsewhere"), says("d"), good=True, session_id="other"),
    ]
    summary, _, order = made(tmp_path, rows, suites=Suites([("gate", "task", [prompt])]))
    assert summary["dropped"]["build"] == {"contaminated": 3}
    assert len(order) == 1


def test_two_gateways_with_the_same_session_id_do_not_meet(tmp_path):
    out = tmp_path / "c"
    out.mkdir()
    with LogStore.open(tmp_path / "store", create=True) as store:
        for name, one in (
            ("a", row(1, asks("first question"), says("fine"), session_id="1")),
            ("b", row(2, asks("That is wrong, try again"), says("sorry"), session_id="1")),
        ):
            log = tmp_path / f"{name}.jsonl"
            del one["metadata"]["outcome"]
            log.write_text(json.dumps(one) + "\n")
            source = Source(name=name, path=str(log), tiers=TIERS)
            store.ingest([source], redact=None, now_ms=NOW)
        build(store, CurriculumSection(demand="logged"), out)
    assert {t["source"]: t["result"] for t in turns_of(out)} == {"a": "unknown", "b": "unknown"}


def test_a_turn_that_a_judge_fails_is_no_context_where_only_successes_are(tmp_path):
    rows = [row(i, asks(f"q{i}"), says("awful" if i % 2 else "nice"), good=True) for i in range(6)]
    out = tmp_path / "c"
    out.mkdir()
    with stored(tmp_path, rows) as store:
        options = CurriculumSection(demand="logged", contexts="success")
        build(store, options, out, judge=Judging())
    assert len(plan(out)) == 3
