"""A bank that grows while a stage trains (SkillRL): look at what fails, write, measure, keep.

Looks are taken at tasks of the split `evolve`, never at those that a model is judged by. What a
look decided is a line of `bank.jsonl` beside the stage's checkpoints: a resumed stage shows each
step the very version that it had, and a look that was interrupted ends with the same version.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from distill.config import Config
from distill.protocols import Env
from distill.rows import trajectories
from distill.rundir import append_jsonl, from_json, read_jsonl, to_json
from distill.tokens import Chat
from distill.types import Rollout, Task
from flows.acting import Act, Shown, SkillPrompts, render_options
from flows.changes import ACTOR, PATIENCE, committed, signed
from flows.hindsight import analyst_options, has_secrets
from flows.looks import LOOKS, Look
from flows.paired import PairedGain, is_success, measure, num_tokens
from flows.skills_showing import retriever_of
from skills.bank import SkillBank
from skills.hindsight.analysts import Analyst, written
from skills.hindsight.checks import secrets_of
from skills.hindsight.episodes import Episode, episodes_of
from skills.hindsight.evolve import EvolveOptions, propose
from skills.hindsight.to_items import category_of, to_items
from skills.intake import AddOptions
from skills.items import SkillItem, Status, normal
from skills.lifecycle import Thresholds, Use, must_retire
from skills.retrieve import RetrieveOptions
from skills.safety import Secrets, inspect
from skills.utility import weak_families

if TYPE_CHECKING:
    from distill.protocols import TextModel
    from skills.change import Change
    from skills.embed import Embedder

logger = logging.getLogger(__name__)
MAX_SCANNED = 20_000
"""Tasks of the split that are read to find enough of every family."""


@dataclass(kw_only=True, slots=True)
class StageBank:
    """The bank of a stage: which version each step shows, and how it grows."""

    bank: SkillBank
    config: Config
    chat: Chat
    env: Env
    act: Act
    """Plays tasks as they are given, for training: `num_samples` attempts each."""
    act_once: Act
    """The same with one attempt each."""
    folder: Path
    key: str
    run: str
    decode: Callable[[Sequence[int]], str]
    night: str = ""
    """Id of the night: its changes of the bank are told by it from those of every other one."""
    analyst: Analyst | None = None
    writer: TextModel | None = None
    """Asked for new skills in SkillRL's own words, where the analyst writes JSON."""
    embedder: Embedder | None = None
    looks: list[Look] = field(default_factory=list)
    _prompts: dict[str, SkillPrompts] = field(default_factory=dict)
    _families: dict[str, list[Task]] | None = None

    def __post_init__(self) -> None:
        path = self.folder / LOOKS
        rows = read_jsonl(path) if path.exists() else []
        self.looks = [from_json(Look, row, where=str(path)) for row in rows]
        if not self.looks:
            self._record(Look(step=0, version=self.bank.snapshot(), rates={}))

    def version_at(self, step: int) -> str:
        """The version that a step shows: that of the last look up to it."""
        return [look for look in self.looks if look.step <= step][-1].version

    @property
    def newest(self) -> str:
        return self.looks[-1].version

    def prompts(self, version: str) -> SkillPrompts:
        if version not in self._prompts:
            self._prompts[version] = skill_prompts(
                self.bank, self.config, self.chat, version=version, embedder=self.embedder
            )
        return self._prompts[version]

    def play(self, tasks: Sequence[Task], key: str, step: int) -> list[Rollout]:
        """The student acts with the skills that this step shows."""
        shown = self.prompts(self.version_at(step)).show(tasks)
        return shown.mark(self.act(shown.tasks, key))

    def metrics(self, step: int) -> Mapping[str, float]:
        """What the look of this very step did; nothing when it had none."""
        own = [look for look in self.looks if look.step == step and step]
        return own[-1].metrics() if own else {}

    # -- a look ----------------------------------------------------------------------------

    def look_if_due(self, step: int) -> None:
        """Let the bank grow before this step, where it is due and was not done."""
        every = self.config.skills.evolve_every
        due = every and step > 1 and (step - 1) % every == 0
        if due and self.analyst is not None and not any(k.step == step for k in self.looks):
            self._record(self._look(step))

    def _record(self, look: Look) -> None:
        self.looks.append(look)
        self.folder.mkdir(parents=True, exist_ok=True)
        append_jsonl(self.folder / LOOKS, [to_json(look)], sync=True)

    def _look(self, step: int) -> Look:
        skills, key = self.config.skills, f"{self.key}/evolve{step}"
        families = self._families_of_tasks()
        tasks = [t for own in families.values() for t in own[: skills.evolve_tasks]]
        version = self.version_at(step)
        shown = self.prompts(version).show(tasks)
        rows = self.act_once(shown.tasks, key)
        attempts = trajectories(rows)
        rates = _rates(tasks, attempts, skills.success)
        weak = weak_families(rates, skills.update_threshold)
        spent = num_tokens(attempts)
        look = Look(step=step, version=version, rates=rates, weak=weak, num_tokens=spent)
        items: list[SkillItem] = []
        if weak:
            by_id = {t.id: t for t in tasks}
            episodes = episodes_of(rows, by_id.__getitem__, self.decode, threshold=skills.success)
            items = self._new_items(episodes, rates, weak, version, step)
        return self._keep(look, items, uses_of(shown, attempts, skills.success))

    def _new_items(
        self,
        episodes: Sequence[Episode],
        rates: Mapping[str, float],
        weak: Sequence[str],
        version: str,
        step: int,
    ) -> list[SkillItem]:
        """At most `max_new` new texts for each weak family, those with most evidence first."""
        skills = self.config.skills
        if self.writer is not None:
            asked = analyst_options(self.config)
            options = EvolveOptions(
                update_threshold=skills.update_threshold,
                max_failures=skills.max_failures,
                max_new=skills.max_new,
                max_tokens=asked.max_tokens,
            )
            known = self.bank.items(version=version)
            found = propose(self.writer, known, episodes, rates, options, run=self.run, step=step)
            if not found.items:
                logger.warning("look of step %d: no new skill: %s", step, found.reason)
            return list(found.items)
        assert self.analyst is not None
        told = [e for e in episodes if category_of(e.task) in weak]
        failed = [e for e in told if e.outcome == "failure"][: skills.max_failures]
        told = [*failed, *(e for e in told if e.outcome == "success")]
        notes = written(self.analyst, told, step)
        items = to_items(told, notes, run=self.run, step=step)
        counts: Counter[str] = Counter()
        chosen: dict[tuple[str, str], SkillItem] = {}
        for item in sorted(items, key=lambda i: -len(i.evidence)):
            # A success and a failure may teach the same words: they are measured once.
            fits = item.level == "task" and counts[item.category] < skills.max_new
            if fits and _words(item) not in chosen:
                counts[item.category] += 1
                chosen[_words(item)] = item
        return list(chosen.values())

    def _keep(self, look: Look, items: Sequence[SkillItem], uses: Sequence[Use]) -> Look:
        """Measure new skills and take in those that help, and count how those that were shown did;
        one change of the bank."""
        # What is shown, or was taken out, need not be measured again; a candidate may be.
        decided: tuple[Status, ...] = ("active", "quarantined", "retired")
        known = {_words(item) for item in self.bank.items(*decided, version=look.version)}
        fresh = [replace(i, id=f"new{n}") for n, i in enumerate(items) if _words(i) not in known]
        gains: list[PairedGain] = []
        good: list[tuple[SkillItem, PairedGain | None]] = []
        refused: list[str] = []
        spent = look.num_tokens
        for item in fresh:
            gain = self.measure(item, f"pairs{look.step}")
            if gain is None:
                good.append((item, None))
                continue
            gains.append(gain)
            spent += round((gain.tokens_with + gain.tokens_without) * gain.num_pairs)
            against = _against(gain)
            if against:
                refused.append(f"{item.title}: {against}")
            else:
                good.append((item, gain))
        done = self._commit(look, good, uses)
        return replace(
            look,
            version=done.version,
            added=done.added,
            retired=done.retired,
            refused=(*refused, *done.refused),
            gains=tuple(gains),
            num_tokens=spent,
        )

    def measure(self, item: SkillItem, when: str) -> PairedGain | None:
        """What a skill is worth on tasks of its family from the split `evolve`, with the student as
        it is; None where [skills] asks for no pairs."""
        skills, families = self.config.skills, self._families_of_tasks()
        own = [families[item.category]] if item.category in families else list(families.values())
        # Not those that taught it, where there are enough others; families take turns.
        rests = zip_longest(*(tasks[skills.evolve_tasks :] or tasks for tasks in own))
        others = [task for turn in rests for task in turn if task is not None]
        chosen = [others[i % len(others)] for i in range(skills.pairs)]
        if not chosen:
            return None
        key = f"{self.key}/{when}/{item.sha256[:12]}"
        options = render_options(self.chat, skills.max_chars)
        return measure(
            item,
            chosen,
            self.act_once,
            self.chat,
            key=key,
            success=skills.success,
            options=options,
        )

    def _commit(
        self,
        look: Look,
        good: Sequence[tuple[SkillItem, PairedGain | None]],
        uses: Sequence[Use],
    ) -> Look:
        """The look with what became of the bank."""
        why = f"look of step {look.step}, {self.run}, {self.key}"
        reason = signed(why, self.night)
        done = committed(self.bank, reason)
        if done is not None:  # it was interrupted between the bank and the record
            added, retired = done.named("ADD", "MERGE", "AGREE"), done.named("RETIRE")
            return replace(look, added=added, retired=retired, version=done.version)
        if not (good or uses):
            return look
        tasks = [task for own in self._families_of_tasks().values() for task in own]
        secrets = secrets_of(tasks) if has_secrets(self.config) else Secrets()
        with self.bank.change(actor=ACTOR, wait=PATIENCE) as change:
            change.credit(uses, reason=reason)
            # The reason of a retirement is part of the version: equal nights end with equal ones.
            retired = _retire(change, {use.skill for use in uses}, why)
            added, refused = _take_in(change, good, reason, secrets)
            version = change.version().id  # afterwards another night may have changed it
        return replace(look, added=added, retired=retired, refused=refused, version=version)

    def _families_of_tasks(self) -> dict[str, list[Task]]:
        """Tasks of the split `evolve` by category, enough of each for a look and its pairs."""
        if self._families is None:
            wanted = self.config.skills.evolve_tasks + self.config.skills.pairs
            tasks = self.env.tasks("evolve")
            found: dict[str, list[Task]] = {}
            for i in range(min(len(tasks), MAX_SCANNED)):
                own = found.setdefault(category_of(tasks[i]), [])
                if len(own) < wanted:
                    own.append(tasks[i])
                elif all(len(each) >= wanted for each in found.values()) and i >= 16 * len(found):
                    break
            self._families = found
        return self._families


