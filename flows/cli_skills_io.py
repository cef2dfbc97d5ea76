"""`distill skills import` and `export`: skills of others in, skills of a bank out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from distill.errors import ConfigError
from flows.cli_skills_change import HELD
from flows.option_groups import grouped
from flows.options import Home, Json, Yes
from flows.output import print_json, say
from flows.skills_options import Bank, DryRun, Reason, Version, changing, example, open_bank

if TYPE_CHECKING:
    from skills.intake import Outcome
    from skills.interop import Imported
    from skills.items import Status as SkillStatus

Live = Literal["candidate", "active"]
Format = Literal["skillmd", "skillrl", "jsonl", "expel", "ace", "reasoningbank"]


class Status(StrEnum):
    CANDIDATE = "candidate"
    ACTIVE = "active"
    QUARANTINED = "quarantined"
    RETIRED = "retired"


@dataclass(frozen=True, kw_only=True, slots=True)
class Taking:
    """How skills of a file are taken in."""

    status: Annotated[Live, typer.Option(help="What they become.")] = "candidate"
    trusted: Annotated[
        bool,
        typer.Option("--trusted", help="Keep credit and status: only for an export of your own."),
    ] = False
    keep_repeats: Annotated[
        bool, typer.Option("--keep-repeats", help="Do not merge what repeats another skill.")
    ] = False


def register(app: typer.Typer) -> None:
    for name, verb, words in (
        ("import", grouped(import_skills), "./skills --dry-run"),
        ("export", export_skills, "./skills --format skillmd --status active"),
    ):
        app.command(name, epilog=example(name, words))(verb)


def import_skills(
    path: Annotated[
        Path,
        typer.Argument(
            help="SKILL.md folders or an archive of them, JSONL, a packed bank, a SkillRL bank, "
            "a list of rules, a playbook, or memories."
        ),
    ],
    taking: Taking,
    reason: Reason = "",
    dry_run: DryRun = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> int:
    """Take in skills from elsewhere: without the credit and status that they claim, checked like
    any other, merged with what they repeat. Exit code 3 when one was left out, refused, or is in
    quarantine."""
    from flows.skills_files import read_foreign
    from flows.skills_taking import take

    if taking.trusted and taking.status != "candidate":
        raise ConfigError("--trusted keeps every status as it is; leave out --status or --trusted")
    held = open_bank(home, bank)
    found, graves = read_foreign(path)
    with changing(held, dry_run) as change:
        outcomes = take(
            change,
            found,
            graves if taking.trusted else None,
            status=taking.status,
            keep_repeats=taking.keep_repeats,
            reason=reason,
        )
    version = change.version().id
    if as_json:
        skipped = [{"where": where, "reason": why} for where, why in found.skipped]
        facts = {"format": found.format, "outcomes": outcomes, "skipped": skipped}
        more = {"warnings": found.warnings, "evicted": change.evicted, "version": version}
        print_json({**facts, **more})
    else:
        _show_import(found, outcomes)
        if change.evicted:
            say(f"over the capacity of {held.capacity}: evicted {', '.join(change.evicted)}")
    bad = any(o.result in ("refused", "quarantined") for o in outcomes)
    return HELD if bad or found.skipped else 0


def _show_import(found: Imported, outcomes: list[Outcome]) -> None:
    from flows.skills_tables import short, show_table

    for warning in found.warnings:
        say(f"note: {short(warning, 200)}")
    rows: list[dict[str, Any]] = [
        {"given": short(o.given), "result": o.result, "id": o.id, "reason": short(o.reason, 90)}
        for o in outcomes
    ]
    rows += [
        {"given": short(where), "result": "skipped", "reason": short(why, 90)}
        for where, why in found.skipped
    ]
    # An id is told where the skill got another one.
    told = {"id": any(row.get("id") not in (None, "", row["given"]) for row in rows)}
    told["reason"] = any(row["reason"] for row in rows)
    show_table(rows, [n for n in ("given", "result", "id", "reason") if told.get(n, True)])
    counts = Counter(str(row["result"]) for row in rows)
    print(", ".join(f"{n} {result}" for result, n in counts.items()) or "nothing was found")


def export_skills(
    path: Annotated[Path, typer.Argument(help="Folder or file to write.")],
    format: Annotated[
        Format | None,
        typer.Option(help="Default: jsonl for a path that ends in .jsonl, else skillmd."),
    ] = None,
    status: Annotated[
        list[Status] | None,
        typer.Option(help="Only these; may be repeated. Default: candidate and active."),
    ] = None,
    version: Version = None,
    yes: Yes = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> int:
    """Write skills for other programs, complete or not at all. An export that exists is replaced
    with --yes. Exit code 3 when the format cannot hold a skill."""
    from flows.skills_files import choose_format, write_export

    held = open_bank(home, bank)
    chosen = choose_format(path, format)
    name = held.resolve(version)
    wanted = [one.value for one in dict.fromkeys(status or (Status.CANDIDATE, Status.ACTIVE))]
    items = held.items(*cast("list[SkillStatus]", wanted), version=name)
    if not items:
        raise ConfigError(
            f"bank {held.name!r} has no skill that is {' or '.join(wanted)}; choose with --status "
            "what to write"
        )
    done = write_export(items, path, chosen, bank_version=name, replace=yes)
    facts = {"format": chosen, "version": name, "skills": done.num_written, "path": done.path}
    refused = [{"id": skill, "reason": why} for skill, why in done.refused]
    if as_json:
        print_json({"bank": held.name, **facts, "refused": refused, "warnings": done.warnings})
    else:
        from flows.skills_tables import short, show_table

        for warning in done.warnings:
            say(f"note: {warning}")
        shown = {**facts, "version": name[:12], "path": str(done.path)}
        show_table([shown], ["format", "version", "skills", "path"])
        for row in refused:
            print(f"{short(row['id'])}: not written, {short(row['reason'], 200)}")
    return HELD if refused else 0


def validate_folders(path: Path, as_json: bool) -> int:
    """Say what the strict validator finds in SKILL.md folders; 1 when one is invalid."""
    from flows.skills_files import check_folders

    checked = check_folders(path)
    if as_json:
        print_json(checked)
    else:
        from flows.skills_tables import short

        errors = sum(p.is_error for p in checked.problems)
        warnings = len(checked.problems) - errors
        print(f"{path}: {checked.num_skills} skills, {errors} errors, {warnings} warnings")
        for problem in checked.problems:
            kind = "error" if problem.is_error else "warning"
            print(f"{short(problem.where)}: {kind}: {short(problem.text, 200)}")
    return 1 if any(problem.is_error for problem in checked.problems) else 0
