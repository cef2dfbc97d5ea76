"""Doctor: does anybody answer where servers are named, and what do they say of themselves before
anything is asked of them for hours?

A night waits for servers that are still starting; wrong answers stop it before it begins.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from distill.config import Config
from distill.errors import ConfigError, TeacherError
from distill.sections import Named
from distill.types import ScoreRequest, TeacherView
from flows.doctor_checks import Finding, Subject, fail, named_tables, ok, urls_of, warn

if TYPE_CHECKING:
    from distill.protocols import Teacher

PATIENCE = 2.0
"""Seconds that a server may take to accept a connection."""
HURRY: Mapping[str, Any] = {"deadline": 20.0, "timeout": 20.0, "retries": 1}
"""How patiently a server is asked here."""
ORDERS = 1e-4
"""Largest difference of a log-probability between two orders of the same requests."""


class Silence(NamedTuple):
    """Why nothing can be asked of a server."""

    why: str
    """Empty where it answers."""
    early: bool = False
    """Whether it may only be starting."""


@runtime_checkable
class Probed(Protocol):
    """A served teacher that can try itself: the longest planned sequence at the planned k, and the
    same requests in two orders. Raises TeacherError for what cannot work; answers with `longest`,
    `seconds` and `largest_gap`."""

    def probe(self, longest: int, k: int) -> Any: ...


def served(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Teachers behind a server that scores tokens; those that only write are not meant."""
    for inner, table in named_tables(name, options):
        if urls_of(table) and inner != "black_box":
            yield inner, table


def check_servers(subject: Subject) -> list[Finding]:
    """Does anybody answer where an engine or a teacher is named?"""
    found: list[Finding] = []
    for section in ("engine", "teacher", "reference", "analyst"):
        named = getattr(subject.own, section)
        for _, options in named_tables(named.name, named.options):
            key = f"{section}.{'urls' if 'urls' in options else 'url'}"
            for url in urls_of(options):
                found.append(_server(subject, url, section, key))
    return found


def _server(subject: Subject, url: str, section: str, key: str) -> Finding:
    if not is_address(url):
        note = f'{url!r} is no address of a server; expected one like "http://127.0.0.1:8000"'
        return fail(note, f"correct {key}")
    silence = silence_of(subject, url)
    if not silence.why:
        return ok(f"{url} accepts connections")
    if subject.waits and silence.early:
        return _not_yet(url, silence.why, section)
    return fail(f"nobody answers at {url} ({silence.why})", f"start the server, or correct {key}")


def _not_yet(url: str, why: str, section: str) -> Finding:
    return warn(
        f"nobody answers yet at {url} ({why}); the night waits for it up to {section}.deadline",
        "start the server, unless it is starting",
    )


def is_address(url: str) -> bool:
    """Whether a text has the form of a server's address."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or brackets that do not close
        return False


def silence_of(subject: Subject, url: str) -> Silence:
    """Whether a server can be asked, tried once per stage. Where a night follows it must not only
    accept connections but answer: a gateway does the first for servers that are starting."""
    known: dict[str, Silence] = subject.room.setdefault("silences", {})
    if url not in known:
        found = unreachable(url)
        known[url] = found if found.why or not subject.waits else _starting(url)
    return known[url]


def unreachable(url: str) -> Silence:
    """Whether a connection to an address can be made."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return Silence("")  # asked through a proxy, which alone can tell
    try:
        with socket.create_connection((host, port), timeout=PATIENCE):
            return Silence("")
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        return Silence(why, early=not isinstance(error, socket.gaierror))


def _starting(url: str) -> Silence:
    """Whether any request is answered, be it with a refusal."""
    import httpx

    from distill.calls import LOOPBACK, STARTING

    try:
        with httpx.Client(
            timeout=HURRY["timeout"], trust_env=urlsplit(url).hostname not in LOOPBACK
        ) as client:
            status = client.get(f"{url.rstrip('/').removesuffix('/v1')}/v1/models").status_code
    except httpx.HTTPError as error:
        return Silence(type(error).__name__, early=True)
    return Silence(f"status {status}", early=True) if status in STARTING else Silence("")


def check_handshake(subject: Subject) -> list[Finding]:
    """What served teachers say of themselves when they are greeted: model, tokenizer, cap on k,
    mode of the log-probabilities, length."""
    k, longest = planned(subject)
    found = [
        ok(
            f"{teacher.name} has this tokenizer and answers with k = {k}; it offers "
            f"{', '.join(sorted(teacher.capabilities))}; planned are {longest} tokens"
        )
        for teacher in _served_teachers(subject)
    ]
    late: list[Finding] = subject.room.get("late", [])
    return [*found, *late]


