"""Sequences of different lengths as padded batches that fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from distill.types import TeacherView


def cuts(lengths: Mapping[int, int], max_tokens: int) -> Iterator[list[int]]:
    """Numbers of sequences by their lengths, cut so that a padded batch stays within `max_tokens`;
    a longer sequence stands alone."""
    cut: list[int] = []
    for i in sorted(lengths, key=lambda i: (lengths[i], i)):
        if cut and (len(cut) + 1) * lengths[i] > max_tokens:
            yield cut
            cut = []
        cut.append(i)
    if cut:
        yield cut


def pad_views(views: Sequence[TeacherView]) -> tuple[Tensor, Tensor, Tensor]:
    """Views as one batch, padded on the right: ids, attention and trained tokens, [B, T] each."""
    width = max(len(v.token_ids) for v in views)
    ids = torch.zeros(len(views), width, dtype=torch.long)
    attention = torch.zeros(len(views), width, dtype=torch.bool)
    mask = torch.zeros(len(views), width, dtype=torch.bool)
    for row, view in enumerate(views):
        ids[row, : len(view.token_ids)] = torch.tensor(view.token_ids)
        attention[row, : len(view.token_ids)] = True
        mask[row, list(view.positions)] = True
    return ids, attention, mask
