"""The student: one base model, many roles, one forward pass over the head.

Roles share one copy of the base weights:

    student          the weights under training; the only role with requires_grad
    base             the adapter switched off (full weights: a frozen copy of the start)
    adapter:NAME     another frozen adapter of the same base, for example an expert teacher
    ema, snapshot    weights that follow the student's: a moving average, or a copy now and then
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distill.batch import Batch, TokenScores
from distill.body import head_of, hidden_states
from distill.divergence import Candidates, Divergence, DivergenceSpec
from distill.errors import ConfigError, TeacherError
from distill.followers import Follower, FollowerSpec
from distill.headpass import HeadOutput, HeadPass, Wanted
from distill.logprobs import Head, predictor_rows, scatter
from distill.objectives.base import ForwardPlan, PolicyView, present
from distill.types import ScoreRequest, Scores, TeacherView

STUDENT = "student"
BASE = "base"
_ADAPTER = "default"
_JUST_LOGPROBS = ScoreRequest()


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """Low-rank adapter of every linear layer but the head (LoRA, arXiv 2106.09685)."""

    rank: int = 32
    alpha: int = 64
    target_modules: str = "all-linear"


class _Root(nn.Module):
    """Runs body and head inside one module call, so that sharded heads are gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


class Policy:
    """A causal language model with its roles. `kind` says which weights are trained."""

    def __init__(
        self,
        model: Any,
        *,
        base: str,
        kind: Literal["full", "adapter"] = "full",
        trainable: bool = True,
        temperature: float = 1.0,
        max_tokens: int = 16384,
    ) -> None:
        self.model = model
        self.base = base
        self.kind = kind
        self.device = next(model.parameters()).device
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.followers: dict[str, Follower] = {}
        self._start: Any = None
        self._root = _Root(model)
        model.eval()
        if not trainable:
            model.requires_grad_(False)

    # -- roles -----------------------------------------------------------------------------

    def keep_start(self) -> None:
        """Keep what the role `base` needs: a frozen copy for full weights, nothing otherwise."""
        if self.kind == "full" and self._start is None:
            self._start = copy.deepcopy(self.model).requires_grad_(False)

    def add_adapter(self, name: str, path: Path) -> str:
        """Load a frozen adapter of the same base; returns its role name."""
        if self.kind != "adapter":
            raise ConfigError(
                f"an adapter teacher needs a student that is trained as an adapter of the same "
                f'base, but model.kind is {self.kind!r}; set model.kind = "adapter"'
            )
        self.model.load_adapter(str(path), adapter_name=name, is_trainable=False)
        self.model.set_adapter(_ADAPTER)
        return f"adapter:{name}"

    @contextmanager
    def as_role(self, role: str) -> Iterator[Any]:
        """The model with the weights of a role. Never enter it between forward and backward."""
        if role == STUDENT:
            yield self.model
        elif role == BASE and self.kind == "adapter":
            with self.model.disable_adapter():
                yield self.model
        elif role == BASE:
            if self._start is None:
                raise ConfigError("the role 'base' of full weights was not kept from the start")
            yield self._start
        elif role in self.followers and self.kind == "full":
            yield self.followers[role].model
        elif role.startswith("adapter:") or role in self.followers:
            # Frozen even while it is active: only the student's own adapter ever trains.
            self.model.set_adapter(role.removeprefix("adapter:"), inference_mode=True)
            try:
                yield self.model
            finally:
                self.model.set_adapter(_ADAPTER)
        else:
            known = ", ".join(["student", "base", "adapter:NAME", *self.followers])
            raise ConfigError(f"unknown role {role!r}; expected one of {known}")

    def add_follower(self, spec: FollowerSpec) -> str:
        """A role whose weights follow the student's, made from what the student is now; returns
        its name."""
        known = self.followers.get(spec.name)
        if known is None:
            self.followers[spec.name] = Follower(self.model, spec, kind=self.kind)
        elif known.spec != spec:
            raise ConfigError(
                f"one student has one role {spec.name!r}, asked for as {known.spec} and as {spec}; "
                "give both self-teachers the same rate and every"
            )
        return spec.name

    def after_step(self, step: int) -> None:
        """Move every follower once; called after a finite optimizer step."""
        for follower in self.followers.values():
            follower.follow(step)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> parameter under training."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    # -- forward ---------------------------------------------------------------------------

    def forward(self, batch: Batch, plan: ForwardPlan) -> PolicyView:
        """One pass over body and head, with gradient; returns everything the plan names."""
        mask = batch.completion_mask
        ids = batch.input_ids[mask][:, None]  # [N, 1]
        if plan.candidates:
            chosen = batch.targets.get(plan.candidates)
            if not isinstance(chosen, TokenScores) or chosen.candidate_ids is None:
                raise TeacherError(f"the batch has no candidates of role {plan.candidates!r}")
            ids = torch.cat([ids, chosen.candidate_ids[mask]], dim=1)  # [N, 1 + K]
        flat = batch.flat_rows()
        divergences = tuple(self._wanted(batch, spec, flat) for spec in plan.divergences)

        def run() -> HeadOutput:
            rows = predictor_rows(
                hidden_states(self.model, batch.input_ids, batch.attention_mask), mask
            )
            return HeadPass(
                head=head_of(self.model, self.temperature),
                token_ids=ids,
                entropy=plan.entropy,
                divergences=divergences,
            ).run(rows)

        out: HeadOutput = self._root(run)
        named = zip(plan.divergences, out.divergences, strict=True)
        return PolicyView(
            logprobs=scatter(out.tokens, mask),
            entropy=None if out.entropy is None else scatter(out.entropy, mask),
            candidate_logprobs=scatter(out.candidates, mask) if plan.candidates else None,
            divergences={
                spec.name: Divergence(
                    per_token=scatter(found.per_token, mask), stats=scatter(found.stats, mask)
                )
                for spec, found in named
            },
        )

    def _wanted(self, batch: Batch, spec: DivergenceSpec, rows: Tensor) -> Wanted:
        mask = batch.completion_mask
        target = batch.targets.get(f"{spec.target}.distribution", batch.targets.get(spec.target))
        weights = batch.weights.get(spec.name)
        if weights is not None and batch.correction is not None:
            weights = weights * batch.correction
        kept = None if weights is None else weights[mask]
        if isinstance(target, TokenScores) and target.candidate_ids is not None:
            known = present(target.candidate_logprobs, "candidate log-probabilities")
            few = Candidates(ids=target.candidate_ids[mask], logprobs=known[mask])
            return Wanted(spec=spec, target=few, rows=rows, weights=kept)
        if target is None or isinstance(target, TokenScores):
            raise TeacherError(
                f"the divergence {spec.name!r} needs a full distribution of role {spec.target!r}; "
                "choose a teacher with the capability 'distribution'"
            )
        return Wanted(spec=spec, target=target, rows=rows, weights=kept)

    # -- scoring, without gradient -----------------------------------------------------------

    @torch.no_grad()
    def hidden(self, views: Sequence[TeacherView], role: str) -> tuple[Tensor, list[int]]:
        """Hidden states that predict the trained tokens of each view, row-major.

        Returns [N, d] and the number of trained tokens per view. Long views are computed in
        length-sorted cuts of at most `max_tokens` padded tokens.
        """
        counts = [len(v.positions) for v in views]
        pieces: list[Tensor | None] = [None] * len(views)
        lengths = {i: len(v.token_ids) for i, v in enumerate(views) if v.positions}
        with self.as_role(role) as model:
            for cut in _cuts(lengths, self.max_tokens):
                part = [views[i] for i in cut]
                ids, attention, mask = (x.to(self.device) for x in _pad_views(part))
                rows = predictor_rows(hidden_states(model, ids, attention), mask)
                sizes = [counts[i] for i in cut]
                for i, piece in zip(cut, rows.split(sizes), strict=True):
                    pieces[i] = piece
        found = [p for p in pieces if p is not None]
        return (torch.cat(found) if found else self.head(role).weight.detach()[:0]), counts

    def head(self, role: str = STUDENT) -> Head:
        model = self.model
        if role == BASE and self.kind == "full":
            model = self._start
        elif role in self.followers:
            model = self.followers[role].model
        return head_of(model, self.temperature)

    @torch.no_grad()
    def score(
        self,
        views: Sequence[TeacherView],
        role: str = STUDENT,
        want: ScoreRequest = _JUST_LOGPROBS,
        num_ids: int | None = None,
    ) -> list[Scores]:
        """Log-probabilities of the trained tokens of each view under a role, and what is wanted.

        `num_ids` cuts the vocabulary. Raises ConfigError for more candidates than it has entries.
        """
        rows, counts = self.hidden(views, role)
        head = self.head(role).cut(num_ids)
        chosen = [[v.token_ids[p]] for v in views for p in v.positions]
        if want.candidate_ids is not None:
            asked = [list(ids) for row in want.candidate_ids for ids in row]
            chosen = [a + b for a, b in zip(chosen, asked, strict=True)]
        if want.candidates > head.vocab_size:
            raise ConfigError(
                f"{want.candidates} candidates were asked for, the vocabulary has "
                f"{head.vocab_size} entries; lower objective.k"
            )
        width = len(chosen[0]) if chosen else 1
        ids = torch.tensor(chosen, dtype=torch.long, device=self.device).view(-1, width)
        absent = ids >= head.vocab_size  # padding of a wider model: this one rules it out
        out = HeadPass(
            head=head,
            token_ids=ids.masked_fill(absent, 0),
            entropy=want.entropy,
            top_k=want.candidates,
        ).run(rows)
        first, others = absent.split([1, width - 1], dim=1)
        tokens = out.tokens.masked_fill(first.squeeze(1), -torch.inf)
        columns: list[list[Any] | None] = [tokens.tolist(), None, None, None]
        if out.entropy is not None:
            columns[1] = out.entropy.tolist()
        if out.top_ids is not None and out.top_logprobs is not None:
            columns[2], columns[3] = out.top_ids.tolist(), out.top_logprobs.tolist()
        elif want.candidate_ids is not None:
            columns[2] = [ids for row in want.candidate_ids for ids in row]
            columns[3] = out.candidates.masked_fill(others, -torch.inf).tolist()
        stops = list(accumulate(counts))
        found = []
        for view, count, stop in zip(views, counts, stops, strict=True):
            logprobs, entropy, tops, known = (
                None if c is None else c[stop - count : stop] for c in columns
            )
            found.append(
                Scores(
                    logprobs=tuple(logprobs or ()),
                    entropy=None if entropy is None else tuple(entropy),
                    candidate_ids=None if tops is None else tuple(map(tuple, tops)),
                    candidate_logprobs=None if known is None else tuple(map(tuple, known)),
                    source=f"{self.base}:{role}",
                    view_id=view.id,
                )
            )
        return found


def _cuts(lengths: Mapping[int, int], max_tokens: int) -> Iterator[list[int]]:
    cut: list[int] = []
    for i in sorted(lengths, key=lambda i: (lengths[i], i)):
        if cut and (len(cut) + 1) * lengths[i] > max_tokens:
            yield cut
            cut = []
        cut.append(i)
    if cut:
        yield cut


def _pad_views(views: Sequence[TeacherView]) -> tuple[Tensor, Tensor, Tensor]:
    width = max(len(v.token_ids) for v in views)
    ids = torch.zeros(len(views), width, dtype=torch.long)
    attention = torch.zeros(len(views), width, dtype=torch.bool)
    mask = torch.zeros(len(views), width, dtype=torch.bool)
    for row, view in enumerate(views):
        ids[row, : len(view.token_ids)] = torch.tensor(view.token_ids)
        attention[row, : len(view.token_ids)] = True
        mask[row, list(view.positions)] = True
    return ids, attention, mask
