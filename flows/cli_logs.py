"""`distill logs`: take routing logs into a store, and look at what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from distill.errors import ConfigError
from flows.option_groups import grouped
from flows.options import Home, Json
from flows.output import print_json, say

if TYPE_CHECKING:
    from distill.config import Config
    from distill.curriculum.prepare import Source

logs_app = typer.Typer(
    help="Take routing logs into a store and look at them.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
Rules = Literal["rules", "none"]
Store = Annotated[str, typer.Option(help="Name of the log store; default: the only one.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a log is read."""

    name: Annotated[
        str, typer.Option(help="What the source is called; default: the file's or folder's name.")
    ] = ""
    format: Annotated[
        str, typer.Option(help="An importer, my_pkg.module:attr, or auto: by its rows.")
    ] = "auto"
    tier: Annotated[
        list[str] | None,
        typer.Option(help="MODEL=0 to 3, may hold *, or the log's word for a tier; repeatable."),
    ] = None
    map: Annotated[
        list[str] | None,
        typer.Option(help="FIELD=PATH: where a field of a turn stands in a row; repeatable."),
    ] = None
    no_consent: Annotated[
        bool, typer.Option("--no-consent", help="Its users did not agree: count, store nothing.")
    ] = False
    config: Annotated[
        Path | None, typer.Option(help="Take [[curriculum.sources]] of this file instead of PATHS.")
    ] = None
    redact: Annotated[
        Rules | None, typer.Option(help="What takes personal data out; default: rules.")
    ] = None
    entities: Annotated[
        str, typer.Option(help="A named-entity redactor besides: ner:FOLDER or my_pkg.module:attr.")
    ] = ""
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Processes at work.")] = 1


def register(app: typer.Typer) -> None:
    app.add_typer(logs_app, name="logs")
    for name, verb, words in (
        ("import", grouped(import_logs), "gateway.jsonl --store main --tier 'small-*=0'"),
        ("inspect", inspect, "--store main"),
        ("coverage", coverage, "--store main"),
        ("drops", drops, "--store main --reason bad_json"),
        ("redact", redact, "gateway.jsonl --out clean.jsonl"),
    ):
        logs_app.command(name, epilog=f"Example: distill logs {name} {words}")(verb)


def import_logs(
    reading: Reading,
    paths: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders or patterns; each is a source unless --name is given."),
    ] = None,
    store: Annotated[str, typer.Option(help="Name of the log store; made where none is.")] = "",
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Take in what is new in logs: redacted before anything is stored, every row once, however
    often it is read. What cannot be used is counted with a reason, see: distill logs drops."""
    from distill.curriculum.store import META, LogStore
    from flows.logs_taking import check, configured, first_drops, plain, take
    from flows.redacting import redactor_for

    config = _config(reading)
    if config is not None and paths:
        raise ConfigError("PATHS and --config exclude each other: the file names its own sources")
    sources = _sources(reading, paths or []) if config is None else configured(config.curriculum)
    name = store or (config.curriculum.store if config else "") or "main"
    _require_name(name)
    rules = reading.redact or (config.curriculum.redact if config else "rules")
    entities = reading.entities or (config.curriculum.entities if config else "")
    folder = home / "logs" / name
    check(sources, jobs=reading.jobs)
    if not (folder / META).is_file():
        redactor_for(rules, entities, bytes(32))  # a store is made only when all is in order
    with LogStore.open(folder, create=True) as held:
        redactor = redactor_for(rules, entities, held.salt)
        report = take(held, sources, redact=redactor, jobs=reading.jobs)
        firsts = first_drops(held, {s.source: s.dropped for s in report.sources})
        turns = held.num_turns
    if as_json:
        places = [
            {
                "source": source,
                "reason": reason,
                "file": d.file,
                "row": d.number,
                "detail": d.detail,
            }
            for (source, reason), d in firsts.items()
        ]
        sources_told = [plain(source) for source in report.sources]
        table = {"store": folder, "turns": turns, "sources": sources_told, "first": places}
        print_json({**table, "seconds": report.seconds})
        return
    from flows.logs_showing import show_import

    show_import(report, firsts, folder)


def _config(reading: Reading) -> Config | None:
    from flows.configs import load_config

    return None if reading.config is None else load_config([str(reading.config)])


def _sources(reading: Reading, paths: list[str]) -> list[Source]:
    from distill.curriculum.prepare import Source
    from flows.logs_taking import pairs, source_name, tiers_of

    if not paths:
        raise ConfigError("name the logs to read: PATHS, or --config FILE")
    return [
        Source(
            name=reading.name or source_name(path),
            path=path,
            format=reading.format,
            consent=not reading.no_consent,
            tiers=tiers_of(reading.tier or []),
            mapping=pairs(reading.map or [], "--map"),
        )
        for path in dict.fromkeys(paths)
    ]


def _require_name(name: str) -> None:
    """ConfigError for what is no plain folder name."""
    import re

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(f"--store expects a plain folder name, found {name!r}")


def inspect(
    turn: Annotated[
        str, typer.Argument(help="Id of a turn or its beginning, or the log's id of a call.")
    ] = "",
    store: Store = "",
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Newest calls shown.")] = 10,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Count what a store holds, per source, with its newest calls; or show one call in its four
    layers: prediction, decision, served, outcome."""
    from distill.curriculum.importers import to_plain
    from distill.curriculum.store import LogStore
    from flows import logs_showing, logs_store

    with LogStore.open(logs_store.store_path(home, store)) as held:
        if turn:
            call = logs_store.find_call(held, turn)
            evidence = logs_store.evidence_of(held, call)
            if as_json:
                from distill.curriculum.turns import turn_id

                print_json({"turn": turn_id(call), **to_plain(call), "evidence": evidence})
            else:
                logs_showing.show_call(call, evidence)
            return
        facts, newest = logs_store.facts(held), logs_store.newest(held, lines) if lines else []
    if as_json:
        print_json({**facts, "newest": [to_plain(call) for call in newest]})
    elif not facts["turns"]:
        say(f"{facts['path']} holds no call yet; see: distill logs drops")
    else:
        logs_showing.show_store(facts, newest)


