"""Parts of a night by themselves: train a stage, sample a reply, evaluate weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill.config import Config, Stage
from distill.errors import ConfigError
from distill.models import checkpoint_ref
from distill.rundir import RunDir
from distill.types import (
    EvalReport,
    Message,
    Sampling,
    ScoreRequest,
    Split,
    Task,
    TeacherView,
)
from flows import judging, registry, teaching
from flows.banking import eval_prompts
from flows.engines import close_engines, loaded_engine
from flows.night import Night, base_name, begin, load_student, prepare_start, set_threads
from flows.progress import NoProgress, Progress
from flows.stages import run_stage


def around(config: Config, run: RunDir | None, home: Path) -> Night:
    """The surroundings of weights that are already there; nothing is written into them."""
    run = run or RunDir(path=home / "runs" / "none")
    return Night(config=config, run=run, progress=NoProgress(), read_only=True)


def train(config: Config, stage: Stage, *, run: RunDir, progress: Progress) -> Path:
    """Train one stage and the stages before it; returns the folder of its weights.

    Nothing is evaluated, judged or promoted.
    """
    night = Night(config=config, run=run, progress=progress)
    with registry.model_lock(night.home, config.model.name):
        begin(night)
        set_threads(night)
        for earlier in night.bootstrap_stages:
            run_stage(night, earlier)
        if stage.target == "student":
            prepare_start(night)
            position = night.student_stages.index(stage)
            for student in night.student_stages[: position + 1]:
                run_stage(night, student)
    return night.final(stage.name)


def sample(
    night: Night, weights: Path, prompt: str, *, teacher: bool, bank: str | None = None
) -> dict[str, Any]:
    """One reply to `prompt`: `reply`, `stop` and `tokens`, each with its log-probability and, when
    asked for, the teacher's. `bank` are the skills that belong to the weights, as NAME@VERSION,
    where they are known."""
    stage = night.config.last_student()
    config = night.config.for_stage(stage)
    student = load_student(night, config, weights)
    asked: tuple[Message, ...] = (Message(role="user", content=prompt),)
    prompts = eval_prompts(night, config, stage, student, start=False, pinned=bank)
    if prompts is not None:
        task = Task(id="sample", env="", domain="", split="train", prompt=asked)
        asked = prompts.show([task]).tasks[0].prompt
    ids = student.chat.prompt(asked)
    sampling = Sampling(
        max_new_tokens=config.sampling.max_new_tokens,
        temperature=0.0,
        stop_token_ids=student.chat.stop_token_ids,
        keys=(prompt,),
    )
    try:
        engine = loaded_engine(night, config, student)
        completion = engine.generate([ids], sampling)[0][0]
        engine.close()
    finally:
        close_engines()
    names = student.chat.tokenizer.convert_ids_to_tokens(list(completion.token_ids))
    tokens: list[dict[str, Any]] = [
        {"token": name, "logprob": round(logprob, 4)}
        for name, logprob in zip(names, completion.logprobs, strict=True)
    ]
    if teacher:
        judge = teaching.build_teacher(config, student, night.locate)
        view = TeacherView(
            token_ids=(*ids, *completion.token_ids),
            positions=tuple(range(len(ids), len(ids) + len(completion.token_ids))),
            kind="plain",
            id="sample",
        )
        if judge is None:
            raise ConfigError(
                "--teacher: the configuration names no teacher that scores tokens; set teacher.name"
            )
        scores = judge.score([view], ScoreRequest())[0]
        for entry, score in zip(tokens, scores.logprobs, strict=True):
            entry["teacher_logprob"] = round(score, 4)
    return {
        "reply": student.chat.decode(completion.token_ids),
        "stop": completion.stop.value,
        "tokens": tokens,
    }


def evaluate_checkpoint(
    night: Night, weights: Path, split: Split, *, bank: str | None = None
) -> EvalReport:
    """Accuracy of weights on a split of the configured tasks; `bank` as for `sample`."""
    stage = night.config.last_student()
    config = night.config.for_stage(stage)
    student = load_student(night, config, weights)
    digest = checkpoint_ref(weights, base=base_name(config)).digest
    prompts = eval_prompts(night, config, stage, student, start=False, pinned=bank)
    try:
        engine = loaded_engine(night, config, student, max_batch=config.evals.max_batch)
        try:
            return judging.run_report(config, student, engine, digest, split=split, prompts=prompts)
        finally:
            engine.close()
    finally:
        close_engines()
