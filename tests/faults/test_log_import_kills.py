"""An import is killed at any moment, again and again, and every row still arrives exactly once."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from distill.curriculum import segments
from distill.curriculum.prepare import Source
from distill.curriculum.state import State
from distill.curriculum.store import LogStore
from log_rows import NOW, all_turns, ids, names, row, take, write
from tree import ROOT

ROWS = 2400
IMPORT = """
import os, sys
from pathlib import Path
import distill.curriculum.importers
from distill.curriculum import ingest, store
from distill.curriculum.prepare import Source
from distill.curriculum.store import LogStore

store.NUM_BUCKETS = 4
ingest.BATCH_ROWS, ingest.CHUNK_ROWS = 200, 100

def work(jobs, where=sys.argv[2]):
    with LogStore.open(Path(where), create=True) as logs:
        logs.ingest([Source(name="log", path=sys.argv[1])], redact=None, now_ms=0, jobs=jobs)
"""
ONE = (
    IMPORT
    + """
if __name__ == "__main__":
    work(2)
"""
)
MANY = (
    IMPORT
    + """
print("ready", flush=True)
for line in sys.stdin:  # a copy of this process per line: starting Python anew takes longer
    child = os.fork()
    if not child:
        work(1, line.strip())
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
)


def start(code: str, logs: Path, store: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(logs), str(store)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def begin(imports: subprocess.Popen[str], where: Path) -> int:
    """Start an import into a store; its process id."""
    assert imports.stdin is not None
    assert imports.stdout is not None
    imports.stdin.write(f"{where}\n")
    imports.stdin.flush()
    return int(imports.stdout.readline())


def end(imports: subprocess.Popen[str]) -> int:
    """Wait for the import that was started last; its exit code, negative for a signal."""
    assert imports.stdout is not None
    return int(imports.stdout.readline())


def kill_after(imports: subprocess.Popen[str], where: Path, seconds: float) -> bool:
    """Start an import and kill it. Whether it was still at work."""
    child = begin(imports, where)
    time.sleep(seconds)
    with suppress(ProcessLookupError):  # it has ended, and its exit code says how
        os.kill(child, signal.SIGKILL)
    return end(imports) == -signal.SIGKILL


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the child makes: these logs are small."""
    monkeypatch.setattr("distill.curriculum.store.NUM_BUCKETS", 4)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Two files that share 500 rows, with broken lines between."""
    folder = tmp_path / "logs"
    folder.mkdir()
    first = [row(n, text=f"{n} " * 30) for n in range(1400)]
    second = [row(n, text=f"{n} " * 30) for n in range(900, ROWS)]
    write(folder / "a.jsonl", ["broken", *first])
    write(folder / "b.jsonl", [*second[:900], "broken", *second[900:]])
    with (folder / "b.jsonl").open("a") as file:
        file.write('{"cut')
    return folder


def test_a_killed_import_goes_on_and_every_row_arrives_exactly_once(
    logs: Path, tmp_path: Path
) -> None:
    draw = random.Random(5)
    where = tmp_path / "store"
    killed, seen = 0, []
    with start(MANY, logs, where) as imports:
        assert imports.stdout is not None
        assert imports.stderr is not None
        assert imports.stdout.readline() == "ready\n"
        began = time.monotonic()
        begin(imports, tmp_path / "whole")
        assert end(imports) == 0
        whole = time.monotonic() - began  # on this machine
        for _ in range(8):
            killed += kill_after(imports, where, whole * draw.uniform(0.05, 0.3))
            if not (where / "store.json").exists():
                continue
            with LogStore.open(where) as store:  # a reader right after the crash
                turns = [turn.source_id for turn in all_turns(store)]
                assert len(turns) == len(set(turns)) == store.num_turns
                seen.append(len(turns))
        assert imports.stdin is not None
        imports.stdin.close()
        assert imports.stderr.read() == ""
    assert killed >= 3
    assert seen == sorted(seen)
    with LogStore.open(where) as store:
        take(store, logs)
        assert ids(store) == names(*range(ROWS))
        drops = {"bad_json": 2, "duplicate": 500, "truncated_file": 1}
        assert store.drop_counts() == {"log": drops}
        held = {path.name for path in (where / segments.FOLDER).iterdir()}
        assert held == {segment.name for segment in store.segments}
        with LogStore.open(tmp_path / "clean", create=True) as clean:
            take(clean, logs)
            assert clean.digest() == store.digest()


def test_helpers_end_with_a_killed_import_and_the_next_one_goes_on(
    logs: Path, tmp_path: Path
) -> None:
    where = tmp_path / "store"
    child = start(ONE, logs, where)
    deadline = time.monotonic() + 20
    helpers: list[int] = []
    while len(helpers) < 3 and child.poll() is None and time.monotonic() < deadline:
        task = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        helpers = [int(pid) for pid in task.read_text().split()] if task.exists() else []
        time.sleep(0.01)
    child.kill()
    child.communicate()
    while any(_lives(pid) for pid in helpers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_lives(pid) for pid in helpers)
    with LogStore.open(where, create=True) as store:
        take(store, logs)
        assert store.num_turns == ROWS


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Crash(BaseException):
    pass


@pytest.mark.parametrize("moment", ["segment written", "inside the commit", "committed"])
def test_a_crash_between_segment_and_commit_leaves_nothing_behind(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write(tmp_path / "log.jsonl", [row(n) for n in range(20)])
    commit, add = State.commit, State.add_segment

    def crash(*_: object) -> None:
        raise Crash

    with LogStore.open(tmp_path / "store", create=True) as store:
        with monkeypatch.context() as patch:
            if moment == "segment written":
                patch.setattr(State, "commit", crash)
            elif moment == "inside the commit":
                patch.setattr(State, "add_segment", lambda *a: (add(*a), crash()))
            else:
                patch.setattr(State, "commit", lambda *a: (commit(*a), crash()))
            with pytest.raises(Crash):
                take(store, log)
        assert store.num_turns == (20 if moment == "committed" else 0)
        assert len(list((tmp_path / "store" / "turns").iterdir())) == 1
        report = take(store, log)
        assert report.stored == (0 if moment == "committed" else 20)
        assert len(list((tmp_path / "store" / "turns").iterdir())) == 1
        assert ids(store) == names(*range(20))


def test_forgetting_that_crashes_forgets_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LogStore.open(tmp_path / "store", create=True) as store:
        for n in range(3):
            rows = [row(3 * i + n, session=f"s{i % 4}") for i in range(20)]
            take(store, write(tmp_path / f"log{n}.jsonl", rows))
        before = store.digest()
        calls = Counter[str]()

        def die(*_: object) -> None:
            calls["add"] += 1
            if calls["add"] == 2:
                raise Crash

        with monkeypatch.context() as patch:
            add = State.add_segment
            patch.setattr(State, "add_segment", lambda *a: (die(), add(*a)))
            with pytest.raises(Crash):
                store.forget(session="s1", now_ms=NOW)
        assert store.digest() == before
        assert len(store.forget(session="s1", now_ms=NOW)) == 15
        assert "s1" not in {turn.session_id for turn in all_turns(store)}
        assert store.num_turns == 45
        assert len(list((tmp_path / "store" / "turns").iterdir())) == len(store.segments)


def test_a_full_disk_ends_the_import_with_the_place_and_keeps_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill.curriculum import ingest
    from distill.errors import PreflightError

    log = write(tmp_path / "log.jsonl", [row(n) for n in range(30)])
    monkeypatch.setattr(ingest, "BATCH_ROWS", 10)
    monkeypatch.setattr(ingest, "CHUNK_ROWS", 10)
    sync = segments._sync
    calls = []

    def full(path: Path) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, os.strerror(28))
        sync(path)

    with LogStore.open(tmp_path / "store", create=True) as store:
        with monkeypatch.context() as patch:
            patch.setattr(segments, "_sync", full)
            with pytest.raises(PreflightError, match="no space left") as caught:
                store.ingest([Source(name="log", path=str(log))], redact=None, now_ms=NOW)
        position = sum(len(json.dumps(row(n))) + 1 for n in range(10))
        assert caught.value.__notes__ == [
            f"the import stopped; it will go on at {log}, row 11, position {position}"
        ]
        assert store.num_turns == 10
        assert take(store, log).stored == 20


def test_a_reader_is_not_in_the_way_of_a_writer(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", [row(n) for n in range(10)])
    with (
        LogStore.open(tmp_path / "store", create=True) as store,
        LogStore.open(tmp_path / "store") as reader,
    ):
        assert reader.num_turns == 0
        take(store, log)
        assert len(all_turns(reader)) == 10
        with sqlite3.connect(tmp_path / "store" / "state.sqlite") as db:
            (mode,) = db.execute("PRAGMA integrity_check").fetchone()
        db.close()
        assert mode == "ok"
