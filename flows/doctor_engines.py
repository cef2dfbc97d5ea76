"""Doctor: what an engine samples and what the trainer computes must be the same model.

The engine is asked through its protocol alone: it need not be in this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from distill.config import Config
from distill.types import Completion, Sampling, TeacherView
from flows.doctor_checks import Finding, Subject, fail, ok

if TYPE_CHECKING:
    from distill.policy import Policy
    from distill.protocols import RolloutEngine
    from flows.night import Night, Student

SEQUENCES = 8
BOUND = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest mean difference per token of a log-probability, by the precision of the weights."""
EXAGGERATION = 8.0
"""Standard deviation, in those of a weight, of what the canary adds to it."""


def student_of(subject: Subject) -> Student:
    """The stage's model with its weights; where an earlier stage is yet to make them, a fresh one
    of the same shape. Loaded once."""
    from flows.night import load_student

    if "student" not in subject.room:
        subject.room["student"] = load_student(night_of(subject), subject.maker, None)
    student: Student = subject.room["student"]
    return student


def night_of(subject: Subject) -> Night:
    """Surroundings of weights that belong to no run: nothing is written into the home."""
    from distill.rundir import RunDir
    from flows.night import Night
    from flows.progress import NoProgress

    run = RunDir(path=subject.home / "runs" / "doctor")
    return Night(config=subject.config, run=run, progress=NoProgress(), read_only=True)


class Gap(NamedTuple):
    """How far two log-probabilities of the same tokens are apart."""

    mean: float
    worst: float
    first: float
    """At the first token of a reply, where a wrong temperature or prompt shows most."""
    row: int
    place: int
    """Reply and token with the largest difference."""


def gap_of(policy: Policy, prompts: Sequence[Sequence[int]], replies: Sequence[Completion]) -> Gap:
    """The engine's log-probability of each sampled token against the trainer's."""
    views = [
        TeacherView(
            token_ids=(*prompt, *reply.token_ids),
            positions=tuple(range(len(prompt), len(prompt) + len(reply.token_ids))),
            kind="own",
            id=str(number),
        )
        for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
    ]
    scored = policy.score(views)
    gaps = [
        [abs(a - b) for a, b in zip(reply.logprobs, scores.logprobs, strict=True)]
        for reply, scores in zip(replies, scored, strict=True)
    ]
    flat = [gap for row in gaps for gap in row]
    row = max(range(len(gaps)), key=lambda i: max(gaps[i], default=0.0))
    return Gap(
        mean=sum(flat) / len(flat),
        worst=max(flat),
        first=max(row_gaps[0] for row_gaps in gaps if row_gaps),
        row=row,
        place=gaps[row].index(max(gaps[row])),
    )


def check_agreement(subject: Subject) -> list[Finding]:
    """Eight sampled replies, scored by the engine and by the trainer, at the run's temperature."""
    if subject.objective is None:
        return []
    engine, student = engine_of(subject), student_of(subject)
    prompts = _prompts(subject)
    replies = [r[0] for r in engine.generate(prompts, _sampling(subject, len(prompts)))]
    gap, bound = gap_of(student.policy, prompts, replies), BOUND[subject.own.model.dtype]
    detail = (
        f"{len(replies)} replies at temperature {subject.own.sampling.temperature:g}: engine and "
        f"trainer differ by {gap.mean:.1e} per token, at most {gap.worst:.1e}, at first tokens "
        f"{gap.first:.1e}"
    )
    if gap.mean <= bound:
        return [ok(detail)]
    token = student.chat.tokenizer.convert_ids_to_tokens(replies[gap.row].token_ids[gap.place])
    return [
        fail(
            f"{detail}; the bound is {bound:.0e}; worst at token {gap.place} of reply {gap.row} "
            f"({token!r})",
            "ask the engine for processed log-probabilities, check its temperature, its precision "
            "and that it has the newest weights",
        )
    ]


def check_canary(subject: Subject) -> list[Finding]:
    """Exaggerated weights must change what the engine says, the old ones must change it back."""
    if subject.objective is None:
        return []
    engine, student = engine_of(subject), student_of(subject)
    prompts = _prompts(subject)
    sampling = replace(_sampling(subject, len(prompts)), temperature=0.0, keys=())
    before = _say(engine, prompts, sampling)
    version = engine.policy_version
    kept = {name: p.detach().clone() for name, p in student.policy.trainable().items()}
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in student.policy.trainable().values():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(noise * EXAGGERATION * max(float(parameter.std()), 0.02))
    _publish(engine, student, version + 1)
    changed = _say(engine, prompts, sampling)
    with torch.no_grad():
        for name, parameter in student.policy.trainable().items():
            parameter.copy_(kept[name])
    _publish(engine, student, version + 2)
    after = _say(engine, prompts, sampling)
    what = "adapter" if student.policy.kind == "adapter" else "set of weights"
    if engine.policy_version != version + 2:
        return [
            fail(
                f"the engine is at version {engine.policy_version} after {version + 2} was sent",
                "its load does not take new weights; look into the engine's log",
            )
        ]
    if changed == before:
        return [
            fail(
                f"an exaggerated {what} changed none of {len(before)} replies: the engine still "
                "samples the old one",
                "check how the engine gets weights: adapter slots, prefix cache, tied output head",
            )
        ]
    if after != before:
        row = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        return [
            fail(
                f"the old {what} did not come back: reply {row} was "
                f"{student.chat.decode(before[row])!r} and is {student.chat.decode(after[row])!r}",
                "the engine keeps something of the exaggerated one: a cache, or an output head",
            )
        ]
    moved = sum(a != b for a, b in zip(before, changed, strict=True))
    return [
        ok(
            f"an exaggerated {what} changed {moved} of {len(before)} replies, and the old one "
            "changed them back"
        )
    ]


def _publish(engine: RolloutEngine, student: Student, version: int) -> None:
    from flows.night import live_ref

    engine.load(live_ref(student, version))


def engine_of(subject: Subject) -> RolloutEngine:
    """The configured engine with the student's weights; made once."""
    from flows.engines import loaded_engine

    if "engine" not in subject.room:
        engine = loaded_engine(night_of(subject), subject.maker, student_of(subject))
        subject.room["engine"] = engine
    made: RolloutEngine = subject.room["engine"]
    return made


def _prompts(subject: Subject) -> list[tuple[int, ...]]:
    asked = subject.chat.prompts(subject.prompts, limit=0)
    return [asked[i % len(asked)] for i in range(SEQUENCES)]


def _sampling(subject: Subject, count: int) -> Sampling:
    own: Config = subject.own
    return Sampling(
        max_new_tokens=min(16, own.sampling.max_new_tokens),
        temperature=own.sampling.temperature,
        stop_token_ids=subject.chat.stop_token_ids,
        keys=tuple(f"doctor/{i}" for i in range(count)),
    )


def _say(
    engine: RolloutEngine, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[tuple[int, ...]]:
    return [replies[0].token_ids for replies in engine.generate(prompts, sampling)]


def close_all(rooms: Sequence[dict[str, object]]) -> None:
    """Let go of engines and students that checks have shared."""
    from flows.engines import close_engines

    for room in rooms:
        room.clear()
    close_engines()
