"""Where a comparison lies on disk, and the nights that its seeds and contenders are.

OUT/seeds/0/       the bootstrap of a seed: a run directory, and start.json
OUT/runs/opd-0/    a contender with a seed: a run directory with steps.jsonl, evals/, result.json
OUT/results.json   OUT/compare.html
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from distill.rundir import RunDir, clear_disk_errors
from flows.night import FINAL, Night


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRun(RunDir):
    """A run directory anywhere, with the home folder that it shares caches with."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    out: Path
    home: Path
    """Folder with `cache/`, where bootstrapped models are found again by other comparisons."""

    @property
    def results(self) -> Path:
        return self.out / "results.json"

    @property
    def page(self) -> Path:
        return self.out / "compare.html"

    def seed(self, seed: int) -> PlacedRun:
        return PlacedRun(path=self.out / "seeds" / str(seed), root=self.home)

    def start(self, seed: int) -> Path:
        return self.seed(seed).path / "start.json"

    def run(self, contender: str, seed: int) -> PlacedRun:
        return PlacedRun(path=self.out / "runs" / f"{contender}-{seed}", root=self.home)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bout(Night):
    """A contender with a seed: a night of one student stage over shared bootstrap weights."""

    shared: RunDir
    """Where the bootstrap stages of the seed lie."""

    def final(self, stage: str) -> Path:
        borrowed = any(s.name == stage for s in self.bootstrap_stages)
        return (self.shared if borrowed else self.run).stage_dir(stage) / FINAL

    @property
    def bank_home(self) -> Path:
        """Every contender has a bank of its own."""
        return self.run.path

    def key(self, stage: str) -> str:
        """The same for all contenders of a seed: they meet the same tasks and the same luck."""
        return f"{self.config.run.seed}/compare/{stage}"


def new_folder(parent: Path, preset: str) -> Path:
    """A new folder PARENT/PRESET-DATE-N; safe against other processes doing the same."""
    with clear_disk_errors(parent):
        for number in count(1):
            folder = parent / f"{preset}-{datetime.now():%Y%m%d}-{number}"
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                continue
    raise AssertionError("numbers do not end")
