"""What our scoring endpoint and its client say to each other: packed arrays, nothing to unpickle.

A message is `distill1`, the length of its head (uint32), the head (JSON, padded with blanks to a
multiple of four bytes), then the arrays one after the other, little-endian. The head names each
array with its type and shape. Bytes per scored token: 8 for the token's id and log-probability, 4
for the entropy, 4 per id that the student chose, and 6 per id that the teacher chose, or 8 where
its vocabulary is larger than 65536. Values stay float32: half precision would move a night whose
teacher is served away from one whose teacher is local.

B views, N trained tokens of all of them, K candidates, d the width of the hidden states.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.errors import DataError
from distill.types import ScoreRequest, Scores, TeacherView

Array = NDArray[Any]

CONTENT_TYPE = "application/octet-stream"
PROTOCOL = 1
_MAGIC = b"distill1"
_MAX_HEAD = 2**20
_MAX_SIDE = 2**31
_TYPES: dict[str, np.dtype[Any]] = {
    "i4": np.dtype("<i4"),
    "u2": np.dtype("<u2"),
    "f4": np.dtype("<f4"),
}
HALVES = ("float16", "bfloat16")
"""Types of hidden states and heads that travel as their 16 bits; the other one is float32."""
SMALL_IDS = 2**16
"""Ids below it travel in two bytes."""


def pack(head: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """A message of a head, whose values JSON can hold, and arrays of int32, uint16 or float32."""
    codes = {kind: code for code, kind in _TYPES.items()}
    listed = [[name, codes[array.dtype], list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**head, "arrays": listed}, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    parts = [_MAGIC, struct.pack("<I", len(text)), text]
    return b"".join([*parts, *(np.ascontiguousarray(array).tobytes() for array in arrays.values())])


def read_head(data: bytes) -> tuple[dict[str, Any], int]:
    """The head of a message and where its arrays begin. DataError when it is not one of ours."""
    if data[:8] != _MAGIC or len(data) < 12:
        raise DataError(f"a message must begin with {_MAGIC!r} and a length, found {data[:12]!r}")
    (size,) = struct.unpack_from("<I", data, 8)
    if size > min(_MAX_HEAD, len(data) - 12):
        raise DataError(f"the head should have {size} bytes, the message has {len(data) - 12}")
    try:
        head = json.loads(data[12 : 12 + size])
    except (ValueError, RecursionError) as error:
        raise DataError("the head is not JSON") from error
    if not isinstance(head, dict) or not isinstance(head.get("arrays"), list):
        raise DataError("the head must be a JSON object that lists its arrays")
    return head, 12 + size


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Inverse of `pack`. DataError unless every byte is accounted for."""
    head, at = read_head(data)
    arrays: dict[str, Array] = {}
    for entry in head.pop("arrays"):
        name, kind, shape = _array_entry(entry)
        count = math.prod(shape)
        stop = at + count * kind.itemsize
        if stop > len(data) or name in arrays:
            raise DataError(
                f"the array {name!r} should have the shape {shape}, but the message ends after "
                f"{len(data) - at} bytes of it, or it appears twice"
            )
        # A copy: aligned, and writable where a tensor is made of it.
        arrays[name] = np.frombuffer(data, kind, count, at).reshape(shape).copy()
        at = stop
    if at != len(data):
        raise DataError(f"{len(data) - at} bytes follow the last array")
    return head, arrays


