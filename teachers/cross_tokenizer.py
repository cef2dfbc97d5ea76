"""A teacher with another tokenizer: its own template, its own tokens, the student's bytes.

The one exception to equal ids. The messages of the task are written with the teacher's template,
then come the bytes of the student's reply, encoded with the teacher's tokenizer. The student's ids
stay as they were sampled: nothing is decoded and encoded again for it. Which tokens belong together
is told by their bytes (`distill.alignment`); the end of a reply, special tokens, template tokens
and what has no partner take no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from distill.alignment import Alignment, Spans, align, readable
from distill.distributions import HiddenDistribution
from distill.divergence import Distribution
from distill.errors import DataError, TeacherError
from distill.groups import SKIPPED, UNMATCHED, GroupTarget, VocabularyMatch
from distill.headpass import HeadPass
from distill.policy import STUDENT, Policy
from distill.token_bytes import TokenBytes
from distill.tokens import Chat
from distill.types import Rollout, ScoreRequest, Scores, Task, TeacherView
from teachers.cross_options import CAPABILITIES
from teachers.sight import runs

OWN_KINDS = ("plain", "own")
"""Views in which a teacher reads nothing but the task itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScores:
    """One row: groups of equal bytes and what the teacher says of them."""

    student_spans: Spans  # [N, 2] trained tokens of the row, [start, stop)
    teacher_spans: Spans  # [N, 2] tokens of the reply as the teacher spells it
    logprobs: tuple[float, ...]  # [N] of all the group's tokens under the teacher


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """What the teacher reads of one row."""

    view: TeacherView
    """Its prompt and the reply; positions cover the reply up to the last group."""
    pieces: Sequence[bytes | None]
    """What the student's trained tokens spell."""
    found: Alignment


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scored:
    """Teacher tokens of all rows, row-major."""

    hidden: Tensor  # [n, d]
    logprobs: Tensor  # [n] float32
    starts: Sequence[int]  # number of the first token of each row


