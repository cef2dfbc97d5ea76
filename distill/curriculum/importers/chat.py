"""Plain chats: one conversation per line, as data sets and home-made logs have them.

`messages`, `conversations` or `conversation` (chat or ShareGPT shape), or `prompt` with
`completion`, `response` or `answer`. Optional: id, session, model, rating, time, user, scene, tags
and tools, under their usual names. A rating in numbers needs `scales`, {rating: [worst, best]}. A
row without a session is a whole conversation and gives one turn per request of its user, `ID/1`,
`ID/2`, ...; what rates it speaks about the last one. A row with a session is one call of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from distill.curriculum.importers.base import Context, Found, Row, digest_of
from distill.curriculum.importers.endings import finish_of
from distill.curriculum.importers.layers import made
from distill.curriculum.importers.messages import Message, answer, conversation, tool_definitions
from distill.curriculum.importers.values import count, ident, strings, text, when
from distill.curriculum.importers.verdicts import rating
from distill.curriculum.records import Outcome, RoutingTurn, Served

_WHOLE = ("messages", "conversations", "conversation")
_ASKED = ("prompt", "instruction", "question")
_SAID = ("completion", "response", "output", "answer")
_RATED = ("rating", "feedback", "thumb", "thumbs", "score")


class Chat:
    name = "chat"

    def recognises(self, row: Row) -> bool:
        return any(name in row for name in _WHOLE) or (
            any(name in row for name in _ASKED) and any(name in row for name in _SAID)
        )

    def read(self, row: Row, context: Context) -> Iterable[Found]:
        read, said = _conversation(row)
        whole = self._turn(row, context, read, said)
        earlier = _ends(read) if whole.session_id is None else []
        if not earlier:
            return [whole]
        name = whole.source_id
        turns = [
            replace(
                whole,
                source_id=f"{name}/{number}",
                session_id=name,
                outcome=None,
                messages=whole.messages[:end] if whole.messages else None,
                num_prompt=end - 1,
            )
            for number, end in enumerate(earlier, start=1)
        ]
        last = replace(whole, source_id=f"{name}/{len(earlier) + 1}", session_id=name)
        return [*turns, last]

    def _turn(
        self, row: Row, context: Context, read: list[Message], said: list[Message]
    ) -> RoutingTurn:
        """The conversation up to its last answer."""
        model = text(row, "model", "model_name")
        rated = next((name for name in _RATED if row.get(name) not in (None, "")), None)
        defined = row.get("tools")
        return context.turn(
            row,
            source_id=ident(row, "id", "conversation_id", "uuid", "uid") or digest_of(row),
            format=self.name,
            session_id=ident(row, "session_id", "session", "conversation_id"),
            turn_index=count(row, "turn_index"),
            ts=when(row, "timestamp", "ts", "created_at", "created", "time"),
            user=ident(row, "user", "user_id"),
            scene=text(row, "scene", "category", "task"),
            tags=strings(row, "tags"),
            served=made(Served, model=model, tier=context.tiers.of_model(model)),
            outcome=made(
                Outcome,
                finish_reason=text(row, "finish_reason", "stop_reason") or _finish(row),
                verdicts=(rating(row[rated], rated, context.options),) if rated else (),
            ),
            messages=(*read, *said) or None,
            num_prompt=len(read) if read or said else None,
            tools=tool_definitions(defined, "tools") if defined else (),
        )


def _finish(row: Row) -> str | None:
    """Why the last answer ended, where the answer itself says so."""
    names = (*_SAID, *_WHOLE)
    return next((found for n in names if (found := _ending(row.get(n))) is not None), None)


def _ending(value: Any) -> str | None:
    # A text may look like JSON and yet be what the model wrote.
    return None if value is None or isinstance(value, str) else finish_of(value)


def _ends(read: list[Message]) -> list[int]:
    """Where the turns before the last request end: behind the answer that stands before the next
    request."""
    return [
        place
        for place in range(1, len(read))
        if read[place]["role"] == "user"
        and read[place - 1]["role"] == "assistant"
        and any(message["role"] == "user" for message in read[:place])
    ]


def _conversation(row: Row) -> tuple[list[Message], list[Message]]:
    """What the model read, and its last answer."""
    for name in _WHOLE:
        if row.get(name):
            found = conversation(row[name], name)
            said = next((name for name in _SAID[:2] if row.get(name)), None)
            if said is not None and found and found[-1]["role"] != "assistant":
                return found, answer(row[said], said)
            if found and found[-1]["role"] == "assistant":
                return found[:-1], found[-1:]
            return found, []
    read: list[Message] = []
    system = text(row, "system", "system_prompt")
    if system is not None:
        read = conversation([{"role": "system", "content": system}], "system")
    for name in _ASKED:
        value = row.get(name)
        if value:
            # Text that looks like JSON is still text: only real lists hold messages.
            value = [{"role": "user", "content": value}] if isinstance(value, str) else value
            read += conversation(value, name)
            break
    for name in _SAID:
        value = row.get(name)
        if value:
            value = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
            return read, answer(value, name)
    return read, []
