"""RouteLLM: evaluation tables with a score per model, and win rates that its routers predicted.

Columns: `prompt`, one of 0/1, true/false or a score per model, optional `<model>_response`, and a
column per router (mf, sw_ranking, bert, causal_llm, random). Any table of prompts has columns with
numbers, so a row is recognised by a router's column or by answers of its models only; of another
table name the format. The options `models` and `routers` name the columns where that is not enough;
scores outside [0, 1] need `scales`, {correct: [bad, good]}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distill.curriculum.clock import shorten
from distill.curriculum.drops import RowError
from distill.curriculum.importers.base import Context, Found, Row
from distill.curriculum.importers.messages import answer
from distill.curriculum.importers.polarity import kind_of
from distill.curriculum.importers.tables import ROUTERS, arm, row_id, win_rates
from distill.curriculum.importers.values import clean, text, wrong
from distill.curriculum.importers.verdicts import grade, origin_of
from distill.curriculum.records import Verdict

_IDS = ("id", "question_id", "sample_id", "index")
_OTHER = frozenset(
    (*_IDS, "", "Unnamed: 0", "prompt", "category", "subject", "turn", "seed", "choices", "answer",
     "temperature", "top_p", "top_k", "n", "max_tokens", "stream", "presence_penalty",
     "frequency_penalty", "logprobs", "best_of", "echo", "timestamp", "created", "tokens", "length",
     "prompt_tokens", "label", "labels", "target", "flagged", "score", "rating")
)  # fmt: skip
_TELLING = frozenset({"mf", "sw_ranking", "causal_llm"})
"""Routers whose columns mean nothing else; `bert` may be a metric and `random` anything."""
_CHATTING = ("messages", "completion", "response", "conversations", "request_id", "eval_name")
_ENDING = "_response"
_WORDS = {"true": True, "false": False}


class RouteLLM:
    name = "routellm"

    def recognises(self, row: Row) -> bool:
        if "prompt" not in row or "model_a" in row or any(name in row for name in _CHATTING):
            return False
        routers = [name for name in ROUTERS if name in row]
        models = _models(row, ROUTERS)
        if len(routers) > 1 or _TELLING.intersection(routers):
            return bool(models)
        return len(models) > 1 and any(name + _ENDING in row for name in models)

    def read(self, row: Row, context: Context) -> Iterable[Found]:
        """A turn per model."""
        options = context.options
        routers = tuple(options.get("routers", ROUTERS))
        models = options.get("models") or _models(row, routers)
        if text(row, "prompt") is None:
            raise RowError("missing_field", "prompt")
        if not models:
            raise RowError("missing_field", "a column with a score from 0 to 1 for each model")
        key = row_id(row, *_IDS)
        prediction, tags = win_rates(row, options)
        scaled = any(_is_above(row.get(model)) for model in models)
        return [
            arm(
                row,
                context,
                format=self.name,
                key=key,
                model=clean(model, "column"),
                said=_said(row, model),
                verdict=_verdict(row.get(model), model, options, scaled=scaled),
                scene=text(row, "category", "subject"),
                prediction=prediction,
                tags=tags,
            )
            for model in models
        ]


def _said(row: Row, model: str) -> list[dict[str, Any]]:
    said = text(row, model + _ENDING)
    return answer([{"role": "assistant", "content": said}], model) if said else []


def _models(row: Row, routers: tuple[str, ...]) -> list[str]:
    """Columns that look like scores of models: those with answers, where several have them."""
    found = [name for name, value in row.items() if _is_score(name, value, routers)]
    answered = [name for name in found if name + _ENDING in row]
    return answered if len(answered) > 1 else found


def _is_above(value: Any) -> bool:
    return isinstance(value, int | float) and value > 1


def _is_score(name: Any, value: Any, routers: tuple[str, ...]) -> bool:
    """Whether a column looks like the score of a model."""
    if not isinstance(name, str) or name in _OTHER or name in routers or name.endswith(_ENDING):
        return False
    if name.startswith(("is_", "has_")) or kind_of(name) not in ("unknown", "unclear"):
        return False  # `is_toxic` and `helpfulness` speak about the prompt or the row
    if isinstance(value, str):
        if value.strip().lower() in _WORDS:
            return True
        try:
            value = float(value)
        except ValueError:
            return False
    return isinstance(value, int | float) and 0 <= value <= 1


def _verdict(value: Any, model: str, options: Mapping[str, Any], *, scaled: bool) -> Verdict | None:
    """`scaled`: another score of the row is above 1, so that 1 is not the best."""
    if isinstance(value, str):
        value = _WORDS.get(value.strip().lower(), value)
    if value is not None and not isinstance(value, str | int | float):
        raise wrong(model, "a score", shorten(value))
    graded, label = grade(value, "correct", options)
    if scaled and "correct" not in (options.get("scales") or {}) and graded is not None:
        graded, label = None, f"{value:g}" if isinstance(value, int | float) else str(value)
    if graded is None and label is None:
        return None
    source = origin_of("correct", options, default="program")
    return Verdict(source=source, name="correct", value=graded, label=label)
