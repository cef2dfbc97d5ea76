"""What text models of ours have in common: texts with their cost, prefixes, checked requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from distill.errors import ConfigError
from distill.tokens import Chat
from distill.types import Message, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a text model wrote for one prompt."""

    texts: tuple[str, ...]
    num_tokens: int | None
    """Tokens it took, all texts together; None where nobody counted them."""


@runtime_checkable
class CountingModel(Protocol):
    """A text model that also says how much it wrote."""

    def write(
        self, prompts: Sequence[Sequence[Message]], n: int, sampling: Sampling
    ) -> list[Written]: ...  # [P], n texts each


def is_continued(prompt: Sequence[Message]) -> bool:
    """A prompt that ends with words of the assistant is continued, not answered."""
    return prompt[-1].role == "assistant"


def check_request(prompts: Sequence[Sequence[Message]], n: int, sampling: Sampling) -> None:
    """ConfigError for a request that no text model can honour."""
    if n < 1 or sampling.max_new_tokens < 1:
        raise ConfigError(
            "a text model needs n and sampling.max_new_tokens of at least 1, got "
            f"{n} and {sampling.max_new_tokens}"
        )
    if not all(prompts):
        raise ConfigError("every prompt of a text model needs at least one message, one has none")
    if sampling.keys and len(sampling.keys) != len(prompts):
        raise ConfigError(
            f"sampling.keys needs one key per prompt ({len(prompts)}), got {len(sampling.keys)}"
        )


def split_text(chat: Chat, token_ids: Sequence[int], at: int) -> tuple[str, str]:
    """Text before token `at`, and the text that the tokens from there on add to it.

    Both come from decoding the whole, so that a leading space stays where it belongs; a character
    that the cut would tear apart counts to the second part.
    """
    before = chat.tokenizer.decode(list(token_ids[:at]), skip_special_tokens=True)
    before = str(before).rstrip("\N{REPLACEMENT CHARACTER}")
    whole = chat.decode(token_ids)
    if whole.startswith(before):
        return before, whole[len(before) :]
    return before, chat.decode(token_ids[at:])