def coverage(store: Store = "", as_json: Json = False, home: Home = Path()) -> None:
    """Show which of the four layers each source has, the tiers, and models without a known tier."""
    from distill.curriculum.store import LogStore
    from flows import logs_showing, logs_store

    with LogStore.open(logs_store.store_path(home, store)) as held:
        found, unknown = held.coverage(), logs_store.models_without_tier(held)
    if as_json:
        print_json({"sources": found, "models_without_tier": unknown})
    elif not found:
        say("the store holds no call yet; see: distill logs drops")
    else:
        logs_showing.show_coverage(found, unknown)


def drops(
    reason: Annotated[str, typer.Option(help="Only this one, such as bad_json.")] = "",
    store: Store = "",
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, help="Rows shown; 0 shows all.")
    ] = 20,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Show the rows that were not stored: where each lies, and why."""
    from itertools import islice

    from distill.curriculum.drops import REASONS
    from distill.curriculum.store import LogStore
    from distill.tables import did_you_mean
    from flows import logs_showing, logs_store

    if reason and reason not in REASONS:
        near = did_you_mean(reason, REASONS)
        raise ConfigError(f"no reason {reason!r}{near}; known are: {', '.join(REASONS)}")
    total: dict[str, int] = {}
    with LogStore.open(logs_store.store_path(home, store)) as held:
        for counts in held.drop_counts().values():
            for name, count in counts.items():
                if reason in ("", name):
                    total[name] = total.get(name, 0) + count
        shown = list(islice(held.drops(reason or None), lines or None))
    if as_json:
        print_json({"total": total, "rows": shown})
    elif shown:
        logs_showing.show_drops(shown, total, lines)
    else:
        say("no row was dropped" + (f" for {reason}" if reason else ""))


def redact(
    file: Annotated[Path, typer.Argument(help="A file of a log.")],
    format: Annotated[
        str, typer.Option(help="An importer, my_pkg.module:attr, or auto: by its rows.")
    ] = "auto",
    entities: Annotated[
        str, typer.Option(help="A named-entity redactor besides: ner:FOLDER or my_pkg.module:attr.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Write the clean rows here, one turn per line.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the rules would take out of a log: kinds, how often, masked examples."""
    from flows.logs_redaction import redact_file
    from flows.logs_showing import show_redaction
    from flows.logs_taking import source_name

    name = source_name(str(file))
    found = redact_file(file, name=name, format=format, entities=entities, out=out)
    if as_json:
        print_json({"file": file, "out": out, **_plain(found)})
        return
    show_redaction(found.counts, found.rows, found.touched, found.examples)
    if found.dropped:
        from flows.logs_showing import in_words

        for reason, count in found.dropped.most_common():
            print(f"left out, {in_words(reason)}: {count:,}")
    if out is not None:
        print(f"clean rows: {out}")


def _plain(found: Any) -> dict[str, Any]:
    names = ("rows", "records", "touched", "counts", "examples", "dropped")
    return {name: getattr(found, name) for name in names}
