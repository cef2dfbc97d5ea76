"""A skill as the file that a person edits, and back."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import ConfigError, DataError, DistillError
from distill.tables import parse_overrides

if TYPE_CHECKING:
    from skills.items import SkillItem

EDITABLE = (
    *("title", "kind", "level", "category", "principle", "when_to_apply", "body", "avoid"),
    *("pinned", "scope"),
)
"""What a person writes. Credit is measured, status has verbs of its own."""
CLAIMS = ("status", "credit", "safety")
"""What nobody can claim about a new skill."""


def to_toml(item: SkillItem) -> str:
    """The editable part of a skill as TOML."""
    from skills.codec import to_table

    table = to_table(item)
    lines = [
        f"# Skill {json.dumps(item.id)}, {item.status}. Save and leave the editor to store it;",
        "# leave it unchanged to change nothing.",
        "# kind: principle, workflow, correction, mistake; level: general, task, step",
    ]
    lines += [f"{name} = {_toml(table[name])}" for name in EDITABLE if name != "scope"]
    lines += ["", "# Where it applies; empty is anywhere.", "[scope]"]
    lines += [f"{name} = {_toml(value)}" for name, value in table["scope"].items()]
    return "\n".join(lines) + "\n"


def from_text(text: str, item: SkillItem, where: str) -> SkillItem:
    """The skill with the edited fields. DataError naming what is wrong in `where`."""
    return with_fields(item, _parse(text, where), where)


def with_fields(item: SkillItem, table: Mapping[str, Any], where: str) -> SkillItem:
    """The skill with some editable fields replaced."""
    from distill.tables import reject_unknown
    from skills.codec import parse_item, to_table

    try:
        reject_unknown(table, EDITABLE, "", lambda _: where, "a skill")
    except ConfigError as error:
        raise DataError(str(error)) from error
    old = to_table(item)
    scope = table.get("scope", {})
    merged = {**old["scope"], **scope} if isinstance(scope, Mapping) else scope
    return parse_item({**old, **table, "scope": merged}, where)


def read_skills(path: str) -> list[SkillItem]:
    """Skills out of a TOML or JSON file, or of standard input with `-`: one table, a list of
    them, or TOML with `[[skill]]`. An id may be missing."""
    import sys

    from skills.codec import parse_item

    where = "standard input" if path == "-" else path
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{where} cannot be read: {error}") from error
    value = _parse(text, where)
    if isinstance(value, Mapping) and "skill" in value:
        value = value["skill"]
    tables = value if isinstance(value, list) else [value]
    items = []
    for number, table in enumerate(tables, start=1):
        place = where if len(tables) == 1 else f"{where}, skill {number}"
        if not isinstance(table, Mapping):
            raise DataError(f"{place}: expected a table of fields, found {type(table).__name__}")
        claimed = [name for name in CLAIMS if name in table]
        if claimed:
            raise DataError(
                f"{place}: {claimed[0]!r} is not written by hand: status is given with --status, "
                "credit and safety are measured; skills of another bank come in with: distill "
                "skills import"
            )
        items.append(parse_item({"id": f"new_{number:03d}", **table}, place))
    return items


def parse_fields(fields: Sequence[str]) -> dict[str, Any]:
    """`key=value` words as the table that they describe."""
    return parse_overrides(fields)


def edit_in_editor(item: SkillItem) -> tuple[SkillItem, Path] | None:
    """Open the skill in $VISUAL or $EDITOR. None when nothing was changed; else the edited skill
    and the file with its text. An error keeps the file and names it."""
    command = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")
    if not command:
        raise ConfigError(
            "no editor is known: set EDITOR, or change fields directly with --set title=..."
        )
    folder = Path(tempfile.mkdtemp(prefix="distill-edit-"))
    path, before = folder / "skill.toml", to_toml(item)
    path.write_text(before, encoding="utf-8")
    try:
        done = subprocess.run([*command, str(path)], check=False)
    except OSError as error:
        discard(path)
        raise ConfigError(f"the editor {command[0]!r} cannot be started: {error}") from error
    if done.returncode != 0:
        discard(path)
        raise ConfigError(f"the editor {command[0]!r} ended with code {done.returncode}")
    try:
        text = path.read_text(encoding="utf-8")
        if text == before:
            discard(path)
            return None
        return from_text(text, item, str(path)), path
    except (OSError, ValueError) as error:
        raise kept(error, item, path) from error


def kept(error: Exception, item: SkillItem, path: Path) -> DistillError:
    """The error, and where the text of the editor is."""
    kind = type(error) if isinstance(error, DistillError) else DataError
    again = f"distill skills edit {shlex.quote(item.id)} --from {shlex.quote(str(path))}"
    return kind(f"{error}; your text is kept in {path}: correct it, then: {again}")


def keep_changes(old: SkillItem, new: SkillItem, path: Path) -> None:
    """Leave only what the person changed in the file, so that it can be applied to the skill as it
    is by now without undoing what others did."""
    from skills.codec import to_table

    before, after = to_table(old), to_table(new)
    lines = ["# Only what you changed; the rest of the skill stays as it is by now."]
    changed = [name for name in EDITABLE if after[name] != before[name]]
    lines += [f"{name} = {_toml(after[name])}" for name in changed if name != "scope"]
    if "scope" in changed:
        lines += ["", "[scope]"]
        scope = after["scope"].items()
        lines += [f"{k} = {_toml(v)}" for k, v in scope if v != before["scope"][k]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def discard(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.parent.rmdir()


def _parse(text: str, where: str) -> Any:
    start = text.lstrip()[:1]
    try:
        return json.loads(text) if start in ("{", "[") else tomllib.loads(text)
    except ValueError as error:
        # A TOML file may begin with a bracket too: [[skill]].
        if start == "[":
            with contextlib.suppress(ValueError):
                return tomllib.loads(text)
        kind = "JSON" if start == "{" else "TOML"
        raise DataError(f"{where} is not valid {kind}: {error}") from error


def _toml(value: Any) -> str:
    """A string, a boolean or a list of strings; text of several lines stays readable."""
    if isinstance(value, str) and "\n" in value:
        quoted = json.dumps(value, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")
        return (
            '"""\n' + quoted.replace("\\n", "\n") + '"""' if "\\\\n" not in quoted else _line(value)
        )
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
