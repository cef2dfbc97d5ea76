"""Loss and metrics of a step, merged exactly over its micro-batches and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from distill.objectives.base import Metric, Reduce, Term
from distill.parallel import Group

QUANTILES = (0.05, 0.5, 0.95, 0.99)
"""What `reduce = "quantiles"` reports, as name/p5, name/p50, ..."""


@dataclass(slots=True)
class Ledger:
    loss: float = 0.0
    updated: bool = False
    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    _extremes: dict[str, tuple[str, float]] = field(default_factory=dict)
    _values: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, loss: float, terms: Sequence[Term]) -> None:
        self.loss += loss
        for term in terms:
            for name, metric in term.metrics.items():
                self.add_metric(f"{term.name}/{name}", metric)

    def add_metric(self, name: str, metric: Metric) -> None:
        used = metric.weights > 0
        values = metric.values.detach().masked_fill(~used, 0.0)
        if metric.reduce in ("mean", "sum"):
            total, weight = self._sums.get(name, (0.0, 0.0))
            new = float((values * metric.weights).sum())
            scale = float(metric.weights.sum()) if metric.reduce == "mean" else 0.0
            self._sums[name] = (total + new, weight + scale)
        elif not bool(used.any()):
            return
        elif metric.reduce == "quantiles":
            self._values.setdefault(name, []).append(values[used].float().cpu())
        else:
            found = values[used]
            value = float(found.max() if metric.reduce == "max" else found.min())
            _, known = self._extremes.get(name, (metric.reduce, value))
            pick = max if metric.reduce == "max" else min
            self._extremes[name] = (metric.reduce, pick(known, value))

    def merged(self, group: Group) -> Ledger:
        """The ledger of all processes together; every one gets the same."""
        if group.is_alone:
            return self
        mine = {"loss/": torch.tensor(self.loss, dtype=torch.float64)}
        for name, pair in self._sums.items():
            mine[f"sums/{name}"] = torch.tensor(pair, dtype=torch.float64)
        for name, (reduce, value) in self._extremes.items():
            mine[f"{reduce}/{name}"] = torch.tensor([[value]], dtype=torch.float64)
        for name, pieces in self._values.items():
            mine[f"quantiles/{name}"] = torch.cat(pieces)
        out = Ledger(updated=self.updated)
        for found in group.gather(mine):
            for key, tensor in sorted(found.items()):
                kind, name = key.split("/", 1)
                if kind == "loss":
                    out.loss += float(tensor)
                elif kind == "sums":
                    total, weight = out._sums.get(name, (0.0, 0.0))
                    out._sums[name] = (total + float(tensor[0]), weight + float(tensor[1]))
                else:
                    reduce = cast(Reduce, kind)
                    weights = torch.ones_like(tensor)
                    metric = Metric(values=tensor, weights=weights, reduce=reduce)
                    out.add_metric(name, metric)
        return out

    def metrics(self) -> dict[str, float]:
        """Every metric as one number, quantiles as one each."""
        out = {name: total / (weight or 1.0) for name, (total, weight) in self._sums.items()}
        out |= {name: value for name, (_, value) in self._extremes.items()}
        for name, pieces in self._values.items():
            ordered = torch.cat(pieces).sort().values
            for q in QUANTILES:
                value = ordered[round(q * (len(ordered) - 1))]
                out[f"{name}/p{round(100 * q)}"] = float(value)
        return out
