"""Worked solutions and worked conversations as rows that nobody sampled."""

from __future__ import annotations

from collections.abc import Sequence

from distill.errors import DataError
from distill.tokens import Chat
from distill.types import Rollout, Spoken, StopReason, Task


def demonstrate(tasks: Sequence[Task], chat: Chat, *, key: str) -> list[Rollout]:
    """One row per task: its `meta["dialogue"]`, else its `meta["solution"]` closed with the end
    token.

    Of a dialogue the trained words of the student are learnt; everything that the student says
    ends with the end token, as if it had been sampled. DataError for a task that has neither.
    """
    missing = [t for t in tasks if not _is_worked(t)]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(tasks)} tasks have no worked solution to learn from (first: "
            f"task {missing[0].id} of {missing[0].domain}); map a `solution` column or train with "
            "an on-policy stage"
        )
    prompts = chat.prompts([t.prompt for t in tasks])
    spoken = [_dialogue(t) for t in tasks]
    said = [part for parts in spoken for part in parts]
    own = iter(chat.replies([p.text for p in said if p.role == "assistant"]))
    others = iter(chat.encode([p.text for p in said if p.role != "assistant"]))
    rows = []
    for i, (task, prompt, parts) in enumerate(zip(tasks, prompts, spoken, strict=True)):
        token_ids, mask = list(prompt), [False] * len(prompt)
        for part in parts:
            ids = next(own) if part.role == "assistant" else tuple(next(others))
            token_ids += ids
            mask += [part.trained] * len(ids)
        rows.append(
            Rollout(
                task_id=task.id,
                group_id=f"{key}/{task.id}",
                index=0,
                domain=task.domain,
                policy_version=-1,
                seed=key,
                token_ids=tuple(token_ids),
                completion_mask=tuple(mask),
                logprobs=(0.0,) * len(token_ids),
                stop=StopReason.STOP,
                traj_id=f"{key}/{i}",
                prompt_length=len(prompt),
            )
        )
    return rows


def _is_worked(task: Task) -> bool:
    return "dialogue" in task.meta or isinstance(task.meta.get("solution"), str)


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
