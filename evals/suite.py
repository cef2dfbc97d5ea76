"""Run a suite of tasks against a model: one greedy reply and several sampled ones per task.

The random draws depend on (seed, task, sample) only, so that two models answer the same tasks
under the same luck and their outcomes can be compared task by task.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distill.errors import ConfigError, DataError, EvalError
from distill.protocols import Env, RolloutEngine
from distill.rollout import TurnRules, collect
from distill.rows import trajectories
from distill.rundir import digest_json
from distill.tokens import Chat
from distill.types import (
    Estimate,
    EvalReport,
    Outcome,
    Rollout,
    Sampling,
    Split,
    StopReason,
    Task,
)
from evals.metrics import mean_interval, pass_at_k, plain_interval, wilson


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """How a suite is sampled and summarised."""

    samples: int = 4
    """Sampled replies per task, besides the greedy one; 0 leaves them out."""
    k: tuple[int, ...] = (1, 4)
    temperature: float = 1.0
    max_new_tokens: int = 64
    max_batch: int = 256
    """Replies that the engine makes at a time."""
    seed: int = 0
    confidence: float = 0.95
    max_error_share: float = 0.2
    """Share of failed episodes above which the evaluation is refused; below, they count as
    wrong."""
    turns: TurnRules = field(default_factory=TurnRules)
    """How episodes of several turns are played."""

    def __post_init__(self) -> None:
        if self.samples < 0 or self.max_batch < 1 or self.max_new_tokens < 1:
            raise ConfigError(
                "evals: expected samples >= 0, max_batch >= 1 and max_new_tokens >= 1, found "
                f"{self.samples}, {self.max_batch} and {self.max_new_tokens}"
            )
        for k in self.k:
            if self.samples and not 1 <= k <= self.samples:
                raise ConfigError(
                    f"evals.k: pass@{k} is undefined with evals.samples = {self.samples}; "
                    f"choose k from 1 to {self.samples}"
                )


class Evaluation(NamedTuple):
    """The report, and the rows behind it: greedy one attempt per task, sampled task-major."""

    report: EvalReport
    greedy: list[Rollout]
    sampled: list[Rollout]


def select(env: Env, split: Split, per_domain: int) -> list[Task]:
    """The first `per_domain` tasks of every domain of a split, domain by domain, each prompt once.

    Fewer when the split has fewer. A lazy split is read only as far as needed. Raises DataError
    when the split is empty.
    """
    tasks = env.tasks(split)
    domains = getattr(env, "domains", None)
    chosen: dict[str, Task] = {}
    counts: Counter[str] = Counter()
    for i in range(len(tasks)):
        task = tasks[i]
        if counts[task.domain] < per_domain and task.id not in chosen:
            chosen[task.id] = task
            counts[task.domain] += 1
        if domains and all(counts[name] >= per_domain for name in domains):
            break
    if not chosen:
        raise DataError(
            f"environment {env.name!r}: no task to evaluate in split {split!r}; "
            "add tasks or choose another split"
        )
    # Tasks of one domain stand together: their prompts often begin alike, which engines share.
    return sorted(chosen.values(), key=lambda task: task.domain)


def suite_digest(tasks: Sequence[Task]) -> str:
    """Digest of what is asked and what counts as right; the order of the tasks does not matter."""
    return digest_json(
        sorted([task.id, task.env, task.domain, task.answer or ""] for task in tasks)
    )


def evaluate(
    engine: RolloutEngine,
    env: Env,
    tasks: Sequence[Task],
    chat: Chat,
    *,
    settings: EvalSettings,
    suite: str,
    model: str,
) -> EvalReport:
    """Accuracy of a model on tasks, with intervals. See `run_suite` for the replies as well."""
    return run_suite(engine, env, tasks, chat, settings=settings, suite=suite, model=model).report


def run_suite(
    engine: RolloutEngine,
    env: Env,
    tasks: Sequence[Task],
    chat: Chat,
    *,
    settings: EvalSettings,
    suite: str,
    model: str,
) -> Evaluation:
    """Evaluate a model and keep its replies.

    Raises EvalError when tasks repeat, when there are none, or when too many episodes fail.
    """
    _check_tasks(tasks, suite)

    def replies(sampling: Sampling, key: str) -> list[Rollout]:
        return [
            rollout
            for chunk in _chunks(tasks, max(1, settings.max_batch // sampling.num_samples))
            for rollout in collect(
                chunk, env, engine, chat, sampling, key=key, turns=settings.turns
            )
        ]

    start = time.monotonic()
    greedy = replies(
        Sampling(num_samples=1, temperature=0.0, max_new_tokens=settings.max_new_tokens),
        f"eval/{settings.seed}/greedy",
    )
    sampled: list[Rollout] = []
    if settings.samples:
        sampled = replies(
            Sampling(
                num_samples=settings.samples,
                temperature=settings.temperature,
                max_new_tokens=settings.max_new_tokens,
            ),
            f"eval/{settings.seed}/sampled",
        )
    _check_errors([*greedy, *sampled], settings.max_error_share, suite)
    outcomes = summarise(tasks, greedy, sampled)
    report = EvalReport(
        suite=suite,
        suite_digest=suite_digest(tasks),
        model=model,
        num_tasks=len(tasks),
        samples_per_task=settings.samples,
        metrics=measure(outcomes, settings),
        outcomes=outcomes,
        seconds=time.monotonic() - start,
    )
    return Evaluation(report, greedy, sampled)


def correctness(rollout: Rollout) -> float:
    """How right a reply is, in [0, 1]: the reward part `correct` if the grader gives one, else
    the reward. A failed episode is 0."""
    if rollout.error is not None or rollout.reward is None:
        return 0.0
    return min(1.0, max(0.0, rollout.reward_parts.get("correct", rollout.reward)))


def summarise(
    tasks: Sequence[Task], greedy: Sequence[Rollout], sampled: Sequence[Rollout]
) -> dict[str, Outcome]:
    """One outcome per task. A sampled attempt counts as correct with full marks only."""
    first = {rows[0].task_id: rows for rows in trajectories(greedy)}
    groups: dict[str, list[Rollout]] = {task.id: [] for task in tasks}
    for rows in trajectories(sampled):
        groups[rows[0].task_id].append(rows[-1])
    return {
        task.id: Outcome(
            domain=task.domain,
            greedy=correctness(first[task.id][-1]),
            num_correct=sum(correctness(rollout) >= 1.0 for rollout in groups[task.id]),
            num_samples=len(groups[task.id]),
            num_tokens=sum(row.num_trained for row in first[task.id]),
            truncated=first[task.id][-1].stop is StopReason.LENGTH,
            num_turns=first[task.id][-1].num_steps,
        )
        for task in tasks
    }


def measure(outcomes: Mapping[str, Outcome], settings: EvalSettings) -> dict[str, Estimate]:
    """`greedy`, `sampled`, `pass@k`, `truncated` and, where an attempt takes several turns, `turns`
    with intervals, overall and per domain."""
    by_domain: dict[str, list[Outcome]] = {}
    for outcome in outcomes.values():
        by_domain.setdefault(outcome.domain, []).append(outcome)
    metrics = _estimates(list(outcomes.values()), settings)
    for domain in sorted(by_domain):
        estimates = _estimates(by_domain[domain], settings)
        metrics.update({f"{domain}/{name}": value for name, value in estimates.items()})
    return metrics


def _estimates(outcomes: list[Outcome], settings: EvalSettings) -> dict[str, Estimate]:
    def interval(value: Callable[[Outcome], float]) -> Estimate:
        return mean_interval(
            [value(outcome) for outcome in outcomes],
            confidence=settings.confidence,
            seed=settings.seed,
        )

    estimates = {"greedy": interval(lambda outcome: outcome.greedy)}
    if settings.samples:
        estimates["sampled"] = interval(lambda outcome: outcome.num_correct / outcome.num_samples)
        for k in settings.k:
            estimates[f"pass@{k}"] = interval(_passes(k))
    if any(outcome.num_turns > 1 for outcome in outcomes):
        counts = [float(outcome.num_turns) for outcome in outcomes]
        estimates["turns"] = plain_interval(
            counts, confidence=settings.confidence, seed=settings.seed
        )
    cut = sum(outcome.truncated for outcome in outcomes)
    estimates["truncated"] = wilson(cut, len(outcomes), settings.confidence)
    return estimates


def _passes(k: int) -> Callable[[Outcome], float]:
    return lambda outcome: pass_at_k(outcome.num_samples, outcome.num_correct, k)


def _check_tasks(tasks: Sequence[Task], suite: str) -> None:
    if not tasks:
        raise EvalError(f"suite {suite!r} has no task; expected at least one")
    repeated = [name for name, count in Counter(task.id for task in tasks).items() if count > 1]
    if repeated:
        raise EvalError(
            f"suite {suite!r}: {len(repeated)} prompts occur more than once (first: task "
            f"{repeated[0]}); every task may count once, see evals.suite.select"
        )


def _check_errors(rollouts: Sequence[Rollout], max_share: float, suite: str) -> None:
    ends = [rows[-1] for rows in trajectories(rollouts)]
    causes = Counter(rollout.error for rollout in ends if rollout.error is not None)
    failed = sum(causes.values())
    if failed > max_share * len(ends):
        common = "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
        raise EvalError(
            f"suite {suite!r}: {failed} of {len(ends)} episodes failed, at most "
            f"{100 * max_share:g} % may: {common}"
        )


def _chunks(tasks: Sequence[Task], size: int) -> Iterator[Sequence[Task]]:
    for start in range(0, len(tasks), size):
        yield tasks[start : start + size]
