"""A judging model's view of a turn, and of how much a request demands. Optional.

The judge reads numbered segments of the record and facts that it cannot change, and answers per
dimension with a verdict, the segments that show it, and a coverage. Its answer is read strictly: a
verdict that cites nothing, or something that it was not shown, counts as not evaluated, and so does
everything in an answer that cannot be read. Long turns are judged in parts and put together.
The number of a segment is the place of its message in the conversation of the turn.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

from distill.curriculum.messages import message_text, tool_calls, without_fence
from distill.curriculum.profile import DIMENSIONS, Dimension, Finding, Grade, Profile, combine
from distill.curriculum.records import NUM_TIERS
from distill.curriculum.turns import UserTurn
from distill.errors import TeacherError
from distill.types import Message, Sampling

if TYPE_CHECKING:
    from distill.curriculum.demand import DemandInput

Complete = Callable[[Sequence[Sequence[Message]], int, Sampling], list[list[str]]]
"""As `complete` of a text model: prompts, answers per prompt, how to sample."""

LINE = "| "
"""Begins every line of text that is not ours."""
GRADES: tuple[Grade, ...] = ("PASS", "WARN", "FAIL", "NOT_EVALUATED")
AT_THE_END: tuple[Dimension, ...] = ("goal_attainment", "termination")
"""Dimensions that only the last part of a long turn can show."""
_FIELD = re.compile(r"\{([a-z]+)\}")
_MARKUP = re.compile(
    r"<(?=[/|\uff5c]|\s{0,9}(?:im_|start_|end_|begin_|eot|s>))|\[(?=/?INST\])", re.I
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeOptions:
    """How much of a turn a judge is shown at once. Characters."""

    part: int = 24_000
    """Of all segments in one question; a longer turn is asked about in parts."""
    segment: int = 4_000
    """Of one segment; a longer one loses its middle, visibly."""
    max_tokens: int = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One part of a turn, put to a judge."""

    messages: tuple[Message, ...]
    segments: tuple[int, ...]
    """Numbers that an answer may cite."""
    asked: tuple[Dimension, ...]


def questions(
    turn: UserTurn, facts: Profile, options: JudgeOptions | None = None
) -> list[Question]:
    """What a judge is asked about a turn; nothing where there is no text. `facts` are what rules
    found: `profile.check`."""
    options = options or JudgeOptions()
    if not turn.messages or turn.start < 0 or not turn.response:
        return []
    shown = {
        i: _segment(i, turn.messages[i], options.segment)
        for i in range(turn.start, len(turn.messages))
    }
    parts: list[list[int]] = [[]]
    room = options.part - len(shown[turn.start])
    left = room
    for i in range(turn.start + 1, len(turn.messages)):
        if parts[-1] and len(shown[i]) > left:
            parts.append([])
            left = room
        parts[-1].append(i)
        left -= len(shown[i])
    return [
        _question([turn.start, *part], shown, facts, number, len(parts))
        for number, part in enumerate(parts)
    ]


def opinions(
    turns: Sequence[tuple[UserTurn, Profile]],
    complete: Complete,
    options: JudgeOptions | None = None,
) -> list[Profile]:
    """A judge's view of each turn, to be merged into the profile that rules gave it.

    All questions go out in one call. When the model fails, every view is NOT_EVALUATED with what
    went wrong as its reason. TeacherError when it answers another number of questions.
    """
    options = options or JudgeOptions()
    asked = [questions(turn, facts, options) for turn, facts in turns]
    flat = [question for some in asked for question in some]
    if not flat:
        return [combine([]) for _ in turns]
    sampling = Sampling(
        max_new_tokens=options.max_tokens,
        temperature=0.0,
        keys=tuple(
            f"judge/{turn.id}/{number}"
            for (turn, _), some in zip(turns, asked, strict=True)
            for number in range(len(some))
        ),
    )
    try:
        replies = complete([question.messages for question in flat], 1, sampling)
    except TeacherError as error:
        return [_unseen(f"the judge was interrupted: {error}") for _ in turns]
    if [len(texts) for texts in replies] != [1] * len(flat):
        raise TeacherError(
            f"a judge was asked {len(flat)} questions and should answer each once, but it gave "
            f"{len(replies)} answers; check its `complete`"
        )
    answers = iter(texts[0] for texts in replies)
    return [_together(some, [next(answers) for _ in some]) for some in asked]


def parse_verdicts(
    text: str, segments: Collection[int], asked: Sequence[Dimension] = DIMENSIONS
) -> Profile:
    """A judge's answer. What cannot be read, cites nothing or cites a segment that it was not shown
    is NOT_EVALUATED."""
    table = _object(text)
    if table is None:
        return _unseen("the judge's answer is not one JSON object")
    return {
        name: _finding(table.get(name), segments)
        if name in asked
        else Finding(by="judge", reason="the judge was not asked")
        for name in DIMENSIONS
    }


def demand_messages(wanted: DemandInput) -> list[Message]:
    """What a judge is asked about the demand of a request. It reads nothing but its input."""
    options = JudgeOptions()
    history = [_segment(i, message, options.segment) for i, message in enumerate(wanted.history)]
    text = _fill(
        "demand",
        {
            "tools": _quoted("\n".join(wanted.tools) or "none", options.part),
            "history": _last(history, options.part) or f"{LINE}nothing",
            "request": _quoted(wanted.request, options.part),
        },
    )
    return [Message(role="user", content=text)]


