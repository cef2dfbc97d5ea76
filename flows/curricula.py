"""A stage of kind `curriculum`: import what is new in the logs, then make training data of them."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.checkpoint import write_manifest
from distill.config import STAGE_PREFIX, Config, Stage
from distill.curriculum.build import build
from distill.curriculum.contamination import Suites
from distill.curriculum.options import CurriculumSection, SourceOptions
from distill.curriculum.prepare import Source
from distill.curriculum.store import LogStore
from distill.curriculum.summary import SUMMARY
from distill.curriculum.walk import Fit, Fits, Messages
from distill.errors import DataError
from distill.messages import messages_from
from distill.protocols import Env
from distill.rundir import read_json, staged_dir, write_json
from distill.sections import ModelSection
from distill.spans import spans
from distill.tokens import Chat
from distill.types import SPLITS, Message, Split, Task
from evals.curriculum_page import write_page
from flows import compatibility, recorded, serving, wiring
from flows.curricula_intake import Taken, take
from flows.logs_taking import plain, source_name
from flows.night import Night, load_student
from flows.redacting import redactor_for
from flows.training import StageResult
from flows.turn_judge import judge_of

logger = logging.getLogger(__name__)

STORE = "store"
IMPORT = "import.json"
"""In a finished curriculum: what the night took in of each source."""
RECORD = "taken.json"
"""The same beside it, while the night is on its way."""
Said = tuple[Message, ...]


def make(night: Night, stage: Stage) -> StageResult:
    """Import, build, and leave the curriculum with its page in the stage's folder."""
    began, config = time.monotonic(), night.config.for_stage(stage)
    section = config.curriculum
    night.progress.stage_started(stage.name, 0)
    with LogStore.open(store_path(night, stage, section), create=True) as store:
        taken = take_in(night, stage, section, store)
        with staged_dir(night.final(stage.name)) as partial:
            summary = build(
                store,
                section,
                partial,
                seed=config.run.seed,
                suites=suites_of(night.config) if section.decontaminate else None,
                fits=fitting(night, stage.name),
                judge=judge_of(night, config),
            )
            write_json(partial / IMPORT, [plain(source) for source in taken.sources])
            write_page(partial)
            counts = summary["counts"]
            result = StageResult(
                name=stage.name,
                objective="",
                steps=counts["turns"],
                tokens=0,
                seconds=time.monotonic() - began,
                warnings=taken.warnings,
            )
            write_json(partial / "stage.json", result)
            write_manifest(partial)
    note = (
        f"{taken.new:,} new of {counts['calls']:,} calls, {counts['turns']:,} turns, "
        f"{counts['examples']:,} examples"
    )
    night.progress.stage_done(stage.name, result.seconds, note)
    return result


def told(night: Night) -> list[dict[str, Any]]:
    """What the night's curricula are made of, for its report; empty for a night without logs."""
    found = []
    for stage in night.config.stages:
        path = night.final(stage.name) / SUMMARY
        if stage.kind == "curriculum" and path.exists():
            summary = read_json(path)
            kept = ("counts", "outcomes", "dropped", "stages")
            sources = read_json(path.with_name(IMPORT))
            new = sum(source["stored"] for source in sources)
            found.append({"stage": stage.name, "new": new, **{key: summary[key] for key in kept}})
    return found


def store_path(night: Night, stage: Stage, section: CurriculumSection) -> Path:
    """Where the logs are kept: from night to night under a name, or in the run alone."""
    if section.store:
        return night.home / "logs" / section.store
    return night.run.stage_dir(stage.name) / STORE


def take_in(night: Night, stage: Stage, section: CurriculumSection, store: LogStore) -> Taken:
    """Read what is new in the sources of the stage; say what could not be used.

    DataError when nothing could: no source can be read, or none of its rows.
    """
    taken = take(
        store,
        [_source(night, source) for source in section.sources],
        redact=redactor_for(section.redact, section.entities, store.salt),
        record=night.run.stage_dir(stage.name) / RECORD,
        tell=night.progress.message,
    )
    for text in taken.warnings:
        logger.warning("%s", text)
    return taken


