"""Our own scoring endpoint: a frozen model behind HTTP, for exact divergences from another machine.

    GET  /health   whether it answers
    GET  /info     which model, tokenizer and limits
    GET  /head     rows of the output head, so that a client can form full distributions itself
    POST /score    a question of `teachers.scoring`: log-probabilities, entropies, candidates, or
                   hidden states

One request is computed at a time; a few more wait, the others are told to come back. Whatever is
refused is told why in one sentence, as {"error": ...}; what goes wrong inside stays in the log.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from distill.errors import DataError
from distill.policy import STUDENT, Policy
from teachers.scoring import (
    CONTENT_TYPE,
    HALVES,
    PROTOCOL,
    Array,
    Question,
    answer_hidden,
    answer_scores,
    pack,
)

logger = logging.getLogger(__name__)
BODY_TIMEOUT = 60.0
"""Seconds for a request to arrive."""
GRACE = 10
"""Seconds that requests under way get when the server is told to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one request may ask for. Clients read them and cut their requests to fit."""

    max_request_bytes: int = 64 * 2**20
    max_answer_bytes: int = 512 * 2**20
    max_views: int = 1024
    max_tokens: int = 131072
    """Tokens of all views of a request."""
    max_queue: int = 16
    """Requests that may be here at once; the next one is told to come back."""


class Refused(Exception):
    """A request that is not answered: its status, and why in words for the client."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Scorer:
    """What the endpoint knows of its model. Not thread-safe: one call at a time.

    `weights` names the weights as they are computed with (type and quantisation included),
    `tokenizer` is `distill.tokens.tokenizer_digest` of the model's.
    """

    def __init__(
        self, policy: Policy, *, model: str, weights: str, tokenizer: str, limits: Limits
    ) -> None:
        self.policy, self.limits = policy, limits
        self.model, self.weights, self.tokenizer = model, weights, tokenizer
        head = policy.head()
        self._width, self._depth = head.weight.shape
        self._dtype = str(head.weight.dtype).removeprefix("torch.")
        self._num_embedded = policy.model.get_input_embeddings().num_embeddings
        config = policy.model.config.get_text_config()
        self._longest: int | None = getattr(config, "max_position_embeddings", None)

    def info(self) -> dict[str, Any]:
        """What a client must know before it asks: plain JSON."""
        head = self.policy.head()
        return {
            "protocol": PROTOCOL,
            "model": self.model,
            "weights": self.weights,
            "tokenizer": self.tokenizer,
            "num_ids": self._width,
            "width": self._depth,
            "dtype": self._dtype,
            "capabilities": ["candidates", "distribution", "entropy", "logprobs", "own_top_k"],
            "temperature": "of the request",
            "head": {
                "bias": head.bias is not None,
                "scale": head.scale,
                "soft_cap": head.soft_cap,
            },
            "limits": asdict(self.limits),
        }

    def answer(self, body: bytes) -> bytes:
        """The packed answer to a packed question. Refused when it cannot be answered."""
        try:
            question = Question.unpack(body)
        except DataError as error:
            raise Refused(400, f"the question is malformed: {error}") from error
        self._check(question)
        views = question.views()
        self.policy.temperature = float(question.temperature)
        if question.hidden:
            rows, _ = self.policy.hidden(views, STUDENT)
            return answer_hidden(question, _as_numpy(rows), dtype=self._dtype, weights=self.weights)
        scores = self.policy.score(views, STUDENT, question.want(), question.num_ids)
        return answer_scores(question, scores, weights=self.weights)

    def head(self, start: int, stop: int) -> bytes:
        """Rows of the output head, and of its bias where it has one."""
        size = self._depth * self.policy.head().weight.element_size()
        if not 0 <= start < stop <= self._width:
            raise Refused(400, f"rows {start} to {stop} are not within 0 to {self._width}")
        if (stop - start) * size > self.limits.max_answer_bytes:
            raise Refused(
                413, f"at most {self.limits.max_answer_bytes // size} rows of the head at once"
            )
        head = self.policy.head()
        arrays = {"weight": _as_numpy(head.weight[start:stop])}
        if head.bias is not None:
            arrays["bias"] = _as_numpy(head.bias[start:stop])
        return pack({"weights": self.weights, "dtype": self._dtype, "start": start}, arrays)

    def _check(self, question: Question) -> None:
        if question.tokenizer != self.tokenizer:
            raise Refused(
                409,
                f"this is {self.model} with the tokenizer {self.tokenizer[:12]}, the request comes "
                f"from one with {question.tokenizer[:12]}; token ids mean other tokens here",
            )
        limits = self.limits
        for what, found, most in (
            ("views", len(question.lengths), limits.max_views),
            ("tokens", len(question.token_ids), limits.max_tokens),
        ):
            if found > most:
                raise Refused(413, f"a request may ask for at most {most} {what}, it has {found}")
        low, high = int(question.token_ids.min()), int(question.token_ids.max())
        if low < 0 or high >= self._num_embedded:
            raise Refused(
                400,
                f"token ids must be within 0 to {self._num_embedded - 1}, found "
                f"{low if low < 0 else high}",
            )
        longest = int(question.lengths.max())
        if self._longest is not None and longest > self._longest:
            raise Refused(
                413,
                f"a view may have at most {self._longest} tokens, as many as {self.model} reads, "
                f"one has {longest}; lower model.max_length",
            )
        width = self._width if question.num_ids is None else question.num_ids
        if not 0 < width <= self._width or question.candidates > width:
            raise Refused(
                400,
                f"num_ids and the number of candidates must be within 1 to {self._width}, found "
                f"{question.num_ids} and {question.candidates}",
            )
        listed = question.candidate_ids
        if listed is not None and listed.size and int(listed.min()) < 0:
            raise Refused(400, f"candidate ids must not be negative, found {int(listed.min())}")
        size, most = self._answer_bytes(question), limits.max_answer_bytes
        if size > most:
            raise Refused(413, f"an answer may have at most {most} bytes, it would have {size}")

    def _answer_bytes(self, question: Question) -> int:
        each = 8 + 4 * question.entropy + 8 * question.candidates
        if question.candidate_ids is not None:
            each += 4 * question.candidate_ids.shape[1]
        if question.hidden:
            each = 4 + self._depth * self.policy.head().weight.element_size()
        return each * len(question.positions)


