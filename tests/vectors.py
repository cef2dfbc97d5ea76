"""The fixtures of the published test vectors, and independent ways to look at an objective.

F1 is two tokens over three entries, F2 one position over five, F3 one position over three, FB the
two positions that PowerOPD, AntiSD and the stabilisation facts share. Everything goes through
`objective_loss`: what the trainer would backpropagate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distill.batch import Batch, TokenScores
from distill.objectives import (
    DAPO,
    GKD,
    GOPD,
    GRPO,
    OPD,
    OPID,
    OPSA,
    OPSD,
    RLSD,
    SDFT,
    SDPO,
    SEED,
    SFT,
    AntiSD,
    DrGRPO,
    PowerOPD,
    Surprise,
)
from distill.objectives.base import Objective
from distill.types import StepInfo
from helpers import INFO, logits_batch, logits_view, objective_loss

F64 = torch.float64
PRECISIONS = [(torch.float64, 1e-6), (torch.float32, 1e-5)]
LATER = replace(INFO, step=99)
"""A step after every warm-up."""


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=F64)


F1_STUDENT = f64([[[1.0, 0.0, -1.0], [0.5, 0.5, 0.0]]])
F1_TEACHER = f64([[[0.0, 1.0, -1.0], [2.0, 0.0, 0.0]]])
F1_REFERENCE = f64([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
F1_TOKENS = torch.tensor([[0, 1]])
F2_STUDENT = f64([[[2.0, 1.0, 0.0, -1.0, 0.5]]])
F2_TEACHER = f64([[[0.5, 2.0, 1.5, -1.0, 0.0]]])
F3_STUDENT = f64([[[0.5, 0.3, 0.2]]]).log()
F3_TEACHER = f64([[[0.7, 0.2, 0.1]]]).log()
FB_STUDENT = f64([[[2.0, 0.0, -1.0], [0.5, 0.4, 0.1]]])
FB_TEACHER = f64([[[0.0, 1.0, -4.0], [3.0, -1.0, -1.0]]])
FB_TOKENS = torch.tensor([[0, 1]])
FB_GAP = [-1.148329, -2.990066]

DISTILLING: list[Objective] = [
    OPD(),
    OPD(discount=0.5),
    OPD(support="top_k", k=2),
    OPD(support="top_k", k=2, chosen_by="teacher", weighting="teacher"),
    OPD(support="top_k", k=2, weighting="uniform"),
    *(GKD(beta=b) for b in (0.0, 0.3, 0.5, 1.0)),
    *(GKD(beta=b, support="top_k", k=2, rest="tail") for b in (0.0, 0.5, 1.0)),
    GKD(beta=1.0, support="top_k", k=2, rest="renormalised", chosen_by="student"),
    GKD(beta=0.5, support="top_k", k=1, chosen_by="union"),
    GKD(beta=0.0, support="top_k", k=2, rest="raw"),
    GKD(support="sampled"),
    *(OPSD(beta=b, clip_form=form) for b in (0.0, 0.5, 1.0) for form in ("paper", "bregman")),
    *(SDFT(beta=b, skip_first=0) for b in (0.0, 0.5, 1.0)),
    SDFT(support="top_k", k=2, skip_first=0),
    *(SDPO(beta=b, k=2) for b in (0.0, 0.5, 1.0)),
    SDPO(hybrid_lambda=0.9),
    GOPD(scale=1.0),
    GOPD(scale=1.25),
    PowerOPD(),
    RLSD(),
    RLSD(form="eq16"),
    AntiSD(gate=False),
    SEED(gate="signed", skill_coefficient=0.5),
    SEED(gate="centered", skill_coefficient=0.5, over="all"),
    OPID(),
    OPID(w_episode=0.5, w_step=0.5, allow_large_weights=True, over="skilled"),
    OPID(normalize=True, w_episode=0.1, clip_skill=1.0),
    OPID(routing="additive", w_episode=0.1, w_step=0.05),
    *(OPID(auxiliary=how, auxiliary_coefficient=0.1) for how in ("delta", "importance")),
]
"""Every objective that reads a teacher, in its forms; of SEED those whose gate is 0 at no gap."""

EVERY: list[Objective] = [*DISTILLING, SFT(), GRPO(), GRPO(kl_coefficient=0.1), DrGRPO(), DAPO()]
EVERY += [SEED(skill_coefficient=0.5), SEED(skill_coefficient=0.0), Surprise()]
EVERY += [GRPO(credit="gigpo", stat_scope="trajectories"), GRPO(credit="g2po", credit_std=False)]
EVERY += [OPSA(mode=m, scope=s) for m in ("entropy", "fixed") for s in ("response", "batch")]


def label(objective: Any) -> str:
    """A readable parameter id: the name and what differs from the defaults."""
    if isinstance(objective, Mapping):
        return "-".join(objective) or "-"
    default = type(objective)()
    changed = [
        f"{name}={getattr(objective, name)}"
        for name in objective.__dataclass_fields__
        if getattr(objective, name) != getattr(default, name)
    ]
    return "-".join([objective.name, *changed])


def close(found: Tensor | float, expected: Any, atol: float = 1e-6) -> None:
    """Equal within `atol`: six digits by default."""
    found = torch.as_tensor(found, dtype=F64).detach()
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=F64), atol=atol, rtol=0)


def prompted(values: Tensor) -> Tensor:
    """[B, C, ...] -> [B, 1 + C, ...]: zeros where the prompt token is."""
    return torch.cat([torch.zeros_like(values[:, :1]), values], 1)


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of the tokens: [B, C, V], [B, C] -> [B, C]."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def full_scores(logits: Tensor, tokens: Tensor, ids: Tensor | None = None) -> TokenScores:
    """What a model with these logits says of the tokens, and of candidate ids [B, C, K]."""
    known = None if ids is None else prompted(logits.log_softmax(-1).gather(-1, ids))
    return TokenScores(
        logprobs=prompted(chosen(logits, tokens)),
        candidate_ids=None if ids is None else prompted(ids),
        candidate_logprobs=known,
    )


def batch_of(
    student: Tensor,
    teacher: Tensor,
    tokens: Tensor,
    objective: Any = None,
    reference: Tensor | None = None,
    **changes: Any,
) -> Batch:
    """A batch in which the roles have these logits, with all that an objective may need."""
    k = min(getattr(objective, "k", 2), student.shape[-1])
    chooser = teacher if getattr(objective, "chosen_by", "teacher") == "teacher" else student
    ids = chooser.detach().topk(k, dim=-1).indices
    targets = {"teacher": full_scores(teacher, tokens, ids)}
    if reference is not None:
        targets["reference"] = full_scores(reference, tokens)
    probs = student.detach().log_softmax(-1)
    values: dict[str, Any] = {
        "behaviour_logprobs": prompted(chosen(student.detach(), tokens)),
        "behaviour_entropy": prompted(-(probs.exp() * probs).sum(-1)),
        "rewards": torch.zeros(tokens.shape[0], dtype=student.dtype),
        "targets": targets,
    }
    needs = getattr(objective, "needs", frozenset())
    if "turns" in needs:  # every row of a group in the same state, and its reward earned there
        earned = changes.get("rewards", values["rewards"])
        values |= {"step_rewards": earned, "row_state": torch.zeros(len(tokens), dtype=torch.long)}
    if "step_skill.logprobs" in needs:
        targets["step_skill"] = full_scores(teacher, tokens)
        told = torch.ones(tokens.shape[0], tokens.shape[1] + 1, dtype=student.dtype)
        values["signals"] = {"step_skill.viewed": told}
    return logits_batch(tokens, **(values | changes))


def f1(dtype: torch.dtype = F64, **changes: Any) -> Batch:
    """F1 with teacher and reference, no behaviour: the ratio is 1 with the gradient of S."""
    return batch_of(
        F1_STUDENT.to(dtype),
        F1_TEACHER.to(dtype),
        F1_TOKENS,
        reference=F1_REFERENCE.to(dtype),
        **({"behaviour_logprobs": None} | changes),
    )


def gradient(loss_of: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Autograd's gradient; zeros where nothing depends on `at`."""
    leaf = at.clone().requires_grad_(True)
    loss = loss_of(leaf)
    if not loss.requires_grad:
        return torch.zeros_like(at)
    (found,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    return torch.zeros_like(at) if found is None else found


def numeric_gradient(loss_of: Callable[[Tensor], Tensor], at: Tensor, h: float = 1e-6) -> Tensor:
    """Central differences."""
    out = torch.zeros_like(at)
    for i in range(at.numel()):
        move = torch.zeros_like(at)
        move.view(-1)[i] = h
        out.view(-1)[i] = (loss_of(at + move) - loss_of(at - move)) / (2 * h)
    return out


def per_token(
    objective: Objective,
    student: Tensor,
    batch: Batch,
    teacher: Tensor | None = None,
    info: StepInfo = INFO,
) -> Tensor:
    """Values of the first term at the trained tokens: [B, C]."""
    batch, _ = objective.prepare(batch, info, {})
    term = objective(logits_view(student, batch, objective, teacher), batch)[0]
    return term.per_token[:, 1:].detach()


def two_way(logprobs: Tensor) -> Tensor:
    """Logits over two entries that give token 0 these log-probabilities: [B, C] -> [B, C, 2]."""
    return torch.stack([logprobs, torch.log1p(-logprobs.exp())], -1)


def coefficients(
    objective: Objective, logprobs: Tensor, batch: Batch, info: StepInfo = INFO
) -> Tensor:
    """d loss / d log pi(y_t), read off the logits: the sampled tokens are all 0. [B, C]."""
    at = two_way(logprobs)
    found = gradient(lambda z: objective_loss(objective, z, batch, info=info), at)
    return found[..., 0] / (1 - logprobs.exp())


def expected_gradient(
    objective: Objective,
    student: Tensor,
    teacher: Tensor,
    reference: Tensor | None = None,
    info: StepInfo = INFO,
) -> Tensor:
    """The exact mean of the gradient over the student's own token: logits [V] -> [V].

    Every entry is one row; the row's probability is its correction weight.
    """
    size = student.shape[0]
    tokens = torch.arange(size)[:, None]

    def tiled(logits: Tensor) -> Tensor:
        return logits.expand(size, 1, size)

    batch = batch_of(
        tiled(student),
        tiled(teacher),
        tokens,
        objective,
        None if reference is None else tiled(reference),
        behaviour_logprobs=None,
        correction=student.softmax(-1)[:, None].expand(size, 2),
    )
    objective = replace(objective, aggregate="constant")  # type: ignore[type-var]
    return gradient(
        lambda z: objective_loss(objective, tiled(z), batch, tiled(teacher), info=info), student
    )


def divergence_gradient(value_of: Callable[[Tensor, Tensor], Tensor], s: Tensor, t: Tensor) -> Any:
    """Gradient of a written-down f(pi, nu) with respect to the student's logits [V]."""
    return gradient(lambda z: value_of(z.softmax(-1), t.softmax(-1)), s)
