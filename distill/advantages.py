"""Per-row and per-token credit: group statistics, discounting, leave-one-out."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from distill.errors import ConfigError

STD_EPSILON = 1e-6
LoneGroup = Literal["zero", "raw"]
"""What a group of one gets: 0, or its own value as if the mean were 0 and the deviation 1."""


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
    rewards: Tensor,
    groups: Tensor,
    *,
    ddof: int = 0,
    epsilon: float = STD_EPSILON,
    lone: LoneGroup = "zero",
) -> Tensor:
    """(r - mean) / (std + epsilon) within each group of equal id: [B] -> [B].

    A group whose rewards are all equal, or of size one, gets exactly 0; with `lone` = "raw" the
    latter gets r / (1 + epsilon), as in the code of verl-agent.
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
    z = torch.where(group_is_mixed(rewards, groups), z, torch.zeros_like(z))
    return torch.where(size == 1, rewards / (1.0 + epsilon), z) if lone == "raw" else z


def group_center(rewards: Tensor, groups: Tensor, *, lone: LoneGroup = "zero") -> Tensor:
    """r - mean within each group: [B] -> [B]. A group of one gets 0; r with `lone` = "raw"."""
    mean, size = group_mean(rewards, groups)
    return rewards - (mean.masked_fill(size == 1, 0.0) if lone == "raw" else mean)


def once_per_trajectory(
    values: Tensor, groups: Tensor, trajectories: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [B] of equal group and trajectory become one entry of the n of them.

    Returns the values [n], the groups [n] and the entry of each row [B] int. The value of an entry
    is that of its rows where they agree, to the bit, and else their mean (a length penalty differs
    by row).
    """
    pairs, entry = torch.stack([groups, trajectories]).unique(dim=1, return_inverse=True)
    size = pairs.shape[1]
    low = values.new_full((size,), float("inf")).scatter_reduce(0, entry, values, "amin")
    high = values.new_full((size,), float("-inf")).scatter_reduce(0, entry, values, "amax")
    counts = torch.bincount(entry, minlength=size)
    mean = values.new_zeros(size).index_add_(0, entry, values) / counts
    return torch.where(low == high, low, mean), pairs[0], entry


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
