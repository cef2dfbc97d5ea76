"""Environments of the `verifiers` package, by the name under which it loads them.

    [data]
    name = "verifiers"
    environment = "gsm8k"              # what `verifiers.load_environment` takes
    [data.arguments]                   # and its keywords
    num_train_examples = 500

Chat environments of one or several turns are supported; the student speaks instead of a client.
Not supported: tools that are called through a model's API, pictures, rewards that compare
attempts with each other. The package logs an error inside a reward function and counts it as 0.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast

from distill.errors import ConfigError, DataError, DistillError, MissingExtra
from distill.types import SPLITS, Message, Reward, Split, Task, Turn, task_id
from evals.envs.base import split_of
from evals.envs.verifiers_api import Attempt, Driver, Loop, Row, driver_of, spelled

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class VerifiersEnv:
    """Options of the adapter. The environment is loaded on first use.

    Where it has an evaluation set, gate and test come from there and train and evolve from its
    training set, without the prompts that are in both; else all four are divided by a hash of the
    prompt (train 80 %, evolve 5, gate 10, test 5).
    """

    name: ClassVar[str] = "verifiers"

    environment: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the environment's own `load_environment`."""
    train_size: int = 0
    """The most tasks of the split train; 0 for all."""
    gate_size: int = 0
    """The most tasks in each of the splits evolve, gate and test; 0 for all."""
    seed: int = 0
    """Fixes the order of the tasks, and with it which are taken."""
    timeout: float = 120.0
    """Seconds that the environment may take to answer one reply or to score an attempt."""

    def __post_init__(self) -> None:
        if self.train_size < 0 or self.gate_size < 0 or self.timeout <= 0:
            raise ConfigError(
                "data.train_size and data.gate_size must not be negative and data.timeout must be "
                f"positive, found {self.train_size}, {self.gate_size} and {self.timeout}"
            )
        if importlib.util.find_spec("verifiers") is None:
            raise MissingExtra(
                "data.name='verifiers' needs the package 'verifiers', which is not installed; try: "
                "pip install 'verifiers<0.4', and the package of the environment "
                f"{self.environment!r}"
            )

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split. DataError when `train` or `gate` has none."""
        if split not in SPLITS:
            raise DataError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
        found = self._tasks[split]
        if not found and split in ("train", "gate"):
            counts = ", ".join(f"{name} {len(self._tasks[name])}" for name in SPLITS)
            raise DataError(
                f"verifiers environment {self.environment!r}: no task in split {split!r} (tasks "
                f"per split: {counts}); ask for more rows in data.arguments"
            )
        limit = self.train_size if split == "train" else self.gate_size
        return found[:limit] if limit else found

    def start(self, task: Task) -> VerifiersEpisode:
        """A fresh attempt. DataError for a task of another environment."""
        if task.id not in self._rows:
            raise DataError(
                f"task {task.id} is not of the verifiers environment {self.environment!r}"
            )
        return VerifiersEpisode(
            task, self._rows[task.id][0], self._driver, self._loop, self.timeout
        )

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(sorted({task.domain for tasks in self._tasks.values() for task in tasks}))

    def close(self) -> None:
        """End the event loop; it also ends with this object or with the program."""
        self._loop.close()

    @cached_property
    def _loop(self) -> Loop:
        return Loop()

    @cached_property
    def _loaded(self) -> Any:
        package = importlib.import_module("verifiers")
        version = getattr(package, "__version__", "?")
        load = getattr(package, "load_environment", None)
        if not callable(load):
            raise ConfigError(
                f"verifiers {version} has no load_environment; expected a version from 0.1.3 to "
                "0.3.1 with all that it requires (from 0.4.0 on it has another interface); try: "
                "pip install 'verifiers<0.4'"
            )
        kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            env = load(self.environment, **self.arguments)
        except Exception as error:  # whatever the environment's own module does
            raise ConfigError(
                f"verifiers {version} cannot load {self.environment!r} with the arguments "
                f"{dict(self.arguments)}: {type(error).__name__}: {error}"
            ) from error
        finally:
            # The package takes the signals for itself; a night that is stopped must stay resumable.
            for number, handler in kept.items():
                if signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
        _check_plain(env, self.environment)
        return env

    @cached_property
    def _driver(self) -> Driver:
        package = importlib.import_module("verifiers")
        version = str(getattr(package, "__version__", "?"))
        return driver_of(self._loaded, name=self.environment, version=version)

    @cached_property
    def _rows(self) -> dict[str, tuple[Row, bool, tuple[Message, ...]]]:
        """Task id -> row, whether it is held out, prompt. A prompt that is in both is held out."""
        rows: dict[str, tuple[Row, bool, tuple[Message, ...]]] = {}
        repeated = 0
        for held_out, source in _sources(self._loaded):
            for index, row in enumerate(source):
                prompt = _prompt(row, f"row {index} of {self.environment!r}")
                number = task_id(self.name, prompt)
                repeated += number in rows
                rows.setdefault(number, (row, held_out, prompt))
        if repeated:
            logger.warning("%s: %d repeated prompts are used once", self.environment, repeated)
        return rows

    @cached_property
    def _tasks(self) -> Mapping[Split, tuple[Task, ...]]:
        own = any(held_out for _, held_out, _ in self._rows.values())
        tasks = []
        for number, (row, held_out, prompt) in self._rows.items():
            domain = row.get("task")
            domain = domain if isinstance(domain, str) and domain != "default" else ""
            tasks.append(
                Task(
                    id=number,
                    env=self.name,
                    domain=domain or self.environment,
                    split=_split(number, held_out) if own else split_of(number),
                    prompt=prompt,
                    answer=row["answer"] if isinstance(row.get("answer"), str) else None,
                    meta={"key": domain or self.environment},
                )
            )
        tasks.sort(key=lambda t: hashlib.sha256(f"{self.seed}/{t.id}".encode()).hexdigest())
        return {split: tuple(t for t in tasks if t.split == split) for split in SPLITS}


class VerifiersEpisode:
    """One attempt. What the environment raises is raised here and fails this attempt alone.

    To be closed when nobody will ask for its reward, so that sandboxes and the like are given back.
    """

    def __init__(self, task: Task, row: Row, driver: Driver, loop: Loop, timeout: float) -> None:
        self._task = task
        self._driver = driver
        self._loop = loop
        self._timeout = timeout
        self._attempt = Attempt(row)
        self._begun = False
        self._closed = False
        self._reward: Reward | None = None

    def reply(self, text: str) -> Turn:
        """Hand the words over. The last turn earns what the rubric says of the attempt."""
        if self._reward is not None or self._closed:
            raise DataError(f"the attempt at task {self._task.id} is over; start a new one")
        if not self._begun:
            self._begin()
        before = self._key()
        new = [] if self._attempt.done else self._run(self._driver.say(self._attempt, text))
        messages = tuple(_message(m, f"task {self._task.id}") for m in new)
        done = self._attempt.done
        value = self.reward().value if done else 0.0
        return Turn(messages=messages, reward=value, obs_key=before, done=done)

    def reward(self) -> Reward:
        """What the rubric says, with its metrics as `parts`; an attempt that was cut is scored."""
        if not self._begun:
            raise DataError(f"task {self._task.id} has no reward before its first reply")
        if self._closed and self._reward is None:
            raise DataError(
                f"the attempt at task {self._task.id} was closed before anybody asked for its "
                "reward; ask first, or start a new one"
            )
        if self._reward is None:
            value, parts = self._run(self._driver.score(self._attempt))
            self._reward = Reward(value=value, parts=parts)
        return self._reward

    def close(self) -> None:
        """Clean up after an attempt that was cut before its end; nothing to do for any other."""
        if not self._closed and self._attempt.state is not None and self._reward is None:
            self._abandon()
        self._closed = True

    def _begin(self) -> None:
        self._run(self._driver.begin(self._attempt))
        self._begun = True
        shown = tuple(_message(m, f"task {self._task.id}") for m in self._attempt.messages)
        if shown != self._task.prompt:
            raise ConfigError(
                f"this verifiers environment changes the prompt of task {self._task.id} when an "
                "attempt starts; expected the prompt of its dataset"
            )

    def _run(self, work: Any) -> Any:
        what = f"the verifiers environment of task {self._task.id}"
        try:
            return self._loop.run(work, seconds=self._timeout, what=what)
        except DistillError:
            raise
        except Exception:
            self._abandon()
            raise

    def _abandon(self) -> None:
        self._closed = True
        what = f"the cleaning up of the verifiers environment of task {self._task.id}"
        self._loop.run(self._driver.abandon(self._attempt), seconds=self._timeout, what=what)

    def _key(self) -> str:
        """What the student last read, which names the state as far as it can see it."""
        read = "\n".join(f"{role}: {text}" for role, text in map(spelled, self._attempt.messages))
        return f"{self._task.id}:{hashlib.sha256(read.encode()).hexdigest()[:16]}"


def _check_plain(env: Any, name: str) -> None:
    """ConfigError for what a student that writes plain text cannot take part in."""
    why = ""
    if getattr(env, "message_type", "chat") != "chat":
        why = f"works on bare text (message_type {env.message_type!r}), expected 'chat'"
    elif getattr(env, "tool_defs", None) or getattr(env, "oai_tools", None):
        why = "calls tools through a model's API; expected one that reads calls out of the text"
    elif getattr(env, "requires_group_rollouts", False):
        why = "compares attempts with each other; expected rewards of single attempts"
    if why:
        raise ConfigError(f"verifiers environment {name!r} {why}; choose another")


def _sources(env: Any) -> Iterable[tuple[bool, Iterable[Row]]]:
    """The environment's datasets, the held-out one first: (held out, rows)."""
    has = {
        part: getattr(env, part, None) is not None
        or getattr(env, f"{part}_source", None) is not None
        for part in ("eval_dataset", "dataset")
    }
    if has["eval_dataset"]:
        yield has["dataset"], env.get_eval_dataset()
    if has["dataset"]:
        yield False, env.get_dataset()


def _split(number: str, held_out: bool) -> Split:
    """One in twenty training prompts to evolve, one in twenty held-out ones to test."""
    bucket = split_of(number)
    if held_out:
        return "test" if bucket == "test" else "gate"
    return "evolve" if bucket == "evolve" else "train"


def _prompt(row: Row, where: str) -> tuple[Message, ...]:
    prompt = row.get("prompt")
    if isinstance(prompt, str) or not prompt:
        raise DataError(f"{where}: expected a prompt that is a list of messages, found {prompt!r}")
    return tuple(_message(message, where) for message in prompt)


def _message(message: Any, where: str) -> Message:
    role, text = spelled(message)
    if role not in ROLES:
        raise DataError(f"{where}: a message has the role {role!r}; expected {', '.join(ROLES)}")
    return Message(role=cast(Any, role), content=text)
