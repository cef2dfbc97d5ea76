"""What a completion server of the OpenAI protocol, as vLLM speaks it, answers: read by token id.

Every reader takes a response of status 200 and returns checked numbers, or raises `Unusable`: the
answer is asked for again, and the call ends with an error after too many of them. Nothing is read
by rank or by text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from distill.calls import Unusable, read_json
from distill.types import Completion, StopReason

IMPOSSIBLE = -9999.0
"""What vLLM writes for a log-probability of minus infinity, which JSON cannot hold."""
ROUNDING = 1e-3
"""A log-probability may exceed 0 by this much."""
FINISHED = ("stop", "length")
OWN_SETTINGS = "start the server with --generation-config vllm"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleReader:
    """Reads the `n` samples of one prompt."""

    prompt: tuple[int, ...]
    n: int
    vocab_size: int
    max_new_tokens: int
    stop_token_ids: frozenset[int]

    def __call__(self, response: httpx.Response) -> list[Completion]:
        choices = _choices(response, self.n)
        return [self._completion(choice) for choice in choices]

    def _completion(self, choice: Mapping[str, Any]) -> Completion:
        reason = choice.get("finish_reason")
        if reason not in FINISHED:
            raise Unusable(f"a sample ended with finish_reason {_shown(reason)}")
        ids = _ids(choice.get("token_ids"), "token_ids")
        asked = choice.get("prompt_token_ids")
        if asked is not None and tuple(_ids(asked, "prompt_token_ids")) != self.prompt:
            raise Unusable(
                f"it worked on another prompt of {len(asked)} ids than the {len(self.prompt)} that "
                "were sent",
                "check that nothing between here and the server changes requests",
                fatal=True,
            )
        found = choice.get("logprobs")
        values = found.get("token_logprobs") if isinstance(found, Mapping) else None
        if not isinstance(values, list) or len(values) != len(ids):
            number = len(values) if isinstance(values, list) else "no"
            raise Unusable(f"it sent {number} log-probabilities for {len(ids)} ids")
        names = found.get("tokens") if isinstance(found, Mapping) else None
        if names is not None and names != [f"token_id:{i}" for i in ids]:
            raise Unusable("its log-probabilities belong to other tokens than its ids")
        self._check(ids, reason)
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(_number(x, f"token {i + 1}") for i, x in enumerate(values)),
            stop=StopReason.STOP if ids[-1] in self.stop_token_ids else StopReason.LENGTH,
        )

    def _check(self, ids: Sequence[int], reason: str) -> None:
        if not 1 <= len(ids) <= self.max_new_tokens:
            raise Unusable(f"a sample has {len(ids)} ids, asked were 1 to {self.max_new_tokens}")
        foreign = [i for i in ids if i >= self.vocab_size]
        if foreign:
            raise Unusable(
                f"it sampled the id {foreign[0]}, but the student's vocabulary has "
                f"{self.vocab_size} entries",
                "serve the student's own model, or cut its embedding to the same width",
                fatal=True,
            )
        if any(i in self.stop_token_ids for i in ids[:-1]):
            raise Unusable("a sample goes on behind a stop token", fatal=True)
        if reason == "stop" and ids[-1] not in self.stop_token_ids:
            raise Unusable(
                f"it stopped at the id {ids[-1]}, which is not in the stop set "
                f"{sorted(self.stop_token_ids)}",
                f"{OWN_SETTINGS}, or add that token to model.stop",
                fatal=True,
            )
        if reason == "length" and len(ids) < self.max_new_tokens:
            raise Unusable(
                f"it cut a sample at {len(ids)} of {self.max_new_tokens} tokens",
                f"{OWN_SETTINGS} and a larger --max-model-len",
                fatal=True,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScores:
    """What a model says of some tokens of a sequence, each given what precedes it."""

    logprobs: tuple[float, ...]  # [C]
    top: tuple[Mapping[int, float], ...]  # [C] id -> log-probability, the k best, best first


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptReader:
    """Reads the log-probabilities of the tokens at `positions` of a prompt, and those of the `k`
    most likely ids there.

    The entry of the first token is null, as nothing precedes it. A server sends k entries, and one
    more where the token itself is not among them. Ids from `num_ids` on are padding of a wider
    model and are left out.
    """

    prompt: tuple[int, ...]
    positions: tuple[int, ...]
    k: int = 0
    num_ids: int | None = None

    def __call__(self, response: httpx.Response) -> PromptScores:
        (choice,) = _choices(response, 1)
        rows = choice.get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(self.prompt):
            number = len(rows) if isinstance(rows, list) else "no"
            raise Unusable(
                f"it sent {number} entries of prompt_logprobs for {len(self.prompt)} tokens",
                "use a vLLM server, which answers prompt_logprobs",
            )
        if rows[0] is not None:
            raise Unusable("the first entry of prompt_logprobs should be null, it is not")
        logprobs, tops = [], []
        for place in self.positions:
            token, top = self.prompt[place], self._entries(rows[place], place)
            self._check(token, top, place)
            logprobs.append(top[token])
            tops.append(self._best(top))
        return PromptScores(logprobs=tuple(logprobs), top=tuple(tops))

    def _check(self, token: int, top: Mapping[int, float], place: int) -> None:
        if self.num_ids is not None and token >= self.num_ids:
            raise Unusable(
                f"the id {token} stands at token {place + 1}, but the student's vocabulary has "
                f"{self.num_ids} entries",
                "check what made these tokens",
                fatal=True,
            )
        if token not in top:
            raise Unusable(f"the log-probability of token {place + 1}, id {token}, is missing")
        if top[token] <= IMPOSSIBLE:
            raise Unusable(
                f"token {place + 1}, id {token}, has probability 0",
                "the model rules out what the student wrote: check that it has the student's "
                "vocabulary and that nothing masks its logits",
            )
        if len(top) < self.k:
            raise Unusable(
                f"it sent {len(top)} of {self.k} candidates at token {place + 1}",
                f"start the server with --max-logprobs {self.k}, or more",
            )

    def _best(self, top: Mapping[int, float]) -> dict[int, float]:
        """By value and id, never by the order in which they came."""
        known = [i for i in top if self.num_ids is None or i < self.num_ids]
        best = sorted(known, key=lambda i: (-top[i], i))[: self.k]
        return {i: -math.inf if top[i] <= IMPOSSIBLE else top[i] for i in best}

    def _entries(self, row: Any, place: int) -> dict[int, float]:
        if not isinstance(row, Mapping):
            raise Unusable(f"entry {place + 1} of prompt_logprobs is {_shown(row)}")
        found = {}
        for name, entry in row.items():
            value = entry.get("logprob") if isinstance(entry, Mapping) else None
            if not name.isdecimal():
                raise Unusable(f"entry {place + 1} of prompt_logprobs has the id {_shown(name)}")
            found[int(name)] = _number(value, f"id {name} at token {place + 1}", finite=False)
        return found


def _choices(response: httpx.Response, n: int) -> list[Mapping[str, Any]]:
    """The n choices of a decoded answer, in order."""
    data = read_json(response)
    choices = data.get("choices") if isinstance(data, Mapping) else None
    if not isinstance(choices, list) or not all(isinstance(c, Mapping) for c in choices):
        raise Unusable("its JSON had no list of choices", "check that the address is a vLLM server")
    if len(choices) != n:
        raise Unusable(f"it sent {len(choices)} of {n} choices")
    ordered = sorted(choices, key=lambda c: c.get("index") if type(c.get("index")) is int else -1)
    if [c.get("index") for c in ordered] != list(range(n)):
        raise Unusable(f"its choices are not numbered from 0 to {n - 1}")
    return ordered


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise Unusable(
            f"it sent no {name}", "use vLLM 0.10.2 or newer, which knows return_token_ids"
        )
    return value


def _number(value: Any, what: str, *, finite: bool = True) -> float:
    """A log-probability: a number, at most 0 up to rounding."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and value <= ROUNDING
    if not good or (finite and value <= IMPOSSIBLE):
        raise Unusable(f"the log-probability of {what} is {_shown(value)}")
    return min(float(value), 0.0)


def _shown(value: Any) -> str:
    return repr(value)[:40]
