"""Hindsight from the attempts that a run has stored: `distill skills extract`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distill.config import Stage
from distill.errors import ConfigError
from distill.sections import STAGE_SECTIONS
from distill.segments import stored
from distill.types import Note, Rollout
from flows.building import tasks_at
from flows.hindsight import build_analyst, has_secrets
from flows.night import Night, load_student
from flows.training import first_weights

if TYPE_CHECKING:
    from skills.change import Change
    from skills.hindsight.episodes import Episode
    from skills.hindsight.to_items import Merged


@dataclass(frozen=True, kw_only=True, slots=True)
class Extracted:
    """What the stored attempts of a stage teach."""

    stage: str
    steps: int
    attempts: int
    notes: Mapping[str, int]
    """Status -> number of notes."""
    verdict: str
    episodes: list[Episode] = field(default_factory=list)
    written: list[Note] = field(default_factory=list)


def for_stage(stage: Stage, values: Sequence[str]) -> list[str]:
    """KEY=VALUE arguments, meant for this stage whatever its own table says."""
    return [
        f"stage.{stage.name}.{text}"
        if text.partition("=")[0].partition(".")[0].strip() in STAGE_SECTIONS
        else text
        for text in values
    ]


def stage_of(night: Night, name: str) -> Stage:
    """The named stage, or the last one of the night that has stored attempts."""
    acting = [s for s in night.config.stages if s.kind == "on_policy"]
    if name:
        stage = night.config.stage(name)
        if stage not in acting:
            raise ConfigError(f"stage {name!r} learns from worked solutions: nobody acts in it")
        return stage
    for stage in reversed(acting):
        if list((night.run.stage_dir(stage.name) / "segments").glob("*.jsonl")):
            return stage
    raise ConfigError(
        f"run {night.run.name} has no stored attempts; the stages in which the student acts are: "
        f"{', '.join(s.name for s in acting) or 'none'}"
    )


def extract(night: Night, stage: Stage, *, last: int = 0) -> Extracted:
    """Let the configured analyst read the stored attempts of a stage, `last` steps of them or all.

    ConfigError without an analyst or without attempts.
    """
    from skills.hindsight.analysts import written
    from skills.hindsight.episodes import episodes_of
    from skills.hindsight.rate import ValidRate

    config = night.config.for_stage(stage)
    rollouts = stored(night.run.stage_dir(stage.name), "rollouts", Rollout)
    if not rollouts:
        raise ConfigError(f"stage {stage.name} of {night.run.name} has no stored attempts")
    finished = night.final(stage.name)
    weights = finished if finished.exists() else first_weights(night, stage)
    student = load_student(night, config, weights)
    analyst = build_analyst(config, student, night.locate)
    if analyst is None:
        raise ConfigError(
            "nobody is named who could read the attempts; name an analyst: "
            "distill skills extract RUN analyst.name=rules (or policy, or model)"
        )
    tasks_of, rate = tasks_at(night, stage), ValidRate()
    steps = sorted(rollouts)[-last:] if last else sorted(rollouts)
    episodes: list[Episode] = []
    notes: list[Note] = []
    for step in steps:
        tasks = {t.id: t for t in tasks_of(step)}
        rows = rollouts[step]
        foreign = [row.task_id for row in rows if row.task_id not in tasks]
        if foreign:
            raise ConfigError(
                f"step {step} of stage {stage.name} has {len(foreign)} attempts at tasks that this "
                f"configuration does not draw, such as {foreign[0]}; leave data, run.seed and "
                "trainer.batch as they were in the run"
            )
        found = episodes_of(
            rows, tasks.__getitem__, student.chat.decode, threshold=config.skills.success
        )
        own = written(analyst, found, step)
        rate = rate.add(own)
        episodes += found
        notes += own
    return Extracted(
        stage=stage.name,
        steps=len(steps),
        attempts=len(episodes),
        notes=dict(Counter(note.status for note in notes)),
        verdict=rate.verdict(config.skills.min_valid_rate),
        episodes=episodes,
        written=notes,
    )


def take_in(change: Change, found: Extracted, night: Night, *, min_sightings: int) -> Merged:
    """Offer what was extracted to a bank, as candidates."""
    from skills.hindsight.checks import secrets_of
    from skills.hindsight.to_items import merge_into, to_items

    config = night.config.for_stage(night.config.stage(found.stage))
    tasks = [episode.task for episode in found.episodes]
    return merge_into(
        change,
        to_items(found.episodes, found.written, run=night.run.name),
        min_sightings=min_sightings,
        secrets=secrets_of(tasks) if has_secrets(config) else None,
        reason=f"extracted from {night.run.name}, stage {found.stage}",
    )
