"""Tasks from the user's own tables: JSON lines, Parquet, or a Hugging Face dataset on disk.

    [data]
    name = "jsonl"                     # or "parquet", "dataset"
    path = "questions.jsonl"           # a file; a folder or a pattern such as "part-*.jsonl" too
    grader = "number"                  # see evals.graders, or "my_pkg.module:attr"
    split = "hash"                     # or the column that names the split
    [data.columns]
    prompt = "question"                # or messages = "conversation"
    answer = "gold"
    domain = "topic"
    views.hint = "{prompt}\\nHint: {explanation}"

A value in `columns` is the name of a column, or a text with `{column}` in braces; `{prompt}` is
the rendered prompt. Every task is one question and one reply.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

from distill.errors import ConfigError, DataError, EvalError
from distill.protocols import Episode
from distill.types import SPLITS, Message, Split, Task, task_id
from evals.envs.base import SingleTurn, split_of
from evals.envs.table_rows import (
    Row,
    Rows,
    cell,
    columns_in,
    columns_of,
    dataset_rows,
    fill,
    jsonl_rows,
    parquet_rows,
)
from evals.graders import GRADERS, TaskGrader, build_grader, nearest

logger = logging.getLogger(__name__)

ROLES = ("prompt", "messages", "system", "answer", "solution", "domain", "key", "lesson", "views")
_SPEAKERS = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Table(ABC):
    """What the three formats share: from rows to tasks. Rows are read once, on first use."""

    name: ClassVar[str]

    path: str
    columns: Mapping[str, str | Mapping[str, str]] = field(
        default_factory=lambda: {"prompt": "prompt", "answer": "answer"}
    )
    """Role -> column or text with columns in braces. Roles: prompt or messages, system, answer,
    solution, domain, key, lesson; `views` is a table of view name -> last user message of the
    privileged prompt. A closing assistant message of `messages` becomes the solution."""
    grader: str = "exact"
    split: str = "hash"
    """`hash` divides by the content of the prompt (train 80 %, evolve 5, gate 10, test 5); else
    the column that names the split. A dataset with named splits offers them as column `split`."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """Value of the split column -> train, evolve, gate or test, where the data says otherwise."""
    seed: int = 0
    """Fixes the order of the tasks."""

    def __post_init__(self) -> None:
        for role in self.columns:
            if role not in ROLES:
                raise ConfigError(
                    f"data.columns: unknown role {role!r}; {nearest(role, list(ROLES))}"
                )
        if ("prompt" in self.columns) == ("messages" in self.columns):
            raise ConfigError("data.columns: expected either 'prompt' or 'messages'")
        for role, source in self.columns.items():
            if isinstance(source, str) == (role == "views"):
                raise ConfigError(
                    f"data.columns.{role}: expected "
                    f"{'a table of views' if role == 'views' else 'a column name'}, "
                    f"found {source!r}"
                )
        if self.grader in GRADERS and "answer" not in self.columns:
            raise ConfigError(
                f"data.columns: grader {self.grader!r} compares with an answer; "
                'add answer = "COLUMN"'
            )
        for value, target in self.splits.items():
            if target not in SPLITS:
                valid = nearest(target, list(SPLITS))
                raise ConfigError(f"data.splits.{value}: unknown split {target!r}; {valid}")
        build_grader(self.grader)

    @abstractmethod
    def read(self, wanted: frozenset[str]) -> Rows:
        """Names of all columns, and the rows with at least the wanted ones."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, domains in turn. DataError when `train` or `gate` is empty."""
        found = self._tasks[split]
        if not found and split in ("train", "gate"):
            counts = ", ".join(f"{name} {len(self._tasks[name])}" for name in SPLITS)
            raise DataError(
                f"{self.path}: no task in split {split!r} (tasks per split: {counts}); add rows, "
                "or set data.split and data.splits"
            )
        return found

    def start(self, task: Task) -> Episode:
        return SingleTurn(task, self._grade)

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(sorted({task.domain for tasks in self._tasks.values() for task in tasks}))

    @cached_property
    def _grade(self) -> TaskGrader:
        return build_grader(self.grader)

    @cached_property
    def _tasks(self) -> Mapping[Split, tuple[Task, ...]]:
        names, rows = self.read(self._wanted())
        if not rows:
            raise DataError(f"{self.path}: no row found; expected at least one task")
        self._check_columns(names)
        seen: dict[str, tuple[Task, Row]] = {}
        repeated = 0
        for row in rows:
            task = self._task(row, names)
            if task.id not in seen:
                seen[task.id] = (task, row)
                continue
            first, first_row = seen[task.id]
            _check_same(first, first_row, task, row)
            repeated += 1
        if repeated:
            logger.warning("%s: %d repeated rows are used once", self.path, repeated)
        ordered = sorted((task for task, _ in seen.values()), key=self._order)
        return {s: _interleave(t for t in ordered if t.split == s) for s in SPLITS}

    def _order(self, task: Task) -> str:
        return hashlib.sha256(f"{self.seed}/{task.id}".encode()).hexdigest()

    def _sources(self) -> dict[str, str]:
        """Role, or `views.NAME` -> column or text, flat."""
        flat: dict[str, str] = {}
        for role, source in self.columns.items():
            if isinstance(source, str):
                flat[role] = source
            else:
                flat.update({f"{role}.{name}": text for name, text in source.items()})
        return flat

    def _wanted(self) -> frozenset[str]:
        wanted = set() if self.split == "hash" else {self.split}
        for source in self._sources().values():
            wanted.update({source, *columns_in(source)})
        return frozenset(wanted)

    def _check_columns(self, names: list[str]) -> None:
        needed = [
            (f"data.columns.{role}", column)
            for role, source in self._sources().items()
            for column in columns_of(source, names)
        ]
        if self.split != "hash":
            needed.append(("data.split", self.split))
        for key, column in needed:
            if column not in names and not (column == "prompt" and ".views." in key):
                raise DataError(
                    f"{self.path}: {key} names the column {column!r}, which no row has; "
                    f"{nearest(column, names)}"
                )

    def _task(self, row: Row, names: list[str]) -> Task:
        sources = self._sources()
        messages, closing = self._messages(row, names)
        known = {"prompt": messages[-1].content}

        def text(role: str) -> str | None:
            if role not in sources:
                return None
            return fill(sources[role], row, names, known if role.startswith("views.") else {})

        answer = text("answer")
        if answer is None and self.grader in GRADERS:
            raise DataError(f"{row.where}: {sources['answer']!r} is missing or null; expected text")
        if answer is not None and self.grader in GRADERS:
            _check_answer(self.grader, answer, row)
        meta: dict[str, Any] = {"solution": text("solution") or closing}
        meta |= {role: text(role) for role in ("lesson", "key")}
        views = {s.removeprefix("views."): text(s) for s in sources if s.startswith("views.")}
        meta["views"] = {kind: view for kind, view in views.items() if view is not None}
        identity = task_id(self.name, messages)
        return Task(
            id=identity,
            env=self.name,
            domain=text("domain") or Path(self.path).stem,
            split=split_of(identity) if self.split == "hash" else self._split(row),
            prompt=messages,
            answer=answer,
            meta={key: value for key, value in meta.items() if value},
        )

    def _split(self, row: Row) -> Split:
        value = row.values.get(self.split)
        target = self.splits.get(str(value), value)
        if target not in SPLITS:
            raise DataError(
                f"{row.where}: column {self.split!r} holds {value!r}, expected one of "
                f"{', '.join(SPLITS)}; map other names with data.splits"
            )
        return cast(Split, target)

    def _messages(self, row: Row, names: list[str]) -> tuple[tuple[Message, ...], str | None]:
        """The prompt, and the closing assistant message if the row has one."""
        sources = self._sources()
        if "prompt" in sources:
            prompt = fill(sources["prompt"], row, names, {})
            if not prompt:
                raise DataError(
                    f"{row.where}: the prompt {sources['prompt']!r} is missing or empty"
                )
            messages = [Message(role="user", content=prompt)]
        else:
            messages = _conversation(row, sources["messages"])
        if system := fill(sources["system"], row, names, {}) if "system" in sources else None:
            messages.insert(0, Message(role="system", content=system))
        closing = messages.pop().content if messages[-1].role == "assistant" else None
        if not messages or messages[-1].role not in ("user", "tool"):
            raise DataError(f"{row.where}: the prompt must end with a user message")
        return tuple(messages), closing


