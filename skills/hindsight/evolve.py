"""A bank grows from what still fails (SkillRL, arXiv 2602.08234): choose, ask, read, propose.

Pure functions up to `propose`; only `store` writes, through a change that is handed in. Failures of
tasks that judge a model never teach: that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from distill.errors import ConfigError, TeacherError
from distill.protocols import TextModel
from distill.types import Message, Sampling, Task
from skills.change import Change
from skills.hindsight.checks import secrets_of
from skills.hindsight.episodes import Episode, last_user_text
from skills.hindsight.labels import require_learnable
from skills.hindsight.objects import MAX_CHARACTERS
from skills.hindsight.parse import parse_list, shown
from skills.hindsight.prompting import fill, load, prompt_version, quoted
from skills.hindsight.to_items import category_of
from skills.intake import AddOptions, Outcome
from skills.items import Evidence, Level, Lineage, Scope, SkillItem, normal
from skills.render import neutral
from skills.safety import MAX_FIELD, inspect
from skills.utility import EVOLVED, next_id, weak_families

PROMPT = "skillrl_update"
REQUIRED = ("title", "principle")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvolveOptions:
    """When and how a bank grows."""

    update_threshold: float = 0.4
    """Families whose success rate is below it are learnt from."""
    max_failures: int = 10
    """Failures that are collected ..."""
    num_shown: int = 5
    """... and the first ones, which the model is shown,"""
    last_steps: int = 5
    """with so many of their last steps"""
    max_observation: int = 200
    """and so many characters of each observation."""
    max_response: int = 500
    max_value: float = 0.0
    """Of a failure that is collected; partial success above it is none."""
    max_new: int = 3
    max_titles: int = 200
    """Titles of the bank that are shown, the last ones."""
    level: Level = "general"
    """Level of new skills. SkillRL only has general ones; `task` puts those of a single weak family
    into its category."""
    max_tokens: int = 2048

    def __post_init__(self) -> None:
        names = ("max_failures", "num_shown", "last_steps", "max_observation", "max_response")
        for name in (*names, "max_new", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"evolve.{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 <= self.update_threshold <= 1.0 or self.max_titles < 0:
            raise ConfigError(
                "evolve.update_threshold lies in [0, 1] and evolve.max_titles is 0 or more, got "
                f"{self.update_threshold} and {self.max_titles}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """What a model proposed. Without items the `reason` says why."""

    status: Literal["ok", "no_weak_family", "no_failure", "failed", "invalid", "empty"]
    items: tuple[SkillItem, ...] = ()
    reason: str = ""
    dropped: tuple[str, ...] = ()
    """Entries that were left out, with their reasons."""
    families: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    """Trajectories that were collected, in order."""
    prompt: str = ""
    raw: str = ""


def collect_failures(
    episodes: Sequence[Episode],
    rates: Mapping[str, float],
    options: EvolveOptions,
    family_of: Callable[[Task], str] = category_of,
) -> list[Episode]:
    """Failures of the weak families, at most `max_failures`: one of each family in turn.

    The weakest family comes first, and in a family the lowest value; equals keep their order.
    """
    weak = sorted(weak_families(rates, options.update_threshold), key=lambda f: rates[f])
    piles: dict[str, list[Episode]] = {family: [] for family in weak}
    for episode in episodes:
        family = family_of(episode.task)
        low = episode.value is not None and episode.value <= options.max_value
        if family in piles and episode.outcome == "failure" and low:
            piles[family].append(episode)
    for pile in piles.values():
        pile.sort(key=lambda e: e.value or 0.0)
    deepest = max(map(len, piles.values()), default=0)
    turns = (pile[i] for i in range(deepest) for pile in piles.values() if i < len(pile))
    chosen = [episode for _, episode in zip(range(options.max_failures), turns, strict=False)]
    require_learnable(chosen)
    return chosen


def update_prompt(
    failures: Sequence[Episode], titles: Sequence[str], options: EvolveOptions
) -> tuple[Message, ...]:
    """The question about the first failures, with the titles that are taken."""
    recent = titles[len(titles) - min(len(titles), options.max_titles) :]
    shown_titles = [quoted(" ".join(t.split()), MAX_FIELD["title"]) for t in recent]
    parts = [_failure(n, e, options) for n, e in enumerate(failures[: options.num_shown], start=1)]
    values = {
        "min_new": "1",
        "max_new": str(options.max_new),
        "titles": "\n".join(shown_titles) or "(none yet)",
        "failures": "\n\n".join(parts),
    }
    return (Message(role="user", content=fill(load(PROMPT), values)),)


def read_skills(
    text: str, *, taken: Sequence[str], options: EvolveOptions, titles: Sequence[str] = ()
) -> tuple[list[dict[str, str]], list[str], str]:
    """New skills of a reply, what was dropped with reasons, and why nothing could be read.

    Each skill has `id` (the next free `dyn_NNN`, whatever the reply said), `title`, `principle` and
    `when_to_apply`. A title that is `taken` by the bank or said before is dropped.
    """
    parsed = parse_list(text)
    kept: list[dict[str, str]] = []
    dropped: list[str] = []
    ids, known = list(taken), {normal(title) for title in titles}
    for place, row in enumerate(parsed.rows):
        trouble = _trouble(row)
        if not trouble and normal(row["title"]) in known:
            trouble = "its title is taken"
        if not trouble and len(kept) >= options.max_new:
            trouble = f"more than {options.max_new} skills"
        if trouble:
            dropped.append(f"entry {place}: {trouble}")
            continue
        number = next_id(ids, EVOLVED)
        ids.append(number)
        known.add(normal(row["title"]))
        when = row.get("when_to_apply")
        kept.append(
            {
                "id": number,
                "title": " ".join(row["title"].split()),
                "principle": row["principle"].strip(),
                "when_to_apply": when.strip() if isinstance(when, str) else "",
            }
        )
    return kept, dropped, parsed.reason


def propose(
    model: TextModel,
    bank: Sequence[SkillItem],
    episodes: Sequence[Episode],
    rates: Mapping[str, float],
    options: EvolveOptions = EvolveOptions(),
    *,
    author: str = "",
    run: str = "",
    step: int | None = None,
) -> Proposal:
    """New skills for the families that are weak by `rates`, as candidates. Writes nothing.

    A model that fails (TeacherError) is a `failed` proposal with its reason, never an empty one.
    """
    families = weak_families(rates, options.update_threshold)
    if not families:
        return Proposal(status="no_weak_family", reason="every family is good enough")
    failures = collect_failures(episodes, rates, options)
    if not failures:
        why = f"no failure of {', '.join(map(shown, families))} was collected"
        return Proposal(status="no_failure", reason=why, families=families)
    titles = [item.title for item in bank if item.status != "retired"]
    messages = update_prompt(failures, titles, options)
    about: dict[str, Any] = {
        "families": families,
        "failures": tuple(e.traj_id for e in failures),
        "prompt": messages[-1].content,
    }
    sampling = Sampling(
        max_new_tokens=options.max_tokens, temperature=0.0, keys=(f"evolve/{run}/{step}",)
    )
    try:
        ((raw,),) = model.complete([messages], 1, sampling)
    except TeacherError as error:
        return Proposal(status="failed", reason=str(error)[:500], **about)
    about["raw"] = raw[:MAX_CHARACTERS]
    taken = [item.id for item in bank]
    rows, dropped, reason = read_skills(raw, taken=taken, options=options, titles=titles)
    lineage = Lineage(
        op="EVOLVE",
        run=run,
        author=author,
        prompt_version=prompt_version(PROMPT),
        created_step=step,
    )
    items = tuple(_item(row, failures[: options.num_shown], lineage, options) for row in rows)
    if not items:
        status: Literal["invalid", "empty"] = "invalid" if reason or dropped else "empty"
        why = reason or "; ".join(dropped) or "the model proposed nothing"
        return Proposal(status=status, reason=why[:500], dropped=tuple(dropped), **about)
    return Proposal(status="ok", items=items, dropped=tuple(dropped), **about)


def store(
    change: Change,
    proposal: Proposal,
    tasks: Sequence[Task],
    options: AddOptions | None = None,
) -> list[Outcome]:
    """Take a proposal into a bank through its intake; `tasks` are those that failed, whose answers
    must not stand in a skill."""
    base = options or AddOptions()
    checked = AddOptions(
        dedup=base.dedup,
        inspect=partial(inspect, secrets=secrets_of(tasks)),
        vectors=base.vectors,
        limit=base.limit,
        prefix=base.prefix,
    )
    reason = f"failures of {', '.join(map(shown, proposal.families))}"
    return change.add(proposal.items, checked, reason=reason)


def _trouble(row: Mapping[str, Any]) -> str:
    for name in REQUIRED:
        value = row.get(name)
        if not isinstance(value, str) or not any(c.isalnum() for c in neutral(value[:5000])):
            return f"it has no {name}"
        if len(value) > MAX_FIELD[name]:
            return f"its {name} has {len(value)} characters, at most {MAX_FIELD[name]}"
    return ""


def _item(
    row: Mapping[str, str], failures: Sequence[Episode], lineage: Lineage, options: EvolveOptions
) -> SkillItem:
    families = {category_of(e.task) for e in failures}
    envs = {e.task.env for e in failures}
    single = options.level != "general" and len(families) == 1
    return SkillItem(
        id=row["id"],
        title=row["title"],
        kind="principle",
        level=options.level,
        category=families.pop() if single else "general",
        principle=row["principle"],
        when_to_apply=row["when_to_apply"][: MAX_FIELD["when_to_apply"]],
        evidence=tuple(Evidence(traj_id=e.traj_id, outcome="failure") for e in failures),
        scope=Scope(env=envs.pop() if len(envs) == 1 else ""),
        lineage=lineage,
    )


def _failure(number: int, episode: Episode, options: EvolveOptions) -> str:
    start = max(0, len(episode.steps) - options.last_steps)
    lines = [f"Failure {number}, task:", quoted(last_user_text(episode.task), 1000)]
    if start:
        lines.append(f"({start} earlier steps are left out)")
    for place, step in enumerate(episode.steps[start:], start=start):
        seen = _cut(step.observation, options.max_observation) if place else ""
        lines.append(f"Step {place}")
        if seen:
            lines += ["Observation:", quoted(seen, len(seen))]
        lines += ["Response:", quoted(step.response, options.max_response)]
    ending = _cut(episode.ending, options.max_observation)
    if ending.strip():
        lines += ["After the last step:", quoted(ending, len(ending))]
    return "\n".join(lines)


def _cut(text: str, most: int) -> str:
    """The first characters of an observation, with a mark where it was cut."""
    return text if len(text) <= most else f"{text[:most]} [... cut, {len(text) - most} more]"
