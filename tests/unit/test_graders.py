from __future__ import annotations

from pathlib import Path

import pytest

from distill.errors import ConfigError, DataError, EvalError
from distill.types import Message, Reward, Task
from evals.graders import GRADERS, build_grader


def task(answer: str | None) -> Task:
    prompt = (Message(role="user", content="?"),)
    return Task(id="0" * 16, env="e", domain="d", split="train", prompt=prompt, answer=answer)


@pytest.mark.parametrize(
    ("grader", "reply", "answer", "right"),
    [
        ("exact", " a  b\n", "a b", True),
        ("exact", "A b", "a b", False),
        ("exact", "caf\u00e9", "cafe\u0301", True),
        ("exact", "", "", True),
        ("contains", "It is Paris, of course.", "paris", True),
        ("contains", "comparison", "paris", False),
        ("contains", "a (b+c)* d", "(b+c)*", True),
        ("contains", "anything", "", False),
        ("number", "2 + 2 = 4", "4", True),
        ("number", "it is 4, not 5", "4", False),
        ("number", "so 1,234,567.50 dollars.", "1234567.5", True),
        ("number", "the answer is 42.", "42", True),
        ("number", "x = -3", "-3", True),
        ("number", "x = \u22123", "-3", True),
        ("number", "5-3", "-3", False),
        ("number", "one half is 1/2", "0.5", True),
        ("number", "about 0.333333", "1/3", True),
        ("number", "about 0.33", "1/3", False),
        ("number", "1000001", "1000000", False),
        ("number", "12e2", "1200", True),
        ("number", "1/0", "4", False),
        ("number", "no number", "4", False),
        ("number", "9" * 5000, "4", False),
        ("number", "1e99999999", "4", False),
        ("choice", "B", "B", True),
        ("choice", "(b)", "B", True),
        ("choice", "B. Because it rains", "b", True),
        ("choice", "A is tempting, but the answer is C.", "C", True),
        ("choice", "The answer is **D**", "(D)", True),
        ("choice", "I think it must be A", "A", True),
        ("choice", "The answer is a dog, so B", "B", True),
        ("choice", "the answer is b.", "B", True),
        ("choice", "It rains.\nB", "B", True),
        ("choice", "It is not (A) but (C)", "C", True),
        ("choice", "none", "A", False),
        ("answer", "6 * 7 = 42\nAnswer: 42", "42", True),
        ("answer", "Answer: 1\nno, wait\n**Answer:** 42.0.", "42", True),
        ("answer", "answer: Blue Whale.", "blue whale", True),
        ("answer", "Answer: 41", "42", False),
        ("answer", "42", "42", False),
        ("answer", "The answer: 42", "42", False),
    ],
)
def test_graders_mark_replies(grader: str, reply: str, answer: str, right: bool) -> None:
    assert GRADERS[grader](reply, answer).value == float(right)


def test_the_answer_grader_tells_whether_there_was_an_answer_line() -> None:
    assert GRADERS["answer"]("Answer: 41", "42").parts == {"correct": 0.0, "format": 1.0}
    assert GRADERS["answer"]("41", "42").parts == {"correct": 0.0, "format": 0.0}


def test_answers_that_do_not_fit_the_grader_are_errors_and_not_wrong_replies() -> None:
    with pytest.raises(EvalError, match="expects a number"):
        GRADERS["number"]("4", "four")
    with pytest.raises(EvalError, match="expects one letter"):
        GRADERS["choice"]("A", "AB")
    with pytest.raises(DataError, match="has no answer"):
        build_grader("exact")("a", task(None))


def test_an_unknown_grader_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'number'"):
        build_grader("numbr")


def test_an_own_grader_may_return_a_number_or_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_graders_for_test.py").write_text(
        "from distill.types import Reward\n"
        "def length(reply, task): return len(reply) / 10\n"
        "def full(reply, task): return Reward(value=1.0, parts={'style': 0.5})\n"
        "def broken(reply, task): return 'good'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert build_grader("own_graders_for_test:length")("abc", task(None)) == Reward(value=0.3)
    assert build_grader("own_graders_for_test:full")("", task(None)).parts == {"style": 0.5}
    with pytest.raises(EvalError, match="must return a Reward or a finite number"):
        build_grader("own_graders_for_test:broken")("", task(None))
    with pytest.raises(ConfigError, match="did you mean 'length'"):
        build_grader("own_graders_for_test:lenght")
    with pytest.raises(ConfigError, match="cannot import 'no_such_module_here'"):
        build_grader("no_such_module_here:grade")
