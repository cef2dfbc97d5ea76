"""Evaluate, gate, promote, report: the second half of a night, as idempotent functions."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from distill.config import Config
from distill.engines.hf import HFEngine
from distill.errors import ConfigError
from distill.models import checkpoint_ref
from distill.policy import STUDENT, Policy
from distill.protocols import RolloutEngine
from distill.rows import dialogue, trajectories
from distill.rundir import from_json, read_json, read_jsonl, to_json, write_json
from distill.types import CheckpointRef, EvalReport, Reason, Rollout, Split, Task, Verdict
from evals.gate import decide
from evals.report import build
from evals.suite import EvalSettings, correctness, run_suite, select
from flows import banking, curricula, registry, routed, teaching, wiring
from flows.acting import SkillPrompts
from flows.engines import loaded_engine
from flows.night import Night, Student, base_name, load_student
from flows.stages import read_result
from teachers.local import LocalTeacher

Who = Literal["before", "teacher", "after"]
SAMPLES_PER_DOMAIN = 4


def evaluate(night: Night, who: Who) -> EvalReport | None:
    """Evaluate the start of the night, its teacher or its result on the gate split. Idempotent.

    None for a teacher that there is not, or that the configuration leaves out.
    """
    path = night.run.eval_path(who)
    if path.exists():
        return from_json(EvalReport, read_json(path), where=str(path))
    config = wiring.judged(night.config.for_stage(night.student_stages[-1]), night.config)
    if who == "teacher" and not (config.evals.teacher and config.teacher.name == "local"):
        return None
    student, policy, role, name = _subject(night, config, who)
    night.progress.stage_started(f"evaluate {who}", 0)
    prompts = None
    if who != "teacher":
        stage = night.student_stages[-1]
        prompts = banking.eval_prompts(night, config, stage, student, start=who == "before")
    if who == "teacher":  # it acts in this process, whatever engine the student has
        engine: RolloutEngine = HFEngine(
            policy, role=role, pad_id=student.chat.pad_id, max_batch=config.evals.max_batch
        )
    else:
        engine = loaded_engine(night, config, student, max_batch=config.evals.max_batch)
    try:
        report = run_report(
            config, student, engine, name, samples_path=_samples_path(night, who), prompts=prompts
        )
    finally:
        engine.close()
    write_json(path, report)
    night.progress.stage_done(f"evaluate {who}", report.seconds, _accuracy(report))
    return report


def run_report(
    config: Config,
    student: Student,
    engine: RolloutEngine,
    name: str,
    *,
    split: Split = "gate",
    samples_path: Path | None = None,
    prompts: SkillPrompts | None = None,
) -> EvalReport:
    """Evaluate what an engine samples from on a split, with skills where `prompts` shows some, and
    keep a few replies."""
    env = wiring.build_env(config)
    tasks = select(env, split, config.evals.tasks_per_domain)
    if prompts is not None:
        tasks = prompts.show(tasks).tasks
    evaluation = run_suite(
        engine,
        env,
        tasks,
        student.chat,
        settings=eval_settings(config),
        suite=f"{config.data.name}/{split}",
        model=name,
    )
    if samples_path is not None:
        write_json(samples_path, _pick_samples(tasks, evaluation.greedy, student))
    return evaluation.report


def eval_settings(config: Config) -> EvalSettings:
    evals = config.evals
    return EvalSettings(
        samples=evals.samples,
        k=evals.k,
        temperature=evals.temperature,
        max_new_tokens=evals.max_new_tokens or config.sampling.max_new_tokens,
        max_batch=evals.max_batch,
        seed=config.run.seed,
        confidence=config.gate.confidence,
        max_error_share=config.run.max_error_share,
        turns=replace(wiring.turns_of(config), rows="conversation"),
    )


def _subject(night: Night, config: Config, who: Who) -> tuple[Student, Policy, str, str]:
    weights = night.start if who != "after" else candidate(night).path
    student = load_student(night, config, weights)
    if who != "teacher":
        digest = checkpoint_ref(weights, base=base_name(config)).digest
        return student, student.policy, STUDENT, digest
    teacher = teaching.build_teacher(config, student, night.locate)
    assert isinstance(teacher, LocalTeacher), "only local teachers can act"
    return student, teacher.policy, teacher.role, "teacher"


def _accuracy(report: EvalReport) -> str:
    return f"accuracy {100 * report.metrics['greedy'].mean:.1f} % of {report.num_tasks} tasks"


def candidate(night: Night) -> CheckpointRef:
    """The weights that the night produced."""
    stage = night.student_stages[-1]
    result = read_result(night.final(stage.name))
    base = base_name(night.config.for_stage(stage))
    return checkpoint_ref(
        night.final(stage.name), base=base, step=result.steps, policy_version=result.steps
    )


def judge(night: Night) -> Verdict:
    """Compare the result of the night with its start, task by task. Idempotent.

    A night that was interrupted while another one moved the champion is held: its result was never
    compared with the weights that it would replace.
    """
    path = night.run.gate_path()
    stored = from_json(Verdict, read_json(path), where=str(path)) if path.exists() else None
    verdict = stored or _decide(night)
    weak = _weak_analyst(night)
    moved = _moved_champion(night) if verdict.decision == "promote" else None
    for against in (weak, moved):
        if against is not None and against not in verdict.reasons:
            decision = "hold" if verdict.decision == "promote" else verdict.decision
            reasons = (*verdict.reasons, against)
            verdict = replace(verdict, decision=decision, reasons=reasons)
    if verdict != stored:
        write_json(path, verdict)
    return verdict


def _decide(night: Night) -> Verdict:
    after, before = evaluate(night, "after"), evaluate(night, "before")
    if after is None or before is None:
        raise ConfigError("a verdict needs the evaluations `before` and `after`")
    return decide(after, before, night.config.gate, evaluate(night, "teacher"))


def _moved_champion(night: Night) -> Reason | None:
    """Why the result must not be promoted any more: the champion is not the night's start."""
    champion = registry.current(night.home, night.config.model.name)
    start = checkpoint_ref(night.start, base=base_name(night.config)).digest
    if champion is None or champion.digest == start or _was_promoted(night):
        return None
    return Reason(
        rule="champion",
        observed=0.0,
        bound=1.0,
        passed=False,
        text=f"The champion became {champion.digest[:12]} (run {champion.run}) while this night "
        "was interrupted; the result was compared with an older one, so it cannot be promoted.",
    )


