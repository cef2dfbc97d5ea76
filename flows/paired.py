"""What a skill is worth: the same tasks under the same luck, with it and without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distill.errors import DataError
from distill.rows import trajectories
from distill.tokens import Chat
from distill.types import Rollout, Task
from evals.metrics import paired_bootstrap
from flows.acting import Act, with_skill
from skills.items import SkillItem
from skills.lifecycle import Use
from skills.render import RenderOptions

CONFIDENCE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedGain:
    """Success rates of one skill over matched attempts, and the gain with its 90 % interval."""

    skill: str
    content: str
    """Content hash of the text that was measured."""
    num_pairs: int
    rate_with: float
    rate_without: float
    gain: float
    low: float
    high: float
    tokens_with: float
    """Sampled tokens per attempt."""
    tokens_without: float
    outcomes: tuple[tuple[bool, bool], ...]
    """Per pair: success with the skill, and without."""

    @property
    def uses(self) -> list[Use]:
        """One use per pair, for the credit of the skill."""
        return [
            Use(
                skill=self.skill,
                success=own,
                num_without=1,
                num_success_without=int(other),
                tokens_saved=self.tokens_without - self.tokens_with,
                interval=(self.low, self.high),
                content=self.content,
            )
            for own, other in self.outcomes
        ]


def measure(
    item: SkillItem,
    tasks: Sequence[Task],
    act: Act,
    chat: Chat,
    *,
    key: str,
    success: float = 1.0,
    options: RenderOptions | None = None,
    without: Sequence[Rollout] = (),
) -> PairedGain:
    """Play tasks with one skill in the prompt and without, with the same draws. A prompt that has
    no room for the skill is played without it on both sides.

    `without` are the rows of the very same tasks and key, where they were played already.
    DataError when there is no task, or when the two sides do not match.
    """
    if not tasks:
        raise DataError(f"skill {item.id}: there is no task to measure it on")
    shown = [with_skill(task, item, options or RenderOptions(), chat)[0] for task in tasks]
    own = trajectories(act(shown, key))
    plain = trajectories(without or act(tasks, key))
    if [rows[0].traj_id for rows in own] != [rows[0].traj_id for rows in plain]:
        raise DataError(
            f"skill {item.id}: {len(own)} attempts with it and {len(plain)} without are not of "
            "the same tasks and draws"
        )
    good, bad = ([is_success(rows, success) for rows in side] for side in (own, plain))
    found = paired_bootstrap(
        [float(x) for x in bad], [float(x) for x in good], confidence=CONFIDENCE
    )
    return PairedGain(
        skill=item.id,
        content=item.sha256,
        num_pairs=len(own),
        rate_with=sum(good) / len(good),
        rate_without=sum(bad) / len(bad),
        gain=found.mean,
        low=found.low,
        high=found.high,
        tokens_with=num_tokens(own) / len(own),
        tokens_without=num_tokens(plain) / len(plain),
        outcomes=tuple(zip(good, bad, strict=True)),
    )


def is_success(rows: Sequence[Rollout], threshold: float) -> bool:
    """Whether a trajectory earned at least the threshold; a failed episode did not."""
    return rows[-1].reward is not None and rows[-1].reward >= threshold


def num_tokens(attempts: Sequence[Sequence[Rollout]]) -> int:
    """Tokens that the student sampled."""
    return sum(row.num_trained for rows in attempts for row in rows)
