"""One file per format of routing logs, each a pure function from a raw row to turns.

`IMPORTERS` is the literal table of names. `detect` tries them in its order, the formats with the
most telling keys first: a row of one format is recognised by its own importer and no other.
"""

from __future__ import annotations

import importlib

from distill.curriculum.importers.arena import Arena
from distill.curriculum.importers.base import Context, Found, Importer, Row
from distill.curriculum.importers.chat import Chat
from distill.curriculum.importers.langfuse import Langfuse
from distill.curriculum.importers.litellm import LiteLLM
from distill.curriculum.importers.mapped import Mapped
from distill.curriculum.importers.normal import Normal, from_plain, to_plain
from distill.curriculum.importers.openrouter import OpenRouter
from distill.curriculum.importers.opensquilla import OpenSquilla
from distill.curriculum.importers.otel import OpenTelemetry
from distill.curriculum.importers.routellm import RouteLLM
from distill.curriculum.importers.routerbench import RouterBench
from distill.curriculum.importers.vllm_router import VllmRouter
from distill.errors import ConfigError
from distill.tables import did_you_mean

__all__ = [
    "IMPORTERS",
    "Context",
    "Found",
    "Importer",
    "Row",
    "detect",
    "from_plain",
    "importer_of",
    "to_plain",
]

IMPORTERS: dict[str, Importer] = {
    "normal": Normal(),
    "litellm": LiteLLM(),
    "vllm_router": VllmRouter(),
    "opensquilla": OpenSquilla(),
    "otel": OpenTelemetry(),
    "langfuse": Langfuse(),
    "openrouter": OpenRouter(),
    "arena": Arena(),
    "routerbench": RouterBench(),
    "routellm": RouteLLM(),
    "chat": Chat(),
    "mapped": Mapped(),
}


def detect(row: Row) -> str | None:
    """Name of the first importer that recognises the row; None where none does."""
    for name, importer in IMPORTERS.items():
        if importer.recognises(row):
            return name
    return None


def importer_of(name: str) -> Importer:
    """The importer of a name, or of `my_pkg.module:attr`, a class or an object.

    ConfigError for an unknown name and for what is no importer.
    """
    if name in IMPORTERS:
        return IMPORTERS[name]
    module, colon, attr = name.partition(":")
    if not colon:
        raise ConfigError(
            f"format {name!r} is unknown{did_you_mean(name, IMPORTERS)}; expected one of "
            f"{', '.join(IMPORTERS)}, or an importer of your own as my_pkg.module:attr"
        )
    try:
        found = getattr(importlib.import_module(module), attr)
        found = found() if isinstance(found, type) else found
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"format {name!r} cannot be loaded: {error}; write it as my_pkg.module:attr, with the "
            "folder that holds my_pkg on PYTHONPATH"
        ) from error
    if not isinstance(found, Importer):
        raise ConfigError(
            f"format {name!r} is no importer: expected name, recognises(row) and "
            f"read(row, context), found {type(found).__name__}"
        )
    return found
