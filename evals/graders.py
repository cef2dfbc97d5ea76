"""Graders: pure functions from a reply and the right answer to a reward of 0 or 1.

| name       | a reply is right when                                                        |
|------------|------------------------------------------------------------------------------|
| `exact`    | it equals the answer, apart from white space                                 |
| `contains` | the answer stands in it as whole words, whatever the case                    |
| `number`   | its last number equals the answer                                            |
| `choice`   | the option letter that it settles on is the answer                           |
| `answer`   | its last line `Answer: ...` equals the answer, as a number if both are one   |

An own grader is named `my_pkg.module:attr` and called as `attr(reply, task)`; it returns a
`Reward` or a number.
"""

from __future__ import annotations

import difflib
import importlib
import math
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from distill.errors import ConfigError, DataError, EvalError
from distill.types import Reward, Task

Grader = Callable[[str, str], Reward]
TaskGrader = Callable[[str, Task], Reward]

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,2}(?!\d))?"
    r"(?:\s?/\s?\d+(?!\.?\d))?"
)
_LONGEST_NUMBER = 300
_ANSWER_LINE = re.compile(r"^[\s*_#>-]*answer[\s*_]*[:=](.*)$", re.IGNORECASE | re.MULTILINE)
# A small letter may be the article "a": it counts before punctuation or the end of a line only.
_CHOICE = (
    re.compile(
        r"(?i:\b(?:answer|option|choice)\b(?:\s+is)?)[\s:=*_(\[]*"
        r"([A-Z](?![A-Za-z'])|[a-z](?=[\s*_]*(?:[.,;:)\]]|$)))",
        re.MULTILINE,
    ),
    re.compile(r"[(\[]\s*([A-Za-z])\s*[)\]]"),
    re.compile(r"^[^\w\n]*([A-Za-z])(?:[).:]|[\s*_]*$)", re.MULTILINE),
    re.compile(r"(?<![\w'])([A-Z])(?![\w'])"),
)


def exact(reply: str, answer: str) -> Reward:
    """1 when reply and answer are the same text; runs of white space count as one space."""
    return _mark(_plain(reply) == _plain(answer))


def contains(reply: str, answer: str) -> Reward:
    """1 when the answer stands in the reply, not inside a longer word; case does not matter."""
    needle = _plain(answer).casefold()
    if not needle:
        return _mark(False)
    pattern = rf"(?<!\w){re.escape(needle)}(?!\w)"
    return _mark(re.search(pattern, _plain(reply).casefold()) is not None)


def number(reply: str, answer: str) -> Reward:
    """1 when the last number of the reply equals the answer: 1,000 = 1000.0 and 1/2 = 0.5."""
    found = [_value(match.group()) for match in _NUMBER.finditer(_plain(reply))]
    return _mark(bool(found) and _equal(found[-1], _expected_number(answer)))


def choice(reply: str, answer: str) -> Reward:
    """1 when the option letter of the reply is the answer's.

    The first pattern that matches anywhere decides, with its last match: "answer is B", then
    "(B)", then a line that begins with "B.", then a lone capital letter.
    """
    expected = re.fullmatch(r"\W*([A-Za-z])\W*", answer)
    if expected is None:
        raise EvalError(
            f"grader 'choice' expects one letter as the answer, found {answer!r}; try 'exact'"
        )
    text = unicodedata.normalize("NFKC", reply)
    for pattern in _CHOICE:
        if letters := pattern.findall(text):
            return _mark(letters[-1].upper() == expected.group(1).upper())
    return _mark(False)


def answer_line(reply: str, answer: str) -> Reward:
    """1 when the last line `Answer: ...` holds the answer; the part `format` tells if there is one.

    Both sides are compared as numbers when both are numbers, else as text without regard to
    case, white space and a closing full stop.
    """
    lines = _ANSWER_LINE.findall(reply)
    if not lines:
        return Reward(value=0.0, parts={"correct": 0.0, "format": 0.0})
    given, expected = _bare(lines[-1]), _bare(answer)
    numbers = _whole_number(given), _whole_number(expected)
    right = given == expected
    if numbers[0] is not None and numbers[1] is not None:
        right = _equal(numbers[0], numbers[1])
    return Reward(value=float(right), parts={"correct": float(right), "format": 1.0})


GRADERS: dict[str, Grader] = {
    "exact": exact,
    "contains": contains,
    "number": number,
    "choice": choice,
    "answer": answer_line,
}


def build_grader(name: str) -> TaskGrader:
    """The grader called `name`, as a function of reply and task.

    Raises ConfigError for an unknown name and DataError when a task has no answer to compare with.
    """
    if ":" in name:
        return _own(name)
    if name not in GRADERS:
        raise ConfigError(f"data.grader: unknown grader {name!r}; {nearest(name, GRADERS)}")
    grader = GRADERS[name]

    def grade(reply: str, task: Task) -> Reward:
        if task.answer is None:
            raise DataError(f"task {task.id} has no answer, but grader {name!r} compares with one")
        return grader(reply, task.answer)

    return grade


def nearest(name: str, valid: dict[str, Grader] | list[str]) -> str:
    """The closest valid name and all of them, as the end of an error message."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid: {', '.join(sorted(valid))}"


def _own(name: str) -> TaskGrader:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data.grader: cannot import {error.name!r} for {name!r}; install the package or add "
            "its folder to PYTHONPATH"
        ) from error
    except Exception as error:  # whatever the user's own module does
        raise ConfigError(
            f"data.grader: {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(
            f"data.grader: module {module_name!r} has no function {attribute!r}; "
            f"{nearest(attribute, [n for n in dir(module) if not n.startswith('_')])}"
        )

    def grade(reply: str, task: Task) -> Reward:
        result = function(reply, task)
        if isinstance(result, Reward):
            return result
        if isinstance(result, int | float) and math.isfinite(result):
            return Reward(value=float(result))
        raise EvalError(
            f"grader {name!r} must return a Reward or a finite number, found {result!r} "
            f"for task {task.id}"
        )

    return grade


def _mark(right: bool) -> Reward:
    return Reward(value=float(right))


def _plain(text: str) -> str:
    normal = unicodedata.normalize("NFC", text).replace("\u2212", "-")
    return " ".join(normal.split())


def _bare(text: str) -> str:
    stripped = _plain(text).casefold().strip("*_`$ ")
    return stripped.removesuffix(".").strip("*_`$ ")


def _value(text: str) -> Fraction | None:
    """None for what is too long to be worth computing, or has a zero denominator."""
    if len(text) > _LONGEST_NUMBER:
        return None
    upper, _, lower = text.replace(",", "").replace(" ", "").partition("/")
    denominator = Fraction(lower or "1")
    return None if denominator == 0 else Fraction(upper) / denominator


def _whole_number(text: str) -> Fraction | None:
    plain = _plain(text).removesuffix(".")
    return _value(plain) if _NUMBER.fullmatch(plain) else None


def _expected_number(answer: str) -> Fraction:
    value = _whole_number(answer)
    if value is None:
        raise EvalError(
            f"grader 'number' expects a number as the answer, found {answer!r}; try 'exact'"
        )
    return value


def _equal(found: Fraction | None, expected: Fraction) -> bool:
    if found is None:
        return False
    if found.denominator == expected.denominator == 1:
        return found == expected
    # Decimal renderings of fractions such as 0.333333 must not fail for their last digit.
    return abs(found - expected) <= abs(expected) * Fraction(1, 10**6)
