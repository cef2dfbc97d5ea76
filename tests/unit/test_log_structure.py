"""A conversation is sound, sound up to a point, or in quarantine."""

from __future__ import annotations

import random
from typing import Any

import pytest

from distill.curriculum.structure import PROBLEMS, check

Messages = list[dict[str, Any]]
USER: dict[str, Any] = {"role": "user", "content": "ask"}
SAID: dict[str, Any] = {"role": "assistant", "content": "said"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "rules"}


def calls(*names: str, arguments: str = "{}", text: str | None = None) -> dict[str, Any]:
    entries = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for name in names
    ]
    return {"role": "assistant", "content": text, "tool_calls": entries}


def result(name: str, content: str = "done") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": content}


SOUND: dict[str, Messages] = {
    "one answer": [USER, SAID],
    "with a system prompt": [SYSTEM, USER, SAID],
    "two turns": [USER, SAID, USER, SAID],
    "a greeting first": [SAID, USER, SAID],
    "two user messages in a row": [USER, USER, SAID],
    "a call": [USER, calls("a"), result("a"), SAID],
    "parallel calls in order": [USER, calls("a", "b"), result("a"), result("b"), SAID],
    "parallel calls in another order": [USER, calls("a", "b"), result("b"), result("a"), SAID],
    "calls of one step in two messages": [
        USER,
        calls("a"),
        calls("b"),
        result("b"),
        result("a"),
        SAID,
    ],
    "words before the call": [USER, SAID, calls("a"), result("a"), SAID],
    "a note of the harness between": [USER, calls("a"), SYSTEM, result("a"), SAID],
    "steps": [USER, calls("a"), result("a"), calls("b"), result("b"), SAID],
    "no ids": [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "x"},
        SAID,
    ],
    "content in parts": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "y"}]},
    ],
    "calls in parts with results in parts": [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
        SAID,
    ],
    "markup that is talked about": [
        USER,
        {"role": "assistant", "content": "Write `<tool_call>` before it, then `</tool_call>`."},
    ],
}