class CrossTokenizerTeacher:
    """Scores groups of bytes with a frozen model.

    `chat` is the teacher's tokenizer and template, `student` the student's; `num_ids` is the width
    of the student's output head. `task_of` finds the messages of a rollout's task. A row that is
    longer than `max_length` teacher tokens has no groups.
    """

    capabilities = CAPABILITIES

    def __init__(
        self,
        policy: Policy,
        chat: Chat,
        *,
        name: str,
        student: Chat,
        num_ids: int,
        task_of: Callable[[str], Task],
        max_length: int = 2048,
    ) -> None:
        self.policy = policy
        self.chat = chat
        self.name = name
        self.task_of = task_of
        self.max_length = max_length
        self.ours = TokenBytes(student.tokenizer, "the student")
        self.theirs = TokenBytes(chat.tokenizer, name)
        self._ends = frozenset(student.stop_token_ids)
        self._opening = _opening(chat)
        self.match = VocabularyMatch.of(
            self.ours.pieces,
            self.theirs.pieces,
            student_width=num_ids,
            teacher_width=policy.head().vocab_size,
            ends=(student.end_id, chat.end_id),
            device=policy.device,
        )

    def score(self, views: Sequence[TeacherView], want: ScoreRequest) -> list[Scores]:
        """Never: another tokenizer has no number for the student's tokens. TeacherError."""
        raise TeacherError(self._only_groups())

    def distribution(self, views: Sequence[TeacherView]) -> Distribution:
        """Never, see `score`."""
        raise TeacherError(self._only_groups())

    def groups(self, rollouts: Sequence[Rollout], views: Sequence[TeacherView]) -> GroupTarget:
        """The target of a step, from its rows with trained tokens.

        Raises TeacherError for a privileged view, which it cannot read, and when no byte of any
        reply could be grouped; DataError for a row of several turns.
        """
        odd = next((v.kind for v in views if v.kind not in OWN_KINDS), None)
        if odd is not None:
            raise TeacherError(
                f"{self.name} writes the task in its own template, so the view {odd!r} would be "
                'ignored; use view.name = "plain"'
            )
        readings = self._read(rollouts)
        self._require_groups(readings)
        scored = self._score(readings)
        return self._target(readings, scored)

    def score_groups(self, rollouts: Sequence[Rollout]) -> list[GroupScores]:
        """One record per row; rows without trained tokens have no groups."""
        readings = self._read(rollouts)
        scored = self._score(readings)
        out = []
        for reading, start in zip(readings, scored.starts, strict=True):
            spans = reading.found.teacher_spans
            sums = [float(scored.logprobs[start + a : start + b].sum()) for a, b in spans]
            out.append(
                GroupScores(
                    student_spans=reading.found.student_spans,
                    teacher_spans=spans,
                    logprobs=tuple(sums),
                )
            )
        return out

    def _read(self, rollouts: Sequence[Rollout]) -> list[_Reading]:
        """Every row in the teacher's words; each prompt is written once."""
        places = [(r.task_id, r.history) for r in rollouts]
        wanted = {p: (*self.task_of(p[0]).prompt, *p[1]) for p in places}
        written = self.chat.prompts(list(wanted.values()), limit=0)
        prompts = dict(zip(wanted, written, strict=True))
        return [
            self._reading(r, self._opened(prompts[p]))
            for r, p in zip(rollouts, places, strict=True)
        ]

    def _reading(self, rollout: Rollout, prompt: tuple[int, ...]) -> _Reading:
        replies = runs(rollout, trained=True)
        if len(replies) > 1:
            raise DataError(
                f"the row {rollout.traj_id} holds {len(replies)} replies, but a teacher with "
                "another tokenizer writes the conversation before each reply in its own template; "
                'set sampling.rows = "turns"'
            )
        pieces = self.ours.of(replies[0] if replies else (), self._ends)
        token_ids, spelt = self.theirs.encode(readable(pieces))
        if len(prompt) + len(token_ids) > self.max_length:
            token_ids, spelt = [], []
        found = align(pieces, spelt)
        last = found.teacher_spans[-1][1] if found.num_groups else 0
        view = TeacherView(
            token_ids=(*prompt, *token_ids),
            positions=tuple(range(len(prompt), len(prompt) + last)),
            kind="cross_tokenizer",
            id=rollout.traj_id,
            key=rollout.domain,
        )
        return _Reading(view=view, pieces=pieces, found=found)

    def _opened(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """With the token that begins every text, once, where the template does not write it."""
        return prompt if prompt[: len(self._opening)] == self._opening else self._opening + prompt

    @torch.no_grad()
    def _score(self, readings: Sequence[_Reading]) -> _Scored:
        views = [r.view for r in readings]
        hidden, counts = self.policy.hidden(views, STUDENT)
        actual = [v.token_ids[p] for v in views for p in v.positions]
        ids = torch.tensor(actual, dtype=torch.long, device=hidden.device).view(-1, 1)
        out = HeadPass(head=self.policy.head(), token_ids=ids).run(hidden)
        starts = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
        return _Scored(hidden=hidden, logprobs=out.tokens.float(), starts=starts)

    def _target(self, readings: Sequence[_Reading], scored: _Scored) -> GroupTarget:
        first: list[int] = []
        group: list[int] = []
        heads: list[int] = []  # teacher token that each group begins with
        sizes: list[int] = []
        for reading, start in zip(readings, scored.starts, strict=True):
            at = len(first)
            first += [UNMATCHED if piece else SKIPPED for piece in reading.pieces]
            group += [-1] * len(reading.pieces)
            found = reading.found
            for (a, b), (c, d) in zip(found.student_spans, found.teacher_spans, strict=True):
                first[at + a : at + b] = [at + a] * (b - a)
                group[at + a] = len(heads)
                heads.append(start + c)
                sizes.append(d - c)
        begins = torch.tensor(heads, dtype=torch.long)
        logprobs = scored.logprobs.cpu()
        number = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes).long())
        ahead = torch.arange(len(number)) - _starts(sizes)[number]
        sums = torch.zeros(len(sizes)).index_add_(0, number, logprobs[begins[number] + ahead])
        return GroupTarget(
            teacher=HiddenDistribution(
                hidden=scored.hidden[begins.to(scored.hidden.device)], head=self.policy.head()
            ),
            logprobs=sums,
            later=sums - logprobs[begins],
            first=torch.tensor(first, dtype=torch.long),
            group=torch.tensor(group, dtype=torch.long),
            match=self.match,
        )

    def _require_groups(self, readings: Sequence[_Reading]) -> None:
        unmatched = sum(r.found.student_unmatched for r in readings)
        if not unmatched or any(r.found.num_groups for r in readings):
            return
        spelt = next(b"".join(p for p in r.pieces if p) for r in readings if any(r.pieces))
        raise TeacherError(
            f"none of the {unmatched} tokens of {len(readings)} replies has a partner among the "
            f"tokens of {self.name}: its tokenizer changes the text (one reply begins "
            f"{spelt[:40]!r}), or every row is longer than teacher.max_length = {self.max_length}; "
            "use a teacher whose tokenizer keeps the text, or a larger teacher.max_length"
        )

    def _only_groups(self) -> str:
        return (
            f"{self.name} has another tokenizer and compares groups of bytes; use the objective "
            '"gold", or a teacher with the student\'s tokenizer'
        )


def _starts(sizes: Sequence[int]) -> Tensor:
    """Where each run begins when runs of these sizes follow each other."""
    ends = torch.tensor(sizes).long().cumsum(0)
    return ends - torch.tensor(sizes).long()


def _opening(chat: Chat) -> tuple[int, ...]:
    """The token that a tokenizer puts in front of every text, such as BOS, if it has one."""
    bos = chat.tokenizer.bos_token_id
    usual = chat.tokenizer("")["input_ids"][:1]
    return (int(bos),) if bos is not None and usual == [bos] else ()
