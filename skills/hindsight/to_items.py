"""From notes to candidates of a bank: the same words from several trajectories are one skill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from distill.errors import ConfigError
from distill.types import Note, Task
from skills.change import Change
from skills.hindsight.analysts import is_lent
from skills.hindsight.episodes import Episode
from skills.hindsight.labels import require_learnable
from skills.intake import AddOptions, Outcome
from skills.interop.skillmd import cut
from skills.items import Evidence, Kind, Level, Lineage, Scope, SkillItem
from skills.lifecycle import agreed
from skills.render import neutral
from skills.safety import Secrets, inspect

TITLE = 80
MIN_SIGHTINGS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """What became of offered candidates."""

    outcomes: tuple[Outcome, ...]
    waiting: tuple[SkillItem, ...]
    """Seen too rarely to be stored; offer them again together with those of another night."""


def to_items(
    episodes: Sequence[Episode],
    notes: Sequence[Note],
    *,
    run: str = "",
    step: int | None = None,
    env: str = "",
) -> list[SkillItem]:
    """Candidates out of the `ok` notes of a step, united by their text, without ids.

    A success teaches a `workflow`, a failure a `correction`; an episode of unknown outcome and a
    lent note teach nothing. The category is the task's routing key, else its domain; the scope its
    environment unless `env` names one. DataError for episodes of a split that is judged on.
    """
    require_learnable(episodes)
    found: list[SkillItem] = []
    for episode, note in zip(episodes, notes, strict=True):
        if note.status != "ok" or episode.outcome == "unknown" or is_lent(note):
            continue
        lineage = Lineage(
            run=run, author=note.author, prompt_version=note.prompt_version, created_step=step
        )
        texts: list[tuple[int | None, str]] = [(None, note.episode_skill)]
        texts += sorted(note.step_skills.items())
        for at, text in texts:
            if text.strip():
                found.append(_item(episode, text, at, lineage, env))
    return united(found)


def united(items: Sequence[SkillItem]) -> list[SkillItem]:
    """Items with the same text as one, the evidence of all together, in the order of the first."""
    out: dict[str, SkillItem] = {}
    for item in items:
        known = out.get(item.sha256)
        out[item.sha256] = item if known is None else _joined(known, item)
    return list(out.values())


def merge_into(
    change: Change,
    items: Sequence[SkillItem],
    *,
    min_sightings: int = MIN_SIGHTINGS,
    secrets: Secrets | None = None,
    options: AddOptions | None = None,
    reason: str = "hindsight",
) -> Merged:
    """Offer candidates to a bank through its intake: safety, tombstones, repeats, capacity.

    Only what was seen in `min_sightings` distinct trajectories is offered; what the bank holds
    already gets more evidence whatever the number. `secrets` are the answers of the tasks that
    taught (`checks.secrets_of`).
    """
    if min_sightings < 1:
        raise ConfigError(f"a skill needs at least 1 sighting, got {min_sightings}")
    options = options or AddOptions()
    if secrets is not None:
        options = replace(options, inspect=partial(inspect, secrets=secrets))
    known = {row.content for row in change.rows.values()}
    offered: list[SkillItem] = []
    waiting: list[SkillItem] = []
    for item in united(items):
        enough = sightings(item) >= min_sightings or item.sha256 in known
        (offered if enough else waiting).append(item)
    outcomes = change.add(offered, options, reason=reason)
    return Merged(outcomes=tuple(outcomes), waiting=tuple(waiting))


def sightings(item: SkillItem) -> int:
    """Distinct trajectories that showed a skill."""
    return len({one.traj_id for one in item.evidence})


def category_of(task: Task) -> str:
    """The task's routing key, else its domain."""
    key = task.meta.get("key")
    return str(key) if key not in (None, "") else task.domain


def _item(episode: Episode, text: str, at: int | None, lineage: Lineage, env: str) -> SkillItem:
    success = episode.outcome == "success"
    kind: Kind = "workflow" if success else "correction"
    level: Level = "task" if at is None else "step"
    return SkillItem(
        id="",
        title=title_of(text),
        kind=kind,
        level=level,
        category=category_of(episode.task),
        principle=text.strip(),
        evidence=(
            Evidence(traj_id=episode.traj_id, outcome="success" if success else "failure", step=at),
        ),
        scope=Scope(env=env or episode.task.env),
        lineage=lineage,
    )


def title_of(text: str) -> str:
    """The first sentence of a skill, at most `TITLE` characters of it."""
    line = " ".join(neutral(text).split())
    ends = [at for mark in (". ", "; ", ": ") if (at := line.find(mark)) > 0]
    return cut(line[: min(ends)] if ends else line, TITLE).rstrip(".;:,") or cut(line, TITLE)


def _joined(item: SkillItem, other: SkillItem) -> SkillItem:
    return replace(item, evidence=agreed(item, other.evidence).evidence)
