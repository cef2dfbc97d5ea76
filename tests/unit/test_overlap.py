"""Texts share words: equal hashes everywhere, exact Jaccard, near-duplicates inside a family."""

from __future__ import annotations

import random
import re
import sqlite3
import subprocess
import sys
import unicodedata
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from distill import overlap
from distill.curriculum import nearby
from distill.curriculum.nearby import Duplicate, Entry, Nearby, family_of, near_duplicates, text_of
from distill.overlap import (
    bands,
    common,
    digest,
    gram_hashes,
    grams_of,
    is_near,
    jaccard,
    minhash,
    normal_text,
    shingles,
    word_hashes,
    words_of,
)

WORDS = [
    f"{a}{b}" for a in ("ba", "ko", "mi", "su", "te") for b in ("", "l", "nd", "r", "st", "x9")
]


def plain_words(text: str) -> list[str]:
    """The words by the definition, one at a time."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return re.findall(r"[\u4e00-\u9fff\u3040-\u30ff]|[^\W\u4e00-\u9fff\u3040-\u30ff]+", folded)


def random_text(rng: random.Random, length: int) -> str:
    marks = [" ", ", ", ". ", "\n", " - ", "\t(", ") ", "; "]
    words = [*WORDS, "Gr\u00f6\u00dfe", "CAF\u00c9", "na\u00efve", "\u4e2d", "\uff21\uff22", "x_1"]
    return "".join(rng.choice(words) + rng.choice(marks) for _ in range(length))


def test_hashes_are_equal_exactly_where_words_are() -> None:
    rng = random.Random(0)
    seen: dict[str, int] = {}
    for _ in range(100):
        text = random_text(rng, rng.randint(0, 60))
        words, hashes = plain_words(text), word_hashes(text).tolist()
        assert len(words) == len(hashes)
        for word, value in zip(words, hashes, strict=True):
            assert seen.setdefault(word, value) == value
    assert len(set(seen.values())) == len(seen) > 30


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("The Cat, sat.", "the  cat\nSAT"),
        ("\uff34he cat", "the CAT!"),
        ("Stra\u00dfe", "STRASSE"),
        ("caf\u00e9", "cafe\u0301"),
        ("\u4e2d\u6587", "\u4e2d \u6587"),
        ("a_b", "A_B"),
    ],
)
def test_spelling_makes_no_difference(left: str, right: str) -> None:
    assert word_hashes(left).tolist() == word_hashes(right).tolist()
    assert digest(left) == digest(right)


def test_order_and_borders_of_words_make_a_difference() -> None:
    texts = ["ab c", "a bc", "abc", "c ab", "a b c", "aab", "aba", "ab ab", "ab", "", "?!", ":)"]
    assert len({digest(text) for text in texts}) == len(texts)
    assert normal_text(" 3 +  4 = ") == "3 + 4 ="


def test_hashes_are_the_same_in_another_process() -> None:
    code = (
        "from distill.overlap import *; row = minhash([shingles(word_hashes('a b c d'))])[0]; "
        "print(digest('The cat sat on it').hex(), *row[:3])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    own = minhash([shingles(word_hashes("a b c d"))])[0][:3]
    assert printed == {" ".join([digest("The cat sat on it").hex(), *map(str, own)]) + "\n"}


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, distill.overlap\n"
        "from distill.curriculum import contamination, nearby, ner, pii, structure\n"
        "print(sorted({'torch', 'transformers', 'rensa', 'sklearn'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_grams_are_equal_exactly_where_n_words_in_a_row_are() -> None:
    rng = random.Random(1)
    words = [rng.choice(WORDS[:3]) for _ in range(300)]
    for n in (1, 2, 3, 5, 13):
        hashes = gram_hashes(word_hashes(" ".join(words)), n).tolist()
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        assert len(hashes) == len(grams)
        assert len(set(zip(hashes, grams, strict=True))) == len(set(grams)) == len(set(hashes))
    assert len(gram_hashes(word_hashes("a b"), 3)) == 0


def test_a_long_text_has_the_words_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_text(random.Random(2), 2000)
    whole = word_hashes(text).tolist()
    monkeypatch.setattr(overlap, "_CHUNK", 100)
    assert word_hashes(text).tolist() == whole
    assert len(word_hashes("a" * 1000)) == 10  # no space to cut at


def test_jaccard_is_exact() -> None:
    rng = random.Random(3)
    for _ in range(300):
        left, right = (
            {rng.getrandbits(6) << 58 for _ in range(rng.randint(0, 40))} for _ in range(2)
        )
        a, b = (np.array(sorted(s), dtype=np.uint64) for s in (left, right))
        assert common(a, b) == len(left & right)
        expected = Fraction(len(left & right), len(left | right)) if left | right else Fraction(1)
        assert jaccard(a, b) == pytest.approx(float(expected))
        for threshold in (Fraction(1, 2), Fraction(4, 5), Fraction(1, 3)):
            assert is_near(a, b, float(threshold)) == (expected >= threshold)


def test_signatures_estimate_the_similarity_and_near_texts_share_bands() -> None:
    rng = np.random.default_rng(4)
    pool = rng.integers(0, 2**63, 1000).astype(np.uint64)
    base = np.sort(pool[:400])
    for shared in (400, 360, 200, 40):
        other = np.sort(np.concatenate([pool[:shared], pool[400 : 800 - shared]]))
        left, right = minhash([base, other])
        similarity = jaccard(base, other)
        assert abs(float((left == right).mean()) - similarity) < 0.15
        both = bands(np.stack([left, right]))
        if similarity >= 0.8:
            assert int((both[0] == both[1]).sum()) >= nearby.MIN_BANDS
    assert bands(minhash([base])).shape == (1, 32)
    assert len(set(bands(minhash([base])).ravel().tolist())) == 32


def two_texts(shared: int, only_left: int, only_right: int) -> tuple[str, str]:
    """Texts whose sets of 3-grams share so many, with none of the rest in common."""
    both = " ".join(f"s{i}" for i in range(shared + 2))
    left = " ".join([both, *(f"l{i}" for i in range(only_left))])
    return left, " ".join([both, *(f"r{i}" for i in range(only_right))])


@pytest.mark.parametrize(
    ("shared", "left", "right", "is_duplicate"),
    [
        (80, 10, 10, True),
        (80, 20, 0, True),
        (80, 21, 0, False),
        (79, 11, 10, False),
        (8, 1, 1, True),
        (7, 1, 1, False),
        (400, 50, 50, True),
        (400, 51, 50, False),
    ],
)
def test_the_threshold_is_exact(shared: int, left: int, right: int, is_duplicate: bool) -> None:
    texts = two_texts(shared, left, right)
    found = jaccard(*(shingles(word_hashes(text)) for text in texts))
    assert found == pytest.approx(shared / (shared + left + right))
    entries = [Entry(id=str(i), family="f", text=text, ts=i) for i, text in enumerate(texts)]
    expected = [Duplicate(id="1", of="0", exact=False)] if is_duplicate else []
    assert near_duplicates(entries) == expected


def make_entries(rng: random.Random, families: int = 6) -> list[Entry]:
    entries = []
    for family in range(families):
        base = [rng.choice(WORDS) + str(i) for i in range(80)]
        for number in range(rng.randint(1, 12)):
            words = list(base)
            for _ in range(rng.choice([0, 0, 1, 2, 4, 8, 30])):
                words[rng.randrange(80)] = f"n{rng.getrandbits(40)}"
            ts = None if rng.random() < 0.1 else rng.randint(0, 5)
            name = f"t{family}-{number}"
            entries.append(Entry(id=name, family=str(family), text=" ".join(words), ts=ts))
    return entries


def by_brute_force(entries: list[Entry]) -> dict[str, bool]:
    """Which turns go by the definition, and whether their words are equal to an earlier one's."""
    gone: dict[str, bool] = {}
    for family in {entry.family for entry in entries}:
        kept: list[list[str]] = []
        members = [entry for entry in entries if entry.family == family]
        for entry in sorted(members, key=lambda e: (-1 if e.ts is None else e.ts, e.id)):
            words = entry.text.split()
            grams = set(zip(words, words[1:], words[2:], strict=False))
            similar = [
                Fraction(len(grams & other), len(grams | other))
                for old in kept
                for other in [set(zip(old, old[1:], old[2:], strict=False))]
            ]
            if any(similarity >= Fraction(4, 5) for similarity in similar):
                gone[entry.id] = words in kept
            else:
                kept.append(words)
    return gone


