"""FSDP2 on nccl: as many processes as there are GPUs, two at most, train as one process does."""

from __future__ import annotations

import json

import pytest
import torch

from distill import parallel
from parallel_worker import Scenario, gaps, outcome, run, torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
SCENARIOS = {
    "full": {},
    "adapter": {"kind": "adapter", "teacher": "base", "follower": "snapshot"},
    "bfloat16": {"dtype": "bfloat16", "last": 2},
}


@pytest.mark.timeout(180)
def test_processes_on_gpus_train_as_one_on_the_cpu(tmp_path):
    asked = tmp_path / "scenarios.json"
    asked.write_text(json.dumps({"out": str(tmp_path), "scenarios": SCENARIOS, "device": "cuda"}))
    # A single process in a group still takes every step of sharding and gathering.
    done = torchrun(asked, processes=min(2, torch.cuda.device_count()))
    assert done.returncode == 0, done.stderr[-4000:]
    for name, options in SCENARIOS.items():
        alone, found = run(Scenario(**options), parallel.single()), outcome(tmp_path, name)
        for ours, theirs in zip(found.numbers, alone.numbers, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2, abs=1e-4), name
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2), name
        if "dtype" not in options:
            assert gaps(found.tensors, alone.tensors)["weight"] < 1e-3, name
