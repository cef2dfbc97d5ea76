"""Whether a conversation is sound: everything asked is answered, every tool call is closed.

A conversation is a list of chat-completions messages. The check asks for a request and a response,
for every tool result the call that it answers, before it, and for every call exactly one result
before the model speaks on. Results of parallel calls may come in any order, and calls of one step
may be spread over several assistant messages in a row. Two user messages in a row are no problem,
nor is a greeting by the assistant before the first one.

What stands before the first problem may still be learnt from: NeoHorse-1, arXiv 2609.08183, calls
it a causally closed sub-trajectory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from distill.curriculum.messages import message_text

StructureVerdict = Literal["complete", "partially_recoverable", "quarantined"]

PROBLEMS: dict[str, str] = {
    "unreadable_payload": "a message is not in the chat-completions shape",
    "missing_request": "no user asks anything before the first answer",
    "missing_response": "the last request, or the last tool result, has no answer",
    "empty_assistant": "an answer has neither text nor tool calls",
    "orphan_result": "a tool result whose call is not in the conversation",
    "result_before_call": "a tool result stands before its call",
    "unclosed_call": "a tool call has no result before the model speaks on",
    "duplicate_call_id": "two equal tool calls have the same id",
    "conflicting_call_id": "two different tool calls have the same id",
    "duplicate_result": "one tool call has the same result twice",
    "conflicting_result": "one tool call has two different results",
    "unresolved_internal_call": "a call stands in the text of an answer, where nothing resolves it",
    "ambiguous_branch": "two answers in a row: which of them the conversation went on from is open",
}
"""Every problem, and what it means."""

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_PART_TYPES = frozenset(
    ("tool_use", "server_tool_use", "function_call", "tool_call", "mcp_tool_use")
)
_RESULT_TYPE = re.compile(r".*tool_result|.*_call_output|.*_tool_result")
_MARKUP = re.compile(
    r"\s*(?:<tool_call>|<\|tool_call\|>|<function_calls>|<function=|\[TOOL_CALLS\]|<\|python_tag\|>)"
    r"|.*(?:</tool_call>|</function_calls>|</function>|<\|eom_id\|>)\s*\Z",
    re.S,
)
"""Calls as models write them, at the beginning or the end of a text."""
_RESPONSE_MARKUP = ("<tool_response", "<function_results", "<tool_result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """What is wrong with a conversation, and how much of it is sound."""

    verdict: StructureVerdict
    """`complete` without a problem; `partially_recoverable` if some answer stands before the first
    problem; else `quarantined`."""
    problems: tuple[str, ...] = ()
    """Keys of PROBLEMS, each once, in the order in which they stand."""
    keep: int = 0
    """Length of the longest prefix that is causally closed and ends in an answer."""
    details: tuple[str, ...] = ()
    """For each problem, where it is first."""


def check(messages: Any, *, open_end: bool = False) -> Structure:
    """The verdict on one conversation.

    open_end: the record is a call in the middle of a turn, so its last assistant message may end in
    tool calls whose results are not here yet.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return _unreadable("expected a list of messages, found " + type(messages).__name__)
    if not messages:
        return _unreadable("there are no messages")
    walk = _Walk(len(messages))
    for place, message in enumerate(messages):
        wrong = _unreadable_part(message)
        if wrong:
            walk.report("unreadable_payload", place, wrong)
            break
        walk.read(place, message)
    else:
        walk.finish(messages, open_end)
    return walk.structure()


def _unreadable(why: str) -> Structure:
    return Structure(verdict="quarantined", problems=("unreadable_payload",), details=(why,))


