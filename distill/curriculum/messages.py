"""What a message of a conversation is: its text, whether a user wrote it, how a tool's call ended.

Messages are mappings in the chat-completions shape; content may also be a list of parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

INSERTED_NAMES = frozenset(("harness", "system", "tool", "environment", "scheduler", "hook"))
"""A message of the role `user` with one of these names was put in by the harness."""
_INSERTED = re.compile(
    r"<(system[-_]reminder|system[-_]message|harness|environment[-_](?:context|details)|tool[-_]"
    r"result|function[-_]results?|observation|task[-_]notification|hook[-_]output|"
    r"local-command-stdout|user[-_]instructions)(?:\s[^<>]{0,200})?>",
    re.IGNORECASE,
)
_RESULT_PARTS = frozenset(("tool_result", "function_call_output", "tool_use_result"))
_TEXT_KEYS = ("text", "input_text", "output_text", "content")

MAX_RESULT = 20_000
"""A tool's result with more characters is data; it is not searched for whether it succeeded."""
_EXIT = re.compile(
    r"\bexit(?:ed)?(?: with)?[ _-]?(?:code|status)?\s{0,3}[:=]?\s{0,3}(-?\d{1,5})\b", re.I
)
_FAILED = re.compile(
    r"\s*(?:(?:tool |unexpected |internal )?error\b\s*[:\[(]|traceback \(most recent call last\)|"
    r"(?:\w+error|\w*exception):|fatal:|permission denied\b|command not found\b)",
    re.IGNORECASE,
)
_GOOD_WORDS = frozenset(("ok", "success", "succeeded", "successful", "passed", "completed", "done"))
_BAD_WORDS = frozenset(("error", "failed", "failure", "fail", "denied", "timeout", "cancelled"))


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message; parts that are no text (images, tool results) are left out."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts = [part if isinstance(part, str) else _part_text(part) for part in content]
    return "\n".join(part for part in parts if part)


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") in _RESULT_PARTS:
        return ""
    return next((part[key] for key in _TEXT_KEYS if isinstance(part.get(key), str)), "")


def without_inserted(text: str) -> str:
    """The text without blocks such as `<system-reminder> ... </system-reminder>`.

    A block that is never closed stays: then nothing says where it would end.
    """
    if "</" not in text:
        return text
    kept, at, open_ended = [], 0, set()
    for found in _INSERTED.finditer(text):
        name = found[1].lower()
        if found.start() < at or name in open_ended:
            continue
        end = re.compile(rf"</{re.escape(name)}\s*>", re.IGNORECASE).search(text, found.end())
        if end is None:
            open_ended.add(name)
            continue
        kept.append(text[at : found.start()])
        at = end.end()
    return "".join((*kept, text[at:])) if kept else text


def without_fence(text: str) -> str:
    """What is inside, where the whole text is one fenced block of code; else the text."""
    bare = text.strip()
    if len(bare) < 6 or not (bare.startswith("```") and bare.endswith("```")):
        return text
    return bare[3:-3].removeprefix("json")


def is_request(message: Mapping[str, Any]) -> bool:
    """Whether a user wrote it: role `user`, not named like a harness, and neither only tool results
    nor only blocks that a harness put in."""
    if message.get("role") != "user":
        return False
    name = message.get("name")
    if name is not None and str(name).lower() in INSERTED_NAMES:
        return False
    content = message.get("content")
    if isinstance(content, str):
        return "</" not in content or not content.strip() or bool(without_inserted(content).strip())
    if not isinstance(content, Sequence) or not content:
        return True
    parts = [p for p in content if not (isinstance(p, Mapping) and p.get("type") in _RESULT_PARTS)]
    texts = [p if isinstance(p, str) else _part_text(p) for p in parts]
    return any(not text or without_inserted(text).strip() for text in texts)


def tool_calls(message: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Id, name and arguments of each call in an assistant's message; malformed entries have an
    empty name."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return []
    found = []
    for call in calls:
        entry = call if isinstance(call, Mapping) else {}
        function = entry.get("function")
        inner = function if isinstance(function, Mapping) else entry
        found.append(
            (str(entry.get("id") or ""), str(inner.get("name") or ""), inner.get("arguments"))
        )
    return found


def tool_succeeded(message: Mapping[str, Any]) -> bool | None:
    """What a tool's result says of itself: True, False, or None where it says nothing.

    Reads the fields `is_error`, `success`, `ok`, `error`, `exit_code` and `status` of the message
    or of a JSON result, an exit code in the text, and how common error messages begin.
    """
    said = _said(message)
    if said is not None:
        return said
    text = message_text(message)
    if len(text) > MAX_RESULT:
        return None
    if text[:1] in ("{", " ", "\n") and text.lstrip()[:1] == "{":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, Mapping):
            return _said(value)
    if _FAILED.match(text):
        return False
    code = _EXIT.search(text)
    return None if code is None else int(code[1]) == 0


def _said(value: Mapping[str, Any]) -> bool | None:
    """The worst that the fields of a result say."""
    found: list[bool] = []
    for key in ("success", "ok"):
        if isinstance(value.get(key), bool):
            found.append(value[key])
    if isinstance(value.get("is_error"), bool) and value["is_error"]:
        found.append(False)
    if value.get("error"):
        found.append(False)
    for key in ("exit_code", "exitCode", "returncode"):
        if isinstance(value.get(key), int):
            found.append(value[key] == 0)
    status = value.get("status")
    word = status.lower() if isinstance(status, str) else ""
    if word in _GOOD_WORDS or word in _BAD_WORDS:
        found.append(word in _GOOD_WORDS)
    return all(found) if found else None
