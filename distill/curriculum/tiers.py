"""Which tier a name or a model stands for. The mapping is the user's and has a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from distill.curriculum.records import NUM_TIERS
from distill.errors import ConfigError

NAMES: dict[str, int] = {
    **{f"{letter}{tier}": tier for letter in ("c", "r", "") for tier in range(NUM_TIERS)},
    "simple": 0,
    "medium": 1,
    "complex": 2,
    "reasoning": 3,
}
"""Tier names of known routers, in lower case. A table of one's own adds to them and wins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """Tiers of model and tier names.

    A model is looked up as it is written, then without its provider (`azure/gpt-x` as `gpt-x`),
    then against the names with a `*`, first match first. ConfigError for a tier that is none.
    """

    models: Mapping[str, int | str] = field(default_factory=dict)
    """Model, a pattern with `*`, or the log's own name of a tier -> 0..3 or a known tier's name."""
    names: Mapping[str, int] = field(default_factory=dict)
    """Further tier names -> 0..3."""
    _names: dict[str, int] = field(init=False, repr=False, compare=False)
    _models: dict[str, int | None] = field(init=False, repr=False, compare=False)
    _patterns: tuple[tuple[str, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = NAMES | {name.strip().lower(): tier for name, tier in self.names.items()}
        for name, tier in self.names.items():
            if type(tier) is not int or not 0 <= tier < NUM_TIERS:
                raise ConfigError(
                    f"tier name {name!r}: expected a tier from 0 to {NUM_TIERS - 1}, found {tier!r}"
                )
        found: dict[str, int | None] = {}
        for model, named in self.models.items():
            known = names.get(str(named).strip().lower())
            if known is None:
                raise ConfigError(
                    f"tier of model {model!r}: expected a tier from 0 to {NUM_TIERS - 1} or one of "
                    f"{', '.join(names)}, found {named!r}; own names go into the table of names"
                )
            found[model] = known
        names = {m.strip().lower(): t for m, t in found.items() if t is not None} | names
        patterns = tuple((m, t) for m, t in found.items() if "*" in m and t is not None)
        object.__setattr__(self, "_names", names)
        object.__setattr__(self, "_models", found)
        object.__setattr__(self, "_patterns", patterns)

    @property
    def digest(self) -> str:
        """16 hex digits that change with the mapping: aliases change their meaning over time."""
        content = json.dumps([dict(self.models), dict(self.names)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def of_name(self, name: str | int | None) -> int | None:
        """Tier that a router's word stands for; None for an unknown word."""
        if name is None or isinstance(name, bool):
            return None
        return self._names.get(str(name).strip().lower())

    def of_model(self, model: str | None) -> int | None:
        """Tier that a model is configured to be; None for a model that nobody named."""
        if not model or not self._models:
            return None
        if model not in self._models:
            if len(self._models) > 10_000:  # names from a log are not ours to trust
                return self._search(model)
            self._models[model] = self._search(model)
        return self._models[model]

    def _search(self, model: str) -> int | None:
        bare = model.rpartition("/")[2]
        if bare in self.models:
            return self._models[bare]
        for pattern, tier in self._patterns:
            if fnmatchcase(model, pattern) or fnmatchcase(bare, pattern):
                return tier
        return None
