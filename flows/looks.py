"""What the looks of a stage at its failures found and did: the lines of `bank.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flows.paired import PairedGain

LOOKS = "bank.jsonl"
"""Beside a stage's checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What one look found and did. `version` is the bank's from this step on."""

    step: int
    version: str
    rates: Mapping[str, float]
    weak: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    """New skills that were not kept, with the reason."""
    retired: tuple[str, ...] = ()
    """Skills that were shown too often to too little avail."""
    gains: tuple[PairedGain, ...] = ()
    num_tokens: int = 0
    """Tokens that the student sampled for it."""

    def metrics(self) -> Mapping[str, float]:
        return {
            "skills/evolve_tokens": float(self.num_tokens),
            "skills/weak_families": float(len(self.weak)),
            "skills/added": float(len(self.added)),
            "skills/refused": float(len(self.refused)),
        }