def _weak_analyst(night: Night) -> Reason | None:
    """Why a night must not be promoted whose hindsight could mostly not be read."""
    for stage in night.student_stages:
        found = read_result(night.final(stage.name)).learned
        if found is not None and found.is_enough is False:
            return Reason(
                rule="analyst",
                observed=found.valid_rate or 0.0,
                bound=night.config.for_stage(stage).skills.min_valid_rate,
                passed=False,
                text=f"Stage {stage.name}: {found.verdict}.",
            )
    return None


def _was_promoted(night: Night) -> bool:
    digest = candidate(night).digest
    return any(
        (entry.run, entry.to_digest, entry.action) == (night.run.name, digest, "promote")
        for entry in registry.history(night.home, night.config.model.name)
    )


def promote(night: Night) -> None:
    """Make the result the champion when the verdict says so; else its skills go back too.

    Idempotent."""
    verdict = judge(night)
    banking.settle(night, verdict.decision)
    if verdict.decision != "promote" or _was_promoted(night):
        return
    registry.promote(
        night.home,
        night.config.model.name,
        candidate(night),
        run=night.run.name,
        verdict_path=night.run.gate_path(),
        bank=banking.version_of(night, start=False),
    )


def report(night: Night, warnings: Sequence[str]) -> None:
    """Write samples, summary and both reports; the night is finished once they are there."""
    write_summary(night, warnings)
    build(night.run.path)


def write_summary(night: Night, warnings: Sequence[str]) -> Mapping[str, Any]:
    """Write samples.json and summary.json."""
    verdict = judge(night)
    write_json(night.run.samples_path, _joined_samples(night))
    env = _env(night)
    stages = [
        to_json(read_result(night.final(s.name)))
        for s in night.config.stages
        if night.final(s.name).exists()
    ]
    result = candidate(night)
    summary = {
        "run": night.run.name,
        "preset": night.config.run.preset,
        "model": night.config.model.name,
        "seed": night.config.run.seed,
        "started": env.get("started"),
        "command": env.get("command"),
        "verdict": verdict.decision,
        "reasons": [r.text for r in verdict.reasons],
        "domains": to_json(verdict.domains),
        "overall": to_json(verdict.overall),
        "detectable": verdict.detectable,
        "stages": [*stages, *_evaluation_rows(night)],
        "seconds": sum(s["seconds"] for s in [*stages, *_evaluation_rows(night)]),
        "wall_seconds": _wall_seconds(night),
        "peak_rss_bytes": peak_rss_bytes(),
        "adapter_sha256": result.digest,
        "start_sha256": checkpoint_ref(night.start, base=result.base).digest,
        "bank_version": banking.version_of(night, start=verdict.decision != "promote"),
        "curricula": curricula.told(night),
        "traffic": routed.traffic_of(night),
        "warnings": [*_told(warnings, stages), *_left_out(night)],
    }
    write_json(night.run.summary_path, summary)
    return summary