@pytest.mark.parametrize("in_memory", [nearby.IN_MEMORY, 2])
def test_the_same_turns_go_whatever_the_order_of_arrival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int
) -> None:
    monkeypatch.setattr(nearby, "IN_MEMORY", in_memory)
    monkeypatch.setattr(nearby, "PAGE", 3)
    rng = random.Random(8)
    for number in range(4):
        entries = make_entries(rng)
        expected = by_brute_force(entries)
        results = []
        for attempt in range(2):
            rng.shuffle(entries)
            with Nearby(tmp_path / f"{number}-{attempt}.sqlite") as state:
                state.add(entries[:20])
                state.add(entries[10:])  # some of them twice
                results.append(list(state.duplicates()))
                assert list(state.duplicates()) == results[-1]
        assert results[0] == results[1]
        assert {d.id: d.exact for d in results[0]} == expected


def test_the_state_on_disk_is_found_again_and_an_earlier_turn_takes_over(tmp_path: Path) -> None:
    text = " ".join(WORDS)
    with Nearby(tmp_path / "n.sqlite") as state:
        state.add([Entry(id="b", family="f", text=text, ts=2)])
        state.add([Entry(id="c", family="f", text=text.upper(), ts=3)])
        assert list(state.duplicates()) == [Duplicate(id="c", of="b", exact=True)]
    with Nearby(tmp_path / "n.sqlite") as state:
        state.add([Entry(id="a", family="f", text=text, ts=1)])
        assert [(d.id, d.of) for d in state.duplicates()] == [("b", "a"), ("c", "a")]


