"""The bound that spares the exact comparison of two texts."""

from __future__ import annotations

import random
from difflib import SequenceMatcher

from skills.dedup import _most, _places


def longest_common(left: str, right: str) -> int:
    """The textbook table."""
    row = [0] * (len(right) + 1)
    for a in left:
        before = 0
        for j, b in enumerate(right, start=1):
            before, row[j] = row[j], before + 1 if a == b else max(row[j], row[j - 1])
    return row[-1]


def test_the_bound_is_the_longest_common_subsequence_and_no_ratio_exceeds_it():
    draw = random.Random(0)
    for _ in range(300):
        left, right = (
            "".join(draw.choices("abcd e\u00e9\u4e2d", k=draw.randint(0, 40))) for _ in range(2)
        )
        bound = _most(left, right, _places(right))
        total = len(left) + len(right)
        assert bound == 2.0 * longest_common(left, right) / max(1, total)
        assert SequenceMatcher(None, left, right, autojunk=False).ratio() <= bound or total == 0
