"""The student: one base model, many roles, one forward pass over the head.

Roles share one copy of the base weights:

    student          the weights under training; the only role with requires_grad
    base             the adapter switched off (full weights: a frozen copy of the start)
    adapter:NAME     another frozen adapter of the same base, for example an expert teacher
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distill.batch import Batch
from distill.divergence import DivergenceSpec, divergence
from distill.errors import ConfigError, TeacherError
from distill.logprobs import (
    Head,
    gather_tokens,
    is_right_padded,
    predictor_rows,
    run_in_chunks,
    scatter,
    token_entropy,
)
from distill.objectives.base import ForwardPlan, PolicyView
from distill.types import Scores, TeacherView

STUDENT = "student"
BASE = "base"
_ADAPTER = "default"


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

    def forward(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
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
        elif role.startswith("adapter:"):
            self.model.set_adapter(role.removeprefix("adapter:"))
            try:
                yield self.model
            finally:
                self.model.set_adapter(_ADAPTER)
        else:
            raise ConfigError(f"unknown role {role!r}; expected student, base or adapter:NAME")

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> parameter under training."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    # -- forward ---------------------------------------------------------------------------

    def forward(self, batch: Batch, plan: ForwardPlan) -> PolicyView:
        """One pass over body and head, with gradient; returns everything the plan names."""
        mask = batch.completion_mask
        targets = batch.input_ids[mask]  # [N]
        specs = plan.divergences
        flat = batch.flat_rows() if specs else targets

        def run() -> list[Tensor]:
            rows = predictor_rows(
                hidden_states(self.model, batch.input_ids, batch.attention_mask), mask
            )
            head = head_of(self.model, self.temperature)

            def compute(piece: Tensor, start: int, stop: int) -> Sequence[Tensor]:
                log_probs = head.log_probs(piece)
                out = [gather_tokens(log_probs, targets[start:stop])]
                if plan.entropy:
                    with torch.no_grad():
                        out.append(token_entropy(log_probs))
                for spec in specs:
                    out.append(self._divergence(log_probs, batch, spec, flat[start:stop]))
                return out

            return run_in_chunks(rows, head.vocab_size, compute)

        columns = iter(self._root(run))
        logprobs = scatter(next(columns), mask)
        entropy = scatter(next(columns), mask) if plan.entropy else None
        values = {spec.name: scatter(next(columns), mask) for spec in specs}
        return PolicyView(logprobs=logprobs, entropy=entropy, divergences=values)

    def _divergence(
        self, log_probs: Tensor, batch: Batch, spec: DivergenceSpec, rows: Tensor
    ) -> Tensor:
        target = batch.targets.get(spec.target)
        if target is None or not hasattr(target, "log_probs"):
            raise TeacherError(
                f"the divergence {spec.name!r} needs a full distribution of role {spec.target!r}; "
                "choose a teacher with the capability 'distribution'"
            )
        return divergence(log_probs, target.log_probs(rows), spec)

    # -- scoring, without gradient -----------------------------------------------------------

    @torch.no_grad()
    def hidden(self, views: Sequence[TeacherView], role: str) -> tuple[Tensor, list[int]]:
        """Hidden states that predict the trained tokens of each view, row-major.

        Returns [N, d] and the number of trained tokens per view. Long views are computed in
        length-sorted cuts of at most `max_tokens` padded tokens.
        """
        counts = [len(v.positions) for v in views]
        pieces: list[Tensor | None] = [None] * len(views)
        with self.as_role(role) as model:
            for cut in _cuts([len(v.token_ids) for v in views], self.max_tokens):
                part = [views[i] for i in cut]
                ids, attention, mask = (x.to(self.device) for x in _pad_views(part))
                rows = predictor_rows(hidden_states(model, ids, attention), mask)
                sizes = [counts[i] for i in cut]
                for i, piece in zip(cut, rows.split(sizes), strict=True):
                    pieces[i] = piece
        width = self.model.config.get_text_config().hidden_size
        found = [p for p in pieces if p is not None]
        return (torch.cat(found) if found else torch.zeros(0, width, device=self.device)), counts

    def head(self, role: str = STUDENT) -> Head:
        model = self._start if role == BASE and self.kind == "full" else self.model
        return head_of(model, self.temperature)

    @torch.no_grad()
    def score(
        self, views: Sequence[TeacherView], role: str = STUDENT, *, entropy: bool = False
    ) -> list[Scores]:
        """Log-probabilities of the trained tokens of each view under a role."""
        rows, counts = self.hidden(views, role)
        head = self.head(role)
        chosen = [v.token_ids[p] for v in views for p in v.positions]
        ids = torch.tensor(chosen, dtype=torch.long, device=self.device)

        def compute(piece: Tensor, start: int, stop: int) -> Sequence[Tensor]:
            log_probs = head.log_probs(piece)
            out = [gather_tokens(log_probs, ids[start:stop])]
            return [*out, token_entropy(log_probs)] if entropy else out

        columns = [c.split(counts) for c in run_in_chunks(rows, head.vocab_size, compute)]
        return [
            Scores(
                logprobs=tuple(columns[0][i].tolist()),
                entropy=tuple(columns[1][i].tolist()) if entropy else None,
                source=f"{self.base}:{role}",
                view_id=view.id,
            )
            for i, view in enumerate(views)
        ]


def hidden_states(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states of a causal language model: [B, T] -> [B, T, d].

    With right padding a causal model never sees the padding, so no mask is passed: the plain
    causal kernel is exact there, and faster.
    """
    body = backbone(model)
    if not is_right_padded(attention_mask):
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        out = body(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=positions,
            use_cache=False,
        )
    else:
        out = body(input_ids=input_ids, use_cache=False)
    hidden: Tensor = out.last_hidden_state
    return hidden


def backbone(model: Any) -> Any:
    """The body below the head, adapters included."""
    return causal_lm(model).base_model


def causal_lm(model: Any) -> Any:
    """The Hugging Face causal LM under an adapter wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def head_of(model: Any, temperature: float) -> Head:
    lm = causal_lm(model)
    module = lm.get_output_embeddings()
    config = lm.config.get_text_config()
    # Some families of models carry an extra factor, divisor or cap on their logits.
    scale = getattr(config, "logit_scale", None)
    if scale is None and getattr(config, "logits_scaling", None):
        scale = 1.0 / float(config.logits_scaling)
    return Head(
        weight=module.weight,
        bias=getattr(module, "bias", None),
        scale=1.0 if scale is None else float(scale),
        soft_cap=getattr(config, "final_logit_softcapping", None),
        temperature=temperature,
    )


def require_known_head(model: Any) -> None:
    """Raise ConfigError unless `head_of` computes what the model itself computes.

    Some families do more with their logits than is known here; their log-probabilities, and every
    loss made of them, would silently be wrong.
    """
    module = causal_lm(model).get_output_embeddings()
    if hasattr(module, "base_layer"):
        raise ConfigError(
            "the output layer carries an adapter, which is not supported; exclude it from "
            "model.target_modules"
        )
    ids = torch.arange(3, device=module.weight.device)[None]
    with torch.no_grad():
        ours = head_of(model, 1.0).logits(hidden_states(model, ids, torch.ones_like(ids).bool()))
        theirs = model(input_ids=ids, use_cache=False).logits.float()
    gap, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not gap <= 0.02 * size + 1e-4:
        raise ConfigError(
            f"the logits of {type(causal_lm(model)).__name__} differ from its output layer by up "
            f"to {gap:.3g}: the model scales them in a way that is not supported"
        )


def _cuts(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    cut: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
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
