"""Small real parts for tests: a character tokenizer, tiny Qwen3 models, batches from logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distill.batch import Batch, TokenScores
from distill.divergence import Divergence, divergence
from distill.models import build_model, char_tokenizer
from distill.objectives.base import Objective, PolicyView
from distill.policy import Policy
from distill.sections import ModelBuild
from distill.tokens import Chat
from distill.trainer import sum_terms
from distill.types import Rollout, StepInfo, StopReason

ALPHABET = "_$^abcdefghijklmnopqrstuvwxyz0123456789=:"
INFO = StepInfo(stage="test", step=1, num_steps=1, seed=0)


def make_chat() -> Chat:
    return Chat(char_tokenizer(ALPHABET), max_length=64)


def make_model(seed: int = 0, **sizes: Any) -> Any:
    """A random two-layer model whose outputs are far from uniform."""
    build = ModelBuild(hidden_size=32, head_dim=16, intermediate_size=64, **sizes)
    model = build_model(build, char_tokenizer(ALPHABET), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def make_policy(seed: int = 0, **options: Any) -> Policy:
    return Policy(make_model(seed), base="tiny", **options)


def make_rollout(
    prompt: Sequence[int], response: Sequence[int], *, name: str = "t0", **changes: Any
) -> Rollout:
    length = len(prompt) + len(response)
    values: dict[str, Any] = {
        "task_id": name,
        "group_id": name,
        "index": 0,
        "domain": "d",
        "policy_version": 0,
        "seed": "s",
        "token_ids": (*prompt, *response),
        "completion_mask": (False,) * len(prompt) + (True,) * len(response),
        "logprobs": (0.0,) * length,
        "stop": StopReason.STOP,
        "traj_id": name,
        "reward": 0.0,
    }
    return Rollout(**(values | changes))


def random_rollouts(count: int = 6, seed: int = 0, *, worked: bool = False) -> list[Rollout]:
    """Rows of different lengths over the alphabet, with rewards: replies of the student, or
    worked solutions."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(3, len(ALPHABET), (size,), generator=generator).tolist()

    return [
        make_rollout(
            ids(2, 7),
            [*ids(1, 9), 1],
            name=f"t{i // 2}",
            traj_id=f"t{i}",
            reward=None if worked else float(i % 2),
            policy_version=-1 if worked else 0,
        )
        for i in range(count)
    ]


def logits_batch(
    token_ids: Tensor, teacher_logprobs: Tensor | None = None, **changes: Any
) -> Batch:
    """A batch whose rows are [prompt token, tokens]: token_ids [B, C] -> T = C + 1."""
    rows, width = token_ids.shape
    ids = torch.cat([torch.zeros(rows, 1, dtype=torch.long), token_ids], 1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    targets = {}
    if teacher_logprobs is not None:
        pad = teacher_logprobs.new_zeros(rows, 1)
        targets["teacher"] = TokenScores(logprobs=torch.cat([pad, teacher_logprobs], 1))
    number = torch.arange(rows)
    values: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "sampler_logprobs": torch.zeros(ids.shape),
        "rewards": torch.zeros(rows),
        "step_rewards": torch.zeros(rows),
        "row_group": number,
        "row_traj": number,
        "row_step": torch.zeros_like(number),
        "row_state": torch.full_like(number, -1),
        "row_valid": torch.ones(rows, dtype=torch.bool),
        "row_domain": torch.zeros_like(number),
        "row_offset": number * width,
        "row_viewed": torch.ones(rows, dtype=torch.bool),
        "row_sampled": torch.ones(rows, dtype=torch.bool),
        "row_ended": torch.zeros(rows, dtype=torch.bool),
        "domains": ("d",),
        "targets": targets,
    }
    return Batch(**(values | changes))


def logits_view(
    student_logits: Tensor,
    batch: Batch,
    objective: Objective,
    teacher_logits: Tensor | Mapping[str, Tensor] | None = None,
) -> PolicyView:
    """What a policy with these logits answers to the objective's plan: [B, C, V] -> PolicyView.

    `teacher_logits` are those of the role `teacher`, or of several roles by name.
    """
    plan = objective.plan()
    roles = teacher_logits if isinstance(teacher_logits, Mapping) else {"teacher": teacher_logits}
    log_probs = torch.log_softmax(student_logits, -1)
    rows, width, vocab = log_probs.shape
    chosen = log_probs.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    values = {}
    for spec in plan.divergences:
        theirs = roles[spec.target]
        assert theirs is not None
        found = divergence(
            log_probs.reshape(-1, vocab), torch.log_softmax(theirs, -1).reshape(-1, vocab), spec
        )
        values[spec.name] = Divergence(
            per_token=_with_prompt(found.per_token.view(rows, width)),
            stats=_with_prompt(found.stats.view(rows, width, 3)),
        )
    candidates = None
    if plan.candidates:
        target = batch.targets[plan.candidates]
        assert isinstance(target, TokenScores)
        assert target.candidate_ids is not None
        candidates = _with_prompt(log_probs.gather(-1, target.candidate_ids[:, 1:]))
    return PolicyView(
        logprobs=_with_prompt(chosen), candidate_logprobs=candidates, divergences=values
    )


def objective_loss(
    objective: Objective,
    student_logits: Tensor,
    batch: Batch,
    teacher_logits: Tensor | Mapping[str, Tensor] | None = None,
    info: StepInfo = INFO,
) -> Tensor:
    """The scalar that the trainer would backpropagate for one batch."""
    batch, _ = objective.prepare(batch, info, {})
    terms = objective(logits_view(student_logits, batch, objective, teacher_logits), batch)
    rows = float(batch.completion_mask.any(1).sum())
    sums = {name: float(w.sum()) for name, w in batch.weights.items()}
    totals = {"tokens": float(batch.num_tokens), "rows": rows, "const": 1.0}

    def total(name: str, kind: str) -> float:
        return (totals[kind] if kind in totals else sums[name]) or 1.0

    return sum_terms(terms, total, batch.correction)


def _with_prompt(values: Tensor) -> Tensor:
    """A leading prompt position of zeros: [B, C, ...] -> [B, 1 + C, ...]."""
    return torch.cat([torch.zeros_like(values[:, :1]), values], 1)
