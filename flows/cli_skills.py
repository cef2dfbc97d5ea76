"""`distill skills`: read a skill bank. What changes one is in `flows.cli_skills_change`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from distill.errors import ConfigError
from flows import (
    cli_skills_change,
    cli_skills_extract,
    cli_skills_html,
    cli_skills_io,
    cli_skills_retrieve,
)
from flows.options import Home, Json, Yes
from flows.output import print_json, print_table, say
from flows.skills_completion import complete_skill, complete_version
from flows.skills_options import Bank, Id, Version, example, open_bank

if TYPE_CHECKING:
    from skills.versions import Row

skills_app = typer.Typer(
    help="Look at a bank of skills and change it.", rich_markup_mode=None, no_args_is_help=True
)
Status = Literal["candidate", "active", "quarantined", "retired"]
Sort = Literal["age", "utility", "id"]


def register(app: typer.Typer) -> None:
    app.add_typer(skills_app, name="skills")
    for name, verb, words in (
        ("list", skills_list, "--status active --sort utility"),
        ("show", show, "gen_001"),
        ("search", search, "'heat food before serving' -k 3"),
        ("validate", validate, "./skills"),
        ("diff", diff, "3f2a91c0 8be1477d"),
        ("stats", stats, "--json"),
        ("history", history, "gen_001"),
        ("pack", pack, "main.bank.jsonl"),
    ):
        skills_app.command(name, epilog=example(name, words))(verb)
    cli_skills_change.register(skills_app)
    cli_skills_extract.register(skills_app)
    cli_skills_html.register(skills_app)
    cli_skills_io.register(skills_app)
    cli_skills_retrieve.register(skills_app)


def skills_list(
    status: Annotated[Status | None, typer.Option(help="Only these.")] = None,
    category: Annotated[str, typer.Option(help="Only this category.")] = "",
    sort: Annotated[Sort, typer.Option(help="Order; utility: best first.")] = "age",
    page: Annotated[int, typer.Option(min=1, help="Which page.")] = 1,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Skills per page.")] = 20,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """List skills, one page at a time."""
    held = open_bank(home, bank)
    start = (page - 1) * limit
    if sort == "age" and not category:
        shown, total = held.page(start, limit, status=status or "")
    else:
        rows = held.rows(*([status] if status else []))
        rows = _sorted([r for r in rows if category in ("", r.category)], sort)
        shown, total = rows[start : start + limit], len(rows)
    items = list(held.store.read_items(shown))
    if as_json:
        from skills.codec import to_table

        tables = [to_table(item) for item in items]
        print_json({"bank": held.name, "total": total, "page": page, "skills": tables})
        return
    if not total:
        say(f"no such skills in bank {held.name!r}; add one with: distill skills add FILE")
        return
    from flows.skills_tables import show_table, skill_row

    columns = ["id", "status", "category", "kind", "utility", "uses", "title"]
    show_table([skill_row(item) for item in items], columns)
    pages = -(-total // limit)
    say(f"{total} skills, page {page} of {pages}")


def _sorted(rows: list[Row], sort: Sort) -> list[Row]:
    if sort == "utility":
        return sorted(rows, key=lambda row: -row.utility)
    return sorted(rows, key=lambda row: row.id) if sort == "id" else rows


def show(
    skill: Id,
    version: Version = None,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Show everything about one skill."""
    item = open_bank(home, bank).get(skill, version=version)
    if as_json:
        from skills.codec import to_table

        print_json({**to_table(item), "sha256": item.sha256})
        return
    from flows.skills_tables import show_skill

    show_skill(item)


