"""Worked solutions, worked conversations and recorded turns as rows that nobody sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distill.errors import DataError
from distill.spans import Span, spans
from distill.tokens import Chat
from distill.types import Rollout, Spoken, StopReason, Task


def demonstrate(
    tasks: Sequence[Task], chat: Chat, *, key: str, left_out: Counter[str] | None = None
) -> list[Rollout]:
    """The rows of each task: its `meta["turn"]`, else its `meta["dialogue"]`, else its
    `meta["solution"]` closed with the end token.

    Of a dialogue the trained words of the student are learnt, of a recorded turn what its assistant
    said; everything that the student says ends with the end token, as if it had been sampled. A
    task is one row; a turn may be several, see `distill.spans`. DataError for a task that has
    neither, and for a turn that the template cannot write or that exceeds `chat.max_length`; with
    `left_out` such a turn is left out and counted there, as `turns/unwritable` or
    `turns/too_long`.
    """
    missing = [t for t in tasks if not _is_worked(t)]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(tasks)} tasks have no worked solution to learn from (first: "
            f"task {missing[0].id} of {missing[0].domain}); map a `solution` column or train with "
            "an on-policy stage"
        )
    worked = iter(_worked([t for t in tasks if "turn" not in t.meta], chat))
    rows = []
    for i, task in enumerate(tasks):
        parts = _recorded(task, chat, left_out) if "turn" in task.meta else [next(worked)]
        for step, part in enumerate(parts):
            rows.append(_row(task, part, key=key, traj_id=f"{key}/{i}", place=(step, len(parts))))
    return rows


def _worked(tasks: Sequence[Task], chat: Chat) -> list[list[Span]]:
    """One row per task, all texts encoded together."""
    prompts = chat.prompts([t.prompt for t in tasks])
    spoken = [_dialogue(t) for t in tasks]
    said = [part for parts in spoken for part in parts]
    own = iter(chat.replies([p.text for p in said if p.role == "assistant"]))
    others = iter(chat.encode([p.text for p in said if p.role != "assistant"]))
    rows = []
    for prompt, parts in zip(prompts, spoken, strict=True):
        row = [Span(prompt, False)]
        for part in parts:
            ids = next(own) if part.role == "assistant" else tuple(next(others))
            row.append(Span(ids, part.trained))
        rows.append(row)
    return rows


def _recorded(task: Task, chat: Chat, left_out: Counter[str] | None) -> list[list[Span]]:
    try:
        rows = spans(chat, task.prompt, task.meta["turn"])
    except DataError as error:
        if left_out is not None:
            left_out["turns/unwritable"] += 1
            return []
        raise DataError(f"task {task.id} of {task.domain}: {error}") from error
    longest = max(sum(len(span.token_ids) for span in row) for row in rows)
    if longest <= chat.max_length:
        return rows
    if left_out is None:
        raise DataError(
            f"task {task.id} of {task.domain}: a recorded turn has {longest} tokens, but "
            f"model.max_length is {chat.max_length}; raise model.max_length or leave the turn out"
        )
    left_out["turns/too_long"] += 1
    return []


def _row(
    task: Task, parts: Sequence[Span], *, key: str, traj_id: str, place: tuple[int, int]
) -> Rollout:
    """`place` is the number of the row among those of the task, and how many there are."""
    token_ids = [token for part in parts for token in part.token_ids]
    step, num_steps = place
    return Rollout(
        task_id=task.id,
        group_id=f"{key}/{task.id}",
        index=0,
        domain=task.domain,
        policy_version=-1,
        seed=key,
        token_ids=tuple(token_ids),
        completion_mask=tuple(part.trained for part in parts for _ in part.token_ids),
        logprobs=(0.0,) * len(token_ids),
        stop=StopReason.STOP,
        traj_id=traj_id,
        step=step,
        num_steps=num_steps,
        # A row that begins later shows more than the task's own prompt before its reply.
        prompt_length=0 if step else len(parts[0].token_ids),
    )


def _is_worked(task: Task) -> bool:
    return any(name in task.meta for name in ("turn", "dialogue")) or isinstance(
        task.meta.get("solution"), str
    )


def _dialogue(task: Task) -> list[Spoken]:
    parts = task.meta.get("dialogue")
    if parts is None:
        return [Spoken("assistant", task.meta["solution"], True)]
    found = [Spoken(*part) for part in parts]
    wrong = [p for p in found if p.trained and p.role != "assistant"]
    if wrong or not any(p.trained for p in found):
        raise DataError(
            f"task {task.id} of {task.domain}: a dialogue must train words of the assistant, and "
            f"none of anybody else's; found {wrong[0] if wrong else 'no trained words'}"
        )
    return found
