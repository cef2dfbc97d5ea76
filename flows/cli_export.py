"""`distill export`, and how a champion is served elsewhere."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from distill.errors import ConfigError
from flows.options import Home, Json
from flows.output import print_json, say


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: distill export smol out/smol --dtype bfloat16")(export)


def register_registry(app: typer.Typer) -> None:
    app.command("serve-command")(serve_command)


def export(
    checkpoint: Annotated[
        str, typer.Argument(help="A folder of weights, a run, or a model with a champion.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist yet.")],
    dtype: Annotated[Dtype, typer.Option(help="Type of the written weights.")] = Dtype.FLOAT32,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Write weights as one ordinary Hugging Face folder; an adapter is merged into a copy of its
    base. The original stays as it is."""
    from flows.checkpoints import find_checkpoint

    if out.exists():
        raise ConfigError(f"{out} exists already; name a folder that does not")
    found = find_checkpoint(home, checkpoint)
    from flows import exporting, single

    config = found.config()
    own = config.for_stage(config.last_student())
    night = single.around(config, found.run, home)
    gap = exporting.export(night, own, found.path, out, dtype=dtype.value)
    if as_json:
        print_json({"path": out, "dtype": dtype.value, "gap": gap})
        return
    print(out)
    say(f"its log-probabilities differ by {gap:.2g} nats per token from those of {found.path}")
    say(f"for llama.cpp and its like: python convert_hf_to_gguf.py {shlex.quote(str(out))}")


def serve_command(
    model: Annotated[str, typer.Argument(help="Name in the registry.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    home: Home = Path(),
) -> None:
    """Print the vLLM command that serves the champion of a model, on loopback."""
    from flows import registry
    from flows.checkpoints import find_checkpoint

    champion = registry.current(home, model)
    if champion is None:
        known = ", ".join(registry.models(home)) or "none"
        raise ConfigError(f"no champion of {model!r} in {home / 'registry'}; known: {known}")
    flags = {"host": "127.0.0.1", "port": str(port), "generation-config": "vllm"}
    switches: list[str] = []
    served = champion.path.resolve()
    if champion.kind == "adapter":
        from flows.single import around

        found = find_checkpoint(home, model)
        config = found.config()
        own = config.for_stage(config.last_student())
        served = around(config, found.run, home).locate(own.model.path, own.model.revision)
        switches = ["--enable-lora"]
        flags |= {
            "max-lora-rank": str(own.model.rank),
            "served-model-name": f"{model}-base",
            "lora-modules": f"{model}={champion.path.resolve()}",
        }
    else:
        flags["served-model-name"] = model
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(served)]
    words += [part for name, value in flags.items() for part in (f"--{name}", value)]
    print(shlex.join([*words, *switches]))
