"""What is said in a conversation: messages with reasoning and tool calls, read from logs.

Two shapes meet here. Logs hold chat-completions mappings (`message_from`); chat templates of
Hugging Face models read nearly the same (`Message.as_dict`), with arguments as objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from distill.errors import DataError

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Role in a log -> role here; the second name of each pair is another age's."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THOUGHT_PARTS = {"thinking": "thinking", "reasoning": "text"}
"""Type of a content part -> the key of its text."""
_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """An assistant asks for a tool. `arguments` is the text that it wrote, normally JSON."""

    id: str = ""
    name: str
    arguments: str = "{}"

    def as_dict(self) -> dict[str, Any]:
        """As templates read it: arguments as an object, as text where they are not one."""
        try:
            parsed = json.loads(self.arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else self.arguments
        call = {"type": "function", "function": {"name": self.name, "arguments": arguments}}
        return {"id": self.id, **call} if self.id else call


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    role: Role
    content: str
    """What is visible; empty for an assistant that only calls tools."""
    reasoning: str | None = None
    """What an assistant thought before it answered."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """The call that a tool answers."""
    name: str | None = None
    tools: tuple[str, ...] = ()
    """Definitions, as JSON text, of tools that may be called from here on. Templates write them
    where they want; the first message of a conversation carries them, so that they go wherever the
    conversation goes."""

    def as_dict(self) -> dict[str, Any]:
        """The mapping that a chat template reads, with only the keys that are there.

        `tools` is no part of it: templates take them as an argument of their own.
        """
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            found["name"] = self.name
        return found

    def as_completion(self) -> dict[str, Any]:
        """The same for an OpenAI-compatible endpoint, which wants arguments as text."""
        found = self.as_dict()
        for call, own in zip(found.get("tool_calls", ()), self.tool_calls, strict=False):
            call["function"]["arguments"] = own.arguments
        return found

    def to_row(self) -> dict[str, Any]:
        """Plain JSON under the names of the fields; what is empty is left out."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        row = {name: value for name, value in found.items() if value or name in _ALWAYS}
        if self.tool_calls:
            row["tool_calls"] = [asdict(call) for call in self.tool_calls]
        return row

    def identity(self) -> list[Any]:
        """What tells it from other messages, for hashes: role and content, and the rest if any."""
        rest = {key: value for key, value in self.as_dict().items() if key not in _ALWAYS}
        if self.tools:
            rest["tools"] = list(self.tools)
        return [self.role, self.content, *([rest] if rest else [])]


_ALWAYS = ("role", "content")


def message_from(raw: Mapping[str, Any]) -> Message:
    """The message that a chat-completions mapping describes.

    Content given in parts is joined line by line; thoughts that stand in the content between think
    tags, or in parts of their own, become `reasoning`. DataError naming what cannot be kept: an
    unknown role, a part that is not text, a tool call without a name.
    """
    role = _ROLES.get(str(raw.get("role")))
    if role is None:
        raise DataError(
            f"a message has the role {raw.get('role')!r}; expected one of {', '.join(_ROLES)}"
        )
    content, thought = _texts(raw.get("content"))
    if not content and isinstance(raw.get("refusal"), str):
        content = raw["refusal"]
    given = raw.get("reasoning_content") or raw.get("reasoning") or thought
    if given is not None and not isinstance(given, str):
        raise DataError(f"a message has a reasoning that is not text: {str(given)[:80]}")
    if role == "assistant" and not given:
        given, content = _split_thought(content)
    return Message(
        role=role,
        content=content,
        reasoning=given or None if role == "assistant" else None,
        tool_calls=tuple(_calls(raw)) if role == "assistant" else (),
        tool_call_id=_text_or_none(raw, "tool_call_id"),
        name=_text_or_none(raw, "name"),
    )


def messages_from(
    raw: Iterable[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]] = ()
) -> tuple[Message, ...]:
    """A conversation; its first message carries the definitions of the tools."""
    return with_tools([message_from(one) for one in raw], tools)


def with_tools(
    messages: Sequence[Message], tools: Iterable[Mapping[str, Any]]
) -> tuple[Message, ...]:
    """The same conversation, its first message with these definitions."""
    texts = tuple(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if not (messages and texts):
        return tuple(messages)
    return (replace(messages[0], tools=texts), *messages[1:])


def tools_of(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Every tool that a conversation makes known, in order."""
    return [cast(dict[str, Any], json.loads(text)) for m in messages for text in m.tools]


def without_reasoning(messages: Iterable[Message]) -> tuple[Message, ...]:
    """What later turns still show of earlier ones: answers and tools, not the thoughts."""
    return tuple(m if m.reasoning is None else replace(m, reasoning=None) for m in messages)


def _texts(content: Any) -> tuple[str, str | None]:
    """The visible text of a content and the thoughts among its parts."""
    if content is None or isinstance(content, str):
        return content or "", None
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list | tuple):
        raise DataError(
            f"the content of a message must be text or a list of parts, found {str(content)[:80]}"
        )
    shown: list[str] = []
    thoughts: list[str] = []
    for part in content:
        if isinstance(part, str):
            shown.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        key = _TEXT_PARTS.get(str(kind)) or _THOUGHT_PARTS.get(str(kind))
        text = part.get(key) if key is not None else None
        if not isinstance(text, str):
            raise DataError(
                f"a message has a part of type {kind!r} that is not text: {str(part)[:80]}; only "
                f"parts of type {', '.join([*_TEXT_PARTS, *_THOUGHT_PARTS])} can be learnt from"
            )
        (thoughts if str(kind) in _THOUGHT_PARTS else shown).append(text)
    return "\n".join(shown), "\n".join(thoughts) or None


def _split_thought(content: str) -> tuple[str | None, str]:
    """Thoughts and answer of a text in which a server left both. The opening tag is missing where
    it stood in the prompt; tags inside an answer stay there."""
    head, close, answer = content.partition(_CLOSE)
    bare = head.lstrip().removeprefix(_OPEN)
    if not close or _OPEN in bare:
        return None, content
    return bare.strip("\n"), answer.lstrip("\n")


def _calls(raw: Mapping[str, Any]) -> Iterable[ToolCall]:
    calls = raw.get("tool_calls") or []
    if not calls and isinstance(raw.get("function_call"), Mapping):
        calls = [raw["function_call"]]
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        called = call.get("function", call) if isinstance(call, Mapping) else None
        name = called.get("name") if isinstance(called, Mapping) else None
        if not isinstance(called, Mapping) or not isinstance(name, str) or not name:
            raise DataError(f"a tool call has no function with a name: {str(call)[:80]}")
        arguments = called.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        yield ToolCall(id=str(call.get("id") or ""), name=name, arguments=arguments or "{}")


def _text_or_none(raw: Mapping[str, Any], key: str) -> str | None:
    value = raw.get(key)
    return value if isinstance(value, str) and value else None
