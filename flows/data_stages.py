"""Stages that make data and no weights: routing logs (`serve`) and curricula (`curriculum`)."""

from __future__ import annotations

from distill.config import STAGE_PREFIX, Config, Stage
from distill.errors import ConfigError
from flows.night import Night
from flows.training import StageResult


def check(config: Config, stage: Stage, where: str) -> None:
    """ConfigError for settings with which such a stage could not do its work."""
    if stage.kind == "serve":
        _check_serve(config, where)
    else:
        _check_curriculum(config, where)


def make(night: Night, stage: Stage) -> StageResult:
    """Do the work of a stage and leave it in its folder."""
    from flows import curricula, serving

    return serving.serve(night, stage) if stage.kind == "serve" else curricula.make(night, stage)


def _check_serve(config: Config, where: str) -> None:
    from flows import wiring

    if not len(wiring.build_env(config).tasks("train")):
        raise ConfigError(f"{where}: data.name = {config.data.name!r} has no task in split 'train'")
    if config.teacher.name != "local":
        raise ConfigError(
            f"{where} needs a teacher that can act, as its strong tier; set teacher.name = "
            f'"local", found {config.teacher.name!r}'
        )


def _check_curriculum(config: Config, where: str) -> None:
    from distill.curriculum.choose import square
    from distill.curriculum.importers import importer_of
    from distill.curriculum.stages import checked_mix
    from flows.logs_taking import source_name
    from flows.turn_judge import judge_options

    section = config.curriculum
    if not section.sources:
        raise ConfigError(
            f"{where} reads no log; add [[curriculum.sources]] with a path, or "
            "[[stage.curriculum.sources]] of this stage alone"
        )
    for source in section.sources:
        if source.format != "auto":
            importer_of(source.format)
        if source.format == "mapped" and not source.mapping:
            raise ConfigError(
                f'{where}: the source {source.path!r} has format "mapped" and no mapping; say '
                "which field of a turn stands where in a row"
            )
    names = [s.name or source_name(s.path.removeprefix(STAGE_PREFIX)) for s in section.sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{where}: two of curriculum.sources are called {twice!r}; give each a name of its own"
        )
    checked_mix(square(section.mix))
    if judge_options(config) is None and section.demand == "judge":
        raise ConfigError(
            f'{where}: curriculum.demand = "judge" needs somebody to ask; set curriculum.judge = '
            '{ name = "black_box", url = ..., model = ... }, or demand = "fitted"'
        )
