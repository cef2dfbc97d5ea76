"""Tables with one row per prompt and a column per model, as arms of the same question.

Every model of a row gives a turn of its own, `<row>/<model>`. The arms are neither retries nor
steps of one session: they have no session and no trace, and only their `parent_id`, the row, says
that they answer the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.curriculum.importers.base import Context, Found, Row, digest_of
from distill.curriculum.importers.layers import made
from distill.curriculum.importers.messages import Message, conversation
from distill.curriculum.importers.values import ident, raw, share
from distill.curriculum.records import Outcome, Prediction, Served, Verdict

ROUTERS = ("mf", "sw_ranking", "bert", "causal_llm", "random")
"""Routers of RouteLLM, whose columns are predicted win rates of the strong model."""


def row_id(row: Row, *names: str) -> str:
    """The row's id; without one, a digest of its prompt, so that new columns do not change it."""
    return ident(row, *names) or digest_of(row.get("prompt"))


def prompt_of(row: Row) -> list[Message]:
    """The prompt as messages: a list of messages, or what the user said."""
    value = row.get("prompt")
    if isinstance(value, str):
        # A prompt may itself look like JSON; here it is only ever text.
        return conversation([{"role": "user", "content": value}], "prompt") if value else []
    return conversation(value, "prompt")


def win_rates(row: Row, options: Mapping[str, Any]) -> tuple[Prediction | None, tuple[str, ...]]:
    """The prediction of the first router with a column, and the others' as tags.

    The option `routers` names the columns.
    """
    names = [name for name in options.get("routers", ROUTERS) if raw(row, (name,))[1] is not None]
    rates = [(name, share(row, name)) for name in names]
    if not rates:
        return None, ()
    first = made(Prediction, score=rates[0][1], router=rates[0][0])
    return first, tuple(f"win_rate:{name}={rate:g}" for name, rate in rates[1:] if rate is not None)


def arm(
    row: Row,
    context: Context,
    *,
    format: str,
    key: str,
    model: str,
    said: list[Message],
    verdict: Verdict | None,
    **values: Any,
) -> Found:
    """The turn of one model: the prompt, what it said, and how that was judged."""
    read = prompt_of(row)
    return context.turn(
        row,
        source_id=f"{key}/{model}",
        parent_id=key,
        format=format,
        served=Served(model=model, tier=context.tiers.of_model(model)),
        outcome=made(
            Outcome,
            verdicts=() if verdict is None else (verdict,),
            cost=values.pop("cost", None),
        ),
        messages=(*read, *said) or None,
        num_prompt=len(read) if read or said else None,
        **values,
    )
