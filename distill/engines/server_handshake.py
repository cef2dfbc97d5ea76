"""What is asked of a server before it is trusted: its model, its length, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from distill.calls import Unusable, read_json
from distill.engines.server_answers import PromptReader, SampleReader
from distill.engines.server_requests import COMPLETIONS, sampling_body, scoring_body
from distill.errors import ConfigError
from distill.replicas import Replicas
from distill.types import Sampling

HOT = 2.0
"""The highest temperature that every server takes."""
SAME = 1e-4
MODELS = "/v1/models"
TOKENIZE = "/tokenize"
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces,\ttabs\n\nand\r\nlines  ",
    "0123456789 3.14159 1,000,000 7+8=15",
    "def f(x): return {'a': [x**2, x != 0]}",
    "naïve café, Straße, Ελληνικά, русский",
    "日本語と中文 한국어 🙂👩‍💻",
    "abcdefghijklmnopqrstuvwxyz:=ABCDEFGHIJKLMNOPQRSTUVWXYZ",
)
"""What tokenizers disagree about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What all servers say of a model."""

    max_model_len: int | None
    """Most tokens of prompt and reply together; None where a server does not say."""


def models_of(response: httpx.Response) -> dict[str, Mapping[str, Any]]:
    """Name -> card of every model and adapter that a server lists."""
    data = read_json(response)
    cards = data.get("data") if isinstance(data, Mapping) else None
    if not isinstance(cards, list) or not all(isinstance(c, Mapping) for c in cards):
        raise Unusable("its JSON had no list of models", "check that the address is a vLLM server")
    return {str(card.get("id")): card for card in cards}


def base_address(url: str) -> str:
    """The address of the server itself, for those who give the one of its /v1."""
    return url.rstrip("/").removesuffix("/v1")


def handshake(replicas: Replicas, model: str, label: str, tokenizer: Any = None) -> Served:
    """Ask every server whether it has the model, how long texts may be and, where a tokenizer is
    given, whether it has the same one.

    Raises ConfigError for a model that is not listed and for another tokenizer.
    """
    lengths = []
    listed = replicas.each(MODELS, models_of, patient=True)
    for url, cards in zip(replicas.urls, listed, strict=True):
        if model not in cards:
            raise ConfigError(
                f"{label}.model is {model!r}, but {url} serves {', '.join(map(repr, cards))}; set "
                f"{label}.model to one of them, or start the server with --served-model-name"
            )
        length = cards[model].get("max_model_len")
        if type(length) is int:
            lengths.append(length)
    if tokenizer is not None:
        _same_tokenizer(replicas, model, label, tokenizer)
    return Served(max_model_len=min(lengths, default=None))


def require_processed(one: Replicas, model: str, prompt: Sequence[int], label: str) -> None:
    """ConfigError unless a server returns log-probabilities at the temperature of the request.

    It samples a token at a high temperature and then scores the same token at temperature 1.
    """
    sampling = Sampling(max_new_tokens=1, temperature=HOT)
    body = sampling_body(model, prompt, sampling, n=1, seed=1)
    reader = SampleReader(
        prompt=tuple(prompt), n=1, vocab_size=2**31, max_new_tokens=1, stop_token_ids=frozenset()
    )
    ((sample,),) = one.post(COMPLETIONS, [body], reader, patient=False)
    whole = (*prompt, *sample.token_ids)
    again = PromptReader(prompt=whole, positions=(len(prompt),))
    (plain,) = one.post(COMPLETIONS, [scoring_body(model, whole)], again, patient=False)
    if abs(sample.logprobs[0] - plain.logprobs[0]) < SAME and plain.logprobs[0] < -SAME:
        raise ConfigError(
            f"{label} at {one.urls[0]} returns log-probabilities at temperature 1 for a token that "
            f"it sampled at temperature {HOT:g}; start it with --logprobs-mode processed_logprobs, "
            "or sample at temperature 1, top_p 1, top_k 0"
        )


def require_room(longest: int, served: Served, label: str) -> None:
    """ConfigError unless that many tokens fit into the servers' limit."""
    if served.max_model_len is not None and longest > served.max_model_len:
        raise ConfigError(
            f"{label} needs room for {longest} tokens, but the server takes "
            f"{served.max_model_len}; start it with --max-model-len {longest}, or lower "
            "model.max_length or sampling.max_new_tokens"
        )


def _same_tokenizer(replicas: Replicas, model: str, label: str, tokenizer: Any) -> None:
    texts = [*TEXTS, *_own_texts(tokenizer)]
    hints = {404: "use a vLLM server, which answers /tokenize; a proxy must let it through"}
    for url in replicas.urls:
        bodies = [{"model": model, "prompt": t, "add_special_tokens": False} for t in texts]
        found = replicas.only(url).post(TOKENIZE, bodies, _tokens, patient=False, hints=hints)
        for text, theirs in zip(texts, found, strict=True):
            ours = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            if ours != theirs:
                place = next(
                    (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                    min(len(ours), len(theirs)),
                )
                raise ConfigError(
                    f"{label}.model at {url} has another tokenizer: of {text!r} the token "
                    f"{place + 1} is {_at(ours, place)} here and {_at(theirs, place)} there; "
                    "token ids must mean the same on both sides, so serve a model with the "
                    "student's tokenizer"
                )


def _own_texts(tokenizer: Any) -> list[str]:
    """The special tokens of a tokenizer, and a few of its entries from all over the vocabulary."""
    size = len(tokenizer)
    spread = [str(tokenizer.decode([i])) for i in range(0, size, max(1, size // 16))]
    return [t for t in ("".join(map(str, tokenizer.all_special_tokens)), "".join(spread)) if t]


def _tokens(response: httpx.Response) -> list[int]:
    data = read_json(response)
    found = data.get("tokens") if isinstance(data, Mapping) else None
    if not isinstance(found, list) or not all(type(i) is int for i in found):
        raise Unusable("its JSON had no list of tokens", "check that the address is a vLLM server")
    return found


def _at(ids: Sequence[int], place: int) -> str:
    return str(ids[place]) if place < len(ids) else "missing"
