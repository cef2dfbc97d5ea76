"""Configurations for the command line: presets, files and `key=value` arguments, read and written.

The first argument may name a packaged preset; every other argument without `=` is a TOML file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from distill.config import Config, Layer, load
from distill.errors import ConfigError
from distill.tables import did_you_mean, join

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def presets() -> dict[str, str]:
    """Packaged preset name -> its TOML text."""
    return packaged("presets")


def packaged(*folder: str) -> dict[str, str]:
    """Name -> text of every TOML file in a packaged folder."""
    place = files("flows").joinpath(*folder)
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(place.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }


def load_config(arguments: Sequence[str]) -> Config:
    """The configuration of `[PRESET|FILE ...] [key=value ...]`. ConfigError on anything wrong."""
    names, overrides = split(arguments)
    known = presets()
    return load([layer(name, known, "a preset", "the presets") for name in names], overrides)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of layers, and `key=value` overrides."""
    overrides = [text for text in arguments if "=" in text and not Path(text).is_file()]
    return [text for text in arguments if text not in overrides], overrides


def layer(name: str, known: Mapping[str, str], one: str, all_of_them: str) -> Layer:
    """A packaged text or a file. ConfigError for what is neither, or cannot be read."""
    if name in known:
        return Layer(origin=f"preset {name}", text=known[name])
    try:
        return Layer(origin=name, text=Path(name).read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{name!r} is neither {one} nor a file{did_you_mean(name, known)}; "
            f"{all_of_them} are: {', '.join(known)}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read as a TOML file: {error}") from error


def to_toml(config: Config, comment: str = "") -> str:
    """TOML text that resolves to `config` again; values that no layer set are left out."""
    table = config.to_dict()
    stages = table.pop("stage")
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    for name, section in table.items():
        lines += _section(name, _given(section, name, config.origins))
    for stage in stages:
        own = {key: value for key, value in stage.items() if not isinstance(value, Mapping)}
        lines += ["", "[[stage]]", *(f"{key} = {toml_value(own[key])}" for key in own)]
        for name, section in stage.items():
            if name not in own:
                lines += _section(f"stage.{name}", section)
    return "\n".join(lines).lstrip("\n") + "\n"


def _given(table: Mapping[str, Any], path: str, origins: Mapping[str, str]) -> dict[str, Any]:
    """What remains of a table without the values that nobody set."""
    given: dict[str, Any] = {}
    for key, value in table.items():
        below = value
        if isinstance(value, Mapping) and value:
            below = _given(value, join(path, key), origins)
            if not below:
                continue
        elif origins and join(path, key) not in origins:
            continue
        given[key] = below
    return given


def _section(header: str, table: Mapping[str, Any]) -> list[str]:
    scalars = {k: v for k, v in table.items() if not isinstance(v, Mapping) and v is not None}
    below = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    lines = ["", f"[{header}]"] if scalars or (table and not below) else []
    lines += [f"{toml_key(key)} = {toml_value(value)}" for key, value in scalars.items()]
    for key, value in below.items():
        # An empty table still has to be written: it replaces what is merged below it.
        lines += _section(f"{header}.{toml_key(key)}", value) or ["", f"[{header}.{toml_key(key)}]"]
    return lines


def toml_key(key: str) -> str:
    return key if _BARE.fullmatch(key) else toml_value(key)


def toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    if isinstance(value, float):
        return repr(value)
    # TOML strings allow what JSON strings do, except a raw delete character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
