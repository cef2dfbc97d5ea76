"""Finding skills that say the same: equal text, nearly equal words, or near in meaning.

Only skills of one category and one environment are compared; the same sentence for two tasks is two
skills. What is nearly equal is found without comparing all pairs: texts that share few groups of
three characters cannot be alike, and one matrix product counts those for a whole bank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Literal

from distill.errors import SkillBankError
from skills.items import SkillItem, normal

if TYPE_CHECKING:
    import numpy as np

LEXICAL_RATIO = 0.85
COSINE = 0.90
LONG_TEXT = 1000
"""Texts longer than this are compared word by word; letter by letter takes seconds."""

FEATURES = 2048
SHARED = 0.55
"""Least share of common character groups among candidates; texts with a ratio above 0.85 share
more unless every other word was changed by a letter."""
MAX_CANDIDATES = 8
"""The most similar ones that are compared exactly, per skill."""
ROWS_AT_ONCE = 4096

_TURNS = frozenset(
    [
        *("not", "no", "never", "none", "without", "avoid", "unless", "except", "cannot"),
        *("before", "after", "first", "last", "only"),
    ]
)
"""One of these words turns a rule around."""

Vectors = Callable[[Sequence[str]], "np.ndarray"]
"""Texts to rows of an array, one each; length and scale do not matter."""
How = Literal["content", "text", "lexical", "meaning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Which earlier skill one repeats, by what measure, and how much."""

    index: int
    how: How
    score: float = 1.0


def text_of(item: SkillItem) -> str:
    """What is compared: everything that a reader would read, normalised."""
    return normal(" ".join((item.title, item.principle, item.when_to_apply, item.body, item.avoid)))


def block_of(item: SkillItem) -> tuple[str, str]:
    return normal(item.category), item.scope.env


def ratio(left: str, right: str) -> float:
    """Lexical similarity in [0, 1] of two normalised texts (difflib)."""
    if max(len(left), len(right)) > LONG_TEXT:
        return SequenceMatcher(None, left.split(), right.split(), autojunk=False).ratio()
    return SequenceMatcher(None, left, right, autojunk=False).ratio()


def turns_around(left: str, right: str) -> bool:
    """Whether negations, orders or numbers differ: alike in letters, opposite in meaning."""
    return _turning(left) != _turning(right)


def find_duplicates(
    old: Sequence[SkillItem],
    new: Sequence[SkillItem],
    *,
    vectors: Vectors | None = None,
    lexical_ratio: float = LEXICAL_RATIO,
    cosine: float = COSINE,
) -> list[Match | None]:
    """For each of `new`, what it repeats among `old` and the new ones before it, or None.

    `index` counts through old and new together."""
    items = [*old, *new]
    found: list[Match | None] = [None] * len(items)
    texts: dict[int, str] = {}
    blocks: dict[tuple[str, str], list[int]] = defaultdict(list)
    wanted = {block_of(item) for item in new}
    for index, item in enumerate(items):
        block = block_of(item)
        if block in wanted:
            blocks[block].append(index)
            texts[index] = text_of(item)
    for members in blocks.values():
        _same_text(members, items, texts, len(old), found)
        open_ones = [i for i in members if i >= len(old) and found[i] is None]
        for index, match in _lexical(members, open_ones, texts, lexical_ratio):
            found[index] = match
        if vectors is not None:
            open_ones = [i for i in open_ones if found[i] is None]
            for index, match in _near(members, open_ones, items, vectors, cosine):
                found[index] = match
    return found[len(old) :]


def _same_text(
    members: Sequence[int],
    items: Sequence[SkillItem],
    texts: dict[int, str],
    num_old: int,
    found: list[Match | None],
) -> None:
    """Set `found` for the new ones whose content hash or text was there before."""
    by_content: dict[str, int] = {}
    by_text: dict[str, int] = {}
    for index in members:
        content, text = items[index].sha256, texts[index]
        if index >= num_old:
            if content in by_content:
                found[index] = Match(index=by_content[content], how="content")
            elif text in by_text:
                found[index] = Match(index=by_text[text], how="text")
        by_content.setdefault(content, index)
        by_text.setdefault(text, index)