@dataclass(frozen=True, kw_only=True)
class Jsonl(Table):
    """One JSON object per line, UTF-8."""

    name: ClassVar[str] = "jsonl"

    def read(self, wanted: frozenset[str]) -> Rows:
        return jsonl_rows(self.path)


@dataclass(frozen=True, kw_only=True)
class Parquet(Table):
    """One or several Parquet files with the same columns."""

    name: ClassVar[str] = "parquet"

    def read(self, wanted: frozenset[str]) -> Rows:
        return parquet_rows(self.path, wanted)


@dataclass(frozen=True, kw_only=True)
class Dataset(Table):
    """A Hugging Face dataset that `save_to_disk` wrote; nothing is downloaded."""

    name: ClassVar[str] = "dataset"

    def read(self, wanted: frozenset[str]) -> Rows:
        return dataset_rows(self.path, wanted)


def _conversation(row: Row, column: str) -> list[Message]:
    entries = row.values.get(column)
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{row.where}: column {column!r} must hold a list of messages")
    messages = []
    for entry in entries:
        role = entry.get("role") if isinstance(entry, dict) else None
        content = cell(entry.get("content"), column, row) if isinstance(entry, dict) else None
        if role not in _SPEAKERS or content is None:
            raise DataError(
                f"{row.where}: a message of {column!r} needs a role ({', '.join(_SPEAKERS)}) and "
                f"a content, found {str(entry)[:80]}"
            )
        messages.append(Message(role=role, content=content))
    return messages


def _check_answer(grader: str, answer: str, row: Row) -> None:
    """An answer that its grader cannot accept would only show as a model that never learns."""
    reply = f"Answer: {answer}" if grader == "answer" else answer
    try:
        accepted = GRADERS[grader](reply, answer).value == 1.0
    except EvalError as error:
        raise DataError(f"{row.where}: {error}") from error
    if not accepted:
        raise DataError(
            f"{row.where}: grader {grader!r} does not accept the answer {answer[:60]!r} itself; "
            "choose another grader or clean the column"
        )


def _check_same(first: Task, first_row: Row, task: Task, row: Row) -> None:
    where = f"{row.where}: the same prompt as {first_row.where}"
    if task.split != first.split:
        raise DataError(
            f"{where}, but split {task.split!r} instead of {first.split!r}; a task may be in one "
            "split only, remove one of the rows"
        )
    if task.answer != first.answer:
        raise DataError(
            f"{where}, but answer {task.answer!r} instead of {first.answer!r}; remove one of them"
        )


def _interleave(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """One task of each domain in turn, so that any beginning of the list covers all of them."""
    by_domain: dict[str, list[Task]] = {}
    for task in tasks:
        by_domain.setdefault(task.domain, []).append(task)
    longest = max(map(len, by_domain.values()), default=0)
    queues = [by_domain[name] for name in sorted(by_domain)]
    return tuple(queue[i] for i in range(longest) for queue in queues if i < len(queue))
