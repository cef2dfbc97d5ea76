"""Per-row and per-token credit: group statistics, discounting, leave-one-out."""

from __future__ import annotations

import torch
from torch import Tensor

from distill.errors import ConfigError

STD_EPSILON = 1e-6


def group_mean(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of each row's group and the group's size: values [B], groups [B] int -> [B], [B]."""
    _, inverse, counts = groups.unique(return_inverse=True, return_counts=True)
    sums = values.new_zeros(counts.shape[0]).index_add_(0, inverse, values)
    return (sums / counts)[inverse], counts[inverse]


def group_is_mixed(values: Tensor, groups: Tensor) -> Tensor:
    """Whether the group of each row holds different values: [B] -> [B] bool.

    Compares values themselves: a variance of equal floats need not round to zero.
    """
    ids, inverse = groups.unique(return_inverse=True)
    low = values.new_full((len(ids),), float("inf")).scatter_reduce(0, inverse, values, "amin")
    high = values.new_full((len(ids),), float("-inf")).scatter_reduce(0, inverse, values, "amax")
    return (high > low)[inverse]


def group_zscore(
    rewards: Tensor, groups: Tensor, *, ddof: int = 0, epsilon: float = STD_EPSILON
) -> Tensor:
    """(r - mean) / (std + epsilon) within each group of equal id: [B] -> [B].

    A group whose rewards are all equal, or of size one, gets exactly 0.
    Source: GRPO, arXiv 2402.03300. `ddof` 0 = population, 1 = sample standard deviation.
    """
    if ddof not in (0, 1):
        raise ConfigError(f"ddof must be 0 or 1, got {ddof}")
    mean, size = group_mean(rewards, groups)
    centered = rewards - mean
    variance, _ = group_mean(centered.square(), groups)
    if ddof:
        variance = variance * size / (size - 1).clamp(min=1)
    z = centered / (variance.sqrt() + epsilon)
    return torch.where(group_is_mixed(rewards, groups), z, torch.zeros_like(z))


def group_center(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean within each group: [B] -> [B]."""
    return rewards - group_mean(rewards, groups)[0]


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean of the other members of its group; 0 for a group of one: [B] -> [B]."""
    mean, size = group_mean(rewards, groups)
    return (rewards - mean) * size / (size - 1).clamp(min=1)


def discounted(values: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Sum over j >= t of gamma^(j-t) * values[j], per row: [B, T] -> [B, T].

    Masked positions contribute 0 but do not stop the recursion (several turns in one row).
    gamma 0 returns the masked values unchanged.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"discount must be within [0, 1], got {gamma}")
    values = values.masked_fill(~mask, 0.0)
    if gamma == 0.0:
        return values
    out = torch.empty_like(values)
    running = values.new_zeros(values.shape[0])
    for t in range(values.shape[1] - 1, -1, -1):
        running = values[:, t] + gamma * running
        out[:, t] = running
    return out.masked_fill(~mask, 0.0)


def overlong_penalty(lengths: Tensor, limit: int, cache: int) -> Tensor:
    """Soft penalty of long replies: 0 up to limit - cache tokens, falling to -1 at the limit and
    -1 beyond: [B] int -> [B] float32. Source: DAPO, arXiv 2503.14476."""
    over = (lengths - (limit - cache)).float() / max(1, cache)
    return -over.clamp(0.0, 1.0) if cache else -(lengths > limit).float()
