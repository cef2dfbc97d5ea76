"""Named entities (people, places, organisations) as a second pass of redaction, for those who want
it: rules know what a card number looks like, and nothing of names.

    my_pkg.module:attr      a function text -> (start, end, label)s, or a class that makes one
    ner:PATH                a folder with a token-classification model of transformers
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distill.curriculum.pii import Entities
from distill.errors import ConfigError, MissingExtra

LOCAL = "ner:"
MIN_SCORE = 0.5
WINDOW = 1500
"""Characters that a model reads at once; they overlap, so that no name is cut in two."""
OVERLAP = 150


def load_entities(spec: str) -> Entities:
    """The recogniser that a setting names. ConfigError if there is none at that place."""
    if spec.startswith(LOCAL):
        return _LocalModel(Path(spec.removeprefix(LOCAL)))
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise ConfigError(
            "expected a named-entity recogniser as my_pkg.module:attr or ner:FOLDER, found "
            f"{spec!r}"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{spec!r}: there is no module {error.name!r} to import") from error
    except AttributeError as error:
        raise ConfigError(f"{spec!r}: the module {module!r} has no {name!r}") from error
    entities = found() if isinstance(found, type) else found
    if not callable(entities):
        raise ConfigError(
            f"{spec!r} should be a function from a text to (start, end, label)s, found "
            f"{type(entities).__name__}"
        )
    return entities  # type: ignore[no-any-return]


class _LocalModel:
    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"ner:{folder}: expected a folder with a token-classification model (config.json, "
                "weights, tokenizer), found none; models are not fetched from anywhere"
            )
        try:
            import transformers
        except ImportError as error:
            raise MissingExtra.of(
                "transformers", extra="dev", feature="a named-entity model"
            ) from error
        pipeline: Any = transformers.pipeline
        try:
            self._pipeline = pipeline(
                "token-classification",
                model=str(folder),
                tokenizer=str(folder),
                aggregation_strategy="simple",
                device="cpu",
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"ner:{folder}: transformers could not load it as a token-classification model: "
                f"{error}"
            ) from error

    def __call__(self, text: str) -> Iterable[tuple[int, int, str]]:
        found = {}
        for start in range(0, max(1, len(text) - OVERLAP), WINDOW - OVERLAP):
            for entity in self._pipeline(text[start : start + WINDOW]):
                if entity["score"] >= MIN_SCORE:
                    place = (start + int(entity["start"]), start + int(entity["end"]))
                    found[place] = str(entity["entity_group"])
        return [(a, b, label) for (a, b), label in sorted(found.items())]
