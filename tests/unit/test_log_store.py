"""The log store: each row once, every dropped row with its reason, and nothing kept that was not
to be kept."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from distill.curriculum.columns import SCHEMA, decode, encode, messages_json, tools_json
from distill.curriculum.prepare import Source
from distill.curriculum.records import (
    Decision,
    Outcome,
    PolicyStep,
    Prediction,
    Request,
    RoutingTurn,
    Served,
    Verdict,
)
from distill.curriculum.store import LogStore
from distill.errors import ConfigError, DataError
from log_rows import NOW, SLOW, ids, names, row, take, whole, write
from tree import ROOT

FULL = RoutingTurn(
    source="s",
    source_id="one",
    format="normal",
    session_id="s1",
    turn_index=3,
    ts=NOW,
    trace_id="t",
    parent_id="p",
    user="ann",
    scene="code",
    tags=("a", "b"),
    request=Request(prompt_sha256="ab", tools_sha256="cd", tokens_in=5),
    prediction=Prediction(
        tier=1,
        probs=(0.1, 0.6, 0.2, 0.1),
        confidence=0.6,
        score=0.3,
        router="r",
        router_version="1",
    ),
    decision=Decision(
        tier=2,
        policy=(PolicyStep(stage="gate", applied=True, detail={"threshold": 0.5, "x": [1]}),),
        reason="gate",
        requested_model="m",
        propensity=0.25,
    ),
    served=Served(
        model="m", provider="p", tier=2, kind="ensemble", fallback_hops=1, cache_hit=False
    ),
    outcome=Outcome(
        status="failure",
        finish_reason="stop",
        error="e",
        verdicts=(Verdict(source="user", name="thumb", value=1.0, label="up", ts=NOW),),
        complaint=True,
        reask=False,
        escalated=True,
        latency_ms=1.5,
        ttft_ms=0.5,
        tokens_out=7,
        reasoning_tokens=2,
        cost=0.01,
        baseline_cost=0.1,
    ),
    messages=(
        {"role": "user", "content": "hé \n\u2028"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "n": 1.5}]},
    ),
    num_prompt=1,
    tools=({"type": "function", "function": {"name": "f"}},),
    truncated=True,
    sample_rate=0.5,
    raw_sha256="00",
)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The format of an importer in a package of the user's."""
    (tmp_path / "slow_logs.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "slow_logs:Slow"


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """These logs are small."""
    monkeypatch.setattr("distill.curriculum.store.NUM_BUCKETS", 8)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with LogStore.open(tmp_path / "store", create=True) as store:
        yield store


# -- columns --------------------------------------------------------------------------------------


def test_turns_come_back_from_columns_as_they_were_and_missing_layers_stay_missing() -> None:
    bare = RoutingTurn(source="s", source_id="two", format="x", messages=())
    some = replace(FULL, prediction=None, outcome=Outcome(), served=None, tools=(), messages=None)
    turns = [FULL, bare, some]
    texts = [(messages_json(turn), tools_json(turn)) for turn in turns]
    batch = encode(turns, texts, [turn.user for turn in turns], [bytes(16)] * 3)
    assert batch.schema == SCHEMA
    assert decode(batch) == turns
    assert decode(pa.Table.from_batches([batch.slice(1, 2)])) == turns[1:]
    assert batch.column("served").null_count == 2


# -- bad input ------------------------------------------------------------------------------------


def test_every_bad_row_is_counted_under_its_reason_and_the_good_ones_are_kept(
    store: LogStore, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    bad = [
        b'{"source_id": "x", ',
        b'{"source_id": "\xff"}',
        b"[]",
        b'{"what": 1}',
        json.dumps(row(1, ts="yesterday")).encode(),
        json.dumps(row(2, ts=NOW + 10**10)).encode(),
        json.dumps(row(3, turn_index="x")).encode(),
        json.dumps(row(4, text="y" * 3000)).encode(),
        json.dumps(row(5, turn_index=2**70)).encode(),
    ]
    good = [json.dumps(row(n)).encode() for n in range(10, 20)]
    lines = [line for pair in zip(good, bad, strict=False) for line in pair] + good[9:]
    log.write_bytes(b"\n".join([*lines, b'{"source_id": "cu']))
    report = take(store, log, max_line_bytes=2000)
    assert ids(store) == names(*range(10, 20))
    assert report.dropped == Counter(
        bad_json=1,
        bad_encoding=1,
        not_an_object=1,
        unknown_format=1,
        future=1,
        huge_row=1,
        truncated_file=1,
        wrong_type=report.dropped["wrong_type"],
        bad_time=report.dropped["bad_time"],
    )
    assert report.dropped.total() == len(bad) + 1
    assert report.read == report.stored + len(bad) + 1
    assert Counter(drop.reason for drop in store.drops()) == report.dropped


def test_a_file_that_cannot_be_read_is_reported_and_the_next_one_goes_on(
    store: LogStore, tmp_path: Path
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(b"PAR1 and no more")
    (folder / "b.jsonl").write_bytes(b"")
    write(folder / "c.jsonl", [row(0)])
    (folder / "d.jsonl").symlink_to(folder / "missing")
    report = take(store, folder)
    assert ids(store) == names(0)
    (stop,) = report.stopped
    assert Path(stop.place.file).name == "a.parquet"
    assert report.dropped == Counter(unreadable_file=1)
    missing = take(store, tmp_path / "nowhere")
    assert [(each.path, each.why) for each in missing.unreadable] == [
        (str(tmp_path / "nowhere"), "no file there")
    ]


def test_a_log_whose_schema_changes_half_way_is_followed_and_counted(
    store: LogStore, tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    log = write(tmp_path / "log.jsonl", ["{}", *[row(n) for n in range(5)], chat, {"odd": 1}])
    report = take(store, log)
    assert report.formats == Counter(normal=5, chat=1)
    assert report.schema_changes == 1
    assert report.dropped == Counter(unknown_format=2)
    assert store.files()[0].importer == "normal"


def test_an_importer_that_breaks_costs_its_row_and_not_the_import(
    store: LogStore, tmp_path: Path, slow: str
) -> None:
    log = write(tmp_path / "log.jsonl", [{"text": "a", "done": 3}, {"text": "b", "done": True}])
    report = take(store, log, format=slow)
    assert report.dropped == Counter(wrong_type=1)
    assert ids(store) == ["b"]


# -- the store ------------------------------------------------------------------------------------


def test_a_session_lies_in_one_bucket_and_the_digest_ignores_the_order(
    store: LogStore, tmp_path: Path
) -> None:
    rows = [row(n) for n in range(90)]
    take(store, write(tmp_path / "log.jsonl", rows))
    where: dict[str | None, set[int]] = {}
    for bucket in range(store.num_buckets):
        for turn in store.turns(bucket):
            where.setdefault(turn.session_id, set()).add(bucket)
    assert len(where) == 30
    assert all(len(buckets) == 1 for buckets in where.values())
    random.Random(0).shuffle(rows)
    with LogStore.open(tmp_path / "other", create=True) as other:
        for n in range(3):
            take(other, write(tmp_path / f"part{n}.jsonl", rows[n * 30 : n * 30 + 30]))
        assert len(other.segments) == 3
        assert other.digest() == store.digest()
        other.forget(session="s1")
        assert other.digest() != store.digest()


def test_coverage_counts_what_each_source_tells(store: LogStore, tmp_path: Path) -> None:
    rows = [row(n) for n in range(8)]
    rows += [{"source_id": "x", "format": "normal", "outcome": {"status": "failure"}}]
    take(store, write(tmp_path / "log.jsonl", rows))
    found = store.coverage()["log"]
    assert (found.turns, found.sessions, found.messages) == (9, 3, 8)
    assert found.layers == {"prediction": 0, "decision": 0, "served": 8, "outcome": 1}
    assert (found.first, found.last) == (NOW - 1_000_000, NOW - 1_000_000 + 7)
    assert found.tiers["served"] == {0: 2, 1: 2, 2: 2, 3: 2}
    assert found.models == {"m": 8}
    table = store.table(None, ["ts", "served"])
    assert (table.num_rows, table.column_names) == (9, ["ts", "served"])


def test_two_processes_give_the_same_store_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.curriculum.ingest.CHUNK_ROWS", 100)
    monkeypatch.setattr("distill.curriculum.ingest.BATCH_ROWS", 500)
    rows: list[Any] = [row(n) for n in range(1200)]
    rows[100:100] = [row(3), row(7, text="other"), "broken"]
    log = write(tmp_path / "log.jsonl", rows)
    found = []
    for jobs in (1, 2):
        with LogStore.open(tmp_path / f"store{jobs}", create=True) as store:
            store.salt = bytes(32)
            report = whole(store, log, jobs=jobs, redact=copy.copy)
            files = sorted((tmp_path / f"store{jobs}" / "turns").iterdir())
            found.append(([p.read_bytes() for p in files], report.sources, list(store.drops())))
    assert found[0] == found[1]
    assert found[0][1][0].stored == 1200


def test_wrong_sources_are_refused_before_anything_is_read(store: LogStore, tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", [row(0)])
    wrong: list[Mapping[str, Any]] = [
        {"format": "nothing"},
        {"tiers": {"m": 9}},
        {"options": {"container": "xml"}},
        {"jobs": 0},
        {"jobs": 2, "redact": lambda turn: turn},
    ]
    for changes in wrong:
        with pytest.raises(ConfigError):
            take(store, log, **changes)
    one = Source(name="log", path=str(log))
    with pytest.raises(ConfigError, match="two sources are called 'log'"):
        store.ingest([one, one], redact=None, now_ms=NOW)
    with pytest.raises(ConfigError, match="exactly one"):
        store.forget()
    assert store.num_turns == 0


def test_only_a_store_is_opened_and_one_writer_at_a_time_works(
    store: LogStore, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="is no log store"):
        LogStore.open(tmp_path / "none")
    write(tmp_path / "log.jsonl", [])
    with pytest.raises(ConfigError, match="not empty"):
        LogStore.open(tmp_path, create=True)
    with store.lock(), pytest.raises(ConfigError, match="another import into log store"):
        take(store, tmp_path / "log.jsonl")
    meta = tmp_path / "store" / "store.json"
    meta.write_text(meta.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(DataError, match="expected format 1, found 9"):
        LogStore.open(tmp_path / "store")


def test_an_interrupted_import_says_where_it_will_go_on(store: LogStore, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [row(n) for n in range(5)])
    source = Source(name="log", path=str(tmp_path / "a.jsonl"))

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        store.ingest([source], redact=None, now_ms=NOW, progress=stop)
    assert caught.value.__notes__ == [
        f"the import stopped; it will go on at {tmp_path / 'a.jsonl'}, row 1, position 0"
    ]
    assert take(store, tmp_path / "a.jsonl").stored == 5


MEMORY = """
import resource, sys
from pathlib import Path
from distill.curriculum import ingest, store
from distill.curriculum.prepare import Source
from distill.curriculum.store import LogStore

store.NUM_BUCKETS = 8
ingest.BATCH_ROWS = ingest.CHUNK_ROWS = 250
for log in sys.argv[1:]:
    with LogStore.open(Path(log).with_suffix(".store"), create=True) as logs:
        logs.ingest([Source(name="log", path=log)], redact=None, now_ms=0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(logs.num_turns, peak // 1024)
"""


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    logs = [
        write(tmp_path / f"{count}.jsonl", [row(n, text=f"{n} " * 400) for n in range(count)])
        for count in (500, 5000)
    ]
    words = [sys.executable, "-c", MEMORY, *map(str, logs)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (few, low), (many, high) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert (few, many) == (500, 5000)
    assert logs[1].stat().st_size > 10_000_000
    assert high < low * 1.15
