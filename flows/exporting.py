"""Weights as one ordinary model folder, for programs that know nothing of adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from distill.config import Config
from distill.engines.publishing import make_probe, mean_change
from distill.errors import CheckpointError
from distill.policy import Policy
from distill.rundir import staged_dir
from flows.night import Night, load_student

ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Mean change of a log-probability, in nats, that merging and rounding may cause."""
Dtype = Literal["float32", "bfloat16", "float16"]


def export(night: Night, config: Config, weights: Path, out: Path, *, dtype: Dtype) -> float:
    """Write whole weights and their tokenizer to `out`, which must not exist yet; returns the mean
    change of the log-probabilities of a probe, in nats.

    An adapter is merged in float32, into a copy of its base that exists for this alone.
    CheckpointError when what would be written says something else than what was read.
    """
    exact = replace(config, model=replace(config.model, dtype="float32", device="cpu"))
    student = load_student(night, exact, weights)
    policy, tokenizer = student.policy, student.chat.tokenizer
    num_ids = min(len(tokenizer), policy.head().vocab_size)
    before = make_probe(policy, num_ids=num_ids)
    model = policy.model
    if policy.kind == "adapter":
        model = model.merge_and_unload(safe_merge=True)
    model = model.to(getattr(torch, dtype))
    after = make_probe(Policy(model, base=policy.base, trainable=False), num_ids=num_ids)
    gap = mean_change(before.logprobs, after.logprobs)
    if not gap <= ROUNDING[dtype]:
        raise CheckpointError(
            f"the merged weights of {weights} differ from the adapter's by {gap:.3g} nats per "
            f"token, expected at most {ROUNDING[dtype]:g} in {dtype}; nothing was written; export "
            "in float32"
        )
    with staged_dir(out) as partial:
        model.save_pretrained(str(partial))
        tokenizer.save_pretrained(str(partial))
    return gap
