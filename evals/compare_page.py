"""A comparison as one self-contained page: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from evals.compare_page_charts import panels, thousands
from evals.compare_page_facts import About, Range, Results, Row
from evals.compare_page_skills import skills_facts, skills_section
from evals.compare_page_words import changed, interval, share, signed
from evals.markup import Html, el, join, none_cell, number_cell, section, table, tile

_METRIC = {
    "sampled": "accuracy of sampled replies (temperature as configured)",
    "greedy": "accuracy of the greedy reply",
}


def render(results: Results) -> str:
    """The whole page. Every text is escaped; styles are inline."""
    folder = files("evals")
    styles = (folder.joinpath(n).read_text(encoding="utf-8") for n in _SHEETS)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"Comparison - {results.name}"),
        el("style", Html("\n".join(styles))),
    )
    sections = (_table, skills_section, _curves, _stopped, _contenders, _method)
    body = el(
        "body",
        el("a", "Skip to the results", href="#main", class_="skip"),
        _header(results),
        el("main", *(section(results) for section in sections), id="main"),
        el("footer", "Written by distill compare. The same numbers stand in results.json."),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


_SHEETS = ("report.css", "compare_page.css")


def _header(results: Results) -> Html:
    rows, count = results.table.rows, len(results.table.rows)
    best = rows[0]
    title = _title(results)
    goals = [found["all"] for seed in results.teachers.values() for found in seed.values()]
    tiles = [
        tile("Contenders", f"{count}"),
        tile("Tokens each", thousands(results.tokens)),
        tile("Seeds", f"{len(results.seeds)}"),
        tile("Start", share(sum(r.start for r in rows) / count)),
        tile("Best end", share(best.end), interval(best.change, "change ")),
        tile("Teacher", share(sum(goals) / len(goals))) if goals else None,
        tile("Visible difference", f"{100 * results.table.detectable:.1f}", "points or more")
        if results.table.detectable is not None
        else None,
    ]
    return el(
        "header",
        el("p", f"distill compare \u00b7 {results.name}", class_="eyebrow"),
        el("h1", *title),
        el("p", _what(results), class_="note"),
        el("dl", *tiles, class_="tiles"),
    )


def _title(results: Results) -> tuple[Html | str, ...]:
    """The outcome in one line, no surer than the numbers are."""
    best, *others = results.table.rows
    if best.change.low <= 0:
        return ("No contender surely rose above the start",)
    seen = results.table.detectable or 0.0
    close = [row.name for row in others if best.end - row.end < seen and row.change.low > 0]
    if close:
        names = ", ".join([best.name, *close[:3]]) + (" and others" if len(close) > 3 else "")
        return (el("span", names, class_="best"), " end highest, too close to tell apart")
    return (el("span", best.name, class_="best"), f" ends highest: {share(best.end)}")


def _what(results: Results) -> str:
    count = len(results.table.rows)
    seeds = f"{len(results.seeds)} seeds" if len(results.seeds) > 1 else "one seed"
    return (
        f"{count} contender{'s' if count > 1 else ''} from the same start, on the same tasks, with "
        f"{results.tokens:,} sampled tokens each and {seeds}. Measured is the "
        f"{_METRIC[results.metric]} on {results.num_tasks} held-out tasks per seed."
    )


def _table(results: Results) -> Html:
    ranks = results.table
    against = any(row.against is not None for row in ranks.rows)
    kept = any(row.kept is not None for row in ranks.rows)
    numbers = [
        "End",
        "Change",
        *([f"Against {ranks.baseline}"] if against else []),
        f"Tokens to {100 * results.level:.0f}\u00a0%",
        "Steps",
        "Memory",
        "Gradient norm",
        "Entropy",
        *(["Hint kept"] if kept else []),
    ]
    body = [_row(row, results, against=against, kept=kept) for row in ranks.rows]
    caption = "Best end first; intervals are 95 %, paired task by task, seeds pooled"
    grid = table(caption, ["Contender", "0 to 100\u00a0%"], numbers, body, kind="ranks")
    return section("table", "Where each one ended", _table_note(results), grid)


def _table_note(results: Results) -> str:
    note = "Bold differences exclude zero. The mark on each bar is the start."
    if results.table.detectable is not None:
        points = f"{100 * results.table.detectable:.1f}"
        note += (
            f" A true difference to {results.table.baseline} of {points} points or more would be "
            "seen with 80 % power; read smaller ones as nothing."
        )
    return note


def _row(row: Row, results: Results, *, against: bool, kept: bool) -> Html:
    reached = none_cell()
    if row.tokens_to_level is not None and row.steps_to_level is not None:
        below = f"{row.steps_to_level:.0f} steps"
        if row.num_reached < row.num_seeds:
            below += f", {row.num_reached} of {row.num_seeds} seeds"
        reached = number_cell(thousands(row.tokens_to_level), below)
    cells = [
        el("td", _bar(row), class_="share", aria_hidden="true"),
        number_cell(share(row.end)),
        changed(row.change),
        *([changed(row.against)] if against else []),
        reached,
        number_cell(f"{row.steps:.0f}", f"{row.seconds_per_step:.3f} s each"),
        number_cell(f"{row.peak_rss_bytes / 2**20:.0f} MiB"),
        number_cell(_span(row.grad_norm)),
        number_cell(_span(row.entropy)),
        *([_kept(row.kept)] if kept else []),
    ]
    mark = el("small", "stopped early", class_="ended") if row.stopped else None
    return el("tr", el("th", row.name, mark, scope="row"), *cells)


def _bar(row: Row) -> Html:
    width = el("i", style=f"width:{100 * row.end:.1f}%")
    start = el("b", style=f"left:{100 * row.start:.1f}%")
    return el("span", width, start, class_="was")


def _curves(results: Results) -> Html:
    names = [row.name for row in results.table.rows]
    legend = [
        _key("own", "this contender, mean of the seeds" if len(results.seeds) > 1 else "this one"),
        _key("key-other", "the others"),
        _key("goal", "teacher") if any(results.teachers.values()) else None,
    ]
    note = "Accuracy in percent by sampled tokens; every panel has the same axes."
    if len(results.seeds) > 1:
        note += " The band reaches from the lowest to the highest seed."
    card = el(
        "div",
        el("ul", *legend, class_="legend", aria_hidden="true"),
        panels(results, names),
        class_="card",
    )
    return section("curves", "How each one learned", note, card)


def _key(style: str, text: str) -> Html:
    line = el("line", x1=0, x2=26, y1=7, y2=7, class_=style)
    return el("li", el("svg", line, width=26, height=14), text)


def _stopped(results: Results) -> Html | None:
    items = [
        el(
            "li",
            el("span", "!", class_="hold", aria_hidden="true"),
            el("span", f"{r.name}, {text}"),
        )
        for r in results.table.rows
        for text in r.stopped
    ]
    if not items:
        return None
    note = "Their last evaluation is of the weights that they ended with."
    return section("stopped", "Stopped early", note, el("ul", *items, class_="checks card"))


def _contenders(results: Results) -> Html:
    body = [_about(about) for about in results.contenders]
    heads = [el("th", n, scope="col") for n in ("Contender", "Objective", "Teacher", "It reads")]
    table = el(
        "table",
        el("thead", el("tr", *heads, el("th", "Learning rate", scope="col", class_="num"))),
        el("tbody", *body),
    )
    region = el(
        "div", table, class_="card scroll", tabindex=0, role="region", aria_label="Contenders"
    )
    return section("contenders", "What was compared", None, region)


def _about(about: About) -> Html:
    return el(
        "tr",
        el("th", about.name, scope="row"),
        el("td", about.objective),
        el("td", about.teacher),
        el("td", about.view),
        number_cell(f"{about.lr:g}"),
    )


def _method(results: Results) -> Html:
    facts = [
        (
            "Budget",
            f"{results.tokens:,} tokens per contender and seed, sampled by the student or "
            "written for it by a text-only teacher; the step that reaches it is the last",
        ),
        (
            "Seeds",
            f"{', '.join(map(str, results.seeds))}; each has its own tasks, draws, base and "
            "teacher, the same for all contenders",
        ),
        (
            "To the level",
            "the first evaluated point at or above it; mean of the seeds that got there",
        ),
        (
            "Seconds, memory",
            "training without evaluation; memory is the largest resident size of the process",
        ),
        ("Gradient norm, entropy", "lowest and highest step; the norm is before clipping"),
        (
            "Hint kept",
            "change of the greedy accuracy with the tasks' own hints in the prompt, in "
            "points: what training wore away",
        ),
    ]
    facts += skills_facts(results)
    pairs = [piece for name, text in facts for piece in (el("dt", name), el("dd", text))]
    command = None
    if results.command:
        command = join([el("p", "The exact command", class_="field"), el("pre", results.command)])
    card = el("div", command, el("dl", *pairs, class_="facts"), class_="card")
    return section("method", "How to read this", None, card)


def _kept(change: float | None) -> Html:
    return none_cell() if change is None else number_cell(signed(change))


def _span(span: Range | None) -> str:
    return "\u2013" if span is None else f"{span.low:.2g} to {span.high:.2g}"
