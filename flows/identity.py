"""Are the five packages ours? Other distributions use the same import names, and an installer lets
one overwrite another's files."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("distill", "skills", "teachers", "evals", "flows")


def places() -> dict[str, Path | None]:
    """The folder that each package would be imported from; None for a missing one."""
    found: dict[str, Path | None] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        where = spec.submodule_search_locations if spec else None
        found[package] = Path(next(iter(where))).resolve().parent if where else None
    return found


def foreign_packages(where: Mapping[str, Path | None] | None = None) -> str:
    """What is wrong, or nothing: all five must lie in the folder of `flows`."""
    where = places() if where is None else where
    home = where["flows"]
    foreign = [f"{package} from {place}" for package, place in where.items() if place != home]
    return f"flows comes from {home}, but {', '.join(foreign)}" if foreign else ""
