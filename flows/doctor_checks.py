"""What a check of `distill doctor` says, and the stage that it looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from distill.config import STAGE_PREFIX, Config
from distill.errors import CheckpointError, DistillError
from distill.rundir import read_json

if TYPE_CHECKING:
    from distill.devices import Device
    from distill.objectives.base import Objective
    from distill.tokens import Chat
    from distill.types import Message

Status = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """One sentence of a check. `advice` says what to do; empty when there is nothing to do."""

    status: Status
    detail: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A finding under the name of its check, `STAGE: WHAT` where it belongs to a stage."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def ok(detail: str) -> Finding:
    return Finding("ok", detail)


def warn(detail: str, advice: str) -> Finding:
    return Finding("warn", detail, advice)


def fail(detail: str, advice: str) -> Finding:
    return Finding("fail", detail, advice)


def guarded(name: str, check: Callable[[], Sequence[Finding]]) -> list[Check]:
    """What a check finds; an error of ours is a failure that says what to do by itself."""
    try:
        found = check()
    except DistillError as error:
        found = [fail(str(error), "")]
    return [Check(name=name, status=f.status, detail=f.detail, advice=f.advice) for f in found]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The tokenizer of a model and what its files say, without its weights."""

    tokenizer: Any
    eos_token_ids: Sequence[int] = ()
    """Ends of a reply by the model's generation settings and configuration."""
    vocab_size: int | None = None
    """Rows of the output layer; None while the model is yet to be made."""
    positions: int | None = None
    """Most tokens that the model can read; None where its configuration does not say."""
    folder: Path | None = None
    """Where the model lies; None while it is yet to be made."""


Load = Callable[[str], Loaded]
"""Finds a model by what `model.path` may be; asked twice, it answers from memory."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One stage of a configuration. Checks share what it has loaded."""

    name: str
    own: Config
    """What the stage sees."""
    config: Config
    """The whole configuration."""
    home: Path
    load: Load
    device: Device | None = None
    """What memory and time are estimated for; None takes the GPU that is there."""
    waits: bool = False
    """Whether a night follows, which waits for servers that are still starting."""
    room: dict[str, Any] = field(default_factory=dict)
    """What expensive checks hand to one another, by name."""

    @cached_property
    def loaded(self) -> Loaded:
        return self.load(self.own.model.path)

    @cached_property
    def chat(self) -> Chat:
        """The student's template and stop set. ConfigError without any end token."""
        from distill.tokens import Chat

        return Chat(
            self.loaded.tokenizer,
            stop=self.own.model.stop,
            eos_token_ids=self.loaded.eos_token_ids,
            max_length=self.own.model.max_length,
            template_kwargs=self.own.model.template_kwargs,
        )

    @cached_property
    def prompts(self) -> list[tuple[Message, ...]]:
        """A few real prompts of the stage; where its tasks are yet to be made, of the night's own,
        else a greeting."""
        from distill.types import Message
        from flows import wiring

        for config in (self.own, self.config):
            if config.data.name and not wiring.is_made(config):
                tasks = wiring.build_env(config).tasks("train")
                return [tasks[i].prompt for i in range(min(8, len(tasks)))]
        return [(Message(role="user", content="Hello"),)]

    @property
    def maker(self) -> Config:
        """The stage's configuration with the model section of whoever makes its weights."""
        from dataclasses import replace

        model, seen = self.own.model, set[str]()
        while model.path.startswith(STAGE_PREFIX) and model.path not in seen:
            seen.add(model.path)
            stage = self.config.stage(model.path.removeprefix(STAGE_PREFIX))
            model = self.config.for_stage(stage).model
        kept = replace(model, kind=self.own.model.kind, rank=self.own.model.rank)
        return replace(self.own, model=kept)

    @property
    def tokens(self) -> tuple[Any, ...]:
        """What decides how the stage reads and writes; equal for models of one tokenizer."""
        own, maker = self.own.model, self.maker.model
        return maker.path, maker.revision, own.stop, dict(own.template_kwargs), own.max_length

    @cached_property
    def objective(self) -> Objective | None:
        """What the student learns by; None for a stage in which it does not act."""
        from flows import wiring

        acts = self.own.stages and self.own.stages[0].kind == "on_policy"
        return wiring.build_objective(self.own) if acts else None


class Rule(NamedTuple):
    """A check of a stage. No finding means that there is nothing to check."""

    name: str
    run: Callable[[Subject], Sequence[Finding]]
    reads: tuple[str, ...]
    """Sections that decide its answer, or `tokens`: stages that agree on them are checked once."""
    needs_model: bool = True
    """Skipped where the tokenizer could not be loaded."""


def named_tables(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and options of a teacher and of every teacher inside it."""
    if name:
        yield name, options
    for value in options.values():
        if isinstance(value, Mapping):
            yield from named_tables(str(value.get("name", "")), value)


def urls_of(options: Mapping[str, Any]) -> list[str]:
    """The servers that a table of options names, under `url` or `urls`."""
    found = options.get("urls", options.get("url", ()))
    return [found] if isinstance(found, str) else [str(url) for url in found]


def end_ids(folder: Path) -> tuple[int, ...]:
    """Ends of a reply that the files of a model name. CheckpointError for one that is no id."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = read_table(path).get("eos_token_id") if path.exists() else None
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(one) is not int for one in ids):
            raise CheckpointError(
                f"{path}: eos_token_id should be a token id or a list of them, found {value!r}; "
                "restore the file from where the model came from"
            )
        found += ids
    return tuple(dict.fromkeys(found))


def read_table(path: Path) -> Mapping[str, Any]:
    """The object of a JSON file. DataError for a damaged file, CheckpointError for no object."""
    table = read_json(path)
    if not isinstance(table, Mapping):
        raise CheckpointError(
            f"{path} should hold an object, found {type(table).__name__}; restore the file from "
            "where the model came from"
        )
    return table
