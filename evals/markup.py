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
