"""Conversations of spans: the attributes of the conventions, and numbered ones of older libraries.

Traceloop's OpenLLMetry writes `gen_ai.prompt.0.role`, `gen_ai.prompt.0.content`,
`gen_ai.prompt.1.tool_calls.0.name`, ... and `gen_ai.completion.0.content`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.curriculum.drops import RowError
from distill.curriculum.importers.base import Row
from distill.curriculum.importers.endings import ended, finish_of
from distill.curriculum.importers.messages import Message, answer, conversation
from distill.curriculum.importers.values import nothing, parsed, strings

ASKED, SAID = "gen_ai.prompt.", "gen_ai.completion."
TOOLS = "llm.request.functions."
_MOST_DIGITS = 6
_DEEPEST = 8


def conversation_of(attributes: Row) -> tuple[list[Message], list[Message], str | None]:
    """Input, output and the reason why the output ended."""
    read = _instructions(attributes)
    name = "gen_ai.input.messages" if "gen_ai.input.messages" in attributes else "gen_ai.prompt"
    value = attributes.get(name)
    value = [_turned(e, "user") for e in numbered(attributes, ASKED)] if nothing(value) else value
    read += conversation(value, name)
    name = "gen_ai.output.messages"
    name = name if name in attributes else "gen_ai.completion"
    value = attributes.get(name)
    if nothing(value):  # several are answers to one request: the first counts
        value = [_turned(entry, "assistant") for entry in numbered(attributes, SAID)[:1]]
    said = answer(value, name)
    reasons = strings(attributes, "gen_ai.response.finish_reasons")
    return read, said, ended(reasons[0]) if reasons else finish_of(value)


def numbered(attributes: Row, prefix: str) -> list[dict[str, Any]]:
    """What stands under `prefix0.`, `prefix1.`, ... as objects in the order of the numbers."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in attributes.items():
        if not isinstance(name, str) or not name.startswith(prefix):
            continue
        number, *parts = name[len(prefix) :].split(".")
        if not _is_number(number) or not 0 < len(parts) <= _DEEPEST:
            continue
        inner = found.setdefault(int(number), {})
        for part in parts[:-1]:
            below = inner.setdefault(part, {})
            if not isinstance(below, dict):
                break
            inner = below
        else:
            inner[parts[-1]] = value
    return [_listed(found[number]) for number in sorted(found)]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _listed(value: Any) -> Any:
    """Objects whose names are all numbers as lists."""
    if not isinstance(value, dict):
        return value
    inner = {name: _listed(entry) for name, entry in value.items()}
    if inner and all(_is_number(name) for name in inner):
        return [inner[name] for name in sorted(inner, key=int)]
    return inner


def _turned(entry: Mapping[str, Any], role: str) -> dict[str, Any]:
    """A numbered message as a usual one: with a role, and parts out of their JSON text."""
    content = entry.get("content")
    if isinstance(content, str) and content.lstrip().startswith("[{"):
        try:
            parts = parsed(content, "content")
        except RowError:
            parts = None
        if isinstance(parts, list) and all(isinstance(p, Mapping) and "type" in p for p in parts):
            content = parts
    return {**entry, "role": entry.get("role") or role, "content": content}


def _instructions(attributes: Row) -> list[Message]:
    """System instructions are parts without a role."""
    name = "gen_ai.system_instructions"
    value = attributes.get(name)
    if not value:
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(value, name)
    return conversation([{"role": "system", "content": value}], name)
