"""The tables of a curriculum's page: boundary, what was left out, layers, allocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evals.curriculum_page_charts import bar_cell, name_cell, small_range
from evals.curriculum_page_words import (
    VERDICTS,
    part,
    plain,
    reason_in_words,
    scene_name,
    several,
    share,
    span,
)
from evals.markup import Html, el, join, number_cell, section, table, tile

Summary = Mapping[str, Any]
FIRST_ROWS = 30
"""Rows of a long table that are open; the others unfold below it."""
LAYERS = {
    "prediction": "Prediction",
    "decision": "Decision",
    "served": "Served",
    "outcome": "Outcome",
    "messages": "Text",
}


def boundary(summary: Summary) -> Html:
    """Which tier is capable of what: one row per scene and band of demand, one column per tier."""
    found: Summary = summary.get("boundary") or {}
    cells: Sequence[Summary] = found.get("cells") or ()
    title, note = (
        "What each tier can do",
        (
            "Share of successes among turns whose outcome was verified, with its 95 % interval. A "
            "tier is capable of a cell when the whole interval reaches the wanted rate."
        ),
    )
    if not cells:
        empty = el("p", "No turn has a verified outcome, so nothing can be said.", class_="empty")
        return section("boundary", title, note, el("div", empty, class_="card"))
    tiers = sorted({cell["tier"] for cell in cells})
    lowest = {(t["scene"], t["band"]): t["tier"] for t in found.get("tiers") or ()}
    places: dict[tuple[str, int], dict[int, Summary]] = {}
    for cell in cells:
        places.setdefault((cell["scene"], cell["band"]), {})[cell["tier"]] = cell
    rows = [
        _boundary_row(*place, by_tier, tiers, lowest.get(place))
        for place, by_tier in sorted(places.items())
    ]
    heads = ["Scene and demand", *(f"Tier {tier}" for tier in tiers), "Lowest capable tier"]
    caption = "Rate from 0 to 100 % with its interval, and the verified turns that it rests on"
    counts = el(
        "dl",
        tile("Under-routed turns", f"{found.get('under', 0):,}", "below the boundary and failed"),
        tile("Over-routed turns", f"{found.get('over', 0):,}", "two or more tiers above it"),
        class_="tiles",
    )
    told = found.get("note")
    return section(
        "boundary",
        title,
        note,
        _folded(caption, heads, rows, kind="cells"),
        _cell_notes(cells),
        counts,
        el("p", plain(told, 600), class_="alert") if told else None,
    )


def _boundary_row(
    scene: str, band: int, by_tier: Mapping[int, Summary], tiers: Sequence[int], lowest: int | None
) -> Html:
    cells = [
        _boundary_cell(by_tier[tier]) if tier in by_tier else el("td", "\u2013") for tier in tiers
    ]
    words = "none known" if lowest is None else f"tier {lowest}"
    name = scene_name(scene)
    return el("tr", name_cell(name, f"demand {band}"), *cells, el("td", words, class_="edge"))


def _boundary_cell(cell: Summary) -> Html:
    if not cell["n"]:
        return el("td", el("small", "no verified turn"))
    symbol, word = VERDICTS.get(cell["verdict"], ("", plain(cell["verdict"])))
    verdict = el("span", f"{symbol} {word}", class_=cell["verdict"])
    basis = plain(cell.get("basis", "observational"))
    if basis == "weighted":
        basis = f"weighted, as good as {cell['n_effective']:,.0f} equal turns"
    return el(
        "td",
        f"{share(cell['rate'])} ",
        verdict,
        small_range(cell, cell["verdict"]),
        el("small", f"{span(cell)}; {cell['k']:,} of {cell['n']:,}"),
        el("small", basis),
    )


def _cell_notes(cells: Sequence[Summary]) -> Html | None:
    """What has to be known before the rates of some cells are believed."""
    items = [
        el(
            "li",
            el("b", f"{scene_name(c['scene'])}, demand {c['band']}, tier {c['tier']}"),
            el("span", "; ".join(plain(note, 400) for note in c["notes"])),
        )
        for c in cells
        if c.get("notes")
    ]
    if not items:
        return None
    words = f"What weakens the rates of {several(len(items), 'cell')}"
    return el("details", el("summary", words), el("ul", *items, class_="looks card"))


def _folded(caption: str, heads: Sequence[str], rows: Sequence[Html], *, kind: str) -> Html:
    """A table whose later rows unfold, so that nothing is left out and the page stays short."""
    first = table(caption, heads, (), rows[:FIRST_ROWS], kind=kind)
    rest = rows[FIRST_ROWS:]
    if not rest:
        return first
    words = f"{several(len(rest), 'more row')}"
    more = table(f"{caption}, continued", heads, (), rest, kind=kind)
    return join([first, el("details", el("summary", words), more)])


def dropped(summary: Summary) -> Html | None:
    """Rows that did not become examples, by reason, most frequent first."""
    found: Summary = summary.get("dropped") or {}
    parts = [
        _reasons(found.get("import") or {}, "While reading the logs"),
        _reasons(found.get("build") or {}, "While building the curriculum"),
    ]
    shown = [one for one in parts if one is not None]
    if not shown:
        return None
    note = "Every row that was left out has one reason. A turn that failed still counts above."
    return section("dropped", "What was left out", note, *shown)


def _reasons(counts: Mapping[str, int], caption: str) -> Html | None:
    ranked = sorted(((n, reason) for reason, n in counts.items() if n), key=lambda x: (-x[0], x[1]))
    if not ranked:
        return None
    whole = sum(number for number, _ in ranked)
    body = [
        el(
            "tr",
            name_cell(reason.replace("_", " ")),
            el("td", reason_in_words(reason), class_="words"),
            bar_cell(number / whole, part(number, whole)),
            number_cell(f"{number:,}"),
        )
        for number, reason in ranked
    ]
    full = f"{caption}: {several(whole, 'row')}"
    return table(full, ["Reason", "In words", "Share"], ["Rows"], body)


def coverage(summary: Summary) -> Html | None:
    """Which layers the rows of each source have."""
    sources: Mapping[str, Mapping[str, int]] = summary.get("sources") or {}
    if not sources:
        return None
    body = []
    for name, counts in sorted(sources.items()):
        rows = counts.get("rows", 0)
        shares = [
            bar_cell(counts.get(layer, 0) / rows if rows else 0, part(counts.get(layer, 0), rows))
            for layer in LAYERS
        ]
        body.append(el("tr", name_cell(name, several(rows, "row")), *shares))
    heads = ["Source", *LAYERS.values()]
    note = "A layer that a log does not have stays unknown; it is never guessed from another one."
    grid = table("Share of the rows that have each layer", heads, (), body, kind="layers")
    return section("coverage", "What the logs say", note, grid)


def allocation(summary: Summary) -> Html | None:
    """Where the examples were taken from: weak cells get more, no cell loses all."""
    cells: Sequence[Summary] = summary.get("allocation") or ()
    if not cells:
        return None
    ranked = sorted(cells, key=lambda c: (-c["share"], c["scene"], c["band"]))
    body = [_allocated(cell) for cell in ranked]
    heads = ["Scene and demand", "Success", "Share by size", "Share given", "Examples"]
    note = (
        "Weak cells get more of the curriculum than their size alone would give them; a floor "
        "keeps part of every cell's own share."
    )
    caption = "Cells by the share that they got"
    return section(
        "allocation", "Where the examples come from", note, _folded(caption, heads, body, kind="")
    )


def _allocated(cell: Summary) -> Html:
    accuracy = cell.get("accuracy")
    detail = f"of {cell['available']:,}"
    mark = el("small", "at its floor", class_="floored") if cell.get("floored") else None
    return el(
        "tr",
        name_cell(scene_name(cell["scene"]), f"demand {cell['band']}"),
        el("td", "\u2013" if accuracy is None else share(accuracy)),
        bar_cell(cell["base"], share(cell["base"], 1)),
        el("td", *bar_cell_parts(cell["share"]), mark, class_="share"),
        el("td", f"{cell['picked']:,} ", el("small", detail)),
    )


def bar_cell_parts(value: float) -> tuple[Html, Html]:
    width = el("i", style=f"width:{100 * value:.1f}%") if value > 0 else None
    return el("small", share(value, 1)), el("span", width, class_="was")
