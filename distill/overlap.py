"""Which texts share words: hashes of words and word n-grams, MinHash signatures, exact Jaccard.

A text is compared by its words: NFKC, then case folded, then every run of letters, digits and `_`;
signs between words do not count. Ideographs and kana are words of one character each, since those
scripts put no spaces. A word is a 64-bit hash that is equal in every process and on every machine;
all is computed for a whole text at once.

MinHash: Broder 1997, "On the resemblance and containment of documents".
"""

from __future__ import annotations

import hashlib
import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from distill.errors import MissingExtra

Hashes = npt.NDArray[np.uint64]

NUM_PERM = 128
SEED = 20_260_908
BANDS = 32
"""Bands of four values: texts with a Jaccard similarity of 0.8 agree in 13 on average."""
SHINGLE = 3
"""Words of one shingle of a near-duplicate comparison."""

_WORD, _ALONE = 1, 2
_CHUNK = 1 << 16
_GROUP = 1 << 15
"""Characters that are hashed at once where there are many texts: what fits a processor's cache."""
_BASE = 0x9E3779B97F4A7C15
_NONE = np.zeros(0, dtype=np.uint64)


def normal_text(text: str) -> str:
    """The text for an exact comparison: NFKC, case folded, single spaces; signs stay."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


def word_hashes(text: str) -> Hashes:
    """[words] 64-bit hashes of the words of a text, in order."""
    if len(text) > 2 * _CHUNK:
        return np.concatenate([word_hashes(part) for part in _chunks(text)])
    return _hashed([text])[0]


def words_of(texts: Sequence[str]) -> list[Hashes]:
    """`word_hashes` of each text. Many short texts take a fraction of the time of single calls."""
    found: list[Hashes] = []
    group: list[str] = []
    size = 0
    for text in texts:
        if size + len(text) > _GROUP and group:
            found += _hashed(group)
            group, size = [], 0
        if len(text) > 2 * _CHUNK:
            found.append(word_hashes(text))
            continue
        group.append(text)
        size += len(text)
    return found + (_hashed(group) if group else [])


def _hashed(texts: Sequence[str]) -> list[Hashes]:
    """Hashes of the words of each text, computed over all texts in one row."""
    joined = " ".join(("", *texts, ""))
    if joined.isascii():
        data = joined.lower().encode("ascii")
        codes: Any = np.frombuffer(data, dtype=np.uint8)
        kinds = np.frombuffer(data.translate(_ascii_kinds()), dtype=np.uint8)
    else:
        texts = [t if t.isascii() else unicodedata.normalize("NFKC", t) for t in texts]
        texts = [t.casefold() for t in texts]
        joined = " ".join(("", *texts, ""))
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        kinds = _kinds()[codes]
    changes = kinds[1:] != kinds[:-1]
    if codes.itemsize > 1:
        changes |= kinds[1:] == _ALONE
    edges = changes.nonzero()[0] + 1
    starts, ends = edges[:-1], edges[1:]
    if codes.itemsize > 1:
        words = kinds[starts] != 0
        starts, ends = starts[words], ends[words]
    else:
        starts, ends = starts[::2], ends[::2]
    # A word is a polynomial in its letters; sums from the start of the text give all at once.
    powers, inverse = _power_tables(1 << max(8, len(codes).bit_length()))
    sums = np.zeros(len(codes) + 1, dtype=np.uint64)
    np.cumsum(codes * powers[: len(codes)], out=sums[1:])
    hashes = _mixed((sums[ends] - sums[starts]) * inverse[starts])
    if len(texts) == 1:
        return [hashes]
    begins = np.cumsum([1, *(len(text) + 1 for text in texts)])
    cuts = np.searchsorted(starts, begins).tolist()
    return [hashes[a:b] for a, b in itertools.pairwise(cuts)]


def _chunks(text: str) -> Iterator[str]:
    """Parts of a long text, cut at spaces, so that tables stay small."""
    start = 0
    while start < len(text):
        end = min(len(text), start + _CHUNK)
        if end < len(text):
            end = max(text.rfind(" ", start, end), text.rfind("\n", start, end)) + 1 or end
        yield text[start:end]
        start = end


def gram_hashes(words: Hashes, n: int) -> Hashes:
    """[max(0, words - n + 1)] hashes of every n words in a row."""
    count = len(words) - n + 1
    if count < 1 or n < 1:
        return _NONE
    powers, inverse = _power_tables(1 << max(8, len(words).bit_length()))
    sums = np.zeros(len(words) + 1, dtype=np.uint64)
    np.cumsum(words * powers[: len(words)], out=sums[1:])
    return _mixed((sums[n:] - sums[:-n]) * inverse[:count])


def grams_of(words: Sequence[Hashes], n: int) -> list[Hashes]:
    """Hashes of every n words in a row of each text; a text of fewer words has one, of all of them,
    and one without words has none."""
    if not words:
        return []
    grams = gram_hashes(np.concatenate(words), n)
    found, first = [], 0
    for own in words:
        count = len(own) - n + 1
        if count > 0:  # n - 1 more begin in the text, but reach into the next one
            found.append(grams[first : first + count])
        else:
            found.append(gram_hashes(own, len(own)))
        first += len(own)
    return found


def shingles(words: Hashes, n: int = SHINGLE) -> Hashes:
    """The set of n-grams, sorted; a text of fewer words is one shingle of all of them."""
    if not len(words):
        return _NONE
    found = gram_hashes(words, min(n, len(words)))
    found.sort()
    keep = np.empty(len(found), dtype=bool)
    keep[0] = True
    np.not_equal(found[1:], found[:-1], out=keep[1:])
    return found[keep]


def digest(text: str, words: Hashes | None = None) -> bytes:
    """16 bytes, equal for texts with the same words in the same order; a text without any word is
    compared as `normal_text`."""
    words = word_hashes(text) if words is None else words
    data = words.tobytes() if len(words) else normal_text(text).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).digest()


def jaccard(left: Hashes, right: Hashes) -> float:
    """Shared shingles over all shingles of two sorted sets; 1 for two empty ones."""
    shared = common(left, right)
    total = len(left) + len(right) - shared
    return shared / total if total else 1.0


def common(left: Hashes, right: Hashes) -> int:
    """How many values two sorted sets share."""
    if len(left) > len(right):
        left, right = right, left
    if not len(left):
        return 0
    places = np.minimum(np.searchsorted(right, left), len(right) - 1)
    return int(np.count_nonzero(right[places] == left))


def is_near(left: Hashes, right: Hashes, threshold: float) -> bool:
    """Whether the Jaccard similarity of two sorted sets is at least `threshold`. The sizes alone
    often say no."""
    small, large = sorted((len(left), len(right)))
    return small >= threshold * large - 1e-9 and jaccard(left, right) >= threshold - 1e-12


def minhash(sets: Sequence[Hashes]) -> npt.NDArray[np.uint32]:
    """[sets, NUM_PERM] MinHash signatures with a fixed seed. An empty set has the signature of an
    empty set. MissingExtra without rensa."""
    try:
        import rensa  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise MissingExtra.of("rensa", extra="logs", feature="finding near-duplicates") from error
    if not sets:
        return np.zeros((0, NUM_PERM), dtype=np.uint32)
    flat = np.ascontiguousarray(np.concatenate(sets))
    offsets = np.zeros(len(sets) + 1, dtype=np.uint64)
    np.cumsum([len(s) for s in sets], out=offsets[1:])
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, NUM_PERM, SEED)
    return np.asarray(matrix.to_rows(), dtype=np.uint32)


def bands(signatures: npt.NDArray[np.uint32]) -> Hashes:
    """[sets, BANDS] one hash per band of four signature values; two sets are candidates if they
    have one in common. Hashes of different bands differ."""
    rows = len(signatures)
    parts = signatures.reshape(rows, BANDS, NUM_PERM // BANDS).astype(np.uint64)
    powers = _power_tables(256)[0][1 : NUM_PERM // BANDS + 1]
    salt = np.arange(1, BANDS + 1, dtype=np.uint64) * np.uint64(_BASE)
    return _mixed((parts * powers).sum(-1, dtype=np.uint64) + salt)


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    """Code point -> 0 between words, _WORD or _ALONE: [0x110000]."""
    table = np.zeros(0x110000, dtype=np.uint8)
    for code in [*range(0x3400), *range(0xA000, 0x1F000)]:
        if (
            not 0xAC00 <= code < 0xF900 and (chr(code).isalnum() or code == 95)
        ) or unicodedata.combining(chr(code)):
            table[code] = _WORD
    for start, end in ((0x3040, 0x3100), (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00)):
        table[start:end] = _ALONE
    table[0x20000:0x32000] = _ALONE
    return table


@cache
def _ascii_kinds() -> bytes:
    """The same for bytes, as a table for `bytes.translate`."""
    return bytes(_WORD if code < 128 and _kinds()[code] else 0 for code in range(256))


@cache
def _power_tables(length: int) -> tuple[Hashes, Hashes]:
    """([length] powers of an odd number modulo 2**64, [length] their inverses)."""
    ups = np.full(length, _BASE, dtype=np.uint64)
    downs = np.full(length, pow(_BASE, -1, 1 << 64), dtype=np.uint64)
    ups[0] = downs[0] = 1
    return np.cumprod(ups, dtype=np.uint64), np.cumprod(downs, dtype=np.uint64)


def _mixed(values: Hashes) -> Hashes:
    """Every bit of the result depends on every bit of the value (the finaliser of MurmurHash3)."""
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xFF51AFD7ED558CCD)
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))
