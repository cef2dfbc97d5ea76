"""Text to token ids and back: chat template, stop set, and conversations that only grow.

Token in, token out: a response is never decoded and encoded again, and a conversation is extended
by appending ids. A tokenizer without a chat template gets the plain one: contents joined as they
are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from distill.errors import ConfigError, DataError
from distill.messages import tools_of
from distill.types import Message

PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Joins the contents; recognised, so that rendering it costs nothing. Of earlier replies the end
token is kept, as a model without a template has seen them."""


class Chat:
    """A tokenizer with its template and its stop set.

    `stop_token_ids` is the tokenizer's eos, every eos of the model's generation settings, and the
    tokens of the extra `stop` strings. Raises ConfigError for a stop string that is not one token
    and for a tokenizer without any stop token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop: Sequence[str] = (),
        eos_token_ids: Sequence[int] = (),
        max_length: int = 2048,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.template_kwargs = dict(template_kwargs or {})
        self.stop_token_ids = _stop_set(tokenizer, stop, eos_token_ids)
        self.pad_id = int(
            tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.stop_token_ids[0]
        )

    @property
    def end_id(self) -> int:
        """The token that ends a written reply."""
        return self.stop_token_ids[0]

    @cached_property
    def stop_texts(self) -> tuple[tuple[int, str], ...]:
        """The stop set with the text of each token; those without one are left out."""
        texts = [(i, str(self.tokenizer.decode([i]))) for i in self.stop_token_ids]
        return tuple((i, text) for i, text in texts if text)

    @cached_property
    def writes_reasoning(self) -> bool:
        """Whether the template leaves room for what an assistant thinks before it answers."""
        mark = "qzx"
        asked = Message(role="user", content="a")
        said = Message(role="assistant", content="b", reasoning=mark)
        try:
            whole, prompt = self.written([asked, said]), self.render([asked])
        except DataError:
            return False
        return mark in whole and whole.startswith(prompt)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text of a conversation, ready for the assistant's next reply."""
        return self._plain(messages) if self._is_plain() else self._apply(messages, then_reply=True)

    def written(self, messages: Sequence[Message]) -> str:
        """The text of a conversation as far as it goes, without an invitation to reply."""
        return (
            self._plain(messages) if self._is_plain() else self._apply(messages, then_reply=False)
        )

    def _plain(self, messages: Sequence[Message]) -> str:
        end = str(self.tokenizer.decode([self.end_id]))
        # As it was sampled: a reply ends with the end token.
        return "".join(m.content + end * (m.role == "assistant") for m in messages)

    def _apply(self, messages: Sequence[Message], *, then_reply: bool) -> str:
        """What the tokenizer's template writes. DataError when it refuses the conversation."""
        from jinja2 import TemplateError

        tools = tools_of(messages)
        try:
            text = self.tokenizer.apply_chat_template(
                [m.as_dict() for m in messages],
                tokenize=False,
                add_generation_prompt=then_reply,
                **({"tools": tools} if tools else {}),
                **self.template_kwargs,
            )
        except (TemplateError, TypeError) as error:
            # Templates raise what they do not support, or trip over what they do not expect.
            roles = " ".join(m.role for m in messages[-6:])
            raise DataError(
                f"the chat template cannot write a conversation of {len(messages)} messages "
                f"(the last are: {roles}): {error}; leave it out, or use a template that can"
            ) from error
        return str(text)

    def prompts(
        self, conversations: Sequence[Sequence[Message]], *, limit: int | None = None
    ) -> list[tuple[int, ...]]:
        """Token ids of each prompt. Raises DataError when one exceeds `limit`, by default
        `max_length`; 0 is no limit."""
        limit = self.max_length if limit is None else limit
        texts = [self.render(c) for c in conversations]
        encoded = [tuple(ids) for ids in self.encode(texts)]
        for text, ids in zip(texts, encoded, strict=True):
            if limit and len(ids) > limit:
                raise DataError(
                    f"a prompt has {len(ids)} tokens, but model.max_length is {limit}: "
                    f"{text[:60]!r}...; raise model.max_length or drop the task"
                )
            if not ids:
                raise DataError("a prompt has no tokens; every task needs a non-empty prompt")
        return encoded

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.prompts([messages])[0]

    def fits(self, messages: Sequence[Message], *, room: int = 0) -> bool:
        """Whether a prompt leaves at least `room` tokens of `max_length` for a reply."""
        return len(self.encode([self.render(messages)])[0]) + room <= self.max_length

    def replies(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of written replies, each closed with the end token."""
        return [(*ids, self.end_id) for ids in self.encode(texts)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids without the stop token that closed them."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def extend(
        self, token_ids: Sequence[int], messages: Sequence[Message], history: Sequence[Message]
    ) -> tuple[int, ...] | None:
        """Append an environment's messages and the next generation prompt to sampled ids.

        The suffix is what the template adds after `history` (prompt and replies so far). None for
        a template that rewrites earlier turns instead of appending: the ids cannot go on.
        """
        if self._is_plain():
            suffix = "".join(m.content for m in messages)
        else:
            before = self.written(history)
            after = self.render([*history, *messages])
            if not after.startswith(before):
                return None
            suffix = self._after_reply(before) + after[len(before) :]
        return (*token_ids, *self.encode([suffix])[0])

    def _after_reply(self, conversation: str) -> str:
        """What the template writes between the stop token of a reply and the next turn, such as a
        line break: the sampled ids end with the stop token."""
        for stop in self.stop_token_ids:
            text = str(self.tokenizer.decode([stop]))
            rest = conversation.rpartition(text)[2] if text else conversation
            if rest != conversation and not rest.strip():
                return rest
        return ""

    def _is_plain(self) -> bool:
        return self.tokenizer.chat_template in (None, "", PLAIN_TEMPLATE)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of plain texts, without any special token around them."""
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return ids


def tokenizer_digest(tokenizer: Any) -> str:
    """Hash of the map from token to id: two tokenizers with equal digests agree on every id."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    text = "\n".join(f"{index}\t{token}" for token, index in pairs)
    return hashlib.sha256(text.encode()).hexdigest()


def require_same_tokenizer(student: Any, teacher: Any, teacher_name: str) -> None:
    """Raise ConfigError unless both map the same tokens to the same ids."""
    if tokenizer_digest(student) == tokenizer_digest(teacher):
        return
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    differing = next(
        (t for t in sorted(ours, key=lambda t: ours[t]) if theirs.get(t) != ours[t]),
        next((t for t in theirs if t not in ours), "?"),
    )
    raise ConfigError(
        f"the teacher {teacher_name} has another tokenizer ({len(theirs)} tokens, the student has "
        f"{len(ours)}; first difference: {differing!r} is {ours.get(differing)} here and "
        f"{theirs.get(differing)} there); distillation on token ids needs the same "
        'one; with another one use teacher.name = "cross_tokenizer" and objective.name = "gold"'
    )


def _stop_set(tokenizer: Any, stop: Sequence[str], eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    if tokenizer.eos_token_id is not None:
        found.append(int(tokenizer.eos_token_id))
    found += [int(i) for i in eos_token_ids]
    for text in stop:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ConfigError(
                f"model.stop: {text!r} is {len(ids)} tokens, but a stop entry must be exactly one"
            )
        found.append(int(ids[0]))
    if not found:
        raise ConfigError(
            "the tokenizer has no eos token and model.stop is empty, so no reply could ever end; "
            "set model.stop to the text of the end token"
        )
    return tuple(dict.fromkeys(found))
