"""Rollouts become one padded batch of tensors, and micro-batches cut from it.

Letters: B rows, T padded tokens, N trained tokens of the step (row-major), K candidates.
Rows are padded on the right. Every per-token tensor has the shape and alignment of `input_ids`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from distill.divergence import Distribution
from distill.errors import AlignmentError, DataError
from distill.types import Rollout, Scores, StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """`Scores` of a whole batch as tensors."""

    logprobs: Tensor  # [B, T] float32, 0 outside the mask
    entropy: Tensor | None = None  # [B, T]
    candidate_ids: Tensor | None = None  # [B, T, K] int64
    candidate_logprobs: Tensor | None = None  # [B, T, K] float32, -inf where there is none

    def to(self, device: torch.device) -> TokenScores:
        return self._map(lambda x: x.to(device))

    def rows(self, index: Tensor, width: int) -> TokenScores:
        return self._map(lambda x: x[index, :width])

    def _map(self, change: Callable[[Tensor], Tensor]) -> TokenScores:
        def changed(value: Tensor | None) -> Tensor | None:
            return None if value is None else change(value)

        return TokenScores(
            logprobs=change(self.logprobs),
            entropy=changed(self.entropy),
            candidate_ids=changed(self.candidate_ids),
            candidate_logprobs=changed(self.candidate_logprobs),
        )


Target = TokenScores | Distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The rows of one optimizer step, or of one micro-batch of it."""

    input_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] bool
    completion_mask: Tensor  # [B, T] bool, the trained tokens
    sampler_logprobs: Tensor  # [B, T] float32, the engine's
    behaviour_logprobs: Tensor | None = None  # [B, T] the trainer's before the first update
    behaviour_entropy: Tensor | None = None  # [B, T] float32, the student's at the same moment
    correction: Tensor | None = None  # [B, T] weight of each token for sampler -> behaviour
    rewards: Tensor  # [B] float32, returns after penalties; nan where a row has none
    step_rewards: Tensor  # [B] float32, what the turns of the row earned
    row_group: Tensor  # [B] int64
    row_traj: Tensor  # [B] int64
    row_step: Tensor  # [B] int64
    row_state: Tensor  # [B] int64, equal for rows acted in the same state of a group; -1 unknown
    row_valid: Tensor  # [B] bool, every action of the row could be read
    row_domain: Tensor  # [B] int64, index into `domains`
    row_offset: Tensor  # [B] int64, number of trained tokens of the step before this row
    row_viewed: Tensor  # [B] bool, the teacher had a view of this row
    row_sampled: Tensor  # [B] bool, the student wrote this row; else it is a worked solution
    row_ended: Tensor  # [B] bool, the last trained token is a stop token
    domains: tuple[str, ...] = ()
    targets: Mapping[str, Target] = field(default_factory=dict)
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [B, T] float32: what an objective made of the whole step, such as advantages, under
    the objective's own name."""
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # term -> [B, T] float32

    @property
    def labels(self) -> Tensor:
        """`input_ids` with -100 outside the trained tokens, as Hugging Face losses want it."""
        return self.input_ids.masked_fill(~self.completion_mask, -100)

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return int(self.completion_mask.sum())

    def flat_rows(self) -> Tensor:
        """Number of each trained token in the whole step: [N of this batch] int64."""
        rank = self.completion_mask.cumsum(1) - 1 + self.row_offset[:, None]
        return rank[self.completion_mask]

    def check(self) -> Batch:
        """Raise AlignmentError unless every tensor has its shape."""
        shape = self.input_ids.shape
        for name in ("attention_mask", "completion_mask", "sampler_logprobs"):
            found = getattr(self, name).shape
            if found != shape:
                raise AlignmentError(f"{name} must be {tuple(shape)}, got {tuple(found)}")
        if bool((self.completion_mask & ~self.attention_mask).any()):
            raise AlignmentError("a padding position is marked as trained")
        if not bool(torch.isfinite(self.sampler_logprobs[self.completion_mask]).all()):
            raise AlignmentError("a sampler log-probability of a trained token is not finite")
        return self

    def to(self, device: torch.device) -> Batch:
        """The same rows on another device; distributions stay where their teacher is."""
        changes: dict[str, object] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor):
                changes[entry.name] = value.to(device)
        for name in ("signals", "weights"):
            changes[name] = {k: v.to(device) for k, v in getattr(self, name).items()}
        changes["targets"] = {
            role: target.to(device) if isinstance(target, TokenScores) else target
            for role, target in self.targets.items()
        }
        return replace(self, **changes)  # type: ignore[arg-type]

    def select(self, index: Tensor) -> Batch:
        """The given rows, cut to the longest of them."""
        width = int(self.attention_mask[index].any(0).nonzero().max()) + 1 if len(index) else 1
        changes: dict[str, object] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor):
                changes[entry.name] = value[index, :width] if value.dim() > 1 else value[index]
        for name in ("signals", "weights"):
            changes[name] = {k: v[index, :width] for k, v in getattr(self, name).items()}
        changes["targets"] = {
            role: target.rows(index, width) if isinstance(target, TokenScores) else target
            for role, target in self.targets.items()
        }
        return replace(self, **changes)  # type: ignore[arg-type]


