"""`distill skills extract`: what the stored attempts of a run teach, as candidates of a bank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.options import Home, Json
from flows.output import print_json, print_table, say
from flows.skills_options import Bank, DryRun, changing, example, open_bank

REFUSED = 3


def register(app: typer.Typer) -> None:
    words = "tiny-20260801-1 analyst.name=rules"
    app.command("extract", epilog=example("extract", words))(extract)


def extract(
    run: Annotated[str, typer.Argument(help="A run of `distill nightly` or `distill train`.")],
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE ...]", help="Changes of its configuration."),
    ] = None,
    stage: Annotated[
        str, typer.Option(help="Whose attempts; default: the last stage that has some.")
    ] = "",
    last: Annotated[int, typer.Option(min=0, help="Only so many steps; 0: all.")] = 0,
    bank: Bank = "",
    dry_run: DryRun = False,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Read the attempts of a run and keep what they teach as candidates.

    The analyst is that of the run's configuration, or named here: analyst.name=rules, policy or
    model. skills.min_sightings says how many attempts must teach a skill before it is kept. Exit
    code 3 when a skill was refused or quarantined."""
    from distill.config import Layer, load
    from distill.rundir import RunDir
    from flows.configs import to_toml
    from flows.extracting import extract as read
    from flows.extracting import for_stage, stage_of, take_in
    from flows.single import around

    held = open_bank(home, bank)
    folder = RunDir.open(home, run)
    stored = folder.read_config()
    layer = Layer(origin=f"run {folder.name}", text=to_toml(stored))
    night = around(stored, folder, home)
    chosen = stage_of(night, stage)
    if values:
        config = load([layer], for_stage(chosen, values))
        night, chosen = around(config, folder, home), config.stage(chosen.name)
    least = night.config.for_stage(chosen).skills.min_sightings
    found = read(night, chosen, last=last)
    with changing(held, dry_run) as change:
        merged = take_in(change, found, night, min_sightings=least)
        kept = {o.id: change.get(o.id).title for o in merged.outcomes if o.id}
    rows = [
        {"id": o.id, "result": o.result, "title": kept.get(o.id, ""), "reason": o.reason}
        for o in merged.outcomes
    ]
    if as_json:
        facts = {"run": folder.name, "stage": found.stage, "steps": found.steps}
        facts |= {"attempts": found.attempts, "notes": found.notes, "verdict": found.verdict}
        print_json({**facts, "skills": rows, "waiting": len(merged.waiting)})
    else:
        if rows:
            print_table(rows, ["id", "result", "title", "reason"])
        say(f"{found.attempts} attempts of {found.steps} steps: {found.verdict}")
        if merged.waiting:
            say(f"{len(merged.waiting)} skills were seen less than {least} times: not kept")
    if any(o.result in ("quarantined", "refused") for o in merged.outcomes):
        raise typer.Exit(REFUSED)
