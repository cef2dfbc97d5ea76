"""How an environment of the `verifiers` package is driven from outside, one reply at a time.

The package runs a whole rollout with a client of its own. Here the student speaks instead, so the
loop of `MultiTurnEnv.rollout` is taken apart. Two shapes of its methods are known, told apart by
their parameters:

- 0.1.3 to 0.1.7: `is_completed(messages, state)`, `env_response(messages, state)` returns messages
  and state, `Rubric.score_rollout(prompt, completion, answer, state, ...)` returns the score.
- 0.1.8 to 0.3.1: `init_state(input, client, model, ...)`, `is_completed(state)`,
  `get_prompt_messages(state)`, `Rubric.score_rollout(state)` writes the score into the state.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import SimpleNamespace
from typing import Any, cast

from distill.errors import ConfigError, EngineError, EvalError

Row = Mapping[str, Any]
"""A row of the environment's dataset: prompt, and as it has them answer, info, task, example_id."""

MODEL = "student"

PATIENCE = 2.0
"""Seconds that an event loop has to do nothing in before it counts as blocked."""


class Loop:
    """An event loop in a thread of its own: works whether or not the caller runs one already."""

    def __init__(self) -> None:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="verifiers-loop", daemon=True)
        thread.start()
        self._loop = loop
        self._probe: Future[None] | None = None
        self.close = weakref.finalize(self, _stop, loop, thread)

    def run(self, work: Coroutine[Any, Any, Any], *, seconds: float, what: str) -> Any:
        """The result of `work`. TimeoutError, which fails one attempt, after `seconds`.

        EngineError when work that never awaits holds the loop, so that no attempt can go on; at
        once while the loop is still held.
        """
        if self._probe is not None and not self._probe.done():
            work.close()
            raise _blocked(what)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except FutureTimeout:
            if future.done():
                raise  # the environment's own
            future.cancel()
            self._check(what)
            raise TimeoutError(
                f"{what} did not finish within {seconds:g} s; raise data.timeout"
            ) from None

    def _check(self, what: str) -> None:
        """EngineError when the loop does not even get round to doing nothing."""
        self._probe = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            self._probe.result(PATIENCE)
        except FutureTimeout:
            raise _blocked(what) from None


def _blocked(what: str) -> EngineError:
    return EngineError(
        f"{what} blocks the event loop in which all its attempts run: some method works or waits "
        "without 'await' (time.sleep, requests, a long computation); expected asyncio.sleep, an "
        "async client or asyncio.to_thread there. Change the environment, or raise data.timeout if "
        "it is only slow"
    )


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(2.0)
    if not thread.is_alive():
        loop.close()


class Attempt:
    """One rollout in progress: the library's state and the conversation so far."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.state: Any = None
        self.messages: list[Any] = []
        self.done = False
        self.cleaned = False


class Driver(ABC):
    """What both shapes share. Its methods are awaited in the private loop."""

    def __init__(self, env: Any) -> None:
        self.env = env

    @abstractmethod
    async def begin(self, attempt: Attempt) -> None:
        """Set the state up; `attempt.messages` is then what the student reads first."""

    @abstractmethod
    async def say(self, attempt: Attempt, text: str) -> list[Any]:
        """Take the student's words; return the new messages, and set `attempt.done`."""

    @abstractmethod
    async def score(self, attempt: Attempt) -> tuple[float, dict[str, float]]:
        """Clean up, then the reward and the metrics by name."""

    @abstractmethod
    async def abandon(self, attempt: Attempt) -> None:
        """Clean up after an attempt that failed."""


