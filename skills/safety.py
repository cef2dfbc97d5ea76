"""Checks on the text of a skill before it is stored.

A skill is data from an untrusted trajectory: a web page that an agent read may have written it.
What these checks find keeps it in quarantine, where a person can look at it; nothing is deleted.
They catch what is common and plain. They do not prove a text harmless, and so a skill is also
fenced wherever it is shown to a model.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from distill.curriculum.pii_rules import KINDS, find
from skills.items import SkillItem
from skills.phrases import BLOB, COMPILED

Check = Literal["leak", "personal", "instruction", "hidden", "length"]
MAX_CHARACTERS = 6000
MAX_FIELD = {"title": 200, "principle": 2000, "when_to_apply": 2000, "avoid": 2000}
QUOTED_WORDS = 8
"""So many words in a row of a solution are a quotation."""
MIN_ANSWER = 4
"""Shorter answers, such as "12" or "no", stand in any text by chance."""
QUARANTINE = 3
"""Findings of this severity or more keep a skill in quarantine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something suspicious in a text. `severity` is a risk from 2 to 5."""

    check: Check
    severity: int
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Secrets:
    """What a skill must not give away: the answers and solutions of the tasks that taught it."""

    answers: Sequence[str] = ()
    solutions: Sequence[str] = ()


def inspect(
    item: SkillItem, secrets: Secrets | None = None, *, max_characters: int = MAX_CHARACTERS
) -> list[Finding]:
    """Everything suspicious about a skill, worst first; an empty list lets it pass."""
    raw = "\n".join(_texts(item))
    plain = fold(raw)
    found = [
        *_hidden(raw),
        *_instructions(plain),
        *_personal(raw),
        *_length(item, len(raw), max_characters),
    ]
    if secrets is not None:
        found += _leaks(plain, secrets)
    return sorted(dict.fromkeys(found), key=lambda f: (-f.severity, f.check, f.text))


def is_quarantined(findings: Iterable[Finding]) -> bool:
    return risk_of(findings) >= QUARANTINE


def risk_of(findings: Iterable[Finding]) -> int:
    """The highest severity; 1 when nothing was found."""
    return max((finding.severity for finding in findings), default=1)


def fold(text: str) -> str:
    """Text as phrases are looked for in it: no invisible characters, letter-like signs as the
    letters they imitate, no accents or emphasis, one space between words, lower case."""
    if text.isascii():
        letters = _CONTROLS.sub("", text)
    else:
        shown = "".join(c for c in unicodedata.normalize("NFKD", text) if not _is_hidden(c))
        letters = "".join(c for c in shown if not unicodedata.combining(c)).translate(_LOOKALIKES)
    bare = re.sub(r"[*`~\"\u201c\u201d]+|(?<!\w)_+(?=\w)|(?<=\w)_+(?!\w)", "", letters.casefold())
    return " ".join(bare.split())


def _texts(item: SkillItem) -> Iterator[str]:
    yield from (item.id, item.title, item.category, item.principle, item.when_to_apply)
    yield from (item.body, item.avoid, item.scope.env, *item.scope.tools, *item.scope.models)


_CYRILLIC = "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0458\u0455\u0501\u04bb\u043a\u043c"
_GREEK = "\u03b1\u03b5\u03bf\u03b9\u03ba\u03c1\u03c4\u03c5\u03bd"
_UPPER_GREEK = "\u0391\u0392\u0395\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7"
_LOOKALIKES = str.maketrans(
    _CYRILLIC
    + _CYRILLIC.upper()
    + "\u0422\u0412\u041d"
    + _GREEK
    + _UPPER_GREEK
    + "\u2018\u2019\u0131",
    "aeopcyxijsdhkm" * 2 + "tbh" + "aeoikptuv" + "abehikmnoptyx" + "''i",
)
_JOINED_SCRIPTS = "[\u0600-\u06ff\u0900-\u0dff]"
_EMOJI = "[\u2600-\u27bf\U0001f000-\U0001faff\ufe0f]"
_LEGITIMATE = re.compile(
    rf"(?<={_EMOJI})[\u200d\ufe0f]|(?<={_JOINED_SCRIPTS})[\u200c\u200d](?={_JOINED_SCRIPTS})"
)
"""Joiners inside an emoji, and inside the words of scripts that are written with them."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_FILLERS = frozenset((0x115F, 0x1160, 0x3164, 0xFFA0, 0x2028, 0x2029, 0x2800))


