"""Who writes the notes of a step, and what stands between an analyst and its readers.

    Selected(Checked(ModelAnalyst(...)), outcomes="success")

An analyst writes one note per episode, in order. Wrappers are analysts themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from distill.errors import ConfigError, TeacherError
from distill.types import Note
from skills.hindsight.checks import CheckRules, check_note
from skills.hindsight.episodes import Episode, Outcome

LENT = "lent by "
"""Begins the reason of a note that another trajectory of the group has lent."""


class Analyst(Protocol):
    """Writes hindsight. One note per episode, in order, with the `traj_id` of the episode."""

    def write(self, episodes: Sequence[Episode], *, step: int) -> list[Note]: ...


@dataclass(frozen=True, slots=True)
class Checked:
    """An analyst whose notes are refused when they leak or are unsafe, and compared with the
    lessons of the tasks (see `checks`)."""

    inner: Analyst
    rules: CheckRules = field(default_factory=CheckRules)

    def write(self, episodes: Sequence[Episode], *, step: int) -> list[Note]:
        notes = written(self.inner, episodes, step)
        return [check_note(n, e, self.rules) for n, e in zip(notes, episodes, strict=True)]


@dataclass(frozen=True, slots=True)
class Selected:
    """Which episodes get a note, and whose. The others are `skipped`.

    With `lend` a failure never has a note of its own: it borrows the skill of the whole episode
    from the first success of its group that has one. Skills of steps stay where they were written,
    since the same number is another state elsewhere.
    """

    inner: Analyst
    outcomes: Literal["all", "success", "failure"] = "all"
    lend: bool = False

    def __post_init__(self) -> None:
        if self.outcomes not in ("all", "success", "failure"):
            raise ConfigError(
                f"notes are written for all, success or failure, got {self.outcomes!r}"
            )
        if self.lend and self.outcomes == "success":
            raise ConfigError(
                "notes can be lent to failures only when failures get notes: set the outcomes to "
                "all or failure, or lend nothing"
            )

    def write(self, episodes: Sequence[Episode], *, step: int) -> list[Note]:
        asked = [i for i, episode in enumerate(episodes) if self._asks(episode, episodes)]
        found = written(self.inner, [episodes[i] for i in asked], step)
        notes = dict(zip(asked, found, strict=True))
        lenders: dict[str, Note] = {}
        for place in asked:
            episode, note = episodes[place], notes[place]
            if episode.outcome == "success" and note.status == "ok" and note.episode_skill:
                lenders.setdefault(episode.group_id, note)
        return [self._given(e, notes.get(i), lenders) for i, e in enumerate(episodes)]

    def _asks(self, episode: Episode, episodes: Sequence[Episode]) -> bool:
        if self.lend and episode.outcome == "failure":
            return False
        if self.lend and self.outcomes == "failure" and episode.outcome == "success":
            group = [e for e in episodes if e.group_id == episode.group_id]
            return any(e.outcome == "failure" for e in group)
        return self._wants(episode.outcome)

    def _wants(self, outcome: Outcome) -> bool:
        return self.outcomes in ("all", outcome)

    def _given(self, episode: Episode, note: Note | None, lenders: dict[str, Note]) -> Note:
        if not self._wants(episode.outcome):
            return no_note(episode, "skipped", f"{episode.outcome} is not asked about")
        if not (self.lend and episode.outcome == "failure"):
            return note or no_note(episode, "skipped", "it was not asked about")
        lender = lenders.get(episode.group_id)
        if lender is None:
            return no_note(episode, "skipped", "no success of its group has a skill to lend")
        return replace(
            lender,
            traj_id=episode.traj_id,
            outcome=episode.outcome,
            step_skills={},
            attempts=0,
            reason=f"{LENT}{lender.traj_id}",
            raw="",
        )


def is_lent(note: Note) -> bool:
    """Whether a note is the copy of a sibling's: it is no second sighting of the same lesson."""
    return note.reason.startswith(LENT)


def written(analyst: Analyst, episodes: Sequence[Episode], step: int) -> list[Note]:
    """The notes of an analyst; none is asked without episodes. TeacherError when they are not one
    per episode, in order."""
    notes = analyst.write(episodes, step=step) if episodes else []
    if [note.traj_id for note in notes] != [episode.traj_id for episode in episodes]:
        raise TeacherError(
            f"{type(analyst).__name__} should write one note for each of {len(episodes)} episodes, "
            f"in their order; it returned {len(notes)} notes for other trajectories or in another "
            "order, which is a defect of the analyst"
        )
    return notes


def no_note(episode: Episode, status: Literal["skipped", "empty", "failed"], reason: str) -> Note:
    return Note(traj_id=episode.traj_id, outcome=episode.outcome, status=status, reason=reason)
