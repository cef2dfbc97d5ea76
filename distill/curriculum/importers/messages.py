"""Conversations of any log in the one shape of chat completions.

A message has `role` (system, user, assistant or tool), `content`, and where there are any
`reasoning_content`, `tool_calls`, `tool_call_id` and `name`; nothing else is kept. Content is text;
only where a message holds something that is not text, such as a picture, it stays the list of parts
that it was. Arguments of tool calls are JSON text. Of several answers to one request the first
counts. RowError for what cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distill.curriculum.drops import RowError
from distill.curriculum.importers.values import (
    as_ident,
    as_items,
    as_table,
    as_text,
    clean,
    parsed,
    wrong,
)

Message = dict[str, Any]

ROLES: dict[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
}
_TYPES: dict[str, str] = {
    **{name: ROLES[name] for name in ("human", "ai", "system", "tool", "function", "developer")},
    **{name: ROLES[name] for name in ("user", "assistant")},
    "humanmessage": "user", "aimessage": "assistant", "systemmessage": "system",
    "toolmessage": "tool", "humanmessagechunk": "user", "aimessagechunk": "assistant",
}  # fmt: skip
"""What LangChain calls a message in `type`."""
_ASKED = ("messages", "input", "prompt")
"""Where a request has its conversation, by the interface it goes to."""
_STRUCTURED = ("role", "from", "choices", "messages", "input", "prompt", "output", "parts")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "summary_text"})
_REASONING_PARTS = frozenset({"reasoning", "thinking"})
_CALL_PARTS = frozenset({"tool_call", "tool_use", "function_call"})
_RESULT_PARTS = frozenset({"tool_call_response", "tool_result", "function_call_output"})
_DEEPEST = 100
_LARGEST = 2**63
_NOT_PLAIN = "plain JSON values"


def conversation(value: Any, field: str) -> list[Message]:
    """The messages of a list, of an object with `messages`, of one message or of a plain text.

    Empty for null, "", {} and []. A plain text is what the user said.
    """
    if isinstance(value, str):
        value = _structure(value, field)
        if isinstance(value, str):
            return [{"role": "user", "content": clean(value, field)}] if value else []
    if type(value) is not list and isinstance(value, Mapping):
        inner = next((name for name in _ASKED if value.get(name) is not None), None)
        if inner is not None:
            return _instructed(value, field) + conversation(value[inner], f"{field}.{inner}")
        value = [value] if value else []
    found: list[Message] = []
    entries = as_items(value, field)
    if len(entries) == 1 and isinstance(entries[0], list):
        entries = entries[0]  # a batch of one, as LangChain writes it
    for index, entry in enumerate(entries):
        found += message(entry, f"{field}[{index}]")
    return found


def answer(value: Any, field: str) -> list[Message]:
    """What the model said: a chat or text completion, a response of the Responses API, a message,
    a list of messages or plain text. Empty where there is nothing."""
    if isinstance(value, str):
        value = _structure(value, field)
        if isinstance(value, str):
            return [{"role": "assistant", "content": clean(value, field)}] if value else []
    if isinstance(value, Mapping):
        if "choices" in value:
            choices = as_items(value["choices"], f"{field}.choices")
            return _choice(choices[0], f"{field}.choices[0]") if choices else []
        if "output" in value and "role" not in value:
            return answer(value["output"], f"{field}.output")
        if "generations" in value:
            first = value["generations"]
            while isinstance(first, list | tuple) and first:
                first = first[0]
            return _choice(first, f"{field}.generations[0]")
        if not ("role" in value or "content" in value or "type" in value or "parts" in value):
            return []
        return message(_said(value), field)
    found: list[Message] = []
    for index, entry in enumerate(as_items(value, field)):
        name = f"{field}[{index}]"
        found += message(_said(entry) if isinstance(entry, Mapping) else entry, name)
    return _joined(found)


def _structure(value: str, field: str) -> Any:
    """The messages that a text is the JSON of; words that only look like JSON stay words."""
    if not value.lstrip().startswith(("[", "{", '"')):
        return value
    try:
        found = parsed(value, field)
    except RowError:
        return value
    if isinstance(found, str) or not found:
        return found or ""
    first = found[0] if isinstance(found, list) else found
    known = isinstance(first, Mapping) and (
        any(name in first for name in _STRUCTURED) or _langchain(first) is not None
    )
    return found if known else value


def _said(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message that is the model's unless it says otherwise."""
    return value if "role" in value else _langchain(value) or {"role": "assistant", **value}