def skill_prompts(
    bank: SkillBank,
    config: Config,
    chat: Chat,
    *,
    version: str | None = None,
    embedder: Embedder | None = None,
) -> SkillPrompts:
    """What puts the skills of a bank version into prompts, as [skills] says."""
    options = retrieve_options(config)
    retriever = retriever_of(
        bank,
        options,
        version=version,
        embedder=embedder,
        env="" if ":" in config.data.name else config.data.name,
        model=config.model.name,
    )
    return SkillPrompts(
        retriever=retriever, chat=chat, options=render_options(chat, config.skills.max_chars)
    )


def retrieve_options(config: Config) -> RetrieveOptions:
    """How [skills] chooses. ConfigError for a table of words that there is not."""
    skills = config.skills
    return RetrieveOptions(
        mode=skills.mode,
        top_k=skills.top_k,
        task_top_k=skills.task_top_k,
        mistakes_k=skills.mistakes_k,
        sim_threshold=skills.sim_threshold if skills.sim_threshold > -1.0 else None,
        order=skills.order,
        rules=skills.rules,
    )


def uses_of(shown: Shown, attempts: Sequence[Sequence[Rollout]], success: float) -> list[Use]:
    """One use per attempt and skill that stood in its prompt."""
    return [
        Use(skill=name, success=is_success(rows, success))
        for rows in attempts
        for name in shown.skills.get(rows[0].task_id, ())
    ]


