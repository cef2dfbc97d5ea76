"""The verbs of `distill skills` that change a bank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from distill.errors import ConfigError, DistillError
from flows.options import Home, Json, Yes
from flows.output import print_json, say
from flows.skills_completion import complete_skill, complete_version
from flows.skills_options import (
    Bank,
    DryRun,
    Id,
    Ids,
    Reason,
    changing,
    example,
    open_bank,
    require_yes,
    who,
)

if TYPE_CHECKING:
    from skills.bank import SkillBank
    from skills.change import Change
    from skills.items import SkillItem

Live = Literal["candidate", "active"]
HELD = 3
"""Exit code when a skill was not taken in, or went to quarantine."""


def register(app: typer.Typer) -> None:
    for name, verb, words in (
        ("init", init, "main --capacity 200"),
        ("add", add, "skill.toml --bank main"),
        ("edit", edit, "gen_001 --set title='Heat, then place'"),
        ("merge", merge, "gen_001 dyn_004 dyn_009 --yes"),
        ("dedupe", dedupe, "--dry-run"),
        ("retire", retire, "dyn_004 --reason 'misleads in the kitchen' --yes"),
        ("restore", restore, "dyn_004 --reason 'the kitchen was repaired'"),
        ("activate", activate, "dyn_004 --reason 'read and approved'"),
        ("pin", pin, "gen_001"),
        ("rollback", rollback, "3f2a91c0 --yes"),
    ):
        app.command(name, epilog=example(name, words))(verb)


def init(
    name: Annotated[str, typer.Argument(help="Name of the bank.")] = "main",
    capacity: Annotated[int, typer.Option(min=0, help="Live skills at most; 0: no limit.")] = 100,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Make an empty bank."""
    from skills.bank import SkillBank

    bank = SkillBank.create(home, name, capacity=capacity, actor=who())
    if as_json:
        print_json({"bank": name, "path": bank.path, "version": bank.snapshot()})
    else:
        print(bank.path)


