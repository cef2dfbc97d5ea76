"""Small multiples of a comparison: one contender per panel before all the others in grey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from evals.compare_page_facts import Point, Results
from evals.markup import Html, el

_WIDTH, _HEIGHT = 1000, 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """A point of a contender's curve over its seeds."""

    tokens: float
    mean: float
    low: float
    high: float


def value(point: Point, metric: str) -> float:
    return point.greedy if metric == "greedy" or point.sampled is None else point.sampled


def curve(results: Results, name: str) -> list[Spot]:
    """Mean, lowest and highest seed at each point, by tokens."""
    found: dict[tuple[int, int], list[Point]] = {}
    for run in results.runs:
        if run.contender != name:
            continue
        seen: dict[int, int] = {}
        for point in run.curve:
            # A run that broke off was measured once more, behind its last point.
            again = seen[point.point] = seen.get(point.point, -1) + 1
            found.setdefault((point.point, again), []).append(point)
    spots = []
    for key in sorted(found):
        values = [value(p, results.metric) for p in found[key]]
        spots.append(
            Spot(
                tokens=fmean(p.tokens for p in found[key]),
                mean=fmean(values),
                low=min(values),
                high=max(values),
            )
        )
    return sorted(spots, key=lambda spot: spot.tokens)


def panels(results: Results, names: Sequence[str]) -> Html:
    """One panel per name, all on the same axes."""
    curves = {name: curve(results, name) for name in names}
    far = max((spot.tokens for spots in curves.values() for spot in spots), default=1.0) or 1.0
    goals = [found["all"] for seed in results.teachers.values() for found in seed.values()]
    goal = fmean(goals) if goals else None
    return el(
        "div",
        *(_panel(name, curves, far, goal, i) for i, name in enumerate(names)),
        class_="panels",
    )


def _panel(
    name: str, curves: dict[str, list[Spot]], far: float, goal: float | None, index: int
) -> Html:
    own = curves[name]
    grid = [el("line", x1=0, x2=_WIDTH, y1=y, y2=y, class_="grid") for y in map(_y, (0, 0.5, 1))]
    line = None
    if goal is not None:
        line = el("line", x1=0, x2=_WIDTH, y1=_y(goal), y2=_y(goal), class_="goal")
    others = [_line(spots, far, "other") for other, spots in curves.items() if other != name]
    several = any(spot.low < spot.high for spot in own)
    words = f"{name}: from {own[0].mean:.0%} to {own[-1].mean:.0%}"
    svg = el(
        "svg",
        el("title", words, id=f"panel{index}"),
        *grid,
        *others,
        line,
        _band(own, far) if several else None,
        _line(own, far, "own"),
        role="img",
        aria_labelledby=f"panel{index}",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        class_="curves",
    )
    end = el("span", f"{thousands(far)} tokens")
    ticks = [el("span", f"{t}", style=f"top:{100 - t}%") for t in (0, 50, 100)]
    frame = el(
        "div",
        el("div", *ticks, class_="y-axis", aria_hidden="true"),
        el("div", svg, class_="plot"),
        el("div", el("span", "0"), end, class_="x-axis", aria_hidden="true"),
        class_="frame",
    )
    caption = el("figcaption", el("span", name), el("b", f"{100 * own[-1].mean:.0f}\u00a0%"))
    return el("figure", caption, frame, class_="panel")


def _line(spots: Sequence[Spot], far: float, style: str) -> Html:
    return el("path", d=_path([(s.tokens, s.mean) for s in spots], far), class_=style)


def _band(spots: Sequence[Spot], far: float) -> Html:
    there = [(s.tokens, s.high) for s in spots]
    back = [(s.tokens, s.low) for s in reversed(spots)]
    return el("path", d=f"{_path([*there, *back], far)} Z", class_="band")


def _path(points: Sequence[tuple[float, float]], far: float) -> str:
    pieces = [
        f"{'L' if i else 'M'}{_WIDTH * x / far:.1f} {_y(y):.1f}" for i, (x, y) in enumerate(points)
    ]
    return " ".join(pieces)


def _y(share: float) -> float:
    return _HEIGHT * (1.0 - share)


def thousands(tokens: float) -> str:
    """98,304 is `98k`, 950 is `950`."""
    return f"{tokens / 1000:.0f}k" if tokens >= 10_000 else f"{tokens:,.0f}"
