"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PRESET|FILE ...] [KEY=VALUE ...]",
        help="Layers of the configuration, later ones win, then single values.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it without further questions.")]
Home = Annotated[
    Path, typer.Option(help="Folder that holds runs/ and registry/.", show_default=False)
]
