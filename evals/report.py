"""Write `report.md` and `report.html` of a run from the files in its directory.

Read are, each if present: summary.json, gates/verdict.json, evals/{before,after,teacher}.json,
metrics.jsonl, samples.json, env.json. An unfinished run gets a report of what it has.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from distill.errors import DataError
from distill.rundir import atomic_write
from evals.report_facts import read_facts
from evals.report_html import render_html
from evals.report_markdown import render_markdown


class ReportPaths(NamedTuple):
    markdown: Path
    html: Path


def build(run_dir: Path) -> ReportPaths:
    """Write both reports, replacing older ones.

    Raises DataError when the directory does not exist or one of the files is damaged.
    """
    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: expected the directory of a run; see distill runs list")
    facts = read_facts(run_dir)
    paths = ReportPaths(run_dir / "report.md", run_dir / "report.html")
    atomic_write(paths.markdown, render_markdown(facts))
    atomic_write(paths.html, render_html(facts))
    return paths
