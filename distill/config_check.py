"""What no single field of a configuration can know: how its values belong together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distill.errors import ConfigError
from distill.tables import OriginOf, did_you_mean, leaves

if TYPE_CHECKING:
    from distill.config import Config
    from distill.sections import Stage

STAGE_PREFIX = "stage:"
"""`stage:NAME` in place of a path means what stage NAME of the same run made."""
DATA_KINDS = ("serve", "curriculum")
"""Kinds of stage that make data and no weights."""
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check(config: Config, origin_of: OriginOf) -> None:
    """ConfigError for values that contradict each other. Each stage is resolved once, so that its
    own errors show at load."""
    store = config.curriculum.store
    for key, value in (
        ("run.preset", config.run.preset),
        ("model.name", config.model.name),
        *((("curriculum.store", store),) if store else ()),
    ):
        if not _FOLDER.fullmatch(value):
            raise _fault(key, f"expected a plain folder name, found {value!r}", origin_of)
    too_many = [k for k in config.evals.k if k > config.evals.samples]
    if too_many and config.evals.samples:
        raise _fault(
            "evals.k",
            f"pass@{too_many[0]} needs at least {too_many[0]} replies per task, "
            f"evals.samples is {config.evals.samples}",
            origin_of,
        )
    earlier: list[Stage] = []
    for stage in config.stages:
        _check_stage(config, stage, earlier, origin_of)
        earlier.append(stage)


def _check_stage(config: Config, stage: Stage, earlier: list[Stage], origin_of: OriginOf) -> None:
    own, prefix = config.for_stage(stage), f"stage.{stage.name}"
    if (stage.kind in DATA_KINDS) != (stage.target == "data"):
        raise _fault(
            f"{prefix}.target",
            f"kind = {stage.kind!r} and target = {stage.target!r} do not belong together: "
            f"{' and '.join(DATA_KINDS)} have the target 'data', and nothing else has",
            origin_of,
        )
    if stage.cache and stage.target == "data":
        raise _fault(f"{prefix}.cache", "only weights are kept in the cache", origin_of)
    if len(own.trainer.betas) != 2:
        raise _fault(f"{prefix}.trainer.betas", f"expected 2, found {own.trainer.betas}", origin_of)
    if not own.model.path and own.model.build is None:
        raise _fault(
            f"{prefix}.model.path",
            "expected a model name, a directory or a table [model.build]; all are missing",
            origin_of,
        )
    _check_paths(own, stage, earlier, origin_of)
    if stage.target == "data":
        _check_start(config, stage, earlier, origin_of)


def _check_paths(own: Config, stage: Stage, earlier: list[Stage], origin_of: OriginOf) -> None:
    """What stands for an earlier stage must name one that has run by then, and has made the like.
    Whatever is no stage of the student runs before the first that is one."""
    made = {s.name: s for s in earlier if stage.target == "student" or s.target != "student"}
    for key, path in _paths(own, stage):
        wanted = path.removeprefix(STAGE_PREFIX)
        if wanted == path:
            continue
        if wanted not in made:
            raise _fault(
                f"stage.{stage.name}.{key}",
                f"{path!r} must name an earlier stage{did_you_mean(wanted, list(made))}; "
                f"before {stage.name!r} there are: {', '.join(made) or 'none'}",
                origin_of,
            )
        section = key.partition(".")[0]
        kind = "curriculum" if section == "data" and own.data.name == "routing" else ""
        kind = "serve" if section == "curriculum" else kind
        found = made[wanted]
        is_weights = section in ("model", "teacher", "reference")
        if (kind and found.kind != kind) or (is_weights and found.target == "data"):
            asked = f"a stage of kind {kind!r}" if kind else "a stage that trains weights"
            raise _fault(
                f"stage.{stage.name}.{key}",
                f"{path!r} must name {asked}, but the kind of {wanted!r} is {found.kind!r}",
                origin_of,
            )


def _check_start(config: Config, stage: Stage, earlier: list[Stage], origin_of: OriginOf) -> None:
    """Who answers requests, or reads recorded turns, must be there already."""
    made = {s.name for s in earlier if s.target != "student"}
    first = next((s for s in config.stages if s.target == "student"), None)
    path = config.for_stage(first).model.path if first is not None else ""
    start = path.removeprefix(STAGE_PREFIX)
    if start != path and start not in made:
        raise _fault(
            f"stage.{stage.name}.kind",
            f"stage {stage.name!r} of kind {stage.kind!r} needs the student, which begins with "
            f"what stage {start!r} makes; put that stage before {stage.name!r}",
            origin_of,
        )


def _paths(own: Config, stage: Stage) -> Iterator[tuple[str, str]]:
    """Every value that a stage reads and that may stand for an earlier stage."""
    yield "model.path", own.model.path
    tables: dict[str, Mapping[str, Any]] = {
        "teacher": own.teacher.options,
        "reference": own.reference.options,
        "data": own.data.options,
    }
    for section, options in tables.items():
        for option, value in leaves(options):
            if isinstance(value, str):
                yield f"{section}.{option}", value
    for i, source in enumerate(own.curriculum.sources if stage.kind == "curriculum" else ()):
        yield f"curriculum.sources[{i}].path", source.path


def _fault(key: str, text: str, origin_of: OriginOf) -> ConfigError:
    return ConfigError(f"{origin_of(key)}: {key}: {text}")
