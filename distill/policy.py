"""The student: one base model, many roles, one forward pass over the head.

Roles share one copy of the base weights:

    student          the weights under training; the only role with requires_grad
    base             the adapter switched off (full weights: a frozen copy of the start)
    adapter:NAME     another frozen adapter of the same base, for example an expert teacher
    ema, snapshot    weights that follow the student's: a moving average, or a copy now and then
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distill import parallel
from distill.batch import Batch, TokenScores
from distill.body import head_of, hidden_states, kept_modes, layers_of
from distill.cuts import cuts, pad_views
from distill.divergence import Candidates, Divergence, DivergenceSpec
from distill.errors import ConfigError, TeacherError
from distill.followers import Follower, FollowerSpec
from distill.headpass import HeadPass, Wanted
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
        self.group = parallel.single()
        self.line: parallel.Line | None = None
        self._entered: list[AbstractContextManager[Any]] = []
        self._start: Any = None
        self._root: nn.Module = _Root(model)
        self._hollow: Any = None
        self._roots: dict[int, nn.Module] = {id(model): self._root}
        model.eval()
        if not trainable:
            model.requires_grad_(False)

    # -- roles -----------------------------------------------------------------------------

    @parallel.together
    def keep_start(self) -> None:
        """Keep what the role `base` needs: a frozen copy for full weights, nothing otherwise."""
        if self.kind == "full" and self._start is None:
            self._start = self.copy_of_weights()

    @parallel.together
    def add_adapter(self, name: str, path: Path) -> str:
        """Load a frozen adapter of the same base; returns its role name."""
        if self.kind != "adapter":
            raise ConfigError(
                f"an adapter teacher needs a student that is trained as an adapter of the same "
                f'base, but model.kind is {self.kind!r}; set model.kind = "adapter"'
            )
        with kept_modes(self.model):
            self.model.load_adapter(str(path), adapter_name=name, is_trainable=False)
        self.model.set_adapter(_ADAPTER)
        return f"adapter:{name}"

    @contextmanager
    def as_role(self, role: str) -> Iterator[Any]:
        """The model with the weights of a role, whole in every process, for calls without gradient.
        Never enter it between forward and backward."""
        model = self._enter(role)
        try:
            yield model
        finally:
            self._leave()

    @parallel.together
    def _enter(self, role: str) -> Any:
        self._entered.append(self._whole_role(role))
        return self._entered[-1].__enter__()

    @parallel.together
    def _leave(self) -> None:
        self._entered.pop().__exit__(None, None, None)

    @contextmanager
    def _whole_role(self, role: str) -> Iterator[Any]:
        with self._switched(role) as model, self._gathered(model):
            yield model

    @contextmanager
    def _switched(self, role: str) -> Iterator[Any]:
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

    @parallel.together
    def add_follower(self, spec: FollowerSpec) -> str:
        """A role whose weights follow the student's, made from what the student is now; returns
        its name."""
        known = self.followers.get(spec.name)
        if known is None:
            twin = self.copy_of_weights() if self._hollow is not None else None
            follower = Follower(self.model, spec, kind=self.kind, twin=twin)
            self.followers[spec.name] = follower
        elif known.spec != spec:
            raise ConfigError(
                f"one student has one role {spec.name!r}, asked for as {known.spec} and as {spec}; "
                "give both self-teachers the same rate and every"
            )
        return spec.name

    @parallel.together
    def renew(self, role: str) -> None:
        """Let a following role take over the student's weights now."""
        self.followers[role].renew()

    def after_step(self, step: int) -> None:
        """Move every follower once; called after a finite optimizer step."""
        for follower in self.followers.values():
            follower.follow(step)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> parameter under training."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    # -- several processes -------------------------------------------------------------------

    def shard(self, group: parallel.Group) -> None:
        """Spread the weights over processes: each decoder layer by itself, and the rest. Call it
        before there is an optimizer, a role or an adapter beside the student's."""
        if group.is_alone:
            return
        self.group = group
        if self.kind == "full":
            self._hollow = parallel.skeleton(self.model)
        parallel.shard(self._root, layers_of(self.model), group)

    def copy_of_weights(self) -> Any:
        """A frozen copy of the model as it is now, spread over processes as the student is."""
        if self.group.is_alone:
            return copy.deepcopy(self.model).requires_grad_(False)
        model = copy.deepcopy(self._hollow)
        root = self._roots[id(model)] = _Root(model)
        parallel.shard(root, layers_of(model), self.group, like=self._root)
        return model.eval()

    @parallel.together
    def whole_state(self, role: str = STUDENT) -> dict[str, Tensor]:
        """The weights that the student or a following role has of its own, by the student's names,
        whole and on the CPU; empty but in the first process."""
        found = {}
        if role in self.followers:
            own = self.followers[role].tensors()
        elif self.kind == "adapter":
            own = {**self.trainable()}
        else:
            own = dict(self.model.named_parameters())
        for name, parameter in own.items():
            full = parallel.whole(parameter.detach())
            if self.group.is_first:
                found[name] = full.cpu()
        return found

    def idle(self, batch: Batch) -> Tensor:
        """A zero whose gradient is zero, from one row of the batch: what a process without rows
        computes, so that it takes part in gathering weights and summing gradients."""
        row = batch.completion_mask.any(1).nonzero()[:1, 0]
        logprobs = self.forward(batch.select(row), ForwardPlan()).logprobs
        return logprobs.masked_fill(torch.ones_like(logprobs, dtype=torch.bool), 0.0).sum()

    def _gathered(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext() if self.group.is_alone else parallel.gathered(self._roots[id(model)])

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

        def run() -> PolicyView:
            rows = predictor_rows(
                hidden_states(self.model, batch.input_ids, batch.attention_mask), mask
            )
            out = HeadPass(
                head=head_of(self.model, self.temperature),
                token_ids=ids,
                entropy=plan.entropy,
                divergences=divergences,
            ).run(rows)
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

        view: PolicyView = self._root(run)
        return view

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

    @parallel.together
    @torch.no_grad()
    def hidden(self, views: Sequence[TeacherView], role: str) -> tuple[Tensor, list[int]]:
        """Hidden states that predict the trained tokens of each view, row-major.

        Returns [N, d] and the number of trained tokens per view. Long views are computed in
        length-sorted cuts of at most `max_tokens` padded tokens, which several processes share out.
        """
        counts = [len(v.positions) for v in views]
        pieces: list[Tensor | None] = [None] * len(views)
        lengths = {i: len(v.token_ids) for i, v in enumerate(views) if v.positions}
        with self.as_role(role) as model:
            weight = head_of(model, 1.0).weight
            chosen = list(cuts(lengths, self.max_tokens))
            made: dict[int, Tensor] = {}
            for number in self.group.deal(range(len(chosen))):
                part = [views[i] for i in chosen[number]]
                ids, attention, mask = (x.to(self.device) for x in pad_views(part))
                made[number] = predictor_rows(hidden_states(model, ids, attention), mask)
            for number, cut in enumerate(chosen):
                sizes = [counts[i] for i in cut]
                rows = self.group.spread(made.get(number), number, weight, sum(sizes))
                for i, piece in zip(cut, rows.split(sizes), strict=True):
                    pieces[i] = piece
        found = [p for p in pieces if p is not None]
        return (torch.cat(found) if found else self.head(role).weight.detach()[:0]), counts

    @parallel.together
    def head(self, role: str = STUDENT) -> Head:
        """The output head of a role; of one that is spread over processes, a whole copy."""
        model = self.model
        if role == BASE and self.kind == "full":
            model = self._start
        elif role in self.followers:
            model = self.followers[role].model
        head = head_of(model, self.temperature)
        if not parallel.is_sharded(head.weight):
            return head
        bias = None if head.bias is None else parallel.whole(head.bias.detach())
        return replace(head, weight=parallel.whole(head.weight.detach()), bias=bias)

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
