"""The bytes that each token of a tokenizer stands for.

Tokens of different tokenizers can only be compared by the bytes that they spell. A token is never
decoded by itself: half a character has no text, but it has bytes. Special tokens spell nothing.

    byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM)   one printable character per byte
    SentencePiece (Llama 2, Gemma, Mistral)         a mark for a blank, `<0xE2>` for a lone byte
    plain                                           the token's own characters
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from distill.errors import ConfigError

BLANK = "\u2581"
"""How SentencePiece writes a blank."""
_LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LOSSY = ("WordPiece", "BPEDecoder", "CTC")
"""Decoders that guess where blanks stood: their tokens do not spell the text."""


def byte_characters() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: printable ones stand for themselves,
    the others for characters from 256 on, in order."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    found = {chr(byte): byte for byte in own}
    others = (byte for byte in range(256) if byte not in own)
    return found | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """`pieces[id]` is what a token spells: bytes, or None for a special token and an unused id.

    Raises ConfigError for a tokenizer whose tokens do not spell the text, such as WordPiece.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer = tokenizer
        self.name = name
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"the tokenizer of {name} is {type(tokenizer).__name__}, which does not say what "
                "its tokens are made of; use a fast tokenizer (a folder with tokenizer.json)"
            )
        parts = {type(backend.model).__name__, *_kinds(_state(backend.decoder))}
        lossy = sorted(parts & set(_LOSSY))
        if lossy:
            raise ConfigError(
                f"the tokens of {name} do not spell out the text: its tokenizer ({lossy[0]}) drops "
                "blanks, so tokens of two tokenizers cannot be aligned byte by byte; use a model "
                "with a byte-level or SentencePiece tokenizer"
            )
        self.is_byte_level = "ByteLevel" in parts
        self.has_lone_bytes = "ByteFallback" in parts or bool(
            getattr(backend.model, "byte_fallback", False)
        )
        self.marks_blanks = "Metaspace" in parts or BLANK in json.dumps(
            _state(backend.decoder), ensure_ascii=False
        )
        self.pieces = self._all_pieces()

    def of(
        self, token_ids: Iterable[int], skip: frozenset[int] = frozenset()
    ) -> list[bytes | None]:
        """What each id spells; None for those of `skip`, special tokens and unknown ids."""
        size = len(self.pieces)
        return [None if i in skip or i >= size else self.pieces[i] for i in token_ids]

    def encode(self, text: str) -> tuple[list[int], list[bytes | None]]:
        """Ids of a text and what they spell; no special token is added, or read out of the text.

        A blank that a SentencePiece tokenizer puts in front of every text is not counted.
        """
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        token_ids = list(encoded["input_ids"])
        pieces = self.of(token_ids)
        if pieces and self.marks_blanks and not text.startswith(" "):
            first = pieces[0]
            if first is not None and first.startswith(b" "):
                pieces[0] = first[1:]
        return token_ids, pieces

    def _all_pieces(self) -> Sequence[bytes | None]:
        table = byte_characters() if self.is_byte_level else {}
        vocab: dict[str, int] = self.tokenizer.get_vocab()
        pieces: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
        for token, index in vocab.items():
            pieces[index] = self._spelt(token, table)
        for index, added in self.tokenizer.added_tokens_decoder.items():
            pieces[index] = None if added.special else str(added.content).encode()
        for index in self.tokenizer.all_special_ids:
            pieces[index] = None
        return pieces

    def _spelt(self, token: str, table: dict[str, int]) -> bytes | None:
        if table:
            found = [table.get(c) for c in token]
            return None if None in found else bytes(b for b in found if b is not None)
        if self.has_lone_bytes and (lone := _LONE_BYTE.fullmatch(token)):
            return bytes([int(lone[1], 16)])
        return (token.replace(BLANK, " ") if self.marks_blanks else token).encode()


def _state(part: Any) -> Any:
    """The settings of a part of a tokenizer; None where it has no such part."""
    return None if part is None else json.loads(part.__getstate__())


def _kinds(state: Any) -> set[str]:
    """Names of a decoder and of those that it is made of."""
    if not isinstance(state, dict):
        return set()
    return {str(state.get("type"))}.union(*map(_kinds, state.get("decoders", ())))
