"""Nothing is kept that was not to be kept: redaction, consent, users, forgetting."""

from __future__ import annotations

import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from distill.curriculum.pii import KeyedHash, Redactor
from distill.curriculum.records import RoutingTurn
from distill.curriculum.store import LogStore
from distill.curriculum.turns import turn_id
from log_rows import NOW, all_turns, names, row, take, write


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """These logs are small."""
    monkeypatch.setattr("distill.curriculum.store.NUM_BUCKETS", 8)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with LogStore.open(tmp_path / "store", create=True) as store:
        yield store


def hide(turn: RoutingTurn) -> RoutingTurn:
    """A redactor that knows one secret."""

    def clean(text: str) -> str:
        return text.replace("SECRET", "*")

    messages = turn.messages and tuple(
        {**each, "content": clean(each["content"])} for each in turn.messages
    )
    outcome = turn.outcome and replace(
        turn.outcome,
        verdicts=tuple(replace(v, label=v.label and clean(v.label)) for v in turn.outcome.verdicts),
    )
    return replace(turn, messages=messages, outcome=outcome)


def fail(turn: RoutingTurn) -> RoutingTurn:
    raise ValueError("SECRET")


def raw_bytes(folder: Path) -> bytes:
    """Everything in the store, segments uncompressed."""
    found = [p.read_bytes() for p in folder.rglob("*") if p.is_file()]
    for path in folder.rglob("*.arrow"):
        found.append(repr(pa.ipc.open_file(path).read_all().to_pylist()).encode())
    return b"".join(found)


def test_what_the_redactor_takes_out_is_nowhere_in_the_store(
    store: LogStore, tmp_path: Path
) -> None:
    evidence = {"ref": "id0", "verdict": {"source": "user", "name": "n", "label": "SECRET here"}}
    rows = [row(0, text="my SECRET"), evidence, row(1, turn_index="SECRET")]
    log = write(tmp_path / "log.jsonl", rows)
    report = take(store, log, redact=hide)
    assert (report.stored, report.evidence) == (1, 1)
    assert b"SECRET" not in raw_bytes(tmp_path / "store")
    (turn,) = all_turns(store)
    assert turn.messages is not None
    assert turn.messages[0]["content"] == "my *"
    assert store.evidence_for(["id0"])["id0"][0].verdict.label == "* here"
    copy = write(tmp_path / "copy.jsonl", rows)
    assert take(store, copy, redact=None).dropped["duplicate"] == 1


def test_a_row_that_cannot_be_redacted_is_not_stored(store: LogStore, tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", [row(0, text="my SECRET")])
    assert take(store, log, redact=fail).dropped == Counter(redaction_failed=1)
    assert b"SECRET" not in raw_bytes(tmp_path / "store")


def test_nothing_of_a_source_or_row_without_consent_is_stored(
    store: LogStore, tmp_path: Path
) -> None:
    log = write(tmp_path / "log.jsonl", [row(n) for n in range(3)])
    assert take(store, log, name="no", consent=False).dropped == Counter(no_consent=3)
    assert take(store, write(tmp_path / "b.jsonl", [row(9, consent=False)])).dropped == Counter(
        no_consent=1
    )
    assert store.num_turns == 0
    assert b"question" not in raw_bytes(tmp_path / "store")


def test_users_are_kept_as_keyed_hashes_and_only_their_owner_reads_the_key(
    store: LogStore, tmp_path: Path
) -> None:
    take(store, write(tmp_path / "log.jsonl", [row(n) for n in range(5)]))
    assert {turn.user for turn in all_turns(store)} == {
        store.user_key(f"user{n}") for n in range(5)
    }
    assert b"user3" not in raw_bytes(tmp_path / "store")
    mode = (tmp_path / "store" / "store.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    with LogStore.open(tmp_path / "other", create=True) as other:
        assert other.user_key("user3") != store.user_key("user3")


@pytest.mark.parametrize("kind", ["user", "session", "source"])
def test_what_is_forgotten_is_gone_and_does_not_come_back(
    kind: str, store: LogStore, tmp_path: Path
) -> None:
    evidence = [
        {"ref": f"id{n}", "verdict": {"source": "user", "name": "thumb", "value": 1}}
        for n in range(6)
    ]
    log = write(tmp_path / "log.jsonl", [*[row(n) for n in range(12)], *evidence])
    take(store, log)
    take(store, write(tmp_path / "b.jsonl", [row(n) for n in range(20, 26)]), name="other")
    name = {"user": "user2", "session": "s1", "source": "log"}[kind]
    key = store.user_key(name)
    gone = [
        turn
        for turn in all_turns(store)
        if name in (turn.session_id, turn.source) or turn.user == key
    ]
    assert gone
    kept = {t.source_id for t in all_turns(store)} - {t.source_id for t in gone}
    with LogStore.open(tmp_path / "store") as reader:
        assert reader.num_turns == 18
        assert store.forget(**{kind: name}, now_ms=NOW) == sorted(map(turn_id, gone))
        assert {turn.source_id for turn in all_turns(reader)} == kept
    refs = {turn.source_id for turn in gone}
    assert set(store.evidence_for(names(*range(6)))) == set(names(*range(6))) - refs
    left = raw_bytes(tmp_path / "store")
    assert not any(f"question {t.source_id[2:]}'".encode() in left for t in gone)
    again = take(store, write(tmp_path / "c.jsonl", [row(n) for n in range(12)]))
    assert again.dropped["forgotten"] == sum(turn.source == "log" for turn in gone)
    late = [row(50, session="s1", user="user2"), row(51, session="s1", user="user2", ts=NOW + 1)]
    take(store, write(tmp_path / "d.jsonl", late))
    assert {t.source_id for t in all_turns(store)} == kept | {"id51"}
    assert store.forget(session="nobody") == []


def test_personal_ids_are_hashed_and_still_lead_to_evidence_and_to_what_is_to_be_forgotten(
    store: LogStore, tmp_path: Path
) -> None:
    name = "ann@example.org"
    evidence = {"ref": name, "verdict": {"source": "user", "name": "thumb", "value": 1}}
    rows = [row(0, session=name, source_id=name), row(1, session="other"), evidence]
    redact = Redactor(pseudonym=KeyedHash(store.salt))
    take(store, write(tmp_path / "log.jsonl", rows), redact=redact)
    assert name.encode() not in raw_bytes(tmp_path / "store")
    (turn,) = (turn for turn in all_turns(store) if turn.session_id != "other")
    assert turn.source_id != name
    assert list(store.evidence_for([turn.source_id])) == [turn.source_id]
    assert store.forget(session=name, now_ms=NOW) == [turn_id(turn)]
    assert store.evidence_for([turn.source_id]) == {}
    again = take(store, write(tmp_path / "copy.jsonl", rows), redact=redact)
    assert again.dropped == Counter(forgotten=1, duplicate=1)
    assert (again.stored, again.evidence) == (0, 0)
