"""Doctor: rehearsals in a temporary home. A killed run resumes to the same end; a gate that
compares a model with itself sees no difference.

The process to be killed is this module, run by itself: it trains and ends itself with SIGKILL in
the middle of the last stage.
"""

from __future__ import annotations

import copy
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.config import STAGE_PREFIX, Config
from distill.rundir import RunDir, digest_json, read_json, read_jsonl, write_json
from flows.doctor_checks import Finding, Subject, fail, named_tables, ok, warn
from flows.progress import NoProgress

STEPS = 2
BATCH = 4
REQUESTS = 256
"""Of a generated workload; enough for a curriculum of a few turns."""
PATIENCE = 300.0
"""Seconds that the child may take; it trains a few steps of tiny models."""
GATE_TASKS = 8
"""Tasks per domain of the gate rehearsal."""
CONFIG = "rehearsal.json"


class _Killer(NoProgress):
    """Ends this process like a power cut, after a step of one stage."""

    def __init__(self, stage: str, step: int) -> None:
        self._at = (stage, step)

    def step(self, name: str, step: int, metrics: Mapping[str, float]) -> None:
        if (name, step) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def check_resume(subject: Subject) -> list[Finding]:
    """Kill a child after its first step, resume it, compare with a run that nobody disturbed."""
    reason = unrehearsed(subject.config)
    if reason:
        return [warn(f"not rehearsed: {reason}", "try a resume by hand before you rely on it")]
    from flows.doctor_models import one_thread

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of tiny models that learn nothing
    try:
        with tempfile.TemporaryDirectory(prefix="distill-doctor-") as folder, one_thread():
            return _rehearse(subject, Path(folder))
    finally:
        logging.disable(before)


def _rehearse(subject: Subject, folder: Path) -> list[Finding]:
    whole, broken = folder / "whole", folder / "broken"
    config = shrunk(subject, folder)
    stage = config.last_student().name
    expected = _ledger(train(_at(config, whole), NoProgress()), stage)
    # What teachers and bases came to is taken over, as a second night would.
    if (whole / "cache").is_dir():
        (broken).mkdir()
        (whole / "cache").rename(broken / "cache")
    broken.mkdir(exist_ok=True)
    write_json(broken / CONFIG, _at(config, broken).to_dict())
    done = _child(broken, stage)
    if done.returncode != -signal.SIGKILL:
        if not expected["steps"]:
            return [ok(f"stage {stage} had nothing to train on in a rehearsal")]
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [
            fail(f"the child ended by itself with {done.returncode}: {last}", "see its message")
        ]
    (run,) = RunDir.all(broken)
    at = len(_rows(run, stage))
    found = _ledger(train(_at(config, broken), NoProgress(), run), stage)
    wrong = next((key for key in expected if expected[key] != found[key]), None)
    if wrong is None:
        return [
            ok(
                f"a child was killed after step {at} of stage {stage}; resumed, it has the same "
                f"{len(expected['steps'])} steps, rollouts and weights ({expected['weights'][:12]})"
            )
        ]
    return [
        fail(
            f"a resumed run is not the unbroken one: {wrong} of stage {stage} are "
            f"{_brief(found[wrong])} instead of {_brief(expected[wrong])}",
            "a resume would train something else: set run.threads, and report this with the config",
        )
    ]


def _child(home: Path, stage: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(__file__).resolve().parent.parent)
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "flows.doctor_rehearsals", str(home), stage],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def train(config: Config, progress: NoProgress, run: RunDir | None = None) -> RunDir:
    """Train every stage up to the last student, or continue a run. Nothing is judged."""
    from flows import single
    from flows.configs import to_toml

    if run is None:
        run = RunDir.create(Path(config.run.home), config.run.preset)
        run.write_config(config, to_toml(config))
    single.train(config, config.last_student(), run=run, progress=progress)
    return run


def _ledger(run: RunDir, stage: str) -> dict[str, Any]:
    """What a stage did: its steps, what it trained on, and where it ended."""
    from distill.models import weights_file
    from distill.rundir import digest_file
    from distill.segments import stored
    from distill.types import Rollout

    rows = {row["step"]: [row["loss"], row["num_tokens"]] for row in _rows(run, stage)}
    folder = run.stage_dir(stage)
    found = stored(folder, "rollouts", Rollout) if (folder / "segments").is_dir() else {}
    met = {step: [[r.task_id, r.token_ids] for r in some] for step, some in found.items()}
    return {
        "steps": sorted(rows.items()),
        "rollouts": digest_json(sorted(met.items())),
        "weights": digest_file(weights_file(folder / "final")),
    }


def _rows(run: RunDir, stage: str) -> list[Any]:
    path = run.metrics_path
    return [row for row in read_jsonl(path) if row["stage"] == stage] if path.exists() else []


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def unrehearsed(config: Config) -> str:
    """Why a configuration cannot be rehearsed without cost; empty when it can."""
    for stage in config.stages:
        own = config.for_stage(stage)
        for named in (own.teacher, own.analyst):
            for _, options in named_tables(named.name, named.options):
                if "url" in options or "urls" in options:
                    return f"stage {stage.name} asks a server, which a rehearsal should not"
        sources = own.curriculum.sources if stage.kind == "curriculum" else ()
        if any(not str(source.path).startswith(STAGE_PREFIX) for source in sources):
            return f"stage {stage.name} imports logs, which may take long"
    return ""


