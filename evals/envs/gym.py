"""Tasks from reasoning-gym generators, asked in short prompts that a small model can follow.

The questions that the generators print are long and full of formatting rules, so the prompt, the
worked solution and the grader here are our own and are built from a generator's metadata: system
message, one solved example in the style of the worked solutions, the question. A reply counts
when the text after its last `Answer:` is right; the answer is always recomputed by our solver.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import count, islice
from typing import Any, ClassVar

from distill.errors import ConfigError, DataError, MissingExtra
from distill.protocols import Episode
from distill.types import SPLITS, Message, Reward, Split, Task, task_id
from evals.envs.base import LazyTasks, SingleTurn, split_of

Metadata = Mapping[str, Any]

MAX_MISSES = 1_000
"""Draws in a row outside a split that mean it is empty: 0.95 ** 1000 is 5e-23."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worked:
    """One question with a reply that earns full marks; `reply` ends with `Answer: {answer}`."""

    question: str
    answer: str
    steps: str = ""

    @property
    def reply(self) -> str:
        return f"{self.steps}. Answer: {self.answer}" if self.steps else f"Answer: {self.answer}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Generator:
    """How one reasoning-gym generator is asked, solved and graded."""

    solve: Callable[[Metadata], Worked]
    difficulty: Mapping[str, Any]
    example: Metadata
    """Metadata of the solved example turn; it never comes up as a task."""
    lesson: str
    parse: Callable[[str], object | None]
    """Answer text to a comparable value; None when it is not an answer at all."""


def number_text(value: object) -> str:
    """Plain decimal notation without a trailing `.0`, as people write numbers."""
    number = Decimal(str(value))
    if number == number.to_integral_value():
        return str(int(number))
    return f"{number.normalize():f}"


def parse_numbers(text: str) -> tuple[Decimal, ...] | None:
    """Comma-separated numbers; `none` is the empty list."""
    if text.casefold() == "none":
        return ()
    try:
        numbers = tuple(Decimal(part.strip()) for part in text.split(","))
    except InvalidOperation:
        return None
    return numbers if all(number.is_finite() for number in numbers) else None


def parse_words(text: str) -> tuple[str, ...] | None:
    """Comma-separated words, upper and lower case told apart."""
    words = tuple(part.strip() for part in text.split(","))
    return words if all(words) else None


def parse_row(text: str) -> tuple[str, ...]:
    """Entries with spaces between them."""
    return tuple(text.split())


def _number_sorting(data: Metadata) -> Worked:
    numbers = [number_text(n) for n in data["original_numbers"]]
    order = data["direction"]
    ranked = sorted(numbers, key=Decimal, reverse=order == "descending")
    return Worked(question=f"Sort {order}: {', '.join(numbers)}", answer=", ".join(ranked))


def _number_filtering(data: Metadata) -> Worked:
    numbers = [number_text(n) for n in data["original_numbers"]]
    bound = number_text(data["filter_value"])
    verb, side = data["operation"].split("_")
    keep = verb == "keep"
    hits = [
        (Decimal(n) > Decimal(bound) if side == "larger" else Decimal(n) < Decimal(bound)) == keep
        for n in numbers
    ]
    kept = [n for n, hit in zip(numbers, hits, strict=True) if hit]
    return Worked(
        question=f"{verb.capitalize()} numbers {side} than {bound}: {', '.join(numbers)}",
        answer=", ".join(kept) or "none",
        steps=", ".join(
            f"{n} {'yes' if hit else 'no'}" for n, hit in zip(numbers, hits, strict=True)
        ),
    )


def _word_sorting(data: Metadata) -> Worked:
    words = [word.lower() for word in data["original_words"]]
    order = data["direction"]
    ranked = sorted(words, reverse=order == "descending")
    return Worked(question=f"Sort {order}: {', '.join(words)}", answer=", ".join(ranked))


def _word_sequence_reversal(data: Metadata) -> Worked:
    words = list(data["words"])
    return Worked(question=f"Reverse: {', '.join(words)}", answer=", ".join(reversed(words)))


def _chain_sum(data: Metadata) -> Worked:
    first, *rest = data["expression"].split(" ")
    total = int(first)
    steps = []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        value = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{total} {sign} {term} = {value}")
        total = value
    return Worked(
        question=f"Compute {data['expression']}", answer=str(total), steps="; ".join(steps)
    )


