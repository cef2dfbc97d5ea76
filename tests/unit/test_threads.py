"""Conversations that share a session id are told apart by what each call read."""

from __future__ import annotations

from typing import Any

from distill.curriculum.records import RoutingTurn
from distill.curriculum.threads import threads
from distill.curriculum.turns import split


def asks(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(number: int, *messages: dict[str, Any]) -> RoutingTurn:
    return RoutingTurn(
        source="gateway",
        source_id=f"c{number}",
        format="litellm",
        session_id="s",
        ts=number,
        messages=messages or None,
        num_prompt=len(messages) - 1 if messages else None,
    )


A1 = (asks("first"), says("one"))
B1 = (asks("other"), says("two"))


def test_interleaved_conversations_go_on_from_their_own_turns():
    a2 = (*A1, asks("that is wrong"), says("sorry"))
    b2 = (*B1, asks("thanks"), says("welcome"))
    turns = split([call(1, *A1), call(2, *B1), call(3, *a2), call(4, *b2)])
    assert threads(turns) == [[0, 2], [1, 3]]


def test_a_title_asked_for_in_between_takes_no_part():
    title = (asks("a title for: first"), says("On firsts"))
    a2 = (*A1, asks("that is wrong"), says("sorry"))
    turns = split([call(1, *A1), call(2, *title), call(3, *a2)])
    found = threads(turns)
    assert [0, 2] in [[i for i in thread if i != 1] for thread in found]
    assert threads(split([call(1, *A1), call(3, *a2)])) == [[0, 1]]


def test_without_history_the_order_is_all_there_is():
    turns = split([call(1, *A1), call(2, *B1), call(3)])
    assert threads(turns) == [[0, 1, 2]]


def test_a_history_that_is_not_in_the_log_begins_a_conversation():
    stranger = (asks("from elsewhere"), says("x"), asks("go on"), says("y"))
    turns = split([call(1, *A1), call(2, *stranger)])
    assert threads(turns) == [[0], [1]]
    assert threads([]) == []
