"""An engine behind HTTP: samples from any stock vLLM server, or several equal ones.

Token ids in, token ids and the sampler's log-probabilities out. Every sample has a seed of its own
that depends on the prompt's key and its number only, so an answer that was lost in a restart is
drawn again as it was. The weights reach the servers as a published folder; after every delivery
their log-probabilities are compared with the trainer's.

How a server is started: `python -m vllm.entrypoints.openai.api_server --model FOLDER
--generation-config vllm`, with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True for
adapters, with VLLM_SERVER_DEV_MODE=1 for full weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx

from distill.engines.sampling import check
from distill.engines.server_answers import PromptReader, PromptScores, SampleReader
from distill.engines.server_choices import choose
from distill.engines.server_handshake import (
    base_address,
    handshake,
    require_processed,
    require_room,
)
from distill.engines.server_options import LABEL, PROCESSED, ServerOptions
from distill.engines.server_requests import COMPLETIONS, sampling_body, scoring_body, seed_of
from distill.engines.server_sync import Delivery, Sync
from distill.errors import ConfigError, EngineError
from distill.replicas import CallRules, Replicas
from distill.types import CheckpointRef, Completion, Sampling

__all__ = ["ServerEngine", "ServerOptions"]

logger = logging.getLogger(__name__)
REDONE = 3
"""Times that a window is sampled again because a server came back with other weights in it."""
Prompts = Sequence[Sequence[int]]


class ServerEngine:
    """Samples from the servers of `options`. `vocab_size` is the width of the student's head.

    Construction asks every server for its model, its length limit and, where a tokenizer is given,
    compares that. Raises ConfigError for what does not fit, EngineError for a server that does not
    answer.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        vocab_size: int,
        tokenizer: Any = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.options = options
        self.policy_version = 0
        self.gap = 0.0
        """Largest mean difference from the trainer that was found after the last delivery."""
        self._vocab_size = vocab_size
        self._delivered: Delivery | None = None
        self._mode_is_known = False
        self._replicas = self._servers(options.rules(), transport)
        few = options.scoring_concurrency or options.concurrency
        self._scoring = self._servers(replace(options.rules(), concurrency=few), transport)
        self._sync = Sync(
            base=options.model,
            how=options.sync,
            here=options.path_here,
            there=options.path_there,
            tolerance=options.tolerance,
        )
        self._served = handshake(self._replicas, options.model, LABEL, tokenizer)

    def _servers(self, rules: CallRules, transport: httpx.AsyncBaseTransport | None) -> Replicas:
        return Replicas(
            [base_address(url) for url in self.options.urls],
            rules=rules,
            label=LABEL,
            error=EngineError,
            api_key_env=self.options.api_key_env,
            transport=transport,
            revive=self._revive,
        )

    @property
    def model(self) -> str:
        """The name that is sampled from: the base, or the adapter that was delivered last."""
        return self._delivered.name if self._delivered else self.options.model

    def load(self, checkpoint: CheckpointRef) -> None:
        """Bring published weights to every server and prove that they arrived.

        Raises EngineError when a server does not have them; the version has not moved then.
        """
        old = self._delivered
        new = self._sync.prepare(checkpoint)
        with ThreadPoolExecutor(len(self.urls)) as pool:
            ones = [self._replicas.only(url) for url in self.urls]
            self.gap = max(pool.map(lambda one: self._sync.deliver(one, new), ones))
        self._delivered = new
        self.policy_version = checkpoint.policy_version
        if old is not None and old.name != new.name:
            self._sync.forget(self._replicas, old)

    @property
    def urls(self) -> tuple[str, ...]:
        return self._replicas.urls

    def close(self) -> None:
        """Take back what was delivered; the servers go on. One that is away forgets by itself."""
        sent, self._delivered = self._delivered, None
        if sent is None:
            return
        try:
            self._sync.forget(self._replicas, sent)
        except EngineError as error:
            logger.warning("%s stays on a server: %s", sent.name, error)

    def generate(self, prompts: Prompts, sampling: Sampling) -> list[list[Completion]]:
        """All samples of a window in one go. Raises EngineError after the last try."""
        check(sampling, len(prompts))
        if not all(len(p) for p in prompts):
            raise EngineError("every prompt needs at least one token, one has none")
        if not prompts:
            return []
        self._require_mode(prompts, sampling)
        for _ in range(REDONE):
            found = self._window(prompts, sampling)
            if self._still_has_weights():
                return found
        raise EngineError(
            f"a server of {LABEL}.urls came back with other weights {REDONE} times while it "
            "sampled one window; find out why it restarts"
        )

    def _window(self, prompts: Prompts, sampling: Sampling) -> list[list[Completion]]:
        allowed = sampling.choices or ((),) * len(prompts)
        free = [i for i, only in enumerate(allowed) if not only]
        bound = [i for i, only in enumerate(allowed) if only]
        found: dict[int, list[Completion]] = {}
        longest = max((len(prompts[i]) for i in free), default=0)
        require_room(longest + sampling.max_new_tokens if free else 0, self._served, LABEL)
        requests = [self._request(prompts[i], sampling, _key(sampling, i)) for i in free]
        answers = self._replicas.post(
            COMPLETIONS, [body for body, _ in requests], [reader for _, reader in requests]
        )
        # Greedy samples of a prompt are all the same and asked for once.
        times = sampling.num_samples if sampling.temperature == 0 else 1
        found |= {i: rows * times for i, rows in zip(free, answers, strict=True)}
        if bound:
            some = replace(
                sampling,
                keys=tuple(_key(sampling, i) for i in bound),
                choices=tuple(allowed[i] for i in bound),
            )
            rows = choose([tuple(prompts[i]) for i in bound], some, self._scores)
            found |= dict(zip(bound, rows, strict=True))
        return [found[i] for i in range(len(prompts))]

    def _request(
        self, prompt: Sequence[int], sampling: Sampling, key: str
    ) -> tuple[dict[str, Any], SampleReader]:
        greedy = sampling.temperature == 0
        n = 1 if greedy else sampling.num_samples
        seed = None if greedy else seed_of(key)
        body = sampling_body(self.model, prompt, sampling, n=n, seed=seed)
        reader = SampleReader(
            prompt=tuple(prompt),
            n=n,
            vocab_size=self._vocab_size,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=frozenset(sampling.stop_token_ids),
        )
        return body, reader

    def _scores(self, rows: Sequence[tuple[int, ...]], starts: Sequence[int]) -> list[PromptScores]:
        """What the servers say of the tokens from `starts[i]` on of every row."""
        longest = max(len(row) for row in rows) + 1
        require_room(longest, self._served, LABEL)
        return self._scoring.post(
            COMPLETIONS,
            [scoring_body(self.model, row) for row in rows],
            [
                PromptReader(prompt=row, positions=tuple(range(start, len(row))))
                for row, start in zip(rows, starts, strict=True)
            ],
        )

    def _require_mode(self, prompts: Prompts, sampling: Sampling) -> None:
        """Refuse to record log-probabilities of another distribution than the one sampled from."""
        shaped = sampling.top_p < 1 or sampling.top_k > 0
        if sampling.temperature in (0.0, 1.0) and not (sampling.temperature and shaped):
            return
        if self.options.logprobs_mode != PROCESSED:
            raise ConfigError(
                f"sampling at temperature {sampling.temperature:g}, top_p {sampling.top_p:g} and "
                f"top_k {sampling.top_k} needs servers with --logprobs-mode {PROCESSED} and "
                f'{LABEL}.logprobs_mode = "{PROCESSED}"; otherwise sample at temperature 1 (or 0), '
                "top_p 1, top_k 0"
            )
        if not self._mode_is_known:
            for url in self.urls:
                require_processed(self._replicas.only(url), self.model, prompts[0], LABEL)
            self._mode_is_known = True

    def _still_has_weights(self) -> bool:
        """Whether every server has what was delivered; one that has not gets it again.

        An adapter that is gone is missed by its name. Full weights that a restart undid are not:
        the server goes on with the old ones, so they are compared after every window.
        """
        sent = self._delivered
        if sent is None or self.options.sync == "adapter":
            return True
        good = True
        for url in self.urls:
            one = self._replicas.only(url)
            if not self._sync.holds(one, sent):
                good = False
                self._revive(one)
        return good

    def _revive(self, one: Replicas) -> None:
        """Send a server that is back what it may have lost."""
        if self._delivered is not None:
            logger.warning(
                "%s at %s was away: it gets version %d again",
                LABEL,
                one.urls[0],
                self.policy_version,
            )
            self._sync.deliver(one, self._delivered)


def _key(sampling: Sampling, index: int) -> str:
    return sampling.keys[index] if sampling.keys else ""
