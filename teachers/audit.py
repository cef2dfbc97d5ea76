"""A text-only teacher judges the student's replies chunk by chunk (OmniOPD, arXiv 2606.01476).

Where the student was least sure, the teacher reads the task and the reply up to there, and writes
on. The votes of a chunk are how much its continuations resemble what the student wrote itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distill.errors import AlignmentError, ConfigError, DataError, TeacherError
from distill.objectives.omni_opd import greedy_peaks
from distill.protocols import TextModel
from distill.tokens import Chat
from distill.types import Audit, Message, Rollout, Sampling, Scores, Task
from teachers.similarity import SIMILARITIES
from teachers.writing import CountingModel, Written, split_text

logger = logging.getLogger(__name__)

SELECTOR = "greedy peaks of the exact entropy, fresh pass/1"
"""How chunks are chosen; entropies of another pass select other chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    start: int
    prompt: tuple[Message, ...]
    own: str
    """The student's words."""
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Auditor:
    """Rows with trained tokens and the student's scores of them -> one audit per row.

    Worked solutions and replies shorter than a chunk get an empty audit. A row of several turns is
    refused: what the environment said in between is not kept as messages.
    """

    model: TextModel
    chat: Chat
    task_of: Callable[[str], Task]
    num_chunks: int
    num_continuations: int
    chunk_length: int
    similarity: str = "ned"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.similarity not in SIMILARITIES:
            raise ConfigError(
                f"objective.similarity must be one of {', '.join(SIMILARITIES)}, "
                f"got {self.similarity!r}"
            )
        logger.info(
            "audits by %s: %d continuations of %d tokens at temperature %g for up to %d chunks a "
            "reply; similarity %s, chunks by %s",
            getattr(self.model, "name", type(self.model).__name__),
            self.num_continuations,
            self.chunk_length,
            self.temperature,
            self.num_chunks,
            SIMILARITIES[self.similarity].id,
            SELECTOR,
        )

    def __call__(self, rows: Sequence[Rollout], scores: Sequence[Scores]) -> list[Audit]:
        """All requests are made at once; those of a row in ascending order, so that the teacher
        finds each prefix in its cache."""
        if len(rows) != len(scores):
            raise AlignmentError(f"expected scores of {len(rows)} rows, got {len(scores)}")
        chunks = [self._chunks(row, own) for row, own in zip(rows, scores, strict=True)]
        asked = [chunk for group in chunks for chunk in group]
        answers = iter(self._ask(asked))
        return [self._audit(group, [next(answers) for _ in group]) for group in chunks]

    def _chunks(self, row: Rollout, scores: Scores) -> list[_Chunk]:
        if row.policy_version < 0:
            return []  # a worked solution: the student did not write it
        if scores.entropy is None or len(scores.entropy) != row.num_trained:
            found = "none" if scores.entropy is None else str(len(scores.entropy))
            raise AlignmentError(
                f"the audit of {row.traj_id} needs the student's entropy at its {row.num_trained} "
                f"trained tokens, found {found}; the objective must need student.entropy"
            )
        starts = greedy_peaks(scores.entropy, self.num_chunks, self.chunk_length)
        if not starts:
            return []
        ids, task = _reply_ids(row), self.task_of(row.task_id)
        chunks = []
        for start in starts:
            before, own = split_text(self.chat, ids[: start + self.chunk_length], start)
            prefix = (Message(role="assistant", content=before),) if before else ()
            prompt = (*task.prompt, *row.history, *prefix)
            key = (
                f"{row.traj_id}/{row.step}/audit/{start}"
                if row.step
                else f"{row.traj_id}/audit/{start}"
            )
            chunks.append(_Chunk(start=start, prompt=prompt, own=own, key=key))
        return chunks

    def _ask(self, chunks: Sequence[_Chunk]) -> list[Written]:
        if not chunks:
            return []
        prompts, n = [c.prompt for c in chunks], self.num_continuations
        sampling = Sampling(
            max_new_tokens=self.chunk_length,
            temperature=self.temperature,
            keys=tuple(c.key for c in chunks),
        )
        if isinstance(self.model, CountingModel):
            written = self.model.write(prompts, n, sampling)
        else:
            texts = self.model.complete(prompts, n, sampling)
            written = [Written(texts=tuple(group), num_tokens=None) for group in texts]
        counts = {len(w.texts) for w in written}
        if len(written) != len(chunks) or counts != {n}:
            raise TeacherError(
                f"the teacher should continue {len(chunks)} prefixes {n} times each, it answered "
                f"{len(written)} with {', '.join(map(str, sorted(counts)))} texts; a missing one "
                "would count as disagreement"
            )
        return written

    def _audit(self, chunks: Sequence[_Chunk], answers: Sequence[Written]) -> Audit:
        alike = SIMILARITIES[self.similarity].of
        return Audit(
            starts=tuple(c.start for c in chunks),
            votes=tuple(
                sum(alike(chunk.own, text) for text in answer.texts)
                for chunk, answer in zip(chunks, answers, strict=True)
            ),
            length=self.chunk_length,
            num_tokens=sum(self._num_tokens(answer) for answer in answers),
        )

    def _num_tokens(self, answer: Written) -> int:
        """As the teacher counted; else as the student's tokenizer would."""
        if answer.num_tokens is not None:
            return answer.num_tokens
        encoded = self.chat.tokenizer(list(answer.texts), add_special_tokens=False)["input_ids"]
        return sum(len(ids) for ids in encoded)


def _reply_ids(row: Rollout) -> tuple[int, ...]:
    """The trained tokens of a row, which must be one stretch."""
    first = row.completion_mask.index(True)
    last = len(row.completion_mask) - row.completion_mask[::-1].index(True)
    if not all(row.completion_mask[first:last]):
        raise DataError(
            f"an audit reads replies of one turn, but {row.traj_id} (task {row.task_id} of "
            f"{row.domain}) has several; choose another objective for this environment"
        )
    return row.token_ids[first:last]
