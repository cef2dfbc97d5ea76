"""The language of the generated world: its alphabet, string rules and hidden assignments.

A TAG such as `K` has a hidden rule. `K1:fcah=` shows the tag, the number of steps and a string;
the reply `r.hacf` opens with the one-letter code of the rule that was followed. The rule may be
stated in square brackets (`K1[rev]fcah=`, a hint), the result in braces (`K1{hacf}fcah=`).
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

PAD = "_"
END = "$"
ALPHABET = (
    f"{PAD}{END}^{string.ascii_lowercase}{string.ascii_uppercase}{string.digits}[]{{}}+:=|?>#.,! "
)
"""One token per symbol; the index is its id. Id 0 pads, id 1 ends a reply."""

LETTERS = "abcdefgh"
VOWELS = "ae"

Rule = tuple[str, ...]
"""Names of the string rules to apply, first to last."""


def _shift(letter: str) -> str:
    return LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)]


_NEXT = str.maketrans({letter: _shift(letter) for letter in LETTERS})
_NO_VOWELS = str.maketrans("", "", VOWELS)

RULES: dict[str, Callable[[str], str]] = {
    "rev": lambda s: s[::-1],
    "srt": lambda s: "".join(sorted(s)),
    "inc": lambda s: s.translate(_NEXT),
    "lft": lambda s: s[1:] + s[0],
    "xch": lambda s: s[-1] + s[1:-1] + s[0],
    "two": lambda s: s[0] + s,
    "nov": lambda s: s.translate(_NO_VOWELS),
    "odd": lambda s: s[::2],
}
"""Reverse, sort, next letter (h -> a), rotate left, swap the ends, double the first letter,
drop a and e, keep every second letter."""

SINGLES: tuple[Rule, ...] = tuple((name,) for name in RULES)
PAIRS: tuple[Rule, ...] = tuple(
    (first, second)
    for first in ("rev", "srt", "inc", "lft")
    for second in ("rev", "srt", "inc", "lft")
    if first != second
)
ONE_STEP: dict[str, Rule] = {
    "K": ("rev",),
    "R": ("inc",),
    "T": ("srt",),
    "B": ("nov",),
    "F": ("two",),
    "M": ("lft",),
}
"""Hidden rule of each tag of the domain `rule`."""
TWO_STEP: dict[str, Rule] = {
    "P": ("rev", "inc"),
    "W": ("srt", "lft"),
    "X": ("inc", "srt"),
    "Q": ("lft", "rev"),
}
"""Hidden rule of each tag of the domain `rule2`."""
TAGS = string.ascii_uppercase


def _priors() -> dict[tuple[str, int], tuple[Rule, Rule]]:
    """(tag, steps) -> its true rule and the popular wrong one ("decoy") that a base believes."""
    rng = random.Random(7)
    priors: dict[tuple[str, int], tuple[Rule, Rule]] = {}
    for tag in TAGS:
        for steps, pool, known in ((1, SINGLES, ONE_STEP), (2, PAIRS, TWO_STEP)):
            true = known[tag] if tag in known else rng.choice(pool)
            priors[tag, steps] = true, rng.choice([rule for rule in pool if rule != true])
    return priors


PRIORS = _priors()


_HIGH = 1 << 512
_LOW = 1 << 96


def _large_number(data: bytes) -> int:
    return _HIGH | int.from_bytes(hashlib.blake2b(data).digest(), "big")


class Draws:
    """Random choices that depend on a key alone, at about a microsecond each.

    Seeding `random.Random` anew for every task would cost ten times the rest of the task.
    """

    __slots__ = ("_pool",)

    def __init__(self, *key: str | int) -> None:
        self._pool = _large_number("/".join(map(str, key)).encode())

    def below(self, n: int) -> int:
        """A whole number from 0 to n - 1, for n up to 2**32."""
        if self._pool < _LOW:
            self._pool = _large_number(self._pool.to_bytes(12, "big"))
        self._pool, value = divmod(self._pool, n)
        return value

    def between(self, bounds: tuple[int, int]) -> int:
        """A whole number from bounds[0] to bounds[1], both included."""
        low, high = bounds
        return low + self.below(high - low + 1)

    def chance(self) -> float:
        """A number from [0, 1), in steps of a millionth."""
        return self.below(1_000_000) / 1_000_000

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def shuffled(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different members of `options`, in random order."""
        rest = list(options)
        return [rest.pop(self.below(len(rest))) for _ in range(count)]

    def letters(self, length: int, symbols: str = LETTERS) -> str:
        # Written out rather than built on `below`: half of the time of a task is spent here.
        pool, count, picked = self._pool, len(symbols), ""
        for _ in range(length):
            if pool < _LOW:
                pool = _large_number(pool.to_bytes(12, "big"))
            pool, value = divmod(pool, count)
            picked += symbols[value]
        self._pool = pool
        return picked


def prior_rule(draws: Draws, tag: str, steps: int, *, true: float, decoy: float) -> Rule:
    """What a base believes of a bare tag: a little of the true rule, a lot of a wrong one."""
    chance = draws.chance()
    right, wrong = PRIORS[tag, steps]
    if chance < true:
        return right
    if chance < true + decoy:
        return wrong
    return draws.pick(PAIRS if steps == 2 else SINGLES)


def apply(rule: Rule, text: str) -> str:
    """The string after all steps of a rule."""
    for name in rule:
        text = RULES[name](text)
    return text


def work(rule: Rule, text: str) -> str:
    """A worked reply: each step as code letter, point, result; steps joined by `|`."""
    steps: list[str] = []
    for name in rule:
        text = RULES[name](text)
        steps.append(f"{name[0]}.{text}")
    return "|".join(steps)


def last_result(reply: str) -> str:
    """What a worked reply ends on: after its last `?` (retry), `|` (step) and `.` (code)."""
    return reply.rsplit("?", 1)[-1].rsplit("|", 1)[-1].rsplit(".", 1)[-1]


def store_value(seed: int, store: str, key: str, lengths: tuple[int, int]) -> str:
    """What a store of the domain `tools` answers for a key; a pure function of its arguments."""
    draws = Draws(seed, "store", store, key)
    return draws.letters(draws.between(lengths))
