"""Files of every kind as rows, bad rows by their reasons, and resuming anywhere."""

from __future__ import annotations

import bz2
import gzip
import json
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill.curriculum.drops import REASONS, RowError
from distill.curriculum.reading import Reading, Row, container_of, discover, parse, read_rows
from distill.curriculum.splitting import JsonValues, csv_records, lines

ROWS: list[dict[str, Any]] = [
    {"id": "a", "n": 1, "text": 'say "hi", {x} [y]'},
    {"id": "b", "n": 2, "text": "line\nbreak \\ é 漢"},
    {"id": "c", "n": 3, "text": ""},
]


def rows_of(path: Path, position: int = 0, number: int = 0, **options: Any) -> list[Row]:
    reading = Reading(**options)
    return list(read_rows(path, reading, container_of(path, reading), position, number))


def good(rows: list[Row]) -> list[dict[str, Any]]:
    return [dict(parse(row.raw)) for row in rows if not row.reason]


def reasons(rows: list[Row]) -> list[str]:
    return [row.reason for row in rows if row.reason]


def jsonl(rows: list[dict[str, Any]] = ROWS) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def zstd_stream(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def make(path: Path) -> None:
    """ROWS in the container that the name says."""
    name = path.name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    elif name.endswith(".feather"):
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table().schema) as out:
            out.write_table(table(), max_chunksize=2)
    elif name.endswith(".arrow"):
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table().schema) as out:
            out.write_table(table(), max_chunksize=2)
    elif name.endswith(".db"):
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE log (id TEXT, n INTEGER, text TEXT)")
            db.executemany("INSERT INTO log VALUES (:id, :n, :text)", ROWS)
        db.close()
    else:
        body = {
            "jsonl": jsonl(),
            "array": json.dumps(ROWS, indent=1).encode(),
            "pretty": b"\n".join(json.dumps(row, indent=2).encode() for row in ROWS),
            "tight": json.dumps(ROWS, separators=(",", ":")).encode(),
            "utf16": jsonl().decode().encode("utf-16"),
            "mark": b"\xef\xbb\xbf" + jsonl(),
        }[path.name.split(".")[0]]
        pack = {".gz": gzip.compress, ".zst": zstd_stream}.get(path.suffix, bytes)
        path.write_bytes(pack(body))


def table() -> Any:
    return pa.Table.from_pylist(ROWS)


