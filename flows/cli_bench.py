"""`distill bench`: speed and memory, measured on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from flows.options import Json
from flows.output import print_json, print_table, say

bench_app = typer.Typer(
    help="Measure speed and memory on this machine.",
    rich_markup_mode=None,
    invoke_without_command=True,
)
LISTED, HELD, OFFERED = 100_000, 10_000, 1_000


class Part(StrEnum):
    SEARCH = "search"
    LIST = "list"
    ADD = "add"


def register(app: typer.Typer) -> None:
    app.add_typer(bench_app, name="bench")
    example = "Example: distill bench skills --only search --size 10000 --size 100000"
    bench_app.command("skills", epilog=example)(skills)
    example = "Example: distill bench logs --rows 100000 --rows 1000000"
    bench_app.command("logs", epilog=example)(logs)
    example = "Example: distill bench engines --prompts 32 --samples 8"
    bench_app.command("engines", epilog=example)(engines)


@bench_app.callback()
def bench(context: typer.Context) -> None:
    if context.invoked_subcommand is not None or context.resilient_parsing:
        return
    rows = [
        {
            "measure": "distill bench skills",
            "what": "search by meaning, the first page of a list, adding with dedup",
        },
        {"measure": "distill bench logs", "what": "a routing log to a curriculum, and a rerun"},
        {
            "measure": "distill bench engines",
            "what": "replies per second: our engines, and vllm called directly",
        },
    ]
    print_table(rows, ["measure", "what"])


def skills(
    size: Annotated[
        list[int] | None,
        typer.Option(min=100, help="Skills that are searched; may be repeated. Default: 10000."),
    ] = None,
    dimension: Annotated[int, typer.Option(min=2, help="Of the vectors.")] = 384,
    queries: Annotated[int, typer.Option(min=1, help="Searches that are timed.")] = 200,
    only: Annotated[
        list[Part] | None, typer.Option(help="Only this part; may be repeated.")
    ] = None,
    listed: Annotated[
        int, typer.Option(min=100, help="Skills of the bank that is listed.")
    ] = LISTED,
    held: Annotated[int, typer.Option(min=100, help="Skills of the bank that is added to.")] = HELD,
    offered: Annotated[int, typer.Option(min=10, help="Skills that are added.")] = OFFERED,
    as_json: Json = False,
) -> None:
    """Measure a bank of planted skills: search (time, recall@10 against the exact answer, time to
    build), the first page of a list, and adding with dedup.

    A million skills of 384 dimensions take some minutes and several GB of memory.
    """
    from flows import bench_skills

    parts = tuple(only or Part)
    found: list[dict[str, Any]] = []
    for part, values in _plan(parts, size or [10_000], (dimension, queries), (listed, held)):
        say(f"measuring {part} ...")
        if part is Part.SEARCH:
            speed: Any = bench_skills.search_speed(**values)
        elif part is Part.LIST:
            speed = bench_skills.list_speed(**values)
        else:
            speed = bench_skills.add_speed(**values, offered=offered)
        if not as_json:
            print(_line(part, speed))
        found.append({"part": part, "speed": speed})
    if as_json:
        print_json(found)


def logs(
    rows: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Rows of 2 KB in the log; may be repeated. Default: 100000."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Processes that import.")] = 2,
    as_json: Json = False,
) -> None:
    """Measure a generated log of LiteLLM: import with redaction, a rerun without anything new, and
    building the curriculum. Memory is that of all processes together.

    A million rows take some minutes and 4 GB of disk.
    """
    from flows import bench_logs

    found = []
    for number in rows or [100_000]:
        say(f"measuring {number:,} rows ...")
        speed = bench_logs.import_speed(number, jobs=jobs)
        found.append(speed)
        if not as_json:
            print(
                f"{speed.rows:,} rows ({speed.log / 2**20:,.0f} MiB): import {speed.first:.1f} s, "
                f"curriculum of {speed.examples:,} examples {speed.build:.1f} s, together "
                f"{speed.first + speed.build:.1f} s; rerun {speed.again:.2f} s; peak memory "
                f"{speed.peak / 2**20:,.0f} MiB, store {speed.stored / 2**20:,.0f} MiB"
            )
    if as_json:
        print_json(found)


def engines(
    model: Annotated[
        str, typer.Option(help="Folder of a model; default: a random one of 5M parameters.")
    ] = "",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a run.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Replies to each.")] = 4,
    prompt_length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 48,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a reply.")] = 64,
    rounds: Annotated[int, typer.Option(min=3, help="Timed runs of each.")] = 5,
    as_json: Json = False,
) -> None:
    """Measure rollouts through our engine against vllm called directly with the same requests, side
    by side in one run, and through the reference engine. Without vllm only the latter.
    """
    from flows import bench_engines

    work = bench_engines.RolloutWork(
        model=model,
        num_prompts=prompts,
        num_samples=samples,
        prompt_length=prompt_length,
        new_tokens=new_tokens,
        rounds=rounds,
    )
    say("measuring engines ...")
    found = bench_engines.bench_engines(work)
    if as_json:
        print_json(found)
        return
    for line in bench_engines.bench_lines(found):
        print(line)


def _plan(
    parts: Sequence[Part], sizes: Sequence[int], search: tuple[int, int], banks: tuple[int, int]
) -> Iterator[tuple[Part, dict[str, int]]]:
    """What is measured, in order, with the arguments of its function."""
    if Part.SEARCH in parts:
        for size in sizes:
            yield Part.SEARCH, {"size": size, "dimension": search[0], "queries": search[1]}
    if Part.LIST in parts:
        yield Part.LIST, {"size": banks[0]}
    if Part.ADD in parts:
        yield Part.ADD, {"held": banks[1]}


def _line(part: Part, speed: Any) -> str:
    if part is Part.SEARCH:
        return (
            f"search among {speed.size:,} skills, {speed.dimension} dimensions, {speed.kind}: "
            f"p50 {speed.p50 * 1e3:.2f} ms, p95 {speed.p95 * 1e3:.2f} ms, "
            f"recall@10 {speed.recall:.4f}, built in {speed.build:.1f} s, "
            f"peak {speed.peak / 2**30:.2f} GiB"
        )
    if part is Part.LIST:
        return (
            f"first page of {speed.size:,} skills: {speed.page * 1e3:.0f} ms, "
            f"the whole command {speed.command:.2f} s"
        )
    return (
        f"adding {speed.offered:,} skills to {speed.held:,} with dedup: {speed.seconds:.2f} s "
        f"({speed.cpu:.2f} s of work), "
        f"{speed.added:,} added, {speed.merged:,} merged of {speed.repeats:,} planted repeats"
    )
