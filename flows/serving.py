"""A stage of kind `serve`: the student and its teacher answer a generated workload behind a router,
and the gateway's log of it is what the stage leaves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from distill.checkpoint import write_manifest
from distill.config import Config, Stage
from distill.curriculum.samplers import TaskSampler, keyed_uniform
from distill.engines.hf import HFEngine
from distill.errors import ConfigError
from distill.policy import STUDENT, Policy
from distill.rollout import collect
from distill.rundir import append_jsonl, read_json, staged_dir, write_json
from distill.types import Rollout, Sampling, Task
from evals.traffic import STRONG, WEAK, Answered, Choice, Request, Router, plan, spend_row
from flows import teaching, wiring
from flows.night import Night, Student, load_student, prepare_start
from flows.training import StageResult
from teachers.local import LocalTeacher

LOG = "traffic.jsonl"
SUMMARY = "summary.json"
CHUNK = 2048
"""Requests answered at a time."""

Answer = Callable[[Sequence[Task], str], list[Rollout]]


def serve(night: Night, stage: Stage) -> StageResult:
    """Answer the workload, write the log, and say how much of it each tier solved."""
    began, config = time.monotonic(), night.config.for_stage(stage)
    key, rules = night.key(stage.name), config.traffic
    tasks = _workload(config, key)
    router, student = router_of(config, tasks), _student(night)
    answers = _tiers(night, config, student)
    requests = plan(tasks, day=_day(night), session=rules.session, key=key)
    night.progress.stage_started(stage.name, rules.requests, "request")
    calls: list[Answered] = []
    with staged_dir(night.final(stage.name)) as partial:
        for first in range(0, len(requests), CHUNK):
            some = requests[first : first + CHUNK]
            found = _answered(some, router, answers, student, key, rules.reask)
            append_jsonl(partial / LOG, [spend_row(call, key=key) for call in found])
            calls += found
            night.progress.step(stage.name, first + len(some), {})
        summary = summarise(calls) | {"router": router}
        write_json(partial / SUMMARY, summary)
        result = StageResult(
            name=stage.name,
            objective="",
            steps=len(requests),
            tokens=sum(call.tokens_out for call in calls),
            seconds=time.monotonic() - began,
        )
        write_json(partial / "stage.json", result)
        write_manifest(partial)
    note = (
        f"{len(calls):,} calls, {summary['weak_share_of_solved']:.0%} of what was solved by {WEAK}"
    )
    night.progress.stage_done(stage.name, result.seconds, note)
    return result


def router_of(config: Config, tasks: Sequence[Task]) -> Router:
    """The router of a workload: half of it is on either side of the border."""
    lengths = [float(len(task.prompt[-1].content)) for task in tasks[:2000]]
    return Router(
        explore=config.traffic.explore,
        typical=statistics.median(lengths),
        spread=max(1.0, statistics.pstdev(lengths)),
    )


def _workload(config: Config, key: str) -> list[Task]:
    """What users ask: tasks of the split `train`, which no evaluation has."""
    tasks = wiring.build_env(config).tasks("train")
    return TaskSampler(tasks, batch=config.traffic.requests, key=key)(1)


def _student(night: Night) -> Student:
    """The weights that serve by day: those that the night starts from."""
    own = night.config.for_stage(night.student_stages[0])
    has_start = (night.run.path / "night.json").exists()
    return load_student(night, own, prepare_start(night).path if has_start else None)


def _tiers(night: Night, config: Config, student: Student) -> dict[int, Answer]:
    teacher = teaching.build_teacher(config, student, night.locate)
    if not isinstance(teacher, LocalTeacher):
        raise ConfigError(
            'a stage "serve" needs a teacher that can act, as its strong tier; set '
            'teacher.name = "local"'
        )
    weak = _answer(config, student, student.policy, STUDENT)
    return {WEAK: weak, STRONG: _answer(config, student, teacher.policy, teacher.role)}


def _answer(config: Config, student: Student, policy: Policy, role: str) -> Answer:
    env = wiring.build_env(config)
    engine = HFEngine(
        policy,
        role=role,
        pad_id=student.chat.pad_id,
        max_batch=config.evals.max_batch,
    )
    sampling = Sampling(
        num_samples=1,
        max_new_tokens=config.sampling.max_new_tokens,
        temperature=config.traffic.temperature,
    )
    turns = replace(wiring.turns_of(config), rows="conversation")

    def answer(tasks: Sequence[Task], key: str) -> list[Rollout]:
        return collect(tasks, env, engine, student.chat, sampling, key=key, turns=turns)

    return answer


def _answered(
    requests: Sequence[Request],
    router: Router,
    answers: dict[int, Answer],
    student: Student,
    key: str,
    reask: float,
) -> list[Answered]:
    """The calls of some requests in the order of the log: each once, and those of users who asked
    again because the answer was wrong a second time, by the strong tier."""
    first = [
        (request, router.choose(request.task, f"{key}/{request.number}")) for request in requests
    ]
    calls = _by_tier(first, answers, student, key)
    again = [
        (call.request, replace(call.choice, tier=STRONG, propensity=1.0, explored=False))
        for call in calls
        if not call.correct and keyed_uniform(f"{key}/{call.request.number}/reask") < reask
    ]
    second = _by_tier(again, answers, student, f"{key}/again", complaint=True)
    after = {call.request.number: call for call in second}
    return [c for call in calls for c in (call, after.get(call.request.number)) if c is not None]


def _by_tier(
    asked: Sequence[tuple[Request, Choice]],
    answers: dict[int, Answer],
    student: Student,
    key: str,
    *,
    complaint: bool = False,
) -> list[Answered]:
    found: dict[int, Answered] = {}
    for tier, answer in answers.items():
        some = [(request, choice) for request, choice in asked if choice.tier == tier]
        rows = answer([request.task for request, _ in some], f"{key}/{tier}") if some else []
        for (request, choice), row in zip(some, rows, strict=True):
            written = [t for t, own in zip(row.token_ids, row.completion_mask, strict=True) if own]
            found[request.number] = Answered(
                request=request,
                choice=choice,
                model="student" if tier == WEAK else "teacher",
                reply=student.chat.decode(written),
                correct=(row.reward or 0.0) >= 1.0,
                tokens_in=row.prompt_length,
                tokens_out=len(written),
                complaint=complaint,
                stop=row.stop,
            )
    return [found[request.number] for request, _ in asked]


def summarise(calls: Sequence[Answered]) -> dict[str, Any]:
    """Counts per tier, and the weak tier's share of all solved calls."""
    tiers = {}
    for tier in (WEAK, STRONG):
        own = [call for call in calls if call.choice.tier == tier]
        tiers[str(tier)] = {"calls": len(own), "solved": sum(call.correct for call in own)}
    solved = sum(call.correct for call in calls)
    return {
        "calls": len(calls),
        "solved": solved,
        "asked_again": sum(call.complaint for call in calls),
        "tiers": tiers,
        "weak_share_of_solved": tiers[str(WEAK)]["solved"] / solved if solved else 0.0,
    }


def _day(night: Night) -> int:
    """The day of the log: the number of the night, so that no clock enters it."""
    path = night.run.path / "night.json"
    return int(read_json(path)["number"]) if path.exists() else 0
