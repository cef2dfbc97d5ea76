"""Why an answer ended, in the words of any interface; one that was cut ended with `length`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.curriculum.drops import RowError
from distill.curriculum.importers.values import parsed

LENGTH = "length"
_CUT = frozenset(
    {
        "length", "max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens",
        "max_length", "max_token", "model_length", "token_limit", "incomplete",
        "model_context_window_exceeded", "context_length_exceeded",
    }
)  # fmt: skip
_NAMES = ("finish_reason", "finishReason", "stop_reason", "stopReason", "done_reason")
_INSIDE = ("choices", "candidates", "generations")
_BESIDE = ("message", "response_metadata", "generation_info", "data", "kwargs")
_DEEPEST = 4


def ended(reason: str) -> str:
    """The reason as it is, or `length` for any word that says that the limit was reached."""
    low = reason.rpartition(".")[2].strip().lower()  # as in FinishReason.MAX_TOKENS
    return LENGTH if low in _CUT else reason


def finish_of(value: Any, depth: int = 0) -> str | None:
    """Why an answer ended: of a chat or text completion, a message of Anthropic, a response of the
    Responses API, candidates of Gemini, a message of LangChain, or a list with one of them last.

    None where it does not say. JSON text is read; values of other types say nothing.
    """
    if isinstance(value, str):
        value = _read(value)
    if isinstance(value, list | tuple) and value:
        return finish_of(value[-1], depth + 1) if isinstance(value[-1], Mapping) else None
    if not isinstance(value, Mapping) or depth > _DEEPEST:
        return None
    for name in _INSIDE:
        inner = value.get(name)
        if isinstance(inner, list | tuple) and inner and isinstance(inner[0], Mapping | list):
            return finish_of(inner[0], depth + 1)  # of several answers the first counts
    for name in _NAMES:
        reason = value.get(name)
        if isinstance(reason, str) and reason:
            return ended(reason)
    if "output" in value or value.get("object") == "response":
        return _of_response(value)
    for name in _BESIDE:
        if isinstance(value.get(name), Mapping):
            reason = finish_of(value[name], depth + 1)
            if reason is not None:
                return reason
    return None


def _of_response(value: Mapping[str, Any]) -> str | None:
    """Of the Responses API: `incomplete` says why beside it, and without a why it was cut."""
    status, details = value.get("status"), value.get("incomplete_details")
    if not isinstance(status, str) or not status:
        return None
    reason = details.get("reason") if isinstance(details, Mapping) else None
    return ended(reason if status == "incomplete" and isinstance(reason, str) else status)


def _read(value: str) -> Any:
    if not value.lstrip().startswith(("{", "[")):
        return None
    try:
        return parsed(value, "answer")
    except RowError:
        return None
