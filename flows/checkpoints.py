"""Finding weights by what a person types: a folder, a run, or a model with a champion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distill.config import Config
from distill.errors import ConfigError
from distill.rundir import RunDir
from flows import registry
from flows.night import START

WEIGHTS = ("adapter_model.safetensors", "model.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A folder of weights, and the run that made them when that is known."""

    path: Path
    run: RunDir | None
    bank: str | None = None
    """Skills that belong to the weights, as NAME@VERSION; None where the run says it, or nobody."""

    def config(self) -> Config:
        if self.run is None:
            raise ConfigError(
                f"{self.path} belongs to no run; add a preset or a file with its configuration"
            )
        return self.run.read_config()


def find_checkpoint(home: Path, text: str) -> Found:
    """The weights that `text` names: a folder, a run (its student), or a model (its champion)."""
    folder = Path(text)
    if any((folder / name).is_file() for name in WEIGHTS):
        return _in_folder(folder, home)
    if text in registry.models(home):
        champion = registry.current(home, text)
        if champion is not None:
            run = _run_named(champion.run, home)
            return Found(path=champion.path, run=run, bank=champion.bank)
    names = {run.name: run for run in RunDir.all(home)}
    if text in names or (folder / "config.json").is_file():
        own = names.get(text) or RunDir.open(home, folder)
        return Found(path=_student(own), run=own)
    raise ConfigError(
        f"{text!r} is no folder with {' or '.join(WEIGHTS)}, no run and no model with a champion; "
        "see: distill registry list, distill runs list"
    )


def _student(run: RunDir) -> Path:
    """The finished weights of a run's last student stage."""
    for stage in reversed(run.read_config().stages):
        final = run.stage_dir(stage.name) / "final"
        if stage.target == "student" and final.is_dir():
            return final
    raise ConfigError(f"{run.name} has no finished student yet; resume it first")


def _in_folder(path: Path, home: Path) -> Found:
    folder = path.resolve()
    for parent in folder.parents:
        if (parent / "config.json").is_file() and parent.parent.name == "runs":
            run = RunDir(path=parent)
            bank = _bank_of_start(run) if folder == parent / START else None
            return Found(path=path, run=run, bank=bank)
        if parent.name == "champions":
            entries = registry.history(parent.parents[2], parent.parent.name)
            for entry in reversed(entries):
                if entry.to_digest.startswith(folder.name):
                    return Found(path=path, run=_run_named(entry.run, home), bank=entry.bank)
    return Found(path=path, run=None)


def _bank_of_start(run: RunDir) -> str | None:
    from flows.banking import version_of
    from flows.single import around

    return version_of(around(run.read_config(), run, run.home), start=True)


def _run_named(name: str | None, home: Path) -> RunDir | None:
    path = home / "runs" / (name or "")
    return RunDir(path=path) if name and (path / "config.json").is_file() else None
