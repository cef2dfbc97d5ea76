"""HTML by construction: what is not `Html` is text and gets escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Html(str):
    """Markup that is safe to insert as it is."""

    __slots__ = ()


def el(tag: str, *children: str | None, **attributes: str | int | float | None) -> Html:
    """An element. Plain strings among the children are escaped, None is left out.

    Attribute names are written with underscores: `aria_label`, `class_`, `for_`.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value), quote=True)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in ("meta", "br", "hr"):
        return Html(f"<{tag}{written}>")
    return Html(f"<{tag}{written}>{join(children)}</{tag}>")


def join(children: Iterable[str | None]) -> Html:
    """Several pieces one after the other, text escaped."""
    return Html(
        "".join(
            child if isinstance(child, Html) else html.escape(child, quote=True)
            for child in children
            if child is not None
        )
    )


def tile(name: str, number: str, below: str | None = None) -> Html:
    """A number with its name, and a smaller line below."""
    detail = el("small", below) if below else None
    return el("div", el("dd", number, detail), el("dt", name))


def section(key: str, title: str, note: str | None, *content: Html | None) -> Html:
    """A titled part of a page, with an anchor."""
    return el(
        "section",
        el("h2", title, id=f"{key}-heading"),
        el("p", note, class_="note") if note else None,
        *content,
        id=key,
        aria_labelledby=f"{key}-heading",
    )


def table(
    caption: str,
    text_heads: Sequence[str],
    number_heads: Sequence[str],
    body: Sequence[Html],
    *,
    card: bool = True,
    kind: str | None = None,
) -> Html:
    """A table in a region that scrolls sideways; columns of text first, then those of numbers.

    `card` gives it a frame of its own, `kind` is a style class.
    """
    heads = [
        *(el("th", name, scope="col") for name in text_heads),
        *(el("th", name, scope="col", class_="num") for name in number_heads),
    ]
    grid = el(
        "table",
        el("caption", caption),
        el("thead", el("tr", *heads)),
        el("tbody", *body),
        class_=kind,
    )
    style = "card scroll" if card else "scroll"
    return el("div", grid, class_=style, tabindex=0, role="region", aria_label=caption)


def number_cell(value: str, below: str | None = None) -> Html:
    return el("td", value, el("small", below) if below else None, class_="num")


def none_cell() -> Html:
    return el("td", "\u2013", class_="num")


def tick(good: bool, words: str, *, shown: bool = False) -> Html:
    """A sign for yes or no whose words stand beside it, or are there for those who listen."""
    symbol = el("span", "\u2713" if good else "\u2717", aria_hidden="true")
    label = f" {words}" if shown else el("span", words, class_="hidden")
    return el("span", symbol, label, class_="yes" if good else "no")
