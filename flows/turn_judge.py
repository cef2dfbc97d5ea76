"""A model that judges recorded turns and their demand, as `curriculum.judge` names it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distill.config import Config
from distill.curriculum.demand import DemandInput
from distill.curriculum.judge import JudgeOptions, demand_messages, opinions, parse_demand
from distill.curriculum.profile import Profile
from distill.curriculum.turns import UserTurn
from distill.protocols import TextModel
from distill.sections import Named
from distill.types import Sampling
from flows.hindsight import WRITERS
from flows.naming import construct
from flows.night import Night, load_student
from flows.texting import build_text_model

SECTION = "curriculum.judge"


def judge_options(config: Config) -> Any:
    """The checked options of the judging model; None without one. ConfigError as for any section:
    its name is "black_box" or "text"."""
    table = dict(config.curriculum.judge)
    if not table:
        return None
    named = Named(name=str(table.pop("name", "")), options=table)
    return construct(named, WRITERS, SECTION, config)


def judge_of(night: Night, config: Config) -> TurnJudge | None:
    """The live judge of a stage, or None."""
    options = judge_options(config)
    if options is None:
        return None
    own = night.config.for_stage(night.student_stages[0])
    student = load_student(night, own, None)
    return TurnJudge(build_text_model(options, student, night.locate))


class TurnJudge:
    """Asks a text model; see `distill.curriculum.build.Judge`."""

    def __init__(self, model: TextModel, options: JudgeOptions | None = None) -> None:
        self._model = model
        self._options = options or JudgeOptions()

    def profiles(self, turns: Sequence[tuple[UserTurn, Profile]]) -> list[Profile]:
        """Its view of each turn; NOT_EVALUATED where it cites nothing or cannot be read."""
        return opinions(turns, self._model.complete, self._options)

    def demands(self, wanted: Sequence[DemandInput]) -> list[tuple[float, ...] | None]:
        """Its probabilities of the four tiers; None where it gives none."""
        if not wanted:
            return []
        sampling = Sampling(
            max_new_tokens=self._options.max_tokens,
            temperature=0.0,
            keys=tuple(f"demand/{number}" for number in range(len(wanted))),
        )
        prompts = [demand_messages(one) for one in wanted]
        return [parse_demand(texts[0]) for texts in self._model.complete(prompts, 1, sampling)]
