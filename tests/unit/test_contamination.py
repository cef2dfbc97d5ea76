"""A conversation that holds an evaluation prompt is dropped, and it is named which."""

from __future__ import annotations

import random
from typing import Any

import pytest

from distill.curriculum.contamination import Contamination, Suites, words_by_message

PROMPT = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def suites(*texts: str, suite: str = "gsm") -> Suites:
    return Suites((suite, f"t{i}", [text]) for i, text in enumerate(texts))


def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_not() -> None:
    index = suites(" ".join(PROMPT))
    hit = Contamination(suite="gsm", task="t0", how="13 words")
    for start in range(4):
        words = PROMPT[start : start + 13]
        assert index.check([user("see: " + ", ".join(words).upper() + " ok")]) == hit
        assert index.check([user(" ".join(words[:12]) + " zzz")]) is None
        assert index.check([user(" ".join([*words[:6], "zzz", *words[6:]]))]) is None
    assert str(hit) == "13 words in a row of the prompt of task t0 of the suite gsm"


def test_an_overlap_counts_wherever_it_stands() -> None:
    index = suites(" ".join(PROMPT))
    text = " ".join(PROMPT)
    call = {"id": "x", "function": {"name": "f", "arguments": f'{{"q": "{text}"}}'}}
    for message in (
        {"role": "assistant", "content": text},
        {"role": "tool", "content": text},
        {"role": "system", "content": text},
        {"role": "assistant", "content": None, "reasoning_content": text},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [{"text": text}]}]},
    ):
        assert index.check([user("hello"), message]) is not None


def test_a_short_prompt_must_be_equal_to_a_whole_message_of_a_user() -> None:
    index = suites("sort:52305=", "3-4=")
    for text in ("sort:52305=", "  SORT:52305=\n", "sort\uff1a52305="):
        hit = index.check([{"role": "system", "content": "x"}, user(text)])
        assert hit == Contamination(suite="gsm", task="t0", how="equal")
    for text in ("sort:52306=", "sort:52305", "please sort:52305=", "3+4=", "3 - 4 ="):
        assert index.check([user(text)]) is None
    assert index.check([{"role": "assistant", "content": "sort:52305="}]) is None


def test_the_first_task_that_fits_is_named() -> None:
    text = " ".join(PROMPT)
    index = Suites([("one", "a", ["x y"]), ("one", "b", [text]), ("two", "c", [text])])
    hit = index.check([user(text + " q")])
    assert hit == Contamination(suite="one", task="b", how="13 words")
    assert len(index) == 3


def test_the_template_of_a_suite_is_no_overlap_and_its_tasks_are() -> None:
    template = "answer the next question with one letter and nothing else and do not explain it"
    tasks = [
        [template, "hi", f"{template} what is item {n} of {' '.join(PROMPT)} {n}"] for n in range(6)
    ]
    index = Suites(("mmlu", str(n), texts) for n, texts in enumerate(tasks))
    assert index.check([user(template), user("hi")]) is None
    assert index.check([user(f"{template} what is love")]) is None
    hit = index.check([user(f"else and do not explain it what is item 3 of {' '.join(PROMPT)}")])
    assert hit is not None
    assert hit.task == "3"


def test_two_tasks_are_no_template_and_texts_of_ones_own_are_ignored() -> None:
    text = " ".join(PROMPT)
    prompts = [("s", str(n), [f"{text} {n}"]) for n in range(2)]
    assert Suites(prompts).check([user(text)]) is not None
    assert Suites(prompts, ignore=[text]).check([user(text)]) is None


def test_without_prompts_nothing_is_contaminated() -> None:
    for index in (Suites(), suites(""), suites("short"), suites(*["same"] * 4)):
        assert index.check([user(" ".join(PROMPT)), user("same")]) is None
        assert index.check([{"role": "assistant"}]) is None


@pytest.mark.parametrize("num_tasks", [1, 3, 200])
def test_the_index_finds_what_a_plain_search_finds(num_tasks: int) -> None:
    rng = random.Random(num_tasks)
    words = ["ab", "cd", "ef"]

    def text(length: int) -> list[str]:
        return [rng.choice(words) for _ in range(length)]

    prompts = [text(rng.randint(13, 40)) for _ in range(num_tasks)]
    index = suites(*(" ".join(p) for p in prompts))
    found = 0
    for _ in range(100):
        talk = text(60)
        if rng.random() < 0.4:
            prompt = rng.choice(prompts)
            start = rng.randint(0, len(prompt) - 12)
            place = rng.randint(0, 40)
            talk[place:place] = prompt[start : start + rng.choice([11, 12, 13, 14])]
        grams = {tuple(talk[i : i + 13]) for i in range(len(talk) - 12)}
        expected = [
            n
            for n, p in enumerate(prompts)
            if grams & {tuple(p[i : i + 13]) for i in range(len(p) - 12)}
        ]
        hit = index.check([user(" ".join(talk[:20])), user(" ".join(talk[20:]))])
        assert (hit.task if hit else None) == (f"t{expected[0]}" if expected else None)
        found += hit is not None
    assert 5 < found < 70


def test_many_conversations_at_once_are_judged_as_each_alone_and_never_across_their_borders() -> (
    None
):
    index = suites(" ".join(PROMPT), "short one")
    half = len(PROMPT) // 2
    first, second = " ".join(PROMPT[:half]), " ".join(PROMPT[half:])
    conversations = [
        [user(first)],
        [user(second), {"role": "assistant", "content": "no"}],
        [],
        [user(first), {"role": "assistant", "content": second}],
        [user("Short  one")],
        [user("x"), {"role": "tool", "content": "y " + " ".join(PROMPT)}],
        [user("")],
    ]
    found = index.check_many(conversations, words_by_message(conversations))
    assert found == [index.check(own) for own in conversations]
    assert [hit.task if hit else None for hit in found] == [
        *(None, None, None, "t0"),
        *("t1", "t0", None),
    ]
