"""Values that somebody set and no stage will ever see."""

from __future__ import annotations

from distill.config import COMMAND_LINE, Config, explain
from distill.errors import ConfigError
from distill.sections import STAGE_SECTIONS
from distill.tables import find_origin

PRESET = "preset "
READ_FOR_DATA = {
    "serve": ("model", "engine", "teacher", "data", "sampling", "traffic"),
    "curriculum": ("curriculum",),
}
"""Sections that a stage reads which makes data; it has the others, and nobody looks at them."""


def require_effect(config: Config) -> None:
    """ConfigError for a value of a shared section that every stage sets for itself.

    Only values from a file or the command line, over stages of another layer: the writer expects
    them to win, and they do not.
    """
    owns = {stage.name: config.for_stage(stage) for stage in config.stages}
    for key, value, origin in explain(config):
        section = key.partition(".")[0]
        if section not in STAGE_SECTIONS or origin.startswith((PRESET, "default")):
            continue
        readers = [
            owns[stage.name]
            for stage in config.stages
            if section in READ_FOR_DATA.get(stage.kind, STAGE_SECTIONS)
        ]
        if not owns or any(own.origins.get(key) == origin for own in readers):
            continue
        setters = {find_origin(config.origins, f"stage.{name}.{key}") for name in owns}
        if origin in setters:
            continue
        last = config.stages[-1].name
        shown = f"stage.{last}.{key}"
        how = f"{shown}={value}" if origin == COMMAND_LINE else f"[stage.{last}...] {shown}"
        raise ConfigError(
            f"{origin}: {key} has no effect, because every stage sets its own "
            f"({', '.join(owns)}); write it for a stage: {how}"
        )
