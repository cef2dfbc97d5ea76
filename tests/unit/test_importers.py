"""What all importers share: the normal form, mappings, layers, errors, and who reads what."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from distill.curriculum.drops import RowError
from distill.curriculum.importers import (
    IMPORTERS,
    detect,
    from_plain,
    importer_of,
    to_plain,
)
from distill.curriculum.records import (
    Decision,
    Evidence,
    Outcome,
    Prediction,
    RoutingTurn,
    Served,
    Verdict,
)
from distill.curriculum.turns import split
from distill.errors import ConfigError
from import_rows import (
    ASKED,
    CHAT_LINE,
    CONTEXT,
    DECISION_ROW,
    MOMENT,
    NORMAL,
    NORMAL_EVIDENCE,
    OBSERVATION,
    OPTIONS,
    OWN_LOG,
    REPLAY,
    ROWS,
    SAID,
    SPEND_LOG,
    VOTE_100K,
    expected,
    good,
    one,
    read,
)


def test_a_log_of_ones_own_through_a_mapping() -> None:
    assert one("mapped", OWN_LOG, **OPTIONS["mapped"]) == expected(
        "mapped",
        "5",
        session_id="s-1",
        ts=MOMENT,
        scene="support",
        prediction=Prediction(tier=2, probs=(0.25, 0.0, 0.0, 0.75)),
        decision=Decision(tier=1),
        served=Served(model="model-s"),
        outcome=Outcome(
            verdicts=(Verdict(source="user", name="thumb", value=0.0, label="down"),),
            latency_ms=34.5,
        ),
        messages=(ASKED, SAID),
        num_prompt=1,
    )
    with pytest.raises(ConfigError, match=r"did you mean 'served\.model'"):
        one("mapped", OWN_LOG, fields={"served.modle": "model"})
    with pytest.raises(ConfigError, match="expected a mapping"):
        one("mapped", OWN_LOG)


def test_the_normal_form_goes_there_and_back_for_every_turn_of_every_format() -> None:
    seen = 0
    for name, rows in ROWS.items():
        for row in rows:
            for found in good(read(name, row, **OPTIONS.get(name, {}))):
                written = json.loads(json.dumps(to_plain(found)))
                assert from_plain(written) == found
                (again,) = IMPORTERS["normal"].read(written, replace(CONTEXT, raw_sha256="other"))
                assert again == found
                seen += 1
    assert seen > 20


def test_the_normal_form_keeps_its_format_and_takes_the_name_of_its_source() -> None:
    turn = one("normal", NORMAL)
    assert (turn.source, turn.format, turn.source_id, turn.raw_sha256) == (
        "s",
        "litellm",
        "n1",
        "abc",
    )
    assert turn.served == Served(model="m", tier=2, kind="ensemble", cache_hit=False)
    (told,) = read("normal", NORMAL_EVIDENCE)
    assert (told.source, told.ref, told.verdict.value) == ("s", "n1", 0.0)
    assert not one("normal", {**NORMAL, "consent": False}).consent
    with pytest.raises(RowError, match=r"prediction\.tier: expected a tier from 0 to 3"):
        read("normal", {**NORMAL, "prediction": {"tier": 7}})


def test_no_layer_is_made_up() -> None:
    bare = {"request_id": "r", "call_type": "completion", "messages": [ASKED]}
    turn = one("litellm", {**bare, "custom_llm_provider": None})
    assert turn.completeness == {
        "prediction": False,
        "decision": False,
        "served": False,
        "outcome": False,
    }
    observed = {
        (name, layer)
        for name, rows in ROWS.items()
        for layer in ("prediction", "decision")
        for row in rows
        for found in read(name, row, **OPTIONS.get(name, {}))
        if isinstance(found, RoutingTurn) and found.completeness[layer]
    }
    for name in ("langfuse", "routerbench", "arena", "chat"):
        assert not {(name, "prediction"), (name, "decision")} & observed
    for name in ("otel", "openrouter"):
        assert (name, "prediction") not in observed


def test_unknown_tiers_are_none_and_named_in_a_tag() -> None:
    turn = one("opensquilla", {**DECISION_ROW, "final_tier": "platinum"})
    assert turn.decision is not None
    assert (turn.decision.tier, turn.tags) == (None, ("tier?:platinum",))


@pytest.mark.parametrize(
    ("name", "row", "field"),
    [
        ("litellm", {**SPEND_LOG, "prompt_tokens": "many"}, "prompt_tokens: expected a number"),
        ("litellm", {**SPEND_LOG, "cache_hit": "perhaps"}, "cache_hit: expected true or false"),
        ("litellm", {**SPEND_LOG, "metadata": "[1]"}, "metadata: expected an object, found list"),
        ("litellm", {**SPEND_LOG, "messages": [{"role": "queen"}]}, r"messages\[0\]\.role"),
        ("vllm_router", {**REPLAY, "turn_index": -1}, "turn_index: expected a whole number"),
        ("opensquilla", {**DECISION_ROW, "probs": "[0.5,0.5]"}, "probs: expected 4 prob"),
        ("opensquilla", {**DECISION_ROW, "probs": [1, 1, 1, 1]}, "probs: .* add up to 1"),
        ("langfuse", {**OBSERVATION, "total_cost": []}, "total_cost: expected a number"),
        ("arena", {**VOTE_100K, "winner": "me"}, "winner: expected model_a"),
    ],
)
def test_a_wrong_type_names_field_expectation_and_find(name: str, row: Any, field: str) -> None:
    with pytest.raises(RowError, match=field) as error:
        read(name, row)
    assert error.value.reason == "wrong_type"
    assert ", found " in error.value.detail


def test_unreadable_times_and_times_from_the_future_are_named() -> None:
    with pytest.raises(RowError, match="startTime: expected a time") as error:
        read("litellm", {**SPEND_LOG, "startTime": "soon"})
    assert error.value.reason == "bad_time"
    began = MOMENT - 169_000
    for name, row in (("litellm", SPEND_LOG), ("normal", {**NORMAL, "ts": began})):
        late = replace(CONTEXT, now_ms=began - 86_400_000)
        assert list(IMPORTERS[name].read(row, late))
        with pytest.raises(RowError) as error:
            list(IMPORTERS[name].read(row, replace(late, now_ms=late.now_ms - 1)))
        assert error.value.reason == "future"


def test_a_source_without_consent_marks_its_turns() -> None:
    for name, rows in ROWS.items():
        for row in rows:
            refused = replace(CONTEXT, consent=False, options=OPTIONS.get(name, {}))
            for found in good(list(IMPORTERS[name].read(row, refused))):
                assert isinstance(found, Evidence) or not found.consent


def test_the_share_that_a_log_keeps_comes_from_the_row_or_the_options() -> None:
    assert one("chat", CHAT_LINE, sample_rate=0.25).sample_rate == 0.25
    row = {**SPEND_LOG, "metadata": {"sample_rate": 0.1}}
    assert one("litellm", row, sample_rate=0.25).sample_rate == 0.1


def test_every_row_is_recognised_by_its_own_importer() -> None:
    for name, rows in ROWS.items():
        for row in rows:
            others = {n for n, importer in IMPORTERS.items() if importer.recognises(row)}
            if name == "mapped":
                assert others == set()
                assert detect(row) is None
            else:
                assert others - {"chat"} == {name} - {"chat"}
                assert detect(row) == name
    assert detect({}) is None
    assert detect({"a": 1}) is None


def test_importers_are_found_by_name_or_by_module() -> None:
    for name, importer in IMPORTERS.items():
        assert importer.name == name
        assert importer_of(name) is importer
    own = importer_of("distill.curriculum.importers.chat:Chat")
    assert list(own.read(CHAT_LINE, CONTEXT)) == [one("chat", CHAT_LINE)]
    with pytest.raises(ConfigError, match="did you mean 'litellm'"):
        importer_of("litelm")
    for name in ("json:loads", "no_such_module:Importer", "json:nothing"):
        with pytest.raises(ConfigError, match=r"importer|cannot be loaded"):
            importer_of(name)


def test_a_chat_without_a_session_gives_a_turn_per_request():
    row = {
        "id": "c",
        "rating": "up",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "2"},
        ],
    }
    first, second = read("chat", row)
    assert (first.source_id, second.source_id) == ("c/1", "c/2")
    assert first.session_id == second.session_id == "c"
    assert [m["content"] for m in first.messages] == ["Be brief.", "one", "1"]
    assert first.num_prompt == 2
    assert second.messages == tuple(row["messages"])
    assert first.outcome is None
    assert second.outcome is not None  # the rating speaks about the whole, so about its end
    assert [turn.index for turn in split([first, second])] == [0, 1]
    (alone,) = read("chat", {**row, "session_id": "s"})
    assert alone.source_id == "c"
