"""What it means to ask an HTTP server: how long and how often, and what its answers are worth."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from distill.errors import ConfigError

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
STARTING = frozenset({502, 503, 504})
"""What a server, or the gateway before it, answers while it starts."""
SHOWN = 200
"""Characters of a server's message that an error shows."""
R = TypeVar("R")


class Unusable(Exception):
    """Raised by a reader for an answer that is no use. It is asked for again, unless `fatal`."""

    def __init__(
        self,
        trouble: str,
        advice: str = "see the server's log",
        *,
        fatal: bool = False,
        down: bool = False,
        stale: bool = False,
        aside: bool = False,
        wait: float | None = None,
    ) -> None:
        super().__init__(trouble)
        self.trouble, self.advice = trouble, advice
        self.fatal = fatal
        self.down = down
        """The server is not there, or not yet."""
        self.stale = stale
        """The server has lost what it was told, as after a restart."""
        self.aside = aside or down or stale or wait is not None
        """The server itself is in trouble: others are asked meanwhile."""
        self.wait = wait
        """Seconds that the server asked to wait."""


Reader = Callable[[httpx.Response], R]
"""Turns a response of status 200 into a value, or raises `Unusable`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRules:
    """How long and how often is asked. ConfigError for what makes no sense."""

    timeout: float = 120.0
    """Seconds for one request, from the first byte sent to the last one read."""
    deadline: float = 3600.0
    """Seconds for all requests of one call; so long a server may be away."""
    retries: int = 5
    """Unusable answers that are forgiven per request. A server that is away costs none of them."""
    backoff: float = 1.0
    """Seconds before the first new try, doubled each time, at most 30; Retry-After is obeyed."""
    concurrency: int = 8
    """Requests under way at once, per server."""

    def __post_init__(self) -> None:
        for name in ("timeout", "deadline", "backoff"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name, least in (("retries", 0), ("concurrency", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")


def rules_of(options: Any, label: str) -> CallRules:
    """The rules among the fields of a section of the configuration. ConfigError names the key."""
    try:
        return CallRules(**{f.name: getattr(options, f.name) for f in fields(CallRules)})
    except ConfigError as error:
        raise ConfigError(f"{label}.{error}") from None


def check_urls(urls: Sequence[str], where: str) -> tuple[str, ...]:
    """Base addresses without a closing slash. ConfigError for none, a double or an odd one."""
    found = tuple(url.rstrip("/") for url in urls)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"{where} must name one or more different servers, found {len(found)}")
    for url in found:
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError(
                f"{where} must hold no user, password, query or fragment: a configuration is "
                "stored; a key goes into the variable that api_key_env names"
            )
        try:
            legal = parts.port != 0
        except ValueError:
            legal = False
        if parts.scheme not in ("http", "https") or not parts.hostname or not legal:
            raise ConfigError(f'{where} must look like "http://127.0.0.1:8000", found {url!r}')
    return found


def read_json(response: httpx.Response) -> Any:
    """The decoded body. Unusable when it is not JSON."""
    try:
        return json.loads(response.content)
    except ValueError:
        raise Unusable(
            "its answer was not JSON", "check that the address is the one of the server"
        ) from None


def key_of(name: str, label: str) -> str:
    """The key in the environment variable `name`, "" without one. ConfigError when it is unset.

    Read anew for each request, so that no object carries it.
    """
    if not name:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(
            f"{label}.api_key_env names the variable {name}, which is not set or empty; "
            f"export {name} before the run"
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the key in the variable {name} holds characters that no key has")
    return key


def check_key_name(name: str, label: str) -> None:
    """ConfigError unless `name` could be an environment variable, or is empty."""
    if name and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        # The value is not shown: it may be the key itself, written to the wrong place.
        raise ConfigError(
            f"{label}.api_key_env must be the name of an environment variable in capitals, such as "
            "OPENAI_API_KEY; the key itself never belongs into a configuration"
        )


def refusal(response: httpx.Response, label: str, key: str, *, revivable: bool) -> Unusable:
    """What a status other than 200 means. `revivable`: a server that knows nothing of the model
    can be told of it again."""
    status = response.status_code
    # What a server says about a wrong key often holds a part of it.
    said = "" if status in (401, 403) else _said(response, key)
    advice = "see the server's log"
    if status in (401, 403):
        advice = f"check the key in the variable that {label}.api_key_env names"
    elif status == 404:
        advice = f"check {label}.model and {label}.urls, and how the server was started"
    elif status in (400, 413, 422):
        advice = "the server refuses the request itself; see its log and its settings"
    elif status == 429:
        advice = f"lower {label}.concurrency or raise {label}.retries"
    stale = status == 404 and revivable
    wait = retry_after(response.headers.get("retry-after")) if status in (429, 503) else None
    return Unusable(
        f"it answered with status {status}{said}",
        advice,
        fatal=status not in RETRIED and not stale,
        down=status in STARTING,
        stale=stale,
        aside=status in RETRIED,
        wait=wait,
    )


def _said(response: httpx.Response, key: str) -> str:
    """`: what the server said`, short and without the key."""
    try:
        data = json.loads(response.content)
    except ValueError:
        return ""
    inner = data.get("error", data.get("detail")) if isinstance(data, dict) else None
    text = inner.get("message") if isinstance(inner, dict) else inner
    if not isinstance(text, str) or not text.strip():
        return ""
    text = " ".join(text.split())
    return ": " + (text.replace(key, "***") if key else text)[:SHOWN]


def retry_after(header: str | None) -> float | None:
    """Seconds of a Retry-After header; it may be a number or a date. None where it says nothing."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
