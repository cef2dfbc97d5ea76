"""A teacher behind a stock vLLM server: scores token ids at temperature 1, its best k ids beside.

What such a server cannot give are its log-probabilities of ids that the student names, entropies
and whole distributions; `distill teacher serve` can.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from distill.calls import CallRules, check_key_name, check_urls, rules_of
from distill.engines.server_answers import PromptReader, PromptScores
from distill.engines.server_handshake import base_address, handshake, require_room
from distill.engines.server_requests import COMPLETIONS, scoring_body
from distill.errors import ConfigError, TeacherError
from distill.replicas import Replicas
from distill.types import ScoreRequest, Scores, TeacherView

if TYPE_CHECKING:
    from distill.divergence import Distribution

LABEL = "teacher"
CAPABILITIES = frozenset({"logprobs", "own_top_k"})
OWN_SERVER = "use `distill teacher serve`, which answers that"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerTeacherOptions:
    """name = "server": any stock vLLM server that serves the teacher, by its address."""

    urls: tuple[str, ...]
    """Base addresses of equal servers, such as ["http://127.0.0.1:8000"]."""
    model: str
    """The name under which the servers list the teacher."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty for none. The key itself is never kept."""
    timeout: float = 120.0
    """Seconds for one request: the scores of one reply."""
    deadline: float = 3600.0
    """Seconds for everything that one step asks; so long a server may be away, as in a restart."""
    retries: int = 5
    """Unusable answers that are forgiven per reply."""
    backoff: float = 1.0
    """Seconds before the first new try, doubled each time, at most 30; Retry-After is obeyed."""
    concurrency: int = 8
    """Requests under way at once, per server. Scoring takes a server memory that it did not plan
    for: [positions x vocabulary] in float32 per request."""

    def __post_init__(self) -> None:
        check_urls(self.urls, f"{LABEL}.urls")
        check_key_name(self.api_key_env, LABEL)
        self.rules()
        if not self.model:
            raise ConfigError(f"{LABEL}.model is empty; name a model that the servers list")

    def rules(self) -> CallRules:
        return rules_of(self, LABEL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerReport:
    """What a probe of the servers found."""

    longest: int
    """Tokens of the longest sequence that every server scored."""
    seconds: float
    """What that took the slowest server."""
    largest_gap: float
    """Largest difference, in nats, between two scores of the same token: asked for in another
    order, or of another server."""


class ServerTeacher:
    """Scores with the servers of `options`.

    `num_ids` is the width of the student's head, `k` the most candidates that will be asked for,
    `temperature` the one that the student samples at. Construction asks every server for its model,
    its tokenizer and k candidates, so that nothing of this fails at night.
    Raises ConfigError for what does not fit, TeacherError for a server that does not answer.
    """

    capabilities = CAPABILITIES

    def __init__(
        self,
        options: ServerTeacherOptions,
        *,
        num_ids: int,
        k: int = 0,
        temperature: float = 1.0,
        tokenizer: Any = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        require_temperature(temperature)
        self.options = options
        self.name = options.model
        self.tokens_scored = 0
        """Trained tokens that were scored so far."""
        self._num_ids = num_ids
        self._replicas = Replicas(
            [base_address(url) for url in options.urls],
            rules=options.rules(),
            label=LABEL,
            error=TeacherError,
            api_key_env=options.api_key_env,
            transport=transport,
        )
        self._served = handshake(self._replicas, options.model, LABEL, tokenizer)
        self._ask_for(k)

    @property
    def bytes_received(self) -> int:
        return self._replicas.bytes_received

    def score(self, views: Sequence[TeacherView], want: ScoreRequest) -> list[Scores]:
        """Log-probabilities of the trained tokens, and of the teacher's own best ids where asked.

        Raises ConfigError for what a stock server cannot answer, TeacherError after the last try.
        """
        if want.entropy or want.candidate_ids is not None:
            what = "entropies" if want.entropy else "scores of ids that the student names"
            raise ConfigError(f"a stock server gives no {what}; {OWN_SERVER}")
        if want.candidates > self._num_ids:
            raise ConfigError(
                f"{want.candidates} candidates were asked for, the vocabulary has {self._num_ids} "
                "entries; lower objective.k"
            )
        asked = [view for view in views if view.positions]
        require_room(1 + max((_end(view) for view in asked), default=0), self._served, LABEL)
        found = iter(self._scored(self._replicas, asked, want.candidates))
        scores = [
            self._scores(view, next(found) if view.positions else _NOTHING, want.candidates)
            for view in views
        ]
        self.tokens_scored += sum(len(view.positions) for view in views)
        return scores

    def distribution(self, views: Sequence[TeacherView]) -> Distribution:
        raise ConfigError(f"a stock server gives no whole distributions; {OWN_SERVER}")

    def probe(self, longest: int, k: int, *, tolerance: float = 0.05) -> ServerReport:
        """Score a sequence of `longest` tokens with k candidates on every server, and three short
        ones in two orders.

        TeacherError when a server cannot, when two scores of a token differ by more than
        `tolerance` nats, and when the candidates of a token have more than all the probability.
        """
        require_room(longest + 1, self._served, LABEL)
        rows = [[(7 * i + 3 * j) % self._num_ids for i in range(12)] for j in range(3)]
        views = [_whole(row, f"probe{j}") for j, row in enumerate(rows)]
        long = _whole([(11 * i) % self._num_ids for i in range(longest)], "longest")
        seen: list[list[PromptScores]] = []
        seconds = 0.0
        for url in self._replicas.urls:
            one = self._replicas.only(url)
            begun = time.monotonic()
            self._scored(one, [long], k)
            seconds = max(seconds, time.monotonic() - begun)
            seen.append(self._scored(one, views, k))
            seen.append(self._scored(one, views[::-1], k)[::-1])
        gap = 0.0
        for row, view in enumerate(views):
            gap = max(gap, _gap([scores[row] for scores in seen]))
            self._require_agreement(gap, tolerance, view)
        return ServerReport(longest=longest, seconds=seconds, largest_gap=gap)

    def _require_agreement(self, gap: float, tolerance: float, view: TeacherView) -> None:
        if not gap <= tolerance:
            raise TeacherError(
                f"{LABEL} at {', '.join(self._replicas.urls)} gives one token of {view.id} scores "
                f"that differ by {gap:.3g} nats (allowed {tolerance:g}), depending on order or "
                "server; serve the same model in the same dtype everywhere, or start the server "
                "with --no-enable-prefix-caching"
            )

    def _ask_for(self, k: int) -> None:
        """Make sure that every server gives k candidates, before anything depends on it."""
        few = f"start the server with --max-logprobs {k} or more, or lower objective.k"
        prompt = (0, min(1, self._num_ids - 1))
        reader = PromptReader(prompt=prompt, positions=(1,), k=k, num_ids=self._num_ids)
        body = scoring_body(self.options.model, prompt, k)
        for scores in self._replicas.each(COMPLETIONS, reader, body=body, hints={400: few}):
            mass = sum(math.exp(x) for x in scores.top[0].values())
            if mass > 1.01:
                raise TeacherError(
                    f"{LABEL} at {', '.join(self._replicas.urls)} gives {k} ids {mass:.3g} of the "
                    "probability; start it with --logprobs-mode raw_logprobs"
                )

    def _scored(
        self, replicas: Replicas, views: Sequence[TeacherView], k: int
    ) -> list[PromptScores]:
        # What stands behind the last trained token changes nothing and is not sent.
        prompts = [view.token_ids[: _end(view)] for view in views]
        readers = [
            PromptReader(prompt=prompt, positions=view.positions, k=k, num_ids=self._num_ids)
            for prompt, view in zip(prompts, views, strict=True)
        ]
        bodies = [scoring_body(self.options.model, prompt, k) for prompt in prompts]
        return replicas.post(COMPLETIONS, bodies, readers)

    def _scores(self, view: TeacherView, found: PromptScores, k: int) -> Scores:
        # Short rows are filled: minus infinity marks an entry that is none.
        tops = [[*top.items(), *[(0, -math.inf)] * (k - len(top))] for top in found.top]
        ids = tuple(tuple(i for i, _ in top) for top in tops)
        values = tuple(tuple(x for _, x in top) for top in tops)
        return Scores(
            logprobs=found.logprobs,
            source=f"server:{self.name}",
            view_id=view.id,
            candidate_ids=ids if k else None,
            candidate_logprobs=values if k else None,
        )


def require_temperature(temperature: float) -> None:
    """ConfigError unless a stock server scores at the temperature that the student samples at."""
    if temperature != 1.0:
        raise ConfigError(
            f'teacher.name = "server" scores at temperature 1, but sampling.temperature is '
            f"{temperature:g}: equal models would seem to differ; set sampling.temperature = 1, or "
            "use `distill teacher serve`, which scores at any"
        )


_NOTHING = PromptScores(logprobs=(), top=())


def _end(view: TeacherView) -> int:
    return max(view.positions) + 1


def _whole(ids: Sequence[int], name: str) -> TeacherView:
    return TeacherView(
        token_ids=tuple(ids), positions=tuple(range(1, len(ids))), kind="probe", id=name
    )


def _gap(scores: Sequence[PromptScores]) -> float:
    """Largest difference between several scores of the same tokens."""
    columns = zip(*(found.logprobs for found in scores), strict=True)
    return max(max(column) - min(column) for column in columns)
