"""The tool calls of a turn: whether each was well-formed, and what came back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distill.curriculum.messages import tool_calls, tool_succeeded
from distill.curriculum.turns import UserTurn

_WORKED = re.compile(
    r"\b(?:success(?:ful(?:ly)?)?|(?:has|have|is|are|was|were) (?:now )?(?:been )?(?:done|"
    r"completed|created|updated|sent|booked|saved|deleted|submitted|deployed|fixed|cancelled|added)|"
    r"all (?:the )?tests? pass(?:ed)?|erfolgreich|avec succès|con éxito)\b",
    re.IGNORECASE,
)
_DID_NOT = re.compile(
    r"\b(?:not|n't|no|un(?:able|successful(?:ly)?)|fail(?:ed|s|ure)?|error|couldn|could not|cannot|"
    r"can't|unfortunately|problem|issue|nicht|leider|pas|échou\w+|falló)\b|n't\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """One call of a tool. Indices point into the messages of the turn."""

    name: str
    at: int
    result: int | None
    """None when nothing came back."""
    good: bool | None
    """What the result says of itself."""
    fault: str = ""
    """What is wrong with the call; empty when nothing is."""


def tool_uses(turn: UserTurn) -> list[ToolUse]:
    """Calls of the turn's own response, in order, each with the result that names its id."""
    messages = turn.messages or ()
    first = turn.start + 1
    results: dict[str, int] = {}
    for i in range(first, len(messages)):
        if messages[i].get("role") == "tool":
            results.setdefault(str(messages[i].get("tool_call_id") or ""), i)
    known = {_name(tool) for tool in turn.tools}
    uses = []
    for i in range(first, len(messages)):
        if messages[i].get("role") != "assistant" or not messages[i].get("tool_calls"):
            continue
        for identity, name, arguments in tool_calls(messages[i]):
            at = results.get(identity) if identity else None
            if at is not None and at < i:
                at = None
            fault = _fault(name, arguments, known) or ("no result" if at is None else "")
            good = None if at is None else tool_succeeded(messages[at])
            uses.append(ToolUse(name=name, at=i, result=at, good=good, fault=fault))
    return uses


def claims_success(answer: str) -> bool:
    """Whether an answer says that something was done, and nothing about a failure."""
    return _WORKED.search(answer) is not None and _DID_NOT.search(answer) is None


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    inner = function if isinstance(function, Mapping) else tool
    return str(inner.get("name") or "")


def _fault(name: str, arguments: Any, known: set[str]) -> str:
    if not name:
        return "a call without a name"
    if known and name not in known:
        return "a call of a tool that was not offered"
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return "arguments that are no JSON"
    if arguments not in (None, "") and not isinstance(arguments, Mapping):
        return "arguments that are no object"
    return ""