def check_orders(subject: Subject) -> list[Finding]:
    """The longest planned sequence at the planned k, and equal scores in two orders."""
    return [
        finding for teacher in _served_teachers(subject) for finding in _orders(subject, teacher)
    ]


def _orders(subject: Subject, teacher: Teacher) -> list[Finding]:
    k, longest = planned(subject)
    if isinstance(teacher, Probed):
        told = teacher.probe(longest, k)
        return [
            ok(
                f"{teacher.name} scored {told.longest} tokens with k = {k} in {told.seconds:.1f} "
                f"s; two orders differ by at most {told.largest_gap:.1e}"
            )
        ]
    prompts = subject.chat.prompts(subject.prompts, limit=0)
    views = [_view(ids, 8, str(i)) for i, ids in enumerate(prompts) if len(ids) > 1]
    want = ScoreRequest(candidates=k)
    first = teacher.score(views, want)
    second = teacher.score(views[::-1], want)[::-1]
    worst, where = 0.0, 0
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        gaps = [abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)]
        if any(math.isnan(gap) for gap in gaps) or max(gaps, default=0.0) > worst:
            worst, where = max(gaps), number
    text = f"{len(views)} prompts in two orders differ by at most {worst:.1e}"
    found = [ok(text)]
    if not worst <= ORDERS:
        found = [
            fail(
                f"{text} (prompt {where}, bound {ORDERS:.0e}): the server's answer depends on what "
                "it was asked before",
                "turn the server's prefix cache off for scoring, or update the server",
            )
        ]
    ids = (prompts[0] * (longest // len(prompts[0]) + 1))[:longest]
    teacher.score(
        [_view(ids, min(longest - 1, subject.own.sampling.max_new_tokens), "longest")], want
    )
    return [*found, ok(f"a sequence of {longest} tokens was scored with k = {k}")]


def planned(subject: Subject) -> tuple[int, int]:
    """Candidates per token, and tokens of the longest sequence, that the stage will ask for."""
    from distill.objectives.base import num_candidates

    objective, own = subject.objective, subject.own
    asks = objective and {"teacher.candidates", "teacher.own_top_k"} & objective.needs
    k = num_candidates(objective) if objective and asks else 0
    return k, own.model.max_length + own.sampling.max_new_tokens


def _view(ids: Sequence[int], last: int, name: str) -> TeacherView:
    """A prompt whose last tokens are scored as if they were a reply."""
    first = max(1, len(ids) - last)
    return TeacherView(
        token_ids=tuple(ids), positions=tuple(range(first, len(ids))), kind="plain", id=name
    )


def _served_teachers(subject: Subject) -> list[Teacher]:
    """The stage's teachers that score behind a server, made once; nobody is waited for."""
    named = subject.own.teacher
    if "teachers" not in subject.room:
        subject.room["late"] = []
        made = [
            _greeted(subject, name, table)
            for name, table in served(named.name, named.options)
            # which fails by itself
            if all(is_address(url) and not silence_of(subject, url).why for url in urls_of(table))
        ]
        subject.room["teachers"] = [teacher for teacher in made if teacher is not None]
    teachers: list[Teacher] = subject.room["teachers"]
    return teachers


def _greeted(subject: Subject, name: str, table: Mapping[str, Any]) -> Teacher | None:
    """A served teacher that said who it is; None for one that is too slow to, which is noted.
    Raises ConfigError or TeacherError for a wrong answer."""
    from flows import teaching
    from flows.doctor_models import micro_policy
    from flows.night import Student

    k, _ = planned(subject)
    surroundings = teaching.Surroundings(
        config=_impatient(subject.own, name, table),
        student=Student(policy=micro_policy(subject), chat=subject.chat),
        locate=_nowhere,
        candidates=k,
    )
    begun, patience = time.monotonic(), float(HURRY["deadline"])
    try:
        return surroundings.teacher()
    except TeacherError as error:
        if time.monotonic() - begun < patience:
            raise
        # It advises to raise a deadline that does not count here.
        why, url = str(error).rpartition("; ")[0], urls_of(table)[0]
        advice = (
            f"look into the server's log: it got {patience:g} s here, a night waits for it up to "
            "teacher.deadline"
        )
        late = _not_yet(url, why, "teacher") if subject.waits else fail(why, advice)
        subject.room["late"].append(late)
        return None


def _impatient(own: Config, name: str, table: Mapping[str, Any]) -> Config:
    """The configuration with one served teacher alone, which is not waited for."""
    options = {k: v for k, v in table.items() if k not in ("name", "cache")}
    return replace(own, teacher=Named(name=name, options={**options, **HURRY}))


def _nowhere(path: str, revision: str | None) -> Path:
    raise ConfigError(f"a served teacher should need no folder, but asked for {path!r}")