def _source(night: Night, source: SourceOptions) -> Source:
    path = source.path
    if path.startswith(STAGE_PREFIX):
        path = str(night.locate(path) / serving.LOG)
    return Source(
        name=source.name or source_name(path),
        path=path,
        format=source.format,
        consent=source.consent,
        tiers=source.tiers,
        mapping=source.mapping,
        options=source.options,
    )


def suites_of(config: Config) -> Suites:
    """The prompts of everything that a night is evaluated on: what the shared [data] holds in the
    splits gate, evolve and test."""
    env = wiring.build_env(config)
    found = []
    for split in SPLITS:
        if split == "train":
            continue
        for task in _tasks(env, split):
            texts = [m.content for m in task.prompt if m.role == "user"]
            found.append((f"{config.data.name}/{split}", task.id, texts))
    return Suites(found)


def _tasks(env: Env, split: Split) -> Iterator[Task]:
    tasks = env.tasks(split)
    for i in range(len(tasks)):
        yield tasks[i]


def fitting(night: Night, curriculum: str = "") -> Fits:
    """Whether recorded turns fit the student that the night begins with, in every stage that will
    read them: those of the stage `curriculum`, else of any."""
    stages = night.student_stages
    start = load_student(night, night.config.for_stage(stages[0]), None).chat
    read = {"turns": _Chats(start), "contexts": _Chats(start)}
    for stage in stages:
        own = night.config.for_stage(stage)
        path = str(own.data.options.get("path", ""))
        if recorded.is_recorded(own) and (not curriculum or path == STAGE_PREFIX + curriculum):
            read["contexts" if compatibility.uses_contexts(own) else "turns"].add(own.model)
    turns, contexts = (chats.found for chats in read.values())
    every = turns + contexts or (start,)
    return StudentFits(turns=turns or every, contexts=contexts or every)


class _Chats:
    """The ways in which stages read one student: the same tokens, other lengths or templates."""

    def __init__(self, start: Chat) -> None:
        self._start = start
        self.found: tuple[Chat, ...] = ()

    def add(self, model: ModelSection) -> None:
        """The narrowest of each template stays."""
        own = copy.copy(self._start)
        own.max_length, own.template_kwargs = model.max_length, dict(model.template_kwargs)
        same = [c for c in self.found if c.template_kwargs == own.template_kwargs]
        others = tuple(c for c in self.found if c not in same)
        self.found = (*others, min([*same, own], key=lambda c: c.max_length))


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentFits:
    """A student's chat template must be able to write a turn, within the longest prompt of every
    stage: the whole turn to imitate it, and what comes before each answer to answer there."""

    turns: tuple[Chat, ...]
    contexts: tuple[Chat, ...]

    def __call__(self, prompt: Messages, turn: Messages, tools: Messages) -> Fit:
        try:
            before, after = messages_from(prompt, tools), messages_from(turn)
            opd = all(_contexts_fit(chat, before, after) for chat in self.contexts)
            sft = all(_turn_fits(chat, before, after) for chat in self.turns)
        except DataError:
            return Fit(sft=False, opd=False, reason="unwritable")
        return Fit(sft=sft, opd=opd, reason=None if opd else "too_long")


def _contexts_fit(chat: Chat, before: Said, after: Said) -> bool:
    """Whether everything that comes before an answer is a prompt of `max_length` tokens at most."""
    asked = [i for i, message in enumerate(after) if message.role == "assistant"]
    texts = [chat.render((*before, *after[:i])) for i in asked]
    return all(len(ids) <= chat.max_length for ids in chat.encode(texts))


def _turn_fits(chat: Chat, before: Said, after: Said) -> bool:
    rows = spans(chat, before, after)
    sizes = [sum(len(span.token_ids) for span in row) for row in rows]
    return max(sizes, default=0) <= chat.max_length