class StateDriver(Driver):
    """0.1.8 to 0.3.1: everything is in the state."""

    async def begin(self, attempt: Attempt) -> None:
        row = {**attempt.row}
        state = await awaited(self.env.init_state(row, no_client(), MODEL, {}))
        attempt.state = state
        changed = await awaited(self.env.setup_state(state))
        attempt.state = state if changed is None else changed
        attempt.done = await awaited(self.env.is_completed(attempt.state))
        attempt.messages = list(await awaited(self.env.get_prompt_messages(attempt.state)))

    async def say(self, attempt: Attempt, text: str) -> list[Any]:
        state, prompt = attempt.state, attempt.messages
        spoken = normalised([{"role": "assistant", "content": text}])
        step = {
            "prompt": prompt,
            "completion": spoken,
            "response": None,
            "tokens": None,
            "reward": None,
            "advantage": None,
            "is_truncated": False,
            "trajectory_id": state.get("trajectory_id"),
            "extras": {},
        }
        if hasattr(self.env, "add_trajectory_step"):
            await awaited(self.env.add_trajectory_step(state, step))
        else:
            state["trajectory"].append(step)
        attempt.messages = [*prompt, *spoken]
        attempt.done = await awaited(self.env.is_completed(state))
        if attempt.done:
            return []
        longer = list(normalised(await awaited(self.env.get_prompt_messages(state))))
        final = state.get("final_env_response")
        if final is not None:
            attempt.done = await awaited(self.env.is_completed(state))
            return list(normalised(final))
        known = len(attempt.messages)
        if [spelled(m) for m in longer[:known]] != [spelled(m) for m in attempt.messages]:
            raise ConfigError(
                "this verifiers environment rewrites the conversation between turns; expected one "
                "that only adds messages (MultiTurnEnv.get_prompt_messages as it is published)"
            )
        attempt.messages = longer
        return longer[known:]

    async def score(self, attempt: Attempt) -> tuple[float, dict[str, float]]:
        state, rubric = attempt.state, self.env.rubric
        await self.abandon(attempt)
        parameters = inspect.signature(rubric.score_rollout).parameters
        extra = {"score_sem": asyncio.Semaphore(1)} if "score_sem" in parameters else {}
        try:
            await awaited(rubric.score_rollout(state, **extra))
        except AssertionError as error:
            raise EvalError(
                f"the rubric of this verifiers environment cannot score one attempt: {error}; "
                "rewards that compare attempts with each other are not supported"
            ) from error
        if hasattr(rubric, "cleanup"):
            await awaited(rubric.cleanup(state))
        return float(state["reward"]), numbers(state.get("metrics"))

    async def abandon(self, attempt: Attempt) -> None:
        if attempt.state is None or attempt.cleaned:
            return
        attempt.cleaned = True
        if hasattr(self.env, "cleanup"):
            await awaited(self.env.cleanup(attempt.state))
        elif not attempt.done:  # before it was public, `is_completed` did this when it was true
            for name in ("_render_timing", "_render_completion", "_cleanup"):
                if hasattr(self.env, name):
                    await awaited(getattr(self.env, name)(attempt.state))


class TupleDriver(Driver):
    """0.1.3 to 0.1.7: the rollout keeps the messages, the state is a plain dict."""

    async def begin(self, attempt: Attempt) -> None:
        row = attempt.row
        info = row.get("info") or {}
        given: dict[str, Any] = {
            "prompt": list(row["prompt"]),
            "completion": [],
            "answer": row.get("answer") or "",
            "task": row.get("task") or "default",
            "info": json.loads(info) if isinstance(info, str) else info,
            "example_id": row.get("example_id", 0),
        }
        if hasattr(self.env, "init_state"):
            names = inspect.signature(self.env.init_state).parameters
            chosen = {key: value for key, value in given.items() if key in names}
            state = await awaited(self.env.init_state(**chosen))
        else:
            timing = dict.fromkeys(("generation_ms", "scoring_ms", "total_ms"), 0.0)
            state = {**given, "responses": [], "turn": 0, "timing": timing}
        attempt.state = state
        attempt.state = await awaited(self.env.setup_state(state))
        attempt.messages = list(attempt.state["prompt"])
        attempt.done = await awaited(self.env.is_completed(attempt.messages, attempt.state))

    async def say(self, attempt: Attempt, text: str) -> list[Any]:
        state = attempt.state
        spoken = {"role": "assistant", "content": text}
        attempt.messages.append(spoken)
        state["completion"] = [*state["completion"], spoken]
        message = SimpleNamespace(content=text, tool_calls=None)
        state["responses"].append(SimpleNamespace(choices=[SimpleNamespace(message=message)]))
        state["turn"] += 1
        limit = getattr(self.env, "max_turns", -1)
        attempt.done = bool(
            await awaited(self.env.is_completed(attempt.messages, state))
            or 0 < limit <= state["turn"]
        )
        if attempt.done:
            return []
        new, attempt.state = await awaited(self.env.env_response(attempt.messages, state))
        attempt.messages += new
        attempt.state["completion"] = [*attempt.state["completion"], *new]
        return list(new)

    async def score(self, attempt: Attempt) -> tuple[float, dict[str, float]]:
        state = attempt.state
        names = ("prompt", "completion", "answer", "task", "info")
        scored = await awaited(
            self.env.rubric.score_rollout(**{n: state.get(n) for n in names}, state=state)
        )
        known = scored if isinstance(scored, Mapping) else vars(scored)
        return float(known["reward"]), numbers(known.get("metrics"))

    async def abandon(self, attempt: Attempt) -> None:
        """These versions hold nothing that would have to be cleaned up."""


