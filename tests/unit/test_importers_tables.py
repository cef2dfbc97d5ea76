"""Tables, votes and plain chats, field by field: RouteLLM, RouterBench, Arena, chat files."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from distill.curriculum.drops import RowError
from distill.curriculum.importers import detect
from distill.curriculum.importers.base import digest_of
from distill.curriculum.records import (
    Outcome,
    Prediction,
    Served,
    Verdict,
)
from import_rows import (
    ASKED,
    BENCH,
    CHAT_LINE,
    MOMENT,
    PROMPT_LINE,
    SAID,
    SHARED_CHAT,
    VOTE_55K,
    VOTE_100K,
    VOTE_140K,
    WIDE,
    expected,
    one,
    read,
)


def test_every_model_of_a_routellm_table_is_an_arm_of_the_same_question() -> None:
    first, second = read("routellm", WIDE)
    digest = hashlib.sha256(b'"Sum 1..100"').hexdigest()[:32]
    for turn, model in ((first, "mixtral"), (second, "gpt-4")):
        assert turn == expected(
            "routellm",
            f"sha256:{digest}/{model}",
            parent_id=f"sha256:{digest}",
            prediction=Prediction(score=0.0831, router="mf"),
            served=Served(model=model),
            outcome=Outcome(verdicts=(Verdict(source="program", name="correct", value=1.0),)),
            messages=({"role": "user", "content": "Sum 1..100"},),
            num_prompt=1,
        )
        assert (turn.session_id, turn.trace_id) == (None, None)  # so no retries of each other


def test_routellm_answers_and_several_routers() -> None:
    row = {"id": 3, "prompt": "p", "a": "True", "b": "False", "a_response": "yes", "bert": 0.7}
    first, second = read("routellm", {**row, "mf": 0.2})
    assert first.messages == (
        {"role": "user", "content": "p"},
        {"role": "assistant", "content": "yes"},
    )
    assert first.prediction == Prediction(score=0.2, router="mf")
    assert first.tags == ("win_rate:bert=0.7",)
    assert (first.source_id, second.source_id) == ("3/a", "3/b")
    assert [turn.outcome.verdicts[0].value for turn in (first, second)] == [1.0, 0.0]


def test_every_model_of_a_routerbench_row_is_an_arm() -> None:
    small, large = read("routerbench", BENCH)
    asked = {"role": "user", "content": "How many?"}
    shared: dict[str, Any] = {
        "parent_id": "gsm.12",
        "scene": "grade-school-math",
        "tags": ("oracle:large-x",),
        "num_prompt": 1,
    }
    name = "grade-school-math"
    assert small == expected(
        "routerbench",
        "gsm.12/small-7b",
        served=Served(model="small-7b"),
        outcome=Outcome(verdicts=(Verdict(source="program", name=name, value=0.0),), cost=2e-5),
        messages=(asked,),
        **shared,
    )
    assert large == expected(
        "routerbench",
        "gsm.12/large-x",
        served=Served(model="large-x", tier=3),
        outcome=Outcome(verdicts=(Verdict(source="program", name=name, value=1.0),), cost=0.0011),
        messages=(asked, {"role": "assistant", "content": "12"}),
        **shared,
    )


def test_both_sides_of_an_arena_vote() -> None:
    lost, won = read("arena", VOTE_100K)
    for turn, side, model, value, label in (
        (lost, "a", "small", 0.0, "loss"),
        (won, "b", "large", 1.0, "win"),
    ):
        ts = 1_788_000_000_000
        vote = Verdict(source="user", name="vote", value=value, label=label, ts=ts)
        assert turn == expected(
            "arena",
            f"q1/{side}/{model}",
            parent_id="q1",
            ts=ts,
            user="j",
            scene="code",
            tags=("language:English",),
            served=Served(model=model),
            outcome=Outcome(verdicts=(vote,)),
            messages=(ASKED, SAID),
            num_prompt=1,
        )


def test_the_55k_shape_is_interleaved_and_a_missing_answer_is_missing() -> None:
    first, second = read("arena", {**VOTE_55K, "mf": 0.3})
    assert [(m["role"], m["content"]) for m in first.messages] == [
        ("user", "Is it?"),
        ("assistant", "Yes."),
        ("user", "Why?"),
    ]
    assert first.num_prompt == 3
    assert [m["content"] for m in second.messages] == ["Is it?", "No.", "Why?", "So."]
    assert second.num_prompt == 3
    assert {turn.outcome.verdicts[0].label for turn in (first, second)} == {"tie"}
    assert {turn.outcome.verdicts[0].value for turn in (first, second)} == {0.5}
    assert first.prediction == Prediction(score=0.3, router="mf")


@pytest.mark.parametrize("word", ["both_bad", "tie (bothbad)"])
def test_both_bad_is_a_failure_of_both_and_no_tie(word: str) -> None:
    turns = read("arena", {**VOTE_140K, "winner": word})
    assert [turn.outcome.verdicts[0].value for turn in turns] == [0.0, 0.0]
    assert [turn.outcome.verdicts[0].label for turn in turns] == ["both_bad", "both_bad"]
    assert turns[0].messages == (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
    )
    assert turns[0].scene == "math"


def test_frequent_arena_prompts_outside_the_sample_are_duplicates() -> None:
    row = {**VOTE_100K, "dedup_tag": {"high_freq": True, "sampled": False}}
    with pytest.raises(RowError) as error:
        read("arena", row)
    assert error.value.reason == "duplicate"
    assert len(read("arena", {**row, "dedup_tag": {"high_freq": True, "sampled": True}})) == 2


def test_plain_chats() -> None:
    assert one("chat", CHAT_LINE) == expected(
        "chat",
        "7",
        session_id="s",
        ts=MOMENT,
        user="u",
        served=Served(model="model-s"),
        outcome=Outcome(verdicts=(Verdict(source="user", name="rating", value=1.0, label="up"),)),
        messages=({"role": "system", "content": "Be kind."}, ASKED, SAID),
        num_prompt=2,
    )
    pair = one("chat", PROMPT_LINE)
    assert pair.messages == (
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": '{"sum": 5}'},  # JSON that the model wrote stays text
    )
    assert pair.completeness == dict.fromkeys(pair.completeness, False)
    assert pair.source_id == digest_of(dict(reversed(PROMPT_LINE.items())))
    assert one("chat", SHARED_CHAT).messages == (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
    )


def test_pictures_stay_parts_and_texts_in_parts_become_text() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "a"}, picture]}
    said = {"role": "assistant", "content": [{"type": "text", "text": "b"}, "c"]}
    turn = one("chat", {"messages": [asked, said]})
    assert turn.messages == (asked, {"role": "assistant", "content": "bc"})


def test_tool_results_inside_a_user_message_become_messages_of_the_tool() -> None:
    used = {"type": "tool_use", "id": "u1", "name": "add", "input": {"a": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "u1",
        "content": [{"type": "text", "text": "2"}],
    }
    rows = [
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    call = {"id": "u1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert one("chat", {"messages": rows}).messages == (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "u1"},
        {"role": "user", "content": "And now?"},
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "temperature": 0, "top_p": 1, "n": 1, "echo": False, "text": "t"},
        {"prompt": "p", "is_toxic": 0, "flagged": 1, "text": "t"},
        {"prompt": "p", "score": 0.5, "helpfulness": 1},
        {"prompt": "p", "bert": 0.8, "bleu": 0.3},
        {"prompt": "p", "alpha": 1, "beta": 0},
    ],
)
def test_a_plain_table_of_prompts_is_no_table_of_models(row: dict[str, Any]) -> None:
    assert detect(row) is None


def test_a_table_of_models_is_known_by_routers_or_answers() -> None:
    answered = {"prompt": "p", "a": 1, "b": 0, "a_response": "x", "b_response": "y", "flagged": 1}
    assert detect(answered) == "routellm"
    assert [turn.served.model for turn in read("routellm", answered)] == ["a", "b"]
    assert detect({"prompt": "p", "a": 1, "b": 0, "mf": 0.3}) == "routellm"
    assert [t.served.model for t in read("routellm", {"prompt": "p", "x": 1}, models=["x"])] == [
        "x"
    ]


def test_scores_of_a_routellm_table_on_another_scale_are_no_grades() -> None:
    row = {"prompt": "p", "a": 1, "b": 9, "mf": 0.5}
    models = ["a", "b"]
    graded = [t.outcome.verdicts[0] for t in read("routellm", row, models=models)]
    assert [(v.value, v.label) for v in graded] == [(None, "1"), (None, "9")]
    scales = {"correct": [1, 10]}
    graded = [
        t.outcome.verdicts[0] for t in read("routellm", row, models=["a", "b"], scales=scales)
    ]
    assert [v.value for v in graded] == [0.0, pytest.approx(8 / 9)]
