"""Sample replies on the page of a report: single ones, and conversations turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from evals.markup import Html, el, section, tick
from evals.report_samples import Exchange, Reply, Sample

_WHO = {"before": "Before", "after": "After", "teacher": "Teacher"}
_SHOWN_SAMPLES = 12
_LONGEST_TEXT = 2000
_OPEN_TURNS, _OPEN_CHARACTERS = 6, 1200
"""What of a conversation is seen at once; the rest unfolds."""
_LONGEST_TALK = 12_000


def samples_section(samples: Sequence[Sample]) -> Html | None:
    """The first samples with the replies of everyone who answered; None without any."""
    if not samples:
        return None
    shown = samples[:_SHOWN_SAMPLES]
    note = "The same held-out tasks answered before and after, with greedy decoding."
    if any(reply.talk for sample in shown for reply in sample.replies):
        note += " Indented lines are what the environment answered."
    if len(shown) < len(samples):
        note += f" {len(shown)} of {len(samples)} are shown; samples.json has all."
    cards = [_sample(sample, i) for i, sample in enumerate(shown, start=1)]
    more = el("details", el("summary", f"{len(cards) - 4} more"), *cards[4:]) if cards[4:] else None
    return section("samples", "Sample replies", note, *cards[:4], more)


def _sample(sample: Sample, number: int) -> Html:
    return el(
        "article",
        el("h3", f"{sample.domain or 'Task'} ", el("span", f"sample {number}")),
        _question(sample),
        el("div", *(_reply(reply) for reply in sample.replies), class_="replies"),
        class_="card sample",
    )


def _question(sample: Sample) -> Html:
    prompt = el("div", el("h4", "Prompt"), _text(sample.prompt))
    if sample.answer is None:
        return el("div", prompt, class_="ask")
    answer = el("div", el("h4", "Expected answer"), _text(sample.answer))
    return el("div", prompt, answer, class_="ask pair")


def _reply(reply: Reply) -> Html:
    verdict = None
    if reply.correct is not None:
        verdict = tick(reply.correct, "right" if reply.correct else "wrong", shown=True)
    body = _talk(reply.talk) if reply.talk else [_text(reply.text)]
    return el("div", el("h4", _WHO[reply.who], verdict), *body)


def _talk(talk: Sequence[Exchange]) -> list[Html]:
    """A conversation: its beginning, and the rest behind a line that unfolds it."""
    sizes = list(accumulate(len(turn.reply) + len(turn.answer) for turn in talk))
    first = max(1, sum(size <= _OPEN_CHARACTERS for size in sizes[:_OPEN_TURNS]))
    if len(talk) <= first + 1:  # not worth a line
        first = len(talk)
    last = max(first, sum(size <= _LONGEST_TALK for size in sizes))
    pieces = [_turns(talk[:first], 1)]
    if last > first:
        summary = el("summary", f"{last - first} more turn{'s' if last - first > 1 else ''}")
        pieces.append(el("details", summary, _turns(talk[first:last], first + 1)))
    if len(talk) > last:
        pieces.append(el("p", f"... {len(talk) - last} more in samples.json", class_="empty"))
    return pieces


def _turns(talk: Sequence[Exchange], start: int) -> Html:
    turns = []
    for turn in talk:
        answer = None
        if turn.answer:
            speaker = el("span", "Environment: ", class_="hidden")
            answer = _text(turn.answer, before=speaker, style="said")
        turns.append(el("li", _text(turn.reply), answer))
    return el("ol", *turns, class_="talk", start=start if start > 1 else None)


def _text(text: str, *, before: Html | None = None, style: str | None = None) -> Html:
    if not text.strip():
        return el("pre", before, el("span", "(empty)", class_="empty"), class_=style)
    cut = len(text) - _LONGEST_TEXT
    more = el("span", f"\n... {cut} more characters", class_="empty") if cut > 0 else None
    return el("pre", before, text[:_LONGEST_TEXT], more, class_=style)
