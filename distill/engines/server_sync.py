"""How published weights reach a server, and the proof that they did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

import httpx

from distill.calls import Unusable, read_json
from distill.engines.publishing import Arrivals, Probe, read_probe
from distill.engines.server_answers import PromptReader
from distill.engines.server_handshake import MODELS, models_of
from distill.engines.server_requests import COMPLETIONS, scoring_body
from distill.errors import ConfigError, EngineError
from distill.replicas import Replicas
from distill.types import CheckpointRef

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RPC, RESET = "/collective_rpc", "/reset_prefix_cache"
NO_LORA = {
    404: "start the server with --enable-lora, a --max-lora-rank of at least the adapter's rank, "
    "and with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment",
    400: "check that the server was started with --enable-lora and a --max-lora-rank of at least "
    "the adapter's rank, that it serves the adapter's base, and that it sees the folder (engine."
    "path_here, engine.path_there)",
    500: "check that the server serves the adapter's base, with a --max-lora-rank of at least the "
    "adapter's rank, and that it sees the folder (engine.path_here, engine.path_there)",
}
NO_RPC = {
    404: "start the server with VLLM_SERVER_DEV_MODE=1 in its environment, on an address that only "
    "this machine reaches",
    500: "check that the server serves this very architecture and that it sees the folder "
    "(engine.path_here, engine.path_there)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """Published weights on their way."""

    name: str
    """What requests are sent to once they have arrived."""
    path: str
    """Their folder as the servers see it."""
    version: int
    probe: Probe


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """Brings weights to servers of the model `base`. See `ServerOptions` for the rest."""

    base: str
    how: Literal["adapter", "reload", "none"]
    here: str
    there: str
    tolerance: float
    arrivals: dict[str, Arrivals] = field(default_factory=dict)
    """What each server said last."""

    def prepare(self, checkpoint: CheckpointRef) -> Delivery:
        """Check that a checkpoint can be delivered at all. ConfigError or EngineError if not."""
        require_kind(self.how, checkpoint.kind)
        probe = read_probe(checkpoint.path)
        if probe is None:
            raise EngineError(
                f"{checkpoint.path} holds no probe of its weights, so nobody could tell whether a "
                "server has them; publish them with distill.engines.publishing.publish"
            )
        name = self.base
        if self.how == "adapter":
            # A new name per weights: under an old one a server may answer from its prefix cache.
            name = f"distill-v{checkpoint.policy_version}-{checkpoint.digest[:12]}"
        return Delivery(
            name=name,
            path=self._seen_there(checkpoint.path),
            version=checkpoint.policy_version,
            probe=probe,
        )

    def deliver(self, one: Replicas, new: Delivery) -> float:
        """Bring the weights to one server and compare; the mean difference found, in nats.

        Raises EngineError, also when the server says that all went well but has other weights.
        """
        if self.how == "adapter":
            self._deliver_adapter(one, new)
        elif self.how == "reload":
            body = {"method": "reload_weights", "kwargs": {"weights_path": new.path}}
            one.post(RPC, [body], _anything, hints=NO_RPC)
            one.post(RESET, [{}], _was_reset, hints=NO_RPC)
        (url,) = one.urls
        return self.arrivals.setdefault(url, Arrivals()).require(
            new.probe,
            self._found(one, new),
            tolerance=self.tolerance,
            engine=f"engine at {url}",
        )

    def holds(self, one: Replicas, sent: Delivery) -> bool:
        """Whether a server has the weights now."""
        found = self._found(one, sent)
        try:
            sent.probe.require(found, tolerance=self.tolerance, engine=one.urls[0])
        except EngineError:
            return False
        return True

    def forget(self, replicas: Replicas, old: Delivery) -> None:
        """Make room for further adapters where an old one is still listed."""
        if self.how != "adapter":
            return
        for url in replicas.urls:
            one = replicas.only(url)
            if old.name in one.get(MODELS, models_of):
                one.post(UNLOAD, [{"lora_name": old.name}], _anything, hints=NO_LORA)

    def _deliver_adapter(self, one: Replicas, new: Delivery) -> None:
        if new.name not in one.get(MODELS, models_of, patient=True):
            body = {"lora_name": new.name, "lora_path": new.path}
            one.post(LOAD, [body], _anything, hints=NO_LORA)
        listed = one.get(MODELS, models_of, patient=True)
        if new.name not in listed:
            raise EngineError(
                f"engine at {one.urls[0]} took the adapter {new.name}, but lists only "
                f"{', '.join(listed)}; see its log"
            )

    def _found(self, one: Replicas, sent: Delivery) -> list[tuple[float, ...]]:
        """What a server says of the probe's sequences."""
        found = []
        for row in sent.probe.token_ids:
            # One by one: vLLM's CPU build with adapters dies of two at once, see ServerOptions.
            reader = PromptReader(prompt=row, positions=tuple(range(1, len(row))))
            found += one.post(COMPLETIONS, [scoring_body(sent.name, row)], reader)
        return [scores.logprobs for scores in found]

    def _seen_there(self, path: Path) -> str:
        path = path.resolve()
        if not self.here:
            return str(path)
        here = Path(self.here).resolve()
        if not path.is_relative_to(here):
            raise ConfigError(
                f"weights are published in {path}, which does not lie in engine.path_here = "
                f"{self.here!r}; set it to a folder that holds the home of the runs"
            )
        return str(PurePath(self.there) / path.relative_to(here))


def require_kind(how: str, kind: str) -> None:
    """ConfigError unless weights of this kind can be delivered in this way."""
    if how != "none" and (how == "adapter") != (kind == "adapter"):
        wanted = "adapter" if kind == "adapter" else "reload"
        raise ConfigError(
            f'engine.sync = "{how}" cannot deliver weights of model.kind = "{kind}"; set '
            f'engine.sync = "{wanted}"'
        )


def _anything(response: httpx.Response) -> None:
    """Status 200 says it all."""


def _was_reset(response: httpx.Response) -> None:
    data: Any = read_json(response) if response.content else {}
    if isinstance(data, Mapping) and data.get("success") is False:
        raise Unusable("its prefix cache could not be reset", "end other users of the server")
