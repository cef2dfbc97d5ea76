"""Forgetting reaches what is hashed, half done, told by other sources, or lies elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from distill.curriculum.pii import KeyedHash, Redactor
from distill.curriculum.prepare import Source
from distill.curriculum.store import LogStore
from distill.errors import ConfigError
from flows import cli, forgetting_ledger, forgetting_places
from flows.cli import main
from flows.forgetting import Wanted, carry_out, counts, look
from log_rows import NOW, row, write
from logged_homes import built, call, example_ids, filled_store, id_of, light_app, write_log

ANN = Wanted(kind="user", name="ann")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", light_app())
    monkeypatch.setattr("distill.curriculum.store.NUM_BUCKETS", 8)


def stored(home: Path, name: str, rows: list[dict[str, Any]], redact: Any = None) -> LogStore:
    log = write(home / f"{name}.jsonl", rows)
    store = LogStore.open(home / "logs" / "main", create=True)
    redact = Redactor(pseudonym=KeyedHash(store.salt)) if redact else None
    store.ingest([Source(name=name, path=str(log))], redact=redact, now_ms=NOW)
    return store


def left(store: LogStore) -> set[tuple[str, str]]:
    table = store.table(None, ("source", "source_id"))
    return set(zip(table["source"].to_pylist(), table["source_id"].to_pylist(), strict=True))


def thumb(ref: str, label: str = "good") -> dict[str, Any]:
    return {"ref": ref, "verdict": {"source": "user", "name": "thumb", "label": label}}


def test_a_session_whose_id_is_personal_is_found_by_its_plain_name(tmp_path: Path) -> None:
    name = "ann@example.org"
    store = stored(tmp_path, "log", [row(0, session=name), row(1)], redact=True)
    found = look(tmp_path, Wanted(kind="session", name=name))
    assert counts(found)["calls"] == 1
    hashed = f"h:{KeyedHash(store.salt)(name)}"
    assert any((None, hashed) in one.doomed.sessions for one in found.stores)
    carry_out(tmp_path, found, actor="t")
    assert left(store) == {("log", "id1")}
    store.close()


def test_a_session_of_one_source_is_no_session_of_another(tmp_path: Path) -> None:
    mixed = [row(0, session="1", user="ann"), row(1, session="1", user="bob")]
    stored(tmp_path, "a", mixed).close()
    store = stored(tmp_path, "b", [row(5, session="1", user="cho")])
    found = look(tmp_path, ANN)
    assert (counts(found)["calls"], counts(found)["calls_of_others"]) == (1, 1)
    carry_out(tmp_path, found, actor="t")
    assert left(store) == {("b", "id5")}
    stored(tmp_path, "b", [row(5, session="1", user="cho"), row(6, session="1", user="cho")])
    stored(tmp_path, "a", [*mixed, row(2, session="1", user="bob")])
    assert left(store) == {("b", "id5"), ("b", "id6")}
    every = look(tmp_path, Wanted(kind="session", name="1"))
    assert (counts(every)["calls"], every.stores[0].sources) == (2, ("b",))
    store.close()


def test_a_session_can_be_named_with_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, n in (("a", 0), ("b", 5)):
        store = stored(tmp_path, name, [row(n, session="1")])
    home = ["--home", str(tmp_path)]
    assert main(["forget", "--session", "1", "--dry-run", *home]) == 0
    out = capsys.readouterr().out
    assert "2 calls" in out
    assert "in every source, here: a, b" in out
    assert main(["forget", "--session", "1", "--source", "a", "--yes", *home]) == 0
    assert left(store) == {("b", "id5")}
    stored(tmp_path, "a", [row(0, session="1"), row(3, session="1")])
    assert left(store) == {("b", "id5")}
    store.close()


def test_a_removal_killed_between_the_calls_of_a_conversation_is_finished(tmp_path: Path) -> None:
    rows = [row(0, session="1", user="ann"), row(1, session="1", user="bob"), row(2, session="2")]
    store = stored(tmp_path, "a", rows)
    found = look(tmp_path, ANN).stores[0]
    forgetting_ledger.note(store, ANN, found.doomed.ids, found.doomed.sessions, pending=True)
    store.forget(user="ann", now_ms=NOW)  # and not what others said there
    again = look(tmp_path, ANN)
    assert not again.is_empty
    assert counts(again)["calls_of_others"] == 1
    carry_out(tmp_path, again, actor="t")
    assert left(store) == {("a", "id2")}
    assert look(tmp_path, ANN).is_empty
    store.close()


def test_what_another_source_says_of_a_call_goes_and_what_it_says_of_its_own_stays(
    tmp_path: Path,
) -> None:
    stored(tmp_path, "a", [row(0, session="x", user="ann"), row(1, user="bob")]).close()
    stored(tmp_path, "scores", [thumb("id0", "her knee hurts"), thumb("id1")]).close()
    store = stored(tmp_path, "b", [row(0, user="bob", text="other"), thumb("id0", "of b")])
    found = look(tmp_path, ANN)
    assert counts(found)["evidence"] == 1
    carry_out(tmp_path, found, actor="t")
    said = [e for each in store.evidence_for(["id0", "id1"]).values() for e in each]
    assert sorted((e.source, e.ref) for e in said) == [("b", "id0"), ("scores", "id1")]
    store.close()
    assert b"knee" not in (tmp_path / "logs" / "main" / "state.sqlite").read_bytes()


def test_a_source_of_statements_alone_is_forgotten_and_stays_away(tmp_path: Path) -> None:
    stored(tmp_path, "a", [row(0)]).close()
    store = stored(tmp_path, "scores", [thumb("id0")])
    scores = Wanted(kind="source", name="scores")
    found = look(tmp_path, scores)
    assert (counts(found)["evidence"], found.is_empty) == (1, False)
    assert [Path(path).name for path in found.stores[0].files] == ["scores.jsonl"]
    carry_out(tmp_path, found, actor="t")
    assert look(tmp_path, scores).is_empty
    stored(tmp_path, "scores", [thumb("id0"), thumb("id0", "bad")])
    assert store.evidence_for(["id0"]) == {}
    assert left(store) == {("a", "id0")}
    store.close()


def test_what_dropped_rows_of_the_same_logs_told_is_emptied(tmp_path: Path) -> None:
    bad = row(1, user="ann", turn_index="my knee hurts")
    stored(tmp_path, "b", [row(7, user="bob", turn_index="ann told me")]).close()
    stored(tmp_path, "c", [row(8, user="bob", turn_index="a third matter")]).close()
    store = stored(tmp_path, "a", [row(0, user="ann"), bad])
    carry_out(tmp_path, look(tmp_path, ANN), actor="t")
    assert {(d.source, d.reason, bool(d.detail)) for d in store.drops()} == {
        ("a", "wrong_type", False),
        ("b", "wrong_type", False),
        ("c", "wrong_type", True),
    }
    store.close()


# -- curricula elsewhere, and what was killed ------------------------------------------------------


def logged(home: Path) -> Path:
    rows = [call(s, t, user=("ann", "bob")[s % 2]) for s in range(4) for t in range(2)]
    filled_store(home / "logs" / "main", write_log(home / "gateway.jsonl", rows))
    return home / "logs" / "main"


def test_a_curriculum_outside_of_the_home_is_reached_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, out = tmp_path / "home", tmp_path / "disk" / "mine"
    home.mkdir()
    logged(home)
    words = ["curriculum", "build", "--store", "main", "--out", str(out), "--home", str(home)]
    assert main([*words, "curriculum.demand=logged"]) == 0
    assert list(forgetting_places.registered(home)) == [out]
    ann = {id_of("gateway", s, t) for s in (0, 2) for t in range(2)}
    assert example_ids(out) & ann
    found = look(home, ANN)
    assert [one.path for one in found.curricula] == [out]
    carry_out(home, found, actor="t")
    assert not example_ids(out) & ann
    shutil.rmtree(out)
    assert look(home, ANN).unreached == ((out, "was moved or deleted"),)
    capsys.readouterr()
    assert main(["forget", "--user", "ann", "--dry-run", "--home", str(home)]) == 0
    assert f"{out} was moved or deleted" in capsys.readouterr().err


def test_a_build_that_fails_leaves_no_entry_and_one_inside_needs_none(tmp_path: Path) -> None:
    LogStore.open(tmp_path / "logs" / "main", create=True).close()
    words = ["curriculum", "build", "--store", "main", "--home", str(tmp_path)]
    assert main([*words, "--out", str(tmp_path / "mine")]) != 0
    assert list(forgetting_places.registered(tmp_path)) == []
    forgetting_places.register(tmp_path, tmp_path / "curricula" / "one")
    assert list(forgetting_places.registered(tmp_path)) == []
    for _ in range(2):
        forgetting_places.register(tmp_path, tmp_path / "two")
    assert list(forgetting_places.registered(tmp_path)) == [tmp_path / "two"]


def test_what_killed_builds_left_is_swept_and_a_living_one_is_named(tmp_path: Path) -> None:
    store = logged(tmp_path)
    mine = built(tmp_path / "curricula" / "mine", store)
    forgetting_places.register(tmp_path, tmp_path / "out")
    dead = 2**22 + 1  # no process has such a number
    gone = [
        tmp_path / "curricula" / f".next.partial-{dead}-7",
        tmp_path / f".out.partial-{dead}-7",
        tmp_path / "runs" / "r" / "stages" / "c" / f".final.partial-{dead}-7",
        mine / "examples" / f".0.arrow.partial-{dead}",
    ]
    living = tmp_path / "curricula" / ".now.partial-1-1"
    for path in [*gone[:3], living, tmp_path / f".foreign.partial-{dead}-7"]:
        path.mkdir(parents=True)
        (path / "turns.arrow").write_text("texts")
    gone[3].write_text("texts")
    stranger = store / "turns" / "000099.arrow"
    stranger.write_text("texts of a killed import")
    found = look(tmp_path, Wanted(kind="user", name="nobody"))
    assert set(found.leftovers) == set(gone)
    assert found.unreached == ((living, "is being written; repeat this when it is done"),)
    assert found.stores[0].strangers == 1
    carry_out(tmp_path, found, actor="t")
    assert not any(path.exists() for path in [*gone, stranger])
    assert living.exists()
    assert (tmp_path / f".foreign.partial-{dead}-7").exists()
    assert look(tmp_path, Wanted(kind="user", name="nobody")).is_empty


# -- the other commands ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["gone.jsonl"],
        ["log.jsonl", "--format", "nope"],
        ["log.jsonl", "--tier", "small=9"],
        ["log.jsonl", "--redact", "none", "--entities", "a:b"],
        ["log.jsonl", "--entities", "no_such_package:it"],
    ],
)
def test_an_import_that_is_refused_makes_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "log.jsonl", [row(0)])
    assert main(["logs", "import", *words, "--home", str(tmp_path)]) != 0
    assert not (tmp_path / "logs").exists()


def test_clean_rows_hold_no_users_and_tell_equal_ones_apart_from_others(tmp_path: Path) -> None:
    rows = [row(n, user=("ann", "bob")[n % 2]) for n in range(4)]
    log, out = write(tmp_path / "log.jsonl", rows), tmp_path / "clean.jsonl"
    assert main(["logs", "redact", str(log), "--out", str(out)]) == 0
    users = [json.loads(line)["user"] for line in out.read_text().splitlines()]
    assert users[0] == users[2] != users[1] == users[3]
    assert not {"ann", "bob"} & set(users)


def test_forgetting_takes_one_kind_at_a_time(tmp_path: Path) -> None:
    with (
        LogStore.open(tmp_path / "s", create=True) as store,
        pytest.raises(ConfigError, match="exactly one"),
    ):
        store.forget(user="a", source="b")


def test_scores_that_teachers_kept_go_as_a_whole(tmp_path: Path) -> None:
    store = stored(tmp_path, "log", [row(0, session="s"), row(1)])
    scores = tmp_path / "cache" / "scores"
    scores.mkdir(parents=True)
    (scores / "1.safetensors").write_bytes(b"ids close to a text")
    (tmp_path / "cache" / "models").mkdir()
    carry_out(tmp_path, look(tmp_path, Wanted(kind="session", name="s")), actor="t")
    assert not scores.exists()
    assert (tmp_path / "cache" / "models").is_dir()
    store.close()
