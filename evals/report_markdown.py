"""The report as Markdown, for terminals, pull requests and chat."""

from __future__ import annotations

import re
from collections.abc import Callable

from evals.report_facts import (
    Curve,
    Facts,
    duration,
    percent,
    points,
    signed,
    smooth,
    window_of,
)
from evals.report_learned import Learned, Look, some
from evals.report_measures import WHO, Comparison, Interval
from evals.report_samples import Sample

_SHOWN_SAMPLES = 12
_LONGEST_TEXT = 2000


def render_markdown(facts: Facts) -> str:
    """The same facts as the page, with tables in place of charts."""
    parts = [
        f"# {_line(facts.run)}",
        f"**{_line(facts.headline)}**",
        _accuracy(facts),
        _turns(facts),
        _checks(facts),
        _bullets("Yesterday's log", facts.routed),
        *_skills(facts),
        *_curves(facts),
        *_samples(facts),
        _stages(facts),
        _bullets("Warnings", facts.warnings),
        _reproduce(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _accuracy(facts: Facts) -> str:
    if facts.overall is None:
        return ""
    rows = [[row.name, *_values(row)] for row in (*facts.domains, facts.overall)]
    heads = ["Domain", "Change, points", "Before", "After", "Teacher", "Tasks"]
    table = _table(heads, rows)
    note = "Share of held-out tasks solved with greedy decoding; brackets are 95 % intervals."
    if facts.detectable is not None:
        note += (
            f" This suite would show a true difference of {100 * facts.detectable:.1f} points or "
            "more with 80 % power."
        )
    return f"## Accuracy\n\n{note}\n\n{table}"


def _values(row: Comparison) -> list[str]:
    change = "-"
    if row.change is not None:
        low, high = points(row.change.low), points(row.change.high)
        change = f"{points(row.change.mean)} ({low} to {high})"
    return [change, *(_share(getattr(row, who)) for who in WHO), str(row.n)]


def _share(value: Interval | None) -> str:
    if value is None:
        return "-"
    if value.low == value.high:
        return percent(value.mean)
    return f"{percent(value.mean)} ({100 * value.low:.1f} to {100 * value.high:.1f})"


def _turns(facts: Facts) -> str:
    if not facts.turns:
        return ""
    rows = []
    for row in facts.turns:
        change = "-" if row.change is None else _between(row.change, signed)
        means = (getattr(row, who) for who in WHO)
        cells = ("-" if mean is None else _between(mean, "{:.2f}".format) for mean in means)
        rows.append([row.name, change, *cells, str(row.n)])
    table = _table(["Domain", "Change", "Before", "After", "Teacher", "Tasks"], rows)
    note = (
        "Mean number of turns of the greedy attempt, failed ones included; brackets are 95 % "
        "intervals, the change is paired."
    )
    return f"## Turns\n\n{note}\n\n{table}"


def _between(value: Interval, tell: Callable[[float], str]) -> str:
    if value.low == value.high:
        return tell(value.mean)
    return f"{tell(value.mean)} ({tell(value.low)} to {tell(value.high)})"


def _checks(facts: Facts) -> str:
    signs = {True: "passed: ", False: "NOT passed: ", None: ""}
    return _bullets(
        "Why this verdict", tuple(signs[check.passed] + check.text for check in facts.checks)
    )


def _skills(facts: Facts) -> list[str]:
    if not facts.learned:
        return []
    bank = f"Skills in the prompts: {_line(facts.bank)}" if facts.bank else ""
    return ["## Skills", bank, *(_learned(learned) for learned in facts.learned)]


def _learned(learned: Learned) -> str:
    rows = [[words, f"{number:,}"] for words, number in learned.notes]
    facts = [
        _rates(learned),
        _numbers(learned),
        *map(_look, learned.looks),
        f"Bank after this stage: {learned.version}" if learned.version else "",
    ]
    title = f"### {_line(learned.stage or 'run')}: {_line(learned.objective or 'skills')}"
    table = _table(["Note", "Number"], [*rows, ["in all", f"{learned.num_notes:,}"]])
    return f"{title}\n\n{table}\n\n" + "\n".join(f"- {_line(fact)}" for fact in facts if fact)


def _rates(learned: Learned) -> str:
    if learned.valid_rate is None:
        return ""
    right = learned.correct_rate
    lessons = "" if right is None else f", right by the known lessons: {percent(right)}"
    sentence = f" ({learned.verdict})" if learned.verdict else ""
    return f"Could be read: {percent(learned.valid_rate)}{lessons}{sentence}."


def _numbers(learned: Learned) -> str:
    if not learned.has_skills:
        return ""
    found = f"Skills added: {learned.num_added}"
    if learned.num_looks:
        found += f" ({learned.num_evolved} from looks at what fails, of which there were "
        found += f"{learned.num_looks})"
    if learned.num_kept is not None:
        found += f"; promoted: {learned.num_promoted}; waiting: {learned.num_waiting}"
    return f"{found}."


def _look(look: Look) -> str:
    weak = [name if rate is None else f"{name} ({percent(rate)})" for name, rate in look.weak]
    found = f"weak: {some(weak)}" if weak else "nothing was weak"
    added = f"; added: {some(look.added)}" if look.added else ""
    refused = f"; refused: {some(look.refused, '; ')}" if look.refused else ""
    return f"Step {look.step}: {found}{added}{refused}."


def _curves(facts: Facts) -> list[str]:
    if not facts.curves:
        return []
    return ["## Learning curves", *(_curve(curve) for curve in facts.curves)]


def _curve(curve: Curve) -> str:
    window = window_of(curve)
    lines = {name: smooth(values, window) for name, values in curve.series.items()}
    rows = [
        [str(curve.steps[i]), *(_decimal(values[i]) for values in lines.values())]
        for i in curve.picks()
    ]
    title = f"### {_line(curve.stage or 'run')}: {curve.measure}, smoothed over {window} steps"
    return f"{title}\n\n{_table(['Step', *lines], rows)}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _samples(facts: Facts) -> list[str]:
    if not facts.samples:
        return []
    shown = facts.samples[:_SHOWN_SAMPLES]
    note = "The same held-out tasks answered before and after, with greedy decoding."
    if len(shown) < len(facts.samples):
        note += f" {len(shown)} of {len(facts.samples)} are shown; samples.json has all."
    samples = (_sample(sample, i) for i, sample in enumerate(shown, start=1))
    return ["## Sample replies", note, *samples]


def _sample(sample: Sample, number: int) -> str:
    words = {True: " (right)", False: " (wrong)", None: ""}
    parts = [f"### Sample {number}: {_line(sample.domain)}", "Prompt", _fence(sample.prompt)]
    if sample.answer is not None:
        parts += ["Expected answer", _fence(sample.answer)]
    for reply in sample.replies:
        parts += [f"{reply.who.capitalize()}{words[reply.correct]}", _fence(reply.text)]
    return "\n\n".join(parts)


def _stages(facts: Facts) -> str:
    if not facts.stages:
        return ""
    rows = [
        [
            stage.name,
            stage.objective or "-",
            "-" if stage.steps is None else f"{stage.steps:,}",
            "-" if stage.tokens is None else f"{stage.tokens:,}",
            "-" if stage.seconds is None else duration(stage.seconds),
        ]
        for stage in facts.stages
    ]
    if facts.seconds is not None:
        rows.append(["in all", "", "", "", duration(facts.seconds)])
    table = _table(["Stage", "Objective", "Steps", "Trained tokens", "Time"], rows)
    return f"## Where the time went\n\n{table}"


def _reproduce(facts: Facts) -> str:
    parts = ["## Reproduce this run"]
    if facts.command:
        parts.append(_fence(facts.command, "sh"))
    if facts.about:
        parts.append(_table(["Fact", "Value"], [list(entry) for entry in facts.about]))
    if facts.environment:
        parts.append("### Environment")
        parts.append(_table(["Key", "Value"], [list(entry) for entry in facts.environment]))
    return "\n\n".join(parts) if len(parts) > 1 else ""


def _bullets(title: str, texts: tuple[str, ...]) -> str:
    if not texts:
        return ""
    return f"## {title}\n\n" + "\n".join(f"- {_line(text)}" for text in texts)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str]) -> str:
        return f"| {' | '.join(_line(cell) for cell in cells)} |"

    return "\n".join([line(heads), line(["---"] * len(heads)), *map(line, rows)])


def _line(text: str) -> str:
    """Text of a run as one line that Markdown shows as it is."""
    return re.sub(r"([\\|<>`*_\[\]#~&])", r"\\\1", " ".join(text.split()))


def _fence(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any in the text."""
    cut = len(text) - _LONGEST_TEXT
    shown = text[:_LONGEST_TEXT] + (f"\n... {cut} more characters" if cut > 0 else "")
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{shown or '(empty)'}\n{fence}"