def parse_demand(text: str) -> tuple[float, ...] | None:
    """Probabilities of the four tiers from a judge's answer; None unless it gives four of them that
    add up to 1, give or take 0.02 for rounding. They are returned with the sum 1."""
    table = _object(text)
    probs = table.get("probs") if table is not None else None
    if not isinstance(probs, list) or len(probs) != NUM_TIERS:
        return None
    if not all(_is_share(p) for p in probs) or abs(sum(probs) - 1.0) > 0.02:
        return None
    return tuple(float(p) / sum(probs) for p in probs)


def _question(
    part: Sequence[int], shown: Mapping[int, str], facts: Profile, number: int, parts: int
) -> Question:
    last = number == parts - 1
    asked = tuple(name for name in DIMENSIONS if last or name not in AT_THE_END)
    entry = {"verdict": "PASS|WARN|FAIL|NOT_EVALUATED", "evidence": [part[-1]], "coverage": 1.0}
    where = f" (part {number + 1} of {parts}; the request stands in each)" if parts > 1 else ""
    text = _fill(
        "judge",
        {
            "asked": ", ".join(f"`{name}`" for name in asked),
            "schema": json.dumps({name: entry for name in asked}),
            "facts": _facts(facts),
            "part": where,
            "segments": "\n".join(shown[i] for i in part),
        },
    )
    message = Message(role="user", content=text)
    return Question(messages=(message,), segments=tuple(part), asked=asked)


def _together(asked: Sequence[Question], answers: Sequence[str]) -> Profile:
    """One view of the parts of a turn; a dimension counts in the parts that were asked about it."""
    if not asked:
        return _unseen("there is nothing to judge")
    seen = [
        parse_verdicts(answer, question.segments, question.asked)
        for question, answer in zip(asked, answers, strict=True)
    ]
    return {
        name: combine([p for p, q in zip(seen, asked, strict=True) if name in q.asked])[name]
        for name in DIMENSIONS
    }


def _unseen(reason: str) -> Profile:
    return {name: Finding(by="judge", reason=reason) for name in DIMENSIONS}


def _finding(entry: Any, segments: Collection[int]) -> Finding:
    if not isinstance(entry, Mapping) or entry.get("verdict") not in GRADES:
        return Finding(by="judge", reason="no verdict that can be read")
    evidence, coverage = entry.get("evidence"), entry.get("coverage")
    if entry["verdict"] == "NOT_EVALUATED" or not isinstance(evidence, list) or not evidence:
        return Finding(by="judge", reason="the judge cites nothing")
    if any(isinstance(i, bool) or not isinstance(i, int) or i not in segments for i in evidence):
        return Finding(by="judge", reason="the judge cites a segment that it was not shown")
    if not _is_share(coverage):
        return Finding(by="judge", reason="the judge gives no coverage from 0 to 1")
    return Finding(
        grade=cast(Grade, entry["verdict"]),
        coverage=float(cast(float, coverage)),
        evidence=tuple(sorted(set(evidence))),
        reason="the judge",
        by="judge",
    )


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.0


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text is, alone or in one fence; None for anything else, also for an
    object that names a field twice."""
    try:
        value = json.loads(without_fence(text), object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a field occurs twice")
    return dict(pairs)


def _facts(profile: Profile) -> str:
    lines = []
    for name in DIMENSIONS:
        found = profile.get(name)
        if found is None or found.grade == "NOT_EVALUATED":
            continue
        where = f", segments {', '.join(map(str, found.evidence))}" if found.evidence else ""
        lines.append(f"{name}: {found.grade} ({found.reason}){where}")
    return _quoted("\n".join(lines) or "none", 4000)


def _segment(number: int, message: Mapping[str, Any], most: int) -> str:
    """A message as a heading of ours and quoted text of others."""
    parts = [message_text(message)]
    parts += [f"calls {name} with {arguments}" for _, name, arguments in tool_calls(message)]
    role = str(message.get("role"))
    speaker = role if role in ("system", "user", "assistant", "tool") else "unknown"
    text = _quoted("\n".join(part for part in parts if part), most)
    return f"Segment {number} ({speaker}):\n{text}"


def _last(texts: Sequence[str], most: int) -> str:
    """The last texts that fit, with a line that says how many were left out."""
    kept: list[str] = []
    for text in reversed(texts):
        if kept and sum(map(len, kept)) + len(text) > most:
            break
        kept.append(text)
    gone = len(texts) - len(kept)
    head = [f"{gone} earlier messages are left out."] if gone else []
    return "\n".join((*head, *reversed(kept)))


def _quoted(text: str, most: int) -> str:
    """Text that can only be read: cut in its middle, a mark before every line, nothing hidden, no
    markup of chat templates."""
    if len(text) > most:
        gone, tail = len(text) - most, most // 2
        text = f"{text[: most - tail]} [... {gone} characters left out ...] {text[-tail:]}"
    lines = "\n".join(text.splitlines())
    shown = "".join(c for c in lines if c in "\n\t" or unicodedata.category(c)[0] != "C")
    neutral = _MARKUP.sub(lambda found: f"{found[0]} ", shown)
    return "\n".join(f"{LINE}{line}" for line in neutral.split("\n"))


def _fill(name: str, values: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda found: values.get(found[1], found[0]), _prompt(name))


@cache
def _prompt(name: str) -> str:
    path = files("distill.curriculum") / "prompts" / f"{name}.md"
    return path.read_text(encoding="utf-8").strip()
