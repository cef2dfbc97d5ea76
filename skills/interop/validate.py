"""The open Agent Skills format, checked strictly, as its reference validator does.

Errors make a skill invalid everywhere; warnings are what lenient clients shrug at.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distill.errors import DataError
from skills.interop.files import NAMES, read_text
from skills.interop.frontmatter import Value, read

MAX_NAME = 64
MAX_DESCRIPTION = 1024
MAX_COMPATIBILITY = 500
MAX_BODY_LINES = 500
KEYS = ("name", "description", "license", "compatibility", "metadata", "allowed-tools")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    key: str
    text: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def name_problems(name: str, folder: str | None = None) -> list[Problem]:
    """What is wrong with a skill's name. Letters of any script are letters, as in the reference."""
    name = unicodedata.normalize("NFKC", name.strip())
    found = []
    if not name:
        return [Problem(key="name", text="it is missing or empty")]
    if len(name) > MAX_NAME:
        found.append(f"it has {len(name)} characters, at most {MAX_NAME} are allowed")
    if name != name.lower():
        found.append(f"{name!r} must be lower case")
    if name.startswith("-") or name.endswith("-") or "--" in name:
        found.append(f"{name!r} must not begin or end with a hyphen, nor hold two in a row")
    wrong = sorted({c for c in name if not (c.isalnum() or c == "-")})
    if wrong:
        found.append(f"{name!r} holds {wrong[0]!r}; only letters, digits and hyphens are allowed")
    if folder is not None and unicodedata.normalize("NFKC", folder) != name:
        found.append(f"the folder is called {folder!r}, the skill {name!r}; they must be equal")
    return [Problem(key="name", text=text) for text in found]


def front_matter_problems(values: Mapping[str, Value], folder: str | None = None) -> list[Problem]:
    """What the strict validator says about a front matter, in the order of its keys."""
    name = values.get("name", "")
    found = name_problems(name if isinstance(name, str) else "", folder)
    description = values.get("description", "")
    if not isinstance(description, str) or not description.strip():
        found.append(Problem(key="description", text="it is missing or blank"))
    elif len(description) > MAX_DESCRIPTION:
        found.append(
            Problem(
                key="description",
                text=f"it has {len(description)} characters, at most {MAX_DESCRIPTION} are allowed",
            )
        )
    for key in ("license", "compatibility", "allowed-tools"):
        value = values.get(key)
        if value is not None and not isinstance(value, str):
            found.append(Problem(key=key, text="it must be text on one line"))
    compatibility = values.get("compatibility")
    if isinstance(compatibility, str) and not 1 <= len(compatibility) <= MAX_COMPATIBILITY:
        found.append(
            Problem(
                key="compatibility",
                text=f"it has {len(compatibility)} characters, 1 to {MAX_COMPATIBILITY} allowed",
            )
        )
    metadata = values.get("metadata", {})
    if not isinstance(metadata, dict) and metadata != "":
        found.append(Problem(key="metadata", text="it must be a map from text to text"))
    elif isinstance(metadata, dict):
        nested = [k for k, v in metadata.items() if not isinstance(v, str)]
        if nested:
            found.append(Problem(key="metadata", text=f"the value of {nested[0]!r} must be text"))
    for key in values:
        if key not in KEYS:
            found.append(Problem(key=key, text=f"unknown key; known are {', '.join(KEYS)}"))
    return found


def validate_text(text: str, folder: str | None = None) -> list[Problem]:
    """Problems of the text of a SKILL.md; none of them is an error when it is valid."""
    try:
        matter = read(text, strict=True)
    except DataError as error:
        return [Problem(key="front matter", text=str(error))]
    found = front_matter_problems(matter.values, folder)
    lines = matter.body.count("\n") + 1
    if lines > MAX_BODY_LINES:
        found.append(
            Problem(
                key="body",
                text=f"it has {lines} lines; clients load at most about {MAX_BODY_LINES}",
                is_error=False,
            )
        )
    return found


def validate_folder(folder: Path) -> list[Problem]:
    """Problems of a skill's folder. A missing SKILL.md is one."""
    path = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if path is None:
        return [Problem(key="SKILL.md", text=f"{folder} holds none")]
    try:
        text = read_text(path)
    except DataError as error:
        return [Problem(key=path.name, text=str(error))]
    return validate_text(text, folder.resolve().name)
