"""Credit for single steps of a trajectory, from steps that siblings took in the same state.

The steps of a group form a graph: a node is a state that its rollouts acted in, an edge one step.
Two methods read it, both in time linear in the rows:

    gigpo   G_t = sum over k >= t of gamma^(k - t) e_k, compared with the other visits of its node
    g2po    V(node) = mean of gamma^(T - t) R over the visits of the node, t = 0, 1, ..., T - 1
            [V(next) - p_t] compared inside its node  +  [V(next) - V(node)] compared over the group

e_k is what a step earned after penalties. p_t is the penalty of a step whose action could not be
read: what its earnings lack to 0. R, the outcome, is the sum of e_k + p_k: penalties do not enter
the value of a state, only the step that caused them; and V(next) of the last step is R. "Compared"
is x - mean, divided by (std + 1e-6) on request; a single visit compares to nothing and gets 0. The
second mean of g2po runs over the steps of a group, so that long trajectories weigh more.

Sources: GiGPO (arXiv 2505.10978), G2PO (arXiv 2606.22995).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distill.advantages import STD_EPSILON
from distill.batch import Batch
from distill.errors import AlignmentError, ConfigError

CreditMethod = Literal["gigpo", "g2po"]
Node = tuple[int, int]
"""Group and state."""
Values = dict[int, float]
"""A number per row of the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One step: a row that acted in a state."""

    row: int
    node: Node
    earned: float
    """Before the penalty."""
    penalty: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    trajectories: tuple[tuple[Visit, ...], ...]
    """The steps of each trajectory, in the order in which they were taken."""

    @property
    def visits(self) -> list[Visit]:
        return [visit for visits in self.trajectories for visit in visits]

    def by(self, key: Callable[[Visit], object]) -> list[list[int]]:
        """Rows of the visits with equal keys."""
        found: dict[object, list[int]] = {}
        for visit in self.visits:
            found.setdefault(key(visit), []).append(visit.row)
        return list(found.values())

    @property
    def nodes(self) -> list[list[int]]:
        """Rows that visited each node."""
        return self.by(lambda visit: visit.node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How a step is compared with others: centred, or also divided by their spread."""

    std: bool = True
    ddof: int = 0

    def __call__(self, sets: Iterable[list[int]], values: Values) -> Values:
        """x - mean of its set, divided by (std + 1e-6) with `std`; 0 in a set without a spread."""
        out: Values = {}
        for rows in sets:
            found = [values[row] for row in rows]
            mean = sum(found) / len(found)
            spread = (sum((x - mean) ** 2 for x in found) / max(1, len(found) - self.ddof)) ** 0.5
            flat = len(found) < 2 or spread <= STD_EPSILON
            scale = spread + STD_EPSILON if self.std else 1.0
            out |= {row: 0.0 if flat else (values[row] - mean) / scale for row in rows}
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCredit:
    """Credit of every row and what the graph looked like. Rows outside it have 0 everywhere."""

    values: Tensor  # [B] float32
    shared: Tensor  # [B] float32, 1 where another step was taken in the same state
    steps: Tensor  # [B] float32, steps of the row's trajectory
    num_nodes: int


def transition_graph(batch: Batch) -> Graph:
    """The graph of a whole optimizer step, of rows that the student wrote and that have a reward.

    A row without a trained token still shows where a trajectory went. Raises ConfigError for a
    trained row in an unknown state and AlignmentError for a turn that occurs twice.
    """
    trained = batch.completion_mask.any(1)
    acted = batch.row_sampled & ~batch.rewards.isnan()
    lost = int((acted & trained & (batch.row_state < 0)).sum())
    if lost:
        raise ConfigError(
            f"step credit compares steps taken in the same state, but {lost} of "
            f"{int((acted & trained).sum())} trained rows name none; it needs one row per turn "
            'and an environment whose turns have an obs_key; else use credit = "none"'
        )
    rows = acted.nonzero()[:, 0].tolist()
    states, groups = batch.row_state.tolist(), batch.row_group.tolist()
    turns, owners = batch.row_step.tolist(), batch.row_traj.tolist()
    earned, valid = batch.step_rewards.double().tolist(), batch.row_valid.tolist()
    found: dict[int, dict[int, Visit]] = {}
    for row in rows:
        steps = found.setdefault(owners[row], {})
        if turns[row] in steps:
            raise AlignmentError(
                f"step credit needs one row per turn, but rows {steps[turns[row]].row} and {row} "
                f"are both turn {turns[row]} of the same trajectory"
            )
        penalty = 0.0 if valid[row] else max(0.0, -earned[row])
        steps[turns[row]] = Visit(
            row=row,
            # An unknown state is a node of its own.
            node=(groups[row], states[row] if states[row] >= 0 else -1 - row),
            earned=earned[row] + penalty,
            penalty=penalty,
        )
    return Graph(trajectories=tuple(tuple(s[t] for t in sorted(s)) for s in found.values()))


