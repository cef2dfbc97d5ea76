"""Who writes hindsight in a stage: from [analyst] and [skills] to notes of every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distill.config import Config
from distill.errors import ConfigError
from distill.sections import Named
from distill.types import Note, Rollout, Task
from flows.naming import construct
from flows.texting import LocalTextOptions, build_text_model
from teachers.black_box import BlackBoxOptions

if TYPE_CHECKING:
    from distill.protocols import TextModel
    from flows.night import Student
    from skills.hindsight.analysts import Analyst
    from skills.hindsight.model_analyst import AnalystOptions
    from skills.hindsight.parse import ReplyRules
    from skills.hindsight.prompting import PromptOptions

WRITERS: dict[str, type[Any]] = {"black_box": BlackBoxOptions, "text": LocalTextOptions}


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleOptions:
    """name = "rules": the lesson that a generated task brings along."""

    wrong: Literal["", "random"] = ""
    """`random` writes the lesson of another task instead: a control."""
    steps: bool = True
    """Also write the lessons of single turns."""
    format: Literal["json", "slot"] = "json"
    """In a stage of worked solutions: how the student is to write what it learns to write ..."""
    truth: Literal["none", "answer", "solution"] = "none"
    """... and what it is shown of the task of a failed attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptions:
    """name = "policy": the student itself, with the weights that acted."""

    format: Literal["json", "slot"] = "json"
    """`slot` is the text in the first square brackets of the reply."""
    attempts: int = 2
    """How often an attempt is asked about when the reply cannot be read."""
    max_tokens: int = 1024
    """Longest reply."""
    truth: Literal["none", "answer", "solution"] = "none"
    """What the analyst is shown of the task of a failed attempt."""
    max_batch: int = 256
    """Replies written at once."""

    def __post_init__(self) -> None:
        for name in ("attempts", "max_tokens", "max_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"analyst.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions(PolicyOptions):
    """name = "model": another model, local or behind an endpoint."""

    writer: Mapping[str, Any]
    """Its name, "black_box" or "text", and the options of that."""


ANALYSTS: dict[str, type[Any]] = {
    "rules": RuleOptions,
    "policy": PolicyOptions,
    "model": ModelOptions,
}
Hindsight = Callable[[Sequence[Rollout], int], list[Note]]


def analyst_options(config: Config) -> Any:
    """The checked options of [analyst]; None without one. ConfigError as for any section."""
    if not config.analyst.name:
        return None
    options = construct(config.analyst, ANALYSTS, "analyst", config)
    if isinstance(options, ModelOptions):
        writer_options(options, config)
    return options


def writer_options(options: ModelOptions, config: Config) -> Any:
    name = options.writer.get("name")
    if not isinstance(name, str):
        raise ConfigError(
            f"analyst.writer must be a table with a name, one of {', '.join(WRITERS)}; found "
            f"{dict(options.writer)!r}"
        )
    rest = {key: value for key, value in options.writer.items() if key != "name"}
    return construct(Named(name=name, options=rest), WRITERS, "analyst.writer", config)


def build_hindsight(
    config: Config,
    student: Student,
    task_of: Callable[[str], Task],
    locate: Callable[[str, str | None], Path],
) -> Hindsight | None:
    """What turns the rows of a step into notes; None without an analyst."""
    from skills.hindsight.analysts import written
    from skills.hindsight.episodes import episodes_of

    analyst = build_analyst(config, student, locate)
    if analyst is None:
        return None
    decode, threshold = student.chat.decode, config.skills.success

    def hindsight(rollouts: Sequence[Rollout], step: int) -> list[Note]:
        episodes = episodes_of(rollouts, task_of, decode, threshold=threshold)
        return [_counted(note, student) for note in written(analyst, episodes, step)]

    return hindsight


def build_analyst(
    config: Config, student: Student, locate: Callable[[str, str | None], Path]
) -> Analyst | None:
    """The analyst of a stage behind its checks."""
    from skills.hindsight.analysts import Checked, Selected
    from skills.hindsight.checks import CheckRules
    from skills.hindsight.rule_analyst import RuleAnalyst

    options, skills = analyst_options(config), config.skills
    if options is None:
        return None
    inner: Analyst
    if isinstance(options, RuleOptions):
        inner = RuleAnalyst(
            wrong=options.wrong,
            steps=options.steps,
            max_step_skills=skills.max_step_skills,
            seed=config.run.seed,
        )
    elif isinstance(options, PolicyOptions):
        inner = _model_analyst(config, options, student, locate)
    else:
        inner = options  # one's own class
    rules = CheckRules(answers=has_secrets(config))
    return Selected(Checked(inner, rules), outcomes=skills.outcomes, lend=skills.lend)


def has_secrets(config: Config) -> bool:
    """Whether a skill that states the answer of a task gives something away. In the generated
    world what is to be learnt, a rule or an order, is the answer itself."""
    return config.data.name != "world"


def _model_analyst(
    config: Config,
    options: PolicyOptions,
    student: Student,
    locate: Callable[[str, str | None], Path],
) -> Analyst:
    from skills.hindsight.model_analyst import ModelAnalyst

    model = _writer(config, options, student, locate)
    name = str(options.writer["name"]) if isinstance(options, ModelOptions) else "policy"
    if isinstance(options, ModelOptions):
        return ModelAnalyst(model, asking(config, options, student), name=name)
    # What is too long for the student is a note that never came, not the end of the night.
    chat, asked = student.chat, asking(config, options, student)
    return ModelAnalyst(
        model,
        replace(asked, max_prompt_tokens=chat.max_length),
        name=name,
        count_tokens=lambda messages: len(chat.prompts([messages], limit=0)[0]),
    )


def build_writer(
    config: Config, student: Student, locate: Callable[[str, str | None], Path]
) -> TextModel | None:
    """The model behind the analyst; None for one that follows rules."""
    options = analyst_options(config)
    return _writer(config, options, student, locate) if isinstance(options, PolicyOptions) else None


def _writer(
    config: Config,
    options: PolicyOptions,
    student: Student,
    locate: Callable[[str, str | None], Path],
) -> TextModel:
    from distill.engines.hf import HFEngine
    from teachers.text import LocalTextModel

    if isinstance(options, ModelOptions):
        return build_text_model(writer_options(options, config), student, locate)
    engine = HFEngine(student.policy, pad_id=student.chat.pad_id, max_batch=options.max_batch)
    return LocalTextModel(engine, student.chat, name="policy")


def asking(config: Config, options: PolicyOptions, student: Student) -> AnalystOptions:
    """How a model is asked, whoever it is."""
    from skills.hindsight.model_analyst import AnalystOptions

    rules, prompts = question(config, options, student)
    return AnalystOptions(
        rules=rules, prompts=prompts, attempts=options.attempts, max_tokens=options.max_tokens
    )


def question(
    config: Config, options: PolicyOptions | RuleOptions, student: Student
) -> tuple[ReplyRules, PromptOptions]:
    """What a reply must look like, and what the question shows of an attempt."""
    from flows.skills_showing import specials_of
    from skills.hindsight.parse import ReplyRules
    from skills.hindsight.prompting import PromptOptions

    wants_steps = config.view.options.get("scope", "episode") != "episode"
    rules = ReplyRules(
        format=options.format,
        max_step_skills=config.skills.max_step_skills if wants_steps else 0,
        min_words=config.skills.min_words,
    )
    specials = specials_of(student.chat.tokenizer)
    return rules, PromptOptions(truth=options.truth, specials=specials)


def _counted(note: Note, student: Student) -> Note:
    """With the tokens of what the analyst wrote, as the student's tokenizer counts them; an earlier
    unreadable reply is taken to be as long as the last one."""
    if not note.attempts:
        return note
    length = len(student.chat.encode([note.raw])[0]) + 1
    return replace(note, num_tokens=length * note.attempts)
