"""Rows of a file made ready to be stored: parsed, imported, redacted, encoded.

A pure function of the rows and of what the source says, so that it gives the same result in this
process and in another one.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from distill.curriculum import columns
from distill.curriculum.drops import RowError
from distill.curriculum.reading import MAX_ROW, Row, parse
from distill.curriculum.records import (
    Decision,
    Evidence,
    Outcome,
    Prediction,
    Request,
    RoutingTurn,
    Served,
)
from distill.curriculum.seen import SIZE
from distill.curriculum.segments import bucket_of
from distill.curriculum.state import EvidenceRow
from distill.errors import ConfigError

if TYPE_CHECKING:
    from distill.curriculum.importers.base import Context, Importer

Redact = Callable[[RoutingTurn], RoutingTurn]
AUTO = "auto"
_BUGS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What foreign code raises over a row that it did not expect."""
_DETAIL, _LONGEST_DETAIL = 200, 10_000
"""Characters of a detail that are kept, and that are looked at before it is cut."""
# Plain tuples of values: the repr of a dataclass would take most of the time of an import.
_PLAIN = attrgetter(
    "session_id", "turn_index", "ts", "trace_id", "parent_id", "user", "scene", "tags"
)
_LAYERS = attrgetter("request", "prediction", "decision", "served", "outcome")
_VALUES = [
    attrgetter(*(field.name for field in fields(layer)))
    for layer in (Request, Prediction, Decision, Served, Outcome)
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A log to import: where it lies and what is known about it."""

    name: str
    path: str
    """A file, a folder or a pattern."""
    format: str = AUTO
    """Name of an importer, `my_pkg.module:attr`, or `auto`: whichever recognises a row."""
    consent: bool = True
    tiers: Mapping[str, Any] = field(default_factory=dict)
    """Model, or the log's own name of a tier -> tier 0 to 3."""
    mapping: Mapping[str, Any] = field(default_factory=dict)
    """Field of a turn -> path in a row, for what the format has no place for."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the importer; `container`, `table` and `delimiter` are those of reading."""
    max_line_bytes: int = MAX_ROW


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Rows of one file."""

    source: Source
    importer: str | None
    """What the first good row of the file was recognised as."""
    rows: Sequence[Row]
    salt: bytes
    now_ms: int
    num_buckets: int


@dataclass(kw_only=True, slots=True)
class Prepared:
    """What became of the rows. Per turn: a row of `batch` and an entry of the lists."""

    batch: Any = None
    """Record batch of columns.SCHEMA, or None without turns."""
    ids: list[bytes] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    places: list[tuple[int, int, int]] = field(default_factory=list)
    """(position, part, number) of the row and the part of it that the turn came from."""
    drops: list[tuple[int, int, int, str, str]] = field(default_factory=list)
    """(position, part, number, reason, detail)"""
    evidence: list[EvidenceRow] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    """Importer -> rows."""
    rows: int = 0
    size: int = 0
    """Bytes of the rows as they were read."""


def user_key(salt: bytes, name: str) -> str:
    """What stands in the store for a user: equal for equal names, and no way back to the name."""
    text = b"user:" + name.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, key=salt, digest_size=SIZE).hexdigest()


def id_digest(salt: bytes, source: str, kind: str, source_id: str) -> bytes:
    name = "\0".join((source, kind, source_id)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, key=salt, digest_size=SIZE).digest()


def evidence_row(found: Evidence, salt: bytes) -> EvidenceRow:
    """How a store keeps a statement: equal ones have equal digests, so that each is kept once."""
    verdict = found.verdict
    values = (verdict.source, verdict.name, verdict.value, verdict.label, verdict.ts)
    name = to_json([found.source, found.ref, *values])
    digest = hashlib.blake2b(name, key=salt, digest_size=SIZE).digest()
    return (digest, found.source, found.ref, *values, found.raw_sha256)


def recognise(row: Mapping[str, Any]) -> str | None:
    """Name of the importer for a row."""
    from distill.curriculum.importers import detect

    return detect(row)


@functools.cache
def importer_named(name: str) -> Importer:
    """An importer of the table, or one of a package. ConfigError when there is none."""
    from distill.curriculum.importers import importer_of

    return importer_of(name)


def prepare(job: Job, redact: Redact | None) -> Prepared:
    """Everything about the rows that does not depend on what the store holds."""
    work = _Work(job, redact)
    for row in job.rows:
        work.take(row)
    return work.finish()


class _Work:
    def __init__(self, job: Job, redact: Redact | None) -> None:
        self.job, self.redact = job, redact
        self.out = Prepared(rows=len(job.rows))
        self.turns: list[RoutingTurn] = []
        self.texts: list[tuple[bytes | None, bytes]] = []
        self.users: list[str | None] = []
        self.context = _contexts(job.source, job.now_ms)

    def take(self, row: Row) -> None:
        self.out.size += len(row.raw)
        part = 0
        try:
            if row.reason:
                raise RowError(row.reason, row.detail)
            if not self.job.source.consent:
                raise RowError("no_consent")
            value = parse(row.raw)
            importer = self._importer(value)
            self.out.formats[importer.name] += 1
            digest = hashlib.sha256(row.raw).hexdigest()
            for found in importer.read(value, self.context(raw_sha256=digest)):
                try:
                    if isinstance(found, RowError):  # a part of a batch; the others are good
                        raise found
                    if isinstance(found, Evidence):
                        self._add_evidence(found)
                    else:
                        self._add_turn(found, (row.start, part, row.number))
                except RowError as error:
                    self._drop(row, part, error)
                part += 1
        except RowError as error:
            self._drop(row, part, error)
        except ConfigError:
            raise
        except _BUGS as error:
            self._drop(row, part, RowError("wrong_type", f"{type(error).__name__}: {error}"))

    def _importer(self, value: Mapping[str, Any]) -> Importer:
        source = self.job.source
        if source.format != AUTO:
            return importer_named(source.format)
        usual = importer_named(self.job.importer) if self.job.importer else None
        if usual is not None and usual.recognises(value):
            return usual
        name = recognise(value)
        if name is None:
            raise RowError("unknown_format", "fields " + ", ".join(sorted(map(str, value))[:8]))
        return importer_named(name)

    def _add_turn(self, turn: RoutingTurn, place: tuple[int, int, int]) -> None:
        if not turn.consent:
            raise RowError("no_consent")
        salt = self.job.salt
        text = columns.messages_json(turn), columns.tools_json(turn)
        content = _content(turn, text, salt)
        user = None if turn.user is None else user_key(salt, turn.user)
        clean = self._redacted(turn)
        if clean.messages is not turn.messages or clean.tools is not turn.tools:
            text = columns.messages_json(clean), columns.tools_json(clean)
        bucket = bucket_of(clean.session_id, clean.trace_id, clean.source_id, self.job.num_buckets)
        self.turns.append(clean)
        self.users.append(user)
        self.texts.append(text)
        self.out.ids.append(id_digest(salt, turn.source, turn.format, turn.source_id))
        self.out.contents.append(content)
        self.out.buckets.append(bucket)
        self.out.places.append(place)

    def _redacted(self, turn: RoutingTurn) -> RoutingTurn:
        if self.redact is None:
            return turn
        try:
            return self.redact(turn)
        except ConfigError:
            raise
        except _BUGS as error:
            # The message may quote what should not be stored, so that only its type is kept.
            raise RowError("redaction_failed", type(error).__name__) from None

    def _add_evidence(self, found: Evidence) -> None:
        """Evidence goes through the redactor too: a score may come with a comment."""
        if self.redact is not None:
            carrier = RoutingTurn(
                source=found.source,
                source_id=found.ref,
                format="evidence",
                outcome=Outcome(verdicts=(found.verdict,)),
            )
            clean = self._redacted(carrier)
            outcome = clean.outcome
            if outcome is None or len(outcome.verdicts) != 1:
                raise RowError("redaction_failed", "the redactor returned no verdict")
            # An id that the redactor hashes in a turn is hashed here too, and still leads there.
            found = replace(found, ref=clean.source_id, verdict=outcome.verdicts[0])
        self.out.evidence.append(evidence_row(found, self.job.salt))

    def _drop(self, row: Row, part: int, error: RowError) -> None:
        # Cut last: half a number is one that no rule knows any more.
        detail = error.detail[:_LONGEST_DETAIL]
        if detail and self.redact is not None and not row.reason:
            detail = self._clean_detail(detail)
        self.out.drops.append((row.start, part, row.number, error.reason, detail[:_DETAIL]))

    def _clean_detail(self, detail: str) -> str:
        """A detail may quote a value of the row."""
        messages = ({"role": "user", "content": detail},)
        carrier = RoutingTurn(source="", source_id="", format="detail", messages=messages)
        try:
            clean = self._redacted(carrier).messages
        except RowError:
            return ""
        return str(clean[0]["content"]) if clean else ""

    def finish(self) -> Prepared:
        if self.turns:
            self._encode(0, len(self.turns))
        return self.out

    def _encode(self, start: int, stop: int) -> None:
        """Encode all at once; when a value does not fit, halve until its row is found."""
        try:
            self.out.batch = self._columns(0, len(self.turns))
            return
        except columns.ERRORS:
            pass
        bad = self._misfits(start, stop)
        self.turns = [turn for n, turn in enumerate(self.turns) if n not in bad]
        self.texts = [text for n, text in enumerate(self.texts) if n not in bad]
        self.users = [user for n, user in enumerate(self.users) if n not in bad]
        for n, error in bad.items():
            position, part, number = self.out.places[n]
            reason = "bad_encoding" if isinstance(error, UnicodeError) else "wrong_type"
            detail = str(error) if reason == "wrong_type" else "half a character pair"
            row = Row(number, position, position, b"")
            self._drop(row, part, RowError(reason, detail))
        for name in ("ids", "contents", "buckets", "places"):
            kept = [value for n, value in enumerate(getattr(self.out, name)) if n not in bad]
            setattr(self.out, name, kept)
        if self.turns:
            self.out.batch = self._columns(0, len(self.turns))

    def _columns(self, start: int, stop: int) -> Any:
        part = slice(start, stop)
        return columns.encode(
            self.turns[part], self.texts[part], self.users[part], self.out.ids[part]
        )

    def _misfits(self, start: int, stop: int) -> dict[int, Exception]:
        try:
            self._columns(start, stop)
            return {}
        except columns.ERRORS as error:
            if stop - start == 1:
                return {start: error}
        middle = (start + stop) // 2
        return self._misfits(start, middle) | self._misfits(middle, stop)


def _content(turn: RoutingTurn, text: tuple[bytes | None, bytes], salt: bytes) -> bytes:
    """Digest of all but the id and the source: what makes two records the same call. Without a text
    many calls look alike, and the id counts too. The first four bytes leave out the outcome, which
    may be told again later. It is taken before redaction, so that another redactor does not make
    another call of it."""
    *layers, outcome = (
        None if layer is None else values(layer)
        for values, layer in zip(_VALUES, _LAYERS(turn), strict=True)
    )
    told = (_PLAIN(turn), layers, None if turn.messages else turn.source_id)
    digest = hashlib.blake2b(
        repr(told).encode("utf-8", "surrogatepass"), key=salt, digest_size=SIZE
    )
    digest.update(text[1])
    digest.update(text[0] or b"")
    call = digest.digest()[:4]
    digest.update(repr(outcome).encode("utf-8", "surrogatepass"))
    return call + digest.digest()[4:]


def check(source: Source) -> None:
    """ConfigError for a tier that is none or a format that nobody knows."""
    _contexts(source, 0)
    if source.format != AUTO:
        importer_named(source.format)


def _contexts(source: Source, now_ms: int) -> Callable[..., Context]:
    """Makes what an importer is told, given the digest of a row. Much faster than a copy."""
    from distill.curriculum.importers.base import Context
    from distill.curriculum.tiers import Tiers

    own = {name: tier for name, tier in source.tiers.items() if type(tier) is int}
    return functools.partial(
        Context,
        source=source.name,
        tiers=Tiers(models=dict(source.tiers), names=own),
        consent=source.consent,
        now_ms=now_ms,
        options={**source.options, **({"fields": source.mapping} if source.mapping else {})},
    )
