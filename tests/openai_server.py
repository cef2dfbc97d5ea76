"""A real little server on the loopback that speaks vLLM's protocol over a real small model.

It samples and scores with the model itself, loads adapters and whole folders of weights, and loses
both in a restart, as vLLM does. Each fault of a server is a switch: `faults["nan"] = 2` spoils two
answers.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from distill.engines.hf import HFEngine
from distill.models import load_adapter, load_model
from distill.policy import Policy
from distill.types import Sampling, StopReason
from helpers import make_chat, make_model

NAME = "tiny"
SPOILED = (
    "null",
    "nan",
    "few",
    "fewer_candidates",
    "missing_token",
    "impossible",
    "foreign",
    "no_choices",
    "not_json",
    "aborted",
    "other_prompt",
    "no_ids",
)


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that are cut are part of the tests."""


_MAKING = threading.Lock()
"""Models are made from torch's one global generator, which two servers must not share."""


class ModelServer:
    """Serves `make_model(seed)` under NAME. A context manager; `restart` keeps the port."""

    def __init__(
        self,
        seed: int = 0,
        *,
        tokenizer: Any = None,
        name: str = NAME,
        cap: int = 20,
        max_model_len: int = 64,
        logprobs_mode: str = "raw_logprobs",
        key: str = "",
        model: Any = None,
        may_load: bool = True,
    ) -> None:
        self.seed, self.name, self.cap, self.key = seed, name, cap, key
        self.tokenizer = tokenizer or make_chat().tokenizer
        self.max_model_len, self.logprobs_mode = max_model_len, logprobs_mode
        self.may_load = may_load
        self.faults: dict[str, int] = {}
        self.slow = 0.0
        """Seconds before every completion."""
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.on_request: Callable[[int], None] = lambda number: None
        """Told the number of each completion request, from 1, before it is answered."""
        self.most_at_once = 0
        self.starts = 0
        self._make = (lambda: model) if model is not None else (lambda: make_model(seed))
        self._now = 0
        self._port = 0
        self._lock = threading.RLock()
        self._count = threading.Lock()
        self._open: set[socket.socket] = set()

    # -- life ------------------------------------------------------------------------------

    def __enter__(self) -> ModelServer:
        self.start()
        return self

    def __exit__(self, *failed: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._model = self._make()
        self._policies = {self.name: Policy(self._model, base="b", trainable=False)}
        self.starts += 1
        self._http = _Http(("127.0.0.1", self._port), _handler(self))
        self._port = self._http.server_port
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.005}
        )
        self._thread.start()

    def stop(self) -> None:
        """Die: no further connection, and those that are open break."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def restart_soon(self, away: float = 0.1) -> None:
        """Die at once and come back later, without what it was told."""
        self.stop()
        threading.Timer(away, self.start).start()

    @property
    def completions(self) -> list[Any]:
        return [body for path, body in self.asked if path == "/v1/completions"]

    # -- answers ---------------------------------------------------------------------------

    def answer(self, path: str, body: Any) -> Any:
        with self._count:
            self.asked.append((path, body))
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            if path == "/v1/completions":
                self.on_request(len(self.completions))
                time.sleep(self.slow)
            with self._lock, torch.no_grad():
                return self._route(path, body)
        finally:
            with self._count:
                self._now -= 1

    def _route(self, path: str, body: Any) -> Any:
        if path == "/health":
            return {}
        if path == "/v1/models":
            first = {"id": self.name, "max_model_len": self.max_model_len}
            return {"data": [first, *({"id": n} for n in self._policies if n != self.name)]}
        if path == "/tokenize":
            ids = self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return {"tokens": ids, "count": len(ids)}
        if path == "/v1/completions":
            return self._complete(body)
        if not self.may_load:
            raise Refused(404, "Not Found")
        if path == "/v1/load_lora_adapter":
            return self._load_adapter(body["lora_name"], Path(body["lora_path"]))
        if path == "/v1/unload_lora_adapter":
            if self._policies.pop(body["lora_name"], None) is None:
                raise Refused(404, "the adapter cannot be found")
            return {}
        if path == "/collective_rpc" and body["method"] == "reload_weights":
            if not self._spoils("deaf"):
                model = load_model(body["kwargs"]["weights_path"])
                self._policies[self.name] = Policy(model, base="b", trainable=False)
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            return {"success": not self._spoils("busy")}
        raise Refused(404, "Not Found")

    def _load_adapter(self, name: str, path: Path) -> dict[str, Any]:
        if name in self._policies:
            raise Refused(400, f"the adapter {name} has already been loaded")
        if not path.is_dir():
            raise Refused(404, f"no adapter found for {path}")
        if self._spoils("deaf"):
            self._policies[name] = self._policies[self.name]  # says yes and keeps the base
        elif not self._spoils("silent"):
            with _MAKING:
                model = load_adapter(self._make(), path, trainable=False)
            self._policies[name] = Policy(model, base="b", kind="adapter", trainable=False)
        return {}

    def _spoils(self, fault: str) -> bool:
        if self.faults.get(fault, 0) <= 0:
            return False
        self.faults[fault] -= 1
        return True

    def _complete(self, body: dict[str, Any]) -> Any:
        policy = self._policies.get(body["model"])
        if policy is None:
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        if self._spoils("error"):
            raise Refused(500, "EngineCore encountered an issue")
        if self._spoils("busy_now"):
            raise Refused(429, "too many requests")
        prompt = body["prompt"]
        vocab = policy.head().vocab_size
        if max(prompt) >= vocab:
            raise Refused(400, f"Token id {max(prompt)} is out of vocabulary")
        if len(prompt) + 1 > self.max_model_len:
            raise Refused(400, f"maximum context length is {self.max_model_len} tokens")
        for k in (body.get("prompt_logprobs") or 0, body.get("logprobs") or 0):
            if self.cap >= 0 and k > self.cap:
                raise Refused(
                    400, f"Requested logprobs of {k}, which is greater than max allowed: {self.cap}"
                )
        choices = self._sample(policy, body)
        if body.get("prompt_logprobs") is not None:
            choices[0]["prompt_logprobs"] = _prompt_logprobs(policy, body)
        return self._spoil({"choices": choices, "model": body["model"]}, vocab)

    def _sample(self, policy: Policy, body: dict[str, Any]) -> list[dict[str, Any]]:
        engine, n = HFEngine(policy), body.get("n", 1)
        if body["temperature"] == 0 and n != 1:
            raise Refused(400, "n must be 1 when using greedy sampling")
        if not 0 <= body["temperature"] <= 2:
            raise Refused(400, "temperature must be in [0, 2]")
        stops = list(body.get("stop_token_ids", ()))
        if not body.get("ignore_eos"):
            stops.append(self.tokenizer.eos_token_id)
        limit = min(body["max_tokens"], self.max_model_len - len(body["prompt"]))
        found = []
        for g in range(n):
            sampling = Sampling(
                max_new_tokens=limit,
                temperature=body["temperature"],
                top_p=body.get("top_p", 1.0),
                top_k=max(body.get("top_k", 0), 0),
                stop_token_ids=tuple(stops),
                keys=(str(body.get("seed", 0) + g),),  # as vLLM seeds the samples of a request
            )
            ((sample,),) = engine.generate([body["prompt"]], sampling)
            ids, values = list(sample.token_ids), list(sample.logprobs)
            if self.logprobs_mode == "raw_logprobs":
                values = _plain(policy, body["prompt"], ids)
            choice: dict[str, Any] = {
                "index": g,
                "text": self.tokenizer.decode(ids),
                "finish_reason": "stop" if sample.stop == StopReason.STOP else "length",
            }
            if body.get("return_token_ids"):
                choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
            if body.get("logprobs") is not None:
                as_ids = body.get("return_tokens_as_token_ids")
                names = [f"token_id:{i}" if as_ids else self.tokenizer.decode([i]) for i in ids]
                choice["logprobs"] = {"tokens": names, "token_logprobs": values}
            found.append(choice)
        return found

    def _spoil(self, answer: dict[str, Any], vocab: int) -> Any:
        """The answer with whichever fault is switched on."""
        fault = next((f for f in SPOILED if self._spoils(f)), "")
        choice = answer["choices"][0]
        rows = choice.get("prompt_logprobs")
        owns = [row.pop("own") for row in rows or () if row]
        values = choice.get("logprobs", {}).get("token_logprobs")
        wrong = {"null": None, "nan": float("nan"), "impossible": -9999.0}
        if fault in wrong and rows:
            rows[-1][owns[-1]]["logprob"] = wrong[fault]
        elif fault in wrong:
            values[-1] = wrong[fault]
        elif fault == "few":
            (rows or values).pop()
        elif fault == "fewer_candidates":
            rows[-1] = {owns[-1]: rows[-1][owns[-1]]}
        elif fault == "missing_token":
            del rows[-1][owns[-1]]
        elif fault == "foreign" and rows:
            rows[-1][str(vocab + 5)] = {"logprob": -0.01}
        elif fault == "foreign":
            choice["token_ids"][0] = vocab + 5
            choice["logprobs"]["tokens"][0] = f"token_id:{vocab + 5}"
        elif fault == "no_choices":
            return {"choices": None}
        elif fault == "not_json":
            return b"<html>busy</html>"
        elif fault == "aborted":
            choice["finish_reason"] = "abort"
        elif fault == "other_prompt":
            choice["prompt_token_ids"] = [2, *choice["prompt_token_ids"]]
        elif fault == "no_ids":
            choice["token_ids"] = None
        return answer


def _log_probs(policy: Policy, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(policy.model(torch.tensor([ids])).logits[0].float(), -1)


def _plain(policy: Policy, prompt: list[int], ids: list[int]) -> list[float]:
    """Log-probabilities of sampled ids at temperature 1."""
    found = _log_probs(policy, [*prompt, *ids])
    return [float(found[len(prompt) + t - 1, i]) for t, i in enumerate(ids)]


def _prompt_logprobs(policy: Policy, body: dict[str, Any]) -> list[Any]:
    """Best k ids per token, and the token's own where it is not among them; the first is null."""
    prompt, k = body["prompt"], body["prompt_logprobs"]
    found = _log_probs(policy, prompt)
    rows: list[Any] = [None]
    for t, token in enumerate(prompt[1:]):
        best = found[t].topk(k).indices.tolist() if k else []
        # The token's own entry comes first, whatever its rank is.
        ids = dict.fromkeys([token, *best])
        row: dict[str, Any] = {str(i): {"logprob": float(found[t, i]), "rank": 1} for i in ids}
        rows.append({**row, "own": str(token)})
    return rows


def _handler(server: ModelServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            server._open.add(self.connection)

        def finish(self) -> None:
            server._open.discard(self.connection)
            with suppress(OSError):
                super().finish()

        def do_GET(self) -> None:
            self._send(None)

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            self._send(json.loads(self.rfile.read(size)))

        def _send(self, body: Any) -> None:
            server.headers.append(dict(self.headers.items()))
            status, found = 200, None
            if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
                status, found = 401, {"error": {"message": f"wrong key, not {server.key}"}}
            else:
                try:
                    found = server.answer(self.path, body)
                except Refused as refused:
                    status = refused.status
                    found = {"error": {"message": refused.message, "code": status}}
            raw = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", "0.05")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler
