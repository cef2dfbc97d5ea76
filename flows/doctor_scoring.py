"""Doctor: the path from scores to the loss. A teacher equal to the student must teach nothing.

Also what a served teacher says of itself before anything is asked of it for hours.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from distill.config import Config
from distill.errors import ConfigError
from distill.sections import Named
from distill.types import Rollout, Sampling, ScoreRequest, StopReason, TeacherView
from flows.doctor_checks import Finding, Subject, fail, named_tables, ok, urls_of, warn

if TYPE_CHECKING:
    from distill.policy import Policy
    from distill.protocols import Teacher

EQUAL = 1e-4
"""Largest loss and gradient norm of equal models: rounding in float32, far below any lesson."""
EQUAL_BF16 = 5e-2
PATIENCE = 2.0
"""Seconds that a server may take to accept a connection."""
HURRY: Mapping[str, Any] = {"deadline": 20.0, "timeout": 20.0, "retries": 1}
"""How patiently a server is asked here."""
ORDERS = 1e-4
"""Largest difference of a log-probability between two orders of the same requests."""


@runtime_checkable
class Probed(Protocol):
    """A served teacher that can try itself: the longest planned sequence at the planned k, and the
    same requests in two orders. Raises TeacherError for what cannot work; answers with `longest`,
    `seconds` and `largest_gap`."""

    def probe(self, longest: int, k: int) -> Any: ...


def check_equal_teacher(subject: Subject) -> list[Finding]:
    """The real loss path with the real objective, on a tiny model over the real tokenizer."""
    from flows.doctor_models import micro_policy, one_thread

    with one_thread():
        return _equal_teacher(subject, micro_policy, EQUAL, "a micro model")


def check_equal_teacher_full(subject: Subject) -> list[Finding]:
    """The same with the student's own weights."""
    from flows.doctor_engines import student_of

    bound = EQUAL if subject.own.model.dtype == "float32" else EQUAL_BF16
    return _equal_teacher(subject, lambda s: student_of(s).policy, bound, "the student itself")


def _equal_teacher(subject: Subject, make: Any, bound: float, who: str) -> list[Finding]:
    from distill.objectives.base import option_of, reads_teacher
    from distill.step import on_policy_step

    objective = subject.objective
    if objective is None or not reads_teacher(objective):
        return []
    if any(need.startswith("teacher.group") for need in objective.needs):
        return [ok("not asked: equal models have one tokenizer, and this objective aligns two")]
    rows, parts = _equal_parts(subject, objective, make(subject))
    report = on_policy_step(parts, 1).update
    found = f"loss {report.loss:.1e}, gradient norm {report.grad_norm:.1e}"
    asked = f"{objective.name} with {who} as its own teacher, {len(rows)} replies: {found}"
    if abs(report.loss) <= bound and report.grad_norm <= bound:
        return [ok(asked)]
    if abs(report.loss) <= bound and option_of(objective, "gate", "") == "sigmoid":
        return [ok(f"{asked}; its sigmoid gate pushes by half where models agree")]
    if option_of(objective, "rest", "") == "raw":
        return [
            warn(
                f"{asked}; a raw sum over the support draws mass into it even from equal models",
                'set objective.rest = "tail", which is a true divergence',
            )
        ]
    advice = "scores and loss do not mean the same: look at positions, temperature and support"
    parts = [part for part, _ in getattr(objective, "parts", ((objective, 1.0),))]
    if all(type(part).__module__.startswith("distill.") for part in parts):
        return [fail(f"{asked}; both must be below {bound:.0e}", advice)]
    return [warn(f"{asked}; of a true divergence both are 0", f"{advice}, if it should be one")]


def _equal_parts(subject: Subject, objective: Any, policy: Policy) -> tuple[list[Rollout], Any]:
    from distill.parts import Parts
    from distill.trainer import Trainer, TrainerOptions
    from teachers.local import LocalTeacher
    from teachers.views import VIEWS

    rows = sampled_rows(subject, policy)
    plain = VIEWS["plain"]()
    itself = LocalTeacher(policy, name="the student itself")
    options = TrainerOptions(num_steps=1, lr=1e-6, micro_batch_tokens=4096)
    return rows, Parts(
        tasks=lambda step: [],
        rows=lambda tasks, step: rows,
        policy=policy,
        objective=objective,
        trainer=Trainer(policy, options),
        teacher=itself,
        reference=itself,
        view=plain,
        step_view=plain,
        pad_id=subject.chat.pad_id,
        stage=subject.name,
    )


