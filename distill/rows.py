"""What rows look like: their replies as text, groups, and the numbers of a step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, zip_longest

from distill.errors import EngineError
from distill.tokens import Chat
from distill.types import Rollout, StopReason

logger = logging.getLogger(__name__)

LOOPING = 0.3
"""A reply of which a larger share repeats is caught in a loop."""


def trajectories(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rows of each trajectory, in the order of their first ones."""
    found: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.traj_id, []).append(rollout)
    return list(found.values())


def reply_text(rollout: Rollout, chat: Chat) -> str:
    """The student's words of a row, turns joined by a newline."""
    return "\n".join(chat.decode(turn) for turn in _turns(rollout))


def dialogue(rows: Sequence[Rollout], chat: Chat) -> list[tuple[str, str]]:
    """Reply of the student and answer of the environment, turn by turn of one trajectory."""
    said: list[tuple[str, str]] = []
    for row in rows:
        replies = [chat.decode(turn) for turn in _turns(row)]
        said += zip_longest(replies, row.observations, fillvalue="")
    return said


def mixed_groups(rollouts: Sequence[Rollout]) -> list[str]:
    """Ids of the groups whose rollouts earned different rewards, in the order of the rows."""
    earned: dict[str, set[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None and rollout.num_trained:
            earned.setdefault(rollout.group_id, set()).add(rollout.reward)
    return [name for name, values in earned.items() if len(values) > 1]


def keep_mixed_groups(rollouts: Sequence[Rollout], wanted: int) -> list[Rollout]:
    """The rows, with the masks of all but `wanted` mixed groups emptied (DAPO's refill).

    When there are fewer, the first others fill up, so that a step never trains on nothing. Each
    worked solution stays and takes the place of a group.
    """
    worked = {r.traj_id for r in rollouts if r.policy_version < 0}
    wanted -= len(worked)
    mixed = mixed_groups(rollouts)[:wanted]
    own = dict.fromkeys(r.group_id for r in rollouts if r.traj_id not in worked)
    others = [n for n in own if n not in set(mixed)]
    kept = {*mixed, *others[: wanted - len(mixed)]}
    return [
        r
        if r.traj_id in worked or r.group_id in kept
        else replace(r, completion_mask=(False,) * len(r.token_ids))
        for r in rollouts
    ]


def summarise(
    rollouts: Sequence[Rollout], trained: Sequence[Rollout] | None = None
) -> dict[str, float]:
    """What a step's attempts looked like: rewards (also per domain), lengths, cuts and failures.

    `trained` are the same rows as the update sees them: a view may have shrunk a group.
    """
    attempts = trajectories(rollouts)
    total, ends = len(attempts), [rows[-1] for rows in attempts]
    out = {
        "rollout/tokens": float(sum(r.num_trained for r in rollouts)),
        "rollout/tokens_mean": sum(r.num_trained for r in rollouts) / total,
        "rollout/truncated_share": sum(r.stop is StopReason.LENGTH for r in ends) / total,
        "rollout/error_share": sum(r.error is not None for r in ends) / total,
    }
    out |= _variety([r for r in rollouts if r.policy_version >= 0 and r.num_trained])
    members = {(r.group_id, r.traj_id) for r in trained or rollouts if r.num_trained}
    sizes = Counter(group for group, _ in members)
    groups = len({r.group_id for r in rollouts})
    if groups < total:
        out["group/mixed_share"] = len(mixed_groups(rollouts)) / groups
        out["group/lone"] = float(sum(size == 1 for size in sizes.values()))
    if any(rows[0].num_steps > 1 for rows in attempts):
        out |= _turns_of(attempts)
    by_domain: dict[str, list[float]] = {}
    for rows in attempts:
        if rows[-1].reward is not None:
            by_domain.setdefault(rows[-1].domain, []).append(rows[-1].reward)
    if by_domain:
        everything = [v for values in by_domain.values() for v in values]
        out["reward/mean"] = sum(everything) / len(everything)
        out |= {f"reward/{d}": sum(v) / len(v) for d, v in sorted(by_domain.items())}
    return out


def _turns_of(attempts: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """How attempts of several turns went: their turns, rows with an action that could not be read,
    attempts that grew too long for the model."""
    rows = [row for attempt in attempts for row in attempt]
    too_long = sum("too_long" in attempt[-1].reward_parts for attempt in attempts)
    return {
        "rollout/turns_mean": sum(attempt[-1].num_steps for attempt in attempts) / len(attempts),
        "rollout/invalid_share": sum(not row.action_valid for row in rows) / len(rows),
        "rollout/too_long_share": too_long / len(attempts),
    }


def _variety(replies: Sequence[Rollout]) -> dict[str, float]:
    """How the student's own replies look as a whole; nothing where there is none.

    distinct_share     different replies, by their trained tokens, over all replies
    repeat_share       replies of which more than `LOOPING` repeats, see `repeated_share`
    missing_end_share  replies that do not end with a stop token
    surprise           mean of -log-probability of the tokens, the sampler's: it estimates the
                       entropy of the policy where no objective asks for the exact one
    """
    if not replies:
        return {}
    turns = [_turns(r) for r in replies]
    tokens = sum(r.num_trained for r in replies)
    return {
        "rollout/distinct_share": len(set(turns)) / len(replies),
        "rollout/repeat_share": sum(repeated_share(t) > LOOPING for t in turns) / len(replies),
        "rollout/missing_end_share": sum(r.stop is not StopReason.STOP for r in replies)
        / len(replies),
        "rollout/surprise": -sum(sum(r.logprobs) for r in replies) / tokens,
    }


def repeated_share(turns: Sequence[Sequence[int]], n: int = 4, seen: int = 3) -> float:
    """Share of a reply's n-grams that already occurred at least `seen` times in the same turn.

    A loop of any period tends to 1; ordinary text stays near 0. Linear in the tokens.
    """
    repeated = total = 0
    for turn in turns:
        counts = Counter(zip(*(turn[i:] for i in range(n)), strict=False))
        repeated += sum(max(0, count - seen) for count in counts.values())
        total += max(0, len(turn) - n + 1)
    return repeated / total if total else 0.0


def _turns(rollout: Rollout) -> tuple[tuple[int, ...], ...]:
    """The trained tokens of every turn."""
    pairs = zip(rollout.token_ids, rollout.completion_mask, strict=True)
    runs = groupby(pairs, key=lambda pair: pair[1])
    return tuple(tuple(token for token, _ in run) for trained, run in runs if trained)


def require_few_errors(rollouts: Sequence[Rollout], max_share: float) -> None:
    """Raise EngineError when more than `max_share` of the episodes failed, with counts."""
    ends = [rows[-1] for rows in trajectories(rollouts)]
    causes = Counter(r.error for r in ends if r.error is not None)
    failed = sum(causes.values())
    if failed and failed > max_share * len(ends):
        common = "; ".join(f"{n} x {cause}" for cause, n in causes.most_common(3))
        raise EngineError(
            f"{failed} of {len(ends)} episodes failed (run.max_error_share is {max_share}): "
            f"{common}"
        )
    if failed:
        logger.warning("%d of %d episodes failed and are left out", failed, len(ends))