BROKEN: dict[str, tuple[Messages, list[str], int]] = {
    "orphan": ([USER, SAID, USER, result("x"), SAID], ["orphan_result"], 2),
    "orphan only": ([USER, result("x"), SAID], ["orphan_result"], 0),
    "unclosed": ([USER, SAID, USER, calls("a"), SAID], ["unclosed_call"], 2),
    "one of two unclosed": ([USER, calls("a", "b"), result("a"), SAID], ["unclosed_call"], 0),
    "result after the model spoke on": (
        [USER, SAID, USER, calls("a"), SAID, result("a"), SAID],
        ["unclosed_call"],
        2,
    ),
    "unclosed at the end": ([USER, SAID, USER, calls("a")], ["unclosed_call"], 2),
    "unclosed in a row of calls": (
        [USER, calls("a"), calls("b"), result("b"), SAID],
        ["unclosed_call"],
        0,
    ),
    "before its call": (
        [USER, SAID, USER, result("a"), calls("a"), SAID],
        ["result_before_call", "unclosed_call"],
        2,
    ),
    "equal id": (
        [USER, calls("a"), result("a"), SAID, USER, calls("a"), result("a"), SAID],
        ["duplicate_call_id", "duplicate_result"],
        4,
    ),
    "equal id of another call": (
        [USER, calls("a"), result("a"), SAID, USER, calls("a", arguments='{"x": 1}'), SAID],
        ["conflicting_call_id"],
        4,
    ),
    "equal id within a step": (
        [USER, calls("a", "a"), result("a"), SAID],
        ["duplicate_call_id"],
        0,
    ),
    "two equal results": (
        [USER, calls("a"), result("a"), result("a"), SAID],
        ["duplicate_result"],
        0,
    ),
    "two different results": (
        [USER, calls("a"), result("a"), result("a", "no"), SAID],
        ["conflicting_result"],
        0,
    ),
    "no request": ([SYSTEM, SAID], ["missing_request"], 0),
    "no answer": ([SYSTEM, USER], ["missing_response"], 0),
    "no last answer": ([USER, SAID, USER], ["missing_response"], 2),
    "no answer after a result": (
        [USER, SAID, USER, calls("a"), result("a")],
        ["missing_response"],
        2,
    ),
    "empty answer": (
        [USER, SAID, USER, {"role": "assistant", "content": " \n"}],
        ["empty_assistant"],
        2,
    ),
    "only reasoning": (
        [USER, {"role": "assistant", "content": None, "reasoning_content": "hm"}],
        ["empty_assistant"],
        0,
    ),
    "two endings": ([USER, SAID, USER, SAID, SAID], ["ambiguous_branch"], 2),
    "a call left in the text": (
        [USER, SAID, USER, {"role": "assistant", "content": "<tool_call>{}</tool_call>"}],
        ["unresolved_internal_call"],
        2,
    ),
    "a call left in a part": (
        [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, USER, SAID],
        ["unresolved_internal_call"],
        0,
    ),
    "unknown role": ([USER, SAID, {"role": "robot", "content": "x"}], ["unreadable_payload"], 2),
    "content is a number": ([USER, {"role": "assistant", "content": 3}], ["unreadable_payload"], 0),
    "a call without a name": (
        [USER, SAID, USER, {"role": "assistant", "tool_calls": [{"id": "a"}]}],
        ["unreadable_payload"],
        2,
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_conversation_is_kept_whole(name: str) -> None:
    found = check(SOUND[name])
    assert (found.verdict, found.problems, found.keep) == ("complete", (), len(SOUND[name]))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_conversation_is_kept_up_to_its_first_problem(name: str) -> None:
    messages, problems, keep = BROKEN[name]
    found = check(messages)
    assert list(found.problems) == problems
    assert found.keep == keep
    assert found.verdict == ("partially_recoverable" if keep else "quarantined")
    assert len(found.details) == len(problems)


def test_every_problem_has_words_and_a_case() -> None:
    assert {p for _, problems, _ in BROKEN.values() for p in problems} == set(PROBLEMS)


@pytest.mark.parametrize("messages", [None, "text", 3, {}, [], [3], ["text"]])
def test_what_is_no_conversation_is_in_quarantine(messages: Any) -> None:
    found = check(messages)
    assert (found.verdict, found.problems) == ("quarantined", ("unreadable_payload",))


def test_the_last_step_may_be_open_only_in_the_middle_of_a_turn() -> None:
    for last in ([calls("a", "b")], [calls("a"), calls("b")]):
        messages = [USER, *last]
        found = check(messages, open_end=True)
        assert (found.verdict, found.keep) == ("complete", len(messages))
        assert check(messages).problems == ("unclosed_call",)
    later = [USER, calls("a"), USER, calls("b")]
    assert check(later, open_end=True).problems == ("unclosed_call",)
    half = [USER, calls("a", "b"), result("a")]
    assert check(half, open_end=True).problems == ("unclosed_call", "missing_response")
    assert check([USER, SAID], open_end=True).verdict == "complete"


def a_conversation(rng: random.Random) -> Messages:
    messages = [SYSTEM] if rng.random() < 0.5 else []
    number = 0
    for _ in range(rng.randint(1, 4)):
        messages.append(USER)
        for _ in range(rng.randint(0, 3)):
            names = [f"c{number + i}" for i in range(rng.randint(1, 3))]
            number += len(names)
            messages.append(calls(*names, arguments=f'{{"n": {number}}}'))
            messages += [result(name, f"of {name}") for name in rng.sample(names, len(names))]
        messages.append(SAID)
    return messages


def test_random_sound_conversations_are_complete_and_their_kept_prefixes_too() -> None:
    rng = random.Random(5)
    for _ in range(200):
        messages = a_conversation(rng)
        assert check(messages).verdict == "complete"
        cut = rng.randint(1, len(messages))
        found = check(messages[:cut])
        answers = [i + 1 for i in range(cut) if messages[i] is SAID]
        assert found.keep == max(answers, default=0)


def test_whatever_is_lost_or_moved_the_kept_part_is_sound_by_itself() -> None:
    rng = random.Random(6)
    broken = 0
    for _ in range(400):
        messages = a_conversation(rng)
        for _ in range(rng.randint(1, 2)):
            place = rng.randrange(len(messages))
            message = messages.pop(place)
            if rng.random() < 0.5:
                messages.insert(rng.randint(0, len(messages)), message)
            if not messages:
                break
        found = check(messages)
        broken += found.verdict != "complete"
        assert (found.verdict == "complete") == (found.keep == len(messages) > 0)
        if found.keep:
            assert check(messages[: found.keep]).verdict == "complete"
    assert broken > 100
