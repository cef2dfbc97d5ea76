"""Each row once: reruns, growing, overlapping, renamed and changed files."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill.curriculum.store import LogStore
from log_rows import NOW, SLOW, ids, names, row, take, write


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """These logs are small."""
    monkeypatch.setattr("distill.curriculum.store.NUM_BUCKETS", 8)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The format of an importer in a package of the user's."""
    (tmp_path / "slow_logs.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "slow_logs:Slow"


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with LogStore.open(tmp_path / "store", create=True) as store:
        yield store


def test_a_rerun_with_nothing_new_reads_no_row_and_touches_no_segment(
    store: LogStore, tmp_path: Path
) -> None:
    log = write(tmp_path / "log.jsonl", [row(n) for n in range(30)])
    assert take(store, log).stored == 30
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "store" / "turns").iterdir()}
    digest = store.digest()
    again = take(store, log)
    assert (again.read, again.stored, again.skipped, again.files) == (0, 0, 1, 0)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "store" / "turns").iterdir()} == before
    assert store.digest() == digest
    assert ids(store) == names(*range(30))


def test_an_appended_log_goes_on_where_it_ended(store: LogStore, tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", [row(n) for n in range(10)])
    take(store, log)
    size = log.stat().st_size
    write(log, [row(n) for n in range(10, 14)], "a")
    report = take(store, log)
    assert (report.read, report.stored) == (4, 4)
    assert [(place.position, place.number) for place in report.resumed_from] == [(size, 10)]
    assert ids(store) == names(*range(14))


def test_a_line_that_was_still_being_written_is_read_when_it_is_whole(
    store: LogStore, tmp_path: Path
) -> None:
    line = json.dumps(row(1)) + "\n"
    log = write(tmp_path / "log.jsonl", [row(0)])
    log.write_text(log.read_text() + line[:40])
    first = take(store, log)
    assert (first.stored, first.dropped) == (1, Counter(truncated_file=1))
    (stop,) = first.stopped
    assert (stop.reason, stop.place.number) == ("truncated_file", 1)
    assert take(store, log).skipped == 1
    log.write_text(json.dumps(row(0)) + "\n" + line)
    assert take(store, log).stored == 1
    assert ids(store) == names(0, 1)
    assert store.drop_counts() == {}


def test_overlapping_files_give_each_row_once(store: LogStore, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    write(folder / "a.jsonl", [row(n) for n in range(20)])
    write(folder / "b.jsonl", [row(n) for n in range(10, 30)])
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row(n)) + "\n" for n in range(25, 40))
    pq.write_table(pa.Table.from_pylist([row(n) for n in range(35, 50)]), folder / "d.parquet")
    report = take(store, folder)
    assert ids(store) == names(*range(50))
    assert report.dropped == Counter(duplicate=10 + 5 + 5)
    assert report.read == 20 + 20 + 15 + 15
    assert store.drop_counts() == {"log": {"duplicate": 20}}


def test_a_renamed_file_is_known_and_a_new_one_under_its_name_is_new(
    store: LogStore, tmp_path: Path
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    write(folder / "app.log", [row(n) for n in range(10)])
    take(store, folder)
    (folder / "app.log").rename(folder / "app.1.log")
    write(folder / "app.1.log", [row(10)], "a")
    write(folder / "app.log", [row(11)])
    report = take(store, folder)
    assert (report.read, report.stored, report.renamed) == (2, 2, 1)
    assert ids(store) == names(*range(12))
    assert sorted(Path(file.path).name for file in store.files()) == ["app.1.log", "app.log"]


def test_a_changed_file_is_read_again_and_its_rows_stay_single(
    store: LogStore, tmp_path: Path
) -> None:
    log = write(tmp_path / "log.jsonl", [row(0), row(1), row(1), "broken"])
    assert take(store, log).dropped == Counter(duplicate=1, bad_json=1)
    write(log, [row(5), row(0), row(1), row(1), row(2)])
    report = take(store, log)
    assert (report.stored, report.again) == (2, 2)
    assert report.dropped == Counter(duplicate=1)
    assert store.drop_counts() == {"log": {"duplicate": 1}}
    assert ids(store) == names(0, 1, 2, 5)


def test_a_database_that_grew_or_changed_gives_only_what_is_new(
    store: LogStore, tmp_path: Path
) -> None:
    path = tmp_path / "log.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE log (source_id TEXT, format TEXT, ts INTEGER, served TEXT)")
        values = [(f"id{n}", "normal", NOW - n, '{"model": "m"}') for n in range(5)]
        db.executemany("INSERT INTO log VALUES (?, ?, ?, ?)", values)
    db.close()
    assert take(store, path).stored == 5
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO log VALUES ('id9', 'normal', 7000000000, '{}')")
        db.execute("UPDATE log SET served = '{\"model\": \"n\"}' WHERE source_id = 'id2'")
    db.close()
    report = take(store, path)
    assert (report.stored, report.again) == (1, 4)
    assert report.dropped == Counter(conflicting_id=1)


def test_one_id_with_other_content_keeps_the_first_and_one_content_with_other_ids_too(
    store: LogStore, tmp_path: Path
) -> None:
    rows = [row(0), row(0, text="other"), row(0), {**row(0), "source_id": "x"}, row(1)]
    log = write(tmp_path / "log.jsonl", rows)
    report = take(store, log)
    assert report.dropped == Counter(conflicting_id=1, duplicate=2)
    assert ids(store) == names(0, 1)
    assert [(d.number, d.reason) for d in store.drops()] == [
        (2, "conflicting_id"),
        (3, "duplicate"),
        (4, "duplicate"),
    ]
    assert {drop.file for drop in store.drops("duplicate")} == {str(log)}


def test_a_call_that_was_not_finished_is_taken_when_it_is(
    store: LogStore, tmp_path: Path, slow: str
) -> None:
    rows = [{"text": "a", "done": False}, {"text": "b", "done": True}, {"text": "a", "done": True}]
    log = write(tmp_path / "log.jsonl", rows)
    report = take(store, log, format=slow)
    assert report.dropped == Counter(not_completed=1)
    assert ids(store) == ["a", "b"]
