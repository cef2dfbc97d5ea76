"""What comes late or in parts: outcomes, half rows, replaced files, two first imports at once."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from distill.curriculum import store as stores
from distill.curriculum.pii import KeyedHash, Redactor
from distill.curriculum.store import LogStore
from distill.errors import ConfigError
from log_rows import NOW, all_turns, ids, names, row, take, write


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """These logs are small."""
    monkeypatch.setattr("distill.curriculum.store.NUM_BUCKETS", 8)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with LogStore.open(tmp_path / "store", create=True) as store:
        yield store


def said(name: str, value: float) -> dict[str, Any]:
    return {"source": "user", "name": name, "value": value}


# -- outcomes -------------------------------------------------------------------------------------


def test_a_known_call_that_comes_with_more_verdicts_gives_these_alone_and_once(
    store: LogStore, tmp_path: Path
) -> None:
    first = [row(0, outcome={"verdicts": [said("old", 1.0)]}), row(1), row(2)]
    take(store, write(tmp_path / "a.jsonl", first))
    later = [
        row(0, outcome={"verdicts": [said("old", 1.0), said("new", 0.0)]}),
        row(1, outcome={"verdicts": [said("x", 1.0), said("y", 0.0)]}),
        row(2),
        row(2, text="another question", outcome={"verdicts": [said("z", 1.0)]}),
    ]
    report = take(store, write(tmp_path / "b.jsonl", later))
    assert (report.stored, report.evidence, report.again) == (0, 3, 0)
    assert report.dropped == Counter(duplicate=1, conflicting_id=1)
    found = store.evidence_for(["id0", "id1", "id2"])
    told = {
        ref: sorted((e.verdict.name, e.verdict.value) for e in all_) for ref, all_ in found.items()
    }
    assert told == {"id0": [("new", 0.0)], "id1": [("x", 1.0), ("y", 0.0)]}
    again = take(store, write(tmp_path / "c.jsonl", later))
    assert (again.evidence, again.again) == (0, 3)
    assert store.evidence_for(["id0", "id1", "id2"]) == found


def test_a_log_whose_outcomes_are_filled_in_later_is_followed(
    store: LogStore, tmp_path: Path
) -> None:
    log = write(tmp_path / "a.jsonl", [row(0), row(1), "broken"])
    take(store, log)
    write(log, [row(0, outcome={"verdicts": [said("new", 0.0)], "latency_ms": 5}), row(1)])
    report = take(store, log)
    assert (report.stored, report.evidence, report.again) == (0, 1, 1)
    assert store.drop_counts() == {}
    assert ids(store) == names(0, 1)


def test_a_call_told_twice_in_one_import_keeps_the_verdicts_of_both(
    store: LogStore, tmp_path: Path
) -> None:
    rows = [
        row(0, outcome={"verdicts": [said("a", 1.0)]}),
        row(0, outcome={"verdicts": [said("a", 1.0), said("b", 0.0)]}),
        row(0, outcome={"status": "success"}),
    ]
    report = take(store, write(tmp_path / "a.jsonl", rows))
    assert (report.stored, report.evidence, report.again) == (1, 1, 1)
    assert [e.verdict.name for e in store.evidence_for(["id0"])["id0"]] == ["b"]


def test_calls_without_text_are_told_apart_by_their_ids(store: LogStore, tmp_path: Path) -> None:
    rows = [row(n, session="s", ts=NOW - 5000, messages=None, user="u") for n in range(4)]
    rows = [{**each, "served": {"model": "m", "tier": 1}} for each in rows]
    log = write(tmp_path / "a.jsonl", [*rows, rows[0]])
    report = take(store, log)
    assert (report.stored, report.dropped) == (4, Counter(duplicate=1))
    copy = take(store, write(tmp_path / "b.jsonl", rows), name="other")
    assert copy.dropped == Counter(duplicate=4)


# -- files ----------------------------------------------------------------------------------------


def test_the_last_row_of_a_csv_file_counts_only_when_it_is_whole(
    store: LogStore, tmp_path: Path
) -> None:
    log = tmp_path / "c.csv"
    head = "id,model,prompt,response\n1,m,What is two plus two?,It is four.\n"
    log.write_text(head + "2,m,What is the capital of France?,It is the wonder")
    first = take(store, log)
    assert (first.stored, first.dropped) == (1, Counter(truncated_file=1))
    log.write_text(head + "2,m,What is the capital of France?,It is the wonderful Paris.\n")
    assert take(store, log).stored == 1
    answers = sorted(
        str(turn.messages[-1]["content"]) for turn in all_turns(store) if turn.messages
    )
    assert answers == ["It is four.", "It is the wonderful Paris."]
    assert store.drop_counts() == {}


def test_a_csv_file_that_nobody_writes_any_more_needs_no_newline(
    store: LogStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "c.csv"
    log.write_text("id,model,prompt,response\n1,m,What is two plus two?,It is four.")
    assert take(store, log).stored == 0
    hour_later = time.time() + 3600
    monkeypatch.setattr("distill.curriculum.reading.time.time", lambda: hour_later)
    assert take(store, log).stored == 1
    assert store.drop_counts() == {}
    assert take(store, log).skipped == 1


def test_what_was_dropped_stays_on_record_when_a_file_is_replaced(
    store: LogStore, tmp_path: Path
) -> None:
    log = write(tmp_path / "a.jsonl", [row(0), "broken", "also broken"])
    take(store, log)
    write(log, [row(1), "broken again"])
    assert take(store, log).dropped == Counter(bad_json=1)
    assert store.drop_counts() == {"log": {"bad_json": 3}}
    assert [(d.number, d.file) for d in store.drops()] == [(n, str(log)) for n in (2, 3, 2)]
    write(log, [row(1), row(2)])  # this one is edited: what was wrong in it is mended
    assert take(store, log).again == 1
    assert store.drop_counts() == {"log": {"bad_json": 2}}


def test_scores_that_are_written_anew_every_day_are_counted_once(
    store: LogStore, tmp_path: Path
) -> None:
    thumb = {"ref": "id0", "verdict": said("thumb", 1.0)}
    log = write(tmp_path / "a.jsonl", ["broken", thumb])
    for day in range(3):
        write(log, [f"broken {day}", thumb])
        os.utime(log, ns=(day, day))
        take(store, log)
        assert store.drop_counts() == {"log": {"bad_json": 1}}


PARTS = '''
from distill.curriculum.drops import RowError

class Parts:
    """Rows {parts}: a turn of each that is a text."""

    name = "parts"

    def recognises(self, row):
        return "parts" in row

    def read(self, row, context):
        for part in row["parts"]:
            if isinstance(part, str):
                yield context.turn(row, source_id=part, format="parts")
            else:
                yield RowError("wrong_type", f"expected a text, found {part}")
'''


def test_a_bad_part_of_a_row_costs_that_part_alone(
    store: LogStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parted_logs.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    log = write(tmp_path / "a.jsonl", [{"parts": ["a", 1, "b", 2, "c"]}])
    report = take(store, log, format="parted_logs:Parts")
    assert (report.stored, report.dropped) == (3, Counter(wrong_type=2))
    assert [d.detail for d in store.drops()] == [f"expected a text, found {n}" for n in (1, 2)]


# -- dropped rows and personal data ---------------------------------------------------------------


@pytest.mark.parametrize("before", [41, 50, 55, 58, 190])
def test_a_number_that_a_detail_would_cut_is_taken_out_as_a_whole(
    store: LogStore, tmp_path: Path, before: int
) -> None:
    card = "4111 1111 1111 1111"
    bad = row(0, turn_index="x" * before + " " + card, ts="y" * before + " " + card)
    redact = Redactor(pseudonym=KeyedHash(store.salt))
    report = take(store, write(tmp_path / "a.jsonl", [bad, row(1)]), redact=redact)
    assert report.stored == 1
    assert not any("4111" in drop.detail for drop in store.drops())


# -- two first imports ----------------------------------------------------------------------------


def test_of_two_that_make_a_store_at_once_the_first_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, real = threading.Barrier(2), stores._create

    def together(path: Path) -> None:
        both.wait(10)
        real(path)

    monkeypatch.setattr(stores, "_create", together)
    salts: list[bytes] = []

    def work() -> None:
        with LogStore.open(tmp_path / "store", create=True) as store:
            salts.append(store.salt)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    meta = json.loads((tmp_path / "store" / "store.json").read_text())
    assert [salt.hex() for salt in salts] == [meta["salt"]] * 2
    real(tmp_path / "store")
    assert json.loads((tmp_path / "store" / "store.json").read_text()) == meta


def test_a_store_whose_making_was_killed_is_made_and_a_foreign_folder_is_not(
    tmp_path: Path,
) -> None:
    LogStore.open(tmp_path / "store", create=True).close()
    (tmp_path / "store" / "store.json").unlink()
    LogStore.open(tmp_path / "store", create=True).close()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        LogStore.open(tmp_path / "mine", create=True)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
