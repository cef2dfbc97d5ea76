"""What a remote teacher is told, and what its servers say about themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from distill.calls import CallRules, Unusable, check_key_name, check_urls, read_json
from distill.errors import ConfigError, DataError
from teachers.scoring import HALVES, PROTOCOL, require


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """name = "remote": a model behind `distill teacher serve`, on this machine or another one."""

    urls: tuple[str, ...]
    """Addresses of equal servers, such as ["http://127.0.0.1:8790"]."""
    model: str = ""
    """The name that the servers must give their model; empty takes any."""
    api_key_env: str = ""
    """Environment variable that holds the token; empty for none. The token itself is never kept."""
    timeout: float = 300.0
    """Seconds for one request, from the first byte sent to the last one read."""
    deadline: float = 3600.0
    """Seconds for everything that one step asks; so long a server may be away."""
    retries: int = 5
    """Unusable answers that are forgiven per request."""
    backoff: float = 1.0
    """Seconds before the first new try, doubled each time, at most 30; Retry-After is obeyed."""
    concurrency: int = 2
    """Requests under way at once, per server; a server computes one at a time."""
    batch_tokens: int = 16384
    """Tokens of one request, padding included."""
    cache: bool = False
    """Keep scores under `cache/scores` of the home folder and never ask for the same ones again."""
    cache_gib: float = 8.0
    """Most that the cache may hold; the oldest scores go first."""

    def __post_init__(self) -> None:
        check_urls(self.urls, "teacher.urls")
        check_key_name(self.api_key_env, "teacher")
        if self.batch_tokens < 1 or not self.cache_gib > 0:
            raise ConfigError(
                "teacher.batch_tokens and teacher.cache_gib must be positive, got "
                f"{self.batch_tokens} and {self.cache_gib:g}"
            )
        _ = self.rules  # says what makes no sense before anything runs

    @property
    def rules(self) -> CallRules:
        return CallRules(
            timeout=self.timeout,
            deadline=self.deadline,
            retries=self.retries,
            backoff=self.backoff,
            concurrency=self.concurrency,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What a server says about itself; see `Scorer.info`."""

    model: str
    weights: str
    tokenizer: str
    num_ids: int
    width: int
    dtype: str
    head: Mapping[str, Any]
    limits: Mapping[str, Any]

    @classmethod
    def read(cls, response: httpx.Response) -> Served:
        """The description in an answer to /info. Unusable when it is not one of ours."""
        data = read_json(response)
        known = {name: (kind,) for name, kind in _INFO.items()}
        try:
            if not isinstance(data, dict) or data.get("protocol") != PROTOCOL:
                raise DataError("it does not speak this protocol")
            require(data, known)
            require(data["limits"], dict.fromkeys(LIMITS, (int,)))
            require(data["head"], _HEAD)
            if min(data["num_ids"], data["width"], *(data["limits"][n] for n in LIMITS)) < 1:
                raise DataError("one of its sizes or limits is not positive")
        except DataError as error:
            raise Unusable(
                f"it is no scoring endpoint of this version ({error})",
                "teacher.urls must name servers started by `distill teacher serve`; for others "
                'see teacher.name = "server" and "black_box"',
                fatal=True,
            ) from None
        return cls(**{name: data[name] for name in _INFO})

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of hidden states, or of the head."""
        return self.width * (2 if self.dtype in HALVES else 4)

    @property
    def identity(self) -> tuple[str, str, int, int]:
        """What equal servers agree on."""
        return self.weights, self.tokenizer, self.num_ids, self.width


_INFO: Mapping[str, type] = {
    "model": str,
    "weights": str,
    "tokenizer": str,
    "num_ids": int,
    "width": int,
    "dtype": str,
    "head": dict,
    "limits": dict,
}
LIMITS = ("max_request_bytes", "max_answer_bytes", "max_views", "max_tokens")
_HEAD: Mapping[str, tuple[type, ...]] = {
    "bias": (bool,),
    "scale": (float, int),
    "soft_cap": (float, int, type(None)),
}
