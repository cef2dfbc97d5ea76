"""Search by words (BM25), for when there is no index of vectors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from skills.items import SkillItem, normal

SATURATION, LENGTH = 1.5, 0.75
"""The usual constants: how fast repetitions stop counting, how much long texts are discounted."""


def lexical_search(items: Sequence[SkillItem], query: str, k: int) -> list[tuple[SkillItem, float]]:
    """The k skills that share most of the query's rarer words, best first; others are left out.

    Words of a title count twice."""
    wanted = set(_words(query))
    counts = [Counter(_words(f"{i.title} {i.text} {i.category} {i.body} {i.avoid}")) for i in items]
    seen = Counter(word for count in counts for word in wanted & count.keys())
    mean = sum(sum(count.values()) for count in counts) / max(1, len(counts)) or 1.0
    scored = []
    for place, count in enumerate(counts):
        common = wanted & count.keys()
        if common:
            discount = SATURATION * (1 - LENGTH + LENGTH * sum(count.values()) / mean)
            score = sum(
                math.log1p((len(items) - seen[word] + 0.5) / (seen[word] + 0.5))
                * (count[word] * (SATURATION + 1) / (count[word] + discount))
                for word in sorted(common)
            )
            scored.append((-score, place))
    return [(items[place], -score) for score, place in sorted(scored)[:k]]


def _words(text: str) -> list[str]:
    """Words without a plural s, so that "apple" finds "apples"."""
    words = re.findall(r"\w+", normal(text))
    return [w[:-1] if len(w) > 3 and w.endswith("s") and not w.endswith("ss") else w for w in words]
