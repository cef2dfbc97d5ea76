"""The command `distill compare`: objectives side by side on the same work."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.options import Arguments, Home, Json
from flows.output import print_json, print_table

if TYPE_CHECKING:
    from evals.compare_page_facts import Change, Range, Results, Row

COLUMNS = (
    *("contender", "start", "end", "change", "against", "to level", "steps", "s/step", "MiB"),
    *("grad norm", "entropy", "kept", "turns", "turns against", "withheld"),
    *("notes valid", "notes right", "skills added", "stopped"),
)


def register(app: typer.Typer) -> None:
    app.command()(compare)


def compare(
    arguments: Arguments = None,
    only: Annotated[str, typer.Option(help="Names of contenders, joined by commas.")] = "",
    seeds: Annotated[int, typer.Option(min=0, help="How many seeds; 0: those of the file.")] = 0,
    baseline: Annotated[str, typer.Option(help="Whom the others are compared with.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the comparison; one that exists is continued."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Contenders at the same time.")] = 1,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Compare objectives on the same student, teacher, tasks and number of sampled tokens.

    Without a file: every objective on a generated world. A file of your own replaces it; to change
    only some of its tables, name both: distill compare compare my.toml.
    """
    from flows.compare_config import choose, load_comparison

    comparison = choose(
        load_comparison(arguments or []),
        only=[name.strip() for name in only.split(",") if name.strip()],
        num_seeds=seeds,
        baseline=baseline,
    )
    from flows.compare import check, run_comparison  # loads torch: what it needs not is said before
    from flows.compare_places import Places, new_folder
    from flows.doctor import require_ready
    from flows.progress import open_progress

    check(comparison)
    require_ready(home)
    preset = comparison.template(comparison.settings.seeds[0]).run.preset
    folder = out or new_folder(home / "compare", preset)
    with open_progress() as progress:
        progress.message(
            f"comparison {folder}; if interrupted, the same command with --out {folder}"
        )
        results = run_comparison(
            comparison,
            places=Places(out=folder, home=home),
            progress=progress,
            jobs=jobs,
            command=shlex.join(["distill", *sys.argv[1:]]),
        )
    if as_json:
        print_json({"out": folder, "results": folder / "results.json", "table": results.table})
        return
    _show(results)
    print(f"page: {folder / 'compare.html'}")


def _show(results: Results) -> None:
    rows = [_cells(row) for row in results.table.rows]
    names = [c for c in COLUMNS if any(row.get(c) for row in rows)]
    titles = {
        "against": f"against {results.table.baseline}",
        "to level": f"tokens (steps) to {100 * results.level:.0f} %",
    }
    if sys.stdout.isatty():
        _rich(rows, names, titles)
    else:
        named = [{titles.get(name, name): row.get(name) for name in names} for row in rows]
        print_table(named, [titles.get(name, name) for name in names])
    if results.table.detectable is not None:
        points, count = f"{100 * results.table.detectable:.1f}", len(results.seeds)
        print(
            f"{results.metric} accuracy on {results.num_tasks} tasks of each of {count} "
            f"seed{'s' if count > 1 else ''}, {results.tokens:,} tokens per contender; smallest "
            f"detectable difference {points} points"
        )


def _rich(rows: list[dict[str, Any]], names: list[str], titles: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        words = name in ("contender", "stopped")
        table.add_column(
            titles.get(name, name),
            justify="left" if words else "right",
            no_wrap=name == "contender",
        )
    for row in rows:
        table.add_row(*(Text(str(row.get(name) or "-")) for name in names))
    Console().print(table)


def _cells(row: Row) -> dict[str, Any]:
    level = None
    if row.tokens_to_level is not None:
        level = f"{row.tokens_to_level:,.0f} ({row.steps_to_level:.0f})"
        if row.num_reached < row.num_seeds:
            level += f", {row.num_reached} of {row.num_seeds} seeds"
    return {
        "contender": row.name,
        "start": f"{100 * row.start:.1f} %",
        "end": f"{100 * row.end:.1f} %",
        "change": _change(row.change),
        "against": None if row.against is None else _change(row.against),
        "to level": level,
        "steps": f"{row.steps:.0f}",
        "s/step": f"{row.seconds_per_step:.3f}",
        "MiB": f"{row.peak_rss_bytes / 2**20:.0f}",
        "grad norm": _span(row.grad_norm),
        "entropy": None if row.entropy is None else _span(row.entropy),
        "kept": None if row.kept is None else f"{100 * row.kept:+.1f}",
        "turns": None if row.turns is None else f"{row.turns:.2f}",
        "turns against": None if row.turns_against is None else _turns(row.turns_against),
        "withheld": _share(row.withheld),
        "notes valid": _share(row.notes_valid),
        "notes right": _share(row.notes_correct),
        "skills added": f"{row.skills_added:.3g}" if row.skills_added else None,
        "stopped": "; ".join(row.stopped) or None,
    }


def _share(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"


def _turns(change: Change) -> str:
    return f"{change.mean:+.2f} [{change.low:+.2f}, {change.high:+.2f}]"


def _change(change: Change) -> str:
    return f"{100 * change.mean:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"


def _span(span: Range) -> str:
    return f"{span.low:.2g}..{span.high:.2g}"
