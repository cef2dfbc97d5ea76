"""`distill teacher serve`: a model that scores for nights on other machines."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flows.option_groups import grouped
from flows.options import Home
from flows.output import say

teacher_app = typer.Typer(help="Serve a teacher to other processes.", rich_markup_mode=None)


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Quantization(StrEnum):
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


def register(app: typer.Typer) -> None:
    example = "Example: distill teacher serve package:smollm2 --port 8790"
    teacher_app.command("serve", epilog=example)(grouped(serve))
    app.add_typer(teacher_app, name="teacher")


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening:
    host: Annotated[
        str, typer.Option(help="Address to listen on; another than loopback needs a token.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8790
    token_env: Annotated[
        str, typer.Option(help="Environment variable that holds the token clients must send.")
    ] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    name: Annotated[
        str, typer.Option(help="What clients are told the model is called; default: MODEL.")
    ] = ""
    revision: Annotated[str, typer.Option(help="Commit of a model of the hub.")] = ""
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = Dtype.FLOAT32
    quantize: Annotated[
        Quantization, typer.Option(help="Fewer bits per weight; needs the extra `quant`.")
    ] = Quantization.NONE
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves it to torch.")] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    max_request_mb: Annotated[int, typer.Option(min=1, help="Size of one request, in MiB.")] = 64
    max_answer_mb: Annotated[int, typer.Option(min=1, help="Size of one answer, in MiB.")] = 512
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one request.")] = 131072
    max_views: Annotated[int, typer.Option(min=1, help="Sequences of one request.")] = 1024
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may be here at once.")] = 16


def serve(
    model: Annotated[str, typer.Argument(help="Hub name, directory, or package:NAME.")],
    listening: Listening = Listening(),
    loading: Loading = Loading(),
    bounds: Bounds = Bounds(),
    home: Home = Path(),
) -> int:
    """Score for other processes until interrupted; prints the address once it is ready. Clients
    that come while the model loads wait.

    A night uses it with [teacher] name = "remote" and urls = ["ADDRESS"].
    """
    from distill.calls import check_key_name, key_of
    from flows.local_teachers import Place, Source

    check_key_name(listening.token_env, "--token-env")
    token = key_of(listening.token_env, "--token-env")
    place = Place(host=listening.host, port=listening.port, token=token)
    bound = place.listen()  # before anything is loaded
    with bound:
        say(f"loading {model}")
        import torch

        from teachers.scoring_server import Limits, Server, make_app

        if loading.threads:
            torch.set_num_threads(loading.threads)
        source = Source(
            path=model,
            home=home,
            name=loading.name,
            revision=loading.revision or None,
            dtype=loading.dtype.value,
            quantize=loading.quantize.value,
            device=loading.device,
        )
        limits = Limits(
            max_request_bytes=bounds.max_request_mb * 2**20,
            max_answer_bytes=bounds.max_answer_mb * 2**20,
            max_views=bounds.max_views,
            max_tokens=bounds.max_tokens,
            max_queue=bounds.max_queue,
        )
        app = make_app(source.scorer(limits), token=token)
        url = place.url(bound)
        Server(app, ready=lambda: print(url, flush=True)).serve_on([bound])
    say("ended")
    return 0
