"""What a stage of worked solutions learns from: the tasks' own, solutions under skills, or labels.

kind = "sft"                       the worked solutions of the tasks
... and skills.show = true         the same with the skills of the bank in the prompt (SkillRL)
... and [analyst] name = "rules"   the student acts, the analyst says what its attempts teach,
                                   and the student learns to say the same (SEED, stage 1)

Teachers and bases always learn from the tasks' own solutions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from distill.config import Config, Stage
from distill.errors import DataError
from distill.rollout import collect
from distill.types import Rollout, Task
from distill.worked import demonstrate
from flows import banking, wiring
from flows.engines import student_engine
from flows.hindsight import analyst_options, build_analyst, question
from flows.night import Night, Student, live_ref

Rows = Callable[[Sequence[Task], int], list[Rollout]]
Told = Callable[[int], Mapping[str, float]]


def worked_rows(night: Night, stage: Stage, student: Student) -> tuple[Rows, Told | None]:
    """What turns the tasks of a step into rows that nobody sampled, and numbers about them."""
    config, key = night.config.for_stage(stage), night.key(stage.name)
    prompts = None
    if stage.target == "student":
        if config.analyst.name:
            labels = _Labels(night, config, student, key)
            return labels.rows, labels.told
        prompts = banking.eval_prompts(night, config, stage, student, start=True)

    left_out: Counter[str] = Counter()

    def rows(tasks: Sequence[Task], step: int) -> list[Rollout]:
        shown = prompts.show(tasks).tasks if prompts else tasks
        left_out.clear()
        found = demonstrate(shown, student.chat, key=f"{key}/{step}", left_out=left_out)
        if not found:
            told = ", ".join(f"{name} {number}" for name, number in sorted(left_out.items()))
            raise DataError(
                f"stage {stage.name}, step {step}: none of {len(tasks)} recorded turns can be "
                f"learnt by this student ({told}); raise model.max_length, or build the curriculum "
                "in the night, which leaves such turns out"
            )
        return found

    return rows, lambda _: {name: float(number) for name, number in left_out.items()}


class _Labels:
    """The student's own attempts, and what an analyst who knows would have written about them."""

    def __init__(self, night: Night, config: Config, student: Student, key: str) -> None:
        analyst = build_analyst(config, student, night.locate)
        assert analyst is not None
        self._analyst = analyst
        self._config, self._student, self._key = config, student, key
        self._env = wiring.build_env(config)
        self._engine = student_engine(night, config, student)
        self._asked = question(config, analyst_options(config), student)
        self._told: dict[int, Mapping[str, float]] = {}

    def told(self, step: int) -> Mapping[str, float]:
        return self._told.get(step, {})

    def rows(self, tasks: Sequence[Task], step: int) -> list[Rollout]:
        """The labelled questions of a step; its attempts without any mask where there are none."""
        from skills.hindsight.analysts import written
        from skills.hindsight.episodes import episodes_of
        from skills.hindsight.labels import label_tasks

        chat, by_id = self._student.chat, {t.id: t for t in tasks}
        self._engine.load(live_ref(self._student, step - 1))
        acted = collect(
            tasks,
            self._env,
            self._engine,
            chat,
            wiring.sampling_of(self._config),
            key=f"{self._key}/{step}",
            turns=wiring.turns_of(self._config),
        )
        threshold = self._config.skills.success
        episodes = episodes_of(acted, by_id.__getitem__, chat.decode, threshold=threshold)
        notes = written(self._analyst, episodes, step)
        found = label_tasks(episodes, notes, *self._asked, keep_empty=True)
        lengths = [len(ids) for ids in chat.prompts([t.prompt for t in found.tasks], limit=0)]
        fitting = [t for t, n in zip(found.tasks, lengths, strict=True) if n <= chat.max_length]
        self._told[step] = {
            "labels/kept": float(len(fitting)),
            "labels/left_out": float(sum(found.left_out.values())),
            "labels/too_long": float(len(found.tasks) - len(fitting)),
        }
        if fitting:
            return demonstrate(fitting, chat, key=f"{self._key}/{step}")
        from distill.asking import without_mask

        return [without_mask(row) for row in acted]
