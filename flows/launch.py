"""Choosing what to run and opening its folder: one owner, one configuration, one log each time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import distill
from distill.config import Config, Layer, load
from distill.errors import ConfigError, DistillError
from distill.lock import Lock
from distill.rundir import RunDir, now, read_json, read_jsonl, write_json
from flows.configs import load_config, presets, to_toml
from flows.doctor import require_ready, versions

logger = logging.getLogger(__name__)

LOCK_FILE = "lock.json"
FAILED = "failed"
TRAINED = "trained"
"""The last event of a run of `distill train`, which has no summary."""


def choose_run(
    subcommand: str, arguments: Sequence[str], resume: bool, home: Path
) -> tuple[Config, RunDir | None]:
    """The configuration to run and, when resuming, the run that it continues."""
    placed = list(arguments)
    if home != Path():
        placed.append(f"run.home={json.dumps(str(home))}")
    if not resume:
        if not any(_is_layer(text) for text in arguments):
            raise ConfigError(
                f"which configuration? name a preset ({', '.join(presets())}) or a TOML file"
            )
        return load_config(placed), None
    layers = [text for text in arguments if _is_layer(text)]
    values = [text for text in arguments if not _is_layer(text)]
    if layers and layers[0] not in presets() and not layers[0].endswith(".toml"):
        run = RunDir.open(home, layers.pop(0))
    elif layers:
        run = unfinished(home, subcommand, load_config(placed).run.preset)
    else:
        run = unfinished(home, subcommand)
    if is_over(run):
        raise ConfigError(f"{run.name} is finished; a new night continues its champion by itself")
    if layers:
        return load_config(placed), run
    run = _back_where_it_began(run)
    stored = run.read_config()
    text = to_toml(stored)
    return load([Layer(origin=f"run {run.name}", text=text)], values) if values else stored, run


def _back_where_it_began(run: RunDir) -> RunDir:
    """Relative paths of a stored configuration mean the folder in which the run was started."""
    path = run.path / "env.json"
    began = read_json(path).get("cwd") if path.exists() else None
    if began is None or Path(began) == Path.cwd():
        return run
    run = RunDir(path=run.path.resolve())
    if Path(began).is_dir():
        os.chdir(began)
    else:
        logger.warning("%s was started in %s, which is gone; relative paths may fail", run, began)
    return run


@contextlib.contextmanager
def open_run(
    config: Config, *, subcommand: str, argv: Sequence[str], resume: RunDir | None = None
) -> Iterator[RunDir]:
    """A new run of `config`, or `resume`, locked for this process, logging into its own file.

    PreflightError when the machine is not ready; ConfigError when another process works on the
    run, or when the run belongs to another configuration. A new run that a wrong configuration or
    wrong data stopped before any training leaves no folder behind.
    """
    require_ready(resume.home if resume else Path(config.run.home), config)
    if resume is not None:
        resume.check_config(config)
    run = resume or RunDir.create(Path(config.run.home), config.run.preset)
    try:
        with Lock(run.path / LOCK_FILE, f"process on run {run.name}"), _log_file(run) as log:
            run.write_config(config, to_toml(config, _comment(argv)))
            if not (run.path / "env.json").exists():
                write_json(run.path / "env.json", _environment(config, subcommand, argv))
            run.add_event("attempt", argv=list(argv), pid=os.getpid(), log=log.name)
            with _failure_in_log():
                yield run
    except DistillError as error:
        has_work = any(run.path.glob("stages/*/*"))
        if resume is None and error.exit_code != 1 and not has_work:
            shutil.rmtree(run.path)
        raise


def unfinished(home: Path, subcommand: str, preset: str | None = None) -> RunDir:
    """The newest run of a sub-command that is not over, of one preset when it is given."""
    for run in RunDir.all(home):
        if is_over(run) or subcommand_of(run) != subcommand:
            continue
        if preset is None or run.read_config().run.preset == preset:
            return run
    which = f" of preset {preset!r}" if preset else ""
    raise ConfigError(f"nothing to resume: every run{which} in {home / 'runs'} is finished")


def is_over(run: RunDir) -> bool:
    """Whether there is nothing left to resume: a night with a summary, or a finished training."""
    if run.is_finished:
        return True
    rows = read_jsonl(run.events_path) if run.events_path.exists() else []
    return bool(rows) and rows[-1].get("event") == TRAINED


def failure(run: RunDir) -> str | None:
    """The error that ended a run's last attempt; None for any other end, or none."""
    rows = read_jsonl(run.events_path) if run.events_path.exists() else []
    if not rows or rows[-1].get("event") != FAILED:
        return None
    return str(rows[-1].get("error", "unknown"))


def subcommand_of(run: RunDir) -> str | None:
    """The sub-command that made a run; None when it died before it could say so."""
    path = run.path / "env.json"
    return read_json(path).get("subcommand") if path.exists() else None


def _is_layer(text: str) -> bool:
    return "=" not in text or Path(text).is_file()


@contextlib.contextmanager
def _log_file(run: RunDir) -> Iterator[Path]:
    path = run.new_log()
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line per request
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(min(level, logging.INFO) if level else logging.INFO)
    try:
        yield path
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


@contextlib.contextmanager
def _failure_in_log() -> Iterator[None]:
    try:
        yield
    except BaseException:
        logger.info("the run stopped here", exc_info=True)
        raise


def _comment(argv: Sequence[str]) -> str:
    return f"{shlex.join(argv)}\nEverything that is missing here kept its default; see config.json."


def _environment(config: Config, subcommand: str, argv: Sequence[str]) -> dict[str, Any]:
    import platform

    return {
        "command": shlex.join(argv),
        "argv": list(argv),
        "cwd": str(Path.cwd()),
        "subcommand": subcommand,
        "started": now(),
        "seed": config.run.seed,
        "distill-nightly": distill.__version__,
        "git": _git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": versions(),
    }


def _git_revision() -> str | None:
    """Commit of the checkout that runs, with `-dirty` for local changes; None outside of one."""
    import subprocess

    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.info("no git revision: %s", error)
        return None
    return done.stdout.strip() or None