def _lexical(
    members: Sequence[int], new: Sequence[int], texts: dict[int, str], least: float
) -> Iterator[tuple[int, Match]]:
    for index, candidates in _candidates(members, new, texts):
        best: Match | None = None
        matcher: SequenceMatcher[str] = SequenceMatcher(None, "", texts[index], autojunk=False)
        places = _places(texts[index])
        for other in candidates:
            left, right = texts[other], texts[index]
            bound = best.score if best else least
            if max(len(left), len(right)) > LONG_TEXT:
                score = ratio(left, right)
            else:
                matcher.set_seq1(left)
                if matcher.quick_ratio() <= bound or _most(left, right, places) <= bound:
                    continue
                score = matcher.ratio()
            if score > bound and not turns_around(left, right):
                best = Match(index=other, how="lexical", score=score)
        if best is not None:
            yield index, best


def _places(text: str) -> dict[str, int]:
    """Letter -> the positions at which it stands, as the bits of a number."""
    places: dict[str, int] = {}
    for position, letter in enumerate(text):
        places[letter] = places.get(letter, 0) | 1 << position
    return places


def _most(left: str, right: str, places: dict[str, int]) -> float:
    """No `ratio` of two texts is larger: its blocks are a common subsequence, and this counts the
    longest one (Hyyro's bit-parallel algorithm), in a fraction of the time. `places` is of
    `right`."""
    full = (1 << len(right)) - 1
    open_ones = full
    for letter in left:
        hits = open_ones & places.get(letter, 0)
        open_ones = ((open_ones + hits) | (open_ones - hits)) & full
    common = len(right) - open_ones.bit_count()
    return 2.0 * common / max(1, len(left) + len(right))


def _candidates(
    members: Sequence[int], new: Sequence[int], texts: dict[int, str]
) -> Iterator[tuple[int, list[int]]]:
    """For each new one, the earlier members that share most groups of three characters."""
    if not new:
        return
    import numpy as np

    rows = np.stack([_features(texts[i]) for i in new]).astype(np.float32)
    sizes = rows.sum(1)
    positions, owners, shares = [], [], []
    for start in range(0, len(members), ROWS_AT_ONCE):
        part = members[start : start + ROWS_AT_ONCE]
        other = np.stack([_features(texts[i]) for i in part]).astype(np.float32)
        common = 2 * (rows @ other.T) / (sizes[:, None] + other.sum(1)[None, :])
        who, where = np.nonzero(common >= SHARED)
        owners.append(who)
        positions.append(where + start)
        shares.append(common[who, where])
    who, where, share = np.concatenate(owners), np.concatenate(positions), np.concatenate(shares)
    order = np.lexsort((where, -share, who))
    grouped: dict[int, list[int]] = defaultdict(list)
    for k in order.tolist():
        index, other_index = new[int(who[k])], members[int(where[k])]
        if other_index < index and len(grouped[index]) < MAX_CANDIDATES:
            grouped[index].append(other_index)
    yield from grouped.items()


def _features(text: str) -> np.ndarray:
    """Which hashed groups of three characters a text has: [FEATURES] of 0 and 1."""
    import numpy as np

    codes = np.frombuffer(f"  {text} ".encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    mixed = (codes[:-2] * 1_000_003 + codes[1:-1] * 8_191 + codes[2:] * 131) * 2_654_435_761
    row = np.zeros(FEATURES, dtype=np.uint8)
    row[(mixed >> np.uint64(16)) % np.uint64(FEATURES)] = 1
    return row


def _near(
    members: Sequence[int],
    new: Sequence[int],
    items: Sequence[SkillItem],
    vectors: Vectors,
    least: float,
) -> Iterator[tuple[int, Match]]:
    if not new:
        return
    import numpy as np

    rows = np.asarray(vectors([items[i].text for i in members]), dtype=np.float32)
    if rows.ndim != 2 or len(rows) != len(members):
        raise SkillBankError(
            f"the embedder should return one vector for each of {len(members)} texts, it returned "
            f"an array of shape {rows.shape}"
        )
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    place = {index: k for k, index in enumerate(members)}
    for index in new:
        k = place[index]
        if k == 0:
            continue
        scores = rows[:k] @ rows[k]
        best = int(scores.argmax())
        if scores[best] >= least and not turns_around(
            normal(items[index].text), normal(items[members[best]].text)
        ):
            yield index, Match(index=members[best], how="meaning", score=float(scores[best]))


def _turning(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    words = re.findall(r"[\w']+", text)
    turns = sorted(w for w in words if w in _TURNS or w.endswith("n't"))
    return tuple(turns), tuple(sorted(w for w in words if any(c.isdigit() for c in w)))
