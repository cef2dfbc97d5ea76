"""Messages with reasoning and tool calls: their shapes in logs and for templates, their hash."""

from __future__ import annotations

import json

import pytest

from distill.errors import DataError
from distill.messages import message_from, messages_from
from distill.types import Message, ToolCall, task_id

TOOL = {"type": "function", "function": {"name": "grep", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "grep", "arguments": '{"for": "x"}'}}
TURN = messages_from(
    [
        {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "line 3"},
    ]
)


def said(**fields):
    return Message(role="assistant", **{"content": "", **fields})


def test_plain_messages_render_and_hash_as_they_always_did():
    plain = [Message(role="system", content="s"), Message(role="user", content="a")]
    assert [m.as_dict() for m in plain] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
    ]
    assert task_id("world", [Message(role="user", content="sort:31=")]) == "7942fdd660ab3934"
    assert task_id("e", plain) == "d55daa63ffe6d624"


def test_whatever_a_template_may_show_is_part_of_the_task_id():
    base = said(content="a")
    others = [
        said(content="a", reasoning="r"),
        said(content="a", tool_calls=(ToolCall(name="f"),)),
        said(content="a", tool_calls=(ToolCall(name="f", arguments='{"b": 1}'),)),
        said(content="a", name="n"),
        Message(role="assistant", content="a", tools=(json.dumps(TOOL),)),
    ]
    assert len({task_id("e", [m]) for m in [base, *others]}) == 6


def test_a_message_has_the_shape_that_templates_of_released_models_read():
    assert TURN[0].as_dict() == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "look",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "grep", "arguments": {"for": "x"}},
            }
        ],
    }
    assert TURN[1].as_dict() == {"role": "tool", "content": "line 3", "tool_call_id": "c1"}


@pytest.mark.parametrize("text", ["{broken", '"text"', "[1]", ""])
def test_arguments_that_are_no_object_stay_the_text_that_was_written(text):
    call = ToolCall(name="f", arguments=text)
    assert call.as_dict() == {"type": "function", "function": {"name": "f", "arguments": text}}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"role": "user", "content": None}, Message(role="user", content="")),
        ({"role": "developer", "content": "a"}, Message(role="system", content="a")),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
            Message(role="user", content="a\nb"),
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, "a"]},
            said(content="a", reasoning="t"),
        ),
        ({"role": "assistant", "reasoning": "t"}, said(reasoning="t")),
        (
            {"role": "assistant", "content": "<think>\nt\n</think>\n\na"},
            said(content="a", reasoning="t"),
        ),
        ({"role": "assistant", "content": "t</think>a"}, said(content="a", reasoning="t")),
        (
            {"role": "assistant", "content": "write <think> and </think>"},
            said(content="write <think> and </think>"),
        ),
        ({"role": "user", "content": "a</think>b"}, Message(role="user", content="a</think>b")),
        ({"role": "assistant", "content": None, "refusal": "no"}, said(content="no")),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": {"é": 1}}},
            said(tool_calls=(ToolCall(name="f", arguments='{"é": 1}'),)),
        ),
        (
            {"role": "function", "name": "f", "content": "r"},
            Message(role="tool", name="f", content="r"),
        ),
    ],
)
def test_the_shapes_that_logs_write_messages_in(raw, expected):
    assert message_from(raw) == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"role": "bot", "content": "a"}, "the role 'bot'"),
        ({"content": "a"}, "the role None"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "'text' that is not text"),
        ({"role": "user", "content": 3}, "must be text or a list of parts, found 3"),
        ({"role": "assistant", "content": "a", "reasoning": {"b": 1}}, "not text"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "no function with a name"),
        ({"role": "assistant", "tool_calls": "grep"}, "no function with a name: grep"),
    ],
)
def test_what_cannot_be_kept_of_a_message_is_named(raw, message):
    with pytest.raises(DataError, match=message):
        message_from(raw)
