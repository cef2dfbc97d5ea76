"""Two small charts as inline SVG: dots with intervals, and curves over steps.

Marks are drawn in percentages or in a stretched view box, labels are ordinary text: a chart fits
any width and its words keep their size. Colours come from the style sheet of the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evals.markup import Html, el, join

_WIDTH, _HEIGHT = 1000, 300
_MOST_POINTS = 400
NUM_COLOURS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A value with its interval, all in [0, 1]. `kind` picks colour and shape."""

    kind: str
    value: float
    low: float
    high: float


def interval_chart(dots: Sequence[Dot], *, title: str, key: str) -> Html:
    """One lane per dot on a scale from 0 to 1. `title` says the same in words, `key` is an id."""
    lane = 16
    height = lane * len(dots) + 8
    grid = [
        el("line", x1=f"{x}%", x2=f"{x}%", y1=-4, y2=height + 4, class_="grid")
        for x in (0, 25, 50, 75, 100)
    ]
    marks = [_dot(dot, 4 + lane * (i + 0.5)) for i, dot in enumerate(dots)]
    return el(
        "svg",
        el("title", title, id=f"{key}-title"),
        *grid,
        *marks,
        role="img",
        aria_labelledby=f"{key}-title",
        class_="intervals",
        height=height,
        width="100%",
    )


def _dot(dot: Dot, y: float) -> Html:
    x = f"{100 * dot.value:.2f}%"
    bar = el(
        "line",
        x1=f"{100 * dot.low:.2f}%",
        x2=f"{100 * dot.high:.2f}%",
        y1=y,
        y2=y,
        class_="bar",
    )
    return el("g", bar, mark(dot.kind, x, y), class_=dot.kind)


def mark(kind: str, x: str, y: float) -> Html:
    """The shape of a kind, so that no meaning hangs on colour: ring, disc, square."""
    if kind == "teacher":
        # A nested svg places a shape by percentage and still draws it in pixels.
        square = el("rect", x=-4.5, y=-4.5, width=9, height=9, class_="mark")
        return el("svg", square, x=x, y=y, overflow="visible")
    return el("circle", cx=x, cy=y, r=5, class_="mark")


def line_chart(
    raw: Sequence[float | None],
    lines: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    description: str,
    key: str,
    steps: Sequence[int],
) -> Html:
    """Curves over steps: the raw values of the first faintly, every smoothed one as a line."""
    shown = [v for values in (raw, *lines.values()) for v in values if v is not None]
    ticks = _ticks(min(shown), max(shown))
    low, high = ticks[0], ticks[-1]
    first, last = steps[0], max(steps[-1], steps[0] + 1)

    xs = [_WIDTH * (step - first) / (last - first) for step in steps]

    def height_of(value: float) -> float:
        return _HEIGHT * (high - value) / (high - low)

    def path(values: Sequence[float | None], style: str) -> Html:
        ys = [None if value is None else height_of(value) for value in values]
        return el("path", d=_path(xs, ys), class_=style)

    grid = [
        el("line", x1=0, x2=_WIDTH, y1=height_of(tick), y2=height_of(tick), class_="grid")
        for tick in ticks
    ]
    # The first line is drawn last: it is the one that matters.
    curves = [path(values, f"line c{i % NUM_COLOURS}") for i, values in enumerate(lines.values())]
    svg = el(
        "svg",
        el("title", title, id=f"{key}-title"),
        el("desc", description, id=f"{key}-desc"),
        *grid,
        path(raw, "raw"),
        *reversed(curves),
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        class_="curves",
    )
    y_labels = [
        el("span", f"{tick:g}", style=f"top:{100 * height_of(tick) / _HEIGHT:.1f}%")
        for tick in ticks
    ]
    x_labels = [el("span", f"step {steps[0]}"), el("span", f"{steps[-1]}")]
    return join(
        [
            el("div", *y_labels, class_="y-axis", aria_hidden="true"),
            el("div", svg, class_="plot"),
            el("div", *x_labels, class_="x-axis", aria_hidden="true"),
        ]
    )


def _path(xs: Sequence[float], ys: Sequence[float | None]) -> str:
    """A thinned polyline; a gap in the values is a gap in the line."""
    stride = math.ceil(len(ys) / _MOST_POINTS)
    pieces: list[str] = []
    broken = True
    for i in sorted({*range(0, len(ys), stride), len(ys) - 1}):
        y = ys[i]
        if y is not None:
            pieces.append(f"{'M' if broken else 'L'}{xs[i]:.1f} {y:.1f}")
        broken = y is None
    return " ".join(pieces)


def _ticks(low: float, high: float) -> list[float]:
    """Four to six round values that enclose the range; shares get the whole of 0 to 1."""
    if low >= 0 and (0.2 < high <= 1 or high == 0):
        return [0.0, 0.25, 0.5, 0.75, 1.0]
    low = min(low, 0.0) if low < 0 or low < high / 2 else low
    span = max(high - low, abs(high) * 1e-3, 1e-9)
    rough = span / 4
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * 0.999)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(start, max(stop, start + 1) + 1)]