def test_a_connection_of_ones_own_is_neither_committed_nor_closed() -> None:
    connection = sqlite3.connect(":memory:")
    state = Nearby(connection)
    state.add(Entry(id=str(i), family="f", text="one two", ts=i) for i in range(2))
    state.close()
    assert connection.in_transaction
    assert [d.id for d in Nearby(connection).duplicates()] == ["1"]


def test_turns_of_other_families_and_texts_without_words_are_left_alone() -> None:
    entries = [
        Entry(id="a", family="f", text="one two three"),
        Entry(id="b", family="g", text="one two three"),
        Entry(id="c", family="f", text="?!"),
        Entry(id="d", family="f", text=":)"),
        Entry(id="e", family="f", text="?!"),
    ]
    assert near_duplicates(entries) == [Duplicate(id="e", of="c", exact=True)]


def test_a_family_is_a_session_or_an_opening() -> None:
    def talk(user: str, system: str = "be kind") -> list[dict[str, str]]:
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]

    eight = "one two three four five six seven eight"
    same = family_of("s", None, talk(f"{eight} nine"))
    assert same == family_of("s", None, talk(f"{eight.upper()} ten"))
    others = [
        family_of("s", None, talk("zero " + eight)),
        family_of("s", None, talk(eight, system="be brief")),
        family_of("q", None, talk(eight)),
        family_of("s", "session", talk(eight)),
        family_of("s", None, None),
    ]
    assert len({same, *others}) == 6
    assert family_of("s", "session", None) == others[3]


def test_a_turn_is_compared_by_request_response_calls_and_results() -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    text = text_of(
        [
            {"role": "user", "content": "ask"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "x", "content": "found"},
        ]
    )
    assert plain_words(text) == ["ask", "hm", "a", "b", "found"]
    assert all(a != b for a, b in pairwise(text.split("\n")))


def test_many_texts_at_once_have_the_words_that_each_has_alone() -> None:
    rng = random.Random(5)
    letters = "abcXYZ 019_-.\n\t;'日本한국é\ufb03İ\u0301\ud800  "
    for number in range(200):
        kinds = letters if number % 2 else "ab cd ef\n."
        texts = ["".join(rng.choices(kinds, k=rng.choice([0, 1, 3, 60]))) for _ in range(30)]
        texts.insert(3, "word ab " * 40_000 if number == 0 else "")
        alone = [word_hashes(text) for text in texts]
        found = words_of(texts)
        assert all(np.array_equal(a, b) for a, b in zip(alone, found, strict=True))
        for own, grams in zip(found, grams_of(found, 3), strict=True):
            assert np.array_equal(np.unique(grams), shingles(own))
    assert words_of([]) == grams_of([], 3) == []


def test_a_small_family_loses_what_a_large_one_on_disk_would_lose() -> None:
    entries = make_entries(random.Random(11), families=30)
    with Nearby(":memory:") as nearby:
        nearby.add(entries)
        expected = list(nearby.duplicates())
    assert near_duplicates(entries) == expected
    hashed = [replace(e, text="", words=word_hashes(e.text)) for e in entries]
    assert near_duplicates(hashed) == expected
    assert any(one.exact for one in expected)
    assert any(not one.exact for one in expected)