def _spiral_matrix(data: Metadata) -> Worked:
    rows = [list(row) for row in data["matrix"]]
    shown = " / ".join(" ".join(str(n) for n in row) for row in rows)
    path: list[int] = []
    while rows:
        path += rows.pop(0)
        # What is left, turned to the left: its right column becomes the next top row.
        rows = [list(column) for column in zip(*rows, strict=True)][::-1]
    return Worked(question=f"Spiral: {shown}", answer=" ".join(str(n) for n in path))


GENERATORS: Mapping[str, Generator] = {
    "number_sorting": Generator(
        solve=_number_sorting,
        difficulty={
            "min_numbers": 3,
            "max_numbers": 4,
            "min_value": 0,
            "max_value": 99,
            "max_decimals": 0,
        },
        example={"original_numbers": ["7", "31", "4"], "direction": "descending"},
        lesson="Ascending goes from the smallest to the largest; use every number once.",
        parse=parse_numbers,
    ),
    "chain_sum": Generator(
        solve=_chain_sum,
        difficulty={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
        example={"expression": "40 + 12"},
        lesson="Work from left to right; a difference may be negative.",
        parse=parse_numbers,
    ),
    "number_filtering": Generator(
        solve=_number_filtering,
        difficulty={
            "min_numbers": 3,
            "max_numbers": 4,
            "min_value": 0,
            "max_value": 99,
            "max_decimals": 0,
        },
        example={
            "original_numbers": ["12", "73", "38"],
            "filter_value": "30",
            "operation": "keep_larger",
        },
        lesson="Say of each number whether it stays; to remove is to keep all the others.",
        parse=parse_numbers,
    ),
    "word_sequence_reversal": Generator(
        solve=_word_sequence_reversal,
        difficulty={"min_words": 3, "max_words": 4},
        example={"words": ["pear", "Mouse", "fig"]},
        lesson="The last word comes first; change no word.",
        parse=parse_words,
    ),
    "word_sorting": Generator(
        solve=_word_sorting,
        difficulty={"min_words": 3, "max_words": 3, "max_word_length": 7},
        example={"original_words": ["pear", "fig", "owl"], "direction": "ascending"},
        lesson="Ascending goes from a to z; compare letter by letter.",
        parse=parse_words,
    ),
    "spiral_matrix": Generator(
        solve=_spiral_matrix,
        difficulty={"min_n": 2, "max_n": 3},
        example={"matrix": [[3, 1, 4], [8, 9, 5], [7, 6, 2]]},
        lesson="Right along the top, down, left along the bottom, up, then inwards.",
        parse=parse_row,
    ),
}

DEFAULT_GENERATORS = (
    "number_sorting",
    "chain_sum",
    "word_sequence_reversal",
    "spiral_matrix",
)


def answer_of(text: str) -> str | None:
    """What a reply answers: the line after its last `Answer:`, or None without one."""
    found = re.findall(r"Answer:[ \t]*([^\n]*)", text)
    return found[-1].strip().removesuffix(".").strip() if found else None


def grade(text: str, task: Task) -> Reward:
    """1.0 when the reply's answer equals the task's; `format` says whether it had an answer."""
    answer = answer_of(text)
    if answer is None:
        return Reward(value=0.0, parts={"format": 0.0})
    parse = GENERATORS[task.domain].parse
    given = parse(answer)
    right = given is not None and given == parse(str(task.answer))
    return Reward(value=float(right), parts={"format": 1.0})


@dataclass(frozen=True, kw_only=True, slots=True)
class Gym:
    """Seeded reasoning-gym tasks; the four splits are told apart by a hash of the question.

    `train_size` counts the tasks of the training split; `gate_size` those of each generator in
    each of the other splits, where no question repeats. `difficulty` maps a generator to fields
    of its reasoning-gym config.
    """

    name: ClassVar[str] = "gym"

    generators: tuple[str, ...] = DEFAULT_GENERATORS
    seed: int = 0
    train_size: int = 1_000_000
    gate_size: int = 256
    difficulty: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    system: str = "Solve."

    def __post_init__(self) -> None:
        object.__setattr__(self, "generators", tuple(self.generators))
        if not self.generators:
            raise ConfigError(f"data.generators is empty; choose from {', '.join(GENERATORS)}")
        if len(set(self.generators)) != len(self.generators):
            raise ConfigError(f"data.generators names one twice: {', '.join(self.generators)}")
        for key, names in (("generators", self.generators), ("difficulty", self.difficulty)):
            for name in names:
                _check_name(name, GENERATORS, f"data.{key}")
        for key in ("train_size", "gate_size"):
            if getattr(self, key) < 1:
                raise ConfigError(f"data.{key} must be at least 1, found {getattr(self, key)}")
        for name in self.generators:
            _dataset(name, self._settings(name))

    @property
    def domains(self) -> tuple[str, ...]:
        return self.generators

    def tasks(self, split: Split) -> Sequence[Task]:
        """Task i belongs to generator i modulo their number."""
        if split not in SPLITS:
            raise ConfigError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
        if split == "train":
            return LazyTasks(self.train_size, self._train_task)
        return LazyTasks(self.gate_size * len(self.generators), _HeldOut(self, split).task)

    def start(self, task: Task) -> Episode:
        return SingleTurn(task=task, grade=grade)

    def draw(self, generator: str, split: Split, key: str) -> Iterator[Task]:
        """Endless tasks of one generator in one split, in an order that `key` decides."""
        dataset = _dataset(generator, self._settings(generator))
        misses = 0
        for attempt in count():
            text = f"{self.seed}/{generator}/{split}/{key}/{attempt}"
            index = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])
            task = self._task(generator, split, dataset[index]["metadata"])
            misses = 0 if task else misses + 1
            if task:
                yield task
            elif misses == MAX_MISSES:
                raise _exhausted(generator, split, f"none in {misses} draws")

    def _train_task(self, index: int) -> Task:
        name = self.generators[index % len(self.generators)]
        return next(self.draw(name, "train", str(index)))

    def _settings(self, generator: str) -> tuple[tuple[str, Any], ...]:
        chosen = {**GENERATORS[generator].difficulty, **self.difficulty.get(generator, {})}
        return tuple(sorted(chosen.items()))

    def _task(self, generator: str, split: Split, metadata: Metadata) -> Task | None:
        """None when the question belongs to another split or is the example."""
        spec = GENERATORS[generator]
        worked, example = spec.solve(metadata), spec.solve(spec.example)
        if worked.question == example.question:
            return None
        prompt = (
            Message(role="system", content=self.system),
            Message(role="user", content=example.question),
            Message(role="assistant", content=example.reply),
            Message(role="user", content=worked.question),
        )
        number = task_id(self.name, prompt)
        if split_of(number) != split:
            return None
        return Task(
            id=number,
            env=self.name,
            domain=generator,
            split=split,
            prompt=prompt,
            answer=worked.answer,
            meta={
                "solution": worked.reply,
                "lesson": spec.lesson,
                "views": {
                    "answer": f"{worked.question} (hint: {worked.answer})",
                    "hint": f"{worked.question} (hint: {spec.lesson})",
                },
            },
        )


