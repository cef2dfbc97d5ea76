"""What hindsight leaves behind at the end of a stage: numbers for the report, skills to keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distill.config import Config
from distill.rundir import from_json, read_json, write_json
from distill.segments import stored
from distill.types import Note, Rollout, Task
from flows.changes import ACTOR, PATIENCE, committed, signed
from flows.evolving import StageBank
from flows.hindsight import has_secrets
from flows.paired import PairedGain
from skills.hindsight.checks import secrets_of
from skills.hindsight.episodes import episodes_of
from skills.hindsight.rate import ValidRate
from skills.hindsight.to_items import merge_into, sightings, to_items, united
from skills.items import SkillItem
from skills.lifecycle import Thresholds
from skills.safety import Secrets

MAX_MEASURED = 20
"""New candidates of a stage that are measured, those with most evidence first."""
LEARNED = "learned.json"
"""Beside a stage's checkpoints: what it learned in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What became of the bank at the end of a stage."""

    version: str
    added: tuple[str, ...] = ()
    promoted: tuple[str, ...] = ()
    num_waiting: int = 0
    """Skills that were seen too rarely to be kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """What a stage learned in words."""

    notes: Mapping[str, int] = field(default_factory=dict)
    """Status -> number of notes."""
    valid_rate: float | None = None
    """Share of the first notes that could be read."""
    correct_rate: float | None = None
    """Share of the notes that say what the tasks' own lessons say; None where those are unknown."""
    is_enough: bool | None = None
    """Whether the analyst reached `skills.min_valid_rate`; None before that can be said."""
    verdict: str = ""
    """The same as a sentence; empty where nobody was asked."""
    looks: int = 0
    """Looks at what fails, and the skills that came of them."""
    evolved: tuple[str, ...] = ()
    kept: Kept | None = None


def close_stage(
    config: Config,
    folder: Path,
    held: StageBank | None,
    *,
    tasks_of: Callable[[int], Sequence[Task]],
    last_step: int,
    reason: str,
) -> None:
    """Write `learned.json`; before that, let the bank keep what [skills] says."""
    rate = ValidRate()
    for step, notes in stored(folder, "notes", Note).items():
        rate = rate.add(notes) if step <= last_step else rate
    asked = rate.num_asked > 0
    least = config.skills.min_valid_rate
    looks = [] if held is None else [k for k in held.looks if 0 < k.step <= last_step]
    kept = None
    if held is not None and config.skills.keep:
        kept = keep(held, tasks_of=tasks_of, last_step=last_step, reason=reason)
    found = Learned(
        notes=rate.total,
        valid_rate=rate.valid_rate,
        correct_rate=rate.correct_rate,
        is_enough=_is_enough(rate, least),
        verdict=rate.verdict(least) if asked else "",
        looks=len(looks),
        evolved=tuple(name for look in looks for name in look.added),
        kept=kept,
    )
    write_json(folder / LEARNED, found)


def _is_enough(rate: ValidRate, least: float) -> bool | None:
    """Whether an analyst wrote enough that could be read; of few notes all of them decide."""
    judged = rate.is_enough(least)
    if judged is None and rate.valid_rate is not None:
        return rate.valid_rate >= least
    return judged


def read_learned(folder: Path) -> Learned | None:
    """What a stage learned in words; None for one that had no part in it."""
    path = folder / LEARNED
    return from_json(Learned, read_json(path), where=str(path)) if path.exists() else None


def keep(
    held: StageBank,
    *,
    tasks_of: Callable[[int], Sequence[Task]],
    last_step: int,
    reason: str,
) -> Kept:
    """Make the valid notes of a stage candidates of its bank, and measure the most seen of them.

    One change of the bank, made once whatever is repeated.
    """
    items, secrets = _read(held, tasks_of, last_step)
    skills, reason = held.config.skills, signed(reason, held.night)
    done = committed(held.bank, reason)
    if done is not None:
        known = {row.content for row in held.bank.rows(version=done.before)}
        few = [i for i in items if sightings(i) < skills.min_sightings and i.sha256 not in known]
        return Kept(
            added=done.named("ADD"),
            promoted=done.named("STATUS"),
            version=done.version,
            num_waiting=len(few),
        )
    gains = _measured(held, items)  # before the bank is locked: others may have to write meanwhile
    with held.bank.change(actor=ACTOR, wait=PATIENCE) as change:
        merged = merge_into(
            change,
            items,
            min_sightings=skills.min_sightings,
            secrets=secrets if has_secrets(held.config) else None,
            reason=reason,
        )
        added = tuple(o.id for o in merged.outcomes if o.result == "added")
        for name in added:
            gain = gains.get(change.get(name).sha256)
            uses = [] if gain is None else [replace(use, skill=name) for use in gain.uses]
            change.credit(uses, reason=reason)
        rules = Thresholds(min_sightings=skills.min_sightings, min_pairs=skills.pairs)
        judged = change.judge(rules) if skills.pairs else {}
        version = change.version().id  # afterwards another night may have changed it
    return Kept(
        added=added,
        promoted=tuple(name for name, why in judged.items() if why.startswith("promoted")),
        version=version,
        num_waiting=len(merged.waiting),
    )


def _measured(held: StageBank, items: Sequence[SkillItem]) -> dict[str, PairedGain]:
    """What the new skills with most evidence are worth, by their content."""
    known = {row.content for row in held.bank.rows()}
    least = held.config.skills.min_sightings
    new = [i for i in items if sightings(i) >= least and i.sha256 not in known]
    best = sorted(new, key=lambda i: -sightings(i))[
        : MAX_MEASURED if held.config.skills.pairs else 0
    ]
    found = {item.sha256: held.measure(item, "keep") for item in best}
    return {content: gain for content, gain in found.items() if gain is not None}


def _read(
    held: StageBank, tasks_of: Callable[[int], Sequence[Task]], last_step: int
) -> tuple[list[SkillItem], Secrets]:
    """What the valid notes of the stage teach, and the secrets of the tasks that taught it.

    One step at a time: the attempts of a long stage do not fit into memory together.
    """
    rollouts = stored(held.folder, "rollouts", Rollout)
    notes = stored(held.folder, "notes", Note)
    threshold = held.config.skills.success
    items: list[SkillItem] = []
    answers: dict[str, None] = {}
    solutions: dict[str, None] = {}
    for step in sorted(s for s in notes if s <= last_step and s in rollouts):
        valid = {n.traj_id: n for n in notes[step] if n.status == "ok"}
        rows = [r for r in rollouts[step] if r.traj_id in valid] if valid else []
        tasks = {t.id: t for t in tasks_of(step)}
        episodes = episodes_of(rows, tasks.__getitem__, held.decode, threshold=threshold)
        items += to_items(episodes, [valid[e.traj_id] for e in episodes], run=held.run)
        found = secrets_of(e.task for e in episodes)
        answers |= dict.fromkeys(found.answers)
        solutions |= dict.fromkeys(found.solutions)
    return united(items), Secrets(answers=tuple(answers), solutions=tuple(solutions))
