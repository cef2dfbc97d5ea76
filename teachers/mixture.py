"""Teachers made of teachers: a trust region, a mixture, one per domain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from distill.distributions import LogitMix, ProbabilityMixture, RoutedDistribution
from distill.divergence import Distribution
from distill.errors import ConfigError, TeacherError
from distill.logprobs import chunk_bounds, token_entropy
from distill.protocols import Teacher
from distill.types import ScoreRequest, Scores, TeacherView
from teachers.local import EVERYTHING


class DistributionTeacher(ABC):
    """A teacher that is defined by its full distributions; scores are read off them."""

    capabilities = EVERYTHING

    def __init__(self, parts: Sequence[Teacher], *, name: str) -> None:
        self.parts = parts
        self.name = name

    @abstractmethod
    def distribution(self, views: Sequence[TeacherView]) -> Distribution: ...

    @torch.no_grad()
    def score(self, views: Sequence[TeacherView], want: ScoreRequest) -> list[Scores]:
        made = self.distribution(views)
        counts = [len(v.positions) for v in views]
        chosen = [[v.token_ids[p]] for v in views for p in v.positions]
        if want.candidate_ids is not None:
            asked = [list(ids) for row in want.candidate_ids for ids in row]
            chosen = [a + b for a, b in zip(chosen, asked, strict=True)]
        found = [_read(made, rows, chosen, want) for rows in _row_chunks(made, len(chosen))]
        columns = [[x for piece in column for x in piece] for column in zip(*found, strict=True)]
        out, at = [], 0
        for view, count in zip(views, counts, strict=True):
            logprobs, entropy, ids, known = (c[at : at + count] for c in columns)
            at += count
            out.append(
                Scores(
                    logprobs=tuple(logprobs),
                    entropy=tuple(entropy) if want.entropy else None,
                    candidate_ids=tuple(map(tuple, ids)) if _has_candidates(want) else None,
                    candidate_logprobs=tuple(map(tuple, known)) if _has_candidates(want) else None,
                    source=self.name,
                    view_id=view.id,
                )
            )
        return out


class TrustRegionTeacher(DistributionTeacher):
    """q proportional to anchor^(1 - mix) * moving^mix, both reading the same view (SDPO)."""

    def __init__(self, anchor: Teacher, moving: Teacher, *, mix: float, name: str) -> None:
        super().__init__((anchor, moving), name=name)
        self.mix = mix

    def distribution(self, views: Sequence[TeacherView]) -> Distribution:
        anchor, moving = (part.distribution(views) for part in self.parts)
        return LogitMix(first=anchor, second=moving, mix=self.mix)


class MixtureTeacher(DistributionTeacher):
    """sum_i weight_i * nu_i over several teachers of one vocabulary."""

    def __init__(self, parts: Sequence[Teacher], *, weights: Sequence[float], name: str) -> None:
        super().__init__(parts, name=name)
        self.weights = weights

    def distribution(self, views: Sequence[TeacherView]) -> Distribution:
        made = [part.distribution(views) for part in self.parts]
        return ProbabilityMixture(parts=made, weights=self.weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedTeacher:
    """Several teachers, each answering for the views of its key (the task's domain).

    A key without a teacher of its own goes to `default`; without a default it is an error.
    """

    teachers: Mapping[str, Teacher]
    default: Teacher | None = None
    name: str = "routed"

    @property
    def capabilities(self) -> frozenset[str]:
        parts = [*self.teachers.values(), *([self.default] if self.default else [])]
        return frozenset.intersection(*(part.capabilities for part in parts))

    def _owner(self, view: TeacherView) -> Teacher:
        owner = self.teachers.get(view.key, self.default)
        if owner is None:
            raise TeacherError(
                f"no teacher answers for {view.key!r}; there are teachers for "
                f"{', '.join(sorted(self.teachers))}; name a default or one more"
            )
        return owner

    def _shares(self, views: Sequence[TeacherView]) -> list[tuple[Teacher, list[int]]]:
        shares: dict[int, tuple[Teacher, list[int]]] = {}
        for i, view in enumerate(views):
            owner = self._owner(view)
            shares.setdefault(id(owner), (owner, []))[1].append(i)
        return list(shares.values())

    def score(self, views: Sequence[TeacherView], want: ScoreRequest) -> list[Scores]:
        out: dict[int, Scores] = {}
        for owner, mine in self._shares(views):
            ids = want.candidate_ids
            part = ScoreRequest(
                entropy=want.entropy,
                candidates=want.candidates,
                candidate_ids=None if ids is None else [ids[i] for i in mine],
            )
            found = owner.score([views[i] for i in mine], part)
            out |= dict(zip(mine, found, strict=True))
        return [out[i] for i in range(len(views))]

    def distribution(self, views: Sequence[TeacherView]) -> Distribution:
        counts = [len(v.positions) for v in views]
        starts = [stop - count for stop, count in zip(accumulate(counts), counts, strict=True)]
        total = sum(counts)
        owners, numbers = torch.zeros(total, dtype=torch.long), torch.zeros(total, dtype=torch.long)
        parts = []
        for index, (owner, mine) in enumerate(self._shares(views)):
            parts.append(owner.distribution([views[i] for i in mine]))
            rows = torch.cat([torch.arange(starts[i], starts[i] + counts[i]) for i in mine])
            owners[rows] = index
            numbers[rows] = torch.arange(len(rows))
        return RoutedDistribution(parts=parts, owner=owners, number=numbers)


def _has_candidates(want: ScoreRequest) -> bool:
    return bool(want.candidates) or want.candidate_ids is not None


def _row_chunks(made: Distribution, total: int) -> list[torch.Tensor]:
    width = made.log_probs(torch.zeros(1, dtype=torch.long)).shape[-1] if total else 1
    return [torch.arange(a, b) for a, b in chunk_bounds(total, width)]


def _read(
    made: Distribution, rows: torch.Tensor, chosen: list[list[int]], want: ScoreRequest
) -> tuple[list[float], list[float], list[list[int]], list[list[float]]]:
    log_probs = made.log_probs(rows)
    ids = torch.tensor([chosen[i] for i in rows.tolist()], dtype=torch.long).view(len(rows), -1)
    known = log_probs.gather(-1, ids.to(log_probs.device))
    entropy = token_entropy(log_probs).tolist() if want.entropy else [0.0] * len(rows)
    if not want.candidates:
        first, others = known.split([1, ids.shape[1] - 1], dim=1)
        asked = ids.split([1, ids.shape[1] - 1], dim=1)[1]
        return first[:, 0].tolist(), entropy, asked.tolist(), others.tolist()
    if want.candidates > log_probs.shape[-1]:
        raise ConfigError(
            f"{want.candidates} candidates were asked for, the vocabulary has "
            f"{log_probs.shape[-1]} entries; lower objective.k"
        )
    top = log_probs.topk(want.candidates, dim=-1)
    return known[:, 0].tolist(), entropy, top.indices.tolist(), top.values.tolist()
