"""How much one text resembles another, in [0, 1]. Every measure has a name and a version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_CHARACTERS = 4000
"""Longer texts are cut before their edit distance is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Similarity:
    name: str
    version: int
    of: Callable[[str, str], float]

    @property
    def id(self) -> str:
        return f"{self.name}/{self.version}"


def levenshtein(left: str, right: str) -> int:
    """Insertions, deletions and substitutions of characters that turn one text into the other.

    Bit-parallel over one column of the table (Myers, J. ACM 46(3), 1999, in Hyyro's form): bit i of
    `up` and `down` says that entry i + 1 of the column is one more, or one less, than entry i.
    """
    if left == right:
        return 0
    if len(left) > len(right):
        left, right = right, left
    if not left:
        return len(right)
    places: dict[str, int] = {}
    for i, character in enumerate(left):
        places[character] = places.get(character, 0) | 1 << i
    everywhere, last = (1 << len(left)) - 1, 1 << len(left) - 1
    up, down, distance = everywhere, 0, len(left)
    for character in right:
        equal = places.get(character, 0)
        vertical = equal | down
        horizontal = (((equal & up) + up) ^ up) | equal
        more, less = down | ~(horizontal | up), up & horizontal
        if more & last:
            distance += 1
        elif less & last:
            distance -= 1
        more, less = more << 1 | 1, less << 1
        up = (less | ~(vertical | more)) & everywhere
        down = more & vertical & everywhere
    return distance


def normalised_edit_similarity(left: str, right: str) -> float:
    """1 - Levenshtein / length of the longer; both empty is 1, one empty is 0."""
    left, right = left[:MAX_CHARACTERS], right[:MAX_CHARACTERS]
    longer = max(len(left), len(right))
    return 1.0 - levenshtein(left, right) / longer if longer else 1.0


SIMILARITIES: dict[str, Similarity] = {
    "ned": Similarity(name="ned", version=1, of=normalised_edit_similarity),
    "exact": Similarity(name="exact", version=1, of=lambda a, b: float(a == b)),
}
