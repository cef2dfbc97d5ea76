"""Commands that read runs: runs list, show, tail; report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.errors import ConfigError
from flows.options import Home, Json
from flows.output import print_json, print_table, say

if TYPE_CHECKING:
    from distill.rundir import RunDir

SUMMARY: dict[str, Any] = {
    "verdict": None,
    "reasons": [],
    "domains": {},
    "stages": [],
    "seconds": None,
    "peak_rss_bytes": None,
    "adapter_sha256": None,
    "bank_version": None,
    "warnings": [],
}
"""The fields that other programs rely on, as an unfinished run has them."""

runs_app = typer.Typer(help="List runs, show one, follow its numbers.", rich_markup_mode=None)
Run = Annotated[str, typer.Argument(help="Name or folder of a run; default: the newest.")]


def register(app: typer.Typer) -> None:
    app.add_typer(runs_app, name="runs")
    app.command()(report)


@runs_app.command("list")
def runs_list(as_json: Json = False, home: Home = Path()) -> None:
    """List runs, newest first."""
    from distill.rundir import RunDir

    rows = [_row(run) for run in RunDir.all(home)]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(rows, ["run", "command", "state", "verdict", "model", "started"])
    else:
        say(f"no runs in {home / 'runs'}; start one with: distill nightly tiny")


@runs_app.command("show")
def runs_show(run: Run = "", as_json: Json = False, home: Home = Path()) -> None:
    """Show what a run found."""
    from distill.rundir import read_json
    from flows.launch import failure

    chosen = _open(home, run)
    facts = {"run": chosen.name, "state": _state(chosen), **SUMMARY}
    if facts["state"] == "failed":
        facts["error"] = failure(chosen)
    if chosen.is_finished:
        facts |= read_json(chosen.summary_path)
    if as_json:
        print_json(facts)
        return
    print(f"run: {facts['run']}, {facts['state']}")
    if facts.get("error"):
        print(f"error: {facts['error']}")
    print(f"verdict: {facts['verdict'] or 'none yet'}")
    for line in _reasons(chosen, facts):
        print(f"  {line}")
    for name, domain in facts["domains"].items():
        print(
            f"{name}: {100 * domain['before']:.1f} % -> {100 * domain['after']:.1f} %, "
            f"interval of the difference {100 * domain['low']:+.1f} to {100 * domain['high']:+.1f},"
            f" n {domain['n']}"
        )
    for stage in facts["stages"]:
        print(f"stage {stage['name']}: {stage['steps']} steps, {stage['seconds']:.1f} s")
    for warning in facts["warnings"]:
        print(f"warning: {warning}")
    report_path = chosen.path / "report.html"
    print(f"report: {report_path if report_path.exists() else 'none yet'}")


def _reasons(run: RunDir, facts: dict[str, Any]) -> list[str]:
    """The rules of the gate, each with whether it was passed where that is on file."""
    from distill.rundir import read_json

    path = run.gate_path()
    found = {r["text"]: r["passed"] for r in read_json(path)["reasons"]} if path.exists() else {}
    marks = {True: "passed: ", False: "failed: ", None: ""}
    return [f"{marks[found.get(text)]}{text}" for text in facts["reasons"]]


@runs_app.command("tail")
def runs_tail(
    run: Run = "",
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="How many rows.")] = 10,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for more.")] = False,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Print the newest metrics of a run, one row per step."""
    chosen = _open(home, run)
    shown = max(0, len(_metrics(chosen)) - lines)
    while True:
        rows = _metrics(chosen)
        for row in rows[shown:]:
            print(json.dumps(row) if as_json else _metrics_line(row), flush=True)
        shown = max(shown, len(rows))
        if not follow or chosen.is_finished:
            return
        time.sleep(1.0)


def report(run: Run = "", as_json: Json = False, home: Home = Path()) -> None:
    """Build the report of a run again, from what lies in its folder."""
    from evals.report import build

    paths = build(_open(home, run).path)
    if as_json:
        print_json(paths._asdict())
    else:
        print(paths.markdown)
        print(paths.html)


def _open(home: Path, run: str) -> RunDir:
    from distill.rundir import RunDir

    if run:
        return RunDir.open(home, run)
    newest = RunDir.all(home)
    if not newest:
        raise ConfigError(f"no runs in {home / 'runs'}; start one with: distill nightly tiny")
    return newest[0]


def _state(run: RunDir) -> str:
    from distill.lock import is_held
    from flows.launch import LOCK_FILE, failure, is_over

    if is_over(run):
        return "finished"
    if is_held(run.path / LOCK_FILE):
        return "running"
    return "failed" if failure(run) else "interrupted"


def _row(run: RunDir) -> dict[str, Any]:
    """One line about a run; a damaged one is listed as such and hides none of the others."""
    from distill.errors import DistillError
    from distill.rundir import read_json
    from flows.launch import subcommand_of

    row: dict[str, Any] = dict.fromkeys(("command", "verdict", "model", "started"))
    try:
        env = run.path / "env.json"
        row["command"] = subcommand_of(run)
        row["state"] = _state(run)
        row["model"] = run.read_config().model.name
        row["started"] = read_json(env).get("started") if env.exists() else None
        row["verdict"] = read_json(run.summary_path).get("verdict") if run.is_finished else None
    except (DistillError, AttributeError):
        row["state"] = "damaged"
    return {"run": run.name, **row}


def _metrics(run: RunDir) -> list[dict[str, Any]]:
    from distill.rundir import read_jsonl

    return read_jsonl(run.metrics_path) if run.metrics_path.exists() else []


def _metrics_line(row: dict[str, Any]) -> str:
    numbers = [f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float)]
    return f"{row.get('stage', '')} {row.get('step', '')}: {'  '.join(numbers)}"
