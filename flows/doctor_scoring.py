"""Doctor: the path from scores to the loss. A teacher equal to the student must teach nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distill.types import Rollout, Sampling, StopReason
from flows.doctor_checks import Finding, Subject, fail, ok, urls_of, warn

if TYPE_CHECKING:
    from distill.policy import Policy

EQUAL = 1e-4
"""Largest loss and gradient norm of equal models: rounding in float32, far below any lesson."""
EQUAL_BF16 = 5e-2


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
    from flows.doctor_servers import served

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