def gigpo(graph: Graph, gamma: float, compared: Comparison) -> Values:
    """Discounted return from each step, compared with the other visits of its node."""
    returns = {}
    for visits in graph.trajectories:
        running = 0.0
        for visit in reversed(visits):
            running = visit.earned - visit.penalty + gamma * running
            returns[visit.row] = running
    return compared(graph.nodes, returns)


def node_values(graph: Graph, gamma: float) -> Values:
    """V of the node of each visit: the mean of gamma^(T - t) R over the visits of the node."""
    discounted: Values = {}
    for visits in graph.trajectories:
        outcome, length = sum(v.earned for v in visits), len(visits)
        for t, visit in enumerate(visits):
            discounted[visit.row] = gamma ** (length - t) * outcome
    value: Values = {}
    for rows in graph.nodes:
        mean = sum(discounted[row] for row in rows) / len(rows)
        value |= dict.fromkeys(rows, mean)
    return value


def edges(graph: Graph, gamma: float) -> tuple[Values, Values]:
    """Scores V(next) - p and gains V(next) - V(node) of each step."""
    value = node_values(graph, gamma)
    scores: Values = {}
    gains: Values = {}
    for visits in graph.trajectories:
        after = [value[v.row] for v in visits[1:]] + [sum(v.earned for v in visits)]
        for visit, behind in zip(visits, after, strict=True):
            scores[visit.row] = behind - visit.penalty
            gains[visit.row] = behind - value[visit.row]
    return scores, gains


def g2po(graph: Graph, gamma: float, compared: Comparison) -> Values:
    """Scores compared inside their node plus gains compared over their group."""
    scores, gains = edges(graph, gamma)
    local = compared(graph.nodes, scores)
    climbed = compared(graph.by(lambda visit: visit.node[0]), gains)
    return {row: local[row] + climbed[row] for row in local}


METHODS: dict[CreditMethod, Callable[[Graph, float, Comparison], Values]] = {
    "gigpo": gigpo,
    "g2po": g2po,
}


def step_credit(
    batch: Batch, method: CreditMethod, *, gamma: float, compared: Comparison
) -> StepCredit:
    """Credit of every row of an optimizer step by `method`; see `transition_graph` for errors."""
    graph = transition_graph(batch)
    steps = {v.row: float(len(visits)) for visits in graph.trajectories for v in visits}
    nodes = graph.nodes
    return StepCredit(
        values=_placed(METHODS[method](graph, gamma, compared), batch),
        shared=_placed({row: float(len(rows) > 1) for rows in nodes for row in rows}, batch),
        steps=_placed(steps, batch),
        num_nodes=len(nodes),
    )


def _placed(values: Values, batch: Batch) -> Tensor:
    out = [values.get(row, 0.0) for row in range(batch.num_rows)]
    return torch.tensor(out, dtype=torch.float32, device=batch.rewards.device)


def critical_scores(returns: Tensor, states: Tensor) -> Tensor:
    """How critical the step of a row was, by statistics alone: [B] returns of the trajectories and
    [B] numbers of states -> [B], 0 for most.

    var * (max(mean - r, 0) + 1e-6) within a state that at least two rows acted in and whose
    variance (population) reaches the 0.75 quantile of all such states. The selector that the
    released code of OPID (arXiv 2606.26790) carries beside its analyst; a trajectory's critical
    step is the one with the highest score.
    """
    scores = torch.zeros_like(returns)
    shared = [rows for s in states.unique() if len(rows := (states == s).nonzero()[:, 0]) > 1]
    if not shared:
        return scores
    spreads = torch.stack([returns[rows].var(unbiased=False) for rows in shared])
    least = spreads.quantile(0.75)
    for rows, spread in zip(shared, spreads, strict=True):
        if spread >= least:
            missed = (returns[rows].mean() - returns[rows]).clamp(min=0.0)
            scores[rows] = spread * (missed + 1e-6)
    return scores