def add(
    file: Annotated[str, typer.Argument(help="TOML or JSON with one or more skills; - reads it.")],
    status: Annotated[Live, typer.Option(help="What they become.")] = "candidate",
    keep_repeats: Annotated[
        bool, typer.Option("--keep-repeats", help="Do not merge what repeats another skill.")
    ] = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> int:
    """Add skills: checked, merged with what they repeat, suspicious ones into quarantine. Exit
    code 3 when one was refused or is in quarantine."""
    from dataclasses import replace

    from flows.skills_text import read_skills
    from skills.intake import AddOptions

    held = open_bank(home, bank)
    items = [replace(item, status=status) for item in read_skills(file)]
    with changing(held, dry_run) as change:
        outcomes = change.add(items, AddOptions(dedup=not keep_repeats), reason=reason)
    if as_json:
        print_json({"outcomes": outcomes, "evicted": change.evicted, "version": _id(change)})
    else:
        from flows.skills_tables import show_outcomes

        show_outcomes(outcomes)
        if change.evicted:
            listed = ", ".join(change.evicted)
            say(f"over the capacity of {held.capacity}: evicted {listed}")
    return HELD if any(o.result in ("refused", "quarantined") for o in outcomes) else 0


def edit(
    skill: Id,
    fields: Annotated[
        list[str] | None, typer.Option("--set", help="FIELD=VALUE; may be repeated.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="File with the edited fields.")
    ] = None,
    reason: Reason = "",
    dry_run: DryRun = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> int:
    """Edit a skill in $VISUAL or $EDITOR, or directly with --set or --from. Exit code 3 when the
    new text is suspicious and the skill goes to quarantine."""
    from flows import skills_text

    held = open_bank(home, bank)
    old = held.get(skill)
    path: Path | None = None
    if fields:
        new = skills_text.with_fields(old, skills_text.parse_fields(fields), "--set")
    elif source is not None:
        new = _from_file(old, source)
    else:
        edited = skills_text.edit_in_editor(old)
        new, path = edited if edited is not None else (old, None)
    try:
        stored = _store_edit(held, old, new, reason, dry_run) if new != old else old
    except DistillError as error:
        if path is None:
            raise
        skills_text.keep_changes(old, new, path)
        raise skills_text.kept(error, old, path) from error
    if path is not None:
        skills_text.discard(path)
    if as_json:
        print_json({"id": skill, "changed": stored != old, "status": stored.status})
    elif stored == old:
        print(f"{skill}: unchanged")
    else:
        from flows.skills_tables import show_field_changes

        show_field_changes(old, stored)
    return HELD if stored.status == "quarantined" and old.status != "quarantined" else 0


def _from_file(old: SkillItem, source: Path) -> SkillItem:
    from distill.errors import DataError
    from flows.skills_text import from_text

    try:
        return from_text(source.read_text(encoding="utf-8"), old, str(source))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source} cannot be read: {error}") from error


def _store_edit(
    bank: SkillBank, old: SkillItem, new: SkillItem, reason: str, dry_run: bool
) -> SkillItem:
    with changing(bank, dry_run) as change:
        if change.get(old.id) != old:
            raise ConfigError(f"skill {old.id!r} was changed by somebody else in the meantime")
        return change.edit(new, reason=reason)


def merge(
    into: Annotated[
        str, typer.Argument(help="The skill that keeps its text.", autocompletion=complete_skill)
    ],
    others: Annotated[
        list[str],
        typer.Argument(help="The skills that become part of it.", autocompletion=complete_skill),
    ],
    reason: Reason = "",
    yes: Yes = False,
    dry_run: DryRun = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Make several skills one: evidence and counts are united, utility is weighted by uses."""
    require_yes(yes, dry_run, f"merging takes {', '.join(others)} out of the bank")
    with changing(open_bank(home, bank), dry_run) as change:
        item = change.merge(into, others, reason=reason)
    if as_json:
        print_json({"id": into, "merged": others, "version": _id(change)})
    else:
        utility = f"utility {item.credit.utility:.3f}"
        print(f"{into}: took in {', '.join(others)}; {utility}, {len(item.evidence)} trajectories")


def dedupe(
    ratio: Annotated[
        float, typer.Option(min=0.5, max=1.0, help="Lexical ratio above which two are one.")
    ] = 0.85,
    yes: Yes = False,
    dry_run: DryRun = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Find skills that say the same, and merge each into the better one."""
    require_yes(yes, dry_run, "dedupe merges skills that say the same")
    with changing(open_bank(home, bank), dry_run) as change:
        pairs = change.dedupe(lexical_ratio=ratio)
    if as_json:
        print_json([{"id": gone, "into": into, "how": how} for gone, into, how in pairs])
    elif pairs:
        from flows.skills_tables import show_table

        rows = [{"id": gone, "merged into": into, "because": how} for gone, into, how in pairs]
        show_table(rows, ["id", "merged into", "because"])
    else:
        say("no skill repeats another one")


def retire(
    skills: Ids,
    reason: Reason = "",
    yes: Yes = False,
    dry_run: DryRun = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Take skills out for good: their text cannot come back by adding or importing it."""
    if not reason.strip():
        raise ConfigError("retiring needs --reason '...'; it is kept in the history")
    require_yes(yes, dry_run, f"retiring takes {', '.join(skills)} out for good")
    with changing(open_bank(home, bank), dry_run) as change:
        for skill in dict.fromkeys(skills):
            change.retire(skill, reason=reason)
    _report(change, skills, "retired", as_json)


def restore(
    skills: Annotated[
        list[str],
        typer.Argument(help="Ids of retired or quarantined skills.", autocompletion=complete_skill),
    ],
    status: Annotated[Live, typer.Option(help="What they become.")] = "candidate",
    reason: Reason = "",
    dry_run: DryRun = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Bring skills back that were retired or are in quarantine, on your own responsibility."""
    if not reason.strip():
        raise ConfigError("restoring needs --reason '...'; it is kept in the history")
    with changing(open_bank(home, bank), dry_run) as change:
        for skill in dict.fromkeys(skills):
            change.restore(skill, reason=reason, status=status)
    _report(change, skills, f"restored as {status}", as_json)


def activate(
    skills: Ids,
    reason: Reason = "",
    dry_run: DryRun = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Let candidates be shown without waiting for a measured gain, on your own responsibility."""
    if not reason.strip():
        raise ConfigError("activating needs --reason '...'; it is kept in the history")
    with changing(open_bank(home, bank), dry_run) as change:
        for skill in dict.fromkeys(skills):
            status = change.get(skill).status
            if status not in ("candidate", "active"):
                raise ConfigError(
                    f"skill {skill!r} is {status}, not a candidate; use: distill skills restore"
                )
            if status == "candidate":
                change.set_status(skill, "active", reason=reason)
    _report(change, skills, "active", as_json)


def pin(
    skills: Ids,
    off: Annotated[bool, typer.Option("--off", help="Unpin instead.")] = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Exempt skills from eviction."""
    with changing(open_bank(home, bank), dry_run) as change:
        for skill in dict.fromkeys(skills):
            change.pin(skill, pinned=not off, reason=reason)
    _report(change, skills, "unpinned" if off else "pinned", as_json)


def rollback(
    to: Annotated[
        str | None,
        typer.Argument(help="Version; default: the one before.", autocompletion=complete_version),
    ] = None,
    reason: Reason = "",
    yes: Yes = False,
    dry_run: DryRun = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Make an earlier version the active one again. What was retired since stays retired."""
    require_yes(yes, dry_run, "rollback changes which skills are used")
    held = open_bank(home, bank)
    with changing(held, dry_run) as change:
        kept = held.undo(change, to, reason=reason)
    version = _id(change)
    if as_json:
        print_json({"version": version, "stay_retired": kept})
        return
    print(f"bank {held.name}: version {version[:12]}, {len(change.rows)} skills")
    if kept:
        print(f"stay retired: {', '.join(kept)}")


def _report(change: Change, skills: list[str], what: str, as_json: bool) -> None:
    if as_json:
        print_json({"ids": skills, "result": what, "version": _id(change)})
    else:
        for skill in skills:
            print(f"{skill}: {what}")


def _id(change: Change) -> str:
    return change.version().id
