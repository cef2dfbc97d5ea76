"""The skill bank of a night: which one, in which version, and what a stage does with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.config import Config, Stage
from distill.errors import ConfigError, DataError, TeacherError
from distill.types import Message, Rollout, Sampling, Task
from flows.acting import SkillPrompts

if TYPE_CHECKING:
    from distill.protocols import Env, TextModel
    from distill.tokens import Chat
    from flows.acting import Act
    from flows.evolving import StageBank
    from flows.night import Night, Student
    from skills.bank import SkillBank
    from skills.embed import Embedder
    from skills.ops import Op, OpName

logger = logging.getLogger(__name__)
ACTOR = "night"
"""Who changes a bank, as its history names it."""
PATIENCE = 60.0
"""Seconds that a night waits for another writer of its bank."""
PACKAGED = "package:"
"""`package:NAME` in place of a path means skills that come with this package."""


def require_usable(config: Config, where: str) -> None:
    """ConfigError for what would only be noticed once a stage begins: skills to begin with that are
    not there, a table of words or an embedder that does not exist, lending that lends nothing."""
    from flows.evolving import retrieve_options

    skills = config.skills
    if skills.lend and skills.outcomes == "success":
        raise ConfigError(
            f"{where}: skills.lend gives notes to failures, but skills.outcomes is 'success'; set "
            'skills.outcomes = "all" or "failure", or skills.lend = false'
        )
    if not skills.bank:
        return
    retrieve_options(config)
    known = ("student", "sentence:", "endpoint:", "policy:")
    if skills.mode != "template" and not skills.embedder.startswith(known):
        raise ConfigError(
            f"{where}: skills.embedder is student, sentence:PATH, endpoint:URL#MODEL or "
            f"policy:PATH, found {skills.embedder!r}"
        )
    if not (Path(config.run.home) / "bank" / skills.bank).exists():
        _first_items(skills.start)


def bank_of(night: Night, config: Config) -> SkillBank | None:
    """The bank of a configuration; made from `skills.start` where it does not exist yet, or was
    made and never got a skill."""
    from skills.bank import SkillBank

    name = config.skills.bank
    if not name:
        return None
    if name in SkillBank.names(night.bank_home):
        bank = SkillBank.open(night.bank_home, name)
        ops = bank.history()
        if ops[-1].version != bank.snapshot():
            # A writer was killed once its change was logged, but not active yet.
            bank.recover(wait=PATIENCE)
        if config.skills.start and len(ops) == 1:
            # A night was killed between the two steps below.
            _fill(bank, _first_items(config.skills.start), config.skills.start)
        return bank
    items = _first_items(config.skills.start)
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


def _first_items(start: str) -> Sequence[Any]:
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
        decode=student.chat.decode,
        analyst=build_analyst(config, student, night.locate),
        writer=writer,
        embedder=embedder_for(config, student, night.home),
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
    of the stage, up to a step where one is given; what the stage kept at its end counts as the
    newest. None where no skill is shown."""
    from distill.rundir import read_json, read_jsonl
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
    held.rollback(version, actor=ACTOR, reason=reason)
    return before


def settle(night: Night, decision: str) -> None:
    """A bank whose skills are shown belongs to the champion: when a night is not promoted, it goes
    back to the version that the night began with; when it is, to the one that was evaluated, which
    is not the newest where the monitor ended the stage early. Idempotent."""
    promoted = decision == "promote"
    wanted = version_of(night, start=not promoted)
    if wanted is None:
        return
    from skills.bank import SkillBank

    name, _, version = wanted.partition("@")
    active = SkillBank.open(night.bank_home, name).snapshot()
    if active == version:
        return
    if active not in _own_versions(night):
        logger.warning("bank %s was changed by somebody else; it stays as it is", name)
        return
    reason = f"{night.run.name} was {'' if promoted else 'not '}promoted"
    follow(night.bank_home, wanted, reason=reason)


def _own_versions(night: Night) -> set[str]:
    """Those that the last stage made of its bank."""
    from distill.rundir import read_jsonl
    from flows.keeping import read_learned
    from flows.looks import LOOKS

    folder = night.run.stage_dir(night.student_stages[-1].name)
    rows = read_jsonl(folder / LOOKS) if (folder / LOOKS).exists() else []
    learned = read_learned(folder)
    kept = learned.kept.version if learned is not None and learned.kept is not None else ""
    return {kept, *(str(row["version"]) for row in rows)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A change that a night made before it was interrupted."""

    version: str
    before: str
    """The version that it changed."""
    ops: tuple[Op, ...]
    usable: frozenset[str]
    """Skills that it left, not those in quarantine."""

    def named(self, *names: OpName) -> tuple[str, ...]:
        """Usable skills with one of these operations, in order."""
        found = dict.fromkeys(op.item for op in self.ops if op.op in names)
        return tuple(name for name in found if name in self.usable)


def committed(bank: SkillBank, reason: str) -> Done | None:
    """What a night changed for this reason; None when it did not."""
    ops = bank.history()
    # The bank adds to a reason after a semicolon; another stage may only have a longer name.
    own = [
        op
        for op in ops
        if op.actor == ACTOR and (op.reason == reason or op.reason.startswith(f"{reason};"))
    ]
    if not own:
        return None
    end = next(op for op in ops if op.seq > own[-1].seq and op.op == "ACTIVATE")
    assert end.version is not None
    assert end.previous is not None
    bank.recover(wait=PATIENCE)  # it may not have become the active version yet
    left = bank.rows(version=end.version)
    return Done(
        version=end.version,
        before=end.previous,
        ops=tuple(op for op in ops if own[0].seq <= op.seq < end.seq),
        usable=frozenset(row.id for row in left if row.status != "quarantined"),
    )
