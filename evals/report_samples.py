"""Sample replies of a run: one text, or a conversation with the environment turn by turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distill.rundir import read_json
from evals.report_measures import WHO, Fields, count

ARROW = "  -> "
"""Begins every line that the environment said, see `samples.json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What the student said, and what the environment answered."""

    reply: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    who: str
    text: str
    correct: bool | None
    talk: tuple[Exchange, ...] = ()
    """The same text in turns; empty for a single reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    domain: str
    prompt: str
    answer: str | None
    replies: tuple[Reply, ...]


def read_samples(path: Path, reports: Mapping[str, Fields]) -> tuple[Sample, ...]:
    """The samples of a run. `reports` are its evaluations: they know how many turns a task took."""
    if not path.exists():
        return ()
    return tuple(_sample(row, reports) for row in read_json(path) if isinstance(row, Mapping))


def exchanges(text: str, num_turns: int) -> tuple[Exchange, ...]:
    """A conversation from its text; nothing when it is a single reply.

    Turns that the environment did not answer stand together. A reply that only looks as if the
    environment had spoken makes more exchanges than there were turns: then the text stays whole.
    """
    if num_turns < 2:
        return ()
    found: list[Exchange] = []
    said: list[str] = []
    answers: list[str] = []
    for line in text.split("\n"):
        if line.startswith(ARROW):
            answers.append(line.removeprefix(ARROW))
            continue
        if answers:
            found.append(Exchange(reply="\n".join(said), answer="\n".join(answers)))
            said, answers = [], []
        said.append(line)
    found.append(Exchange(reply="\n".join(said), answer="\n".join(answers)))
    return tuple(found) if len(found) <= num_turns else ()


def _sample(row: Fields, reports: Mapping[str, Fields]) -> Sample:
    replies = [
        Reply(
            who=who,
            text=str(row[who]),
            correct=row[f"{who}_ok"] if isinstance(row.get(f"{who}_ok"), bool) else None,
            talk=exchanges(str(row[who]), _num_turns(reports[who], row)),
        )
        for who in WHO
        if row.get(who) is not None
    ]
    answer = row.get("answer")
    return Sample(
        domain=str(row.get("domain", "")),
        prompt=str(row.get("prompt", "")),
        answer=None if answer is None else str(answer),
        replies=tuple(replies),
    )


def _num_turns(report: Fields, row: Fields) -> int:
    outcome = (report.get("outcomes") or {}).get(row.get("task_id")) or {}
    return count(outcome.get("num_turns")) or 1