def collate(
    rollouts: Sequence[Rollout],
    targets: Mapping[str, Sequence[Scores] | Distribution] | None = None,
    *,
    pad_id: int = 0,
    viewed: Sequence[bool] | None = None,
) -> Batch:
    """Pad rollouts on the right and attach the scores of each role.

    `viewed` says of each row whether the teacher had a view of it (default: all). Raises DataError
    for an empty list and AlignmentError when scores do not match the rows.
    """
    if not rollouts:
        raise DataError("collate needs at least one rollout, got none")
    width = max(len(r.token_ids) for r in rollouts)
    shape = (len(rollouts), width)
    arrays = (
        np.full(shape, pad_id, dtype=np.int64),
        np.zeros(shape, dtype=bool),
        np.zeros(shape, dtype=bool),
        np.zeros(shape, dtype=np.float32),
    )
    for row, rollout in enumerate(rollouts):
        length = len(rollout.token_ids)
        arrays[0][row, :length] = rollout.token_ids
        arrays[1][row, :length] = True
        arrays[2][row, :length] = rollout.completion_mask
        arrays[3][row, :length] = rollout.logprobs
    ids, attention, mask, sampler = (torch.from_numpy(a) for a in arrays)
    counts = mask.sum(1)
    domains = tuple(sorted({r.domain for r in rollouts}))
    number = {name: i for i, name in enumerate(domains)}
    batch = Batch(
        input_ids=ids,
        attention_mask=attention,
        completion_mask=mask,
        sampler_logprobs=sampler.masked_fill(~mask, 0.0),
        rewards=torch.tensor([_earned(r) for r in rollouts]),
        step_rewards=torch.tensor(
            [_earned(r) if r.step_reward is None else r.step_reward for r in rollouts]
        ),
        row_group=_number([r.group_id for r in rollouts]),
        row_traj=_number([r.traj_id for r in rollouts]),
        row_step=torch.tensor([r.step for r in rollouts]),
        row_state=_states(rollouts),
        row_valid=torch.tensor([r.action_valid for r in rollouts]),
        row_domain=torch.tensor([number[r.domain] for r in rollouts]),
        row_offset=counts.cumsum(0) - counts,
        row_viewed=torch.tensor([True] * len(rollouts) if viewed is None else list(viewed)),
        row_sampled=torch.tensor([r.policy_version >= 0 for r in rollouts]),
        row_ended=torch.tensor([r.stop is StopReason.STOP for r in rollouts]),
        domains=domains,
    ).check()
    attached: dict[str, Target] = {}
    for role, given in (targets or {}).items():
        attached[role] = token_scores(given, mask, role) if isinstance(given, Sequence) else given
    return replace(batch, targets=attached)


