"""The generated world: small task families in one alphabet, for nights without a GPU.

Every prompt is one short user message such as `sort:52305=`. Tasks come from a seed and are made
when they are read; equal options give equal tasks on every machine. See `world_families` for the
families and `world_rules` for the language.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from distill.errors import ConfigError, DataError
from distill.types import SPLITS, Message, Reward, Split, Task, task_id
from evals.envs.base import LazyTasks, SingleTurn, split_of
from evals.envs.world_calls import TOOLS, CallEpisode
from evals.envs.world_families import FAMILIES
from evals.envs.world_rules import ALPHABET, END, RULES, TAGS, Draws, last_result
from evals.envs.world_tools import ToolEpisode

__all__ = ["ALPHABET", "END", "World"]

TRAIN_TASKS = 1_000_000
"""Tasks per domain in the split `train`; they repeat when a domain has fewer prompts."""

MAX_ATTEMPTS = 2_000

MAX_CALL_TURNS = 16

PLAIN_FAMILIES = ("sort", "rewrite")
"""Families that answer at once, without worked steps."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Options of the generated world. Lengths are [shortest, longest], both included."""

    name: ClassVar[str] = "world"

    seed: int = 0
    """Which tasks are drawn. The hidden rules stay the same."""
    domains: tuple[str, ...] = ("sort", "rewrite", "rule")
    """Families, in the order in which tasks alternate: sort, rewrite, rule, rule2, deliberate,
    tools, pretrain (prompts that teach a base to read hints), calls, calls_pretrain (the same for
    `calls`). One named twice comes up twice as often."""
    gate_size: int = 512
    """Tasks per entry of `domains` in the splits evolve, gate and test; no prompt comes twice."""
    sort_symbols: str = "0123456789"
    sort_length: tuple[int, int] = (5, 7)
    rewrite_rules: tuple[str, ...] = ("rev", "inc", "lft", "xch")
    """Rules that `rewrite` names and `tools` applies: rev srt inc lft xch two nov odd."""
    rewrite_length: tuple[int, int] = (4, 6)
    rule_length: tuple[int, int] = (4, 6)
    """Length of the string in rule, rule2 and pretrain."""
    tool_keys: tuple[int, int] = (1, 3)
    """How many keys a `tools` task must look up."""
    prior_true: float = 0.02
    """`pretrain`, `calls_pretrain`: chance that a bare tag is answered by its true rule ..."""
    prior_decoy: float = 0.6
    """... and by the wrong rule that the base is meant to believe; else any rule."""
    two_step_share: float = 0.4
    """`pretrain`: share of two-step prompts."""
    deliberate_share: float = 0.0
    """`pretrain`: share of prompts of the kind that `deliberate` asks."""
    call_tags: str = "AKPQRTWX"
    """Tags that `calls` asks about, each with a hidden order of tools."""
    call_order: int = 3
    """Length of that order, from 2 to 5."""
    call_turns: int = 4
    """Calls allowed; those that the order does not need may be mistakes."""
    analyst_share: float = 0.25
    """`calls_pretrain`: share of attempts to be read, to say which order they give away."""

    def __post_init__(self) -> None:
        _known("domains", self.domains, FAMILIES)
        _known("rewrite_rules", self.rewrite_rules, RULES)
        if not self.sort_symbols or set(self.sort_symbols) - set(ALPHABET[3:]):
            raise ConfigError(
                f"world: option 'sort_symbols' must be symbols of the alphabet {ALPHABET[3:]!r}, "
                f"found {self.sort_symbols!r}"
            )
        limits = {"rule_length": 24, "rewrite_length": 24, "sort_length": 48, "tool_keys": 8}
        for key, most in limits.items():
            low, high = getattr(self, key)
            if not 1 <= low <= high <= most:
                raise ConfigError(
                    f"world: option {key!r} must be [shortest, longest] within 1 to {most}, "
                    f"found {[low, high]}"
                )
        for key in (f.name for f in fields(self) if f.type == "float"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(
                    f"world: option {key!r} must be from 0 to 1, found {getattr(self, key)}"
                )
        self._check_calls()
        if self.gate_size < 1:
            raise ConfigError(f"world: option 'gate_size' must be positive, found {self.gate_size}")

    def _check_calls(self) -> None:
        tags = self.call_tags
        if not tags or set(tags) - set(TAGS) or len(set(tags)) != len(tags):
            raise ConfigError(
                f"world: option 'call_tags' must be different letters from A to Z, found {tags!r}"
            )
        if not 2 <= self.call_order <= len(TOOLS):
            raise ConfigError(
                f"world: option 'call_order' must be from 2 to {len(TOOLS)}, "
                f"found {self.call_order}"
            )
        if not self.call_order <= self.call_turns <= MAX_CALL_TURNS:
            raise ConfigError(
                f"world: option 'call_turns' must be from call_order ({self.call_order}) to "
                f"{MAX_CALL_TURNS}, found {self.call_turns}"
            )

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, domains taking turns; made when read.

        `train` may repeat a prompt; the other splits hold no prompt twice. A domain's tasks do
        not depend on which other domains are asked for.
        """
        if split not in SPLITS:
            raise DataError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
        if split == "train":
            return LazyTasks(TRAIN_TASKS * len(self.domains), lambda i: self._task(split, i))
        return LazyTasks(self.gate_size * len(self.domains), _Distinct(self, split))

    def start(self, task: Task) -> SingleTurn | ToolEpisode | CallEpisode:
        """A fresh attempt at a task of this world."""
        if "call_keys" in task.meta:
            return CallEpisode(task, turns=self.call_turns)
        if task.domain == "tools":
            return ToolEpisode(task, seed=self.seed)
        return SingleTurn(task, grade)

    def _task(
        self, split: Split, index: int, taken: frozenset[str] | set[str] = frozenset()
    ) -> Task:
        position, turn = divmod(index, len(self.domains))
        domain = self.domains[turn]
        position = position * self.domains.count(domain) + self.domains[:turn].count(domain)
        for attempt in range(MAX_ATTEMPTS):
            draft = FAMILIES[domain](Draws(self.seed, split, domain, position, attempt), self)
            prompt = _user(draft.prompt)
            identity = task_id(self.name, prompt)
            # A hint must not carry a question into another split than the bare question's own.
            bare = identity if draft.bare is None else task_id(self.name, _user(draft.bare))
            if split_of(bare) == split and identity not in taken:
                return Task(
                    id=identity,
                    env=self.name,
                    domain=domain,
                    split=split,
                    prompt=prompt,
                    answer=draft.answer,
                    meta=draft.meta,
                )
        raise DataError(
            f"world: found no new {split} task for domain {domain!r} after {len(taken)} tasks; "
            f"its prompts are too few: allow longer strings or lower gate_size"
        )


class _Distinct:
    """Makes task i after all tasks before it, so that none repeats an earlier prompt."""

    def __init__(self, world: World, split: Split) -> None:
        self._world = world
        self._split = split
        self._tasks: list[Task] = []
        self._ids: set[str] = set()

    def __call__(self, index: int) -> Task:
        while len(self._tasks) <= index:
            task = self._world._task(self._split, len(self._tasks), self._ids)
            self._tasks.append(task)
            self._ids.add(task.id)
        return self._tasks[index]


def grade(text: str, task: Task) -> Reward:
    """1.0 when the reply ends on exactly the answer, else 0.0.

    Families that ask for work are judged by their last result; `parts` then says whether the
    reply opened with the letter of the right rule.
    """
    rule = task.meta.get("rule")
    result = text if task.domain in PLAIN_FAMILIES else last_result(text)
    value = float(result == task.answer)
    if rule is None:
        return Reward(value=value)
    return Reward(value=value, parts={"rule": float(text[:1] == rule[0][0])})


def _user(content: str) -> tuple[Message]:
    return (Message(role="user", content=content),)


def _known(option: str, chosen: Sequence[str], known: dict[str, Callable[..., Any]]) -> None:
    wrong = [item for item in chosen if item not in known]
    if wrong or not chosen:
        raise ConfigError(
            f"world: option {option!r} must name some of {', '.join(known)}; "
            f"found {wrong[0] if wrong else 'nothing'!r}"
        )