def sampled_rows(subject: Subject, policy: Policy, *, prompts: int = 2) -> list[Rollout]:
    """Two short replies of a policy to each of a few real prompts, all with the same reward."""
    from distill.engines.hf import HFEngine

    own, chat = subject.own, subject.chat
    asked = [ids[-48:] for ids in chat.prompts(subject.prompts[:prompts], limit=0)]
    sampling = Sampling(
        num_samples=2,
        max_new_tokens=min(8, own.sampling.max_new_tokens),
        temperature=own.sampling.temperature or 1.0,
        stop_token_ids=chat.stop_token_ids,
        keys=tuple(f"doctor/{i}" for i in range(len(asked))),
    )
    found = HFEngine(policy, pad_id=chat.pad_id).generate(asked, sampling)
    return [
        Rollout(
            task_id=f"doctor{number}",
            group_id=f"doctor{number}",
            index=index,
            domain="doctor",
            policy_version=0,
            seed=sampling.keys[number],
            token_ids=(*prompt, *reply.token_ids),
            completion_mask=(False,) * len(prompt) + (True,) * len(reply.token_ids),
            logprobs=(0.0,) * len(prompt) + reply.logprobs,
            stop=StopReason.STOP,
            traj_id=f"doctor{number}.{index}",
            prompt_length=len(prompt),
            obs_key="doctor",
            reward=0.5,
            return_=0.5,
            step_reward=0.5,
        )
        for number, (prompt, replies) in enumerate(zip(asked, found, strict=True))
        for index, reply in enumerate(replies)
    ]


def check_sampling(subject: Subject) -> list[Finding]:
    """Student, engine and teacher must mean the same distribution."""
    own = subject.own
    if subject.objective is None:
        return []
    found: list[Finding] = []
    temperature = own.sampling.temperature
    servers = [
        url
        for name, options in served(own.teacher.name, own.teacher.options)
        if name != "remote"  # which scores at the student's temperature
        for url in urls_of(options)
    ]
    if temperature != 1.0 and servers:
        found.append(
            warn(
                f"the student is sampled and scored at temperature {temperature:g}, the teacher at "
                f"{servers[0]} scores at 1: equal models would differ by more than 0",
                "set sampling.temperature = 1, or take a teacher in this process, whose logits are "
                "divided by the same temperature",
            )
        )
    if own.sampling.top_p < 1.0 or own.sampling.top_k > 0:
        found.append(
            warn(
                f"training replies are cut to top_p {own.sampling.top_p:g}, top_k "
                f"{own.sampling.top_k}: the engine renormalises over what is kept, the trainer "
                "over the whole vocabulary, so ratios carry the kept mass",
                "set sampling.top_p = 1 and sampling.top_k = 0",
            )
        )
    if not found:
        found.append(ok(f"temperature {temperature:g} on both sides, whole vocabulary"))
    return found


