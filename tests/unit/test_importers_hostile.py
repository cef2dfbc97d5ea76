"""Damaged rows: whatever is in them, importers give turns, evidence or a row error."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from distill.curriculum.drops import REASONS, RowError
from distill.curriculum.importers import IMPORTERS, Context, Importer, detect, from_plain, to_plain
from distill.curriculum.records import Evidence, RoutingTurn
from distill.curriculum.tiers import Tiers
from import_rows import OPTIONS, ROWS, good, told

NOW = 1_790_000_000_000
NESTED: Any = "x"
for _ in range(300):
    NESTED = [NESTED]
GARBAGE: list[Any] = [
    None, True, False, 0, -1, 2**70, 10**5000, -0.5, 1e308, float("nan"), float("inf"), "", "x",
    "None", "[", "{", "[1]", '{"a": 1}', "[null]", '"q"', "\ud800", "é\udfff", "9" * 5000, "c9",
    [], {}, [None], [[]], [{}], {"role": 5}, {"content": None}, {"": ""}, [{"role": "user"}],
    ["a", 1], b"bytes", {1: 2}, object(), NESTED, {"stringValue": 3},
    {"arrayValue": {"values": 7}}, {"kvlistValue": [1]}, [{"type": "text"}],
    [{"type": "tool_call"}], [{"key": "a", "value": {"intValue": "x"}}],
]  # fmt: skip


def context(name: str) -> Context:
    tiers = Tiers(models={"model-s": 0, "large*": 3})
    return Context(source="s", tiers=tiers, now_ms=NOW, options=OPTIONS.get(name, {}))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of what is inside a value, down to twelve levels."""
    keys: list[Any] = list(value) if isinstance(value, dict) else []
    keys = list(range(len(value))) if isinstance(value, list) else keys
    found = []
    for key in keys if len(path) < 12 else ():
        found += [(*path, key), *places(value[key], (*path, key))]
    return found


def mutated(row: dict[str, Any], rnd: random.Random) -> dict[str, Any]:
    row = copy.deepcopy(row)
    for name, value in list(row.items()):  # look inside JSON text as well, and put it back
        if isinstance(value, str) and value.startswith(("[", "{")) and rnd.random() < 0.5:
            row[name] = json.loads(value)
    for _ in range(rnd.randint(1, 3)):
        where = rnd.choice(places(row) or [("extra",)])
        holder: Any = row
        for key in where[:-1]:
            holder = holder[key]
        kind = rnd.random()
        if kind < 0.2 and isinstance(holder, dict):
            holder.pop(where[-1], None)
        elif kind < 0.3 and isinstance(holder, dict):
            holder[rnd.choice(["extra", "type", "gen_ai.x", "\udcff"])] = rnd.choice(GARBAGE)
        else:
            holder[where[-1]] = copy.copy(rnd.choice(GARBAGE))
    return row


def outcome_of(
    importer: Importer, row: Any, where: Context
) -> tuple[list[RoutingTurn | Evidence], RowError | None]:
    """What an importer makes of a row. Any other exception than a row error fails the test."""
    try:
        found = list(importer.read(row, where))
        errors = [entry for entry in found if isinstance(entry, RowError)]
        return good(found), errors[0] if errors else None
    except RowError as error:
        return [], error


@pytest.mark.parametrize("name", list(IMPORTERS))
def test_mutated_rows_give_turns_evidence_or_named_row_errors(name: str) -> None:
    importer, rnd = IMPORTERS[name], random.Random(f"mutations of {name}")
    seen = {"turn": 0, "error": 0}
    for _ in range(700):
        row = mutated(rnd.choice(ROWS[name]), rnd)
        detect(row)
        found, error = outcome_of(importer, row, context(name))
        if error is not None:
            assert error.reason in REASONS
            assert len(str(error).encode()) < 1000
            seen["error"] += 1
        for entry in found:
            assert isinstance(entry, RoutingTurn | Evidence)
            # What came through can be stored: JSON in UTF-8, and back without a difference.
            text = json.dumps(to_plain(entry), ensure_ascii=False, allow_nan=False)
            assert from_plain(json.loads(text.encode())) == entry
            seen["turn"] += 1
    assert seen["turn"] > 60
    assert seen["error"] > 30


@pytest.mark.parametrize("name", list(IMPORTERS))
def test_unknown_fields_change_nothing(name: str) -> None:
    strange = {
        "zz_new": 1,
        "zz_more": {"deep": [None, {"a": "b"}]},
        "zz_text": "[{",
        "zz_odd": "\ud800",
    }
    for row in ROWS[name]:
        before = told(list(IMPORTERS[name].read(row, context(name))))
        after = told(list(IMPORTERS[name].read({**row, **strange}, context(name))))
        with_digest = [e for e in before if isinstance(e, RoutingTurn) and "sha256:" in e.source_id]
        assert with_digest or before == after


@pytest.mark.parametrize("name", list(IMPORTERS))
def test_a_row_gives_the_same_turns_every_time_and_is_left_as_it_was(name: str) -> None:
    for row in ROWS[name]:
        kept = copy.deepcopy(row)
        first = told(list(IMPORTERS[name].read(row, context(name))))
        assert told(list(IMPORTERS[name].read(row, context(name)))) == first
        assert row == kept


@pytest.mark.parametrize("name", list(IMPORTERS))
def test_an_empty_row_is_a_row_error_or_a_turn_without_layers(name: str) -> None:
    bare = replace(context(name), options={"fields": {"session_id": "s"}})
    found, error = outcome_of(IMPORTERS[name], {}, bare)
    assert error is None or error.reason in ("missing_field", "wrong_type", "no_call")
    for turn in found:
        assert isinstance(turn, RoutingTurn)
        assert not any(turn.completeness.values())