def token_scores(scores: Sequence[Scores], mask: Tensor, role: str) -> TokenScores:
    """Scores of the rows that have trained tokens, placed at those of `mask` [B, T]."""
    counts = [int(n) for n in mask.sum(1) if n > 0]
    found = [len(s.logprobs) for s in scores if s.logprobs]
    if found != counts:
        raise AlignmentError(
            f"{role} scores must cover {counts[:8]} trained tokens per row, got {found[:8]}"
        )
    flat = _numbers(x for s in scores for x in s.logprobs)
    if not bool(torch.isfinite(flat).all()):
        bad = int((~torch.isfinite(flat)).sum())
        raise AlignmentError(
            f"{bad} of {flat.numel()} {role} log-probabilities are not finite; "
            "a score must be a finite number of nats for every trained token"
        )
    entropy = None
    if scores and all(s.entropy is not None for s in scores):
        entropy = _place(_numbers(x for s in scores for x in s.entropy or ()), mask)
        if not bool(torch.isfinite(entropy).all()):
            raise AlignmentError(f"{role} entropies must be finite numbers of nats")
    ids = known = None
    if scores and all(s.candidate_ids is not None for s in scores):
        ids, known = _candidates(scores, mask, role)
    return TokenScores(
        logprobs=_place(flat, mask), entropy=entropy, candidate_ids=ids, candidate_logprobs=known
    )


def _candidates(scores: Sequence[Scores], mask: Tensor, role: str) -> tuple[Tensor, Tensor]:
    """Candidate ids and log-probabilities [B, T, K]; shorter lists end in -inf."""
    ids = [list(row) for s in scores for row in s.candidate_ids or ()]
    known = [list(row) for s in scores for row in s.candidate_logprobs or ()]
    if [len(r) for r in ids] != [len(r) for r in known] or len(ids) != int(mask.sum()):
        raise AlignmentError(
            f"{role} candidates must pair an id with a log-probability for each of "
            f"{int(mask.sum())} trained tokens, got {len(ids)} and {len(known)} lists"
        )
    width = max((len(r) for r in ids), default=0)
    flat_ids = torch.tensor([r + [0] * (width - len(r)) for r in ids], dtype=torch.long)
    flat = _numbers(x for r in known for x in [*r, *[-math.inf] * (width - len(r))])
    flat = flat.view(len(known), width)
    if bool((flat.isnan() | (flat > 1e-3)).any()):
        raise AlignmentError(f"{role} candidate log-probabilities must be numbers <= 0")
    placed = torch.zeros(*mask.shape, width, dtype=torch.long)
    placed[mask] = flat_ids
    values = torch.full((*mask.shape, width), -math.inf)
    values[mask] = flat
    return placed, values


def _numbers(values: Iterable[float | None]) -> Tensor:
    """Float32, with NaN for a missing value, so that the checks of numbers find it."""
    return torch.tensor([math.nan if x is None else x for x in values], dtype=torch.float32)


def micro_batches(batch: Batch, max_tokens: int) -> Iterator[Batch]:
    """Length-sorted cuts whose padded size stays within `max_tokens` (0 = the whole batch).

    Rows without a trained token are left out: they add nothing to any sum.
    """
    lengths = batch.attention_mask.sum(1)
    lengths = lengths.masked_fill(~batch.completion_mask.any(1), 0)
    order = [int(i) for i in lengths.argsort(stable=True) if int(lengths[i]) > 0]
    if max_tokens <= 0:
        if order:
            yield batch.select(torch.tensor(sorted(order)))
        return
    cut: list[int] = []
    for row in order:
        if cut and (len(cut) + 1) * int(lengths[row]) > max_tokens:
            yield batch.select(torch.tensor(cut))
            cut = []
        cut.append(row)
    if cut:
        yield batch.select(torch.tensor(cut))


def _number(names: Sequence[str]) -> Tensor:
    seen: dict[str, int] = {}
    return torch.tensor([seen.setdefault(name, len(seen)) for name in names])


def _earned(rollout: Rollout) -> float:
    value = rollout.reward if rollout.return_ is None else rollout.return_
    return math.nan if value is None else value


def _states(rollouts: Sequence[Rollout]) -> Tensor:
    """Numbers of the states of a group that rows were acted in: [B]; -1 where none is known."""
    seen: dict[tuple[str, str], int] = {}
    return torch.tensor(
        [
            -1 if r.obs_key is None else seen.setdefault((r.group_id, r.obs_key), len(seen))
            for r in rollouts
        ]
    )


def _place(flat: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros(mask.shape, dtype=torch.float32)
    out[mask] = flat.float()
    return out
