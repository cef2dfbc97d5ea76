"""What a night changed for the traffic that a router sends to the student.

The gate tasks stand for tomorrow's requests, and the router of the night's log for tomorrow's
router: a task goes to the student's tier with the router's own probability, so the share of all
traffic that this tier solves is the mean of probability x correct over the tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.errors import DataError
from distill.rundir import from_json, read_json
from distill.types import EvalReport
from evals.metrics import paired_bootstrap
from evals.suite import select
from evals.traffic import Router
from flows import serving, wiring
from flows.night import Night


def traffic_of(night: Night) -> dict[str, Any] | None:
    """Shares of traffic before and after, as fractions; None for a night without a served log.

    `solved`: of all requests, those that the student's tier gets and solves. `of_solved`: of all
    solved requests, those that it solved; None without an evaluation of the teacher.
    """
    stage = next((s for s in night.config.stages if s.kind == "serve"), None)
    if stage is None:
        return None
    served = read_json(night.final(stage.name) / serving.SUMMARY)
    router = from_json(Router, served["router"], where=serving.SUMMARY)
    config = wiring.judged(night.config.for_stage(night.student_stages[-1]), night.config)
    tasks = select(wiring.build_env(config), "gate", config.evals.tasks_per_domain)
    before, after = (_greedy(night, who) for who in ("before", "after"))
    weak = [router.weak_share(task) for task in tasks]
    old = [w * before[t.id] for w, t in zip(weak, tasks, strict=True)]
    new = [w * after[t.id] for w, t in zip(weak, tasks, strict=True)]
    change = paired_bootstrap(
        old, new, confidence=config.gate.confidence, resamples=config.gate.resamples
    )
    found: dict[str, Any] = {
        "log": {k: v for k, v in served.items() if k != "router"},
        "requests": len(tasks),
        "sent": sum(weak) / len(weak),
        "before": {"solved": sum(old) / len(old)},
        "after": {"solved": sum(new) / len(new)},
        "difference": change[0],
        "low": change[1],
        "high": change[2],
    }
    if night.run.eval_path("teacher").exists():
        strong = _greedy(night, "teacher")
        rest = sum((1 - w) * strong[t.id] for w, t in zip(weak, tasks, strict=True))
        for who, own in (("before", sum(old)), ("after", sum(new))):
            found[who]["of_solved"] = own / (own + rest) if own + rest else None
    return found


def _greedy(night: Night, who: str) -> Mapping[str, float]:
    path = night.run.eval_path(who)
    report = from_json(EvalReport, read_json(path), where=str(path))
    if not report.outcomes:
        raise DataError(f"{path} holds no outcome of a task; evaluate again")
    return {name: outcome.greedy for name, outcome in report.outcomes.items()}
