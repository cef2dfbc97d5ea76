"""Calls of a session become user turns, whatever a row of the log holds."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from distill.curriculum.messages import is_request, without_inserted
from distill.curriculum.records import (
    Decision,
    Outcome,
    Prediction,
    Request,
    RoutingTurn,
    Served,
)
from distill.curriculum.turns import UserTurn, split
from distill.errors import DataError

Message = Mapping[str, Any]


def user(text: str, **more: Any) -> Message:
    return {"role": "user", "content": text, **more}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls_tool(name: str, identity: str = "c1") -> Message:
    call = {"id": identity, "function": {"name": name, "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(text: str, identity: str = "c1") -> Message:
    return {"role": "tool", "tool_call_id": identity, "content": text}


def call(identity: str, ts: int | None, *messages: Message, read: int | None = None, **more: Any):
    given = {"session_id": "s", "source": "log", "format": "plain", **more}
    if messages and read is None:
        read = len(messages) - 1
    return RoutingTurn(
        source_id=identity, ts=ts, messages=messages or None, num_prompt=read, **given
    )


def ids(turn: UserTurn) -> list[str]:
    return [c.source_id for c in turn.calls]


SYSTEM: Message = {"role": "system", "content": "Be brief."}
FAILED = Outcome(status="failure")
DONE = Outcome(status="success")


def test_a_turn_opens_with_a_user_and_not_with_a_tool():
    a = [SYSTEM, user("book a room"), calls_tool("book")]
    b = [*a, result("booked"), said("Done.")]
    c = [*b, user("and a car"), said("Which one?")]
    turns = split([call("3", 30, *c), call("1", 10, *a), call("2", 20, *b)])
    assert [ids(turn) for turn in turns] == [["1", "2"], ["3"]]
    first, second = turns
    assert (first.index, first.start, first.request_text) == (0, 1, "book a room")
    assert first.history == (SYSTEM,)
    assert [m["role"] for m in first.response] == ["assistant", "tool", "assistant"]
    assert (second.index, second.start, second.request_text) == (1, 5, "and a car")
    assert second.messages == tuple(c)
    name = json.dumps(["log", "plain", "1"])
    assert first.id == hashlib.sha256(name.encode()).hexdigest()[:16]


def test_calls_are_ordered_by_time_and_not_by_the_number_in_the_log():
    rows = [call(str(i), 100 - i, user(f"q{i}"), said("a"), turn_index=i) for i in range(5)]
    assert [turn.request_text for turn in split(rows)] == ["q4", "q3", "q2", "q1", "q0"]
    untimed = [call(str(i), None, user(f"q{i}"), said("a"), turn_index=9 - i) for i in range(5)]
    assert [turn.request_text for turn in split(untimed)] == ["q4", "q3", "q2", "q1", "q0"]


@pytest.mark.parametrize(
    "message",
    [
        user("the tests ran", name="harness"),
        user("<system-reminder>be careful</system-reminder>\n<hook-output>x</hook-output>"),
        {"role": "user", "content": [{"type": "tool_result", "content": "42"}]},
        {"role": "tool", "content": "42"},
    ],
)
def test_what_a_harness_puts_in_opens_no_turn(message: Message) -> None:
    assert not is_request(message)
    start = [user("count"), calls_tool("count")]
    turns = split([call("1", 1, *start), call("2", 2, *start, message, said("42"))])
    assert [ids(turn) for turn in turns] == [["1", "2"]]
    assert turns[0].request_text == "count"


@pytest.mark.parametrize(
    "message",
    [
        user("fix it <system-reminder>be careful</system-reminder>"),
        user("what does </b> mean?"),
        user("<system-reminder> never closed"),
        user("", name="Ann"),
        {"role": "user", "content": [{"type": "tool_result", "content": "1"}, {"text": "why?"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
    ],
)
def test_what_a_user_wrote_opens_one(message: Message) -> None:
    assert is_request(message)


def test_inserted_blocks_are_no_part_of_the_request():
    text = "fix <system-reminder a='1'>x</system-reminder>it"
    assert split([call("1", 1, user(text), said("ok"))])[0].request_text == "fix it"
    hostile = "<harness><observation>" * 20_000 + "</b>"
    assert without_inserted(hostile) == hostile


def test_only_the_last_attempt_of_a_call_counts():
    ask = (user("sum 1 to 9"), said("45"))
    rows = [
        call("a", 1, ask[0], read=1, trace_id="t", outcome=FAILED),
        call("b", 2, ask[0], read=1, trace_id="t", outcome=FAILED),
        call("c", 3, *ask, trace_id="t", outcome=DONE, served=Served(model="m", fallback_hops=1)),
    ]
    (turn,) = split(rows)
    assert ids(turn) == ["c"]
    assert [a.source_id for a in turn.attempts] == ["a", "b"]
    assert turn.fallback_hops == 2
    assert turn.ts == 1


def test_the_same_prompt_directly_after_a_failure_is_a_retry_also_without_a_trace():
    digest = Request(prompt_sha256="d")
    rows = [
        call("a", 1, request=digest, outcome=FAILED),
        call("b", 2, request=digest, outcome=DONE),
        call("c", 3, request=digest, outcome=DONE),
    ]
    turns = split(rows)
    assert [ids(turn) for turn in turns] == [["b"], ["c"]]
    assert [a.source_id for a in turns[0].attempts] == ["a"]


def test_a_trace_that_spans_a_run_of_an_agent_is_no_retry():
    a = [user("count"), calls_tool("count", "x"), result("42", "x"), said("42")]
    rows = [call("1", 1, *a[:2], trace_id="t", outcome=DONE)]
    rows += [call("2", 2, *a, trace_id="t", outcome=DONE)]
    (turn,) = split(rows)
    assert (ids(turn), turn.attempts) == (["1", "2"], ())
    silent = [call(str(i), i, trace_id="t", outcome=DONE) for i in range(3)]
    (turn,) = split(silent)
    assert (ids(turn), turn.attempts, turn.messages) == (["0", "1", "2"], (), None)
    session = [call(str(i), i, trace_id="s", outcome=DONE) for i in range(3)]
    assert len(split(session)) == 3, "a trace that is only the session's name"


def test_a_superseded_call_never_comes_back_through_another_trace():
    prompt = user("again and again")
    rows = [
        call("a", 1, prompt, read=1, trace_id="t", outcome=FAILED),
        call("b", 2, prompt, read=1, trace_id="u", outcome=FAILED),
        call("c", 3, prompt, said("ok"), trace_id="t", outcome=DONE),
    ]
    (turn,) = split(rows)
    assert ids(turn) == ["c"]
    assert [a.source_id for a in turn.attempts] == ["a", "b"]


def test_an_outer_router_gives_decision_and_prediction_and_the_inner_one_who_served():
    ask = (user("hello there"), said("hi"))
    outer = call(
        "h1", 1, *ask, source="harness", prediction=Prediction(tier=2), decision=Decision(tier=1),
        served=Served(model="auto", tier=3),
    )  # fmt: skip
    inner = call(
        "g1", 2, *ask, source="gateway", decision=Decision(tier=0),
        served=Served(model="small", tier=0),
    )  # fmt: skip
    (turn,) = split([inner, outer])
    assert (ids(turn), [w.source_id for w in turn.wrappers]) == (["g1"], ["h1"])
    assert turn.prediction == Prediction(tier=2)
    assert turn.decision == Decision(tier=1)
    assert turn.served is not None
    assert turn.served.model == "small"


def test_a_parent_in_the_log_wraps_its_child_and_lends_it_its_text():
    first, second = (user("one"), said("1")), (user("two"), said("2"))
    rows = [
        call("h1", 1, *first, source="harness", decision=Decision(tier=2)),
        call("g1", 2, source="gateway", parent_id="h1", served=Served(model="m")),
        call("h2", 3, *first, *second, source="harness", decision=Decision(tier=1)),
        call("g2", 4, source="gateway", parent_id="h2", served=Served(model="n")),
    ]
    turns = split(rows)
    assert [ids(turn) for turn in turns] == [["g1"], ["g2"]]
    assert [turn.request_text for turn in turns] == ["one", "two"]
    assert [turn.decision.tier for turn in turns if turn.decision] == [2, 1]


def test_a_sub_agent_belongs_to_the_turn_of_its_parent():
    rows = [
        call("p", 1, user("plan a trip"), said("Booked."), served=Served(model="big", tier=3)),
        call("q", 2, user("find hotels"), said("Three."), parent_id="p", served=Served(model="s")),
    ]
    (turn,) = split(rows)
    assert (ids(turn), turn.request_text) == (["p", "q"], "plan a trip")
    assert turn.served is not None
    assert turn.served.model == "big"


def test_arms_of_a_table_stay_apart():
    rows = [
        call(f"r/{m}", None, user("2+2?"), said("4"), session_id=None, parent_id="r",
             served=Served(model=m))
        for m in ("large", "small")
    ]  # fmt: skip
    turns = split(rows)
    assert [ids(turn) for turn in turns] == [["r/large"], ["r/small"]]
    assert all(turn.start == 0 and turn.history == () for turn in turns)


def test_unrelated_calls_without_a_session_are_families_of_their_own():
    rows = [call(str(i), i, user(f"q{i}"), said("a"), session_id=None) for i in range(3)]
    turns = split(rows)
    assert [turn.index for turn in turns] == [0, 0, 0]
    assert all(turn.history == () for turn in turns)
    ring = [
        call("a", 1, session_id=None, parent_id="b"),
        call("b", 2, session_id=None, parent_id="a"),
    ]
    assert sum(len(turn.calls) + len(turn.wrappers) for turn in split(ring)) == 2


def test_rows_of_one_whole_turn_work():
    rows, told = [], [SYSTEM]
    for i in range(3):
        told += [user("continue"), calls_tool("f", f"c{i}"), result("x", f"c{i}"), said(f"a{i}")]
        rows.append(call(str(i), i, *told, read=len(told) - 3))
    turns = split(rows)
    assert [ids(turn) for turn in turns] == [["0"], ["1"], ["2"]]
    assert [turn.start for turn in turns] == [1, 5, 9]


def test_rows_that_hold_only_new_messages_get_the_conversation_before_them():
    chat = {"format": "chat"}
    rows = [
        call("1", 1, SYSTEM, user("count"), calls_tool("count"), **chat),
        call("2", 2, result("42"), said("42"), read=1, **chat),
        call("3", 3, user("continue"), said("43"), **chat),
        call("4", 4, user("continue"), said("44"), **chat),
    ]
    turns = split(rows)
    assert [ids(turn) for turn in turns] == [["1", "2"], ["3"], ["4"]]
    assert turns[0].messages == (*rows[0].messages, *rows[1].messages)
    assert turns[1].history == turns[0].messages
    assert [turn.request_text for turn in turns] == ["count", "continue", "continue"]
    assert turns[2].response == (said("44"),)


def test_independent_requests_under_one_session_id_share_no_history():
    rows = [call(str(i), i, SYSTEM, user(f"q{i}"), said("a")) for i in range(3)]
    assert [turn.start for turn in split(rows)] == [1, 1, 1]
    many = [call(str(i), i, user(f"q{i}"), said("a"), format="chat") for i in range(1001)]
    assert {turn.start for turn in split(many)} == {0}
    assert split(many[:1000])[-1].start == 2 * 999


def test_what_a_gateway_logged_is_all_that_the_model_read():
    rows = [
        call(str(i), i, user(f"q{i}"), said("a"), format="litellm", trace_id=f"t{i}")
        for i in range(3)
    ]
    assert [turn.history for turn in split(rows)] == [(), (), ()]


def test_the_same_request_asked_again_is_a_turn_of_its_own():
    rows = [
        call("1", 1, user("sort 321"), said("132"), format="litellm"),
        call("2", 2, user("sort 321"), said("123"), format="litellm"),
    ]
    assert [ids(turn) for turn in split(rows)] == [["1"], ["2"]]


def test_a_history_that_was_cut_to_make_room_stays_in_its_turn():
    long = [user("one"), said("1"), user("two"), calls_tool("f")]
    cut = [user("two"), calls_tool("f"), result("x"), said("2")]
    turns = split([call("1", 1, *long[:2]), call("2", 2, *long), call("3", 3, *cut)])
    assert [ids(turn) for turn in turns] == [["1"], ["2", "3"]]


def test_cached_rows_are_kept_and_marked():
    rows = [
        call("1", 1, user("a"), said("b"), served=Served(model="m", cache_hit=True)),
        call("2", 2, user("a"), said("b"), user("c"), said("d"), served=Served(cache_hit=False)),
    ]
    assert [turn.cached for turn in split(rows)] == [True, False]


def test_the_highest_tier_of_a_turn_served_it():
    a = [user("count"), calls_tool("f"), result("x"), said("done")]
    rows = [
        call("1", 1, *a[:2], served=Served(model="big", tier=2)),
        call("2", 2, *a, served=Served(model="small", tier=0)),
    ]
    (turn,) = split(rows)
    assert turn.served is not None
    assert turn.served.tier == 2


def test_a_turn_stands_for_the_calls_that_the_log_left_out():
    assert split([call("1", 1, sample_rate=0.25)])[0].weight == 4.0
    with pytest.raises(DataError, match="sample_rate 0"):
        split([call("1", 1, sample_rate=0.0)])


def test_every_call_of_a_random_session_is_in_exactly_one_turn():
    rng = random.Random(3)
    for _ in range(400):
        told: list[Message] = []
        rows: list[RoutingTurn] = []
        requests: list[str] = []
        for i in range(rng.randint(1, 6)):
            requests.append(f"question {i}")
            told.append(user(requests[-1]))
            for j in range(rng.randint(1, 3)):
                for retry in range(rng.choice((1, 1, 2))):
                    identity, failed = f"{i}.{j}.{retry}", retry == 0 and rng.random() < 0.2
                    outcome = FAILED if failed else DONE
                    at, trace = len(rows) * 10, f"t{i}.{j}"
                    rows.append(
                        call(identity, at, *told, said("x"), trace_id=trace, outcome=outcome)
                    )
                told += [calls_tool("f", f"c{i}{j}"), result("r", f"c{i}{j}")]
            told.append(said(f"answer {i}"))
        shuffled = rng.sample(rows, len(rows))
        turns = split(shuffled)
        assert split(rows) == turns
        held = [c.source_id for t in turns for c in (*t.calls, *t.attempts, *t.wrappers)]
        assert sorted(held) == sorted(c.source_id for c in rows)
        assert [turn.request_text for turn in turns] == requests
        assert [turn.index for turn in turns] == list(range(len(requests)))
        assert len({turn.id for turn in turns}) == len(turns)
        for turn in turns:
            assert {c.source_id.split(".")[0] for c in turn.calls} == {str(turn.index)}