def _is_hidden(char: str) -> bool:
    """A character that a reader does not see and a model does: zero-width, direction, tag, filler,
    control, private."""
    code = ord(char)
    unseen = unicodedata.category(char) in ("Cf", "Cc", "Co", "Cs") and char not in "\n\r\t"
    return unseen or 0xE0000 <= code <= 0xE0FFF or code in _FILLERS


def _hidden(text: str) -> Iterator[Finding]:
    visible = text if text.isascii() else _LEGITIMATE.sub("", text)
    counts: dict[str, int] = {}
    for char in _CONTROLS.findall(text) if text.isascii() else visible:
        if _is_hidden(char):
            counts[f"U+{ord(char):04X}"] = counts.get(f"U+{ord(char):04X}", 0) + 1
    if counts:
        listed = ", ".join(f"{name} x{n}" for name, n in sorted(counts.items())[:5])
        what = f"{sum(counts.values())} invisible or control characters ({listed})"
        yield Finding(check="hidden", severity=4, text=what)
    if len(re.findall("[\ufe00-\ufe0f]", visible)) > 3:
        yield Finding(check="hidden", severity=4, text="variation selectors can carry hidden text")
    if BLOB.search(visible):
        yield Finding(check="hidden", severity=4, text="a long encoded string")
    for word in () if text.isascii() else re.findall(r"[^\W\d_]{4,}", visible):
        if len({s for char in word if (s := _script(char))}) > 1:
            what = f"one word in two alphabets: {word!a}"
            yield Finding(check="hidden", severity=4, text=what)
            break


def _script(char: str) -> str:
    name = unicodedata.name(char, "").partition(" ")[0]
    return name if name in ("LATIN", "CYRILLIC", "GREEK") else ""


def _instructions(plain: str) -> Iterator[Finding]:
    for risk, why, pattern in COMPILED:
        match = pattern.search(plain)
        if match:
            shown = ascii(match.group()[:60].strip())
            yield Finding(check="instruction", severity=risk, text=f"{why}: {shown}")
    for spelt in re.finditer(r"\b(?:\w[ .-]){5,}\w\b", plain):
        word = re.sub(r"[ .-]", "", spelt.group())
        if any(command in word for command in ("ignore", "system", "bypass", "secret")):
            what = "a command spelt letter by letter"
            yield Finding(check="instruction", severity=5, text=what)
            break


def _personal(text: str) -> Iterator[Finding]:
    for start, end, kind in find(text):
        shown = f"{KINDS[kind]}: {_masked(text[start:end])}"
        yield Finding(check="personal", severity=4, text=shown)


def _masked(text: str) -> str:
    """Enough to find the place; a report is no second copy of the secret."""
    return f"{ascii(text[:3])[1:-1]}... ({len(text)} characters)"


def _leaks(plain: str, secrets: Secrets) -> Iterator[Finding]:
    words = _words(plain)
    if any(_states(plain, words, fold(answer)) for answer in secrets.answers):
        yield Finding(check="leak", severity=4, text="it states the answer of a task")
    grams = _grams(words)
    if any(grams & _grams(_words(fold(solution))) for solution in secrets.solutions):
        what = f"it quotes {QUOTED_WORDS} or more words in a row of a solution"
        yield Finding(check="leak", severity=4, text=what)


def _states(plain: str, words: list[str], answer: str) -> bool:
    """Whether the answer stands in the text as words of its own; a short one only right after
    "answer", "result" or the like."""
    wanted = _words(answer)
    if not wanted:
        return False
    if len("".join(wanted)) >= MIN_ANSWER:
        spans = range(len(words) - len(wanted) + 1)
        return any(words[i : i + len(wanted)] == wanted for i in spans)
    said = r"\b(?:answer|result|solution|output)\b(?: is| was| equals)?[ :=]+"
    return re.search(rf"{said}{re.escape(answer)}(?!\w)", plain) is not None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _grams(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + QUOTED_WORDS]) for i in range(len(words) - QUOTED_WORDS + 1)}


def _length(item: SkillItem, size: int, most: int) -> Iterator[Finding]:
    if size > most:
        yield Finding(check="length", severity=3, text=f"{size} characters, at most {most}")
    for name, limit in MAX_FIELD.items():
        length = len(getattr(item, name))
        if length > limit:
            what = f"{name} has {length} characters, at most {limit}"
            yield Finding(check="length", severity=3, text=what)