def _told(warnings: Sequence[str], stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was logged, and what the monitor found in any stage, also before an interruption."""
    stored = [text for s in stages for text in (s["stopped"], *s["warnings"]) if text]
    logged = [w for w in warnings if not any(text.startswith(w) for text in stored)]
    return [*stored, *logged]


def _left_out(night: Night) -> list[str]:
    """How many replies of each stage took no part in an update; repeated steps count once."""
    path = night.run.metrics_path
    dropped: dict[str, dict[int, int]] = {}
    for row in read_jsonl(path) if path.exists() else []:
        dropped.setdefault(row["stage"], {})[row["step"]] = int(row.get("num_dropped") or 0)
    return [
        f"stage {stage}: {sum(steps.values())} replies took no part in an update (failed episodes, "
        "or views that did not fit)"
        for stage, steps in dropped.items()
        if any(steps.values())
    ]


def _evaluation_rows(night: Night) -> list[dict[str, Any]]:
    rows = []
    for who in ("before", "teacher", "after"):
        path = night.run.eval_path(who)
        if path.exists():
            seconds = read_json(path)["seconds"]
            row = {"name": f"evaluate {who}", "objective": "", "steps": 0, "tokens": 0}
            rows.append({**row, "seconds": seconds, "cached": False})
    return rows


def _wall_seconds(night: Night) -> float:
    """Time from the first start of the night to now, interruptions included."""
    started = _env(night).get("started")
    if started is None:
        return 0.0
    return (datetime.now(UTC) - datetime.fromisoformat(started)).total_seconds()


def _env(night: Night) -> dict[str, Any]:
    """What the command line noted about this run; a library call need not have any."""
    path = night.run.path / "env.json"
    return dict(read_json(path)) if path.exists() else {}


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _samples_path(night: Night, who: Who) -> Path:
    return night.run.path / "evals" / f"{who}_samples.json"


def _pick_samples(
    tasks: Sequence[Task], greedy: Sequence[Rollout], student: Student
) -> list[dict[str, Any]]:
    """The first few tasks of every domain with the greedy reply, or the whole conversation."""
    counts: dict[str, int] = {}
    rows = []
    for task, attempt in zip(tasks, trajectories(greedy), strict=True):
        counts[task.domain] = counts.get(task.domain, 0) + 1
        if counts[task.domain] <= SAMPLES_PER_DOMAIN:
            rows.append(
                {
                    "task_id": task.id,
                    "domain": task.domain,
                    "prompt": student.chat.render(task.prompt),
                    "answer": task.answer,
                    "reply": _spoken(dialogue(attempt, student.chat)),
                    "correct": correctness(attempt[-1]) >= 1.0,
                }
            )
    return rows


def _spoken(turns: Sequence[tuple[str, str]]) -> str:
    """One reply as it is; of several turns also what the environment answered, after an arrow."""
    if len(turns) == 1:
        return turns[0][0]
    lines = []
    for reply, answer in turns:
        lines.append(reply)
        lines += [f"  -> {line}" for line in answer.splitlines()]
    return "\n".join(lines)


def _joined_samples(night: Night) -> list[dict[str, Any]]:
    """The same tasks before, after and by the teacher, side by side."""
    joined: dict[str, dict[str, Any]] = {}
    whos: tuple[Who, ...] = ("before", "after", "teacher")
    for who in whos:
        path = _samples_path(night, who)
        if not path.exists():
            continue
        for row in read_json(path):
            entry = joined.setdefault(
                row["task_id"],
                {key: row[key] for key in ("task_id", "domain", "prompt", "answer")},
            )
            entry[who] = row["reply"]
            entry[f"{who}_ok"] = row["correct"]
    return list(joined.values())