NAMES = (
    "jsonl.jsonl", "array.json", "tight.json", "pretty.json", "jsonl.json", "utf16.jsonl",
    "mark.jsonl", "jsonl.jsonl.gz", "array.json.gz", "jsonl.jsonl.zst", "jsonl.log",
    "t.parquet", "t.feather", "t.arrow", "t.db",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_container_gives_the_same_rows_and_resumes_behind_each(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    make(path)
    found = rows_of(path)
    assert good(found) == ROWS
    assert [row.number for row in found] == [1, 2, 3]
    for n, row in enumerate(found):
        rest = rows_of(path, row.end, row.number)
        assert good(rest) == ROWS[n + 1 :], n
        assert rest == found[n + 1 :]


def test_csv_cells_hold_quotes_and_newlines_and_empty_ones_are_null(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text('id,text\na,"say ""hi"", now"\nb,"two\nlines"\nc,\n\nd,x,y\n')
    found = rows_of(path)
    assert good(found) == [
        {"id": "a", "text": 'say "hi", now'},
        {"id": "b", "text": "two\nlines"},
        {"id": "c", "text": None},
    ]
    assert reasons(found) == ["wrong_type"]
    assert found[-1].detail == "expected 2 cells, found 3"
    assert good(rows_of(path, found[0].end, 1)) == good(found)[1:]
    tabs = tmp_path / "log.tsv"
    tabs.write_text("id\ttext\na\tb,c\n")
    assert good(rows_of(tabs)) == [{"id": "a", "text": "b,c"}]


def test_a_quote_that_is_never_closed_costs_one_row_and_not_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    body = "".join(f"r{n},text\n" for n in range(200))
    path.write_text('id,text\nbad,"open\n' + body)
    found = rows_of(path, max_row=300)
    assert reasons(found) == ["huge_row"]
    assert [row["id"] for row in good(found)] == [f"r{n}" for n in range(200)]


def test_bad_lines_are_named_and_the_next_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    bad = [
        b'{"id": ',
        b'{"id": "\xff\xfe"}',
        b"[1, 2]",
        b"7",
        '{"id": "x"}'.encode("utf-16-le"),
        b'{"text": "' + b"x" * 500 + b'"}',
        b"{" * 5000,
        b'{"a": "\\ud800"}',
    ]
    path.write_bytes(b"\n".join([*bad, b"", b"  ", b'{"id": "good"}\r', b""]))
    kinds = []
    for row in rows_of(path, max_row=400):
        try:
            if row.reason:
                raise RowError(row.reason, row.detail)
            kinds.append(parse(row.raw)["id"])
        except RowError as error:
            kinds.append(error.reason)
    assert kinds == [
        "bad_json",
        "bad_encoding",
        "not_an_object",
        "not_an_object",
        "bad_encoding",
        "huge_row",
        "huge_row",
        "bad_json",
        "good",
    ]
    assert set(kinds) - {"good"} <= set(REASONS)


def test_a_deep_line_is_bad_json_and_not_a_crash() -> None:
    with pytest.raises(RowError, match="not valid JSON"):
        parse(b'{"a":' * 5000 + b"1" + b"}" * 5000)


def test_a_huge_line_is_skipped_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(32):
            file.write(b"x" * 1024 * 1024)
        file.write(b'"}\n{"id": "after"}\n')
    tracemalloc.start()
    found = rows_of(path, max_row=1024 * 1024)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reasons(found) == ["huge_row"]
    assert good(found) == [{"id": "after"}]
    assert peak < 8 * 1024 * 1024


@pytest.mark.parametrize("pack", [gzip.compress, zstd, zstd_stream, bytes])
def test_a_cut_file_gives_what_is_whole_and_goes_on_when_it_is_completed(
    pack: Any, tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    many = [{"id": n, "text": f"{n * 7919 % 1000003} words " * 5} for n in range(3000)]
    whole = pack(jsonl(many))
    path.write_bytes(whole[: len(whole) * 2 // 3])
    found = rows_of(path)
    kept = good(found)
    assert reasons(found) == ["truncated_file"]
    assert kept == many[: len(kept)]
    assert len(kept) > (300 if pack is not zstd else -1)
    last = found[-1]
    assert last.end == last.start
    path.write_bytes(whole)
    assert kept + good(rows_of(path, last.end, last.number - 1)) == many


def test_a_cut_array_goes_on_inside_the_array(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    whole = json.dumps(ROWS).encode()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        found = rows_of(path, container="json")
        assert reasons(found) == ["truncated_file"]
        kept = good(found)
        path.write_bytes(whole)
        rest = rows_of(path, found[-1].end, found[-1].number - 1, container="json")
        assert kept + good(rest) == ROWS, cut
        assert reasons(rest) == []


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_splitters_do_not_depend_on_where_the_chunks_end(size: int) -> None:
    def chunks(data: bytes) -> Any:
        return (data[n : n + size] for n in range(0, len(data), size))

    array = json.dumps([{"t": 'a\\"b\\\\'}, 5, "x,]", [1, {"k": []}], None], indent=1).encode()
    assert list(JsonValues(0, 99).split(chunks(array))) == list(JsonValues(0, 99).split([array]))
    rows = [raw for *_, raw, _ in JsonValues(0, 99).split(chunks(array))]
    assert [json.loads(raw or b"") for raw in rows] == json.loads(array)
    text = b'a,"x\ny"\n"""",b\n\n'
    assert list(csv_records(chunks(text), 0, 99)) == list(csv_records([text], 0, 99))
    for limit in (1, 4, 99):
        assert list(lines(chunks(text), 0, limit)) == list(lines([text], 0, limit))


def test_a_huge_element_of_an_array_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps([{"id": "a"}, {"id": "x" * 1000}, {"id": "b"}]))
    found = rows_of(path, max_row=100)
    assert [row.reason for row in found] == ["", "huge_row", ""]
    assert good(found) == [{"id": "a"}, {"id": "b"}]


def test_tables_of_a_database_are_chosen_by_name(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE other (x)")
        db.execute("CREATE TABLE router_decisions (id TEXT PRIMARY KEY, v BLOB) WITHOUT ROWID")
        db.execute("INSERT INTO router_decisions VALUES ('a', x'00ff'), ('b', NULL)")
        db.execute("CREATE VIEW seen AS SELECT id FROM router_decisions")
    db.close()
    found = rows_of(path)
    assert good(found) == [{"id": "a", "v": "AP8="}, {"id": "b", "v": None}]
    assert good(rows_of(path, found[0].end, 1)) == [{"id": "b", "v": None}]
    assert good(rows_of(path, table="seen")) == [{"id": "a"}, {"id": "b"}]
    (wrong,) = rows_of(path, table="none")
    assert (wrong.reason, wrong.detail[:15]) == ("unreadable_file", "no table 'none'")
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE router_decisions")
        db.execute("DROP VIEW seen")
        db.execute("CREATE TABLE more (x)")
    db.close()
    (wrong,) = rows_of(path)
    assert "several tables: other, more" in wrong.detail


@pytest.mark.parametrize("name", ["t.parquet", "t.feather", "t.arrow", "t.db"])
def test_a_damaged_table_says_so_and_where(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    make(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:20] + b"\x07" * (len(whole) - 20))
    found = rows_of(path)
    assert found[-1].reason in ("unreadable_file", "bad_encoding")
    path.write_bytes(whole[:-30])
    found = rows_of(path)
    assert found == [] or found[-1].reason in ("", "unreadable_file")


def test_times_decimals_and_nan_of_a_table_become_plain_json(tmp_path: Path) -> None:
    from datetime import UTC, datetime
    from decimal import Decimal

    path = tmp_path / "t.parquet"
    row = {"at": datetime(2026, 1, 2, tzinfo=UTC), "cost": Decimal("0.25"), "x": float("nan")}
    pq.write_table(pa.Table.from_pylist([row]), path)
    (found,) = good(rows_of(path))
    assert found["cost"] == 0.25
    assert found["x"] is None
    assert datetime.fromisoformat(found["at"]) == row["at"]


def test_folders_and_patterns_give_logs_and_nothing_else(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json.gz", "sub/c.parquet", "README.md", ".hide.jsonl", "x.db-wal"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    names = [str(path.relative_to(tmp_path)) for path in discover(tmp_path)]
    assert names == ["a.json.gz", "b.jsonl", "sub/c.parquet"]
    assert discover(str(tmp_path / "*.jsonl")) == [tmp_path / "b.jsonl"]
    assert discover(tmp_path / "missing") == []


def test_a_dataset_saved_on_disk_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"), num_shards=2)
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:1])})
    both.save_to_disk(str(tmp_path / "two"))
    one = [row for path in discover(tmp_path / "one") for row in good(rows_of(path))]
    two = [row for path in discover(tmp_path / "two") for row in good(rows_of(path))]
    assert (one, two) == (ROWS, ROWS[:1])


def test_something_else_is_refused_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(bz2.compress(jsonl()))
    found = rows_of(path)
    assert good([row for row in found if row.reason]) == []
    with pytest.raises(RowError):
        parse(next(row.raw for row in found if not row.reason))
    path.write_bytes(b"")
    assert rows_of(path) == []