def search(
    query: Annotated[str, typer.Argument(help="Words, or the goal of a task.")],
    k: Annotated[int, typer.Option("-k", min=1, help="How many.")] = 6,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Find skills by their words, best first."""
    held = open_bank(home, bank)
    found = held.search(query, k)
    if as_json:
        from skills.codec import to_table

        print_json([{"score": score, **to_table(item)} for item, score in found])
    elif found:
        from flows.skills_tables import show_table, skill_row

        rows = [skill_row(item, score=f"{score:.2f}") for item, score in found]
        show_table(rows, ["score", "id", "status", "category", "utility", "title"])
    else:
        say(f"nothing in bank {held.name!r} has a word of {query!r}")


def validate(
    path: Annotated[
        Path | None, typer.Argument(help="Check SKILL.md folders here instead of a bank.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Rebuild lost versions from the log.")
    ] = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> int:
    """Prove that a bank is whole: replay its log, check every file and every text. With a path,
    check its SKILL.md folders by the rules of the open format instead. Exit code 1 when something
    is wrong."""
    from skills.check import rebuild, verify

    if path is not None:
        if repair or bank:
            raise ConfigError("--repair and --bank are for a bank; leave out the path, or them")
        return cli_skills_io.validate_folders(path, as_json)
    held = open_bank(home, bank)
    if repair:
        held.recover()
        with held.change(actor="validate"):
            say(f"{rebuild(held.store)} versions rebuilt")
    checked = verify(held.store)
    if as_json:
        print_json(checked)
    else:
        print(
            f"bank {held.name}: {checked.num_ops} log lines, {checked.num_versions} versions, "
            f"{checked.num_skills} skills, {len(checked.problems)} problems"
        )
        for problem in checked.problems:
            print(f"{problem.where}: {problem.text}")
    return 1 if checked.problems else 0


def diff(
    left: Annotated[
        str | None,
        typer.Argument(help="Version; default: the one before.", autocompletion=complete_version),
    ] = None,
    right: Annotated[
        str | None,
        typer.Argument(help="Version; default: the active one.", autocompletion=complete_version),
    ] = None,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Show what lies between two versions: skills added, removed, and every changed field."""
    from skills.diffs import diff as compare

    held = open_bank(home, bank)
    new = held.resolve(right)
    old = held.resolve(left) if left is not None else _before(held.history(), new)
    found = compare(held.store, held.version(old), held.version(new))
    if as_json:
        from skills.codec import to_table

        changed = [{"id": c.after.id, "fields": c.fields} for c in found.changed]
        sides = {"added": found.added, "removed": found.removed}
        tables = {name: [to_table(item) for item in side] for name, side in sides.items()}
        print_json({"from": old, "to": new, **tables, "changed": changed})
        return
    from flows.skills_tables import show_diff

    print(f"{old[:12]} -> {new[:12]}")
    show_diff(found)


def _before(ops: list[Any], version: str) -> str:
    """The version that was active before `version` became it for the last time."""
    for op in reversed(ops):
        if op.op == "ACTIVATE" and op.version == version and op.previous:
            return str(op.previous)
    raise ConfigError(f"there is no version before {version[:12]}; name two of them")


def stats(
    version: Version = None, bank: Bank = "", as_json: Json = False, home: Home = Path()
) -> None:
    """Count skills per category and status, and sum up what they were worth."""
    from collections import Counter

    held = open_bank(home, bank)
    name = held.resolve(version)
    rows = list(held.version(name).rows.values())
    statuses = Counter(row.status for row in rows)
    live = [row.utility for row in rows if row.status in ("active", "candidate")]
    facts: dict[str, Any] = {
        "bank": held.name,
        "version": name,
        "capacity": held.capacity,
        "skills": len(rows),
        "statuses": dict(sorted(statuses.items())),
        "mean_utility": sum(live) / len(live) if live else None,
        "categories": {
            key: dict(Counter(row.status for row in rows if row.category == key))
            for key in sorted({row.category for row in rows})
        },
    }
    if as_json:
        print_json(facts)
        return
    from flows.skills_tables import show_table

    capacity = held.capacity or "no limit"
    mean = "-" if facts["mean_utility"] is None else f"{facts['mean_utility']:.3f}"
    print(f"bank {held.name}, version {name[:12]}")
    print(f"{len(rows)} skills, capacity {capacity}, mean utility of live ones {mean}")
    columns = ["candidate", "active", "quarantined", "retired"]
    table = [{"category": key, **counts} for key, counts in facts["categories"].items()]
    show_table([*table, {"category": "all", **statuses}], ["category", *columns])


def history(
    skill: Annotated[
        str, typer.Argument(help="Only this skill.", autocompletion=complete_skill)
    ] = "",
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="How many.")] = 20,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Show what happened, newest last: who changed which skill, when and why."""
    ops = open_bank(home, bank).history(skill)[-lines:]
    if as_json:
        print_json([op.to_table() for op in ops])
        return
    from flows.skills_tables import show_history

    show_history(ops)


def pack(
    out: Annotated[Path, typer.Argument(help="File to write; an earlier pack is replaced.")],
    version: Version = None,
    yes: Yes = False,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Write a version with all its skills into one file that checks itself. --yes replaces a file
    that is no such pack."""
    from skills.pack import is_pack, write_pack

    held = open_bank(home, bank)
    if out.exists() and not out.is_file():
        raise ConfigError(f"{out} is no file that could be written; choose another name")
    if out.exists() and not yes and not is_pack(out):
        raise ConfigError(f"{out} exists and is no packed bank; replace it with --yes")
    name = held.resolve(version)
    count = write_pack(held.store, name, out)
    facts = {"bank": held.name, "version": name, "skills": count, "path": out}
    if as_json:
        print_json(facts)
    else:
        print_table([{**facts, "version": name[:12]}], ["bank", "version", "skills", "path"])
