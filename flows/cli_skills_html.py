"""`distill skills html`: a bank as one page for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distill.errors import ConfigError
from flows.options import Home, Json, Yes
from flows.output import print_json, print_table, say
from flows.skills_options import Bank, Version, example, open_bank

if TYPE_CHECKING:
    from skills.bank import SkillBank


def register(app: typer.Typer) -> None:
    app.command("html", epilog=example("html", "skills.html --bank main"))(html)


def html(
    out: Annotated[
        Path | None, typer.Argument(help="File to write; default: BANK.skills.html here.")
    ] = None,
    version: Version = None,
    against: Annotated[
        str | None, typer.Option(help="Also show what lies between this version and that one.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    yes: Yes = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Write one page that shows a bank: search, filters, every skill and what changed. An older
    page is replaced; another file only with --yes."""
    from distill.rundir import atomic_write
    from skills.page import build_page

    held = open_bank(home, bank)
    path = Path(f"{held.name}.skills.html") if out is None else out
    _refuse_foreign(path, yes)
    name = held.resolve(version)
    atomic_write(path, build_page(held, version=name, against=against))
    counts = _counts(held, name)
    facts = {"bank": held.name, "version": name, **counts, "path": path}
    if as_json:
        print_json(facts)
    else:
        row = {**facts, "version": name[:12]}
        print_table([row], ["bank", "version", *counts, "path"])
    if show:
        _open(path)


def _refuse_foreign(path: Path, yes: bool) -> None:
    """ConfigError when the path is no regular file, or one that is no such page."""
    from skills.page import is_page

    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it, such as {path / 'skills.html'}")
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{path} is no regular file but a pipe, a device or the like; name a file to write, "
            "such as skills.html"
        )
    if yes or not path.exists():
        return
    with path.open("rb") as file:
        start = file.read(4096).decode("utf-8", errors="replace")
    if not is_page(start):
        raise ConfigError(
            f"{path} exists and is not a page of distill skills html; name another file, or "
            "replace it with --yes"
        )


def _counts(bank: SkillBank, version: str) -> dict[str, int]:
    from skills.items import STATUSES

    found = [row.status for row in bank.rows(version=version)]
    return {"skills": len(found), **{status: found.count(status) for status in STATUSES}}


def _open(path: Path) -> None:
    import webbrowser

    if not webbrowser.open(path.resolve().as_uri()):
        say(f"no browser could be started; open {path.resolve()} in one")
