"""Asking one or several equal HTTP servers: in order, bounded, patient, and with clear errors.

Every request is answered by a usable answer or the call fails; nothing is left out. A server that
restarts is waited for until the deadline, so that a stage survives it. Where there are several
servers, one that fails is left alone for a while and the others take over. The key never reaches a
log or an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import httpx

from distill.calls import LOOPBACK, CallRules, Reader, Unusable, check_urls, key_of, refusal
from distill.errors import DistillError

__all__ = ["CallRules", "Replicas", "Unusable"]

logger = logging.getLogger(__name__)
MAX_WAIT = 30.0
CONNECT = 10.0
"""Seconds for a connection to open."""
JSON = "application/json"
Body = Mapping[str, Any] | bytes
R = TypeVar("R")
NO_HINTS: Mapping[int, str] = MappingProxyType({})


@dataclass(slots=True, kw_only=True)
class _Server:
    """One address and how it fares."""

    url: str
    busy: int = 0
    failures: int = 0
    rests_until: float = 0.0
    was_away: bool = False
    """It failed since it last answered: a single request is sent ahead of all others."""
    scouted: bool = False
    """That request is under way."""

    def is_ready(self, concurrency: int) -> bool:
        most = 0 if self.scouted else concurrency
        return self.busy < most and self.rests_until <= time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked(Generic[R]):
    """What one call asks."""

    path: str
    contents: Sequence[bytes | None]
    """Bodies of POST requests; None is a GET."""
    readers: Sequence[Reader[R]]
    content_type: str = JSON
    patient: bool = False
    hints: Mapping[int, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Call(Generic[R]):
    """How far a call has come."""

    asked: _Asked[R]
    ends: float
    clients: Mapping[str, httpx.AsyncClient]
    freed: asyncio.Condition
    answers: dict[int, R]
    last: str = "nothing was answered"


class Replicas:
    """Equal servers under several base addresses.

    `label` is the section of the configuration they belong to, such as `teacher`; `error` is what a
    failed call raises. `revive` gets this object narrowed to one server whenever that one was away
    and is back, before it is asked anything else: the place to send again what a restart loses.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        rules: CallRules,
        label: str,
        error: type[DistillError],
        api_key_env: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
        revive: Callable[[Replicas], None] | None = None,
    ) -> None:
        self.urls = check_urls(urls, f"{label}.urls")
        self.rules = rules
        self.bytes_received = 0
        self._label, self._error = label, error
        self._key_name, self._transport = api_key_env, transport
        self._revive = revive
        self._servers = [_Server(url=url) for url in self.urls]
        if key_of(self._key_name, self._label) and any(
            url.startswith("http://") and urlsplit(url).hostname not in LOOPBACK
            for url in self.urls
        ):
            logger.warning("the key of %s travels unencrypted; use https", label)

    def post(
        self,
        path: str,
        bodies: Sequence[Body],
        read: Reader[R] | Sequence[Reader[R]],
        *,
        content_type: str = JSON,
        patient: bool = True,
        hints: Mapping[int, str] = NO_HINTS,
    ) -> list[R]:
        """One usable answer per body, in order, each from whichever server is free. `read` is one
        reader for all answers, or one for each.

        `patient` waits for a server that is away until the deadline; else that costs a try. `hints`
        say what to do about a status, where more is known than what it means in general.
        """
        contents = [b if isinstance(b, bytes) else json.dumps(b).encode() for b in bodies]
        asked = _Asked(
            path=path,
            contents=contents,
            readers=[read] * len(contents) if callable(read) else read,
            content_type=content_type,
            patient=patient,
            hints=hints,
        )
        return self._run(asked) if contents else []

    def get(
        self,
        path: str,
        read: Reader[R],
        *,
        patient: bool = False,
        hints: Mapping[int, str] = NO_HINTS,
    ) -> R:
        """What one of the servers says."""
        asked = _Asked(path=path, contents=[None], readers=[read], patient=patient, hints=hints)
        return self._run(asked)[0]

    def each(
        self,
        path: str,
        read: Reader[R],
        *,
        body: Body | None = None,
        patient: bool = False,
        hints: Mapping[int, str] = NO_HINTS,
    ) -> list[R]:
        """What every server says, in the order of the addresses: a GET, or a POST of `body`."""
        found = []
        for url in self.urls:
            one = self.only(url)
            if body is not None:
                found += one.post(path, [body], read, patient=patient, hints=hints)
            else:
                found.append(one.get(path, read, patient=patient, hints=hints))
            self.bytes_received += one.bytes_received
        return found

    def only(self, url: str, *, deadline: float | None = None) -> Replicas:
        """The same for one of the servers."""
        return Replicas(
            [url],
            rules=replace(self.rules, deadline=deadline or self.rules.deadline),
            label=self._label,
            error=self._error,
            api_key_env=self._key_name,
            transport=self._transport,
        )

    def _run(self, asked: _Asked[R]) -> list[R]:
        """To the end, also where the caller's thread already has an event loop."""

        def run() -> list[R]:
            return asyncio.run(self._all(asked))

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return run()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()

    async def _all(self, asked: _Asked[R]) -> list[R]:
        limit, most = self.rules.deadline, self.rules.concurrency * len(self._servers)
        async with AsyncExitStack() as stack:
            call = _Call(
                asked=asked,
                ends=time.monotonic() + limit,
                clients={
                    url: await stack.enter_async_context(self._client(url)) for url in self.urls
                },
                freed=asyncio.Condition(),
                answers={},
            )
            todo = iter(range(len(asked.contents)))

            async def work() -> None:
                for index in todo:
                    call.answers[index] = await self._answer(call, index)

            try:
                async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
                    for _ in range(min(most, len(asked.contents))):
                        group.create_task(work())
            except TimeoutError:
                raise self._late(call) from None
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
        return [call.answers[i] for i in range(len(asked.contents))]

    def _client(self, url: str) -> httpx.AsyncClient:
        most = self.rules.concurrency
        return httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=min(CONNECT, self.rules.timeout)),
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            # A proxy of the environment is for the world outside, not for a server here.
            trust_env=urlsplit(url).hostname not in LOOPBACK,
            transport=self._transport,
        )

    async def _answer(self, call: _Call[R], index: int) -> R:
        """Ask until there is a usable answer; the call's error after too many failures."""
        failures, before = 0, ""
        while True:
            server = await self._free(call, before)
            server.busy += 1
            scout = server.scouted = server.was_away
            try:
                await self._bring_back(call, server)
                value = await self._ask(call, server, index)
            except Unusable as found:
                trouble = found
                server.was_away = found.down or found.stale or (server.was_away and not scout)
            else:
                server.failures = 0
                # Only a request that was sent after the trouble proves that it is over.
                server.was_away = server.was_away and not scout
                return value
            finally:
                server.busy -= 1
                server.scouted = server.scouted and not scout
                async with call.freed:
                    call.freed.notify_all()
            before = server.url
            call.last = f"{server.url}{call.asked.path}: {trouble.trouble}"
            failures += not (trouble.down and call.asked.patient)
            if trouble.fatal or failures > self.rules.retries:
                raise self._failed(call, server, trouble, failures)
            await self._pause(server, trouble, failures, f"{call.asked.path}/{index}")

    async def _pause(self, server: _Server, trouble: Unusable, failures: int, key: str) -> None:
        """Leave a server in trouble alone for a while; wait here where only the answer was bad.

        The spread of the waits depends on what is asked, not on chance.
        """
        now = time.monotonic()
        if trouble.aside and server.rests_until > now:
            return  # requests that were under way together fail together
        server.failures += trouble.aside
        count = max(failures, server.failures, 1)
        digest = hashlib.sha256(f"{server.url}{key}/{count}".encode()).digest()
        spread = 0.75 + 0.5 * int.from_bytes(digest[:4], "little") / 2**32
        wait = min(self.rules.backoff * 2.0 ** min(count - 1, 16), MAX_WAIT) * spread
        wait = wait if trouble.wait is None else max(wait, trouble.wait)
        level = logging.WARNING if trouble.down else logging.INFO
        said = (self._label, server.url, trouble.trouble, wait)
        logger.log(level, "%s at %s: %s; asking again in %.1f s", *said)
        if trouble.aside:
            server.rests_until = now + wait
        else:
            await asyncio.sleep(wait)

    async def _free(self, call: _Call[R], before: str) -> _Server:
        """The least busy server that is not resting, another than the last one if there is one."""
        while True:
            ready = [s for s in self._servers if s.is_ready(self.rules.concurrency)]
            if ready:
                return min(ready, key=lambda s: (s.url == before, s.busy))
            now = time.monotonic()
            naps = [s.rests_until - now for s in self._servers if s.rests_until > now]
            try:
                async with asyncio.timeout(min(naps, default=None)), call.freed:
                    await call.freed.wait()
            except TimeoutError:
                continue

    async def _bring_back(self, call: _Call[R], server: _Server) -> None:
        """Send again what a server that was away has lost."""
        if server.was_away and self._revive is not None:
            left = max(call.ends - time.monotonic(), 0.01)
            await asyncio.to_thread(self._revive, self.only(server.url, deadline=left))

    async def _ask(self, call: _Call[R], server: _Server, index: int) -> R:
        content = call.asked.contents[index]
        headers = {"Content-Type": call.asked.content_type, **self._authorization()}
        try:
            async with asyncio.timeout(self.rules.timeout):
                response = await call.clients[server.url].request(
                    "GET" if content is None else "POST",
                    f"{server.url}{call.asked.path}",
                    content=content,
                    headers=headers,
                )
        except TimeoutError:
            raise Unusable(
                f"there was no answer within {self.rules.timeout:g} s",
                f"raise {self._label}.timeout or lower {self._label}.concurrency",
                aside=True,
            ) from None
        except httpx.HTTPError as error:
            raise Unusable(
                f"the connection failed ({type(error).__name__})",
                f"check that the server runs and that {self._label}.urls is right",
                down=isinstance(error, httpx.TransportError),
            ) from None
        self.bytes_received += response.num_bytes_downloaded
        if response.status_code == 200:
            return call.asked.readers[index](response)
        key = key_of(self._key_name, self._label)
        found = refusal(response, self._label, key, revivable=self._revive is not None)
        found.advice = call.asked.hints.get(response.status_code, found.advice)
        raise found

    def _failed(
        self, call: _Call[R], server: _Server, trouble: Unusable, failures: int
    ) -> DistillError:
        asked = call.asked
        return self._error(
            f"{self._label} at {server.url}{asked.path} should answer {len(asked.contents)} "
            f"request(s), it answered {len(call.answers)}: {trouble.trouble} ({failures} failed of "
            f"up to {self.rules.retries + 1} tries); {trouble.advice}"
        )

    def _late(self, call: _Call[R]) -> DistillError:
        return self._error(
            f"{self._label} at {', '.join(self.urls)} should answer {len(call.asked.contents)} "
            f"request(s) to {call.asked.path} within {self.rules.deadline:g} s, but only "
            f"{len(call.answers)} were answered; the last trouble was {call.last}; check that the "
            f"servers run, or raise {self._label}.deadline or {self._label}.concurrency"
        )

    def _authorization(self) -> dict[str, str]:
        key = key_of(self._key_name, self._label)
        return {"Authorization": f"Bearer {key}"} if key else {}
