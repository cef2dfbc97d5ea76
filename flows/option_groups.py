"""Options of a command as one record, so that a verb with many of them stays readable."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def grouped(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb as Typer should see it: a parameter whose type is a dataclass is replaced by the
    fields of that class, which are annotated with options and have defaults."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {}
    shown: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        kind: Any = hints[parameter.name]
        if not is_dataclass(kind):
            shown.append(_option(parameter.name, parameter.default, kind))
            continue
        groups[parameter.name] = kind
        types = get_type_hints(kind, include_extras=True)
        shown += [_option(field.name, field.default, types[field.name]) for field in fields(kind)]

    @functools.wraps(verb)
    def run(**values: Any) -> Any:
        for name, cls in groups.items():
            values[name] = cls(**{field.name: values.pop(field.name) for field in fields(cls)})
        return verb(**values)

    run.__dict__["__signature__"] = inspect.Signature(shown)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def _option(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
