"""A stage of kind `curriculum`: import what is new in the logs, then make training data of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.checkpoint import write_manifest
from distill.config import STAGE_PREFIX, Config, Stage
from distill.curriculum.build import build
from distill.curriculum.contamination import Suites
from distill.curriculum.ingest import IngestReport
from distill.curriculum.options import CurriculumSection, SourceOptions
from distill.curriculum.prepare import Source
from distill.curriculum.store import LogStore
from distill.curriculum.summary import SUMMARY
from distill.curriculum.walk import Fit, Fits, Messages
from distill.errors import DataError
from distill.messages import messages_from
from distill.protocols import Env
from distill.rundir import read_json, staged_dir, write_json
from distill.spans import spans
from distill.tokens import Chat
from distill.types import SPLITS, Split, Task
from evals.curriculum_page import write_page
from flows import serving, wiring
from flows.logs_taking import plain
from flows.night import Night, load_student
from flows.redacting import redactor_for
from flows.training import StageResult
from flows.turn_judge import judge_of

STORE = "store"


def make(night: Night, stage: Stage) -> StageResult:
    """Import, build, and leave the curriculum with its page in the stage's folder."""
    began, config = time.monotonic(), night.config.for_stage(stage)
    section = config.curriculum
    store = LogStore.open(store_path(night, stage, section), create=True)
    night.progress.stage_started(stage.name, 0)
    report = take_in(night, section, store)
    with staged_dir(night.final(stage.name)) as partial:
        summary = build(
            store,
            section,
            partial,
            seed=config.run.seed,
            suites=suites_of(night.config) if section.decontaminate else None,
            fits=fitting(night),
            judge=judge_of(night, config),
        )
        write_json(partial / "import.json", [plain(source) for source in report.sources])
        write_page(partial)
        counts = summary["counts"]
        result = StageResult(
            name=stage.name,
            objective="",
            steps=counts["turns"],
            tokens=0,
            seconds=time.monotonic() - began,
        )
        write_json(partial / "stage.json", result)
        write_manifest(partial)
    note = f"{counts['calls']:,} calls, {counts['turns']:,} turns, {counts['examples']:,} examples"
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
            found.append({"stage": stage.name, **{key: summary[key] for key in kept}})
    return found


def store_path(night: Night, stage: Stage, section: CurriculumSection) -> Path:
    """Where the logs are kept: from night to night under a name, or in the run alone."""
    if section.store:
        return night.home / "logs" / section.store
    return night.run.stage_dir(stage.name) / STORE


def take_in(night: Night, section: CurriculumSection, store: LogStore) -> IngestReport:
    """Read what is new in the sources of the stage."""
    sources = [_source(night, source) for source in section.sources]
    return store.ingest(
        sources,
        redact=redactor_for(section.redact, section.entities, store.salt),
        now_ms=time.time_ns() // 1_000_000,
    )


def _source(night: Night, source: SourceOptions) -> Source:
    path = source.path
    if path.startswith(STAGE_PREFIX):
        path = str(night.locate(path) / serving.LOG)
    return Source(
        name=source.name or Path(path).stem,
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


def fitting(night: Night) -> Fits:
    """Whether a recorded turn fits the student that the night begins with."""
    config = night.config.for_stage(night.student_stages[0])
    return StudentFits(chat=load_student(night, config, None).chat)


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentFits:
    """A student's chat template must be able to write a turn, within its longest prompt."""

    chat: Chat

    def __call__(self, prompt: Messages, turn: Messages, tools: Messages) -> Fit:
        try:
            before, after = messages_from(prompt, tools), messages_from(turn)
            if not self.chat.fits(before):
                return Fit(sft=False, opd=False, reason="too_long")
            rows = spans(self.chat, before, after)
        except DataError:
            return Fit(sft=False, opd=False, reason="unwritable")
        sizes = [sum(len(span.token_ids) for span in row) for row in rows]
        return Fit(sft=max(sizes, default=0) <= self.chat.max_length)
