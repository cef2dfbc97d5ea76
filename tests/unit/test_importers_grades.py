"""What a score says: stars, thumbs, scores of which high is bad, and answers that were cut."""

from __future__ import annotations

from typing import Any

import pytest

from distill.curriculum.importers.endings import finish_of
from distill.curriculum.importers.polarity import kind_of
from distill.curriculum.importers.verdicts import grade, origin_of
from distill.curriculum.outcomes import is_good
from distill.curriculum.records import Verdict
from import_rows import (
    ASKED,
    DECISION_ROW,
    OBSERVATION,
    REPLAY,
    REPLAY_WITH_TEXT,
    SAID,
    SCORE,
    SPEND_LOG,
    one,
    read,
)


def rated(name: str, value: Any, **options: Any) -> Verdict:
    """The verdict of a rating in the format `name`."""
    if name == "langfuse":
        row = {**SCORE, "name": "rating", "value": value, "data_type": "NUMERIC"}
        (found,) = read(name, row, **options)
        return found.verdict
    if name == "otel":
        told = {"gen_ai.evaluation.name": "rating", "gen_ai.evaluation.score.value": value}
        (found,) = read(name, {"spanId": "e", "parentSpanId": "c", "attributes": told}, **options)
        return found.verdict
    row = {
        "chat": {"messages": [ASKED, SAID], "rating": value},
        "litellm": {**SPEND_LOG, "metadata": {"feedback": value}},
        "opensquilla": {**DECISION_ROW, "rating": value},
        "mapped": {"stars": value},
        "vllm_router": {**REPLAY, "outcomes": [{"target": "rating", "score": value}]},
    }[name]
    if name == "mapped":
        options["fields"] = {"verdict.user.rating": "stars"}
    (verdict,) = one(name, row, **options).outcome.verdicts
    return verdict


FORMATS = ["chat", "litellm", "opensquilla", "langfuse", "otel", "mapped", "vllm_router"]


@pytest.mark.parametrize("name", FORMATS)
def test_stars_without_a_scale_are_kept_and_say_nothing(name: str) -> None:
    for stars in (0, 0.5, 1, 1.0, 2, 3, 4, 5):
        verdict = rated(name, stars)
        assert (verdict.value, verdict.label) == (None, f"{stars:g}")
        assert is_good(verdict) is None


@pytest.mark.parametrize("name", FORMATS)
def test_stars_with_a_scale_grow_from_the_worst_to_the_best(name: str) -> None:
    scales = {"feedback" if name == "litellm" else "rating": [1, 5]}
    found = [rated(name, stars, scales=scales).value for stars in (1, 2, 3, 4, 5)]
    assert found == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("name", ["chat", "litellm", "opensquilla", "mapped"])
def test_words_and_truths_of_people_are_grades(name: str) -> None:
    for value, good in (("up", 1.0), ("down", 0.0), (True, 1.0), (False, 0.0)):
        assert rated(name, value).value == good


@pytest.mark.parametrize(
    ("value", "good", "label"),
    [
        ({"thumb": 1}, 1.0, None),
        ({"thumb": 0}, 0.0, None),
        ({"thumb": -1}, 0.0, None),
        ({"score": 1}, None, "1"),
        ({"rating": 1, "comment": "nice"}, None, "1"),
        ({"score": 1, "label": "bad"}, 0.0, "bad"),
        ({"vote": 1}, 1.0, None),
        ({"vote": 0}, None, "0"),
        ("1", None, "1"),
    ],
)
def test_feedback_of_litellm(value: Any, good: float | None, label: str | None) -> None:
    verdict = rated("litellm", value)
    assert (verdict.value, verdict.label) == (good, label)


def test_a_verdict_of_our_own_form_is_what_it_says() -> None:
    told = {"verdicts": [{"source": "program", "name": "score", "value": 1}]}
    (verdict,) = one("litellm", {**SPEND_LOG, "metadata": {"outcome": told}}).outcome.verdicts
    assert verdict == Verdict(source="program", name="score", value=1.0)
    (verdict,) = one("mapped", {"r": 1}, fields={"verdict.program.reward": "r"}).outcome.verdicts
    assert verdict.value == 1.0


@pytest.mark.parametrize(
    ("name", "kind", "at_zero", "at_half", "at_one"),
    [
        ("user-thumb", "binary", 0.0, 0.25, 1.0),
        ("isCorrect", "binary", 0.0, 0.25, 1.0),
        ("tests_passed", "binary", 0.0, 0.25, 1.0),
        ("exact_match", "binary", 0.0, 0.25, 1.0),
        ("no_hallucinations", "binary", 0.0, 0.25, 1.0),
        ("quality", "quality", None, 0.25, None),
        ("answer_relevancy", "quality", None, 0.25, None),
        ("zero_shot_accuracy", "unclear", None, None, None),
        ("success_score", "binary", None, 0.25, None),
        ("Hallucination", "fault", 1.0, 0.75, 0.0),
        ("error_rate", "fault", 1.0, 0.75, 0.0),
        ("not_correct", "fault", 1.0, 0.75, 0.0),
        ("incorrect", "fault", 1.0, 0.75, 0.0),
        ("toxicity", "harm", None, None, 0.0),
        ("harmfulness", "harm", None, None, 0.0),
        ("gender_bias", "harm", None, None, 0.0),
        ("refusal", "harm", None, None, 0.0),
        ("thumbs_down", "harm", None, None, 0.0),
        ("toxicity_check", "unclear", None, None, None),
        ("toxicity_rating", "harm", None, None, None),
        ("llm_judge", "unknown", None, None, None),
        ("sentiment", "unknown", None, None, None),
        ("score", "unknown", None, None, None),
        ("exit_code", "exit", 1.0, 0.0, 0.0),
    ],
)
def test_the_name_of_a_score_says_what_its_numbers_mean(
    name: str, kind: str, at_zero: float | None, at_half: float | None, at_one: float | None
) -> None:
    assert kind_of(name) == kind
    for value, good in ((0, at_zero), (0.25, at_half), (1, at_one)):
        graded, label = grade(value, name, {})
        assert graded == good
        assert label == (None if good is not None else f"{value:g}")


