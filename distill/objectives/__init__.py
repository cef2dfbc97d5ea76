"""One file per algorithm. `OBJECTIVES` is the literal table of names; README.md is made from it."""

from __future__ import annotations

from distill.objectives.anti_sd import AntiSD
from distill.objectives.base import Objective
from distill.objectives.g_opd import GOPD
from distill.objectives.gkd import GKD
from distill.objectives.gold import Gold
from distill.objectives.grpo import DAPO, GRPO, DrGRPO
from distill.objectives.omni_opd import OmniOPD
from distill.objectives.opd import OPD
from distill.objectives.opid import OPID
from distill.objectives.opsa import OPSA
from distill.objectives.opsd import OPSD
from distill.objectives.power_opd import PowerOPD
from distill.objectives.rlsd import RLSD
from distill.objectives.sdft import SDFT
from distill.objectives.sdpo import SDPO
from distill.objectives.seed import SEED
from distill.objectives.sft import SFT
from distill.objectives.surprise import Surprise

OBJECTIVES: dict[str, type[Objective]] = {
    "sft": SFT,
    "opd": OPD,
    "gkd": GKD,
    "gold": Gold,
    "g_opd": GOPD,
    "power_opd": PowerOPD,
    "opsd": OPSD,
    "sdft": SDFT,
    "sdpo": SDPO,
    "rlsd": RLSD,
    "anti_sd": AntiSD,
    "opsa": OPSA,
    "omni_opd": OmniOPD,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "seed": SEED,
    "opid": OPID,
    "surprise": Surprise,
}
