"""Takes personal data and secrets out of a record before it is stored anywhere.

What `pii_rules` finds becomes `[EMAIL_1]`, `[CARD_2]` and so on. In one conversation the same value
always has the same number, counted by first appearance in the messages (what a reader sees of a
message before its reasoning), so that the history that a later call repeats stays equal to what was
stored of it. Redacting twice changes nothing. Ids that match a rule themselves become a keyed hash:
equal ids stay equal, so records still join.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from distill.curriculum.drops import RowError
from distill.curriculum.pii_rules import KINDS, Span, find, value_of
from distill.curriculum.records import Evidence, RoutingTurn
from distill.errors import ConfigError

T = TypeVar("T")

Entities = Callable[[str], Iterable[tuple[int, int, str]]]
"""A named-entity recogniser: text to (start, end, label such as PERSON)."""

PLACEHOLDER = re.compile(r"\[([A-Z][A-Z_]*)_(\d{1,9})\]")
MAX_DEPTH = 100
_HASHED = re.compile(r"h:[0-9a-f]+")
_PREFIX = re.compile(r"[A-Za-z]+[-_.:/#]+")
_IDS = ("source_id", "session_id", "trace_id", "parent_id", "user")
_LEFT = frozenset((*_IDS, "source", "format", "messages", "tools", "raw_sha256"))
_DIGESTS = frozenset(("prompt_sha256", "tools_sha256"))
_JSON_PART = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*', re.S)
_PACKED = re.compile(
    r"data:(?:[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*;base64,[\w+/-]{64,}={0,2}", re.A
)
"""The run of base64 in an address that holds its own data. A short one is read like any text."""
_SECRET_NAMES = frozenset(
    f"{before}{name}{after}"
    for before in (
        "",
        "x-",
        "db_",
        "aws_",
        "client_",
        "secret_",
        "access_",
        "auth_",
        "refresh_",
        "id_",
    )
    for name in ("password", "passwd", "passcode", "passphrase", "pwd", "secret", "key", "token")
    for after in ("", "_key", "_token")
) | {"api_key", "apikey", "api-key", "x-api-key", "aws_secret_access_key", "authorization"}
_LAST = ("reasoning_content", "reasoning")
_KEPT_CLEAN, _SHORT = 8192, 64


class Numbering:
    """Which number each value of one conversation has."""

    __slots__ = ("_highest", "_numbers")

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._highest: Counter[str] = Counter()

    def placeholder(self, kind: str, value: str) -> str:
        """`[KIND_n]` for a value, which may be spelt in another way than before."""
        key = (kind, value_of(kind, value))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._highest[kind] + 1
            self._highest[kind] = number
        return f"[{kind}_{number}]"

    def reserve(self, kind: str, number: int) -> None:
        """A placeholder that the text already had: its number will not be given again."""
        self._highest[kind] = max(self._highest[kind], number)


class KeyedHash:
    """Ids to 20 hex digits that nobody can invert or repeat without the key (HMAC-SHA-256).
    ConfigError if the key is shorter than 16 bytes."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) < 16:
            raise ConfigError(
                f"a key of at least 16 bytes is needed to hash ids, found {len(key)}; try "
                "secrets.token_bytes(32)"
            )
        self._key = key

    def __call__(self, value: str) -> str:
        data = value.encode("utf-8", "surrogatepass")
        return hmac.new(self._key, data, hashlib.sha256).hexdigest()[:20]


