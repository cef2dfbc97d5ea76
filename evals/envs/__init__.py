"""Environments: where tasks come from and how replies are graded.

`build_env` makes one from its name and options. A name is a key of `ENVS`, or
`my_pkg.module:attr` for a class or factory of your own that takes the options as keywords.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from distill.errors import ConfigError
from distill.protocols import Env

ENVS: dict[str, str] = {
    "world": "evals.envs.world:World",
    "gym": "evals.envs.gym:Gym",
    "jsonl": "evals.envs.table:Jsonl",
    "parquet": "evals.envs.table:Parquet",
    "dataset": "evals.envs.table:Dataset",
    "textworld": "evals.envs.textworld:TextWorldEnv",
    "verifiers": "evals.envs.verifiers_env:VerifiersEnv",
    "routing": "evals.envs.routing:Routing",
}


def build_env(name: str, options: Mapping[str, Any], *, seed: int) -> Env:
    """Make the environment `name` with exactly the options that its class has.

    `seed` is passed on when the class has a `seed` and the options do not set it. Raises
    ConfigError for an unknown name, an unknown option or a value of the wrong type.
    """
    factory = _load(name)
    accepted, open_ended = _parameters(factory)
    unknown = [] if open_ended else sorted(set(options) - set(accepted))
    if unknown:
        raise ConfigError(
            f"environment {name!r} has no option {unknown[0]!r}"
            f"{_nearest(unknown[0], accepted)}; its options are: {', '.join(accepted) or 'none'}"
        )
    values = _typed(name, factory, options)
    if "seed" in accepted:
        values.setdefault("seed", seed)
    missing = sorted(key for key, needed in accepted.items() if needed and key not in values)
    if missing:
        raise ConfigError(f"environment {name!r} needs the option {missing[0]!r}; add it to [data]")
    env: Env = factory(**values)
    return env


def _load(name: str) -> Callable[..., Env]:
    target = ENVS.get(name, name)
    module, colon, attr = target.partition(":")
    if not (colon and module and attr):
        raise ConfigError(
            f"unknown environment {name!r}{_nearest(name, ENVS)}; expected one of "
            f"{', '.join(ENVS)}, or my_pkg.module:attr for one of your own"
        )
    try:
        factory: Callable[..., Env] = getattr(importlib.import_module(module), attr)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment {name!r}: cannot import {error.name!r}; is its folder on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"environment {name!r}: module {module} has no {attr!r}") from error
    except Exception as error:  # whatever the user's own module does
        raise ConfigError(
            f"environment {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(factory):
        raise ConfigError(f"environment {name!r} must be a class or a factory, found {factory!r}")
    return factory


def _parameters(factory: Callable[..., Env]) -> tuple[dict[str, bool], bool]:
    """Keyword options of a factory -> whether each must be given; and whether it takes any."""
    keywords = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(factory).parameters.values()
    accepted = {p.name: p.default is p.empty for p in parameters if p.kind in keywords}
    return accepted, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _typed(name: str, factory: Callable[..., Env], options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options against the annotations of a dataclass; lists become tuples there."""
    if not (isinstance(factory, type) and is_dataclass(factory)):
        return dict(options)
    from pydantic import TypeAdapter, ValidationError

    hints = get_type_hints(factory)
    values: dict[str, Any] = {}
    for key, value in options.items():
        try:
            # JSON in strict mode takes an array for a tuple but never a string for a number.
            text = json.dumps(value)
            values[key] = TypeAdapter(hints[key]).validate_json(text, strict=True)
        except (ValidationError, TypeError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise ConfigError(
                f"environment {name!r}: option {key!r} has the wrong type: {why}; found {value!r}"
            ) from error
    return values


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
