"""How much a reply repeats of what only the teacher was told."""

from __future__ import annotations

import pytest

from distill.errors import ConfigError
from distill.models import char_tokenizer
from distill.tokens import Chat
from helpers import ALPHABET, make_chat, make_rollout
from teachers.leaks import (
    PHRASES,
    WORLD_PHRASES,
    count_phrases,
    measure,
    ngram_share,
    row_marks,
    row_shares,
    summarise,
)
from teachers.sight import view_of


def ids(text):
    return [ALPHABET.index(c) for c in text]


def share(reply, privileged, own="", n=3):
    return ngram_share([ids(reply)], ids(privileged), [ids(own)], n=n)


@pytest.mark.parametrize(
    ("reply", "privileged", "own", "expected"),
    [
        ("abcdef", "zzabcdefzz", "", 1.0),
        ("abcdef", "zzzz", "", 0.0),
        ("abcxyz", "zabcz", "", 0.25),
        ("abcdef", "zzabcdefzz", "abcdef", 0.0),
        ("abcdef", "zzabcdefzz", "bcd", 0.75),
        ("abcabc", "abc", "", 0.5),
    ],
)
def test_the_share_counts_grams_of_the_privileged_text_that_the_student_never_read(
    reply, privileged, own, expected
):
    assert share(reply, privileged, own) == pytest.approx(expected)


def test_a_reply_shorter_than_a_gram_has_no_share_and_a_smaller_n_finds_one():
    assert share("ab", "abc") is None
    assert share("ab", "abc", n=2) == 1.0
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        share("ab", "abc", n=0)


def test_no_gram_reaches_over_the_border_of_two_replies():
    assert ngram_share([ids("ab"), ids("cd")], ids("abcd"), [], n=3) is None
    assert ngram_share([ids("abc"), ids("d")], ids("abcd"), [], n=3) == 1.0


def row_of(prompt, reply, privileged):
    row = make_rollout(ids(prompt), [*ids(reply), 1])
    return row, view_of(row, ids(privileged), "with_answer")


def test_rows_are_measured_against_their_own_view_without_the_end_token():
    rows, views = zip(row_of("q=", "abcd", "q:abcd="), row_of("q=", "wxyz", "q:abcd="), strict=True)
    assert row_shares(rows, views, n=4, stop_token_ids=(1,)) == [1.0, 0.0]
    assert row_shares(rows, views, n=4) == [0.5, 0.0]
    assert row_shares(rows, [views[0], None], n=4) == [0.5, None]


def test_a_view_that_shows_the_student_s_own_prompt_leaks_nothing():
    row, view = row_of("abcd=", "abcd", "abcd=")
    assert row_shares([row], [view], n=3, stop_token_ids=(1,)) == [0.0]


def test_what_the_student_read_between_its_replies_is_its_own_text():
    mask = (False, True, True, True, False, False, False, False, True, True, True, True)
    row = make_rollout(ids("q"), ids("xyzabcdabcd"), completion_mask=mask)
    view = view_of(row, ids("abcd"), "with_answer")
    assert row_shares([row], [view], n=4) == [0.0]


def test_phrases_are_counted_whatever_their_case_and_not_when_the_prompt_holds_them():
    text = "By the Hint, and THE HINT; the given answer."
    assert count_phrases(text, PHRASES) == 3
    assert count_phrases(text, PHRASES, own="Use the hint.") == 1
    assert count_phrases(text, ("the hint", "The Hint")) == 2
    assert count_phrases("an ordinary reply", PHRASES) == 0


def test_marks_of_the_generated_world_are_counted_per_row():
    alphabet = ALPHABET + "[]{}"
    chat = Chat(char_tokenizer(alphabet))

    def row(prompt, reply):
        return make_rollout(*([alphabet.index(c) for c in text] for text in (prompt, reply)))

    rows = [row("k1:a=", "ra$"), row("k1:a=", "[rev]a$"), row("k1{a=", "{a$")]
    assert row_marks(rows, chat, phrases=WORLD_PHRASES) == [0.0, 2.0, 0.0]


def test_an_empty_phrase_is_refused():
    with pytest.raises(ConfigError, match="must not be empty"):
        row_marks([make_rollout([5], [6])], make_chat(), phrases=("a", ""))


def test_a_summary_leaves_out_what_was_not_measured():
    assert summarise([0.5, None, 0.0], [0.0, 2.0, 0.0, 1.0]) == {
        "leak/ngram_share": 0.25,
        "leak/marked_share": 0.5,
    }
    assert summarise([None], []) == {}


def test_a_step_is_measured_over_its_trained_rows_alone():
    rows, views = zip(row_of("q=", "abcd", "q:abcd="), row_of("q=", "wxyz", "q:abcd="), strict=True)
    empty = make_rollout(ids("q=ab"), [])
    found = measure([*rows, empty], [*views, None], make_chat(), n=4, phrases=("abc",))
    assert found == {"leak/ngram_share": 0.5, "leak/marked_share": 0.5}
