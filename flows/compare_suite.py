"""How a comparison measures: the gate tasks of a seed, the same for start, teachers, contenders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distill.config import Config
from distill.engines.hf import HFEngine
from distill.policy import STUDENT
from distill.protocols import Env
from distill.types import EvalReport, Outcome, Task
from evals.suite import EvalSettings, run_suite, select
from flows import judging, wiring
from flows.acting import SkillPrompts
from flows.compare_config import Comparison
from flows.night import Student


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    env: Env
    tasks: tuple[Task, ...]
    reminded: tuple[Task, ...]
    """The same tasks with their own privileged prompts, on which forgetting is measured."""
    settings: EvalSettings
    name: str
    metric: str

    def measure(
        self, student: Student, model: str, prompts: SkillPrompts | None = None
    ) -> EvalReport:
        """Greedy and sampled accuracy of a student's present weights, with skills where its
        prompts show some."""
        shown = tuple(prompts.show(self.tasks).tasks) if prompts else self.tasks
        return self._run(student, shown, self.settings, model)

    def kept(self, student: Student, model: str) -> float | None:
        """Greedy accuracy on the privileged prompts; None when the tasks have none."""
        if not self.reminded:
            return None
        settings = replace(self.settings, samples=0, k=())
        return self._run(student, self.reminded, settings, model).metrics["greedy"].mean

    def values(self, report: EvalReport) -> tuple[float, ...]:
        """The chosen metric of every task, in the order of the tasks."""
        return tuple(value_of(report.outcomes[task.id], self.metric) for task in self.tasks)

    def turns(self, report: EvalReport) -> tuple[float, ...]:
        """Turns of every task's greedy attempt, in the order of the tasks; empty where each took
        one."""
        found = tuple(float(report.outcomes[task.id].num_turns) for task in self.tasks)
        return found if any(turns > 1 for turns in found) else ()

    def by_domain(self, report: EvalReport) -> Mapping[str, float]:
        suffix = f"/{self.metric}"
        found = {n: e.mean for n, e in report.metrics.items() if n.endswith(suffix)}
        return {name.removesuffix(suffix): mean for name, mean in found.items()}

    def _run(
        self, student: Student, tasks: tuple[Task, ...], settings: EvalSettings, model: str
    ) -> EvalReport:
        engine = HFEngine(
            student.policy,
            role=STUDENT,
            pad_id=student.chat.pad_id,
            max_batch=settings.max_batch,
        )
        found = run_suite(
            engine, self.env, tasks, student.chat, settings=settings, suite=self.name, model=model
        )
        return found.report


def build_suite(comparison: Comparison, seed: int) -> Suite:
    """The suite of a seed, from the template: no contender's settings change how it is judged.

    Tasks are those of [data]; what the student stage trains on may be a part of them.
    """
    template = comparison.template(seed)
    config = template.for_stage(template.stage(comparison.student.name))
    env = wiring.build_env(template)
    tasks = select(env, "gate", config.evals.tasks_per_domain)
    return Suite(
        env=env,
        tasks=tuple(tasks),
        reminded=_reminded(tasks, comparison.settings.forgetting),
        settings=_settings(config),
        name=f"{config.data.name}/gate",
        metric=comparison.settings.metric,
    )


def value_of(outcome: Outcome, metric: str) -> float:
    if metric == "greedy":
        return outcome.greedy
    return outcome.num_correct / outcome.num_samples


def _settings(config: Config) -> EvalSettings:
    return replace(judging.eval_settings(config), k=())


def _reminded(tasks: list[Task], view: str) -> tuple[Task, ...]:
    if not view:
        return ()
    found = []
    for task in tasks:
        text = task.meta.get("views", {}).get(view)
        users = [i for i, message in enumerate(task.prompt) if message.role == "user"]
        if isinstance(text, str) and users:
            prompt = list(task.prompt)
            prompt[users[-1]] = replace(prompt[users[-1]], content=text)
            found.append(replace(task, prompt=tuple(prompt)))
    return tuple(found)
