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
from typing import Any, Literal

import numpy as np

from distill.curriculum.messages import message_text
from distill.overlap import Hashes, gram_hashes, normal_text, word_hashes

NUM_WORDS = 13
TEMPLATE_SHARE, TEMPLATE_TASKS = 0.5, 3

_LEAST_BITS, _MOST_BITS = 12, 27


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
            grams.append(np.unique(np.concatenate([np.zeros(0, np.uint64), *parts])))
            equal.append({normal_text(text) for text in found})
        ignored = [gram_hashes(word_hashes(text), NUM_WORDS) for text in ignore]
        self._index(grams, np.concatenate([np.zeros(0, np.uint64), *ignored]))
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
        flat = np.concatenate([np.zeros(0, np.uint64), *grams])
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
        if not self._tasks:
            return None
        texts = []
        for message in messages:
            text = message_text(message)
            if message.get("role") == "user":
                hit = self._equal_to(text)
                if hit is not None:
                    return hit
            texts.append(text)
            texts += texts_beside(message)
        return self.check_text("\n".join(texts))

    def check_text(self, text: str) -> Contamination | None:
        """The task that shares 13 words in a row with a text, or None."""
        grams = gram_hashes(word_hashes(text), NUM_WORDS)
        if not len(grams) or not len(self._grams):
            return None
        likely = grams[self._sieve[grams >> self._shift]]
        if not len(likely):
            return None
        places = np.minimum(np.searchsorted(self._grams, likely), len(self._grams) - 1)
        owners = self._owners[places[self._grams[places] == likely]]
        if not len(owners):
            return None
        suite, task = self._tasks[int(owners.min())]
        return Contamination(suite=suite, task=task, how="13 words")

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
