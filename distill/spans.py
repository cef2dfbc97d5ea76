"""A recorded turn as token ids: which of them a student would have had to write itself.

The unit is a user turn (NeoHorse-1, arXiv 2609.08183): earlier turns show answers and tools without
thoughts, the turn itself shows everything. Learnt are the assistant's spans of the turn: reasoning,
tool calls with arguments, visible answer, end token. What a template writes behind the end token is
not learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distill.errors import DataError
from distill.messages import without_reasoning
from distill.tokens import Chat
from distill.types import Message


class Span(NamedTuple):
    """A stretch of a row, encoded by itself, as prompts and sampled replies are."""

    token_ids: tuple[int, ...]
    trained: bool


class _Reply(NamedTuple):
    """An assistant's span in a rendered conversation."""

    start: int
    stop: int
    """Offsets of its text, without the end token."""
    end_id: int
    after: int
    """Offset behind the end token."""


def spans(chat: Chat, history: Sequence[Message], turn: Sequence[Message]) -> list[list[Span]]:
    """The rows that teach the assistant's part of `turn`, what came after `history`.

    Normally one row: prompt, reply, what the tools said, reply, ... Where the template writes a
    state differently once the conversation has gone on, that reply becomes a row of its own, so
    that each is learnt exactly behind the prompt that a student would read, with its thoughts.
    Reasoning is left out where the template has no place for it (`Chat.writes_reasoning`). An
    assistant's message without any content is shown and not learnt; messages behind the last reply
    are left out.

    Raises DataError for a turn without a reply, and where the template would lose an answer or a
    tool call, or cut it because an end token stands inside.
    """
    asked = [i for i, m in enumerate(turn) if m.role == "assistant" and (m.content or m.tool_calls)]
    if not asked:
        raise DataError(f"a recorded turn of {len(turn)} messages has no reply to learn from")
    if not chat.writes_reasoning:
        turn = without_reasoning(turn)
    said = (*without_reasoning(history), *turn[: asked[-1] + 1])
    whole = chat.written(said)
    grown: list[Span] = []
    rows: list[list[Span]] = []
    at = 0
    for number in (len(history) + i for i in asked):
        prompt = chat.render(said[:number])
        reply = _find(chat, prompt, said[: number + 1], whole) if len(prompt) >= at else None
        if reply is None or _forgets(said[number], whole[reply.start : reply.stop]):
            rows.append(_alone(chat, prompt, said[: number + 1]))
            continue
        if not grown:
            rows.append(grown)
        grown += _pair(chat, whole, at, reply)
        at = reply.after
    return rows


def _alone(chat: Chat, prompt: str, said: Sequence[Message]) -> list[Span]:
    """The row of a reply whose prompt does not stand in the whole conversation."""
    whole = chat.written(said)
    reply = _find(chat, prompt, said, whole)
    if reply is None:
        raise DataError(
            "the chat template begins a reply differently from how it writes one: a prompt ends "
            f"with {prompt[-40:]!r}, the written conversation with {whole[-80:]!r}; no tokens of "
            "it can be learnt, so leave the turn out or change the template"
        )
    return _pair(chat, whole, 0, reply)


def _pair(chat: Chat, whole: str, at: int, reply: _Reply) -> list[Span]:
    shown, own = chat.encode([whole[at : reply.start], whole[reply.start : reply.stop]])
    return [Span(tuple(shown), False), Span((*own, reply.end_id), True)]


def _find(chat: Chat, prompt: str, said: Sequence[Message], whole: str) -> _Reply | None:
    """Where the last message of `said` stands in `whole`; None unless both go on from `prompt`."""
    until = chat.written(said)
    if not (whole.startswith(prompt) and until.startswith(prompt)):
        return None
    start, message = len(prompt), said[-1]
    if _first_end(chat, until, start) is not None:
        found = _first_end(chat, whole, start)
        assert found is not None, "the whole goes on where the part ends"
        stop, end_id, after = found
    elif whole.startswith(until):
        stop = after = _unmarked_end(chat, until, start, message)
        end_id = chat.end_id
    else:
        return None
    _check_kept(message, whole[start:stop], rest=until[start:])
    return _Reply(start, stop, end_id, after)


def _unmarked_end(chat: Chat, until: str, start: int, message: Message) -> int:
    """Where a reply ends that the template closes with white space, if at all: the student still
    has to say that it is done."""
    at = until.rfind(message.content, start) if message.content else -1
    end = at + len(message.content)
    if at < 0 or until[end:].strip():
        end = len(until.rstrip())
    last = chat.encode([until[start:end]])[0][-1:]
    if last and last[0] in chat.tokenizer.all_special_ids:
        raise DataError(
            f"the chat template ends a reply with {chat.tokenizer.decode(last)!r}, which is not "
            "one of the tokens that end a reply; add it to model.stop"
        )
    return end


def _first_end(chat: Chat, text: str, start: int) -> tuple[int, int, int] | None:
    """Offset, id and end of the first end token behind `start`."""
    found = [
        (place, end_id, place + len(end))
        for end_id, end in chat.stop_texts
        if (place := text.find(end, start)) >= 0
    ]
    return min(found, default=None)


def _forgets(message: Message, text: str) -> bool:
    """Whether the whole conversation no longer shows what was thought, as after a message of the
    user or the harness inside the turn."""
    return message.reasoning is not None and message.reasoning.strip() not in text


def _check_kept(message: Message, text: str, *, rest: str) -> None:
    for kind, wanted in (
        ("answer", message.content.strip()),
        *(("tool call", call.name) for call in message.tool_calls),
    ):
        if wanted in text:
            continue
        if wanted in rest:
            raise DataError(
                f"a recorded {kind} holds the text of an end token, so a student could not write "
                f"it to its end: {wanted[:80]!r}"
            )
        raise DataError(
            f"the chat template does not write a recorded {kind} as it is: {wanted[:80]!r} became "
            f"{text[:80]!r}; leave the turn out, or use a model whose template can"
        )
