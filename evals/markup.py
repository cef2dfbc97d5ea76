"""HTML by construction: what is not `Html` is text and gets escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable


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
