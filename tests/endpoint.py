"""A real HTTP server on the loopback that speaks as much of the OpenAI protocol as tests need."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Asked:
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Reply:
    status: int = 200
    body: Any = None
    """Sent as JSON; bytes are sent as they are."""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Endpoint:
    """Answers with `respond(request, number)`, number from 0, and remembers what it was asked."""

    url: str
    respond: Callable[[Asked, int], Reply]
    asked: list[Asked] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, asked: Asked) -> Reply:
        with self._lock:
            number = len(self.asked)
            self.asked.append(asked)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            return self.respond(asked, number)
        finally:
            with self._lock:
                self._now -= 1


def completion(
    *texts: str | None, reason: str | None = "stop", tokens: int | None = None
) -> dict[str, Any]:
    """The body of a good answer. `tokens` is the usage, where it is reported."""
    choices = [
        {"index": i, "message": {"role": "assistant", "content": t}, "finish_reason": reason}
        for i, t in enumerate(texts)
    ]
    return {"choices": choices, **({"usage": {"completion_tokens": tokens}} if tokens else {})}


def echo(asked: Asked, number: int) -> Reply:
    """Texts that tell prompt, seed and place apart; one token each."""
    body = asked.body
    last = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    texts = [f"{last}:{body.get('seed')}:{i}" for i in range(body["n"])]
    return Reply(body=completion(*texts, tokens=body["n"]))


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is part of the tests."""


@contextmanager
def serve(respond: Callable[[Asked, int], Reply] = echo) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(size))
            reply = endpoint.answer(
                Asked(path=self.path, headers=dict(self.headers.items()), body=body)
            )
            raw = reply.body
            content = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = _Server(("127.0.0.1", 0), Handler)
    endpoint = Endpoint(url=f"http://127.0.0.1:{server.server_port}/v1", respond=respond)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
