"""Names of a configuration looked up in a table of classes, and their options checked."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from distill.config import Config
from distill.errors import ConfigError
from distill.sections import Named
from distill.tables import coerce, did_you_mean, find_origin, reject_unknown

INJECTED = frozenset({"chat", "task_of"})
"""Fields that objects get from their surroundings, not from a configuration."""


def lookup(named: Named, table: Mapping[str, Any], section: str, config: Config) -> Any:
    if named.name in table:
        return table[named.name]
    module, colon, attr = named.name.partition(":")
    if colon and section.partition(".")[0] in ("objective", "teacher", "reference", "analyst"):
        try:
            return getattr(importlib.import_module(module), attr)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{section}.name = {named.name!r} cannot be loaded: {error}; write it as "
                "my_pkg.module:Class, with the folder that holds my_pkg on PYTHONPATH"
            ) from error
    origin = find_origin(config.origins, f"{section}.name") or "default"
    raise ConfigError(
        f"{origin}: {section}.name: {named.name!r} is unknown{did_you_mean(named.name, table)}; "
        f"expected one of {', '.join(table)}"
    )


def construct(named: Named, table: Mapping[str, Any], section: str, config: Config) -> Any:
    """An instance of the class that a named section chooses, from its options."""
    cls = lookup(named, table, section, config)
    return cls(**options_of(cls, named, section, config))


def options_of(cls: Any, named: Named, section: str, config: Config) -> dict[str, Any]:
    def origin_of(key: str) -> str:
        return find_origin(config.origins, key) or "default"

    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise ConfigError(
            f"{origin_of(section)}: {section}.name = {named.name!r} names {cls!r}, expected a "
            "dataclass whose fields are its options"
        )
    own = [f for f in fields(cls) if f.name not in INJECTED]
    reject_unknown(named.options, [f.name for f in own], section, origin_of)
    hints = get_type_hints(cls)
    values = {}
    for entry in own:
        key = f"{section}.{entry.name}"
        if entry.name in named.options:
            values[entry.name] = coerce(
                hints[entry.name], named.options[entry.name], key, origin_of
            )
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ConfigError(f"{origin_of(section)}: {key} is missing")
    return values
