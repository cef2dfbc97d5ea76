"""A turn as numbers and hashed words."""

from __future__ import annotations

import numpy as np
import pytest

from distill.curriculum.demand import DemandInput
from distill.curriculum.demand_features import NUMBERS, features, sketch


def test_numbers_of_a_turn_are_what_they_are_called() -> None:
    given = DemandInput(
        request="How do I sort 12 numbers?\n```\nf(x)\n```\nWhy?",
        history=({"role": "user", "content": "abc"}, {"role": "tool", "content": "de"}),
        tools=("a", "b"),
    )
    numbers, hashed = features([given_sketch := sketch(given), given_sketch])
    found = dict(zip(NUMBERS, np.expm1(numbers[0]).round(9), strict=True))
    assert found["digits"] == found["tools"] == found["code_blocks"] == found["questions"] == 2
    assert found["capitals"] == 3  # How, I, Why
    assert (found["user_messages"], found["tool_messages"], found["assistant_messages"]) == (
        1,
        1,
        0,
    )
    assert found["history_characters"] == 5
    assert found["question_words"] == 2
    # Six words and a number, f, x and Why; abc before it; a and b of the tools.
    assert found["words"] == 6 + 3 + 1 + 2
    first, second = hashed.rows == 0, hashed.rows == 1
    assert sorted(hashed.columns[first]) == sorted(hashed.columns[second])
    words = hashed.columns < 4096
    assert (hashed.values[words & first] ** 2).sum() == pytest.approx(1.0)


def test_equal_words_hash_equally_wherever_they_stand() -> None:
    texts = ["deadlock", "a deadlock", "Deadlock, twice: deadlock"]
    _, hashed = features([sketch(DemandInput(request=t)) for t in texts])
    words = hashed.columns < 4096
    (only,) = hashed.columns[words & (hashed.rows == 0)]
    for row, times in ((1, 1), (2, 2)):
        assert (hashed.columns[words & (hashed.rows == row)] == only).sum() == times


def test_surrogates_and_zero_bytes_do_no_harm() -> None:
    odd = DemandInput(request="a\ud800b\x00\x00c", history=({"role": "user", "content": "\ud800"},))
    plain = DemandInput(request="x")
    (alone, _), (beside, _) = features([sketch(plain)]), features([sketch(odd), sketch(plain)])
    assert (alone[0] == beside[1]).all()
