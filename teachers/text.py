"""A local model as a teacher that only writes: what a black box offers, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distill.errors import DataError, TeacherError
from distill.protocols import RolloutEngine
from distill.tokens import Chat
from distill.types import Message, Sampling
from teachers.writing import Written, check_request, is_continued, split_text


class LocalTextModel:
    """Writes with an engine of this process; text in, text out.

    Words of the assistant at the end of a prompt are encoded by themselves and continued token by
    token; nothing is closed or opened in between. Draw g of prompt p depends on (`keys[p]`, g)
    only. `chat` is that of the writing model, which need not be the student's.
    """

    def __init__(self, engine: RolloutEngine, chat: Chat, *, name: str = "text") -> None:
        self.name = name
        self._engine = engine
        self._chat = chat

    def complete(
        self, prompts: Sequence[Sequence[Message]], n: int, sampling: Sampling
    ) -> list[list[str]]:
        return [list(written.texts) for written in self.write(prompts, n, sampling)]

    def write(
        self, prompts: Sequence[Sequence[Message]], n: int, sampling: Sampling
    ) -> list[Written]:
        check_request(prompts, n, sampling)
        if not prompts:
            return []
        try:
            split = [self._encode(p) for p in prompts]
        except DataError as error:
            raise TeacherError(f"the teacher {self.name} cannot read a prompt: {error}") from error
        stops = sampling.stop_token_ids or self._chat.stop_token_ids
        groups = self._engine.generate(
            [(*prompt, *prefix) for prompt, prefix in split],
            replace(sampling, num_samples=n, stop_token_ids=stops),
        )
        found = []
        for (_, prefix), group in zip(split, groups, strict=True):
            if len(group) != n:
                raise TeacherError(
                    f"the teacher {self.name} should write {n} texts for every prompt, its engine "
                    f"returned {len(group)} for one; this is a defect of the engine"
                )
            texts = [split_text(self._chat, (*prefix, *c.token_ids), len(prefix))[1] for c in group]
            count = sum(len(c.token_ids) for c in group)
            found.append(Written(texts=tuple(texts), num_tokens=count))
        return found

    def _encode(self, prompt: Sequence[Message]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids of a prompt up to the reply, and of the words that the reply begins with."""
        if not is_continued(prompt):
            return self._chat.prompt(prompt), ()
        if len(prompt) == 1:
            raise TeacherError(
                f"the teacher {self.name} was asked to continue a reply to nothing; a prompt needs "
                "a message before the assistant's"
            )
        ids = self._chat.tokenizer(prompt[-1].content, add_special_tokens=False)["input_ids"]
        return self._chat.prompt(prompt[:-1]), tuple(ids)
