"""The options of an OpenAI-compatible endpoint, and what its answers mean."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from distill.calls import RETRIED, retry_after
from distill.errors import ConfigError
from distill.types import Message

SECRET_HEADERS = {"authorization", "proxy-authorization", "x-api-key", "api-key", "cookie"}
RESERVED = ("messages", "prompt", "model", "n", "stream")
"""Keys of a request that belong to the model; the rest may be set through `body`."""
USABLE = {"stop", "length", "eos", None}
"""Reasons to finish after which the text is what the model wrote; others cut or replace it."""
MAX_WAIT = 30.0
SHOWN = 200
"""Characters of a server's message that an error shows."""
ECHO = 16
"""A message that shares this many characters with the prompt is not shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlackBoxOptions:
    """name = "black_box": any server that speaks the OpenAI protocol; it only writes text."""

    url: str
    """Base of the endpoint, such as "http://127.0.0.1:8000/v1"; /chat/completions is appended."""
    model: str
    """The model's name at the endpoint."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty for none. The key itself is never kept."""
    api_key_header: str = "Authorization"
    """Where the key goes: `Authorization: Bearer KEY`, or the bare key under another name."""
    timeout: float = 120.0
    """Seconds for one request, from the first byte sent to the last one read."""
    deadline: float = 3600.0
    """Seconds for everything that one step asks."""
    retries: int = 5
    """Failed or incomplete answers that are forgiven per prompt."""
    backoff: float = 1.0
    """Seconds before the first new try, doubled each time, at most 30; Retry-After is obeyed."""
    concurrency: int = 8
    """Requests under way at once."""
    per_request: int = 0
    """Texts asked for in one request; 0 asks for all, 1 suits servers that ignore `n`."""
    continue_mode: Literal["chat", "completions"] = "chat"
    """How a begun reply is continued: `chat` sends `continue_final_message` (vLLM and others),
    `completions` sends the rendered text, in the student's chat template, to /completions."""
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the endpoint calls the limit of a reply."""
    seeds: bool = True
    """Send a seed per request; false for servers that refuse it."""
    headers: Mapping[str, Any] = field(default_factory=dict)
    """Further headers; none that carries a key."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of every request, such as `chat_template_kwargs`."""

    def __post_init__(self) -> None:
        _check_url(self.url)
        if self.api_key_env and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env):
            # The value is not shown: it may be the key itself, written to the wrong place.
            raise ConfigError(
                "teacher.api_key_env must be the name of an environment variable in capitals, "
                "such as OPENAI_API_KEY; the key itself never belongs into a configuration"
            )
        for name, low in (("timeout", 0.0), ("deadline", 0.0), ("backoff", 0.0)):
            if not getattr(self, name) > low:
                raise ConfigError(f"teacher.{name} must be positive, got {getattr(self, name)}")
        for name, least in (("retries", 0), ("concurrency", 1), ("per_request", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"teacher.{name} must be at least {least}, got {getattr(self, name)}"
                )
        if not self.model:
            raise ConfigError("teacher.model is empty; name a model of the endpoint")
        secret = [h for h in self.headers if h.lower() in SECRET_HEADERS]
        if secret:
            raise ConfigError(
                f"teacher.headers must not hold {secret[0]!r}: a configuration is stored; put the "
                "key into an environment variable and name it in teacher.api_key_env"
            )
        wrong = [h for h, v in self.headers.items() if not (isinstance(v, str) and v.isascii())]
        if wrong:
            raise ConfigError(f"teacher.headers.{wrong[0]} must be a string of ASCII characters")
        taken = [key for key in self.body if key in RESERVED]
        if taken:
            raise ConfigError(
                f"teacher.body must not set {taken[0]!r}; reserved are {', '.join(RESERVED)}"
            )


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "teacher.url must hold no user, password, query or fragment: a configuration is "
            "stored; a key goes into the variable that teacher.api_key_env names"
        )
    try:
        port_is_legal = parts.port != 0
    except ValueError:
        port_is_legal = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_legal:
        raise ConfigError(f'teacher.url must look like "http://127.0.0.1:8000/v1", found {url!r}')


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The usable texts of one response, and why others are missing."""

    texts: tuple[str, ...] = ()
    num_tokens: int | None = None
    trouble: str = ""
    """What was wrong, in words; empty when everything was usable."""
    advice: str = ""
    answered: bool = False
    """The model was at work, whatever became of it."""
    fatal: bool = False
    """Another try would end the same way."""
    wait: float | None = None
    """Seconds that the server asked to wait."""


def read_answer(data: Any, wanted: int) -> Answer:
    """The texts of a decoded response.

    `null` is never a text, and an empty text is one only where the model itself stopped: a reply
    that spent its tokens on thinking, or was filtered, must not look like disagreement.
    """
    choices = data.get("choices") if isinstance(data, Mapping) else None
    if not isinstance(choices, list) or not all(isinstance(c, Mapping) for c in choices):
        return Answer(
            trouble="its JSON had no list of choices",
            advice="check that teacher.url is an OpenAI-compatible endpoint",
        )
    if len(choices) > wanted:
        return Answer(
            trouble=f"it sent {len(choices)} texts when {wanted} were asked for",
            advice="set teacher.per_request = 1 or use another server",
        )
    texts, missing = [], []
    for choice in sorted(choices, key=_index):
        text, reason = _text_of(choice), choice.get("finish_reason")
        if text is None:
            missing.append(f"a text was null (finish_reason {_shown(reason)})")
        elif reason not in USABLE:
            missing.append(f"a text ended with finish_reason {_shown(reason)}")
        elif not text and reason not in ("stop", "eos"):
            missing.append(f"a text was empty with finish_reason {_shown(reason)}")
        else:
            texts.append(text)
    usage = data.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    trouble = missing[0] if missing else ""
    if not missing and len(choices) < wanted:
        trouble = f"it sent {len(choices)} of {wanted} texts"
    return Answer(
        texts=tuple(texts),
        num_tokens=count if type(count) is int and count >= 0 else None,
        trouble=trouble,
        answered=True,
        advice="switch thinking off through teacher.body, if the model thinks before it writes"
        if missing
        else "set teacher.per_request = 1, if the server ignores n",
    )


def _index(choice: Mapping[str, Any]) -> int:
    index = choice.get("index")
    return index if type(index) is int else 0


def _text_of(choice: Mapping[str, Any]) -> str | None:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, Mapping) else choice.get("text")
    return text if isinstance(text, str) else None


def _shown(value: Any) -> str:
    return repr(value)[:40]


def read_refusal(
    status: int, data: Any, header: str | None, prompt: Sequence[Message], key: str
) -> Answer:
    """What a status other than 200 means."""
    # What a server says about a wrong key often holds a part of it.
    said = "" if status in (401, 403) else server_message(data, prompt, key)
    advice = "see the server's log"
    if status in (401, 403):
        advice = "check the key in the variable that teacher.api_key_env names"
    elif status == 404:
        advice = "check teacher.model, and teacher.url, which usually ends in /v1"
    elif status in (400, 413, 422):
        advice = "the server refuses the request itself; see teacher.body, seeds, limit_field"
    elif status == 429:
        advice = "lower teacher.concurrency or raise teacher.retries"
    return Answer(
        trouble=f"it answered with status {status}{said}",
        advice=advice,
        fatal=status not in RETRIED,
        wait=retry_after(header) if status in (429, 503) else None,
    )


def server_message(data: Any, prompt: Sequence[Message], key: str) -> str:
    """`: what the server said`, short, without the key and without words of the prompt."""
    inner = data.get("error", data) if isinstance(data, Mapping) else None
    text = inner.get("message") if isinstance(inner, Mapping) else inner
    if not isinstance(text, str) or not text.strip():
        return ""
    text = " ".join(text.split())
    if key:
        text = text.replace(key, "***")
    text = text[:SHOWN]
    windows = [text[i : i + ECHO] for i in range(max(1, len(text) - ECHO + 1))]
    for message in prompt:
        words = " ".join(message.content.split())
        short = 6 <= len(words) < ECHO and words in text
        if short or any(len(w) == ECHO and w in words for w in windows):
            return " (its message repeats the prompt and is not shown)"
    return f": {text}"


def seed_of(key: str) -> int:
    """A seed that servers accept: 31 bits of a hash of the key."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little") & 0x7FFFFFFF
