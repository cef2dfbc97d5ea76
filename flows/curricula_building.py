"""Building a curriculum from the command line: a store, a configuration, a new folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.config import STAGE_PREFIX, Config
from distill.errors import ConfigError
from distill.rundir import staged_dir
from flows.forgetting_places import register, unregister
from flows.logs_store import store_path
from flows.progress import open_progress

if TYPE_CHECKING:
    from distill.curriculum.options import CurriculumSection
    from flows.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A built curriculum."""

    folder: Path
    page: Path
    summary: dict[str, Any]


def build_curriculum(
    home: Path, arguments: Sequence[str], *, store: str = "", out: Path | None = None
) -> Made:
    """Build into a new folder, which appears when it is complete.

    ConfigError for a folder that exists, DataError when the store holds nothing to learn from.
    """
    from flows.configs import load_config

    config = load_config(arguments) if arguments else Config()
    section = _stage_config(config).curriculum
    _refuse_judge(section)
    path = store_path(home, store or section.store)
    folder = _new_folder(home, path.name) if out is None else out
    if folder.exists():
        raise ConfigError(f"{folder} exists already; name a new folder with --out")
    register(home, folder)
    try:
        summary = _build(home, config, path, folder)
    except BaseException:
        if not folder.exists():
            unregister(home, folder)
        raise
    return Made(folder=folder, page=folder / "curriculum.html", summary=summary)


def _build(home: Path, config: Config, path: Path, folder: Path) -> dict[str, Any]:
    """The summary of what now lies in `folder`."""
    from distill.checkpoint import write_manifest
    from distill.curriculum.build import build
    from distill.curriculum.store import LogStore
    from evals.curriculum_page import write_page

    section = _stage_config(config).curriculum
    with open_progress() as progress, LogStore.open(path) as held:
        suites = _suites(config, progress) if section.decontaminate else None
        fits = _fits(home, config)
        began = time.monotonic()
        progress.stage_started("curriculum", held.num_buckets, "bucket")
        with staged_dir(folder) as partial:
            summary = build(
                held,
                section,
                partial,
                seed=config.run.seed,
                suites=suites,
                fits=fits,
                progress=lambda done, _: progress.step("curriculum", done, {}),
            )
            write_page(partial, folder.name)
            write_manifest(partial)
        counts = summary["counts"]
        note = f"{counts['turns']:,} turns, {counts['examples']:,} examples"
        progress.stage_done("curriculum", time.monotonic() - began, note)
    return summary


def _stage_config(config: Config) -> Config:
    """What the stage of kind `curriculum` sees, where there is one; else the shared values."""
    stages = [stage for stage in config.stages if stage.kind == "curriculum"]
    return config.for_stage(stages[-1]) if stages else config


def _new_folder(home: Path, store: str) -> Path:
    """The next free `curricula/STORE-DATE-N`."""
    date, number = datetime.now().strftime("%Y%m%d"), 1
    while True:
        folder = home / "curricula" / f"{store}-{date}-{number}"
        if not folder.exists():
            return folder
        number += 1


def _suites(config: Config, progress: Progress) -> Any:
    """The evaluation prompts of [data]; None, with a word about it, where there is no [data]."""
    if not config.data.name:
        progress.message(
            "no [data] is named, so no turn is compared with evaluation tasks; name a preset or a "
            "file to leave out what overlaps with them"
        )
        return None
    from flows.curricula import suites_of

    return suites_of(config)


def _fits(home: Path, config: Config) -> Any:
    """Whether the student can read a turn; None where no student is named that is there already."""
    students = [stage for stage in config.stages if stage.target == "student"]
    if not students:
        return None
    model = config.for_stage(students[0]).model
    if model.path.startswith(STAGE_PREFIX) or not (model.path or model.build):
        return None
    from flows.curricula import fitting
    from flows.single import around

    return fitting(around(config, None, home))


def _refuse_judge(section: CurriculumSection) -> None:
    if section.judge:
        raise ConfigError(
            "curriculum.judge: only a night can ask a judging model; leave it out here, or build "
            "the curriculum as a stage of a night"
        )