def _array_entry(entry: Any) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    if isinstance(entry, list) and len(entry) == 3:
        name, code, shape = entry
        is_shape = isinstance(shape, list) and 1 <= len(shape) <= 2
        is_shape = is_shape and all(type(n) is int and 0 <= n < _MAX_SIDE for n in shape)
        if isinstance(name, str) and isinstance(code, str) and code in _TYPES and is_shape:
            return str(name), _TYPES[code], tuple(shape)
    raise DataError(f"an array is listed as [name, type, shape], found {str(entry)[:80]}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What one request asks. `number` is echoed, so that answers cannot change places."""

    number: int
    tokenizer: str
    """`distill.tokens.tokenizer_digest` of the student's; the server refuses another one."""
    lengths: Array  # [B] int32 tokens of each view
    counts: Array  # [B] int32 trained tokens of each view
    token_ids: Array  # [sum of lengths] int32
    positions: Array  # [N] int32, within their view
    temperature: float = 1.0
    """The student's sampling temperature, which its log-probabilities refer to."""
    num_ids: int | None = None
    """Cut the vocabulary to the ids that both sides share."""
    entropy: bool = False
    candidates: int = 0
    candidate_ids: Array | None = None  # [N, K] int32
    hidden: bool = False
    """Only the hidden states, for exact divergences; nothing else is computed."""

    @classmethod
    def of(
        cls,
        views: Sequence[TeacherView],
        want: ScoreRequest,
        *,
        candidate_ids: Sequence[Sequence[Sequence[int]]] | None = None,
        **settings: Any,
    ) -> Question:
        """The question about these views; `candidate_ids` [B][C][K] replaces those of `want`."""
        listed = None
        if candidate_ids is not None:
            listed = _int32([ids for row in candidate_ids for ids in row])
            listed = listed.reshape(len(listed), -1)
        return cls(
            lengths=_int32([len(v.token_ids) for v in views]),
            counts=_int32([len(v.positions) for v in views]),
            token_ids=_int32([i for v in views for i in v.token_ids]),
            positions=_int32([p for v in views for p in v.positions]),
            entropy=want.entropy,
            candidates=want.candidates,
            candidate_ids=listed,
            **settings,
        )

    @property
    def chosen(self) -> Array:
        """The trained tokens [N] int32."""
        starts = np.cumsum(self.lengths) - self.lengths
        found: Array = self.token_ids[self.positions + np.repeat(starts, self.counts)]
        return found

    def pack(self) -> bytes:
        head = {
            "number": self.number,
            "tokenizer": self.tokenizer,
            "temperature": self.temperature,
            "num_ids": self.num_ids,
            "entropy": self.entropy,
            "candidates": self.candidates,
            "hidden": self.hidden,
        }
        arrays = {name: getattr(self, name) for name in _PARTS}
        if self.candidate_ids is not None:
            arrays["candidate_ids"] = self.candidate_ids
        return pack(head, arrays)

    @classmethod
    def unpack(cls, data: bytes) -> Question:
        """A well-formed question: its lengths fit together. DataError says what does not."""
        head, arrays = unpack(data)
        require(head, _QUESTION)
        odd = set(arrays) - {*_PARTS, "candidate_ids"}
        wrong = [n for n in _PARTS if n not in arrays or arrays[n].ndim != 1]
        wrong += [n for n, a in arrays.items() if a.dtype != np.int32]
        if odd or wrong:
            raise DataError(
                f"a question has the int32 arrays {', '.join(_PARTS)} [of one dimension] and "
                f"perhaps candidate_ids; wrong or missing here: {', '.join(sorted({*odd, *wrong}))}"
            )
        values: dict[str, Any] = {**{n: head[n] for n in _QUESTION}, **arrays}
        question = cls(**values)
        question._check()
        return question

    def _check(self) -> None:
        many = len(self.positions)
        if len(self.lengths) != len(self.counts) or min(_least(self.lengths, self.counts)) < 1:
            raise DataError(
                "every view needs a length and a number of trained tokens, both above 0"
            )
        sums = int(self.lengths.sum(dtype=np.int64)), int(self.counts.sum(dtype=np.int64))
        if sums != (len(self.token_ids), many):
            raise DataError(
                f"the views should have {sums[0]} tokens, {sums[1]} of them trained; found "
                f"{len(self.token_ids)} and {many}"
            )
        # Within a view positions grow; position 0 has nothing before it.
        first = np.cumsum(self.counts) - self.counts
        steps = np.diff(self.positions, prepend=0)
        steps[first] = self.positions[first]
        inside = self.positions < np.repeat(self.lengths, self.counts)
        if not bool((steps > 0).all() and inside.all()):
            raise DataError("positions must be positive, ascending and inside of their view")
        if not 1e-6 <= self.temperature <= 1e6 or self.candidates < 0:
            raise DataError(
                "the temperature must be positive and the number of candidates not negative, found "
                f"{str(self.temperature)[:20]} and {str(self.candidates)[:20]}"
            )
        listed = self.candidate_ids
        if listed is not None and (listed.ndim != 2 or len(listed) != many):
            raise DataError(f"candidate_ids must be [{many}, K], found {list(listed.shape)}")

    def views(self) -> list[TeacherView]:
        """The views as a model reads them."""
        ids = np.split(self.token_ids, np.cumsum(self.lengths)[:-1])
        places = np.split(self.positions, np.cumsum(self.counts)[:-1])
        return [
            TeacherView(
                token_ids=tuple(i.tolist()), positions=tuple(p.tolist()), kind="served", id=str(n)
            )
            for n, (i, p) in enumerate(zip(ids, places, strict=True))
        ]

    def want(self) -> ScoreRequest:
        listed = None
        if self.candidate_ids is not None:
            pieces = np.split(self.candidate_ids, np.cumsum(self.counts)[:-1])
            listed = [piece.tolist() for piece in pieces]
        return ScoreRequest(entropy=self.entropy, candidates=self.candidates, candidate_ids=listed)


_PARTS = ("lengths", "counts", "token_ids", "positions")
_QUESTION: Mapping[str, tuple[type, ...]] = {
    "number": (int,),
    "tokenizer": (str,),
    "temperature": (float, int),
    "num_ids": (int, type(None)),
    "entropy": (bool,),
    "candidates": (int,),
    "hidden": (bool,),
}


def require(head: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]]) -> None:
    """DataError unless the head has every field, each of one of its types."""
    wrong = [n for n, kinds in fields.items() if n not in head or type(head[n]) not in kinds]
    if wrong:
        raise DataError(f"the head has no usable {', '.join(wrong)}")


