"""Commands that prepare a night: init, config, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.options import Arguments, Home, Json, Yes
from flows.output import print_json, print_table, say

config_app = typer.Typer(help="Show or check a configuration.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    app.command()(init)
    app.command()(doctor)
    app.add_typer(config_app, name="config")


def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("night.toml"),
    model: Annotated[
        str, typer.Option(help="Hugging Face name, directory, or package:smollm2.")
    ] = "package:smollm2",
    data: Annotated[str, typer.Option(help="JSONL, Parquet or dataset path.")] = "tasks.jsonl",
    yes: Yes = False,
) -> None:
    """Write a commented configuration for your own model and data."""
    import shlex

    from flows.init import write_config

    write_config(path, model=model, data=data, overwrite=yes)
    print(path)
    name = shlex.quote(str(path))
    say(f"edit it, then: distill config check {name}; distill nightly {name}")


def doctor(
    arguments: Arguments = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also run the real models, engines and rehearsals.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="GPU that memory and time are estimated for, such as H200.")
    ] = "",
    as_json: Json = False,
    home: Home = Path(),
) -> int:
    """Check this machine, and with a configuration its models, teachers, data and engines.

    Exit code 20 when a check failed."""
    from flows.configs import load_config
    from flows.doctor import examine

    config = load_config(arguments) if arguments else None
    checks = examine(config, home, full=full, device=device)
    if as_json:
        print_json(checks)
    else:
        for check in checks:
            print(f"{check.status:<4}  {check.name}: {check.detail}")
            if check.advice:
                print(f"      {check.advice}")
    return 20 if any(check.status == "fail" for check in checks) else 0


@config_app.command("show")
def config_show(
    arguments: Arguments = None,
    as_json: Json = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="A file that resolves to it.")] = False,
) -> None:
    """Print every resolved value and the layer that set it."""
    from distill.config import DEFAULT, explain
    from flows.configs import load_config, to_toml

    config = load_config(arguments or [])
    if as_toml:
        print(to_toml(config), end="")
    elif as_json:
        print_json({"digest": config.digest(), "values": [e._asdict() for e in explain(config)]})
    else:
        rows = [
            {"key": e.key, "value": e.value, "from": "" if e.origin == DEFAULT else e.origin}
            for e in explain(config)
        ]
        print_table(rows, ["key", "value", "from"])


@config_app.command("check")
def config_check(arguments: Arguments = None, as_json: Json = False) -> None:
    """Check a configuration without loading a model."""
    from flows import wiring
    from flows.configs import load_config

    config = load_config(arguments or [])
    wiring.check(config)
    if as_json:
        print_json({"ok": True, "digest": config.digest()})
    else:
        stages = ", ".join(stage.name for stage in config.stages)
        print(f"ok: {config.run.preset}, stages {stages}, digest {config.digest()[:12]}")
