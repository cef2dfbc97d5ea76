"""A teacher behind `distill teacher serve`: everything that a local one gives, over the network.

Log-probabilities, entropies and candidates come as float32. For a full distribution the hidden
states of the trained tokens travel (d values per token, 2 bytes each for a half type) and the
teacher's head, V times d values, is fetched once and kept on the student's device; so the reverse
KL is exact. Views that share a request are those that a local teacher would compute together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import httpx
import numpy as np
import torch
from torch import Tensor

from distill.distributions import HiddenDistribution
from distill.divergence import Distribution
from distill.errors import ConfigError, DataError, TeacherError
from distill.logprobs import Head
from distill.replicas import Replicas, Unusable
from distill.rundir import digest_json
from distill.tokens import tokenizer_digest
from distill.types import ScoreRequest, Scores, TeacherView
from teachers.local import EVERYTHING
from teachers.remote_options import LIMITS, RemoteOptions, Served
from teachers.scoring import (
    CONTENT_TYPE,
    HALVES,
    Array,
    Question,
    read_head,
    read_hidden,
    read_scores,
    unpack,
)

__all__ = ["RemoteOptions", "RemoteTeacher"]

T = TypeVar("T")
HEAD_PART = 2**26
"""Bytes of the head that one request fetches."""
SLACK = 4096
"""Bytes that the head of a message may take."""


class RemoteTeacher:
    """A `Teacher` over HTTP. Asks the servers who they are when it is made.

    `tokenizer` and `num_ids` are the student's, and its padded vocabulary; `temperature` is that of
    its log-probabilities. ConfigError for a server with another tokenizer or model, TeacherError
    when one cannot be used.
    """

    capabilities = EVERYTHING

    def __init__(
        self,
        options: RemoteOptions,
        *,
        tokenizer: Any,
        num_ids: int,
        temperature: float = 1.0,
        device: torch.device | str = "cpu",
        label: str = "teacher",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.options, self.temperature, self.device = options, temperature, torch.device(device)
        self._replicas = Replicas(
            options.urls,
            rules=options.rules,
            label=label,
            error=TeacherError,
            api_key_env=options.api_key_env,
            transport=transport,
        )
        self._tokenizer = tokenizer_digest(tokenizer)
        self.served = self._greet(len(tokenizer), label)
        self.name = f"{self.served.model} at {', '.join(self._replicas.urls)}"
        # Padding rows of one side are no tokens of the other: only the shared ids are compared.
        widths = {self.served.num_ids, num_ids}
        self.num_ids = None if len(widths) == 1 else min(len(tokenizer), *widths)
        self._head: Head | None = None
        self.num_tokens = 0
        """Trained tokens that were asked about so far."""

    @property
    def num_bytes(self) -> int:
        """Bytes received so far."""
        return self._replicas.bytes_received

    @property
    def identity(self) -> str:
        """Digest of everything but the views that its scores depend on."""
        return digest_json([*self.served.identity, self.num_ids, self.temperature])

    def score(self, views: Sequence[TeacherView], want: ScoreRequest) -> list[Scores]:
        width = self.num_ids or self.served.num_ids
        if want.candidates > width:
            raise ConfigError(
                f"{want.candidates} candidates were asked for, the vocabulary has "
                f"{width} entries; lower objective.k"
            )
        if want.candidates:
            want = replace(want, candidate_ids=None)
        out = [_nothing(view, want, self.name) for view in views]
        for mine, found in self._ask(views, want, read_scores):
            ends = np.cumsum([len(views[i].positions) for i in mine])[:-1]
            cut = {name: np.split(array, ends) for name, array in found.items()}
            for place, i in enumerate(mine):
                own = {name: pieces[place].tolist() for name, pieces in cut.items()}
                out[i] = replace(
                    out[i],
                    logprobs=tuple(own["logprobs"]),
                    entropy=tuple(own["entropy"]) if "entropy" in own else None,
                    candidate_ids=tuple(map(tuple, own["ids"])) if "ids" in own else None,
                    candidate_logprobs=tuple(map(tuple, own["known"])) if "known" in own else None,
                )
        return out

    def distribution(self, views: Sequence[TeacherView]) -> Distribution:
        head, dtype = self.head(), self.served.dtype
        pieces: dict[int, Tensor] = {}
        read = partial(read_hidden, width=self.served.width, dtype=dtype)
        for mine, hidden in self._ask(views, ScoreRequest(), read, hidden=True):
            rows = _as_tensor(hidden, dtype).to(self.device)
            counts = [len(views[i].positions) for i in mine]
            pieces |= dict(zip(mine, rows.split(counts), strict=True))
        rows = torch.cat([pieces[i] for i in sorted(pieces)]) if pieces else head.weight[:0]
        return HiddenDistribution(hidden=rows, head=head.cut(self.num_ids))

    def head(self) -> Head:
        """The teacher's output head on the student's device, fetched when it is first needed."""
        if self._head is None:
            served = self.served
            size = max(1, min(HEAD_PART, served.limits["max_answer_bytes"]) // served.row_bytes)
            parts = []
            for start in range(0, served.num_ids, size):
                stop = min(start + size, served.num_ids)
                read = partial(self._head_part, rows=stop - start)
                parts.append(
                    self._replicas.get(f"/head?start={start}&stop={stop}", read, patient=True)
                )
            weight, bias = (
                [_as_tensor(part[name], served.dtype).to(self.device) for part in parts]
                if name in parts[0]
                else []
                for name in ("weight", "bias")
            )
            self._head = Head(
                weight=torch.cat(weight),
                bias=torch.cat(bias) if bias else None,
                scale=float(served.head["scale"]),
                soft_cap=served.head["soft_cap"],
                temperature=self.temperature,
            )
        return self._head

    # -- inside --------------------------------------------------------------------------------

    def _greet(self, num_tokens: int, label: str) -> Served:
        """What the servers are. They must agree with each other and with the student."""
        found = self._replicas.each("/info", Served.read, patient=True)
        for url, served in zip(self._replicas.urls, found, strict=True):
            if served.tokenizer != self._tokenizer:
                raise ConfigError(
                    f"{label}: {served.model} at {url} has another tokenizer ({served.num_ids} "
                    f"ids, digest {served.tokenizer[:12]}) than the student ({num_tokens} tokens, "
                    f"digest {self._tokenizer[:12]}); distillation on token ids needs the same one"
                )
            if self.options.model and served.model != self.options.model:
                raise ConfigError(
                    f"{label}: the server at {url} should have the model {self.options.model!r}, "
                    f"it has {served.model!r}; correct {label}.model or {label}.urls"
                )
            if served.identity != found[0].identity:
                raise ConfigError(
                    f"{label}.urls must name equal servers, but {url} has {served.model} with "
                    f"weights {served.weights[:12]} and {self._replicas.urls[0]} has "
                    f"{found[0].model} with weights {found[0].weights[:12]}"
                )
        limits = {name: min(s.limits[name] for s in found) for name in LIMITS}
        return replace(found[0], limits=limits)

    def _ask(
        self,
        views: Sequence[TeacherView],
        want: ScoreRequest,
        read: Callable[..., T],
        *,
        hidden: bool = False,
    ) -> Iterator[tuple[list[int], T]]:
        """Numbers of the views that a request was about, and what was read of its answer. Views
        without a trained token are never sent."""
        listed = want.candidate_ids
        cuts = list(self._cuts(views, want, hidden))
        questions = [
            Question.of(
                [views[i] for i in mine],
                want,
                candidate_ids=None if listed is None else [listed[i] for i in mine],
                number=number,
                tokenizer=self._tokenizer,
                temperature=self.temperature,
                num_ids=self.num_ids or self.served.num_ids,
                hidden=hidden,
            )
            for number, mine in enumerate(cuts)
        ]

        def checked(response: httpx.Response) -> T:
            try:
                number = read_head(response.request.content)[0]["number"]
                return read(questions[number], response.content, weights=self.served.weights)
            except DataError as error:
                raise Unusable(
                    f"its answer cannot be used: {error}",
                    "check that the server was not restarted with another model or version",
                ) from None

        bodies = [question.pack() for question in questions]
        answers = self._replicas.post("/score", bodies, checked, content_type=CONTENT_TYPE)
        self.num_tokens += sum(len(question.positions) for question in questions)
        yield from zip(cuts, answers, strict=True)

    def _cuts(
        self, views: Sequence[TeacherView], want: ScoreRequest, hidden: bool
    ) -> Iterator[list[int]]:
        """Views of similar length together, as many as a request and its answer may hold.

        TeacherError for one that is too large alone.
        """
        limits, served = self.served.limits, self.served
        listed = want.candidate_ids
        asked = next((len(row[0]) for row in listed or () if row), 0)
        down = 8 + 4 * want.entropy + 8 * want.candidates + 4 * asked
        down = 4 + served.row_bytes if hidden else down
        room = {
            "tokens": min(self.options.batch_tokens, limits["max_tokens"]),
            "bytes": limits["max_request_bytes"] - SLACK,
            "bytes of answer": limits["max_answer_bytes"] - SLACK,
        }
        cut: list[int] = []
        sent = trained = 0
        trainable = (i for i, view in enumerate(views) if view.positions)
        for i in sorted(trainable, key=lambda i: (len(views[i].token_ids), i)):
            length, count = len(views[i].token_ids), len(views[i].positions)
            own = 8 + 4 * length + 4 * count * (1 + asked)
            alone = {"tokens": length, "bytes": own, "bytes of answer": down * count}
            over = [name for name in alone if alone[name] > room[name]]
            if over and not (over == ["tokens"] and length <= limits["max_tokens"]):
                raise TeacherError(
                    f"the view {views[i].id} needs {alone[over[0]]} {over[0]}, but {self.name} "
                    f"takes at most {room[over[0]]} per request; start it with a larger limit, or "
                    "lower the length of replies or objective.k"
                )
            full = (
                (len(cut) + 1) * length > room["tokens"]
                or sent + own > room["bytes"]
                or (trained + count) * down > room["bytes of answer"]
                or len(cut) == limits["max_views"]
            )
            if cut and full:
                yield cut
                cut, sent, trained = [], 0, 0
            cut.append(i)
            sent, trained = sent + own, trained + count
        if cut:
            yield cut

    def _head_part(self, response: httpx.Response, *, rows: int) -> dict[str, Array]:
        try:
            head, arrays = unpack(response.content)
        except DataError as error:
            raise Unusable(f"its head cannot be read: {error}") from None
        shapes = {name: (*array.shape, str(array.dtype)) for name, array in arrays.items()}
        kind = "uint16" if self.served.dtype in HALVES else "float32"
        expected: dict[str, tuple[int | str, ...]] = {"weight": (rows, self.served.width, kind)}
        if self.served.head["bias"]:
            expected["bias"] = (rows, kind)
        if shapes != expected or head.get("weights") != self.served.weights:
            raise Unusable(
                f"its head should hold {expected} of weights {self.served.weights[:12]}, it holds "
                f"{shapes} of {str(head.get('weights'))[:12]}",
                "check that the server was not restarted with another model",
            )
        return arrays


def _nothing(view: TeacherView, want: ScoreRequest, source: str) -> Scores:
    """The scores of a view without a trained token."""
    listed = bool(want.candidates) or want.candidate_ids is not None
    return Scores(
        logprobs=(),
        source=source,
        view_id=view.id,
        entropy=() if want.entropy else None,
        candidate_ids=() if listed else None,
        candidate_logprobs=() if listed else None,
    )


def _as_tensor(array: Array, dtype: str) -> Tensor:
    """An array of an answer as a tensor of the type that it has at the server."""
    if dtype in HALVES:
        half: torch.dtype = getattr(torch, dtype)
        return torch.from_numpy(array.view(np.int16)).view(half)
    return torch.from_numpy(array)
