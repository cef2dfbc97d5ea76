"""The pictures of a curriculum: histogram, calibration, shares, heat map and small ranges.

Marks are drawn in percentages or in a stretched view box and labels are ordinary text, so a picture
fits any width. Everything that a picture shows also stands beside it in numbers or in its title.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evals.curriculum_page_words import part, plain, several, share
from evals.markup import Html, el, join

_WIDTH, _HEIGHT = 1000, 300
_NAMED_FROM = 0.12
"""Share from which a piece of a strip has room for its number."""


def histogram(edges: Sequence[float], counts: Sequence[int]) -> Html:
    """Bars of counts between edges. `edges` has one entry more than `counts`."""
    top, first, last = max(counts, default=0) or 1, edges[0], edges[-1]
    wide = (last - first) or 1.0
    bars = []
    for low, high, number in zip(edges, edges[1:], counts, strict=False):
        height = _HEIGHT * number / top
        bar = el(
            "rect",
            el("title", f"{low:.2f} to {high:.2f}: {several(number, 'turn')}"),
            x=f"{_WIDTH * (low - first) / wide:.1f}",
            width=f"{max(1.0, _WIDTH * (high - low) / wide - 3):.1f}",
            y=f"{_HEIGHT - height:.1f}",
            height=f"{height:.1f}",
        )
        bars.append(bar)
    words = f"Histogram of {several(sum(counts), 'turn')} over scores from {first:g} to {last:g}"
    grid = [_line(0, _WIDTH, y, y, "grid") for y in (0, _HEIGHT / 2, _HEIGHT)]
    svg = el(
        "svg",
        el("title", words),
        *grid,
        el("g", *bars, class_="hist"),
        role="img",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        class_="curves",
    )
    half = top / 2
    labels = [(0.0, f"{top:,}"), (50.0, f"{half:,.0f}" if half >= 1 else ""), (100.0, "0")]
    ticks = [f"{first + wide * at:g}" for at in (0, 0.5, 1)]
    return _frame(svg, labels, ticks)


def calibration(bins: Sequence[Mapping[str, Any]]) -> Html:
    """Points of predicted and observed shares with the interval of what was observed; the dashed
    line is where both agree."""
    most = max((b["n"] for b in bins), default=0) or 1
    marks = []
    for one in bins:
        x = f"{100 * one['predicted']:.2f}%"
        words = (
            f"estimate {share(one['predicted'])}, seen {share(one['observed'])} "
            f"({100 * one['low']:.0f} to {100 * one['high']:.0f}), {several(one['n'], 'turn')}"
        )
        bar = el("line", x1=x, x2=x, y1=_up(one["low"]), y2=_up(one["high"]), class_="bar")
        radius = f"{3.0 + 4.0 * (one['n'] / most) ** 0.5:.1f}"
        dot = el("circle", cx=x, cy=_up(one["observed"]), r=radius, class_="mark")
        marks.append(el("g", el("title", words), bar, dot, class_="guess"))
    grid = [
        el("line", x1="0%", x2="100%", y1=f"{y}%", y2=f"{y}%", class_="grid") for y in (0, 50, 100)
    ]
    diagonal = el("line", x1="0%", y1="100%", x2="100%", y2="0%", class_="diagonal")
    svg = el(
        "svg",
        el("title", f"Estimated and observed shares in {several(len(bins), 'group')} of turns"),
        *grid,
        diagonal,
        *marks,
        role="img",
        class_="points",
        width="100%",
        height="100%",
    )
    scale = [(0.0, "100\u00a0%"), (50.0, "50\u00a0%"), (100.0, "0")]
    return _frame(svg, scale, ["0", "50\u00a0%", "100\u00a0%"])


def _up(value: float) -> str:
    return f"{100 * (1 - value):.2f}%"


def _frame(svg: Html, y_labels: Sequence[tuple[float, str]], x_labels: Sequence[str]) -> Html:
    ticks = [el("span", text, style=f"top:{at:g}%") for at, text in y_labels if text]
    return el(
        "div",
        el("div", *ticks, class_="y-axis", aria_hidden="true"),
        el("div", svg, class_="plot"),
        el("div", *(el("span", text) for text in x_labels), class_="x-axis", aria_hidden="true"),
        class_="frame",
    )


def _line(x1: float, x2: float, y1: float, y2: float, style: str) -> Html:
    return el("line", x1=x1, x2=x2, y1=y1, y2=y2, class_=style)


def strip(pieces: Sequence[tuple[str, int]], *, words: str) -> Html:
    """One bar of several parts: (style class, count). `words` says the same in words."""
    whole = sum(number for _, number in pieces)
    parts = [
        el(
            "i",
            f"{number:,}" if number >= _NAMED_FROM * whole else "",
            class_=style,
            style=f"flex:{number} 1 0",
        )
        for style, number in pieces
        if number
    ]
    return el("div", *parts, class_="strip", role="img", aria_label=words)


def key(*names: tuple[str, str]) -> Html:
    """What the colours of strips mean: (style class, words)."""
    items = [el("li", el("span", class_=f"key {style}"), words) for style, words in names]
    return el("ul", *items, class_="legend")


def heat_map(
    rows: Sequence[tuple[str, str, Sequence[int]]], columns: Sequence[tuple[str, str]], head: str
) -> Html:
    """Counts as cells that are the stronger the larger their share of the row.

    `rows` are (name, detail, counts), `columns` are (style class, name).
    """
    heads = [el("th", head, scope="col"), *(el("th", name, scope="col") for _, name in columns)]
    body = []
    for name, detail, counts in rows:
        whole = sum(counts)
        cells = [
            _heat_cell(number, whole, style, is_last=i == len(columns) - 1)
            for i, (number, (style, _)) in enumerate(zip(counts, columns, strict=True))
        ]
        below = el("small", detail) if detail else None
        body.append(el("tr", el("th", name, below, scope="row"), *cells))
    return el("table", el("thead", el("tr", *heads)), el("tbody", *body), class_="heat")


def _heat_cell(number: int, whole: int, style: str, *, is_last: bool) -> Html:
    strength = 0.55 * number / whole if whole else 0.0
    return el(
        "td",
        el("i", class_=style, style=f"opacity:{strength:.2f}"),
        el("span", f"{number:,}", el("small", part(number, whole))),
        class_="heat-last" if is_last else None,
    )


def small_range(cell: Mapping[str, Any], style: str) -> Html:
    """A rate from 0 to 1 with its interval, as wide as its cell."""
    percent = {name: f"{100 * cell[name]:.1f}%" for name in ("rate", "low", "high")}
    return el(
        "svg",
        el("line", x1="0%", x2="100%", y1=5, y2=5, class_="track"),
        el("line", x1=percent["low"], x2=percent["high"], y1=5, y2=5, class_="bar"),
        el("circle", cx=percent["rate"], cy=5, r=4, class_="dot"),
        class_=f"range {style}",
        height=10,
        aria_hidden="true",
    )


def bar_cell(value: float, words: str) -> Html:
    """A table cell with a share as a bar and in words."""
    width = el("i", style=f"width:{100 * value:.1f}%") if value > 0 else None
    return el("td", el("small", words), el("span", width, class_="was"), class_="share")


def name_cell(name: Any, below: str | None = None) -> Html:
    """The head of a row. A log chose the name: its direction of writing stays inside of it."""
    return el("th", el("bdi", plain(name)), el("small", below) if below else None, scope="row")


def paragraphs(*texts: str) -> Html:
    return join([el("p", text, class_="note") for text in texts if text])
