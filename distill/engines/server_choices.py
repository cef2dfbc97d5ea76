"""Choosing among given replies with a server: it scores every one, the draw is made here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distill.engines.choosing import check_choices, draw_choice
from distill.engines.server_answers import PromptScores
from distill.errors import ConfigError
from distill.types import Completion, Sampling, StopReason

Score = Callable[[Sequence[tuple[int, ...]], Sequence[int]], list[PromptScores]]
"""(rows of ids, where each reply begins) -> the log-probabilities of every reply's tokens."""


def choose(
    prompts: Sequence[tuple[int, ...]], sampling: Sampling, score: Score
) -> list[list[Completion]]:
    """[P] prompts with `sampling.choices` -> [P][num_samples], as every engine chooses.

    ConfigError for a temperature that a server cannot score at; EngineError for an empty choice and
    for one that does not end with a stop token.
    """
    if sampling.temperature not in (0.0, 1.0):
        raise ConfigError(
            f"a server scores replies at temperature 1, asked was {sampling.temperature:g}; set "
            'sampling.temperature to 1 (or 0), or use engine.name = "hf"'
        )
    check_choices(sampling.choices, sampling)
    flat = [(i, ids) for i, allowed in enumerate(sampling.choices) for ids in allowed]
    rows = [(*prompts[i], *ids) for i, ids in flat]
    scored = iter(score(rows, [len(prompts[i]) for i, _ in flat]))
    found = []
    for allowed, key in zip(sampling.choices, sampling.keys, strict=True):
        own = [next(scored).logprobs for _ in allowed]
        totals = torch.tensor([sum(values) for values in own], dtype=torch.float64)
        found.append(
            [
                Completion(token_ids=tuple(allowed[i]), logprobs=own[i], stop=StopReason.STOP)
                for i in draw_choice(totals, sampling, key)
            ]
        )
    return found
