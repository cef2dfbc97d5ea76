"""An embedder behind an OpenAI-compatible endpoint (`POST URL/embeddings`).

Neither the texts nor the key reach a log or an error.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from distill.errors import ConfigError, SkillBankError
from skills.embed import Vectors, require_text, unit_rows

logger = logging.getLogger(__name__)
RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
MAX_WAIT = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointOptions:
    """name = "endpoint": any server with /embeddings."""

    url: str
    """Base of the endpoint, such as "http://127.0.0.1:8000/v1"."""
    model: str
    version: str = "1"
    """Change it when the server answers with other weights under the same name."""
    dimension: int = 0
    """What to expect; 0 takes what the first answer has."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty for none."""
    timeout: float = 60.0
    """Seconds for one request."""
    deadline: float = 600.0
    """Seconds for everything that one call asks."""
    retries: int = 5
    backoff: float = 1.0
    """Seconds before the first new try, doubled each time, at most 30; Retry-After is obeyed."""
    batch: int = 64
    """Texts of one request."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError(
                "embedder.url must hold no user, password, query or fragment: a configuration is "
                "stored; a key goes into the variable that embedder.api_key_env names"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f'embedder.url must look like "http://127.0.0.1:8000/v1", found {self.url!r}'
            )
        if not self.model:
            raise ConfigError("embedder.model is empty; name a model of the endpoint")
        if self.api_key_env and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env):
            # The value is not shown: it may be the key itself, written to the wrong place.
            raise ConfigError(
                "embedder.api_key_env must be the name of an environment variable in capitals"
            )
        for name in ("timeout", "deadline", "backoff"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"embedder.{name} must be positive, got {getattr(self, name)}")
        for name, least in (("retries", 0), ("batch", 1), ("dimension", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"embedder.{name} must be at least {least}, got {getattr(self, name)}"
                )


class EndpointEmbedder:
    """Asks in batches, one after the other; a failed request is tried again until the deadline.

    ConfigError when the variable with the key is not set.
    """

    def __init__(self, options: EndpointOptions) -> None:
        self.options = options
        self.name = f"endpoint:{options.model}"
        self.version = options.version
        self._dimension = options.dimension
        self._key = ""
        if options.api_key_env:
            self._key = os.environ.get(options.api_key_env, "").strip()
            if not self._key:
                raise ConfigError(
                    f"the variable {options.api_key_env}, named by embedder.api_key_env, is not set"
                )
        host = urlsplit(options.url).hostname or ""
        if self._key and options.url.startswith("http:") and host not in LOOPBACK:
            logger.warning("the key for %s travels unencrypted; use https", host)

    @property
    def dimension(self) -> int:
        if not self._dimension:
            self.embed(["dimension"])
        return self._dimension

    def embed(self, texts: Sequence[str]) -> Vectors:
        if not texts:
            return np.zeros((0, self.dimension), dtype=np.float32)
        require_text(texts, source=self.name)
        ends_at = time.monotonic() + self.options.deadline
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        rows: list[Any] = []
        with httpx.Client(headers=headers, follow_redirects=False) as client:
            for start in range(0, len(texts), self.options.batch):
                rows += self._ask(client, texts[start : start + self.options.batch], ends_at)
        return unit_rows(rows, source=f"{self.name} at {self.options.url}")

    def _ask(self, client: httpx.Client, texts: Sequence[str], ends_at: float) -> list[list[float]]:
        trouble = "no request was made"
        for attempt in range(self.options.retries + 1):
            left = ends_at - time.monotonic()
            if left <= 0:
                break
            try:
                response = client.post(
                    f"{self.options.url.rstrip('/')}/embeddings",
                    json={
                        "model": self.options.model,
                        "input": list(texts),
                        "encoding_format": "float",
                    },
                    timeout=min(self.options.timeout, left),
                )
            except httpx.HTTPError as error:
                trouble, wait = f"{type(error).__name__} while asking", None
            else:
                if response.status_code == 200:
                    return self._read(response, len(texts))
                trouble = f"it answered with status {response.status_code}"
                if response.status_code not in RETRIED:
                    raise self._failed(trouble, "check embedder.url, embedder.model and the key")
                wait = _retry_after(response.headers.get("Retry-After"))
            pause = min(MAX_WAIT, self.options.backoff * 2**attempt if wait is None else wait)
            if attempt < self.options.retries:
                time.sleep(max(0.0, min(pause, ends_at - time.monotonic())))
        raise self._failed(
            f"{trouble}, after {self.options.retries + 1} tries or {self.options.deadline:g} s",
            "see the server's log, or raise embedder.retries and embedder.deadline",
        )

    def _read(self, response: httpx.Response, wanted: int) -> list[list[float]]:
        try:
            data = response.json()
        except ValueError:
            data = None
        entries = data.get("data") if isinstance(data, Mapping) else None
        if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
            raise self._failed("its JSON had no list `data`", "check embedder.url; it ends in /v1")
        if len(entries) != wanted:
            raise self._failed(f"it sent {len(entries)} vectors for {wanted} texts", "see its log")
        places = [entry.get("index", place) for place, entry in enumerate(entries)]
        if sorted(p for p in places if type(p) is int) != list(range(wanted)):
            raise self._failed("its vectors carry wrong indexes", "see its log")
        rows: list[list[float]] = [[]] * wanted
        for place, entry in zip(places, entries, strict=True):
            rows[place] = self._vector(entry.get("embedding"))
        return rows

    def _vector(self, value: Any) -> list[float]:
        numbers = isinstance(value, list) and all(type(x) in (int, float) for x in value)
        if not numbers or not value or not all(map(math.isfinite, value)):
            raise self._failed("a vector was not a list of finite numbers", "see its log")
        if self._dimension and len(value) != self._dimension:
            raise self._failed(
                f"a vector has {len(value)} dimensions, expected {self._dimension}",
                "another model answers: change embedder.version and embedder.dimension, the bank "
                "is then embedded anew",
            )
        self._dimension = len(value)
        return [float(x) for x in value]

    def _failed(self, trouble: str, advice: str) -> SkillBankError:
        where = f"the embedder {self.options.model} at {self.options.url}"
        return SkillBankError(f"{where} failed: {trouble}; {advice}")


def _retry_after(header: str | None) -> float | None:
    try:
        seconds = float(header) if header else None
    except ValueError:
        return None
    return seconds if seconds is not None and math.isfinite(seconds) and seconds >= 0 else None
