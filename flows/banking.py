"""The skill bank of a night: which one, in which version, and what a stage does with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.config import Config, Stage
from distill.errors import ConfigError, DataError, TeacherError
from distill.types import Message, Rollout, Sampling, Task
from flows.acting import SkillPrompts
from flows.changes import ACTOR, PATIENCE, is_untouched, signed, stands_at
from flows.embedding import embedder_for

if TYPE_CHECKING:
    from distill.protocols import Env, TextModel
    from distill.tokens import Chat
    from flows.acting import Act
    from flows.evolving import StageBank
    from flows.night import Night, Student
    from skills.bank import SkillBank

logger = logging.getLogger(__name__)
PACKAGED = "package:"
"""`package:NAME` in place of a path means skills that come with this package."""


def bank_of(night: Night, config: Config) -> SkillBank | None:
    """The bank of a configuration; made from `skills.start` where it does not exist yet, or was
    made and never got a skill. ConfigError when a night that may only be read has none."""
    from skills.bank import SkillBank

    name = config.skills.bank
    if not name:
        return None
    if night.read_only:
        return SkillBank.open(night.bank_home, name)
    if name in SkillBank.names(night.bank_home):
        bank = SkillBank.open(night.bank_home, name)
        ops = bank.history()
        if ops[-1].version != bank.snapshot():
            # A writer was killed once its change was logged, but not active yet.
            bank.recover(wait=PATIENCE)
        if config.skills.start and len(ops) == 1:
            # A night was killed between the two steps below.
            _fill(bank, first_items(config.skills.start), config.skills.start)
        return bank
    items = first_items(config.skills.start)
    bank = SkillBank.create(night.bank_home, name)
    _fill(bank, items, config.skills.start)
    return bank


def _fill(bank: SkillBank, items: Sequence[Any], start: str) -> None:
    outcomes = bank.add(items, actor=ACTOR, reason=f"start: {start}")
    odd = [o for o in outcomes if o.result in ("quarantined", "refused")]
    if odd:
        logger.warning(
            "bank %s: %d of %d skills of %s were not taken in as they are (%s)",
            bank.name, len(odd), len(items), start, odd[0].reason,
        )  # fmt: skip


def first_items(start: str) -> Sequence[Any]:
    """What a bank begins with. ConfigError for a path without any skill."""
    from skills.interop import import_path

    if not start:
        return ()
    path = Path(start)
    if start.startswith(PACKAGED):
        path = Path(str(files("flows"))) / "presets" / "skills" / start.removeprefix(PACKAGED)
    try:
        found = import_path(path)
    except DataError as error:
        raise ConfigError(f"skills.start: {error}") from error
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
    from flows.hindsight import (
        ModelOptions,
        PolicyOptions,
        analyst_options,
        build_analyst,
        build_writer,
    )

    config = night.config.for_stage(stage)
    bank = bank_of(night, config)
    if bank is None:
        return None
    act: Act = lambda tasks, key: play(tasks, key, config.sampling.num_samples)  # noqa: E731
    once: Act = lambda tasks, key: play(tasks, key, 1)  # noqa: E731
    options, writer = analyst_options(config), None
    if isinstance(options, PolicyOptions) and options.format == "json":
        writer = build_writer(config, student, night.locate)
        if writer is not None and not isinstance(options, ModelOptions):
            writer = _Within(writer, student.chat)
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
        night=night.id,
        decode=student.chat.decode,
        analyst=build_analyst(config, student, night.locate),
        writer=writer,
        embedder=embedder_for(night, config, stage, student),
    )


@dataclass(frozen=True, slots=True)
class _Within:
    """The student as a writer: a question that it cannot read is one without an answer, not the end
    of the night."""

    model: TextModel
    chat: Chat

    def complete(
        self, prompts: Sequence[Sequence[Message]], n: int, sampling: Sampling
    ) -> list[list[str]]:
        longest = max(map(len, self.chat.prompts(prompts, limit=0)), default=0)
        if longest > self.chat.max_length:
            raise TeacherError(
                f"the question has {longest} tokens, but the student reads {self.chat.max_length}; "
                'raise model.max_length, or let another model write: analyst.name = "model"'
            )
        return self.model.complete(prompts, n, sampling)


def shown_version(
    night: Night, config: Config, stage: Stage, *, start: bool, step: int | None = None
) -> str | None:
    """The bank version that an evaluation shows: that of the start of the night, or the newest one
    of the stage, up to a step where one is given; what the stage kept at its end counts as the
    newest. None where no skill is shown."""
    from distill.rundir import read_jsonl
    from flows.keeping import read_learned
    from flows.looks import LOOKS
    from flows.stages import read_result

    if not (config.skills.bank and config.skills.show):
        return None
    folder = night.run.stage_dir(stage.name)
    looks, learned = folder / LOOKS, read_learned(folder)
    if not start and step is None and learned is not None and learned.kept is not None:
        return learned.kept.version
    if not start and looks.exists():
        final = night.final(stage.name)
        if step is None and final.exists():
            step = read_result(final).steps  # fewer than it looked at, where it collapsed
        rows = read_jsonl(looks)
        return str([r for r in rows if step is None or r["step"] <= step][-1]["version"])
    known = night.bank_versions.get(config.skills.bank)
    if known:
        return known
    bank = bank_of(night, config)
    assert bank is not None
    return bank.snapshot()


def showing_stages(night: Night) -> dict[str, Stage]:
    """The banks whose skills stand in prompts of the student, each with the last stage that shows
    them."""
    found = {}
    for stage in night.student_stages:
        skills = night.config.for_stage(stage).skills
        if skills.bank and skills.show:
            found[skills.bank] = stage
    return found


def eval_prompts(
    night: Night,
    config: Config,
    stage: Stage,
    student: Student,
    *,
    start: bool,
    step: int | None = None,
    pinned: str | None = None,
) -> SkillPrompts | None:
    """What shows skills in an evaluation; None where none are shown. `pinned`, NAME@VERSION, is
    what belongs to the weights, whatever the night says."""
    from flows.evolving import skill_prompts

    if not (config.skills.bank and config.skills.show):
        return None
    name, _, version = (pinned or "").partition("@")
    if name != config.skills.bank:
        version = shown_version(night, config, stage, start=start, step=step) or ""
    bank = bank_of(night, config)
    assert bank is not None
    embedder = embedder_for(night, config, stage, student)
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
    return _take_to(SkillBank.open(home, name), version, reason)


def _take_to(
    bank: SkillBank, version: str, reason: str, may: Callable[[SkillBank], bool] | None = None
) -> str | None:
    """Make a version the active one unless it is, or may not become it."""
    before = bank.snapshot()
    if before == version:
        return None
    with bank.change(actor=ACTOR, wait=PATIENCE) as change:
        # A skill that was retired since does not come back: what stands then has another id.
        if stands_at(bank.history(), version) or not (may is None or may(bank)):
            return None
        bank.undo(change, version, reason=reason)
    return before


def was_left(home: Path, before: str | None, after: str | None, *, reason: str) -> bool:
    """Whether a bank still stands at NAME@VERSION `before`, which `follow` was to leave for this
    reason."""
    from skills.bank import SkillBank

    if before is None or after is None or before == after:
        return False
    name, _, version = before.partition("@")
    bank = SkillBank.open(home, name)
    moved = any(op.actor == ACTOR and op.reason == reason for op in bank.history())
    return bank.snapshot() == version and not moved


def settle(night: Night, decision: str) -> None:
    """Banks whose skills are shown belong to the champion: when a night is not promoted, they go
    back to the versions that the night began with; when it is, to those that were evaluated, which
    are not the newest where the monitor ended a stage early. Idempotent.

    A bank that somebody else changed meanwhile stays as it is."""
    from skills.bank import SkillBank

    promoted = decision == "promote"
    reason = signed(f"{night.run.name} was {'' if promoted else 'not '}promoted", night.id)
    for name, stage in showing_stages(night).items():
        config = night.config.for_stage(stage)
        began = shown_version(night, config, stage, start=True)
        wanted = shown_version(night, config, stage, start=not promoted)
        assert began is not None
        assert wanted is not None
        bank = SkillBank.open(night.bank_home, name)
        _take_to(bank, wanted, reason, partial(_is_own, night, began))


def _is_own(night: Night, began: str, bank: SkillBank) -> bool:
    """Whether only this night changed a bank since it began."""
    from flows.keeping import read_learned

    folders = [night.run.stage_dir(stage.name) for stage in night.student_stages]
    kept = [learned.kept for learned in map(read_learned, folders) if learned is not None]
    own = is_untouched(
        bank.history(),
        began,
        run=night.run.name,
        night=night.id,
        made={found.version for found in kept if found is not None},
    )
    if not own:
        logger.warning("bank %s was changed by somebody else; it stays as it is", bank.name)
    return own