class _Endpoint:
    """The routes. Whoever knows the token may ask; without a token, everybody who gets here."""

    def __init__(self, scorer: Scorer, token: str) -> None:
        self._scorer, self._token = scorer, token
        self._here = 0
        # One thread: the model is never asked two things at once.
        self._model = ThreadPoolExecutor(1, thread_name_prefix="scoring")

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self._model.shutdown(wait=False, cancel_futures=True)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def info(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse(self._scorer.info())

    async def head(self, request: Request) -> Response:
        self._admit(request)
        try:
            start, stop = (int(request.query_params[name]) for name in ("start", "stop"))
        except (KeyError, ValueError):
            raise Refused(400, "expected ?start=ROW&stop=ROW") from None
        return await self._compute(lambda: self._scorer.head(start, stop))

    async def score(self, request: Request) -> Response:
        self._admit(request)
        if request.headers.get("content-type") != CONTENT_TYPE:
            raise Refused(415, f"a question is sent as {CONTENT_TYPE}")
        if self._here >= self._scorer.limits.max_queue:
            raise Refused(503, f"{self._here} requests are here already; come back in a second")
        self._here += 1
        try:
            body = await self._body(request)
            return await self._compute(lambda: self._scorer.answer(body))
        finally:
            self._here -= 1

    def _admit(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(
            given.encode(), f"Bearer {self._token}".encode()
        ):
            raise Refused(401, "this needs the token of the server, as a bearer token")

    async def _body(self, request: Request) -> bytes:
        """The whole body. One that is too large is read on a little, so that the answer arrives."""
        most = self._scorer.limits.max_request_bytes
        found, size = [], 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= most:
                        found.append(chunk)
                    elif size > 2 * most:
                        break
        except TimeoutError:
            raise Refused(408, f"the request did not arrive within {BODY_TIMEOUT:g} s") from None
        except ClientDisconnect:
            raise Refused(400, "the request ended early") from None
        if size > most:
            raise Refused(
                413, f"a request may have at most {most} bytes; ask about fewer views at once"
            )
        return b"".join(found)

    async def _compute(self, make: Callable[[], bytes]) -> Response:
        loop = asyncio.get_running_loop()
        content = await loop.run_in_executor(self._model, make)
        return Response(content, media_type=CONTENT_TYPE)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return JSONResponse({"error": error.why}, error.status, headers)


async def _failed(request: Request, error: Exception) -> Response:
    """What nobody foresaw; the traceback goes to the log, never to the client."""
    return JSONResponse({"error": "the server failed; its log says why"}, 500)


def make_app(scorer: Scorer, *, token: str = "") -> Starlette:
    """The endpoint as an ASGI application. With a token every request but /health must carry it."""
    endpoint = _Endpoint(scorer, token)
    return Starlette(
        routes=[
            Route("/health", endpoint.health),
            Route("/info", endpoint.info),
            Route("/head", endpoint.head),
            Route("/score", endpoint.score, methods=["POST"]),
        ],
        exception_handlers={Refused: _refused, Exception: _failed},
        lifespan=endpoint.lifespan,
    )


class Server(uvicorn.Server):
    """Serves until it is told to end by SIGINT, SIGTERM or `should_exit`; then it returns."""

    def __init__(self, app: Starlette, *, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE,
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own way, which raises the signal again when everything has ended.
        self.force_exit = self.should_exit
        self.should_exit = True

    def serve_on(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on bound sockets; blocks."""
        self.run(sockets=list(sockets))


def _as_numpy(tensor: torch.Tensor) -> Array:
    """float32 as it is, half types as their 16 bits."""
    tensor = tensor.detach().cpu().contiguous()
    if str(tensor.dtype).removeprefix("torch.") in HALVES:
        bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    values: Array = tensor.float().numpy()
    return values