def answer_scores(question: Question, scores: Sequence[Scores], *, weights: str) -> bytes:
    """The answer with log-probabilities, and whatever else was asked for."""
    arrays = {
        "ids": question.chosen,
        "logprobs": _floats([x for s in scores for x in s.logprobs]),
    }
    if question.entropy:
        arrays["entropy"] = _floats([x for s in scores for x in s.entropy or ()])
    if question.candidates or question.candidate_ids is not None:
        known = _floats([row for s in scores for row in s.candidate_logprobs or ()])
        arrays["known"] = known.reshape(len(arrays["ids"]), -1)
    if question.candidates:
        top = np.asarray([row for s in scores for row in s.candidate_ids or ()], np.int32)
        small = not top.size or int(top.max()) < SMALL_IDS
        arrays["top_ids"] = top.astype(np.uint16) if small else top
    return pack({"number": question.number, "weights": weights}, arrays)


def read_scores(question: Question, data: bytes, *, weights: str) -> dict[str, Array]:
    """`logprobs` [N], `entropy` [N], `known` [N, K] and `ids` [N, K] of an answer, all checked.

    DataError when it is incomplete, not about this question, not finite, or from other weights.
    """
    arrays, total = _answer(question, data, weights), len(question.positions)
    width = question.candidates
    if not width and question.candidate_ids is not None:
        width = question.candidate_ids.shape[1]
    listed = bool(question.candidates) or question.candidate_ids is not None
    expected: dict[str, tuple[int, ...]] = {"ids": (total,), "logprobs": (total,)}
    if question.entropy:
        expected["entropy"] = (total,)
    if listed:
        expected["known"] = (total, width)
    if question.candidates:
        expected["top_ids"] = (total, width)
    found = {name: array.shape for name, array in arrays.items()}
    if found != expected:
        raise DataError(f"the answer should hold {expected}, it holds {found}")
    absent = arrays["ids"] >= (question.num_ids or math.inf)
    _check_values(arrays, absent)
    read = {n: a for n, a in arrays.items() if n not in ("ids", "top_ids")}
    if question.candidates:
        read["ids"] = arrays["top_ids"].astype(np.int32)
        wrong = (read["ids"] < 0) | (read["ids"] >= (question.num_ids or math.inf))
        if bool(wrong.any()):
            raise DataError(
                f"the answer names candidates such as {int(read['ids'][wrong][0])}, outside of the "
                f"vocabulary of {question.num_ids} ids"
            )
    elif listed and question.candidate_ids is not None:
        read["ids"] = question.candidate_ids
    return read