def _langchain(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A message of LangChain with a role: `{type: human, content}`, the same with its content in
    `data`, or what its serializer writes. None for anything else."""
    kind, inner = value.get("type"), value
    if kind == "constructor" and isinstance(value.get("id"), list) and value["id"]:
        kind, inner = value["id"][-1], value.get("kwargs", value)
    elif "content" not in value and isinstance(value.get("data"), Mapping):
        inner = value["data"]
    role = _TYPES.get(kind.lower()) if isinstance(kind, str) else None
    if role is None or not isinstance(inner, Mapping) or "content" not in inner:
        return None
    out = {name: entry for name, entry in inner.items() if name != "type"}
    more = out.get("additional_kwargs")
    if isinstance(more, Mapping) and more.get("tool_calls") and not out.get("tool_calls"):
        out["tool_calls"] = more["tool_calls"]
    return {**out, "role": role}


def _instructed(value: Mapping[str, Any], field: str) -> list[Message]:
    """The system prompt that stands beside the messages of a request."""
    for name in ("instructions", "system"):
        if value.get(name):
            return message({"role": "system", "content": value[name]}, f"{field}.{name}")
    return []


def _choice(choice: Any, field: str) -> list[Message]:
    table = as_table(choice, field)
    if "message" in table:
        return answer(table["message"], f"{field}.message")
    return answer(table.get("text"), f"{field}.text")


def _joined(found: list[Message]) -> list[Message]:
    """Adjacent pieces of one assistant message, as the Responses API writes them, as one."""
    out: list[Message] = []
    for entry in found:
        last = out[-1] if out else {}
        same = entry["role"] == "assistant" == last.get("role")
        if not (same and isinstance(entry["content"], str) and isinstance(last["content"], str)):
            out.append(dict(entry))
            continue
        last["content"] += entry["content"]
        if "tool_calls" in entry:
            last["tool_calls"] = [*last.get("tool_calls", ()), *entry["tool_calls"]]
        if "reasoning_content" in entry:
            before = last.get("reasoning_content", "")
            last["reasoning_content"] = before + entry["reasoning_content"]
    return out


def message(value: Any, field: str) -> list[Message]:
    """One message; several where tool results travel as parts of one."""
    if type(value) is not dict and not isinstance(value, Mapping):
        raise wrong(field, "a message with role and content", value)
    kind = value.get("type")
    if isinstance(kind, str) and (kind in _CALL_PARTS or kind in _RESULT_PARTS):
        return _of_parts("assistant", [value], {}, field)
    if kind == "reasoning":
        parts = value.get("summary") or value.get("content")
        return _of_parts(
            "assistant", [{"type": kind, "content": _text_of(parts, field)}], {}, field
        )
    named = value.get("role", value.get("from"))
    if named is None and kind is not None and (known := _langchain(value)) is not None:
        value, named = known, known["role"]
    role = ROLES.get(named.lower()) if isinstance(named, str) else None
    if role is None:
        raise wrong(f"{field}.role", f"one of {', '.join(ROLES)}", named)
    content = value.get("content", value.get("parts", value.get("value")))
    if type(content) is not str:
        if isinstance(content, list | tuple):
            return _of_parts(role, list(content), value, field)
        if isinstance(content, Mapping):
            return _of_parts(role, [content], value, field)
    if content is None:
        content = value.get("refusal") or ""
    if not isinstance(content, str):
        raise wrong(f"{field}.content", "text or a list of parts", content)
    return [_finished(role, content if content.isascii() else clean(content, field), value, field)]


def _finished(role: str, content: Any, value: Mapping[str, Any], field: str) -> Message:
    out: Message = {"role": role, "content": content}
    if len(value) == 2:
        return out
    if role == "assistant":
        reasoning = value.get("reasoning_content") or value.get("reasoning")
        if reasoning:
            out["reasoning_content"] = as_text(reasoning, f"{field}.reasoning_content")
        calls = as_items(value.get("tool_calls"), f"{field}.tool_calls")
        if not calls and value.get("function_call"):
            calls = [{"function": value["function_call"]}]
        if calls:
            out["tool_calls"] = [
                tool_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)
            ]
    elif role == "tool":
        ref = value.get("tool_call_id", value.get("call_id"))
        if ref is not None:
            out["tool_call_id"] = as_ident(ref, f"{field}.tool_call_id")
    name = value.get("name")
    if name is not None and name != "":
        out["name"] = as_text(name, f"{field}.name")
    return out


def tool_call(value: Any, field: str) -> Message:
    """A call as `{id, type, function: {name, arguments}}`, from that shape or a flat one."""
    table = as_table(value, field)
    inner = as_table(table.get("function"), f"{field}.function") or table
    name = inner.get("name", inner.get("tool_name"))
    if name is None:
        raise RowError("missing_field", f"{field}.function.name")
    out: Message = {}
    ref = table.get("call_id", table.get("id", table.get("tool_call_id")))
    if ref is not None:
        out["id"] = as_ident(ref, f"{field}.id")
    arguments = inner.get("arguments", inner.get("args", inner.get("input", "")))
    out["type"] = "function"
    out["function"] = {
        "name": as_text(name, f"{field}.function.name"),
        "arguments": written(arguments, f"{field}.function.arguments"),
    }
    return out


def written(value: Any, field: str) -> str:
    """Text as it is, anything else as JSON text."""
    if isinstance(value, str):
        return clean(value, field)
    if value is None:
        return ""
    try:
        return clean(json.dumps(value, ensure_ascii=False), field)
    except (TypeError, ValueError, RecursionError):
        raise wrong(field, _NOT_PLAIN, value) from None


def plain(value: Any, field: str) -> Any:
    """`value` without tuples and odd keys, if it is plain JSON; for what is kept as it came."""
    return _copied(value, field, 0)


def _copied(value: Any, field: str, depth: int) -> Any:
    kind = type(value)
    if kind is str:
        return clean(value, field)
    if kind is bool or value is None:
        return value
    if kind is int or kind is float:
        if not -_LARGEST < value < _LARGEST:  # neither infinite nor NaN, nor too long to store
            raise wrong(field, "a finite number of at most 63 bits", value)
        return value
    if depth > _DEEPEST:
        raise wrong(field, f"at most {_DEEPEST} levels", value)
    if isinstance(value, list | tuple):
        return [_copied(entry, field, depth + 1) for entry in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {clean(k, field): _copied(entry, field, depth + 1) for k, entry in value.items()}
    raise wrong(field, _NOT_PLAIN, value)


def tool_definitions(value: Any, field: str) -> tuple[Mapping[str, Any], ...]:
    """Definitions of tools, each an object."""
    found = plain(as_items(value, field), field)
    return tuple(as_table(entry, f"{field}[{index}]") for index, entry in enumerate(found))


def _of_parts(role: str, parts: list[Any], value: Mapping[str, Any], field: str) -> list[Message]:
    """A message in parts. Parts are objects with a `type`, or plain text."""
    texts: list[str] = []
    kept: list[Any] = []
    reasoning: list[str] = []
    calls: list[Message] = []
    results: list[Message] = []
    only_text = True
    for index, part in enumerate(parts):
        name = f"{field}.content[{index}]"
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise wrong(name, "text or an object with a type", part)
        kind = part.get("type")
        if not isinstance(kind, str):
            kind = "text" if part.get("text") is not None else ""
        if kind in _TEXT_PARTS:
            found = _text_of(part.get("text", part.get("content", part.get("refusal"))), name)
            texts.append(found)
            kept.append({"type": "text", "text": found})
        elif kind in _REASONING_PARTS:
            found = part.get("content", part.get("thinking", part.get("text")))
            reasoning.append(_text_of(found, name))
        elif kind in _CALL_PARTS:
            calls.append(tool_call(part, name))
        elif kind in _RESULT_PARTS:
            results.append(_result(part, name))
        else:
            only_text = False
            kept.append(plain(dict(part), name))
    out = list(results)
    if kept or reasoning or calls or not results:
        rest = {key: entry for key, entry in value.items() if key not in ("content", "parts")}
        whole = _finished(role, "".join(texts) if only_text else kept, {**rest, "": None}, field)
        if reasoning:
            whole["reasoning_content"] = "".join(reasoning)
        if calls:
            whole["tool_calls"] = [*whole.get("tool_calls", ()), *calls]
        out.append(whole)
    return out


def _result(part: Mapping[str, Any], field: str) -> Message:
    for name in ("response", "result", "output", "content"):
        if part.get(name) is not None:
            break
    content = part.get(name)
    if isinstance(content, list) and all(isinstance(p, Mapping) and "text" in p for p in content):
        content = "".join(_text_of(p["text"], f"{field}.{name}") for p in content)
    out: Message = {"role": "tool", "content": written(content, f"{field}.{name}")}
    ref = part.get("id", part.get("tool_use_id", part.get("call_id", part.get("tool_call_id"))))
    if part.get("type") == "function_call_output":
        ref = part.get("call_id", ref)
    if ref is not None:
        out["tool_call_id"] = as_ident(ref, f"{field}.id")
    return out


def _text_of(value: Any, field: str) -> str:
    """Text, or the text of a list of text parts."""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return "".join(
            _text_of(entry.get("text") if isinstance(entry, Mapping) else entry, field)
            for entry in value
        )
    return as_text(value, field)
