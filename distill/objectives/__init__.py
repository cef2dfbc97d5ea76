"""One file per algorithm. `OBJECTIVES` is the literal table of names; README.md is made from it."""

from __future__ import annotations

from distill.objectives.base import Objective
from distill.objectives.gkd import GKD
from distill.objectives.grpo import GRPO
from distill.objectives.opd import OPD
from distill.objectives.sft import SFT

OBJECTIVES: dict[str, type[Objective]] = {
    "sft": SFT,
    "opd": OPD,
    "gkd": GKD,
    "grpo": GRPO,
}
