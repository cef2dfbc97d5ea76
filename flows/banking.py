"""The skill bank of a night: which one, in which version, and what a stage does with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.config import Config, Stage
from distill.errors import ConfigError
from distill.types import Rollout, Task
from flows.acting import SkillPrompts

if TYPE_CHECKING:
    from distill.protocols import Env
    from flows.acting import Act
    from flows.evolving import StageBank
    from flows.night import Night, Student
    from skills.bank import SkillBank
    from skills.embed import Embedder

logger = logging.getLogger(__name__)
PACKAGED = "package:"
"""`package:NAME` in place of a path means skills that come with this package."""


def bank_of(night: Night, config: Config) -> SkillBank | None:
    """The bank of a configuration; made from `skills.start` where it does not exist yet."""
    from skills.bank import SkillBank

    name = config.skills.bank
    if not name:
        return None
    if name in SkillBank.names(night.bank_home):
        return SkillBank.open(night.bank_home, name)
    items = _first_items(config.skills.start)
    bank = SkillBank.create(night.bank_home, name)
    if items:
        outcomes = bank.add(items, actor="night", reason=f"start: {config.skills.start}")
        odd = [o for o in outcomes if o.result in ("quarantined", "refused")]
        if odd:
            logger.warning(
                "bank %s: %d of %d skills of %s were not taken in as they are (%s)",
                name, len(odd), len(items), config.skills.start, odd[0].reason,
            )  # fmt: skip
    return bank


def _first_items(start: str) -> Sequence[Any]:
    from skills.interop import import_path

    if not start:
        return ()
    path = Path(start)
    if start.startswith(PACKAGED):
        path = Path(str(files("flows"))) / "presets" / "skills" / start.removeprefix(PACKAGED)
    found = import_path(path)
    if not found.items:
        raise ConfigError(f"skills.start: {start} holds no skill that can be read")
    return found.items


def stage_bank(
    night: Night,
    stage: Stage,
    student: Student,
    env: Env,
    play: Callable[[Sequence[Task], str, int], list[Rollout]],
) -> StageBank | None:
    """What shows the skills of a stage and lets them grow; None for a stage without a bank.

    `play(tasks, key, n)` lets the student act on tasks as they are, n attempts each.
    """
    from flows.evolving import StageBank
    from flows.hindsight import PolicyOptions, analyst_options, build_analyst, build_writer

    config = night.config.for_stage(stage)
    bank = bank_of(night, config)
    if bank is None:
        return None
    act: Act = lambda tasks, key: play(tasks, key, config.sampling.num_samples)  # noqa: E731
    once: Act = lambda tasks, key: play(tasks, key, 1)  # noqa: E731
    options = analyst_options(config)
    speaks = isinstance(options, PolicyOptions) and options.format == "json"
    return StageBank(
        bank=bank,
        config=config,
        chat=student.chat,
        env=env,
        act=act,
        act_once=once,
        folder=night.run.stage_dir(stage.name),
        key=night.key(stage.name),
        run=night.run.name,
        decode=student.chat.decode,
        analyst=build_analyst(config, student, night.locate),
        writer=build_writer(config, student, night.locate) if speaks else None,
        embedder=embedder_for(config, student, night.home),
    )


def embedder_for(config: Config, student: Student, home: Path) -> Embedder | None:
    """What turns skills and goals into vectors; None where no mode needs it."""
    if config.skills.mode == "template":
        return None
    if config.skills.embedder == "student":
        from skills.embed import PolicyEmbedder

        return PolicyEmbedder(student.policy, student.chat)
    from flows.skills_showing import embedder_of

    return embedder_of(config.skills.embedder, home=home)


def shown_version(
    night: Night, config: Config, stage: Stage, *, start: bool, step: int | None = None
) -> str | None:
    """The bank version that an evaluation shows: that of the start of the night, or the newest one
    of the stage, up to a step where one is given. None where no skill is shown."""
    from distill.rundir import read_json, read_jsonl
    from flows.evolving import LOOKS

    if not (config.skills.bank and config.skills.show):
        return None
    looks = night.run.stage_dir(stage.name) / LOOKS
    if not start and looks.exists():
        rows = read_jsonl(looks)
        return str([r for r in rows if step is None or r["step"] <= step][-1]["version"])
    record = night.run.path / "night.json"
    known = read_json(record).get("bank_version") if record.exists() else None
    if known:
        return str(known)
    bank = bank_of(night, config)
    assert bank is not None
    return bank.snapshot()


def eval_prompts(
    night: Night,
    config: Config,
    stage: Stage,
    student: Student,
    *,
    start: bool,
    step: int | None = None,
) -> SkillPrompts | None:
    """What shows skills in an evaluation; None where none are shown."""
    from flows.evolving import skill_prompts

    version = shown_version(night, config, stage, start=start, step=step)
    bank = bank_of(night, config) if version else None
    if bank is None:
        return None
    embedder = embedder_for(config, student, night.home)
    return skill_prompts(bank, config, student.chat, version=version, embedder=embedder)


def version_of(night: Night, *, start: bool) -> str | None:
    """NAME@VERSION of the skills that stand in the prompts of a night's start or result; None
    where none do."""
    stage = night.student_stages[-1]
    config = night.config.for_stage(stage)
    version = shown_version(night, config, stage, start=start)
    return f"{config.skills.bank}@{version}" if version else None


def follow(home: Path, bank: str | None, *, reason: str) -> str | None:
    """Make the version of NAME@VERSION the bank's active one; returns what it was before, or None
    when nothing had to change."""
    from skills.bank import SkillBank

    if bank is None:
        return None
    name, _, version = bank.partition("@")
    held = SkillBank.open(home, name)
    before = held.snapshot()
    if before == version:
        return None
    held.rollback(version, actor="night", reason=reason)
    return before


def settle(night: Night, decision: str) -> None:
    """A bank whose skills are shown belongs to the champion: when a night is not promoted, it goes
    back to the version that the night began with. Idempotent."""
    before, after = version_of(night, start=True), version_of(night, start=False)
    if decision == "promote" or before is None or before == after:
        return
    from skills.bank import SkillBank

    name, _, version = str(after).partition("@")
    if SkillBank.open(night.bank_home, name).snapshot() != version:
        logger.warning("bank %s was changed by somebody else; it stays as it is", name)
        return
    follow(night.bank_home, before, reason=f"{night.run.name} was not promoted")
