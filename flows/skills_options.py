"""What the verbs of `distill skills` share: options, opening a bank, making a change."""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distill.errors import ConfigError
from flows.output import say
from flows.skills_completion import complete_bank, complete_skill, complete_version

if TYPE_CHECKING:
    from skills.bank import SkillBank
    from skills.change import Change

Bank = Annotated[
    str,
    typer.Option(help="Name of the bank; default: the only one.", autocompletion=complete_bank),
]
Id = Annotated[str, typer.Argument(help="Id of a skill.", autocompletion=complete_skill)]
Ids = Annotated[list[str], typer.Argument(help="Ids of skills.", autocompletion=complete_skill)]
Version = Annotated[
    str | None,
    typer.Option(
        help="Beginning of a version's id; default: the active one.",
        autocompletion=complete_version,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, do nothing.")]
Reason = Annotated[
    str,
    typer.Option(help="Why; kept in the history. Needed to activate, retire and restore."),
]
WAIT = 10.0
"""Seconds for another writer to finish."""


def example(verb: str, words: str) -> str:
    """The last line of a help page."""
    return f"Example: distill skills {verb} {words}".rstrip()


def open_bank(home: Path, name: str) -> SkillBank:
    """The bank of this name; without a name the only one there is."""
    from skills.bank import SkillBank

    if not name:
        names = SkillBank.names(home)
        if not names:
            raise ConfigError(f"no skill bank in {home / 'bank'}; make one: distill skills init")
        if len(names) > 1:
            raise ConfigError(f"there are several banks; choose one: --bank {' | '.join(names)}")
        (name,) = names
    return SkillBank.open(home, name)


def require_yes(yes: bool, dry_run: bool, what: str) -> None:
    if not (yes or dry_run):
        raise ConfigError(f"{what}; confirm with --yes, or look first with --dry-run")


@contextlib.contextmanager
def changing(bank: SkillBank, dry_run: bool) -> Iterator[Change]:
    """A change by the person at the keyboard."""
    with bank.change(actor=who(), dry_run=dry_run, wait=WAIT) as change:
        yield change
    if dry_run:
        say("dry run: nothing was changed")


def who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        return "user"
