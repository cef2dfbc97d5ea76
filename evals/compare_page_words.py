"""How a comparison writes its numbers."""

from __future__ import annotations

from collections.abc import Callable

from evals.compare_page_facts import Change
from evals.markup import Html, el, none_cell


def signed(value: float) -> str:
    """A difference of shares in points."""
    return _minus(f"{100 * value:+.1f}")


def signed_count(value: float) -> str:
    return _minus(f"{round(value, 2) + 0.0:+.2f}")


def share(value: float) -> str:
    return f"{100 * value:.1f}\u00a0%"


def interval(change: Change, before: str = "", tell: Callable[[float], str] = signed) -> str:
    return f"{before}{tell(change.low)} to {tell(change.high)}"


def changed(change: Change | None, tell: Callable[[float], str] = signed) -> Html:
    """A cell with a difference, bold where its interval excludes zero."""
    if change is None:
        return none_cell()
    sure = change.low > 0 or change.high < 0
    words = el("span", tell(change.mean), class_="sure" if sure else None)
    return el("td", words, el("small", interval(change, tell=tell)), class_="num")


def _minus(text: str) -> str:
    return text.replace("-", "\u2212")
