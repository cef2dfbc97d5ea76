"""Tasks, groups of rollouts and what views show of them, for the tests of views."""

from __future__ import annotations

import string

from distill.models import char_tokenizer
from distill.tokens import Chat
from distill.types import Message, Task
from helpers import ALPHABET, make_rollout

WIDE = ALPHABET + "".join(c for c in string.printable if c not in ALPHABET)


def wide_chat(template=None):
    """A character tokenizer that can also write the default templates."""
    tokenizer = char_tokenizer(WIDE)
    if template is not None:
        tokenizer.chat_template = template
    return Chat(tokenizer, max_length=64)


def make_task(content="ab=", *, answer="ba", number="t0", before=(), after=(), **meta):
    return Task(
        id=number,
        env="e",
        domain="d",
        split="train",
        prompt=(*before, Message(role="user", content=content), *after),
        answer=answer,
        meta=meta,
    )


def ids_of(chat, text):
    """Token ids of a reply with its end token."""
    return chat.replies([text])[0]


def group_of(chat, task, *replies):
    """Rollouts of one group: a reply and its reward each, or a reply, reward and other fields."""
    return [
        make_rollout(
            chat.prompt(task.prompt),
            ids_of(chat, text),
            name=task.id,
            traj_id=f"{task.id}/{i}",
            index=i,
            reward=reward,
            **(more[0] if more else {}),
        )
        for i, (text, reward, *more) in enumerate(replies)
    ]


def prompt_text(chat, view):
    return chat.decode(view.token_ids[: view.positions[0]])


def reply_ids(view):
    return [view.token_ids[p] for p in view.positions]


def read(view, chat, rollouts, contexts=None):
    """Prompt text per row, None where there is no view; the responses are compared on the way."""
    built = view.build(rollouts, contexts or {})
    for rollout, one in zip(rollouts, built, strict=True):
        if one is not None:
            trained = zip(rollout.token_ids, rollout.completion_mask, strict=True)
            assert reply_ids(one) == [t for t, m in trained if m]
            assert one.kind == view.kind
    return [None if one is None else prompt_text(chat, one) for one in built]


def make_view(cls, task, chat, **options):
    return cls(chat=chat, task_of=lambda _: task, **options)
