"""Which skills are shown for a goal. Only active ones ever are.

template    SkillRL's default: general skills, all of the goal's category, a few mistakes
embedding   the nearest general and the nearest task skills across categories, mistakes
utility     nearest first, then by measured usefulness with a bonus for the untried (UCOB)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from distill.errors import ConfigError
from skills.embed import Embedder
from skills.index import SkillIndex, sync
from skills.items import SkillItem
from skills.rules import GENERAL, RULES, category_of
from skills.utility import EVOLVED, ucb_score

Mode = Literal["template", "embedding", "utility"]
Section = Literal["general", "task", "mistake"]
MODES: tuple[Mode, ...] = ("template", "embedding", "utility")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrieveOptions:
    """How skills are chosen for a goal."""

    mode: Mode = "template"
    top_k: int = 6
    """General skills."""
    task_top_k: int = 6
    """Task skills in the modes with vectors; `template` shows all of the category."""
    mistakes_k: int = 5
    sim_threshold: float | None = None
    """Only skills with a cosine strictly above this; none by default."""
    order: Literal["curated_first", "evolved_first"] = "curated_first"
    """General skills in `template`. SkillRL's code puts evolved ones first, so that a few of them
    push all curated ones out."""
    rules: str = ""
    """Table of words that decide the category: alfworld, webshop, search; empty compares the goal
    with the names of the bank's categories."""
    query_prefix: str = ""
    """Put before a goal when it is embedded; some embedding models want an instruction."""
    pre_top: int = 10
    """`utility`: nearest skills of each section that are scored."""
    alpha: float = 0.1
    explore: float = 0.1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"skills.mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.order not in ("curated_first", "evolved_first"):
            raise ConfigError(
                f"skills.order must be curated_first or evolved_first, got {self.order!r}"
            )
        if self.rules and self.rules not in RULES:
            raise ConfigError(
                f"skills.rules must be one of {', '.join(RULES)} or empty, got {self.rules!r}"
            )
        for name in ("top_k", "task_top_k", "mistakes_k", "pre_top"):
            if getattr(self, name) < 0:
                raise ConfigError(f"skills.{name} must not be negative, got {getattr(self, name)}")
        if self.sim_threshold is not None and not -1.0 <= self.sim_threshold <= 1.0:
            raise ConfigError(
                f"skills.sim_threshold is a cosine within [-1, 1], got {self.sim_threshold}"
            )
        if not 0.0 <= self.alpha <= 1.0 or self.explore < 0.0:
            raise ConfigError(
                "skills.alpha must be within [0, 1] and skills.explore not negative, got "
                f"{self.alpha} and {self.explore}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pick:
    """One chosen skill, as it is recorded."""

    id: str
    section: Section
    rank: int
    """From 1, within the section."""
    similarity: float | None = None
    score: float | None = None
    """What decided the rank, where that is not the similarity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalRecord:
    """What is logged for every goal."""

    bank_version: str
    mode: Mode
    category: str
    picks: tuple[Pick, ...]
    tokens_added: int | None = None
    shown: tuple[str, ...] | None = None
    """Ids that fitted the budget; None before anything was rendered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retrieval:
    """The chosen skills, best first, and the record of the choice."""

    general: tuple[SkillItem, ...]
    task: tuple[SkillItem, ...]
    mistakes: tuple[SkillItem, ...]
    record: RetrievalRecord

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(item.id for item in (*self.general, *self.task, *self.mistakes))


_Scored = tuple[SkillItem, float | None, float | None]
_DEFAULT = RetrieveOptions()


def section_of(item: SkillItem) -> Section:
    """SkillRL knows three: mistakes, general skills, and skills of a task or step."""
    if item.kind == "mistake":
        return "mistake"
    return "general" if item.level == "general" else "task"


class Retriever:
    """Chooses among the active skills of one bank version, for one environment and model.

    `items` come in the order of the bank, which `template` keeps. The modes with vectors need an
    embedder; an index that is handed over is brought up to date. ConfigError without an embedder.
    """

    def __init__(
        self,
        items: Sequence[SkillItem],
        options: RetrieveOptions = _DEFAULT,
        *,
        bank_version: str = "",
        embedder: Embedder | None = None,
        index: SkillIndex | None = None,
        env: str = "",
        model: str = "",
    ) -> None:
        self.options = options
        self.bank_version = bank_version
        self.embedder = embedder
        self.index = index
        fitting = [i for i in items if i.status == "active" and _in_scope(i, env, model)]
        self._by_id = {i.id: i for i in fitting}
        self._sections: dict[Section, list[SkillItem]] = {"general": [], "task": [], "mistake": []}
        for item in fitting:
            self._sections[section_of(item)].append(item)
        self._total_used = sum(i.credit.num_used for i in fitting)
        if options.mode == "template":
            return
        if embedder is None:
            raise ConfigError(
                f"skills.mode = {options.mode!r} needs an embedder; set skills.embedder, or use "
                'skills.mode = "template"'
            )
        if index is None:
            from skills.embed import EmbedderKey

            self.index = SkillIndex(EmbedderKey.of(embedder))
            sync(self.index, fitting, embedder)
        elif any(index.entries.get(i.id) != i.sha256 for i in fitting):
            # A bank holds more than is active; what else the index knows may stay.
            kept = [i for i in items if i.id in index and index.entries[i.id] == i.sha256]
            sync(index, list({i.id: i for i in [*kept, *fitting]}.values()), embedder)

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(sorted({i.category for i in self._sections["task"]}))

    def retrieve(self, goals: Sequence[str], *, category: str | None = None) -> list[Retrieval]:
        """What is shown for each goal. `category` overrides what the rules would say."""
        if self.options.mode == "template":
            return [self._template(goal, category) for goal in goals]
        assert self.index is not None
        assert self.embedder is not None
        if not goals or not self._by_id:
            return [self._made(goal, category, (), ()) for goal in goals]
        queries = self.embedder.embed([self.options.query_prefix + goal for goal in goals])
        general = self._near("general", queries, self.options.top_k)
        task = self._near("task", queries, self.options.task_top_k)
        return [
            self._made(goal, category, *found)
            for goal, *found in zip(goals, general, task, strict=True)
        ]

    def _template(self, goal: str, category: str | None) -> Retrieval:
        found = category if category is not None else self._category(goal)
        evolved_last = self.options.order == "curated_first"
        general = sorted(
            self._sections["general"], key=lambda i: i.id.startswith(EVOLVED) == evolved_last
        )
        return self._made(
            goal,
            found,
            [(i, None, None) for i in general[: self.options.top_k]],
            [(i, None, None) for i in self._sections["task"] if i.category == found],
        )

    def _near(self, section: Section, queries: object, k: int) -> list[list[_Scored]]:
        assert self.index is not None
        among = [i.id for i in self._sections[section]]
        wide = self.options.pre_top if self.options.mode == "utility" else k
        least = self.options.sim_threshold
        out = []
        for hits in self.index.search(queries, wide, among=among):
            near = [h for h in hits if least is None or h.score > least]
            found = [(self._by_id[h.id], h.score) for h in near]
            rows: list[_Scored] = [(i, s, None) for i, s in found]
            if self.options.mode == "utility":
                scored = [(i, s, self._score(i, s)) for i, s in found]
                rows = [*sorted(scored, key=lambda row: (-row[2], row[0].id))]
            out.append(rows[:k])
        return out

    def _score(self, item: SkillItem, relevance: float) -> float:
        return ucb_score(
            relevance,
            item.credit.utility,
            item.credit.num_used,
            self._total_used,
            alpha=self.options.alpha,
            explore=self.options.explore,
        )

    def _category(self, goal: str) -> str:
        return category_of(goal, rules=self.options.rules, known=self.categories)

    def _made(
        self,
        goal: str,
        category: str | None,
        general: Sequence[_Scored],
        task: Sequence[_Scored],
    ) -> Retrieval:
        mistakes: list[_Scored] = [
            (i, None, None) for i in self._sections["mistake"][: self.options.mistakes_k]
        ]
        sections: list[tuple[Section, Sequence[_Scored]]] = [
            ("general", general),
            ("task", task),
            ("mistake", mistakes),
        ]
        picks = tuple(
            Pick(id=item.id, section=name, rank=rank, similarity=similarity, score=score)
            for name, rows in sections
            for rank, (item, similarity, score) in enumerate(rows, start=1)
        )
        if category is None:
            category = self._category(goal) if self.categories else GENERAL
        return Retrieval(
            general=tuple(row[0] for row in general),
            task=tuple(row[0] for row in task),
            mistakes=tuple(row[0] for row in mistakes),
            record=RetrievalRecord(
                bank_version=self.bank_version,
                mode=self.options.mode,
                category=category,
                picks=picks,
            ),
        )


def _in_scope(item: SkillItem, env: str, model: str) -> bool:
    """An empty scope is anywhere; without an environment or model nothing is left out."""
    fits_env = not (env and item.scope.env) or item.scope.env == env
    return fits_env and (not (model and item.scope.models) or model in item.scope.models)
