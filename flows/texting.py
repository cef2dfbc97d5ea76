"""Teachers that only write text: from configuration to the auditor of a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distill.config import STAGE_PREFIX
from distill.errors import ConfigError
from distill.objectives.base import Objective, option_of
from distill.protocols import TextModel
from distill.types import Task
from teachers.black_box import BlackBoxModel, BlackBoxOptions

if TYPE_CHECKING:
    from flows.night import Student
    from teachers.audit import Auditor

TEXT = frozenset({"text"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTextOptions:
    """name = "text": a local model that only writes, as a teacher behind an endpoint would."""

    path: str = ""
    """A Hugging Face name, a directory, `package:NAME` or `stage:NAME`; its tokenizer may differ
    from the student's. Empty with an adapter of the student's own base."""
    adapter: str = ""
    """A folder or `stage:NAME` with an adapter of the student's base model."""
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_batch: int = 256
    """Continuations written at once."""

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.adapter):
            raise ConfigError(
                "a teacher 'text' needs either teacher.path, a model, or teacher.adapter, an "
                f"adapter of the student's base; found {self.path!r} and {self.adapter!r}"
            )
        if self.max_batch < 1:
            raise ConfigError(f"teacher.max_batch must be at least 1, got {self.max_batch}")


def is_text_only(options: Any) -> bool:
    """Whether a teacher with these options can write but not score."""
    if isinstance(options, BlackBoxOptions | LocalTextOptions):
        return True
    return frozenset(getattr(options, "capabilities", ())) == TEXT


def require_scoring(options: Any, where: str) -> None:
    """ConfigError for a text-only teacher where log-probabilities are needed."""
    if is_text_only(options):
        raise ConfigError(
            f"{where} only writes text and cannot score tokens; it may only stand alone, as "
            'teacher.name, beside an objective that reads text, such as "omni_opd"'
        )


def build_auditor(
    options: Any,
    objective: Objective,
    student: Student,
    task_of: Callable[[str], Task],
    locate: Callable[[str, str | None], Path],
) -> Auditor:
    """What lets the teacher of these options judge the student's replies."""
    from teachers.audit import Auditor

    return Auditor(
        model=build_text_model(options, student, locate),
        chat=student.chat,
        task_of=task_of,
        num_chunks=option_of(objective, "num_chunks", 1),
        num_continuations=option_of(objective, "num_continuations", 1),
        chunk_length=option_of(objective, "chunk_length", 1),
        similarity=option_of(objective, "similarity", "ned"),
    )


def build_text_model(
    options: Any, student: Student, locate: Callable[[str, str | None], Path]
) -> TextModel:
    """The live model behind the options of a teacher that writes."""
    if isinstance(options, BlackBoxOptions):
        return BlackBoxModel(options, render=student.chat.render)
    if isinstance(options, LocalTextOptions):
        return _local(options, student, locate)
    if not callable(getattr(options, "complete", None)):
        raise ConfigError(
            f"teacher {type(options).__name__} offers text, but has no method `complete(prompts, "
            "n, sampling)`; see TextModel in distill/protocols.py"
        )
    own: TextModel = options
    return own


def _local(
    options: LocalTextOptions, student: Student, locate: Callable[[str, str | None], Path]
) -> TextModel:
    from distill.body import require_known_head
    from distill.engines.hf import HFEngine
    from distill.models import adapter_dir, eos_token_ids, load_model, load_tokenizer
    from distill.policy import Policy
    from distill.tokens import Chat, tokenizer_digest
    from teachers.text import LocalTextModel

    policy, chat = student.policy, student.chat
    if options.adapter:
        made_here = options.adapter.startswith(STAGE_PREFIX)
        place = locate(options.adapter, None) if made_here else Path(options.adapter)
        role = policy.add_adapter("teacher", adapter_dir(place))
        engine = HFEngine(policy, role=role, pad_id=chat.pad_id, max_batch=options.max_batch)
        return LocalTextModel(engine, chat, name=options.adapter)
    folder = str(locate(options.path, options.revision))
    tokenizer = load_tokenizer(folder)
    frozen = Policy(
        load_model(folder, dtype=options.dtype).to(policy.device),
        base=options.path,
        trainable=False,
    )
    require_known_head(frozen.model)
    if tokenizer_digest(tokenizer) != tokenizer_digest(chat.tokenizer):
        ends = eos_token_ids(frozen.model)
        chat = Chat(tokenizer, eos_token_ids=ends, max_length=chat.max_length)
    engine = HFEngine(frozen, pad_id=chat.pad_id, max_batch=options.max_batch)
    return LocalTextModel(engine, chat, name=options.path)
