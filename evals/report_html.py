"""The report as one self-contained page: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from evals.charts import NUM_COLOURS, Dot, interval_chart, line_chart, mark
from evals.markup import Html, el, join, section, tile
from evals.report_facts import (
    Check,
    Comparison,
    Curve,
    Facts,
    Interval,
    Reply,
    Sample,
    duration,
    percent,
    points,
    smooth,
    window_of,
)

_WHO = {"before": "Before", "after": "After", "teacher": "Teacher"}
_SHOWN_SAMPLES = 12
_LONGEST_TEXT = 2000


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
    sections = (_accuracy, _checks, _curves, _samples, _stages, _warnings, _reproduce)
    body = el(
        "body",
        el("a", "Skip to the results", href="#main", class_="skip"),
        _header(facts),
        el("main", *(section(facts) for section in sections), id="main"),
        el("footer", "Written by distill nightly. The same facts stand in report.md."),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _header(facts: Facts) -> Html:
    word, colon, rest = facts.headline.partition(":")
    tiles: list[Html] = []
    if facts.overall is not None:
        for who in ("before", "after", "teacher"):
            value: Interval | None = getattr(facts.overall, who)
            if value is not None:
                tiles.append(tile(_WHO[who], percent(value.mean), _range(value)))
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
    present = [who for who in _WHO if any(getattr(row, who) is not None for row in rows)]
    legend = [
        el("li", el("svg", el("g", mark(w, "7", 7), class_=w), width=14, height=14), _WHO[w])
        for w in present
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
    return section("accuracy", "Accuracy", note, chart, _accuracy_table(rows, facts, present))


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


def _accuracy_table(rows: list[Comparison], facts: Facts, present: list[str]) -> Html:
    has_change = any(row.change is not None for row in rows)
    heads = [*(["Change, points"] if has_change else []), *(_WHO[who] for who in present), "Tasks"]
    body = []
    for row in rows:
        cells = []
        # What a narrow screen shows first is what the night changed.
        if has_change and row.change is not None:
            low, high = _minus(points(row.change.low)), _minus(points(row.change.high))
            cells.append(_number_cell(_minus(points(row.change.mean)), f"{low} to {high}"))
        elif has_change:
            cells.append(_none())
        for who in present:
            value: Interval | None = getattr(row, who)
            cells.append(_number_cell(percent(value.mean), _range(value)) if value else _none())
        cells.append(_number_cell(f"{row.n}"))
        total = "total" if row is facts.overall else None
        body.append(el("tr", el("th", row.name, scope="row"), *cells, class_=total))
    return _table("Accuracy per domain with 95 % intervals", ["Domain"], heads, body)


def _table(caption: str, text_heads: list[str], number_heads: list[str], body: list[Html]) -> Html:
    heads = [
        *(el("th", name, scope="col") for name in text_heads),
        *(el("th", name, scope="col", class_="num") for name in number_heads),
    ]
    table = el(
        "table",
        el("caption", caption),
        el("thead", el("tr", *heads)),
        el("tbody", *body),
    )
    return el("div", table, class_="card scroll", tabindex=0, role="region", aria_label=caption)


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
    return _tick(check.passed, "passed" if check.passed else "not passed")


def _tick(good: bool, words: str, *, shown: bool = False) -> Html:
    symbol = el("span", "\u2713" if good else "\u2717", aria_hidden="true")
    label = f" {words}" if shown else el("span", words, class_="hidden")
    return el("span", symbol, label, class_="yes" if good else "no")


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
                _none() if (value := values[i]) is None else _number_cell(f"{value:.3f}")
                for values in lines.values()
            ),
        )
        for i in curve.picks()
    ]
    caption = f"{curve.measure.capitalize()}, smoothed over {window} steps"
    table = _table(caption, ["Step"], list(lines), body)
    return el("details", el("summary", "The numbers behind this curve"), table)


def _samples(facts: Facts) -> Html | None:
    if not facts.samples:
        return None
    shown = facts.samples[:_SHOWN_SAMPLES]
    note = "The same held-out tasks answered before and after, with greedy decoding."
    if len(shown) < len(facts.samples):
        note += f" {len(shown)} of {len(facts.samples)} are shown; samples.json has all."
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
        verdict = _tick(reply.correct, "right" if reply.correct else "wrong", shown=True)
    return el("div", el("h4", _WHO[reply.who], verdict), _text(reply.text))


def _text(text: str) -> Html:
    if not text.strip():
        return el("pre", el("span", "(empty)", class_="empty"))
    cut = len(text) - _LONGEST_TEXT
    more = el("span", f"\n... {cut} more characters", class_="empty") if cut > 0 else None
    return el("pre", text[:_LONGEST_TEXT], more)


def _stages(facts: Facts) -> Html | None:
    if not facts.stages:
        return None
    longest = max((stage.seconds or 0.0 for stage in facts.stages), default=0.0)
    has_counts = any(stage.tokens is not None or stage.steps is not None for stage in facts.stages)
    body = []
    for stage in facts.stages:
        seconds = stage.seconds
        counts = [
            _none() if count is None else _number_cell(f"{count:,}")
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
                _none() if seconds is None else _number_cell(duration(seconds)),
            )
        )
    heads = [*(["Steps", "Trained tokens"] if has_counts else []), "Time"]
    total = f"{duration(facts.seconds)} in all" if facts.seconds is not None else ""
    table = _table("Stages in order", ["Stage", "Objective", "Share"], heads, body)
    return section("stages", "Where the time went", total, table)


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


def _number_cell(value: str, below: str | None = None) -> Html:
    return el("td", value, el("small", below) if below else None, class_="num")


def _none() -> Html:
    return el("td", "\u2013", class_="num")


def _range(value: Interval) -> str | None:
    if value.low == value.high:
        return None
    return f"{100 * value.low:.1f} to {100 * value.high:.1f}"


def _minus(signed: str) -> str:
    return signed.replace("-", "\u2212")
