"""From tasks to rows: the student acts (`collect`), or a worked solution speaks (`demonstrate`).

Episodes run in lock-step waves, one engine call per wave. A failed episode becomes a row with
`error` set and an empty mask; it never stops its siblings.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from distill.errors import DataError, DistillError, EngineError
from distill.protocols import Env, Episode, RolloutEngine
from distill.tokens import Chat
from distill.types import Completion, Message, Rollout, Sampling, StopReason, Task

logger = logging.getLogger(__name__)

LOOPING = 0.3
"""A reply of which a larger share repeats is caught in a loop."""


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """An episode in progress and the row it writes."""

    task: Task
    episode: Episode
    index: int
    seed: str
    history: list[Message]
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    stop: StopReason = StopReason.STOP
    done: bool = False
    valid: bool = True
    error: str | None = None
    feedback: str | None = None
    turns: int = field(default=0)

    def absorb(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self.mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.stop = completion.stop
        self.turns += 1

    def observe(self, token_ids: Sequence[int]) -> None:
        new = len(token_ids) - len(self.token_ids)
        self.token_ids = list(token_ids)
        self.mask += [False] * new
        self.logprobs += [0.0] * new


def collect(
    tasks: Sequence[Task],
    env: Env,
    engine: RolloutEngine,
    chat: Chat,
    sampling: Sampling,
    *,
    key: str,
    max_turns: int = 8,
) -> list[Rollout]:
    """Let the student act: P tasks x G samples -> P * G rows, task-major.

    `key` names the step; every draw depends on (key, task, sample) alone. The rewards are the
    episodes' own; a reply cut at the token limit earns 0.
    """
    if not tasks:
        raise DataError("collect needs at least one task, got none")
    repeats: Counter[str] = Counter()
    keys = []
    for task in tasks:
        keys.append(f"{key}/{task.id}/{repeats[task.id]}")
        repeats[task.id] += 1
    prompts = chat.prompts([t.prompt for t in tasks])
    first = replace(sampling, keys=tuple(keys), stop_token_ids=chat.stop_token_ids)
    groups = engine.generate(prompts, first)
    attempts: list[_Attempt] = []
    for task, prompt, name, group in zip(tasks, prompts, keys, groups, strict=True):
        if len(group) != sampling.num_samples:
            raise EngineError(
                f"the engine returned {len(group)} completions for a prompt, "
                f"{sampling.num_samples} were asked for"
            )
        for index, completion in enumerate(group):
            attempt = _Attempt(
                task=task,
                episode=env.start(task),
                index=index,
                seed=name,
                history=list(task.prompt),
                token_ids=list(prompt),
                mask=[False] * len(prompt),
                logprobs=[0.0] * len(prompt),
            )
            attempts.append(attempt)
            _advance(attempt, completion, chat, max_turns)
    while waiting := [a for a in attempts if not a.done]:
        wave = replace(
            sampling,
            num_samples=1,
            keys=tuple(f"{a.seed}/{a.index}/turn{a.turns}" for a in waiting),
            stop_token_ids=chat.stop_token_ids,
        )
        answers = engine.generate([a.token_ids for a in waiting], wave)
        for attempt, group in zip(waiting, answers, strict=True):
            _advance(attempt, group[0], chat, max_turns)
    return [_row(a, engine.policy_version) for a in attempts]


def _advance(attempt: _Attempt, completion: Completion, chat: Chat, max_turns: int) -> None:
    attempt.absorb(completion)
    if completion.stop is StopReason.LENGTH:
        # A reply that never ended is no reply: the environment does not see it, the row earns 0.
        attempt.done = True
        return
    text = chat.decode(completion.token_ids)
    try:
        turn = attempt.episode.reply(text)
    except DistillError:
        raise
    except Exception as error:
        attempt.error = f"{type(error).__name__}: {error}"
        attempt.done = True
        return
    attempt.valid = attempt.valid and turn.valid
    attempt.done = turn.done or attempt.turns >= max_turns
    if turn.done and turn.messages:
        # Nobody replies any more: the last words are what the environment says of the attempt.
        attempt.feedback = "\n".join(m.content for m in turn.messages)
    if not attempt.done:
        attempt.history.append(Message(role="assistant", content=text))
        longer = chat.extend(attempt.token_ids, turn.messages, attempt.history)
        attempt.history += turn.messages
        attempt.observe(longer)
        if len(longer) > chat.max_length:
            attempt.done = True


def _row(attempt: _Attempt, policy_version: int) -> Rollout:
    reward: float | None = None
    parts: dict[str, float] = {}
    error, feedback = attempt.error, attempt.feedback
    if attempt.stop is StopReason.LENGTH and error is None:
        reward, parts = 0.0, {"truncated": 1.0}
    elif error is None:
        try:
            outcome = attempt.episode.reward()
            reward, parts = outcome.value, dict(outcome.parts)
            feedback = outcome.feedback or feedback
        except DistillError:
            raise
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    mask = attempt.mask if error is None else [False] * len(attempt.mask)
    return Rollout(
        task_id=attempt.task.id,
        group_id=attempt.seed,
        index=attempt.index,
        domain=attempt.task.domain,
        policy_version=policy_version,
        seed=attempt.seed,
        token_ids=tuple(attempt.token_ids),
        completion_mask=tuple(mask),
        logprobs=tuple(x if m else 0.0 for x, m in zip(attempt.logprobs, mask, strict=True)),
        stop=attempt.stop if error is None else StopReason.ERROR,
        traj_id=f"{attempt.seed}/{attempt.index}",
        reward=reward,
        return_=reward,
        reward_parts=parts,
        action_valid=attempt.valid,
        feedback=feedback,
        error=error,
    )


def demonstrate(tasks: Sequence[Task], chat: Chat, *, key: str) -> list[Rollout]:
    """Worked solutions as rows: `meta["solution"]` of each task, closed with the end token."""
    missing = [t for t in tasks if not isinstance(t.meta.get("solution"), str)]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(tasks)} tasks have no worked solution to learn from (first: "
            f"task {missing[0].id} of {missing[0].domain}); map a `solution` column or train with "
            "an on-policy stage"
        )
    prompts = chat.prompts([t.prompt for t in tasks])
    replies = chat.replies([t.meta["solution"] for t in tasks])
    rows = []
    for i, (task, prompt, reply) in enumerate(zip(tasks, prompts, replies, strict=True)):
        length = len(prompt) + len(reply)
        rows.append(
            Rollout(
                task_id=task.id,
                group_id=f"{key}/{task.id}",
                index=0,
                domain=task.domain,
                policy_version=-1,
                seed=key,
                token_ids=prompt + reply,
                completion_mask=(False,) * len(prompt) + (True,) * len(reply),
                logprobs=(0.0,) * length,
                stop=StopReason.STOP,
                traj_id=f"{key}/{i}",
            )
        )
    return rows


def reply_text(rollout: Rollout, chat: Chat) -> str:
    """The student's words of a row, turns joined by a newline."""
    spans: list[list[int]] = []
    previous = False
    for token, trained in zip(rollout.token_ids, rollout.completion_mask, strict=True):
        if trained and not previous:
            spans.append([])
        if trained:
            spans[-1].append(token)
        previous = trained
    return "\n".join(chat.decode(span) for span in spans)


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
    """What a step's rows looked like: rewards (also per domain), lengths, cuts and failures.

    `trained` are the same rows as the update sees them: a view may have shrunk a group.
    """
    total = len(rollouts)
    out = {
        "rollout/tokens": float(sum(r.num_trained for r in rollouts)),
        "rollout/tokens_mean": sum(r.num_trained for r in rollouts) / total,
        "rollout/truncated_share": sum(r.stop is StopReason.LENGTH for r in rollouts) / total,
        "rollout/error_share": sum(r.error is not None for r in rollouts) / total,
    }
    out |= _variety([r for r in rollouts if r.policy_version >= 0 and r.num_trained])
    sizes = Counter(r.group_id for r in trained or rollouts if r.num_trained)
    groups = len({r.group_id for r in rollouts})
    if groups < total:
        out["group/mixed_share"] = len(mixed_groups(rollouts)) / groups
        out["group/lone"] = float(sum(size == 1 for size in sizes.values()))
    by_domain: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            by_domain.setdefault(rollout.domain, []).append(rollout.reward)
    if by_domain:
        everything = [v for values in by_domain.values() for v in values]
        out["reward/mean"] = sum(everything) / len(everything)
        out |= {f"reward/{d}": sum(v) / len(v) for d, v in sorted(by_domain.items())}
    return out


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
    causes = Counter(r.error for r in rollouts if r.error is not None)
    failed = sum(causes.values())
    if failed and failed > max_share * len(rollouts):
        common = "; ".join(f"{n} x {cause}" for cause, n in causes.most_common(3))
        raise EngineError(
            f"{failed} of {len(rollouts)} episodes failed (run.max_error_share is {max_share}): "
            f"{common}"
        )
    if failed:
        logger.warning("%d of %d episodes failed and are left out", failed, len(rollouts))
