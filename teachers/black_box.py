"""A teacher behind an OpenAI-compatible endpoint: it only writes text.

Every prompt gets exactly the number of texts asked for, in order, or the call fails with an error
that names the endpoint. A missing text is asked for again, never replaced by an empty one. Neither
prompts nor the key reach a log or an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from distill.calls import LOOPBACK, key_of
from distill.errors import ConfigError, TeacherError
from distill.messages import tools_of
from distill.types import Message, Sampling
from teachers.endpoint import (
    MAX_WAIT,
    Answer,
    BlackBoxOptions,
    read_answer,
    read_refusal,
    seed_of,
)
from teachers.writing import Written, check_request, is_continued

__all__ = ["BlackBoxModel", "BlackBoxOptions"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _Job:
    """One prompt and what has been written for it."""

    prompt: Sequence[Message]
    key: str
    texts: list[str] = field(default_factory=list)
    num_tokens: int | None = 0
    failures: int = 0
    incomplete: int = 0

    def accept(self, answer: Answer) -> None:
        self.texts += answer.texts
        if answer.answered and answer.num_tokens is None:
            self.num_tokens = None
        elif self.num_tokens is not None:
            self.num_tokens += answer.num_tokens or 0


class BlackBoxModel:
    """A `TextModel` over HTTP. `render` turns messages into a prompt text; only the mode
    `completions` needs it.

    ConfigError when the variable with the key is not set.
    """

    def __init__(
        self,
        options: BlackBoxOptions,
        *,
        render: Callable[[Sequence[Message]], str] | None = None,
    ) -> None:
        if options.continue_mode == "completions" and render is None:
            raise ConfigError(
                'teacher.continue_mode = "completions" needs a chat template to render with; use '
                '"chat"'
            )
        self.options = options
        self.name = f"{options.model} at {options.url}"
        self.num_tokens = 0
        """Tokens that the endpoint said it wrote, over all calls."""
        self.num_uncounted = 0
        """Prompts whose answers came without a count of tokens."""
        self._render = render
        self._url = options.url.rstrip("/")
        self._host = urlsplit(options.url).hostname or ""
        key = self._key()
        if key and options.url.startswith("http://") and self._host not in LOOPBACK:
            logger.warning("the key of %s travels unencrypted; use https", self.name)

    def complete(
        self, prompts: Sequence[Sequence[Message]], n: int, sampling: Sampling
    ) -> list[list[str]]:
        return [list(written.texts) for written in self.write(prompts, n, sampling)]

    def write(
        self, prompts: Sequence[Sequence[Message]], n: int, sampling: Sampling
    ) -> list[Written]:
        """Texts and their cost per prompt. Requests start in the order of the prompts."""
        check_request(prompts, n, sampling)
        if not prompts:
            return []
        keys = sampling.keys or ("",) * len(prompts)
        jobs = [_Job(prompt=p, key=k) for p, k in zip(prompts, keys, strict=True)]
        _run(lambda: self._all(jobs, n, sampling))
        self.num_tokens += sum(job.num_tokens or 0 for job in jobs)
        self.num_uncounted += sum(job.num_tokens is None for job in jobs)
        return [Written(texts=tuple(j.texts), num_tokens=j.num_tokens) for j in jobs]

    async def _all(self, jobs: Sequence[_Job], n: int, sampling: Sampling) -> None:
        slots = asyncio.Semaphore(self.options.concurrency)
        ends = asyncio.get_running_loop().time() + self.options.deadline

        async def one(client: httpx.AsyncClient, job: _Job) -> None:
            async with slots:
                await self._fill(client, job, replace(sampling, num_samples=n), ends)

        limits = httpx.Limits(max_connections=self.options.concurrency)
        # A proxy of the environment is for the world outside, not for a server on this machine.
        outside = self._host not in LOOPBACK
        try:
            async with (
                asyncio.timeout(self.options.deadline),
                httpx.AsyncClient(timeout=None, limits=limits, trust_env=outside) as client,
                asyncio.TaskGroup() as group,
            ):
                for job in jobs:
                    group.create_task(one(client, job))
        except TimeoutError:
            done = sum(len(job.texts) == n for job in jobs)
            raise TeacherError(
                f"{self.name} should answer {len(jobs)} prompts within {self.options.deadline:g} "
                f"s, but only {done} were answered; raise teacher.deadline or teacher.concurrency, "
                "or ask for fewer continuations"
            ) from None
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _fill(
        self, client: httpx.AsyncClient, job: _Job, sampling: Sampling, ends: float
    ) -> None:
        """Ask until the job has n texts. TeacherError after too many failures."""
        n = sampling.num_samples
        while len(job.texts) < n:
            wanted = n - len(job.texts)
            if self.options.per_request:
                wanted = min(wanted, self.options.per_request)
            answer = await self._ask(client, job, wanted, sampling)
            job.accept(answer)
            if not answer.trouble:
                continue
            job.failures += 1
            job.incomplete += answer.answered
            wait = min(self.options.backoff * 2 ** (job.failures - 1), MAX_WAIT)
            wait = wait if answer.wait is None else max(wait, answer.wait)
            too_long = asyncio.get_running_loop().time() + wait > ends
            if answer.fatal or too_long or job.failures > self.options.retries:
                late = f", and waiting {wait:.0f} s would exceed teacher.deadline" * too_long
                raise TeacherError(
                    f"{self.name} should write {n} texts for a prompt, it wrote {len(job.texts)}: "
                    f"{answer.trouble} ({job.failures} failed of up to {self.options.retries + 1} "
                    f"tries{late}); {answer.advice}"
                )
            logger.info("%s: %s; asking again in %.1f s", self.name, answer.trouble, wait)
            await asyncio.sleep(wait)

    async def _ask(
        self, client: httpx.AsyncClient, job: _Job, wanted: int, sampling: Sampling
    ) -> Answer:
        """One request. Whatever goes wrong with it is an answer with `trouble`."""
        path, body = self._request(job, wanted, sampling)
        try:
            async with asyncio.timeout(self.options.timeout):
                response = await client.post(
                    f"{self._url}/{path}", content=json.dumps(body), headers=self._headers()
                )
        except TimeoutError:
            return Answer(
                trouble=f"there was no answer within {self.options.timeout:g} s",
                advice="raise teacher.timeout or lower teacher.concurrency",
            )
        except httpx.HTTPError as error:
            return Answer(
                trouble=f"the connection failed ({type(error).__name__})",
                advice="check that the server runs and that teacher.url is right",
            )
        try:
            data = response.json()
        except ValueError:
            data = None
        if response.status_code == 200 and data is None:
            return Answer(
                trouble="its answer was not JSON",
                advice="check that teacher.url is an OpenAI-compatible endpoint",
            )
        if response.status_code == 200:
            return read_answer(data, wanted)
        retry_after = response.headers.get("retry-after")
        return read_refusal(response.status_code, data, retry_after, job.prompt, self._key())

    def _request(self, job: _Job, wanted: int, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        options, prompt = self.options, job.prompt
        body: dict[str, Any] = {
            "model": options.model,
            "n": wanted,
            options.limit_field: sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if options.seeds and job.key:
            # Another part of the same prompt's texts is another draw.
            body["seed"] = seed_of(f"{job.key}/{len(job.texts)}/{job.incomplete}")
        if is_continued(prompt) and options.continue_mode == "completions" and self._render:
            text = self._render(prompt[:-1]) + prompt[-1].content
            return "completions", {**body, "prompt": text, **options.body}
        body["messages"] = [m.as_completion() for m in prompt]
        if tools := tools_of(prompt):
            body["tools"] = tools
        if is_continued(prompt):
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return "chat/completions", {**body, **options.body}

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", **self.options.headers}
        key, name = self._key(), self.options.api_key_header
        if key:
            headers[name] = f"Bearer {key}" if name.lower() == "authorization" else key
        return headers

    def _key(self) -> str:
        return key_of(self.options.api_key_env, "teacher")


def _run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run to the end, also where the caller's thread already has an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(make())).result()