def _retire(change: Change, names: set[str], reason: str) -> tuple[str, ...]:
    gone = []
    for name in sorted(names & set(change.rows)):
        item = change.get(name)
        why = must_retire(item, Thresholds())
        if why and not item.pinned and item.status == "active":
            change.retire(name, reason=f"{reason}; {why}")
            gone.append(name)
    return tuple(gone)


def _take_in(
    change: Change,
    good: Sequence[tuple[SkillItem, PairedGain | None]],
    reason: str,
    secrets: Secrets,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    added, refused = [], []
    options = AddOptions(inspect=partial(inspect, secrets=secrets))
    outcomes = change.add([replace(item, id="") for item, _ in good], options, reason=reason)
    for (item, gain), outcome in zip(good, outcomes, strict=True):
        if outcome.result not in ("added", "merged", "agreed"):
            refused.append(f"{item.title}: {outcome.result}, {outcome.reason}")
            continue
        if gain is not None and outcome.result != "merged":
            uses = [replace(use, skill=outcome.id) for use in gain.uses]
            change.credit(uses, reason=reason)
        if change.get(outcome.id).status == "candidate":
            change.set_status(outcome.id, "active", reason=reason)
        added.append(outcome.id)
    return tuple(added), tuple(refused)


def _words(item: SkillItem) -> tuple[str, str]:
    """What a skill says about which kind of task, whatever taught it."""
    return normal(item.category), normal(item.principle)


def _against(gain: PairedGain) -> str:
    """Why a measured skill is not kept; empty when it is (a mean gain, and no likely loss)."""
    least = Thresholds().min_gain_low
    if gain.gain <= 0:
        return f"no gain in {gain.num_pairs} pairs ({gain.gain:+.2f})"
    if gain.low <= least:
        return f"a loss is not excluded ({gain.low:+.2f} to {gain.high:+.2f})"
    return ""


def _rates(
    tasks: Sequence[Task], attempts: Sequence[Sequence[Rollout]], success: float
) -> dict[str, float]:
    found: dict[str, list[bool]] = {}
    for task, rows in zip(tasks, attempts, strict=True):
        found.setdefault(category_of(task), []).append(is_success(rows, success))
    return {family: sum(own) / len(own) for family, own in found.items()}
