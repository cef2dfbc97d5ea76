"""`distill curriculum`: training data of routing logs; why a turn is in it; how it begins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.options import Arguments, Home, Json
from flows.output import print_json, say

if TYPE_CHECKING:
    from flows.curricula_reading import Shown

curriculum_app = typer.Typer(
    help="Build a curriculum out of routing logs and look at it.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
Where = Annotated[
    str, typer.Option("--in", help="A curriculum's folder or name, or a run; default: the newest.")
]


def register(app: typer.Typer) -> None:
    app.add_typer(curriculum_app, name="curriculum")
    for name, verb, words in (
        ("build", build, "--store main curriculum.examples=5000"),
        ("explain", explain, "3f2a91c0"),
        ("preview", preview, "--stage 1 -n 3"),
    ):
        curriculum_app.command(name, epilog=f"Example: distill curriculum {name} {words}")(verb)


def build(
    arguments: Arguments = None,
    store: Annotated[
        str, typer.Option(help="Name of the log store; default: curriculum.store, or the only one.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="New folder to write; default: a new one in curricula/.")
    ] = None,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Make training data of a log store: outcomes, demand, the boundary table, stages, and a page.

    Without a configuration the defaults hold; one with [data] also keeps out what overlaps with its
    evaluation tasks, and one with [model] what the student could not read.
    """
    from flows.curricula_building import build_curriculum

    made = build_curriculum(home, arguments or [], store=store, out=out)
    if as_json:
        print_json({"out": made.folder, "page": made.page, "summary": made.summary})
        return
    from flows.curricula_showing import show_curriculum

    show_curriculum(made.summary)
    print(f"page: {made.page}")


def explain(
    turn: Annotated[str, typer.Argument(help="Id of a turn, or its beginning.")],
    where: Where = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Show everything about one turn: what the log says in four layers, how it went and who says
    so, how capable a model it needs, and why it is in the curriculum or not."""
    from flows import curricula_reading as reading

    folder = reading.find_curriculum(home, where)
    row = reading.row_of(folder, turn)
    shown = reading.example_of(folder, row["id"])
    calls = reading.recorded(home, folder, row)
    if as_json:
        print_json({"curriculum": folder, **row, "calls": _calls(calls), "example": _plain(shown)})
        return
    from flows.curricula_showing import show_explained

    show_explained(folder, row, calls, shown)


def preview(
    where: Where = "",
    stage: Annotated[int | None, typer.Option(min=1, help="Only this stage.")] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="Examples per stage.")] = 5,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Show the first examples of each stage as the student will read them, and what of them it
    learns."""
    from flows import curricula_reading as reading

    folder = reading.find_curriculum(home, where)
    found = list(reading.first_examples(folder, lines, stage))
    if as_json:
        print_json({"curriculum": folder, "examples": [_plain(shown) for shown in found]})
    elif found:
        from flows.curricula_showing import show_example

        for shown in found:
            show_example(shown)
    else:
        say(f"{folder} has no example")


def _plain(shown: Shown | None) -> dict[str, Any] | None:
    if shown is None:
        return None
    from flows.curricula_reading import messages_of

    example = shown.example
    return {
        "id": example.id,
        "stage": shown.stage,
        "position": shown.position,
        "score": shown.score,
        "scene": example.scene,
        "source": example.source,
        "use_sft": shown.use_sft,
        "use_opd": shown.use_opd,
        "tools": example.tools,
        "messages": [
            {**message, "trained": bool(mark and shown.use_sft)}
            for message, mark in messages_of(shown)
        ],
    }


def _calls(turn: Any) -> list[dict[str, Any]]:
    from distill.curriculum.importers import to_plain

    if turn is None:
        return []
    return [
        {**to_plain(call), "superseded": superseded}
        for calls, superseded in ((turn.attempts, True), (turn.calls, False))
        for call in calls
    ]