def _unreadable_part(message: Any) -> str:
    """What makes a message unreadable, or nothing."""
    if not isinstance(message, Mapping):
        return f"expected an object, found {type(message).__name__}"
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str) or role not in _ROLES:
        return f"unknown role {role!r:.40}"
    if isinstance(content, list | tuple):
        if not all(isinstance(part, str | Mapping) for part in content):
            return "content has a part that is neither text nor an object"
    elif content is not None and not isinstance(content, str):
        return f"content is {type(content).__name__}"
    if calls is None:
        return ""
    if not isinstance(calls, list | tuple):
        return f"tool_calls is {type(calls).__name__}"
    for call in calls:
        if not isinstance(call, Mapping):
            return "a tool call is not an object"
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not function.get("name"):
            return "a tool call has no name"
        if not isinstance(function.get("arguments"), str | Mapping | None):
            return "the arguments of a tool call are neither text nor an object"
    return ""


class _Walk:
    """Reads a conversation from left to right and remembers the calls that are open."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.first: dict[str, tuple[int, str]] = {}  # problem -> place and words
        self.broken = length  # the first message that no sound prefix can hold
        self.calls: dict[str, tuple[int, str]] = {}  # id -> place and content of the call
        self.results: dict[str, str] = {}
        self.waiting: dict[str, int] = {}  # results that came before their call
        self.open: dict[str, int] = {}
        self.internal: dict[str, int] = {}  # calls in text or parts of an answer
        self.asked = False
        self.answer = -1  # the last sound answer
        self.before: str = ""  # what the last message of the conversation was
        self.ends: list[int] = []  # lengths of closed prefixes that end in an answer

    def report(self, problem: str, place: int, words: str) -> None:
        self.first.setdefault(problem, (place, words))
        self.broken = min(self.broken, place)

    def read(self, place: int, message: Mapping[str, Any]) -> None:
        role = message["role"]
        if role == "assistant":
            self._assistant(place, message)
        elif role in ("tool", "function"):
            self._result(place, message)
            self.before = "result"
        else:
            for part in _parts(message):
                if _RESULT_TYPE.fullmatch(str(part.get("type"))):
                    self._close_internal(part)
            if role == "user":
                self.asked = True
                self.before = "user"
                if self.internal and message_text(message).lstrip().startswith(_RESPONSE_MARKUP):
                    self.internal.clear()

    def _assistant(self, place: int, message: Mapping[str, Any]) -> None:
        calls = message.get("tool_calls") or ()
        legacy = message.get("function_call")
        if isinstance(legacy, Mapping):
            calls = (*calls, {"function": legacy})
        text = message_text(message)
        parts = [p for p in _parts(message) if p.get("type") in _PART_TYPES]
        if not (calls and self.before == "calls"):
            self._close_step()
        self._internal(place, text, parts, message)
        for number, call in enumerate(calls):
            self._call(place, number, call)
        if calls:
            self.before = "calls"
            return
        if not text.strip() and not parts:
            self.report("empty_assistant", place, f"message {place}")
        elif self.before == "answer":
            self.report("ambiguous_branch", place - 1, f"messages {place - 1} and {place}")
        self.before = "answer" if text.strip() else "calls"
        if not self.asked:
            if self.answer >= 0:
                self.report("missing_request", place, f"message {place}")
            self.answer = place
        elif text.strip() and not self.internal:
            self.answer = place
            self.ends.append(place + 1)

    def _close_step(self) -> None:
        """The model speaks on: what is open now stays open."""
        for name, place in self.open.items():
            self.report("unclosed_call", place, f"message {place}: call {_short(name)}")
        self.open.clear()
        for name, place in self.internal.items():
            what = f"message {place}: {_short(name)}"
            self.report("unresolved_internal_call", place, what)
        self.internal.clear()

    def _call(self, place: int, number: int, call: Mapping[str, Any]) -> None:
        function = call.get("function", call)
        content = json.dumps(
            [function.get("name"), function.get("arguments")], sort_keys=True, default=str
        )
        name = str(call.get("id") or "") or f"?{place}.{number}.{function.get('name')}"
        if name in self.waiting:
            at = self.waiting.pop(name)
            what = f"message {at}: result of {_short(name)}, called in message {place}"
            self.report("result_before_call", at, what)
        if name in self.calls:
            at, earlier = self.calls[name]
            same = "duplicate_call_id" if earlier == content else "conflicting_call_id"
            self.report(same, place, f"messages {at} and {place}: {_short(name)}")
            return
        self.calls[name] = (place, content)
        self.open[name] = place

    def _result(self, place: int, message: Mapping[str, Any]) -> None:
        name = str(message.get("tool_call_id") or "") or self._without_id(message)
        content = json.dumps(message.get("content"), sort_keys=True, default=str)
        if name in self.internal:
            del self.internal[name]
        elif name in self.open:
            del self.open[name]
        elif name in self.results:
            same = "duplicate_result" if self.results[name] == content else "conflicting_result"
            self.report(same, place, f"message {place}: {_short(name)}")
        elif name in self.calls:
            pass  # the model spoke on before; that the call was unclosed is reported
        elif self.internal and not message.get("tool_call_id"):
            self.internal.clear()
        else:
            self.waiting.setdefault(name or f"?{place}", place)
        self.results[name] = content

    def _without_id(self, message: Mapping[str, Any]) -> str:
        """Old formats have no ids: a result answers the first open call, of its name if it has
        one."""
        wanted = message.get("name") or message.get("tool_name")
        for name in self.open:
            if name.startswith("?") and (not wanted or name.endswith(f".{wanted}")):
                return name
        return ""

    def _internal(
        self,
        place: int,
        text: str,
        parts: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
    ) -> None:
        if ("<" in text or "[TOOL" in text) and _MARKUP.match(text):
            self.internal[f"a call in the text of message {place}"] = place
        known = {str(call.get("id")) for call in message.get("tool_calls") or ()}
        for number, part in enumerate(parts):
            name = str(part.get("id") or part.get("call_id") or f"part {number} of {place}")
            if name not in known:
                self.internal[name] = place
        for part in _parts(message):
            if _RESULT_TYPE.fullmatch(str(part.get("type"))):
                self._close_internal(part)

    def _close_internal(self, part: Mapping[str, Any]) -> None:
        name = str(part.get("tool_use_id") or part.get("call_id") or part.get("tool_call_id") or "")
        if name in self.internal:
            del self.internal[name]
        elif name in self.open:
            del self.open[name]

    def finish(self, messages: Sequence[Mapping[str, Any]], open_end: bool) -> None:
        last = self.length - 1
        for name, place in self.waiting.items():
            self.report("orphan_result", place, f"message {place}: result of {_short(name)}")
        ended_in_calls = self.before == "calls" and messages[-1]["role"] == "assistant"
        if open_end and ended_in_calls:
            step = _first_of_step(messages)
            self.open = {name: at for name, at in self.open.items() if at < step}
            self.internal = {name: at for name, at in self.internal.items() if at < step}
            if not (self.open or self.internal):
                self.ends.append(self.length)
        self._close_step()
        if not self.asked:
            self.report("missing_request", 0, "no message of a user")
        if self.before in ("user", "result", "") and self.asked:
            self.report("missing_response", last, f"message {last}")

    def structure(self) -> Structure:
        keep = max((end for end in self.ends if end <= self.broken), default=0)
        if not self.first and keep == self.length:
            return Structure(verdict="complete", keep=keep)
        found = sorted(self.first.items(), key=lambda item: item[1][0])
        return Structure(
            verdict="partially_recoverable" if keep else "quarantined",
            problems=tuple(problem for problem, _ in found),
            keep=keep,
            details=tuple(words for _, (_, words) in found),
        )


def _first_of_step(messages: Sequence[Mapping[str, Any]]) -> int:
    """Where the assistant messages begin that end a conversation."""
    place = len(messages)
    while place and messages[place - 1]["role"] == "assistant":
        place -= 1
    return place


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return []
    return [part for part in content if isinstance(part, Mapping)]


def _short(name: str) -> str:
    return "without an id" if name.startswith("?") or not name else repr(name[:60])
