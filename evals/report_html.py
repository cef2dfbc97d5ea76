"""The report as one self-contained page: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from evals.charts import NUM_COLOURS, Dot, interval_chart, line_chart, mark
from evals.markup import Html, el, join, none_cell, number_cell, section, table, tick, tile
from evals.report_facts import (
    Check,
    Curve,
    Facts,
    duration,
    percent,
    points,
    signed,
    smooth,
    window_of,
)
from evals.report_html_samples import samples_section
from evals.report_html_skills import skills_section
from evals.report_measures import Comparison, Interval

_WHO = {"before": "Before", "after": "After", "teacher": "Teacher"}


def render_html(facts: Facts) -> str:
    """The whole page. Every text of the run is escaped; styles are inline."""
    style = Html(files("evals").joinpath("report.css").read_text(encoding="utf-8"))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{facts.headline.partition(':')[0].rstrip('.')} - {facts.run}"),
        el("style", style),
    )
    sections = (
        *(_accuracy, _turns, _checks, _routed, skills_section, _curves, _samples),
        *(_stages, _warnings, _reproduce),
    )
    body = el(
        "body",
        el("a", "Skip to the results", href="#main", class_="skip"),
        _header(facts),
        el("main", *(section(facts) for section in sections), id="main"),
        el("footer", "Written by distill nightly. The same facts stand in report.md."),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _routed(facts: Facts) -> Html | None:
    if not facts.routed:
        return None
    note = "Recorded turns became tonight's training data, from easy to hard."
    return section("log", "Yesterday's log", note, el("ul", *(el("li", s) for s in facts.routed)))


def _header(facts: Facts) -> Html:
    word, colon, rest = facts.headline.partition(":")
    tiles: list[Html] = []
    if facts.overall is not None:
        for who in ("before", "after", "teacher"):
            value: Interval | None = getattr(facts.overall, who)
            if value is not None:
                tiles.append(tile(_WHO[who], percent(value.mean), _SHARES.span(value)))
        if change := facts.overall.change:
            span = f"{_minus(points(change.low))} to {_minus(points(change.high))}"
            tiles.append(tile("Change in points", _minus(points(change.mean)), span))
    if facts.seconds is not None:
        tiles.append(tile("Duration", duration(facts.seconds)))
    count = len(facts.warnings)
    alert = None
    if count:
        link = el("a", f"{count} warning{'s' if count > 1 else ''}", href="#warnings")
        alert = el("p", "This run left ", link, ".", class_="alert")
    return el(
        "header",
        el("p", f"distill nightly \u00b7 {facts.run}", class_="eyebrow"),
        el("h1", el("span", word + colon, class_=facts.decision or "none"), rest),
        el("dl", *tiles, class_="tiles") if tiles else None,
        alert,
    )


def _accuracy(facts: Facts) -> Html | None:
    if facts.overall is None:
        return None
    rows = [*facts.domains, facts.overall]
    legend = [
        el("li", el("svg", el("g", mark(w, "7", 7), class_=w), width=14, height=14), _WHO[w])
        for w in _present(rows)
    ]
    lanes = [piece for i, row in enumerate(rows) for piece in _lane(row, i, row is facts.overall)]
    ticks = [el("span", f"{x}\u00a0%", style=f"left:{x}%") for x in (0, 25, 50, 75, 100)]
    scale = el("div", *ticks, class_="scale", aria_hidden="true")
    note = (
        f"Share of {facts.overall.n} held-out tasks solved with greedy decoding. Bars and brackets "
        "are 95 % intervals; the change is paired, task by task."
    )
    if facts.detectable is not None:
        note += (
            f" This suite would show a true difference of {100 * facts.detectable:.1f} points or "
            "more with 80 % power."
        )
    chart = el(
        "div",
        el("ul", *legend, class_="legend", aria_hidden="true"),
        el("div", *lanes, scale, class_="lanes"),
        class_="card",
    )
    caption = "Accuracy per domain with 95 % intervals"
    numbers = _measures(caption, rows, facts.overall, _SHARES)
    return section("accuracy", "Accuracy", note, chart, numbers)


def _lane(row: Comparison, index: int, is_total: bool) -> tuple[Html, Html]:
    values = {who: getattr(row, who) for who in _WHO}
    dots = [
        Dot(kind=who, value=value.mean, low=value.low, high=value.high)
        for who, value in values.items()
        if value is not None
    ]
    words = ", ".join(f"{dot.kind} {percent(dot.value)}" for dot in dots)
    chart = interval_chart(dots, title=f"{row.name}: {words}", key=f"lane{index}")
    label = el("div", row.name, class_="label total" if is_total else "label")
    return label, el("div", chart, class_="chart")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """How a measure is written."""

    value: Callable[[float], str]
    bound: Callable[[float], str]
    change: Callable[[float], str]
    unit: str

    def span(self, value: Interval) -> str | None:
        if value.low == value.high:
            return None
        return f"{self.bound(value.low)} to {self.bound(value.high)}"


_SHARES = _Scale(
    value=percent, bound=lambda share: f"{100 * share:.1f}", change=points, unit=", points"
)
_TURNS = _Scale(value="{:.2f}".format, bound="{:.2f}".format, change=signed, unit="")


def _measures(caption: str, rows: Sequence[Comparison], total: Comparison, scale: _Scale) -> Html:
    """Rows of domains by who was measured, the change first: what a narrow screen shows."""
    present = _present(rows)
    has_change = any(row.change is not None for row in rows)
    heads = [f"Change{scale.unit}"] if has_change else []
    body = []
    for row in rows:
        cells = []
        if has_change and row.change is not None:
            low, high = _minus(scale.change(row.change.low)), _minus(scale.change(row.change.high))
            cells.append(number_cell(_minus(scale.change(row.change.mean)), f"{low} to {high}"))
        elif has_change:
            cells.append(none_cell())
        for who in present:
            value: Interval | None = getattr(row, who)
            cells.append(
                number_cell(scale.value(value.mean), scale.span(value)) if value else none_cell()
            )
        cells.append(number_cell(f"{row.n}"))
        style = "total" if row is total else None
        body.append(el("tr", el("th", row.name, scope="row"), *cells, class_=style))
    return table(caption, ["Domain"], [*heads, *(_WHO[who] for who in present), "Tasks"], body)


def _present(rows: Sequence[Comparison]) -> list[str]:
    return [who for who in _WHO if any(getattr(row, who) is not None for row in rows)]


def _turns(facts: Facts) -> Html | None:
    if not facts.turns:
        return None
    note = (
        "Mean number of turns of the greedy attempt at a task, failed ones included. The small "
        "numbers are 95 % intervals; the change is paired, task by task."
    )
    caption = "Turns per task with 95 % intervals"
    return section("turns", "Turns", note, _measures(caption, facts.turns, facts.turns[-1], _TURNS))


def _checks(facts: Facts) -> Html | None:
    if not facts.checks:
        return None
    items = [el("li", _sign(check), el("span", check.text)) for check in facts.checks]
    return section(
        "gate",
        "Why this verdict",
        "The gate compares the new student with the previous champion on the same tasks.",
        el("ul", *items, class_="checks card"),
    )


def _sign(check: Check) -> Html:
    if check.passed is None:
        return el("span", "\u00b7", class_="none", aria_hidden="true")
    return tick(check.passed, "passed" if check.passed else "not passed")


def _curves(facts: Facts) -> Html | None:
    if not facts.curves:
        return None
    return section(
        "curves",
        "Learning curves",
        "Mean reward of the student's own attempts while it trained, or the loss where a stage "
        "has no reward. Lines are smoothed; the faint line is the unsmoothed mean.",
        *(_curve(curve, i) for i, curve in enumerate(facts.curves)),
    )


def _curve(curve: Curve, index: int) -> Html:
    window = window_of(curve)
    lines = {name: smooth(values, window) for name, values in curve.series.items()}
    ends = {name: [v for v in values if v is not None] for name, values in lines.items()}
    legend = [
        el(
            "li",
            el(
                "svg",
                el("line", x1=0, x2=26, y1=7, y2=7, class_=f"line c{i % NUM_COLOURS}"),
                width=26,
                height=14,
                aria_hidden="true",
            ),
            el("span", f"{name} ", el("b", f"{ends[name][-1]:.3g}")),
        )
        for i, name in enumerate(lines)
    ]
    words = "; ".join(f"{name} from {v[0]:.3g} to {v[-1]:.3g}" for name, v in ends.items())
    chart = line_chart(
        next(iter(curve.series.values())),
        lines,
        title=f"{curve.stage}: {curve.measure} over steps {curve.steps[0]} to {curve.steps[-1]}",
        description=f"{curve.measure}, smoothed over {window} steps: {words}.",
        key=f"curve{index}",
        steps=curve.steps,
    )
    return el(
        "div",
        el("h3", f"{curve.stage or 'run'}: {curve.measure}"),
        el("ul", *legend, class_="legend"),
        el("div", chart, class_="curve"),
        _curve_numbers(curve, lines, window),
        class_="card",
    )


def _curve_numbers(curve: Curve, lines: dict[str, list[float | None]], window: int) -> Html:
    body = [
        el(
            "tr",
            el("th", f"{curve.steps[i]}", scope="row"),
            *(
                none_cell() if (value := values[i]) is None else number_cell(f"{value:.3f}")
                for values in lines.values()
            ),
        )
        for i in curve.picks()
    ]
    caption = f"{curve.measure.capitalize()}, smoothed over {window} steps"
    grid = table(caption, ["Step"], list(lines), body)
    return el("details", el("summary", "The numbers behind this curve"), grid)


def _samples(facts: Facts) -> Html | None:
    return samples_section(facts.samples)


def _stages(facts: Facts) -> Html | None:
    if not facts.stages:
        return None
    longest = max((stage.seconds or 0.0 for stage in facts.stages), default=0.0)
    has_counts = any(stage.tokens is not None or stage.steps is not None for stage in facts.stages)
    body = []
    for stage in facts.stages:
        seconds = stage.seconds
        counts = [
            none_cell() if count is None else number_cell(f"{count:,}")
            for count in (stage.steps, stage.tokens)
        ]
        width = 100 * (seconds or 0.0) / longest if longest else 0.0
        bar = el("td", el("i", style=f"width:{width:.1f}%"), class_="share", aria_hidden="true")
        body.append(
            el(
                "tr",
                el("th", stage.name, scope="row"),
                el("td", stage.objective or "\u2013"),
                bar,
                *(counts if has_counts else []),
                none_cell() if seconds is None else number_cell(duration(seconds)),
            )
        )
    heads = [*(["Steps", "Trained tokens"] if has_counts else []), "Time"]
    total = f"{duration(facts.seconds)} in all" if facts.seconds is not None else ""
    grid = table("Stages in order", ["Stage", "Objective", "Share"], heads, body)
    return section("stages", "Where the time went", total, grid)


def _warnings(facts: Facts) -> Html | None:
    if not facts.warnings:
        return None
    items = [el("li", _warning_sign(), el("span", warning)) for warning in facts.warnings]
    return section("warnings", "Warnings", None, el("ul", *items, class_="checks card"))


def _warning_sign() -> Html:
    return el("span", "!", class_="hold", aria_hidden="true")


def _reproduce(facts: Facts) -> Html | None:
    command = None
    if facts.command:
        command = join([el("p", "The exact command", class_="field"), el("pre", facts.command)])
    environment = None
    if facts.environment:
        environment = el("details", el("summary", "Environment"), _definitions(facts.environment))
    about = _definitions(facts.about) if facts.about else None
    if command is None and environment is None and about is None:
        return None
    card = el("div", command, about, environment, class_="card")
    return section("reproduce", "Reproduce this run", None, card)


def _definitions(entries: tuple[tuple[str, str], ...]) -> Html:
    pairs = [piece for name, value in entries for piece in (el("dt", name), el("dd", value))]
    return el("dl", *pairs, class_="facts")


def _minus(signed: str) -> str:
    return signed.replace("-", "\u2212")
