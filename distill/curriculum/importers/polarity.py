"""What the name of a score says about its numbers: whether high is good, and whether 1 is the best.

A number alone says nothing: 1 is the best of a thumb, the worst of five stars, and bad news of a
score named `hallucination`. Names are read word by word, `user-thumb`, `isCorrect` and
`error_rate` alike. What no word decides is `unknown`, and needs a scale from the user.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

Kind = Literal["binary", "vote", "quality", "fault", "harm", "exit", "unknown", "unclear"]
"""binary   0 is bad and 1 is good: a thumb, `passed`, `correct`, `solved`
vote     1 for and -1 against; 0 is no vote
quality  high is good; only fractions are surely of a scale from 0 to 1
fault    high is bad, none is good: hallucinations, errors
harm     high is bad, yet none is no success: toxicity, refusal, a thumb down
exit     0 is good and all else bad: exit codes
unknown  the name says nothing
unclear  the words of the name contradict each other, such as `toxicity_check`"""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BINARY = _words(
    "thumb thumbsup upvote upvoted pass passed correct solved resolved success successful "
    "succeeded accepted accept like liked match matched verified verifier compile compiled valid "
    "ok"
)
_VOTES = _words("vote voted")
_QUALITY = _words(
    "quality accuracy accurate correctness faithfulness faithful groundedness grounded relevance "
    "relevancy relevant helpfulness helpful coherence coherent completeness complete consistency "
    "consistent precision recall f1 similarity factuality factual truthfulness usefulness useful "
    "satisfaction bleu rouge adherence fluency conciseness clarity"
)
_FAULTS = _words(
    "hallucination hallucinated hallucinate error err fail failed failure failing incorrect "
    "incorrectness wrong mistake inaccuracy inaccurate fabrication fabricated confabulation "
    "unfaithful ungrounded unsupported contradiction contradicted inconsistency inconsistent "
    "irrelevant irrelevance mismatch unresolved unsolved bug defect broken invalid exception wer "
    "cer"
)
_HARMS = _words(
    "toxicity toxic harm harmful harmfulness bias biased unsafe jailbreak jailbroken injection "
    "leak leakage leaked pii profanity insult hate hateful violence violent nsfw sexual spam "
    "offensive stereotype rude rudeness sycophancy deception manipulation refusal refused refuse "
    "overrefusal abstention evasive complaint complained escalation escalated frustration "
    "frustrated anger dissatisfaction dissatisfied thumbsdown downvote downvoted dislike disliked "
    "reject rejected rejection abandoned abandonment churn retry retried reask regenerated "
    "timeout repetition redundancy verbosity risk severity misinformation plagiarism unhelpful "
    "negative negativity truncated uncertainty"
)
_NOT = _words("not non never isnt")
_WITHOUT = _words("no without free anti lack absence zero")
_CHECKS = _words(
    "check checker guard guardrail detector detection filter test moderation safety avoidance "
    "resistance robustness safe"
)
_SCALED = _words(
    "rating rated star likert csat nps count num number total percent percentage pct rank point"
)
"""Words of names whose numbers are on a scale of their own, such as stars, or are counts."""
_GRADED = _words("score level grade feedback")
"""The same, though their fractions may be of a scale from 0 to 1."""


@lru_cache(maxsize=4096)
def words_of(name: str) -> frozenset[str]:
    """Words of a name in lower case; a plural stands for its singular too."""
    found = {word.lower() for word in _WORD.findall(name)}
    return frozenset(found | {w[:-1] for w in found if w.endswith("s") and not w.endswith("ss")})


@lru_cache(maxsize=4096)
def kind_of(name: str) -> Kind:
    """What the words of a name say about its values."""
    words = words_of(name)
    if {"exitcode", "returncode"} & words or ("code" in words and {"exit", "return"} & words):
        return "exit"
    down = "down" in words and "up" not in words
    good: Kind = "unknown"
    if words & _BINARY or {"unit", "test"} <= words:
        good = "binary"
    elif words & _VOTES:
        good = "vote"
    elif words & _QUALITY:
        good = "quality"
    bad: Kind = "unknown"
    if words & _HARMS or (down and words & (_BINARY | _VOTES)):
        bad = "harm"
    elif words & _FAULTS:
        bad = "fault"
    if bad == "unknown":
        found = good
    elif down or good == "unknown":
        found = "unclear" if words & _CHECKS else bad
    else:  # `pass_fail` and `toxicity_passed` name what 1 stands for; `correctness_error` does not
        found = "binary" if good == "binary" else "unclear"
    if not words & (_NOT | _WITHOUT):
        return "unclear" if "safe" in words else found
    return _negated(found, sure=bool(words & _NOT))


def _negated(kind: Kind, *, sure: bool) -> Kind:
    """`not_correct` is a fault and `no_errors` none. `non_toxic` is no success, and the accuracy of
    `zero_shot_accuracy` is not denied."""
    if kind == "fault":
        return "binary"
    if kind in ("binary", "quality") and sure:
        return "fault"
    return "unknown" if kind == "unknown" else "unclear"


def grade_truth(truth: bool, name: str) -> float | None:
    """How good yes or no is; None where it says nothing."""
    kind = kind_of(name)
    if kind in ("fault", "exit"):
        return float(not truth)
    if kind == "harm":
        return 0.0 if truth else None
    return None if kind == "unclear" else float(truth)


def grade_number(value: float, name: str, *, trusted: bool = False) -> float | None:
    """How good a number is, from 0 to 1; None where it takes a scale to say so.

    `trusted`: it comes from a program that the user named as a check, so that 0 to 1 is meant.
    """
    kind, words = kind_of(name), words_of(name)
    if kind == "exit":
        return float(value == 0)
    if kind in ("binary", "vote") and value == -1:
        return 0.0
    if not 0 <= value <= 1 or words & _SCALED or kind == "unclear":
        return None
    whole = value in (0, 1)
    stepped = bool(words & _GRADED) and "thumb" not in words
    if kind in ("fault", "harm"):
        if whole and stepped and not trusted:
            return None
        good = 1.0 - value
        return good if kind == "fault" or good < 0.5 else None
    if kind == "vote":
        return 1.0 if value == 1 else None
    if trusted:
        return value
    if whole:
        return value if kind == "binary" and not stepped else None
    return value if kind in ("binary", "quality") else None
