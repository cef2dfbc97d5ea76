"""Hindsight on its way from an analyst to the teacher's view: names of texts, and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from distill.types import Note

EPISODE_SKILL = "episode_skill"
STEP_SKILL = "step_skill"
"""Kinds of a teacher's view, by the skill that it shows."""


def context_key(traj_id: str, turn: int | None = None) -> str:
    """Under which name the skill of a trajectory, or of one of its turns, is handed over."""
    return f"skill/{traj_id}" if turn is None else f"skill/{traj_id}/{turn}"


def contexts_of(notes: Sequence[Note]) -> dict[str, str]:
    """The texts that a view may show. Only valid notes have any."""
    texts: dict[str, str] = {}
    for note in notes:
        if note.status != "ok":
            continue
        if note.episode_skill:
            texts[context_key(note.traj_id)] = note.episode_skill
        texts |= {context_key(note.traj_id, t): s for t, s in note.step_skills.items() if s}
    return texts


def metrics_of(notes: Sequence[Note]) -> Mapping[str, float]:
    """What an analyst made of a step: `notes/STATUS` counts, share of valid ones among those asked
    for, words per skill and, where the tasks know their own lesson, share of right ones."""
    counts = Counter(note.status for note in notes)
    asked = len(notes) - counts["skipped"]
    valid = [note for note in notes if note.status == "ok"]
    tokens = sum(note.num_tokens for note in notes)
    out = {f"notes/{status}": float(count) for status, count in sorted(counts.items())}
    if notes:
        out["notes/tokens"] = float(tokens)
    if asked:
        # To have nothing to say is an answer.
        out["notes/valid_share"] = (counts["ok"] + counts["empty"]) / asked
    if valid:
        words = sum(len(note.episode_skill.split()) for note in valid)
        out["notes/words_mean"] = words / len(valid)
        out["notes/step_skills_mean"] = sum(len(n.step_skills) for n in valid) / len(valid)
    known = [note.correct for note in valid if note.correct is not None]
    if known:
        out["notes/correct_share"] = sum(known) / len(known)
    return out
