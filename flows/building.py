"""From a stage's configuration to the parts of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from distill.ahead import Ahead
from distill.config import Config, Stage
from distill.correction import Correction
from distill.curriculum.samplers import (
    Drawn,
    Sampler,
    Staged,
    TaskSampler,
    keyed_uniform,
    steps_for,
)
from distill.engines.refreshed import RefreshedEngine, rest
from distill.errors import DataError
from distill.notes import STEP_SKILL
from distill.objectives.base import Objective, num_candidates, on_policy_share
from distill.parts import Leaks, Parts
from distill.protocols import RolloutEngine, View
from distill.rollout import collect
from distill.rows import mixed_groups
from distill.sections import Named
from distill.segments import stored
from distill.trainer import Trainer, TrainerOptions
from distill.types import Rollout, Task, TeacherView
from distill.worked import demonstrate
from flows import banking, compatibility, keeping, recorded, teaching, wiring
from flows.engines import student_engine
from flows.evolving import StageBank
from flows.hindsight import build_hindsight
from flows.night import Night, Student, live_ref
from flows.recorded import CHECKED_TASKS
from flows.warmup import worked_rows
from teachers.leaks import PHRASES, WORLD_PHRASES, measure


def trainer_options(config: Config) -> TrainerOptions:
    trainer = config.trainer
    return TrainerOptions(
        num_steps=trainer.steps,
        lr=trainer.lr,
        betas=(trainer.betas[0], trainer.betas[1]),
        weight_decay=trainer.weight_decay,
        warmup_steps=trainer.warmup_steps,
        schedule=trainer.schedule,
        min_lr_ratio=trainer.min_lr_ratio,
        grad_clip=trainer.grad_clip,
        micro_batch_tokens=trainer.micro_batch_tokens,
        epochs=trainer.epochs,
        minibatches=trainer.minibatches,
        master_weights=trainer.master_weights,
        gradient_checkpointing=trainer.gradient_checkpointing,
        offload=trainer.offload,
    )


def build_engine(
    night: Night, config: Config, student: Student, sampler: TaskSampler
) -> RolloutEngine:
    """Samples from the student itself or, with `sampling.refresh`, from a copy that is renewed
    every so many steps and before the first step of a further stage of a curriculum."""
    every = config.sampling.refresh
    if not every:
        return student_engine(night, config, student)
    # With overlap the replies of the next step are there already when a step ends.
    ahead = 2 if config.sampling.overlap else 1
    return RefreshedEngine(
        student.policy,
        make=lambda role: student_engine(night, config, student, role=role),
        is_due=lambda step: step % every == 0 or sampler.enters_stage(step + ahead),
    )


def build_sampler(config: Config) -> Sampler:
    """The sampler that `[sampler]` names. ConfigError for unknown names and options."""
    sampler: Sampler = wiring.build_sampler_options(config)
    return sampler


def num_steps(config: Config, sampler: Sampler, num_tasks: int) -> int:
    """Steps of a stage: `trainer.steps`, unless a staged sampler counts passes."""
    if isinstance(sampler, Staged) and sampler.passes:
        return steps_for(num_tasks, config.trainer.batch, sampler.passes)
    return config.trainer.steps


def build_parts(night: Night, stage: Stage, student: Student, trainer: Trainer) -> Parts:
    """Everything one step of the stage needs.

    Up to CHECKED_TASKS prompts are measured before the first step, so that a night fails at once.
    """
    config = night.config.for_stage(stage)
    recorded.require_undamaged(night, config)
    env = wiring.build_env(config, night.locate)
    key = night.key(stage.name)
    tasks = env.tasks("train")
    if recorded.is_recorded(config):
        tasks = recorded.fitting_tasks(night, stage, tasks, student.chat)
    elif len(tasks) <= CHECKED_TASKS:
        student.chat.prompts([t.prompt for t in tasks])  # raises for one that does not fit
    chosen = build_sampler(config)
    sampler = TaskSampler(tasks, batch=config.trainer.batch, key=key, sampler=chosen)
    objective, steps = wiring.build_objective(config), num_steps(config, chosen, len(tasks))
    trainer.options = replace(trainer.options, num_steps=steps)
    shared: dict[str, Any] = {
        "policy": student.policy,
        "objective": objective,
        "trainer": trainer,
        "stage": stage.name,
        "num_steps": steps,
        "sampler": sampler,
        "seed": config.run.seed,
        "pad_id": student.chat.pad_id,
        "max_error_share": config.run.max_error_share,
    }
    if stage.kind == "sft":
        rows, told = worked_rows(night, stage, student)
        parts = Parts(tasks=sampler, rows=rows, told=told, **shared)
    else:
        parts = _acting_parts(night, stage, student, sampler, shared)
    return replace(parts, told=recorded.counted(parts.told, tasks))


def _acting_parts(
    night: Night, stage: Stage, student: Student, sampler: TaskSampler, shared: dict[str, Any]
) -> Parts:
    """Those of a stage in which the student acts."""
    config, objective = night.config.for_stage(stage), shared["objective"]
    env, key = wiring.build_env(config, night.locate), night.key(stage.name)
    engine = build_engine(night, config, student, sampler)
    sampling = wiring.sampling_of(config)

    def play(tasks: Sequence[Task], key: str, num_samples: int) -> list[Rollout]:
        asked, turns = replace(sampling, num_samples=num_samples), wiring.turns_of(config)
        return collect(tasks, env, engine, student.chat, asked, key=key, turns=turns)

    skills = banking.stage_bank(night, stage, student, env, play)

    def acting() -> _Actor:
        return _Actor(
            sampler=sampler,
            act=lambda tasks, key: play(tasks, key, sampling.num_samples),
            student=student,
            key=key,
            objective=objective,
            skills=skills,
            picky=recorded.is_recorded(config),
        )

    actor, early = acting(), dict[int, Mapping[str, float]]()
    built = teaching.Surroundings(
        config=config,
        student=student,
        locate=night.locate,
        candidates=num_candidates(objective),
        task_of=actor.shown_task,
        cache=night.home / "cache" / "scores",
    )
    teacher = built.teacher()
    return Parts(
        tasks=actor.tasks,
        rows=_resting(actor.rows, engine),
        engine=engine,
        ahead=_ahead(acting(), shared["num_steps"], early) if config.sampling.overlap else None,
        publish=lambda step: live_ref(student, step),
        teacher=teacher,
        view=wiring.build_view(config, student.chat, actor.shown_task) if teacher else None,
        step_view=_step_view(config, objective, student, actor.shown_task),
        hindsight=build_hindsight(config, student, actor.task_of, night.locate),
        told=lambda step: {**actor.told(step), **early.pop(step, {})},
        closing=_closing(night, stage, config, skills) if config.analyst.name else None,
        leaks=_leak_meter(config, student) if config.view.name != "plain" else None,
        reference=built.reference(),
        audit=built.audit(objective, actor.shown_task),
        correction=Correction(**asdict(config.correction)),
        rounds=actor.rounds,
        num_groups=config.trainer.batch if actor.rounds else 0,
        **shared,
    )


def _resting(
    rows: Callable[[Sequence[Task], int], list[Rollout]], engine: RolloutEngine
) -> Callable[[Sequence[Task], int], list[Rollout]]:
    """The rows of a step, after which the engine may rest."""

    def made(tasks: Sequence[Task], step: int) -> list[Rollout]:
        found = rows(tasks, step)
        rest(engine)
        return found

    return made


def _ahead(actor: _Actor, num_steps: int, early: dict[int, Mapping[str, float]]) -> Ahead:
    """Samples one step ahead. It remembers its own step, so the actor must be one of its own; what
    it tells of a step goes into `early`."""

    def made(step: int) -> list[Rollout]:
        rows = actor.rows(actor.tasks(step), step)
        early[step] = dict(actor.told(step))
        return rows

    return Ahead(made, num_steps=num_steps)


def tasks_at(night: Night, stage: Stage) -> Callable[[int], list[Task]]:
    """Every task that a step of a stage may have met, refills included."""
    config = night.config.for_stage(stage)
    tasks = wiring.build_env(config, night.locate).tasks("train")
    tasks = recorded.known_tasks(night, stage, tasks)
    chosen = build_sampler(config)
    key, batch = night.key(stage.name), config.trainer.batch
    sampler = TaskSampler(tasks, batch=batch, key=key, sampler=chosen)
    rounds = compatibility.refill_rounds(chosen, wiring.build_objective(config))
    if chosen.reads_rewards:  # only what the stage stored can tell
        draws = stored(night.run.stage_dir(stage.name), "draws", Drawn)

        def drawn(step: int) -> list[Task]:
            if step not in draws:
                raise DataError(
                    f"stage {stage.name} of {night.run.name} has not stored which tasks step "
                    f"{step} drew, and sampler {config.sampler.name!r} cannot tell it again"
                )
            return [task for found in draws[step] for task in sampler.at(found)]

        return drawn

    def met(step: int) -> list[Task]:
        refills = [sampler.extra(step, number) for number in range(1, rounds + 1)]
        return [task for some in (sampler(step), *refills) for task in some]

    return met


def _closing(
    night: Night, stage: Stage, config: Config, skills: StageBank | None
) -> Callable[[int], None]:
    def close(last_step: int) -> None:
        keeping.close_stage(
            config,
            night.run.stage_dir(stage.name),
            skills,
            tasks_of=tasks_at(night, stage),
            last_step=last_step,
            reason=f"hindsight of {night.run.name}, stage {stage.name}",
        )

    return close


def _step_view(
    config: Config, objective: Objective, student: Student, task_of: Callable[[str], Task]
) -> View | None:
    """The view of step skills, where an objective reads them beside those of the episode."""
    if f"{STEP_SKILL}.logprobs" not in objective.needs:
        return None
    options = {**config.view.options, "scope": "step"}
    own = replace(config, view=Named(name=config.view.name, options=options))
    return wiring.build_view(own, student.chat, task_of)


def _leak_meter(config: Config, student: Student) -> Leaks:
    # Replies of the generated world are a few letters long.
    world = config.data.name == "world"
    size, phrases = (3, WORLD_PHRASES) if world else (8, PHRASES)

    def leaks(rows: Sequence[Rollout], views: Sequence[TeacherView | None]) -> dict[str, float]:
        return measure(rows, views, student.chat, n=size, phrases=phrases)

    return leaks


class _Actor:
    """Turns the tasks of a step into rows: replies of the student, worked solutions for a share of
    the prompts, and new prompts in place of groups that teach nothing."""

    def __init__(
        self,
        *,
        sampler: TaskSampler,
        act: Callable[[Sequence[Task], str], list[Rollout]],
        student: Student,
        key: str,
        objective: Objective,
        skills: StageBank | None = None,
        picky: bool = False,
    ) -> None:
        """`picky` leaves out recorded turns that do not fit, and counts them."""
        self._skills = skills
        self._left_out: Counter[str] | None = Counter() if picky else None
        self._sampler = sampler
        self._act = act
        self._student = student
        self._key = key
        self._share = on_policy_share(objective)
        self.rounds = compatibility.refill_rounds(sampler.sampler, objective)
        self._current: dict[str, Task] = {}
        self._shown: dict[str, Task] = {}

    def task_of(self, task_id: str) -> Task:
        """The task of a rollout of the current step."""
        if task_id not in self._current:
            # A resumed step reads its rollouts back: those of refilled prompts draw again here.
            for tasks in self._refills():
                self._remember(tasks)
        return self._current[task_id]

    def shown_task(self, task_id: str) -> Task:
        """The task as the student read it: with the skills that stood in its prompt."""
        task, skills = self.task_of(task_id), self._skills
        if skills is None or not skills.config.skills.show:
            return task
        if task_id not in self._shown:
            prompts = skills.prompts(skills.version_at(self._step))
            (self._shown[task_id],) = prompts.show([task]).tasks
        return self._shown[task_id]

    def tasks(self, step: int) -> list[Task]:
        chosen = self._sampler(step)
        self._step = step
        if self._left_out is not None:
            self._left_out.clear()
        self._current.clear()
        self._shown.clear()
        self._remember(chosen)
        return chosen

    def rows(self, tasks: Sequence[Task], step: int) -> list[Rollout]:
        key = f"{self._key}/{step}"
        worked = [t for t in tasks if self._is_worked(t, key)]
        acting = [t for t in tasks if not self._is_worked(t, key)]
        if self._left_out is not None:
            acting = self._readable(acting)
        if self._skills is not None:
            self._skills.look_if_due(step)
        rows = self._play(acting, key) if acting else []
        chat, left_out = self._student.chat, self._left_out
        rows += demonstrate(worked, chat, key=f"{key}/worked", left_out=left_out) if worked else []
        if left_out and not rows:
            raise DataError(
                f"step {step}: none of {len(tasks)} recorded turns can be read by this student "
                f"({recorded.words(left_out)}); raise model.max_length, or build the curriculum in "
                "the night, which leaves such turns out"
            )
        for number, extra in enumerate(self._refills(), start=1):
            if len(mixed_groups(rows)) >= len(acting):
                break
            self._remember(extra)
            rows += self._play(extra, f"{key}/refill{number}")
        return rows

    def told(self, step: int) -> Mapping[str, float]:
        """Numbers of a step besides those of its rows."""
        told = self._skills.metrics(step) if self._skills else {}
        left_out: Mapping[str, int] = self._left_out or {}
        return {**told, **{name: float(number) for name, number in left_out.items()}}

    def _readable(self, tasks: Sequence[Task]) -> list[Task]:
        assert self._left_out is not None
        found = recorded.readable(tasks, self._student.chat, worked=False, left_out=self._left_out)
        return [tasks[position] for position in found]

    def _play(self, tasks: Sequence[Task], key: str) -> list[Rollout]:
        if self._skills is None or not self._skills.config.skills.show:
            return self._act(tasks, key)
        return self._skills.play(tasks, key, self._step)

    def _refills(self) -> Iterator[list[Task]]:
        for number in range(1, self.rounds + 1):
            yield self._sampler.extra(self._step, number)

    def _remember(self, tasks: Sequence[Task]) -> None:
        self._current.update({t.id: t for t in tasks})

    def _is_worked(self, task: Task, key: str) -> bool:
        if self._share >= 1.0:
            return False
        return keyed_uniform(f"{key}/{task.id}/share") >= self._share
