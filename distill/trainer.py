"""One optimizer step from one batch: weigh, normalise over the step, backpropagate, clip, step.

The trainer knows no algorithm. Denominators are summed over the whole step before the first
micro-batch, so splitting the same batch differently changes nothing but rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from distill import optimizers
from distill.batch import Batch, TokenScores, micro_batches
from distill.correction import Correction, effective_sample_size
from distill.errors import ConfigError, DistillError
from distill.ledger import Ledger
from distill.models import recompute_layers
from distill.objectives.base import ForwardPlan, Metric, Objective, State, Term
from distill.parallel import Line, together, whole
from distill.policy import Policy
from distill.types import StepInfo, UpdateReport

NO_CORRECTION = Correction()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerOptions:
    """Optimizer and schedule of a stage. AdamW; the rate depends on the step number alone."""

    num_steps: int
    lr: float
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    warmup_steps: int = 5
    schedule: Literal["constant", "linear"] = "constant"
    min_lr_ratio: float = 0.1
    grad_clip: float = 1.0
    micro_batch_tokens: int = 16384
    epochs: int = 1
    minibatches: int = 1
    master_weights: bool = True
    gradient_checkpointing: bool = False
    offload: Literal["none", "optimizer"] = "none"

    @property
    def num_updates(self) -> int:
        """Optimizer updates per batch."""
        return self.epochs * self.minibatches

    def rate(self, step: int) -> float:
        """Learning rate of step 1, 2, ..., num_steps."""
        warm = min(1.0, step / max(1, self.warmup_steps))
        if self.schedule == "constant":
            return self.lr * warm
        left = 1.0 - (step - 1) / max(1, self.num_steps)
        return self.lr * warm * max(self.min_lr_ratio, left)


class Trainer:
    """Updates a policy. `state` belongs to the objective and is part of every checkpoint."""

    def __init__(self, policy: Policy, options: TrainerOptions) -> None:
        self.policy = policy
        self.options = options
        self.state: State = {}
        self._named = policy.trainable()
        if not self._named:
            raise ConfigError("the policy has no trainable parameter; check model.kind")
        if options.gradient_checkpointing:
            recompute_layers(policy.model)
        self.optimizer = optimizers.build_optimizer(
            self._named,
            lr=options.lr,
            betas=options.betas,
            weight_decay=options.weight_decay,
            master_weights=options.master_weights,
            offload=options.offload,
        )

    @property
    def line(self) -> Line | None:
        return self.policy.line

    def update(
        self,
        batch: Batch,
        objective: Objective,
        info: StepInfo,
        correction: Correction = NO_CORRECTION,
    ) -> UpdateReport:
        """Train on one batch: `epochs` x `minibatches` optimizer updates (1 x 1 by default).

        A batch without a trained token changes nothing and reports a loss of 0.
        """
        return self._update(batch, objective, info, correction, self.options.rate(info.step))

    @together
    def _update(
        self,
        batch: Batch,
        objective: Objective,
        info: StepInfo,
        correction: Correction,
        lr: float,
    ) -> UpdateReport:
        ledger = Ledger()
        if batch.num_tokens == 0:
            return UpdateReport(
                step=info.step, loss=0.0, grad_norm=0.0, lr=lr, num_rows=0, num_tokens=0
            )
        if not self.policy.group.is_alone:
            self.policy.group.require_same(_digest(batch), f"the batch of step {info.step}")
        batch = batch.to(self.policy.device)
        with torch.no_grad():
            batch, self.state = objective.prepare(batch, info, self.state)
            batch = correction.apply(batch)
            if self.policy.group.is_first:
                _watch_correction(batch, ledger)
        plan = objective.plan()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norms = []
        for _ in range(self.options.epochs):
            for part in _minibatches(batch, self.options.minibatches):
                norms.append(self._one_update(part, objective, plan, ledger, info))
        self.policy.after_step(info.step)
        ledger = ledger.merged(self.policy.group)
        loss = ledger.loss / len(norms)
        return UpdateReport(
            step=info.step,
            loss=loss,
            grad_norm=sum(norms) / len(norms),
            lr=lr,
            num_rows=batch.num_rows,
            num_tokens=batch.num_tokens,
            metrics=ledger.metrics(),
        )

    def _one_update(
        self, batch: Batch, objective: Objective, plan: ForwardPlan, ledger: Ledger, info: StepInfo
    ) -> float:
        totals, own = _totals(batch), self._own_micro_batches(batch)
        num_idle = self.policy.group.most(len(own)) - len(own)
        for micro in own:
            view = self.policy.forward(micro, plan)
            terms = objective(view, micro)
            loss = sum_terms(terms, totals, micro.correction)
            loss.backward()
            self.optimizer.collect()
            ledger.add(float(loss.detach()), terms)
            if not ledger.updated and bool(micro.sampler_logprobs.any()):
                # How far engine and trainer disagree; 0 in exact arithmetic while on policy.
                gap = (view.logprobs.detach() - micro.sampler_logprobs).abs()
                # Worked solutions were sampled by nobody.
                weights = (micro.completion_mask & micro.row_sampled[:, None]).float()
                ledger.add_metric("sampler_gap/mean", Metric(values=gap, weights=weights))
                worst = Metric(values=gap, weights=weights, reduce="max")
                ledger.add_metric("sampler_gap/max", worst)
            if view.entropy is not None:
                weights = micro.completion_mask.float()
                ledger.add_metric("entropy", Metric(values=view.entropy, weights=weights))
        for _ in range(num_idle):  # the others still compute, and wait for this process
            self.policy.idle(batch).backward()
            self.optimizer.collect()
        clip = self.options.grad_clip or math.inf
        found = torch.nn.utils.clip_grad_norm_(list(self.optimizer.stepped.values()), clip)
        norm = float(whole(found))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise DistillError(
                f"the gradient of step {info.step} of stage {info.stage} is not finite; the "
                "weights were left as they were; lower trainer.lr or use model.dtype = float32"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        ledger.updated = True
        return norm

    def _own_micro_batches(self, batch: Batch) -> list[Batch]:
        """Those that this process computes: of several, each takes its share of the trained rows,
        dealt out by length."""
        group, limit = self.policy.group, self.options.micro_batch_tokens
        if not group.is_alone:
            lengths = batch.attention_mask.sum(1)
            trained = batch.completion_mask.any(1)
            order = [int(i) for i in lengths.argsort(stable=True) if bool(trained[i])]
            batch = batch.select(torch.tensor(sorted(group.deal(order)), dtype=torch.long))
        return list(micro_batches(batch, limit))

    # -- resume ------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Optimizer state by parameter name, ready for a safetensors file."""
        return optimizers.state_tensors(self.optimizer, self._named)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `state_tensors`. Raises DistillError for foreign parameter names."""
        optimizers.load_state_tensors(self.optimizer, self._named, tensors)


def sum_terms(
    terms: Sequence[Term],
    totals: Callable[[str, str], float],
    correction: Tensor | None = None,
) -> Tensor:
    """Sum of coefficient * sum(weights * correction * per_token) / denominator, masked before the
    sum. The correction never enters a denominator."""
    parts = []
    for term in terms:
        weights = term.weights if correction is None else term.weights * correction
        value = term.per_token.masked_fill(weights == 0, 0.0) * weights
        parts.append(term.coefficient * value.sum() / totals(term.name, term.denominator))
    return torch.stack(parts).sum()


def _watch_correction(batch: Batch, ledger: Ledger) -> None:
    if batch.correction is None:
        return
    sampled = batch.completion_mask & batch.row_sampled[:, None]
    weights = sampled.float()
    for name, reduce in (("mean", "mean"), ("max", "max")):
        metric = Metric(values=batch.correction, weights=weights, reduce=reduce)  # type: ignore[arg-type]
        ledger.add_metric(f"correction/{name}", metric)
    gone = Metric(values=(batch.correction == 0).float(), weights=weights)
    ledger.add_metric("correction/masked_share", gone)
    size = effective_sample_size(batch.correction, sampled)
    share = Metric(values=size.float().view(1, 1), weights=torch.ones(1, 1))
    ledger.add_metric("correction/effective_share", share)


def _totals(batch: Batch) -> Callable[[str, str], float]:
    """Denominators of the whole step, by term name and kind; never 0."""
    mask = batch.completion_mask
    if batch.correction is not None:
        mask = mask & (batch.correction > 0)  # what a correction masks leaves the denominator too
    sums = {name: float(w.double().sum()) for name, w in batch.weights.items()}
    rows = {name: _num_rows(batch, mask, w) for name, w in batch.weights.items()}
    tokens = float(mask.sum())

    def total(name: str, kind: str) -> float:
        known = {"tokens": tokens, "rows": rows.get(name, 0.0), "const": 1.0}
        value = known.get(kind, sums.get(name, 0.0))
        return value if value > 0 else 1.0

    return total


def _num_rows(batch: Batch, mask: Tensor, weights: Tensor) -> float:
    """Rows with trained tokens of the kinds that a term weighs: replies, worked solutions, both."""
    weighed, sampled = (weights > 0).any(1), batch.row_sampled
    counts = torch.where(sampled, (weighed & sampled).any(), (weighed & ~sampled).any())
    return float((mask.any(1) & counts).sum())


def _digest(batch: Batch) -> str:
    """Equal for batches of the same rows, rewards and scores."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    for role, target in batch.targets.items():
        if isinstance(target, TokenScores):
            tensors |= {f"{role}/{f.name}": getattr(target, f.name) for f in fields(target)}
    tensors |= batch.signals
    found = hashlib.sha256()
    for name in sorted(tensors):
        if isinstance(tensors[name], Tensor):
            found.update(name.encode())
            found.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _minibatches(batch: Batch, count: int) -> Sequence[Batch]:
    if count == 1:
        return [batch]
    index = torch.arange(batch.num_rows)
    return [batch.select(index[i::count]) for i in range(min(count, batch.num_rows))]
