"""`distill skills retrieve`: what a goal would be shown, and the block as a model reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from distill.errors import ConfigError
from flows.option_groups import grouped
from flows.options import Home, Json
from flows.output import print_json, say
from flows.skills_options import Bank, Version, example, open_bank

if TYPE_CHECKING:
    from skills.bank import SkillBank
    from skills.embed import Embedder
    from skills.render import Block

Mode = Literal["template", "embedding", "utility"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choosing:
    """Which skills are chosen."""

    mode: Annotated[
        Mode, typer.Option(help="By category, by nearness, or by nearness and measured use.")
    ] = "template"
    k: Annotated[
        int, typer.Option("-k", min=0, help="General skills, and with vectors task skills too.")
    ] = 6
    mistakes: Annotated[int, typer.Option(min=0, help="Mistakes at most.")] = 5
    threshold: Annotated[
        float | None, typer.Option(min=-1.0, max=1.0, help="Only cosines above this.")
    ] = None
    category: Annotated[str, typer.Option(help="Instead of what the goal's words say.")] = ""
    rules: Annotated[
        str, typer.Option(help="Words that decide the category: alfworld, webshop, search.")
    ] = ""
    embedder: Annotated[
        str, typer.Option(help="sentence:PATH, endpoint:URL#MODEL or policy:PATH.")
    ] = ""
    key_env: Annotated[
        str, typer.Option(help="Environment variable with the key of the endpoint.")
    ] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """How the block is written."""

    render: Annotated[bool, typer.Option("--render", help="Print the block for a prompt.")] = False
    bodies: Annotated[bool, typer.Option("--bodies", help="With the steps below a skill.")] = False
    max_chars: Annotated[int, typer.Option(min=0, help="Of the block; 0: no limit.")] = 0
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Of the block; needs --tokenizer; 0: no limit.")
    ] = 0
    tokenizer: Annotated[str, typer.Option(help="Model folder whose tokenizer counts tokens.")] = ""


def register(app: typer.Typer) -> None:
    words = "'heat the soup and serve it' --render"
    app.command("retrieve", epilog=example("retrieve", words))(grouped(retrieve))


def retrieve(
    goal: Annotated[str, typer.Argument(metavar="PROMPT", help="The goal of a task.")],
    choosing: Choosing,
    writing: Writing,
    version: Version = None,
    bank: Bank = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Show which active skills a goal is given. With --render, the block that a rollout puts into
    the prompt of a task of the same --category, with the same --tokenizer."""
    held = open_bank(home, bank)
    block = _block(held, goal, choosing, writing, version, home)
    if as_json:
        print_json(_facts(held, block, writing))
    elif writing.render:
        if block.text:
            print(block.text)
        else:
            _say_nothing(held, block)
    else:
        _show(held, block)


def _block(
    bank: SkillBank,
    goal: str,
    choosing: Choosing,
    writing: Writing,
    version: str | None,
    home: Path,
) -> Block:
    from flows import skills_showing
    from skills.render import RenderOptions
    from skills.retrieve import RetrieveOptions

    options = RetrieveOptions(
        mode=choosing.mode,
        top_k=choosing.k,
        task_top_k=choosing.k,
        mistakes_k=choosing.mistakes,
        sim_threshold=choosing.threshold,
        rules=choosing.rules,
    )
    embedder = _embedder(choosing, home)
    count = None
    specials: tuple[str, ...] = ()
    if writing.tokenizer:
        from distill.models import load_tokenizer

        tokenizer = load_tokenizer(writing.tokenizer)
        count = skills_showing.counter_of(tokenizer)
        specials = skills_showing.specials_of(tokenizer)
    elif writing.max_tokens:
        raise ConfigError("--max-tokens needs --tokenizer to count with; or use --max-chars")
    retriever = skills_showing.retriever_of(bank, options, version=version, embedder=embedder)
    return skills_showing.block_for(
        goal,
        retriever,
        RenderOptions(
            max_tokens=writing.max_tokens,
            max_chars=writing.max_chars,
            bodies=writing.bodies,
            specials=specials,
        ),
        category=choosing.category or None,
        count_tokens=count,
    )


def _embedder(choosing: Choosing, home: Path) -> Embedder | None:
    """ConfigError for vectors without an embedder, and for an option that would do nothing."""
    if choosing.mode == "template":
        if choosing.embedder or choosing.threshold is not None:
            raise ConfigError(
                "--embedder and --threshold are for vectors; add --mode embedding or utility"
            )
        return None
    if not choosing.embedder:
        raise ConfigError(
            f"--mode {choosing.mode} needs --embedder sentence:PATH, endpoint:URL#MODEL or "
            "policy:PATH; or use --mode template"
        )
    from flows.skills_showing import embedder_of

    return embedder_of(choosing.embedder, home=home, key_env=choosing.key_env)


def _facts(bank: SkillBank, block: Block, writing: Writing) -> dict[str, Any]:
    record = block.record
    facts: dict[str, Any] = {
        "bank": bank.name,
        "bank_version": record.bank_version,
        "mode": record.mode,
        "category": record.category,
        "ids": [pick.id for pick in record.picks],
        "picks": record.picks,
        "shown": block.shown,
        "dropped": block.dropped,
        "chars": block.num_chars,
        "tokens": block.num_tokens,
    }
    return {**facts, "text": block.text} if writing.render else facts


def _say_nothing(bank: SkillBank, block: Block) -> None:
    if block.dropped:
        say(f"nothing fits the limit: {len(block.dropped)} skills were chosen and left out")
        return
    rows = bank.rows(version=block.record.bank_version)
    active = sum(row.status == "active" for row in rows)
    waiting = sum(row.status == "candidate" for row in rows)
    say(
        f"nothing is shown for this goal: bank {bank.name!r} has {active} active skills, and "
        f"{waiting} candidates, which are not shown before they are active"
    )


def _show(bank: SkillBank, block: Block) -> None:
    from flows.skills_tables import short, show_table

    record, shown = block.record, set(block.shown)
    if not record.picks:
        _say_nothing(bank, block)
        return
    titles = {item.id: item.title for item in bank.items("active", version=record.bank_version)}
    rows = [
        {
            "section": pick.section,
            "rank": pick.rank,
            "id": pick.id,
            "similarity": None if pick.similarity is None else f"{pick.similarity:.3f}",
            "score": None if pick.score is None else f"{pick.score:.3f}",
            "shown": "yes" if pick.id in shown else "over budget",
            "title": short(titles[pick.id], 40),
        }
        for pick in record.picks
    ]
    columns = ["section", "rank", "id", "similarity", "score", "shown", "title"]
    empty = {name for name in ("similarity", "score") if not any(row[name] for row in rows)}
    show_table(rows, [name for name in columns if name not in empty])
    tokens = "" if block.num_tokens is None else f", {block.num_tokens} tokens"
    print(
        f"category {short(record.category, 40)}, version {record.bank_version[:12]}, "
        f"{block.num_chars} characters{tokens}"
    )
