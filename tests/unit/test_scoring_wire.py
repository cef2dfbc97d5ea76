"""Messages of the scoring endpoint: what goes in comes out, and nothing else is let in."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace

import numpy as np
import pytest

from distill.errors import DataError
from distill.types import ScoreRequest, Scores, TeacherView
from teachers.scoring import (
    Question,
    answer_hidden,
    answer_scores,
    pack,
    read_hidden,
    read_scores,
    unpack,
)

VIEWS = [
    TeacherView(token_ids=(5, 6, 7, 8), positions=(2, 3), kind="plain", id="a"),
    TeacherView(token_ids=(9, 4), positions=(1,), kind="plain", id="b"),
]
WEIGHTS = "w"
PLAIN = ScoreRequest()


def question(want=PLAIN, **changes):
    settings = {"number": 3, "tokenizer": "t", "num_ids": 50, "temperature": 0.5, "hidden": False}
    return Question.of(VIEWS, want, candidate_ids=want.candidate_ids, **(settings | changes))


def scores(entropy=True, known=((-0.5, -3.0), (-0.25, -2.0), (-1.5, -math.inf)), top=None):
    pairs = (((-1.0, -2.0), known[:2]), ((-0.125,), known[2:]))
    return [
        Scores(
            logprobs=logprobs,
            entropy=tuple(-x for x in logprobs) if entropy else None,
            candidate_ids=None if top is None else tuple(top for _ in logprobs),
            candidate_logprobs=rows,
            source="s",
            view_id=str(i),
        )
        for i, (logprobs, rows) in enumerate(pairs)
    ]


def test_arrays_come_back_as_they_were_sent():
    sent = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "b": np.array([1, 65535, 3], np.uint16),
        "c": np.array([1.5, -math.inf, math.nan, 3e38], np.float32),
        "d": np.zeros((4, 0), np.int32),
    }
    head, found = unpack(pack({"x": [1, "ä"]}, sent))
    assert head == {"x": [1, "ä"]}
    assert list(found) == list(sent)
    for name, array in sent.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
        assert found[name].flags.writeable
        assert found[name].flags.aligned


def message(head, tail=b""):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return b"distill1" + struct.pack("<I", len(text)) + text + tail


def listing(*entries):
    return {"arrays": list(entries)}


BROKEN = {
    "empty": b"",
    "another kind": b"PK\x03\x04" * 20,
    "cut in its length": b"distill1\x00\x01",
    "cut in its head": message(listing())[:-3],
    "a head that is too long": b"distill1" + struct.pack("<I", 2**31) + b"{}",
    "no JSON": message(b"\xff\xfe{}"),
    "deep JSON": message(b"[" * 50000),
    "a list": message([1]),
    "no arrays": message({"x": 1}),
    "arrays of another kind": message({"arrays": {"a": 1}}),
    "an object type": message(listing(["a", "O", [1]]), b"x" * 8),
    "a text as type": message(listing(["a", "f4,f4", [1]]), b"x" * 8),
    "a negative size": message(listing(["a", "i4", [-1]])),
    "a size that is true": message(listing(["a", "i4", [True]]), b"xxxx"),
    "a huge size": message(listing(["a", "f4", [2**30, 2**30]]), b"xxxx"),
    "an empty array with a huge side": message(listing(["a", "f4", [0, 2**62]])),
    "too many sides": message(listing(["a", "f4", [1, 1, 1]]), b"xxxx"),
    "too few bytes": message(listing(["a", "i4", [2]]), b"xxxx"),
    "bytes too many": message(listing(["a", "i4", [1]]), b"xxxxx"),
    "an array twice": message(listing(["a", "i4", [1]], ["a", "i4", [1]]), b"x" * 8),
    "an entry of two": message(listing(["a", "i4"])),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_message_is_refused(data):
    with pytest.raises(DataError):
        unpack(data)


def test_no_cut_of_a_message_goes_unnoticed():
    data = question().pack()
    for stop in range(len(data)):
        with pytest.raises(DataError):
            Question.unpack(data[:stop])


def test_a_question_comes_back_with_its_views():
    asked = ScoreRequest(entropy=True, candidate_ids=[[[1, 2], [3, 4]], [[5, 6]]])
    found = Question.unpack(question(asked).pack())
    assert [(v.token_ids, v.positions) for v in found.views()] == [
        (v.token_ids, v.positions) for v in VIEWS
    ]
    assert found.want() == asked
    assert found.chosen.tolist() == [7, 8, 4]
    assert (found.number, found.temperature, found.num_ids) == (3, 0.5, 50)
    plain = Question.unpack(question(ScoreRequest(candidates=4)).pack())
    assert plain.want() == ScoreRequest(candidates=4)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"positions": [0, 3, 1]}, "positive, ascending"),
        ({"positions": [3, 2, 1]}, "positive, ascending"),
        ({"positions": [2, 2, 1]}, "positive, ascending"),
        ({"positions": [2, 3, 2]}, "inside of their view"),
        ({"positions": [2, 3, -1]}, "positive, ascending"),
        ({"lengths": [4, 3]}, "should have 7 tokens"),
        ({"lengths": [4]}, "a length and a number"),
        ({"lengths": [2**31 - 1] * 2}, "should have 4294967294 tokens"),
        ({"counts": [3, 0]}, "both above 0"),
        ({"counts": [], "lengths": [], "token_ids": [], "positions": []}, "both above 0"),
        ({"counts": [4, -1]}, "both above 0"),
        ({"candidate_ids": [[1], [2]]}, r"\[3, K\]"),
    ],
)
def test_a_question_whose_parts_do_not_fit_is_refused(change, match):
    arrays = {name: np.asarray(values, np.int32) for name, values in change.items()}
    with pytest.raises(DataError, match=match):
        Question.unpack(replace(question(), **arrays).pack())


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": 10**400},
        {"temperature": "1"},
        {"candidates": -1},
        {"candidates": True},
        {"hidden": 1},
        {"num_ids": 2.5},
        {"tokenizer": None},
    ],
)
def test_a_question_with_a_senseless_setting_is_refused(change):
    with pytest.raises(DataError):
        Question.unpack(replace(question(), **change).pack())


def test_a_question_needs_all_its_arrays_in_their_types():
    head, arrays = unpack(question().pack())
    for name in arrays:
        less = {n: a for n, a in arrays.items() if n != name}
        with pytest.raises(DataError, match=name):
            Question.unpack(pack(head, less))
        with pytest.raises(DataError, match=name):
            Question.unpack(pack(head, {**less, name: arrays[name].astype(np.float32)}))
    with pytest.raises(DataError, match="more"):
        Question.unpack(pack(head, {**arrays, "more": arrays["counts"]}))


def test_scores_come_back_exactly():
    asked = question(ScoreRequest(entropy=True, candidates=2))
    answer = answer_scores(asked, scores(top=(70000, 3)), weights=WEIGHTS)
    found = read_scores(replace(asked, num_ids=None), answer, weights=WEIGHTS)
    assert found["logprobs"].tolist() == [-1.0, -2.0, -0.125]
    assert found["entropy"].tolist() == [1.0, 2.0, 0.125]
    assert found["ids"].tolist() == [[70000, 3]] * 3
    assert found["known"].tolist() == [[-0.5, -3.0], [-0.25, -2.0], [-1.5, -math.inf]]


def test_small_ids_travel_in_two_bytes():
    asked = question(ScoreRequest(candidates=2), num_ids=None)
    small = answer_scores(asked, scores(top=(65535, 3)), weights=WEIGHTS)
    large = answer_scores(asked, scores(top=(65536, 3)), weights=WEIGHTS)
    assert len(large) - len(small) == 3 * 2 * 2
    assert read_scores(asked, small, weights=WEIGHTS)["ids"].dtype == np.int32


def test_candidates_outside_of_the_vocabulary_are_refused():
    asked = question(ScoreRequest(candidates=2), num_ids=50)
    answer = answer_scores(asked, scores(top=(50, 3)), weights=WEIGHTS)
    with pytest.raises(DataError, match="such as 50, outside of the vocabulary of 50 ids"):
        read_scores(asked, answer, weights=WEIGHTS)


WANTED = ScoreRequest(entropy=True, candidate_ids=[[[1, 2], [3, 4]], [[5, 6]]])


def altered(**changes):
    asked = question(WANTED)
    head, arrays = unpack(answer_scores(asked, scores(), weights=WEIGHTS))
    for name, change in changes.items():
        if name in ("number", "weights"):
            head[name] = change
        elif change is None:
            del arrays[name]
        else:
            arrays[name] = change(arrays[name].copy()) if name in arrays else change(None)
    return asked, pack(head, arrays)


def put(value, at):
    def change(array):
        array[at] = value
        return array

    return change


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"number": 4}, "question 4, question 3 was asked"),
        ({"weights": "other"}, "comes from weights other"),
        ({"ids": put(8, 0)}, "their ids differ"),
        ({"ids": lambda a: a[:2]}, "their ids differ"),
        ({"ids": None}, "their ids differ"),
        ({"logprobs": lambda a: a[:2]}, "should hold"),
        ({"logprobs": lambda a: np.append(a, a[:1])}, "should hold"),
        ({"entropy": None}, "should hold"),
        ({"known": lambda a: a[:, :1]}, "should hold"),
        ({"known": lambda a: np.concatenate([a, a[:, :1]], 1)}, "should hold"),
        ({"extra": lambda a: np.zeros(3, np.float32)}, "should hold"),
        ({"logprobs": put(math.nan, 1)}, "holds 1 values"),
        ({"logprobs": put(-math.inf, 1)}, "holds 1 values"),
        ({"logprobs": put(0.01, 1)}, "holds 1 values"),
        ({"known": put(math.nan, (0, 1))}, "holds 1 values"),
        ({"known": put(math.inf, (0, 1))}, "holds 1 values"),
        ({"entropy": put(math.nan, 1)}, "holds 1 values"),
        ({"entropy": put(math.inf, 1)}, "holds 1 values"),
        ({"entropy": put(-1.0, 1)}, "holds 1 values"),
    ],
)
def test_an_answer_that_is_wrong_is_refused(changes, match):
    asked, answer = altered(**changes)
    read_scores(*altered(), weights=WEIGHTS)
    with pytest.raises(DataError, match=match):
        read_scores(asked, answer, weights=WEIGHTS)


def test_a_token_that_the_teacher_does_not_know_may_be_impossible():
    asked, answer = altered(logprobs=put(-math.inf, 1))
    cut = replace(asked, num_ids=8)  # the second trained token has id 8
    assert read_scores(cut, answer, weights=WEIGHTS)["logprobs"][1] == -math.inf


def test_hidden_states_come_back_and_others_are_refused():
    asked = question(hidden=True)
    hidden = np.arange(12, dtype=np.float32).reshape(3, 4)
    answer = answer_hidden(asked, hidden, dtype="float32", weights=WEIGHTS)
    found = read_hidden(asked, answer, weights=WEIGHTS, width=4, dtype="float32")
    np.testing.assert_array_equal(found, hidden)
    for wrong in ({"width": 5}, {"dtype": "bfloat16"}, {"weights": "other"}):
        settings = {"weights": WEIGHTS, "width": 4, "dtype": "float32"} | wrong
        with pytest.raises(DataError):
            read_hidden(asked, answer, **settings)
    hidden[1, 1] = math.nan
    broken = answer_hidden(asked, hidden, dtype="float32", weights=WEIGHTS)
    with pytest.raises(DataError, match="not finite"):
        read_hidden(asked, broken, weights=WEIGHTS, width=4, dtype="float32")
