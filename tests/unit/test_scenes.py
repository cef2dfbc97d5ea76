"""Scenes of requests by their words: quick searches that find what the patterns alone find."""

from __future__ import annotations

import random

import pytest

from distill.curriculum.scenes import _RULES, GENERAL, guess

_PIECES = (
    "def classes import stack trace stacktrace compil compiling refactor unit tests Python .py go "
    ".go x.sh docker Dockerfile \\frac \\ 3 = 4 1-2 percent percentage solve translat translated "
    "in to into German summary summar tl;dr tldr TL;DR key points shorten extract classify table "
    "of list all json write e-mail mail email _write write_ \u00e9 \u00fcber \u2014 ``` 5 * 6 - "
    "hello regex dr \u017fql \u212aubernetes \u017ftory wr\u0131te \u0661+\u0662 \u00b2"
)
PIECES = _PIECES.split()


def by_patterns(text: str) -> str:
    return next((rule.scene for rule in _RULES if rule.pattern.search(text)), GENERAL)


def test_words_only_spare_searches_and_never_change_the_scene() -> None:
    rng = random.Random(3)
    gaps = [" ", " ", "", "\n", "  ", ".", "-"]
    scenes = set()
    for _ in range(20_000):
        pieces = rng.choices(PIECES, k=rng.randint(1, 5))
        text = "".join(piece + rng.choice(gaps) for piece in pieces)
        assert guess(text) == by_patterns(text), text
        scenes.add(guess(text))
    assert scenes == {rule.scene for rule in _RULES} | {GENERAL}


@pytest.mark.parametrize(
    ("text", "scene"),
    [
        ("Write a Python function", "code"),
        ("prove that 2 + 2 = 4", "math"),
        ("please translate this into French", "translation"),
        ("a TL;DR of it", "summary"),
        ("list all names as a table", "extraction"),
        ("an e-mail to my landlord", "writing"),
        ("where do swans sleep?", GENERAL),
    ],
)
def test_each_scene_is_told_by_its_words(text: str, scene: str) -> None:
    assert guess(text) == scene