def shrunk(subject: Subject, folder: Path) -> Config:
    """The configuration with two steps per stage, tiny batches, and tiny models in place of those
    that are loaded: the same tokenizer and template, random weights, the engine in this process."""
    table = copy.deepcopy(subject.config.to_dict())
    table["run"] |= {"preset": "rehearsal", "orchestrator": "none", "threads": 1}
    table["engine"] = {"name": "hf"}
    table["tracking"] = {"jsonl": True, "wandb": "off"}
    table["traffic"]["requests"] = min(REQUESTS, table["traffic"]["requests"])
    table["checkpoint"] |= {"every_steps": 1, "every_seconds": 1e9}
    _small(table, subject, folder)
    for stage in table["stage"]:
        own = subject.config.for_stage(subject.config.stage(stage["name"]))
        stage.pop("engine", None)
        stage["checkpoint"] = {**stage.get("checkpoint", {}), "every_steps": 1}
        stage["trainer"] = stage.get("trainer", {}) | {
            "steps": STEPS,
            "batch": min(BATCH, own.trainer.batch),
            "warmup_steps": 1,
        }
        if "passes" in own.sampler.options:
            stage["sampler"] = {**own.sampler.options, "name": own.sampler.name, "passes": 0}
        if "requests" in stage.get("traffic", {}):
            stage["traffic"]["requests"] = min(REQUESTS, stage["traffic"]["requests"])
        _small(stage, subject, folder)
    return Config.from_dict(table, "rehearsal")


def _small(table: dict[str, Any], subject: Subject, folder: Path) -> None:
    """Put tiny models in place of those that a table of sections names by a path."""
    model = table.get("model", {})
    if model.get("path") and not model["path"].startswith(STAGE_PREFIX):
        model["path"] = _micro(model["path"], subject, folder)
        model["revision"] = None
    for section in ("teacher", "reference", "analyst"):
        for inner in _tables(table.get(section, {})):
            path, adapter = str(inner.get("path", "")), str(inner.get("adapter", ""))
            if adapter and not adapter.startswith(STAGE_PREFIX):
                inner.pop("adapter")
                path = path or subject.own.model.path
            if path and not path.startswith(STAGE_PREFIX):
                inner["path"] = _micro(path, subject, folder)
                inner.pop("revision", None)


def _tables(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield table
    for value in table.values():
        if isinstance(value, dict):
            yield from _tables(value)


def _micro(path: str, subject: Subject, folder: Path) -> str:
    """A folder with a tiny random model over the tokenizer of another one."""
    from flows.doctor_models import micro_policy

    place = folder / "models" / digest_json(path)[:12]
    if not place.is_dir():
        own = replace(subject.own, model=replace(subject.own.model, path=path))
        theirs = replace(subject, own=own)
        micro_policy(theirs).model.save_pretrained(str(place))
        theirs.loaded.tokenizer.save_pretrained(str(place))
    return str(place)


def _at(config: Config, home: Path) -> Config:
    return replace(config, run=replace(config.run, home=str(home)))


def check_gate(subject: Subject) -> list[Finding]:
    """The same weights twice through the gate: the difference must lie inside the claimed noise."""
    from evals.gate import decide
    from flows import judging, wiring
    from flows.doctor_engines import engine_of, student_of

    config = wiring.judged(subject.own, subject.config)
    evals = replace(
        config.evals,
        tasks_per_domain=min(GATE_TASKS, config.evals.tasks_per_domain),
        samples=0,
        k=(),
    )
    config = replace(config, evals=evals)
    engine, student = engine_of(subject), student_of(subject)
    first, second = (
        judging.run_report(config, student, engine, name) for name in ("baseline", "again")
    )
    verdict = decide(second, first, config.gate)
    overall, total = verdict.overall, len(first.outcomes)
    changed = sum(first.outcomes[t].greedy != second.outcomes[t].greedy for t in first.outcomes)
    detail = (
        f"one model judged twice on {total} tasks: {100 * overall.before:.1f} % and "
        f"{100 * overall.after:.1f} %, {changed} tasks differ; claimed noise "
        f"{100 * overall.low:+.1f} to {100 * overall.high:+.1f} points"
    )
    if overall.low <= 0.0 <= overall.high and verdict.decision != "promote":
        return [ok(detail)]
    return [
        fail(
            detail,
            "the evaluation is noisier than the gate believes: more tasks_per_domain, float32, or "
            "an engine that repeats itself",
        )
    ]


def main(home: Path, stage: str) -> None:
    """Train a rehearsal and end with SIGKILL after the first step of `stage`."""
    config = Config.from_dict(read_json(home / CONFIG), "rehearsal")
    train(config, _Killer(stage, 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
