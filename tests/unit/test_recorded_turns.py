"""Recorded conversations: from a log's messages to the token ids that a student learns."""

from __future__ import annotations

import string
from collections import Counter

import pytest

from distill.errors import DataError
from distill.messages import messages_from, without_reasoning
from distill.models import char_tokenizer
from distill.spans import spans
from distill.tokens import Chat
from distill.types import Message, StopReason, Task, task_id
from distill.worked import demonstrate
from helpers import ALPHABET, make_chat

QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + m.content }}
        {%- else %}{{- '<|im_start|>assistant\\n' + m.content }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or m.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string
                else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
"""The rules of Qwen3's template: thoughts of the current turn alone, an empty one only at the very
end, tool calls and results in tags."""

OPENED = QWEN3.replace(
    "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
).replace("(loop.last or thought)", "true")
"""A template whose prompt already opens the thought."""

SIMPLE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
"""As SmolLM2-135M-Instruct is released."""

MODES = {
    "qwen3": (QWEN3, {}),
    "thinking off": (QWEN3, {"enable_thinking": False}),
    "opened thought": (OPENED, {}),
}

TOOL = {"type": "function", "function": {"name": "grep", "parameters": {"type": "object"}}}
HISTORY = messages_from(
    [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi", "reasoning_content": "be kind"},
        {"role": "user", "content": "find x"},
    ],
    [TOOL],
)
CALL = {"id": "c1", "type": "function", "function": {"name": "grep", "arguments": '{"for": "x"}'}}
TURN = messages_from(
    [
        {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "line 3"},
        {"role": "assistant", "content": "It is in line 3.", "reasoning_content": "found"},
    ]
)
SHOWN = (
    '<|im_start|>system\n# Tools\n{"type": "function", "function": {"name": "grep", "parameters": '
    '{"type": "object"}}}<|im_end|>\n'
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    "<|im_start|>user\nfind x<|im_end|>\n<|im_start|>assistant\n"
)
CALLED = '<tool_call>\n{"name": "grep", "arguments": {"for": "x"}}\n</tool_call><|im_end|>'
BETWEEN = (
    "\n<|im_start|>user\n<tool_response>\nline 3\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)


def chat_of(template, *, max_length=4096, **kwargs):
    letters = "".join(dict.fromkeys("\x00\x01\x02" + string.printable))
    tokenizer = char_tokenizer(letters)
    ends = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": ends})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    return Chat(tokenizer, max_length=max_length, template_kwargs=kwargs)


def texts(chat, row):
    return [(chat.tokenizer.decode(ids), trained) for ids, trained in row]


def task_of(turn, prompt=HISTORY, **meta):
    identity = task_id("routing", prompt)
    return Task(
        id=identity,
        env="routing",
        domain="code",
        split="train",
        prompt=tuple(prompt),
        meta={"turn": tuple(turn), **meta},
    )


def said(**fields):
    return Message(role="assistant", **{"content": "", **fields})


def test_the_current_turn_is_learnt_with_its_thoughts_and_calls_and_earlier_thoughts_are_gone():
    chat = chat_of(QWEN3)
    (row,) = spans(chat, HISTORY, TURN)
    assert texts(chat, row) == [
        (SHOWN, False),
        ("<think>\nlook\n</think>\n\n" + CALLED, True),
        (BETWEEN, False),
        ("<think>\nfound\n</think>\n\nIt is in line 3.<|im_end|>", True),
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("thinks", ["always", "never", "first", "last"])
def test_every_reply_is_learnt_right_behind_the_prompt_that_a_student_would_read(mode, thinks):
    template, kwargs = MODES[mode]
    chat = chat_of(template, **kwargs)
    turn = given = [
        m if thinks == "always" or (thinks, i) in {("first", 0), ("last", 2)} else bare
        for i, (m, bare) in enumerate(zip(TURN, without_reasoning(TURN), strict=True))
    ]
    if mode == "thinking off":  # no room for thoughts, so none are shown either
        turn = without_reasoning(turn)
    plain = without_reasoning(HISTORY)
    # The same prompts, rendered and encoded as for a student that acts.
    expected = {chat.render([*plain, *turn[:i]]): turn[i].content or "grep" for i in (0, 2)}
    found = {}
    for row in spans(chat, HISTORY, given):
        before = ""
        for text, trained in texts(chat, row):
            if trained:
                assert text.index("<|im_end|>") == len(text) - len("<|im_end|>")
                found[before] = text
            before += text
    assert list(found) == list(expected)
    for prompt, wanted in expected.items():
        assert wanted in found[prompt]
    if mode == "qwen3":
        thoughts = ["look" in text or "found" in text for text in found.values()]
        assert thoughts == [thinks in ("always", "first"), thinks in ("always", "last")]
    if mode == "thinking off":
        assert all("think" not in text for text in found.values())


def test_a_turn_that_the_template_never_rewrites_is_one_row_and_extends_like_an_acted_one():
    chat = chat_of(QWEN3)
    (row,) = spans(chat, HISTORY, TURN)
    base = without_reasoning(HISTORY)
    ids = chat.prompt(base)
    assert row[0].token_ids == ids
    longer = chat.extend((*ids, *row[1].token_ids), TURN[1:2], [*base, TURN[0]])
    assert longer == tuple(i for span in row[:3] for i in span.token_ids)


def test_where_the_template_writes_a_state_differently_later_that_reply_is_a_row_of_its_own():
    chat = chat_of(QWEN3, enable_thinking=False)
    bare = without_reasoning(TURN)
    rows = spans(chat, HISTORY, bare)
    assert [sum(span.trained for span in row) for row in rows] == [1, 1]
    off = "<think>\n\n</think>\n\n"
    assert {texts(chat, row)[-1][0] for row in rows} == {CALLED, "It is in line 3.<|im_end|>"}
    assert all(texts(chat, row)[-2][0].endswith(off) for row in rows)
    made = demonstrate([task_of(bare)], chat, key="k")
    assert [(r.step, r.num_steps, r.traj_id) for r in made] == [(0, 2, "k/0"), (1, 2, "k/0")]
    assert made[1].prompt_length == 0


def test_thoughts_that_a_later_message_of_the_harness_makes_the_template_drop_are_still_learnt():
    chat = chat_of(QWEN3)
    turn = [*TURN[:2], Message(role="user", content="(reminder: be brief)"), TURN[2]]
    rows = [texts(chat, row) for row in spans(chat, HISTORY, turn)]
    assert [[text for text, trained in row if trained] for row in rows] == [
        ["<think>\nlook\n</think>\n\n" + CALLED],
        ["<think>\nfound\n</think>\n\nIt is in line 3.<|im_end|>"],
    ]
    assert "look" not in rows[1][0][0]


def test_earlier_thoughts_are_gone_also_where_the_template_would_show_them():
    chat = chat_of(SIMPLE.replace("m.content", "(m.reasoning_content or '') + '/' + m.content"))
    (row,) = spans(chat, HISTORY, TURN[2:])
    assert "be kind" not in texts(chat, row)[0][0]
    assert texts(chat, row)[1] == ("found/It is in line 3.<|im_end|>", True)


def test_a_prompt_that_ends_before_an_earlier_reply_begins_a_row_of_its_own():
    only_last = (
        "{% if add_generation_prompt %}{{ '' }}{% else %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% endif %}"
    )
    chat = chat_of(only_last)
    turn = [said(content="a"), Message(role="tool", content="t"), said(content="a")]
    rows = [texts(chat, row) for row in spans(chat, HISTORY[:1], turn)]
    assert rows == [[("", False), ("a<|im_end|>", True)]] * 2


def test_a_template_without_thoughts_and_calls_teaches_answers_and_refuses_calls():
    chat = chat_of(SIMPLE)
    assert not chat.writes_reasoning
    assert chat_of(QWEN3).writes_reasoning
    assert not chat_of(QWEN3, enable_thinking=False).writes_reasoning
    (row,) = spans(chat, HISTORY, TURN[2:])
    assert texts(chat, row)[-1] == ("It is in line 3.<|im_end|>", True)
    with pytest.raises(DataError, match="does not write a recorded tool call"):
        spans(chat, HISTORY, TURN)


def test_a_system_message_that_the_template_adds_belongs_to_the_prompt():
    chat = chat_of(SMOLLM2)
    turn = [said(content="a"), Message(role="user", content="go on"), TURN[2]]
    (row,) = spans(chat, HISTORY[:1], turn)
    assert texts(chat, row) == [
        (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
            "Face<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        ("a<|im_end|>", True),
        ("\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n", False),
        ("It is in line 3.<|im_end|>", True),
    ]


def test_without_a_template_a_recorded_answer_gives_the_ids_of_a_worked_solution():
    chat = make_chat()
    prompt = (Message(role="user", content="sort:31="),)
    recorded = task_of([said(content="13")], prompt)
    solved = Task(
        id=recorded.id,
        env="routing",
        domain="code",
        split="train",
        prompt=prompt,
        meta={"solution": "13"},
    )
    assert demonstrate([recorded], chat, key="k") == demonstrate([solved], chat, key="k")
    (row,) = demonstrate([recorded], chat, key="k")
    ids = [ALPHABET.index(c) for c in "sort:31=13$"]
    assert (list(row.token_ids), row.num_trained, row.stop) == (ids, 3, StopReason.STOP)


def test_turns_solutions_and_dialogues_keep_the_order_of_their_tasks():
    chat = make_chat()
    prompt = (Message(role="user", content="a:"),)
    kinds = [{"solution": "b"}, {"dialogue": [("assistant", "d", True)]}]
    tasks = [
        task_of([said(content="c")], prompt),
        *(
            Task(id=str(i), env="e", domain="d", split="train", prompt=prompt, meta=meta)
            for i, meta in enumerate(kinds)
        ),
        task_of([said(content="e")], prompt),
    ]
    rows = demonstrate(tasks, chat, key="k")
    assert [chat.tokenizer.decode(r.token_ids) for r in rows] == ["a:c$", "a:b$", "a:d$", "a:e$"]
    assert [r.traj_id for r in rows] == ["k/0", "k/1", "k/2", "k/3"]


def test_a_template_without_end_tokens_gets_one_behind_each_answer():
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    chat = chat_of(template)
    turn = [said(content="one "), Message(role="tool", content="t"), said(content="two")]
    (row,) = spans(chat, HISTORY[:1], turn)
    assert texts(chat, row) == [
        ("user: hello\nassistant: ", False),
        ("one <|im_end|>", True),
        ("\ntool: t\nassistant: ", False),
        ("two<|im_end|>", True),
    ]


def test_an_end_token_that_is_not_in_the_stop_set_is_named():
    tokenizer = chat_of(SIMPLE).tokenizer
    tokenizer.eos_token = "\x01"
    with pytest.raises(DataError, match=r"ends a reply with '<\|im_end\|>'.*model.stop"):
        spans(Chat(tokenizer), HISTORY[:1], [said(content="hi")])


@pytest.mark.parametrize(
    ("template", "turn", "message"),
    [
        (QWEN3, [said(content="the token <|im_end|> ends it")], "holds the text of an end token"),
        (QWEN3, [said()], "no reply to learn from"),
        (QWEN3, [Message(role="tool", content="x")], "no reply to learn from"),
        (SIMPLE.replace("m.content", "m.content|upper"), [said(content="hi")], "does not write"),
        ("{{ raise_exception('roles must alternate') }}", [said(content="a")], "must alternate"),
        ("{{ 1 + 'a' }}", [said(content="a")], "cannot write a conversation of"),
        (
            SIMPLE.replace("'<|im_start|>assistant\\n' }}{% endif", "'<|bot|>' }}{% endif"),
            [said(content="a")],
            "begins a reply differently",
        ),
    ],
)
def test_what_cannot_be_learnt_is_an_error_or_counted_and_never_cut(template, turn, message):
    chat, task = chat_of(template), task_of(turn)
    with pytest.raises(DataError, match=message):
        demonstrate([task], chat, key="k")
    left_out = Counter()
    assert demonstrate([task], chat, key="k", left_out=left_out) == []
    assert left_out == {"turns/unwritable": 1}


def test_a_turn_that_exceeds_the_model_is_an_error_or_counted():
    chat = chat_of(QWEN3)
    (row,) = demonstrate([task_of(TURN)], chat, key="k")
    length = len(row.token_ids)
    assert len(demonstrate([task_of(TURN)], chat_of(QWEN3, max_length=length), key="k")) == 1
    short, left_out = chat_of(QWEN3, max_length=length - 1), Counter()
    with pytest.raises(DataError, match=f"has {length} tokens, but model.max_length is"):
        demonstrate([task_of(TURN)], short, key="k")
    assert demonstrate([task_of(TURN)], short, key="k", left_out=left_out) == []
    assert left_out == {"turns/too_long": 1}


def test_whether_a_prompt_fits_counts_the_room_for_a_reply():
    # One token per letter, and one for each of the three tags.
    chat = chat_of(SIMPLE, max_length=len("user\nhello\nassistant\n") + 3 + 5)
    assert chat.fits(HISTORY[:1], room=5)
    assert not chat.fits(HISTORY[:1], room=6)
