"""Chunked divergence against the dense form on a large vocabulary: time, memory, gradient."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tree import ROOT

pytestmark = pytest.mark.slow


def measure(tokens: int, repeat: int = 1) -> dict[str, object]:
    made = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "divergence.py"),
            f"--tokens={tokens}",
            f"--repeat={repeat}",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    found: dict[str, object] = json.loads(made.stdout)
    return found


def test_many_tokens_cost_an_eighth_of_the_memory_and_no_more_time():
    found = measure(4096)
    time, extra = found["seconds"], found["extra_bytes"]
    assert extra["chunked"] <= extra["dense"] / 8
    assert time["chunked"] <= time["dense"]
    assert found["gap"] <= 1e-5


def test_few_tokens_cost_a_fifth_more_time_at_most():
    found = measure(256, repeat=5)
    assert found["seconds"]["chunked"] <= 1.2 * found["seconds"]["dense"]
    assert found["gap"] <= 1e-5


def test_extra_memory_does_not_grow_with_the_tokens_beyond_their_hidden_states():
    few, many = (measure(n)["extra_bytes"]["chunked"] for n in (1024, 4096))
    hidden = 3072 * 576 * 4  # one float32 copy of the additional hidden states
    assert many - few <= 4 * hidden  # rows, their gradient, the sums ahead and at the end
