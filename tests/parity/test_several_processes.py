"""Two processes that share the weights (FSDP2, gloo) train as one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distill import parallel
from distill.ledger import Ledger
from distill.objectives.base import Metric
from distill.parallel import Group, rows_of
from parallel_worker import Scenario, gaps, outcome, run, torchrun

SCENARIOS: dict[str, dict[str, Any]] = {
    "all weights, tied head": {},
    "all weights, own head": {"tied": False, "objective": "opd", "follower": "snapshot"},
    "float64": {"dtype": "float64", "grad_clip": 0.05},
    "bfloat16": {"dtype": "bfloat16", "last": 2},
    "adapter against its base": {"kind": "adapter", "teacher": "base", "follower": "snapshot"},
    "adapter with rewards": {"kind": "adapter", "objective": "grpo"},
    "base of all weights": {"teacher": "base", "objective": "opsd", "num_rows": 5},
    "moving average": {"teacher": "ema", "objective": "sdpo", "num_rows": 8},
    "layers computed again": {"recompute": True, "last": 2, "follower": ""},
    "worked solutions": {"objective": "sft", "num_rows": 3, "follower": ""},
    "a row for one process alone": {"num_rows": 1, "last": 2},
    "different rows": {"other_rows": True, "follower": ""},
}
FLOAT32 = [n for n, options in SCENARIOS.items() if not {"dtype", "other_rows"} & set(options)]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what two processes found for every scenario."""
    out = tmp_path_factory.mktemp("together")
    asked = out / "scenarios.json"
    asked.write_text(json.dumps({"out": str(out), "scenarios": SCENARIOS}))
    done = torchrun(asked)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.parametrize("name", FLOAT32)
def test_every_step_has_the_loss_gradient_and_metrics_of_one_process(name, together):
    alone, both = run(Scenario(**SCENARIOS[name]), parallel.single()), outcome(together, name)
    assert len(alone.numbers) == len(both.numbers)
    for ours, theirs in zip(both.numbers, alone.numbers, strict=True):
        assert set(ours) == set(theirs)
        for key in ours:
            assert ours[key] == pytest.approx(theirs[key], abs=1e-5), key
        assert theirs["grad_norm"] > 1e-3, "a gradient of nothing proves nothing"
    found = gaps(both.tensors, alone.tensors)
    assert found.pop("replies") == 0
    assert max(found.values()) < 1e-5, found


def test_four_adam_steps_in_float64_end_with_the_same_weights(together):
    alone = run(Scenario(**SCENARIOS["float64"]), parallel.single())
    both = outcome(together, "float64")
    assert len(both.numbers) == 4
    assert gaps(both.tensors, alone.tensors)["weight"] < 1e-7


def test_half_precision_gradients_are_summed_in_float32(together):
    alone = run(Scenario(**SCENARIOS["bfloat16"]), parallel.single())
    both = outcome(together, "bfloat16")
    for ours, theirs in zip(both.numbers, alone.numbers, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.02)


def test_processes_with_different_rows_are_told_who_differs(together):
    ((told,),) = outcome(together, "different rows").numbers
    assert told.startswith("the batch of step 1 of process 1 of 2 is not that of process 0")


def test_every_row_of_a_tensor_belongs_to_one_process_as_torch_cuts_it():
    for length in range(1, 12):
        for size in range(1, 6):
            cut = [rows_of(length, rank, size) for rank in range(size)]
            pieces = [len(piece) for piece in torch.arange(length).chunk(size)]
            sizes = [stop - start for start, stop in cut]
            assert sizes == pieces + [0] * (size - len(pieces))


def test_metrics_of_processes_are_merged_exactly(monkeypatch):
    def ledger(values: list[float]) -> Ledger:
        tensor = torch.tensor([values])
        made = Ledger(loss=sum(values))
        for reduce in ("mean", "sum", "min", "max", "quantiles"):
            metric = Metric(values=tensor, weights=torch.ones_like(tensor), reduce=reduce)
            made.add_metric(reduce, metric)
        return made

    sent = []
    monkeypatch.setattr(Group, "gather", lambda self, mine: [sent.append(mine), *sent][1:])
    group = Group(size=2, mesh="of two")
    ledger([1.0, 5.0]).merged(group)
    merged = ledger([2.0, 3.0, 4.0]).merged(group)
    expected = ledger([1.0, 5.0, 2.0, 3.0, 4.0])
    assert merged.metrics() == expected.metrics()
    assert merged.loss == expected.loss