class Redactor:
    """Redacts texts, conversations and records. It keeps no state that changes what it does.

    pseudonym: id -> text after `h:` in its place; see `KeyedHash`. Without one a record whose
    id matches a rule is refused with a ConfigError.
    entities: a named-entity recogniser that runs after the rules; see `distill.curriculum.ner`.
    """

    def __init__(
        self, *, pseudonym: Callable[[str], str] | None = None, entities: Entities | None = None
    ) -> None:
        self._pseudonym = pseudonym
        self._entities = entities
        self._clean: set[str] = set()  # model names, tags and roles come again and again
        self._clean_ids: set[str] = set()

    def __call__(self, turn: RoutingTurn) -> RoutingTurn:
        """`turn` without the counts."""
        return self.turn(turn)[0]

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_pseudonym": self._pseudonym, "_entities": self._entities}
        return kept | {"_clean": set(), "_clean_ids": set()}

    def redact_text(
        self, text: str, numbering: Numbering | None = None
    ) -> tuple[str, Counter[str]]:
        """(the text without personal data and secrets, kind -> how many were replaced)."""
        counts: Counter[str] = Counter()
        return self._text(text, numbering or Numbering(), counts), counts

    def redact_messages(
        self, messages: Sequence[Any], numbering: Numbering | None = None
    ) -> tuple[tuple[Any, ...], Counter[str]]:
        """Chat messages with every text redacted: content as a string or in parts, reasoning,
        names, tool results, and the arguments of tool calls, which stay valid JSON. What is clean
        is returned as the same object."""
        counts: Counter[str] = Counter()
        numbering = numbering or Numbering()
        return tuple(self._value(m, numbering, counts, 0) for m in messages), counts

    def turn(self, turn: RoutingTurn) -> tuple[RoutingTurn, Counter[str]]:
        """A record with nothing left in it that a rule finds. Definitions of tools are numbered by
        themselves: they stand beside the conversation, and calls may differ in them."""
        counts: Counter[str] = Counter()
        numbering = Numbering()
        changes: dict[str, Any] = {name: self._id(getattr(turn, name), counts) for name in _IDS}
        if turn.messages is not None:
            changes["messages"] = tuple(self._value(m, numbering, counts, 0) for m in turn.messages)
        if turn.tools:
            own = Numbering()
            changes["tools"] = tuple(self._value(tool, own, counts, 0) for tool in turn.tools)
        redacted = self._record(turn, numbering, counts)
        changes = {k: v for k, v in changes.items() if v is not getattr(turn, k)}
        return (replace(redacted, **changes) if counts else turn), counts

    def evidence(self, evidence: Evidence) -> tuple[Evidence, Counter[str]]:
        """A record about another: its reference is hashed as the id that it refers to was."""
        counts: Counter[str] = Counter()
        ref = self._id(evidence.ref, counts)
        verdict = self._record(evidence.verdict, Numbering(), counts)
        return (replace(evidence, ref=ref, verdict=verdict) if counts else evidence), counts

    def _id(self, value: T, counts: Counter[str]) -> T | str:
        if not isinstance(value, str) or value in self._clean_ids or _HASHED.fullmatch(value):
            return value
        # "user-13800138000": in an id a word and a sign before a number are no part of it.
        spans = self._find(value)
        if not spans and (word := _PREFIX.match(value)):
            spans = self._find(value[word.end() :])
        if not spans:
            _remember(self._clean_ids, value)
            return value
        if self._pseudonym is None:
            raise ConfigError(
                f"an id holds {KINDS.get(spans[0].kind, 'a name')}, and nothing says how to hash "
                "ids; give the Redactor pseudonym=KeyedHash(key)"
            )
        counts[spans[0].kind] += 1
        return f"h:{self._pseudonym(value)}"

    def _record(self, record: T, numbering: Numbering, counts: Counter[str]) -> T:
        """A dataclass with its texts redacted, apart from ids, conversation and digests."""
        changes = {}
        names, values = _texts_of(type(record))  # type: ignore[arg-type]
        for name, value in zip(names, values(record), strict=True):
            if value is None or isinstance(value, int | float) or value == ():
                continue
            if isinstance(value, str) and value in self._clean:
                continue
            redacted = self._value(value, numbering, counts, 0)
            if redacted is not value:
                changes[name] = redacted
        return replace(record, **changes) if changes else record  # type: ignore[type-var]

    def _value(self, value: Any, numbering: Numbering, counts: Counter[str], depth: int) -> Any:
        """Any JSON value, a tuple of them or a record; the same object if it is clean."""
        if isinstance(value, str):
            return self._string(value, numbering, counts, depth)
        if value is None or isinstance(value, bool | float):
            return value
        if depth > MAX_DEPTH:
            raise RowError("redaction_failed", f"it is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, int):
            if abs(value) < 10**8:
                return value
            written = str(value)
            redacted = self._text(written, numbering, counts)
            return value if redacted is written else redacted
        if isinstance(value, Mapping):
            order = value
            if any(key in value for key in _LAST):
                order = sorted(value, key=lambda key: key in _LAST)  # type: ignore[assignment]
            done = {k: self._entry(k, value[k], numbering, counts, depth + 1) for k in order}
            same = all(done[k] is value[k] for k in value)
            if all(key in self._clean for key in value):
                return value if same else {k: done[k] for k in value}
            names = {k: self._string(str(k), numbering, counts, depth) for k in value}
            if same and all(names[k] == k for k in value):
                return value
            return {names[k]: done[k] for k in value}
        if isinstance(value, list | tuple):
            items = [self._value(item, numbering, counts, depth + 1) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return items if isinstance(value, list) else tuple(items)
        return self._record(value, numbering, counts) if is_dataclass(value) else value

    def _entry(
        self, key: Any, value: Any, numbering: Numbering, counts: Counter[str], depth: int
    ) -> Any:
        """A value of an object, whose name may say that it is secret."""
        redacted = self._value(value, numbering, counts, depth)
        if isinstance(redacted, str) and isinstance(key, str) and key.lower() in _SECRET_NAMES:
            whole = self._text(f"{key}={redacted}", numbering, counts)
            return whole[len(key) + 1 :] if whole != f"{key}={redacted}" else redacted
        return redacted

    def _string(self, text: str, numbering: Numbering, counts: Counter[str], depth: int) -> str:
        """A text, or JSON in a text: that stays valid, and nothing hides in its escapes."""
        if len(text) <= _SHORT and text in self._clean:
            return text
        if text[:1] in ("{", "[") and text[-1:] in ("}", "]"):
            if "\\" in text or self._find(text) or self._entities is not None:
                return self._json(text, numbering, counts, depth)
            return text
        if text.startswith("data:") and (packed := _PACKED.match(text)):
            rest = text[packed.end() :]  # after an image or a sound
            redacted = self._text(rest, numbering, counts) if rest else rest
            return text if redacted == rest else packed.group() + redacted
        redacted = self._text(text, numbering, counts)
        if redacted is text and len(text) <= _SHORT and "[" not in text:
            _remember(self._clean, text)
        return redacted

    def _json(self, text: str, numbering: Numbering, counts: Counter[str], depth: int) -> str:
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return self._text(text, numbering, counts)
        if depth > MAX_DEPTH:
            return self._text(text, numbering, counts)

        def part(match: re.Match[str]) -> str:
            written = match.group()
            if written[0] != '"':
                value = written if len(written) < 9 else self._text(written, numbering, counts)
                return written if value == written else json.dumps(value)
            plain = json.loads(written, strict=False)
            value = self._string(plain, numbering, counts, depth + 1)
            return written if value == plain else json.dumps(value, ensure_ascii=written.isascii())

        redacted = _JSON_PART.sub(part, text)
        return _whole_json(redacted, numbering, counts)

    def _text(self, text: str, numbering: Numbering, counts: Counter[str]) -> str:
        """`find` again after each replacement: a placeholder is a border that may show more."""
        if "[" in text:
            for kind, number in PLACEHOLDER.findall(text):
                numbering.reserve(kind, int(number))
        while spans := find(text):
            text = _replaced(text, spans, numbering, counts)
        if self._entities is not None:
            found = [Span(a, b, _label(kind)) for a, b, kind in self._entities(text) if a < b]
            taken = [m.span() for m in PLACEHOLDER.finditer(text)]
            free = [s for s in found if not any(s.start < b and a < s.end for a, b in taken)]
            if free:
                text = _replaced(text, _apart(free), numbering, counts)
        return text

    def _find(self, text: str) -> list[Span]:
        spans = find(text)
        if not spans and self._entities is not None and " " in text:
            spans = [Span(a, b, _label(kind)) for a, b, kind in self._entities(text) if a < b]
        return spans


def _remember(known: set[str], text: str) -> None:
    if len(known) >= _KEPT_CLEAN:
        known.clear()
    known.add(text)


def _whole_json(text: str, numbering: Numbering, counts: Counter[str]) -> str:
    """What shows only when a name stands beside its value, such as "password": "...". In place of a
    number comes a string."""
    while spans := find(text):
        numbers = [m.span() for m in _JSON_PART.finditer(text) if m.group()[0] != '"']
        pieces, end = [], 0
        for start, stop, kind in spans:
            mark = numbering.placeholder(kind, text[start:stop])
            for first, last in numbers:
                if first < stop and start < last:
                    start, stop, mark = min(start, first), max(stop, last), f'"{mark}"'
                    break
            pieces += [text[end:start], mark]
            counts[kind] += 1
            end = stop
        text = "".join([*pieces, text[end:]])
    return text


@cache
def _texts_of(cls: type) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """The fields of a record in which a text may say something about somebody, and what reads
    them."""
    left = _LEFT if cls is RoutingTurn else _DIGESTS
    names = tuple(field.name for field in fields(cls) if field.name not in left)
    if len(names) == 1:
        return names, lambda record: (getattr(record, names[0]),)
    return names, attrgetter(*names) if names else lambda record: ()


def _replaced(text: str, spans: Sequence[Span], numbering: Numbering, counts: Counter[str]) -> str:
    pieces, end = [], 0
    for span in spans:
        pieces += [
            text[end : span.start],
            numbering.placeholder(span.kind, text[span.start : span.end]),
        ]
        counts[span.kind] += 1
        end = span.end
    return "".join([*pieces, text[end:]])


def _apart(spans: Iterable[Span]) -> list[Span]:
    """From left to right; of two that overlap, the one that begins first."""
    kept: list[Span] = []
    for span in sorted(spans):
        if not kept or span.start >= kept[-1].end:
            kept.append(span)
    return kept


def _label(kind: str) -> str:
    """A recogniser's label as a placeholder can hold it: `B-per` and the like become PER."""
    plain = re.sub(r"^[BIESLU]-", "", kind.upper())
    return re.sub(r"[^A-Z]+", "_", plain).strip("_") or "ENTITY"