def driver_of(env: Any, *, name: str, version: str) -> Driver:
    """The way to drive `env`. ConfigError when its methods have neither known shape."""
    shape = {
        method: tuple(inspect.signature(getattr(env, method)).parameters)
        for method in ("is_completed", "env_response", "setup_state", "init_state")
        if callable(getattr(env, method, None))
    }
    completed = shape.get("is_completed", ())
    if {"messages", "state"} <= {*completed} and {"messages", "state"} <= {
        *shape.get("env_response", ())
    }:
        return TupleDriver(env)
    modern = {"input", "client", "model"} <= {*shape.get("init_state", ())}
    if modern and completed[:1] == ("state",) and hasattr(env, "get_prompt_messages"):
        return StateDriver(env)
    found = "; ".join(f"{key}({', '.join(names)})" for key, names in shape.items()) or "none"
    raise ConfigError(
        f"verifiers {version}: environment {name!r} ({type(env).__name__}) cannot be driven; "
        "expected a SingleTurnEnv or MultiTurnEnv with is_completed(messages, state) as in 0.1.3 "
        "to 0.1.7, or init_state(input, client, model, ...) and is_completed(state) as in 0.1.8 to "
        f"0.3.1; found {found}"
    )


async def awaited(value: Any) -> Any:
    """What the environment's own method returned, which may be written with or without `async`."""
    return await value if inspect.isawaitable(value) else value


def spelled(message: Any) -> tuple[str, str]:
    """Role and text of a message, a dict or a model of the library's own."""
    content = message["content"]
    if content is None:
        content = ""
    if not isinstance(content, str):
        content = "".join(_text_of(part) for part in content)
    return str(message["role"]), content


def _text_of(part: Any) -> str:
    if part["type"] != "text":
        raise ConfigError(
            f"this verifiers environment sends a message part of type {part['type']!r}; "
            "expected text, choose an environment without pictures or sound"
        )
    return str(part["text"])


def numbers(metrics: Any) -> dict[str, float]:
    return {str(key): float(value) for key, value in (metrics or {}).items()}


def normalised(messages: Any) -> Sequence[Any]:
    """Messages in the library's own form: plain dicts until 0.1.9, its models later."""
    try:
        tools = importlib.import_module("verifiers.utils.message_utils")
    except ModuleNotFoundError:
        return cast(Sequence[Any], messages)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    own: Callable[..., Sequence[Any]] | None = getattr(tools, "normalize_messages", None)
    return messages if own is None else own(messages, field_name="messages")


def no_client() -> Any:
    """What stands where the library expects a model's client: a client that refuses to be asked.

    Later versions insist on one of their own class; the older ones only store what they get.
    """
    try:
        base = importlib.import_module("verifiers.clients").Client
    except (ModuleNotFoundError, AttributeError):
        return None

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            "this verifiers environment asks for the model itself; expected one in which only the "
            "rollout does, as the student is not served behind a client"
        )

    methods: dict[str, Any] = dict.fromkeys(base.__abstractmethods__, refuse)
    return type("NoClient", (base,), methods)(None)
