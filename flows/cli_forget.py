"""`distill forget`: erase a user, a session or a source, and say which champions saw them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.errors import ConfigError
from flows.option_groups import grouped
from flows.options import Home, Json, Yes
from flows.output import print_json, say
from flows.skills_options import DryRun, who

if TYPE_CHECKING:
    from flows.forgetting import Found, Wanted

EXAMPLE = "Example: distill forget --user alice --dry-run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Whom:
    """Exactly one of these, or a session and its source."""

    user: Annotated[str, typer.Option(help="A user, by the name in the log or by its key.")] = ""
    session: Annotated[
        str, typer.Option(help="One conversation: in every source, or in that of --source.")
    ] = ""
    source: Annotated[str, typer.Option(help="A whole source of logs.")] = ""


def register(app: typer.Typer) -> None:
    app.command("forget", epilog=EXAMPLE)(grouped(forget))


def forget(
    whom: Whom,
    store: Annotated[
        str, typer.Option(help="Only this log store; default: every one of the folder.")
    ] = "",
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Erase a user, a session or a source: their turns in log stores, the examples and rollouts
    that were made of them, and skills that only these taught. Lists the champions that saw them.
    Nothing is erased without --yes."""
    from flows.forgetting import carry_out, look

    wanted = _wanted(whom)
    found = look(home, wanted, store=store)
    act = yes and not dry_run and not found.is_empty
    if act:
        carry_out(home, found, actor=who())
    if as_json:
        print_json(_facts(found, done=act or found.is_empty))
    else:
        from flows.forgetting_showing import show_forgetting

        show_forgetting(found, done=act)
    if dry_run:
        say("dry run: nothing was erased")
    elif not yes and not found.is_empty:
        raise ConfigError("nothing was erased; confirm with --yes")


def _wanted(whom: Whom) -> Wanted:
    from flows.forgetting import KINDS, Wanted

    given = [(kind, getattr(whom, kind)) for kind in KINDS if getattr(whom, kind)]
    if [kind for kind, _ in given] == ["session", "source"]:
        return Wanted(kind="session", name=whom.session, source=whom.source)
    if len(given) != 1:
        named = ", ".join(f"--{kind}" for kind, _ in given) or "none"
        raise ConfigError(
            f"name exactly one of --user, --session and --source, or a session with its source; "
            f"found {named}. {EXAMPLE}"
        )
    ((kind, name),) = given
    return Wanted(kind=kind, name=name)


def _facts(found: Found, *, done: bool) -> dict[str, Any]:
    from flows.forgetting import counts

    return {
        "kind": found.wanted.kind,
        "name": found.wanted.name,
        "done": done,
        **counts(found),
        "stores": [
            {
                "path": one.path,
                "calls": one.calls,
                "calls_of_others": one.others,
                "evidence": one.evidence,
                "sources": one.sources,
            }
            for one in found.stores
            if one.calls + one.others + one.evidence
        ],
        "curricula": [
            {"path": one.path, "turns": sorted(one.ids), "examples": one.examples}
            for one in found.curricula
        ],
        "stages": [
            {"run": one.reader.run, "stage": one.reader.stage, "rollouts": one.rows}
            for one in found.stages
        ],
        "skills": {
            bank: [skill for skill, _ in skills] for bank, skills in found.skills.items() if skills
        },
        "trained": found.trained,
        "seen_by": found.champions,
        "log_files": sorted({path for one in found.stores for path in one.files}),
        "unread_runs": found.unread,
        "leftovers": found.leftovers,
        "unreached": [{"path": path, "why": why} for path, why in found.unreached],
    }