class _HeldOut:
    """Lists of distinct questions, made once per generator on first access."""

    def __init__(self, env: Gym, split: Split) -> None:
        self._env = env
        self._split = split
        self._made: dict[str, list[Task]] = {}

    def task(self, index: int) -> Task:
        names = self._env.generators
        name = names[index % len(names)]
        if name not in self._made:
            self._made[name] = self._distinct(name)
        return self._made[name][index // len(names)]

    def _distinct(self, name: str) -> list[Task]:
        found: dict[str, Task] = {}
        wanted = self._env.gate_size
        # Drawing all of a pool of n takes about n ln n draws, so 20 per question is generous.
        for task in islice(self._env.draw(name, self._split, ""), 100 + 20 * wanted):
            found.setdefault(task.id, task)
            if len(found) == wanted:
                return list(found.values())
        raise _exhausted(name, self._split, f"{len(found)} distinct ones for {wanted} wanted")


def _exhausted(generator: str, split: Split, what: str) -> DataError:
    return DataError(
        f"generator {generator!r} has too few questions at this difficulty: {what} in split "
        f"{split!r}; lower data.gate_size or widen data.difficulty.{generator}"
    )


def _check_name(name: str, valid: Mapping[str, object], where: str) -> None:
    if name in valid:
        return
    near = difflib.get_close_matches(name, list(valid), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{where}: unknown {name!r}; expected one of {', '.join(valid)}{hint}")


@lru_cache(maxsize=64)
def _dataset(generator: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    """The reasoning-gym dataset of one difficulty; item i depends on i alone."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingExtra.of("reasoning-gym", extra="gym", feature="data.name='gym'") from error
    where = f"data.difficulty.{generator}"
    valid = {f.name: f for f in fields(DATASETS[generator][1]) if f.name not in ("seed", "size")}
    for key, _ in settings:
        _check_name(key, valid, where)
    try:
        return reasoning_gym.create_dataset(generator, seed=0, **dict(settings))
    except (AssertionError, TypeError) as error:
        raise ConfigError(f"{where}: {error} (found {dict(settings)})") from error