def test_a_harm_that_did_not_happen_is_no_success_and_no_failure() -> None:
    for name, source in (("toxicity", "EVAL"), ("refusal", "ANNOTATION")):
        for value, word in ((0, "False"), (False, None)):
            row = {**SCORE, "name": name, "value": value, "string_value": word, "source": source}
            (found,) = read("langfuse", row)
            assert is_good(found.verdict) is None
        (found,) = read("langfuse", {**row, "value": 1, "string_value": "True"})
        assert is_good(found.verdict) is False


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({"name": "Hallucination", "value": 1, "data_type": "NUMERIC"}, False),
        ({"name": "Hallucination", "value": 0, "data_type": "NUMERIC"}, True),
        ({"name": "Hallucination", "value": 0.9, "data_type": "NUMERIC"}, False),
        ({"name": "hallucinated", "value": 1, "string_value": "True"}, False),
        ({"name": "coherence_level", "value": 1, "data_type": "NUMERIC"}, None),
        ({"name": "anything", "value": 1, "data_type": "BOOLEAN"}, True),
        ({"name": "anything", "value": 1, "data_type": "NUMERIC"}, None),
        ({"name": "correct", "value": 1, "data_type": "CATEGORICAL"}, None),
        ({"name": "toxicity", "value": 1, "string_value": "pass"}, True),
    ],
)
def test_scores_of_judges_count_the_way_their_name_says(
    change: dict[str, Any], good: bool | None
) -> None:
    (found,) = read("langfuse", {**SCORE, "source": "EVAL", **change})
    assert is_good(found.verdict) is good


def test_a_scale_turns_a_score_around() -> None:
    options = {"scales": {"toxicity": [5, 1]}}
    assert [grade(v, "toxicity", options)[0] for v in (1, 3, 5)] == [1.0, 0.5, 0.0]


def test_who_says_it_is_read_from_words_and_not_from_letters() -> None:
    assert origin_of("unit-tests", {}) == "program"
    assert origin_of("userRating", {}) == "user"
    assert origin_of("latest_quality", {}) == "judge"
    assert origin_of("generating_well", {}) == "judge"


MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "5"}]}
OUTPUT = {"object": "response", "output": [MESSAGE]}
CUT = {"incomplete_details": {"reason": "max_output_tokens"}}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"choices": [{"message": SAID, "finish_reason": "length"}]}, "length"),
        ({"choices": [{"message": SAID, "finish_reason": "stop", "stop_reason": 7}]}, "stop"),
        ({**MESSAGE, "stop_reason": "max_tokens"}, "length"),
        ({**MESSAGE, "stop_reason": "end_turn"}, "end_turn"),
        ({**OUTPUT, "status": "incomplete", **CUT}, "length"),
        ({**OUTPUT, "status": "incomplete", "incomplete_details": None}, "length"),
        (
            {**OUTPUT, "status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
            "content_filter",
        ),
        ({**OUTPUT, "status": "completed", "incomplete_details": None}, "completed"),
        ({"candidates": [{"content": {}, "finishReason": "MAX_TOKENS"}]}, "length"),
        ({"message": SAID, "done_reason": "length"}, "length"),
        (OUTPUT, None),
        ("5", None),
        ([], None),
    ],
)
def test_why_an_answer_ended_is_read_of_every_interface(response: Any, reason: str | None) -> None:
    assert finish_of(response) == reason
    row = {**SPEND_LOG, "messages": [ASKED], "response": response}
    outcome = one("litellm", row).outcome
    assert outcome.finish_reason == reason
    observed = one("langfuse", {**OBSERVATION, "level": "DEFAULT", "output": response}).outcome
    assert observed.finish_reason == reason
    if isinstance(response, dict):
        replay = one("vllm_router", {**REPLAY_WITH_TEXT, "response_body": response})
        assert replay.outcome.finish_reason == reason


def test_an_answer_that_was_cut_ended_with_length_in_the_other_formats() -> None:
    chat = {"messages": [ASKED, SAID], "model": "m"}
    said = [{**SAID, "finish_reason": "max_tokens"}]
    parts = [{"role": "assistant", "parts": [], "finish_reason": "length"}]
    span = {"gen_ai.operation.name": "chat", "gen_ai.output.messages": parts}
    turns = [
        one("chat", {**chat, "finish_reason": "MAX_TOKENS"}),
        one("chat", {**chat, "stop_reason": "max_tokens"}),
        one("chat", {"messages": [ASKED, *said]}),
        one("chat", {"prompt": "q", "response": {"choices": [{"finish_reason": "length"}]}}),
        one("otel", {"spanId": "s", "attributes": span}),
        one("otel", {"spanId": "s", "attributes": {**span, "gen_ai.output.messages": None,
            "gen_ai.response.finish_reasons": ["max_tokens"]}}),
        one("openrouter", {"id": "g", "native_finish_reason": "MAX_TOKENS"}),
        one("mapped", {"why": "max_output_tokens"}, fields={"outcome.finish_reason": "why"}),
    ]  # fmt: skip
    assert {turn.outcome.finish_reason for turn in turns} == {"length"}
