"""Whether a conversation holds a prompt of an evaluation suite. One that does is dropped whole.

A conversation is contaminated if it shares 13 words in a row with an evaluation prompt, wherever
they stand, or if a message of a user equals a prompt (NFKC, case folded, single spaces): the second
finds prompts of fewer than 13 words, such as `sort:52305=`.

Guard against false alarms: the prompts of a suite often share instructions ("answer with one
letter"), which real traffic may share too. 13 words that stand in more than half of the tasks of a
suite, and in at least three, belong to its template and not to a task, and so does a short text;
`ignore` adds texts of one's own, such as a system prompt. Hashes have 64 bits: among a million
conversations of 400 words and a million grams, a chance match has a probability of 2e-5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from distill.curriculum.messages import message_text
from distill.overlap import Hashes, gram_hashes, normal_text, word_hashes, words_of

NUM_WORDS = 13
TEMPLATE_SHARE, TEMPLATE_TASKS = 0.5, 3

_LEAST_BITS, _MOST_BITS = 12, 27
_NONE = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contamination:
    """Which evaluation task a conversation overlaps with, and how."""

    suite: str
    task: str
    how: Literal["13 words", "equal"]

    def __str__(self) -> str:
        words = "13 words in a row of" if self.how == "13 words" else "a message equal to"
        return f"{words} the prompt of task {self.task} of the suite {self.suite}"


class Suites:
    """An index of evaluation prompts: (suite, task id, texts of the prompt) in any order.

    Of several tasks that fit, the one given first is named."""

    def __init__(
        self,
        prompts: Iterable[tuple[str, str, Iterable[str]]] = (),
        *,
        ignore: Iterable[str] = (),
    ) -> None:
        self._tasks: list[tuple[str, str]] = []
        grams: list[Hashes] = []
        equal: list[set[str]] = []
        for suite, task, texts in prompts:
            self._tasks.append((suite, task))
            found = [text for text in texts if text.strip()]
            parts = [gram_hashes(word_hashes(text), NUM_WORDS) for text in found]
            grams.append(np.unique(np.concatenate([_NONE, *parts])))
            equal.append({normal_text(text) for text in found})
        ignored = [gram_hashes(word_hashes(text), NUM_WORDS) for text in ignore]
        self._index(grams, np.concatenate([_NONE, *ignored]))
        self._equal = self._equal_texts(equal)
        self._longest = max(map(len, self._equal), default=0)

    def __len__(self) -> int:
        return len(self._tasks)

    def _index(self, grams: Sequence[Hashes], ignored: Hashes) -> None:
        template = [ignored]
        by_suite: dict[str, list[Hashes]] = {}
        for (suite, _), found in zip(self._tasks, grams, strict=True):
            by_suite.setdefault(suite, []).append(found)
        for tasks in by_suite.values():
            values, counts = np.unique(np.concatenate(tasks), return_counts=True)
            template.append(values[_is_template(counts, len(tasks))])
        flat = np.concatenate([_NONE, *grams])
        owners = np.repeat(np.arange(len(grams)), [len(found) for found in grams])
        kept = ~np.isin(flat, np.concatenate(template))
        # `unique` gives the first place of each value, so the first task owns it.
        self._grams, first = np.unique(flat[kept], return_index=True)
        self._owners = owners[kept][first]
        bits = int(len(self._grams) * 16).bit_length()
        self._shift = np.uint64(64 - min(_MOST_BITS, max(_LEAST_BITS, bits)))
        self._sieve = np.zeros(1 << (64 - int(self._shift)), dtype=bool)
        self._sieve[self._grams >> self._shift] = True

    def _equal_texts(self, equal: Sequence[set[str]]) -> dict[str, int]:
        counts: Counter[tuple[str, str]] = Counter()
        sizes: Counter[str] = Counter()
        for (suite, _), texts in zip(self._tasks, equal, strict=True):
            sizes[suite] += 1
            counts.update((suite, text) for text in texts)
        found: dict[str, int] = {}
        for place, texts in enumerate(equal):
            suite = self._tasks[place][0]
            for text in texts:
                if not _is_template(np.array(counts[suite, text]), sizes[suite]):
                    found.setdefault(text, place)
        return found

    def check(self, messages: Sequence[Mapping[str, Any]]) -> Contamination | None:
        """The evaluation task that a conversation overlaps with, or None."""
        return self.check_many([messages], [words_by_message([messages])[0]])[0]

    def check_many(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        words: Sequence[Sequence[Hashes]],
    ) -> list[Contamination | None]:
        """The same for many conversations; `words` are those of their messages, see
        `words_by_message`."""
        if not self._tasks:
            return [None] * len(conversations)
        owners = self._shared([np.concatenate([_NONE, *own]) for own in words])
        return [
            self._equal_message(messages) or self._found(owner)
            for messages, owner in zip(conversations, owners, strict=True)
        ]

    def check_text(self, text: str) -> Contamination | None:
        """The task that shares 13 words in a row with a text, or None."""
        return self._found(self._shared([word_hashes(text)])[0])

    def _shared(self, words: Sequence[Hashes]) -> list[int]:
        """Number of the first task that shares 13 words with each of N texts, or -1."""
        first = [-1] * len(words)
        flat = np.concatenate([_NONE, *words])
        grams = gram_hashes(flat, NUM_WORDS)
        if not len(grams) or not len(self._grams):
            return first
        likely = np.flatnonzero(self._sieve[grams >> self._shift])
        if not len(likely):
            return first
        places = np.minimum(np.searchsorted(self._grams, grams[likely]), len(self._grams) - 1)
        hit = self._grams[places] == grams[likely]
        likely, places = likely[hit], places[hit]
        ends = np.cumsum([len(own) for own in words])
        texts = np.searchsorted(ends, likely, side="right")
        # Words of two texts in a row are no words in a row.
        whole = likely + NUM_WORDS <= ends[texts]
        owners = self._owners[places]
        for text, owner in zip(texts[whole].tolist(), owners[whole].tolist(), strict=True):
            first[text] = owner if first[text] < 0 else min(first[text], owner)
        return first

    def _found(self, place: int) -> Contamination | None:
        if place < 0:
            return None
        suite, task = self._tasks[place]
        return Contamination(suite=suite, task=task, how="13 words")

    def _equal_message(self, messages: Sequence[Mapping[str, Any]]) -> Contamination | None:
        users = (message_text(m) for m in messages if m.get("role") == "user")
        return next((hit for text in users if (hit := self._equal_to(text)) is not None), None)

    def _equal_to(self, text: str) -> Contamination | None:
        # Spaces and compatibility forms may make a text longer than what it is folded to.
        if len(text) > 4 * self._longest + 64:
            return None
        place = self._equal.get(normal_text(text))
        if place is None:
            return None
        suite, task = self._tasks[place]
        return Contamination(suite=suite, task=task, how="equal")


def _is_template(counts: Any, tasks: int) -> Any:
    return (counts >= TEMPLATE_TASKS) & (counts > TEMPLATE_SHARE * tasks)


def words_by_message(
    conversations: Sequence[Sequence[Mapping[str, Any]]],
) -> list[list[Hashes]]:
    """Hashes of the words of each message, with what stands beside its text. A text that several
    conversations have, as later calls repeat earlier ones, is hashed once."""
    texts = [[_whole_text(message) for message in own] for own in conversations]
    unique = list(dict.fromkeys(chain.from_iterable(texts)))
    hashed = dict(zip(unique, words_of(unique), strict=True))
    return [[hashed[text] for text in own] for own in texts]


def _whole_text(message: Mapping[str, Any]) -> str:
    text = message_text(message)
    plain = len(message) == 2 and message.get("content") is text
    return text if plain else "\n".join((text, *texts_beside(message)))


def texts_beside(message: Mapping[str, Any]) -> list[str]:
    """Reasoning, the arguments of tool calls and the results that stand in content parts."""
    found = [v for k in ("reasoning_content", "reasoning") if isinstance(v := message.get(k), str)]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        found += _strings(arguments)
    content = message.get("content")
    for part in content if isinstance(content, list | tuple) else ():
        if isinstance(part, Mapping) and not isinstance(part.get("text"), str):
            found += _strings(part.get("content")) + _strings(part.get("output"))
    return found


def _strings(value: Any) -> list[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        return [value.replace("\\n", " ")] if "\\n" in value else [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    return []