def answer_hidden(question: Question, hidden: Array, *, dtype: str, weights: str) -> bytes:
    """The answer with hidden states [N, d]: float32, or the 16 bits of `dtype`."""
    head = {"number": question.number, "weights": weights, "dtype": dtype}
    return pack(head, {"ids": question.chosen, "hidden": hidden})


def read_hidden(question: Question, data: bytes, *, weights: str, width: int, dtype: str) -> Array:
    """The hidden states [N, d] of an answer: float32, or 16 bits each for a half type."""
    arrays, shape = _answer(question, data, weights), (len(question.positions), width)
    hidden = arrays.get("hidden")
    kind = np.dtype(np.uint16 if dtype in HALVES else np.float32)
    if hidden is None or hidden.shape != shape or hidden.dtype != kind:
        found = "none" if hidden is None else f"{list(hidden.shape)} {hidden.dtype}"
        raise DataError(f"the answer should hold hidden states {list(shape)} {kind}, found {found}")
    if kind == np.float32 and not bool(np.isfinite(hidden).all()):
        raise DataError("the answer holds hidden states that are not finite")
    return hidden


def _answer(question: Question, data: bytes, weights: str) -> dict[str, Array]:
    head, arrays = unpack(data)
    if head.get("number") != question.number:
        raise DataError(
            f"the answer is to question {head.get('number')}, question {question.number} was asked"
        )
    if head.get("weights") != weights:
        raise DataError(
            f"the answer comes from weights {str(head.get('weights'))[:12]}, the run began with "
            f"{weights[:12]}"
        )
    ids = arrays.get("ids")
    if ids is None or not np.array_equal(ids, question.chosen):
        raise DataError(
            f"the answer is not about the {len(question.positions)} trained tokens that were asked "
            "about: their ids differ"
        )
    return arrays


def _check_values(arrays: Mapping[str, Array], absent: Array) -> None:
    """Log-probabilities are at most 0 (up to rounding), and -inf only for ids that are ruled out;
    among candidates a model may rule out what it likes."""
    limit = 1e-4
    logprobs = arrays["logprobs"]
    good = np.isfinite(logprobs) | (np.isneginf(logprobs) & absent)
    bad = int((~good | (logprobs > limit)).sum())
    for name in ("known", "entropy"):
        if name in arrays:
            values = arrays[name]
            high = limit if name == "known" else np.finfo(np.float32).max
            low = -np.inf if name == "known" else -limit
            bad += int((~((values >= low) & (values <= high))).sum())
    if bad:
        raise DataError(
            f"the answer holds {bad} values that are no log-probabilities or entropies (NaN, "
            "infinite, or a probability above 1)"
        )


def _least(*arrays: Array) -> list[int]:
    return [int(a.min()) if a.size else 0 for a in arrays]


def _int32(values: Sequence[Any]) -> Array:
    return np.asarray(values, dtype=np.int32)


def _floats(values: Sequence[Any]) -> Array:
    return np.asarray(values, dtype=np.float32)
