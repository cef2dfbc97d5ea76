"""The student acts: from tasks to rows of sampled tokens.

Episodes run in lock-step waves, one engine call per wave. A conversation that only grows is one
row; where earlier turns are dropped or rewritten, or where every turn is to be a row of its own, a
new row of the same trajectory begins, so that what is trained is exactly what was sampled. A failed
episode becomes rows with `error` set and an empty mask; it never stops its siblings.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from distill.errors import DataError, DistillError, EngineError
from distill.protocols import Env, Episode, RolloutEngine
from distill.tokens import Chat
from distill.types import Completion, Message, Rollout, Sampling, StopReason, Task, Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRules:
    """How episodes of several turns are played and cut into rows."""

    max_turns: int = 8
    """Turns after which an episode is over, whatever its environment says."""
    history: int = 0
    """Earlier turns that the student still reads; 0 is all of them."""
    rows: Literal["conversation", "turns"] = "conversation"
    """One row as long as the conversation only grows, or one row per turn."""
    invalid_penalty: float = 0.0
    """What an action costs that the environment could not read."""


@dataclass(slots=True, kw_only=True)
class _Row:
    """A row in the making. `history` is what it shows after the task's prompt."""

    step: int
    token_ids: list[int]
    history: tuple[Message, ...] = ()
    prompt_length: int
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason = StopReason.STOP
    valid: bool = True
    obs_key: str | None = None
    read: str = ""
    """Digest of what the student read before its first turn."""
    earned: float = 0.0
    observations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.observe(self.token_ids)

    def absorb(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self.mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.stop = completion.stop

    def observe(self, token_ids: Sequence[int]) -> None:
        new = len(token_ids) - len(self.mask)
        self.token_ids = list(token_ids)
        self.mask += [False] * new
        self.logprobs += [0.0] * new


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """An episode in progress and the rows it writes, the last one still open."""

    task: Task
    index: int
    seed: str
    rows: list[_Row]
    episode: Episode | None = None
    """None for one that could not even start."""
    turns: list[tuple[Message, ...]] = field(default_factory=list)
    """What each turn added: the reply and what the environment said to it."""
    choices: tuple[str, ...] = ()
    done: bool = False
    cut: bool = False
    num_invalid: int = 0
    earned: float = 0.0
    error: str | None = None
    feedback: str | None = None

    @property
    def row(self) -> _Row:
        return self.rows[-1]

    def fail(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {error}"
        self.done = True


def collect(
    tasks: Sequence[Task],
    env: Env,
    engine: RolloutEngine,
    chat: Chat,
    sampling: Sampling,
    *,
    key: str,
    turns: TurnRules = TurnRules(),
) -> list[Rollout]:
    """Let the student act: P tasks x G samples, task-major; each trajectory's rows in order.

    `key` names the step; every draw depends on (key, task, sample, turn) alone. The rewards are the
    episodes' own; a reply cut at the token limit earns 0. Where an episode is not graded there is
    no reward.
    """
    if not tasks:
        raise DataError("collect needs at least one task, got none")
    groups = _start(tasks, env, chat, sampling.num_samples, key)
    # All samples of a task read the same; a task of which none could start is not asked about.
    begun = [group for group in groups if not all(a.done for a in group)]
    leads = [next(a for a in group if not a.done) for group in begun]
    first = _wave(sampling, leads, chat, lambda a: a.seed)
    answers = engine.generate([a.row.token_ids for a in leads], first) if leads else []
    for group, completions in zip(begun, answers, strict=True):
        if len(completions) != sampling.num_samples:
            raise EngineError(
                f"the engine returned {len(completions)} completions for a prompt, "
                f"{sampling.num_samples} were asked for"
            )
        for attempt, completion in zip(group, completions, strict=True):
            if not attempt.done:
                _advance(attempt, completion, chat, turns)
    attempts = [attempt for group in groups for attempt in group]
    single = replace(sampling, num_samples=1)
    while waiting := [a for a in attempts if not a.done]:
        wave = _wave(single, waiting, chat, lambda a: f"{a.seed}/{a.index}/turn{len(a.turns)}")
        answers = engine.generate([a.row.token_ids for a in waiting], wave)
        for attempt, completions in zip(waiting, answers, strict=True):
            _advance(attempt, completions[0], chat, turns)
    for group in groups:
        _name_states(group)
    return [row for a in attempts for row in _finished(a, engine.policy_version, turns)]


def _start(
    tasks: Sequence[Task], env: Env, chat: Chat, num_samples: int, key: str
) -> list[list[_Attempt]]:
    repeats: Counter[str] = Counter()
    groups = []
    for task, prompt in zip(tasks, chat.prompts([t.prompt for t in tasks]), strict=True):
        seed = f"{key}/{task.id}/{repeats[task.id]}"
        repeats[task.id] += 1
        group = []
        for index in range(num_samples):
            row = _Row(step=0, token_ids=list(prompt), prompt_length=len(prompt))
            attempt = _Attempt(task=task, index=index, seed=seed, rows=[row])
            try:
                attempt.episode = env.start(task)
            except DistillError:
                raise
            except Exception as error:
                attempt.fail(error)
            attempt.choices = tuple(getattr(attempt.episode, "choices", ()))
            group.append(attempt)
        groups.append(group)
    return groups


def _wave(
    sampling: Sampling, attempts: Sequence[_Attempt], chat: Chat, key: Callable[[_Attempt], str]
) -> Sampling:
    """The sampling of one engine call, one prompt per attempt."""
    choices: tuple[tuple[tuple[int, ...], ...], ...] = ()
    if any(a.choices for a in attempts):
        choices = tuple(tuple(chat.replies(a.choices)) for a in attempts)
    return replace(
        sampling,
        keys=tuple(key(a) for a in attempts),
        stop_token_ids=chat.stop_token_ids,
        choices=choices,
    )


def _advance(attempt: _Attempt, completion: Completion, chat: Chat, rules: TurnRules) -> None:
    row = attempt.row
    is_first = not any(row.mask)
    if is_first:
        row.read = _state(row.token_ids)
    row.absorb(completion)
    if completion.stop is StopReason.LENGTH:
        # A reply that never ended is no reply: the environment does not see it, the row earns 0.
        attempt.done = True
        return
    text = chat.decode(completion.token_ids)
    assert attempt.episode is not None, "who could not start does not act"
    try:
        turn = attempt.episode.reply(text)
    except DistillError:
        raise
    except Exception as error:
        attempt.fail(error)
        return
    if is_first:
        row.obs_key = turn.obs_key
    row.observations.append("\n".join(m.content for m in turn.messages))
    row.valid = row.valid and turn.valid
    row.earned += turn.reward - (0.0 if turn.valid else rules.invalid_penalty)
    attempt.earned += turn.reward
    attempt.num_invalid += not turn.valid
    attempt.choices = turn.choices
    attempt.turns.append((Message(role="assistant", content=text), *turn.messages))
    attempt.done = turn.done or len(attempt.turns) >= rules.max_turns
    if turn.done:
        # Nobody replies any more: the last words are what the environment says of the attempt.
        attempt.feedback = row.observations[-1] or None
    if not attempt.done:
        _go_on(attempt, turn, chat, rules)


def _name_states(group: Sequence[_Attempt]) -> None:
    """The state of a turn that its environment did not name, such as one that was cut, is that of
    a sibling who read the very same, else a digest of what was read."""
    rows = [row for attempt in group for row in attempt.rows]
    known = {row.read: row.obs_key for row in rows if row.obs_key is not None}
    for row in rows:
        row.obs_key = row.obs_key or known.get(row.read, row.read)


def _state(token_ids: Sequence[int]) -> str:
    """Equal for equal contexts."""
    return f"read:{hashlib.sha256(repr(tuple(token_ids)).encode()).hexdigest()[:16]}"


def _go_on(attempt: _Attempt, turn: Turn, chat: Chat, rules: TurnRules) -> None:
    """Show the student what the environment said: in the same row, or in a new one."""
    shown = attempt.turns[-rules.history :] if rules.history else attempt.turns
    history = tuple(message for said in shown for message in said)
    longer = None
    if len(shown) == len(attempt.turns) and attempt.row.prompt_length:
        before = (*attempt.task.prompt, *history[: len(history) - len(turn.messages)])
        longer = chat.extend(attempt.row.token_ids, turn.messages, before)
    rewritten = longer is None
    if longer is None:
        longer = chat.prompts([(*attempt.task.prompt, *history)], limit=0)[0]
    if len(longer) > chat.max_length:
        attempt.done = attempt.cut = True
        return
    if not rewritten and rules.rows == "conversation":
        attempt.row.observe(longer)
        return
    attempt.rows.append(
        _Row(
            step=len(attempt.turns),
            token_ids=list(longer),
            history=history,
            # A rewritten prompt has no part that stands for the task's own.
            prompt_length=0 if rewritten else attempt.rows[0].prompt_length,
        )
    )


def _close(attempt: _Attempt) -> None:
    """Let an environment clean up; that it cannot does not spoil a finished attempt."""
    close = getattr(attempt.episode, "close", None)
    try:
        if close is not None:
            close()
    except DistillError:
        raise
    except Exception as failure:
        what = f"{type(failure).__name__}: {failure}"
        logger.warning("an episode of task %s did not close: %s", attempt.task.id, what)


def _finished(attempt: _Attempt, policy_version: int, rules: TurnRules) -> list[Rollout]:
    reward: float | None = None
    parts: dict[str, float] = {}
    error, feedback = attempt.error, attempt.feedback
    graded = getattr(attempt.episode, "graded", True)
    if attempt.row.stop is StopReason.LENGTH and error is None:
        reward, parts = 0.0 if graded else None, {"truncated": 1.0}
    elif graded and error is None:
        assert attempt.episode is not None, "who could not start has failed"
        try:
            outcome = attempt.episode.reward()
            reward, parts = outcome.value, dict(outcome.parts)
            feedback = outcome.feedback or feedback
        except DistillError:
            raise
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    _close(attempt)
    if attempt.cut and error is None:
        parts["too_long"] = 1.0
    if reward is not None:
        attempt.row.earned += reward - attempt.earned
    return_ = None if reward is None else reward - rules.invalid_penalty * attempt.num_invalid
    out = []
    for row in attempt.rows:
        mask = row.mask if error is None else [False] * len(row.mask)
        out.append(
            Rollout(
                task_id=attempt.task.id,
                group_id=attempt.seed,
                index=attempt.index,
                domain=attempt.task.domain,
                policy_version=policy_version,
                seed=attempt.seed,
                token_ids=tuple(row.token_ids),
                completion_mask=tuple(mask),
                logprobs=tuple(x if m else 0.0 for x, m in zip(row.logprobs, mask, strict=True)),
                stop=row.stop if error is None else StopReason.ERROR,
                traj_id=f"{attempt.seed}/{attempt.index}",
                step=row.step,
                num_steps=max(1, len(attempt.turns)),
                prompt_length=row.prompt_length,
                history=row.history,
                observations=tuple(row.observations),
                reward=reward,
                return_=return_,
                step_reward=None if reward is None else row.earned,
                reward_parts=parts,
                action_valid=row.valid,
                obs_key=row.obs_key,
                feedback=feedback,
                error=error,
            )
        )
    return out