def served(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Teachers behind a server that scores tokens; those that only write are not meant."""
    for inner, table in named_tables(name, options):
        if urls_of(table) and inner != "black_box":
            yield inner, table


def check_servers(subject: Subject) -> list[Finding]:
    """Does anybody answer where an engine or a teacher is named?"""
    found: list[Finding] = []
    own = subject.own
    for section in ("engine", "teacher", "reference", "analyst"):
        named = getattr(own, section)
        for _, options in named_tables(named.name, named.options):
            for url in urls_of(options):
                problem = unreachable(url)
                if problem:
                    advice = f"start the server, or correct {section}.url"
                    found.append(fail(f"nobody answers at {url} ({problem})", advice))
                else:
                    found.append(ok(f"{url} accepts connections"))
    return found


def unreachable(url: str) -> str:
    """Why no connection to a server can be made; empty when one can."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = parts.hostname or ""
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return ""  # asked through a proxy, which alone can tell
    try:
        with socket.create_connection((host, port), timeout=PATIENCE):
            return ""
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def check_handshake(subject: Subject) -> list[Finding]:
    """What served teachers say of themselves when they are greeted: model, tokenizer, cap on k,
    mode of the log-probabilities, length."""
    k, longest = planned(subject)
    return [
        ok(
            f"{teacher.name} has this tokenizer and answers with k = {k}; it offers "
            f"{', '.join(sorted(teacher.capabilities))}; planned are {longest} tokens"
        )
        for teacher in _served_teachers(subject)
    ]


def check_orders(subject: Subject) -> list[Finding]:
    """The longest planned sequence at the planned k, and equal scores in two orders."""
    return [
        finding for teacher in _served_teachers(subject) for finding in _orders(subject, teacher)
    ]


def _orders(subject: Subject, teacher: Teacher) -> list[Finding]:
    k, longest = planned(subject)
    if isinstance(teacher, Probed):
        told = teacher.probe(longest, k)
        return [
            ok(
                f"{teacher.name} scored {told.longest} tokens with k = {k} in {told.seconds:.1f} "
                f"s; two orders differ by at most {told.largest_gap:.1e}"
            )
        ]
    prompts = subject.chat.prompts(subject.prompts, limit=0)
    views = [_view(ids, 8, str(i)) for i, ids in enumerate(prompts) if len(ids) > 1]
    want = ScoreRequest(candidates=k)
    first = teacher.score(views, want)
    second = teacher.score(views[::-1], want)[::-1]
    worst, where = 0.0, 0
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        gaps = [abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)]
        if any(math.isnan(gap) for gap in gaps) or max(gaps, default=0.0) > worst:
            worst, where = max(gaps), number
    text = f"{len(views)} prompts in two orders differ by at most {worst:.1e}"
    found = [ok(text)]
    if not worst <= ORDERS:
        found = [
            fail(
                f"{text} (prompt {where}, bound {ORDERS:.0e}): the server's answer depends on what "
                "it was asked before",
                "turn the server's prefix cache off for scoring, or update the server",
            )
        ]
    ids = (prompts[0] * (longest // len(prompts[0]) + 1))[:longest]
    teacher.score(
        [_view(ids, min(longest - 1, subject.own.sampling.max_new_tokens), "longest")], want
    )
    return [*found, ok(f"a sequence of {longest} tokens was scored with k = {k}")]


def planned(subject: Subject) -> tuple[int, int]:
    """Candidates per token, and tokens of the longest sequence, that the stage will ask for."""
    from distill.objectives.base import num_candidates

    objective, own = subject.objective, subject.own
    asks = objective and {"teacher.candidates", "teacher.own_top_k"} & objective.needs
    k = num_candidates(objective) if objective and asks else 0
    return k, own.model.max_length + own.sampling.max_new_tokens


def _view(ids: Sequence[int], last: int, name: str) -> TeacherView:
    """A prompt whose last tokens are scored as if they were a reply."""
    first = max(1, len(ids) - last)
    return TeacherView(
        token_ids=tuple(ids), positions=tuple(range(first, len(ids))), kind="plain", id=name
    )


def _served_teachers(subject: Subject) -> list[Teacher]:
    """The stage's teachers that score behind a server, made once; nobody is waited for."""
    from flows import teaching
    from flows.doctor_models import micro_policy
    from flows.night import Student

    named = subject.own.teacher
    tables = list(served(named.name, named.options))
    if not tables:
        return []
    if "teachers" not in subject.room:
        student = Student(policy=micro_policy(subject), chat=subject.chat)
        k, _ = planned(subject)
        made = [
            teaching.Surroundings(
                config=_impatient(subject.own, name, table),
                student=student,
                locate=_nowhere,
                candidates=k,
            ).teacher()
            for name, table in tables
            if not any(unreachable(url) for url in urls_of(table))  # which fails by itself
        ]
        subject.room["teachers"] = [teacher for teacher in made if teacher is not None]
    teachers: list[Teacher] = subject.room["teachers"]
    return teachers


def _impatient(own: Config, name: str, table: Mapping[str, Any]) -> Config:
    """The configuration with one served teacher alone, which is not waited for."""
    options = {k: v for k, v in table.items() if k not in ("name", "cache")}
    return replace(own, teacher=Named(name=name, options={**options, **HURRY}))


def _nowhere(path: str, revision: str | None) -> Path:
    raise ConfigError(f"a served teacher should need no folder, but asked for {path!r}")
