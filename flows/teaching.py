"""Teachers and references of a stage: from configuration to live objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distill.config import STAGE_PREFIX, Config
from distill.errors import ConfigError
from distill.followers import FollowerSpec
from distill.objectives.base import Objective
from distill.policy import BASE, STUDENT, Policy
from distill.protocols import Teacher
from distill.rundir import digest_json
from distill.sections import Named
from distill.tables import coerce
from distill.types import Task
from flows.naming import construct
from flows.night import Student
from flows.texting import (
    TEXT,
    LocalTextOptions,
    build_auditor,
    is_text_only,
    require_scoring,
)
from teachers.black_box import BlackBoxOptions
from teachers.cross_options import CAPABILITIES as GROUPS
from teachers.cross_options import CrossTokenizerOptions
from teachers.remote_options import RemoteOptions
from teachers.server import CAPABILITIES as SERVER
from teachers.server import ServerTeacherOptions

if TYPE_CHECKING:
    from teachers.audit import Auditor

Locate = Callable[[str, str | None], Path]
"""Turns `stage:NAME`, a package, a folder or a hub name into a folder."""
EVERYTHING = frozenset({"logprobs", "entropy", "candidates", "own_top_k", "distribution"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions:
    """name = "local": a frozen Hugging Face model in this process."""

    path: str = ""
    """A Hugging Face name, a directory, `package:NAME` or `stage:NAME`; empty with an adapter of
    the student's own base."""
    adapter: str = ""
    """A folder or `stage:NAME` with an adapter of the student's base model."""
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantize: Literal["none", "int8", "int4"] = "none"
    """Fewer bits per weight; needs the extra `quant`."""
    cache: bool = False
    """Keep scores under `cache/scores` of the home folder and never compute the same ones again."""
    cache_gib: float = 8.0
    """Most that the cache may hold; the oldest scores go first."""

    def __post_init__(self) -> None:
        if not (self.path or self.adapter):
            raise ConfigError(
                'the option path is missing: "local" needs a model, or an adapter of the '
                "student's base"
            )
        if self.adapter and (self.quantize != "none" or self.cache):
            raise ConfigError(
                "teacher.quantize and teacher.cache are for a model of its own; an adapter shares "
                "the student's base"
            )
        if not self.cache_gib > 0:
            raise ConfigError(f"teacher.cache_gib must be positive, got {self.cache_gib:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfOptions:
    """name = "self_teacher": the student's own model under another set of weights."""

    weights: Literal["base", "live", "ema", "snapshot", "trust_region"] = "base"
    """`base`: the start (adapter off); `live`: as they are; `ema` and `snapshot` follow the
    student; `trust_region` mixes the logits of `base` and `live`."""
    rate: float = 0.05
    """ema: share of the student taken over after every step."""
    every: int = 10
    """snapshot: steps between two copies."""
    mix: float = 0.1
    """trust_region: weight of the live logits."""

    def __post_init__(self) -> None:
        FollowerSpec(name="ema", rate=self.rate, every=self.every)
        if not 0.0 < self.mix < 1.0:
            raise ConfigError(f"teacher.mix must lie between 0 and 1, got {self.mix}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedOptions:
    """name = "routed": one teacher per domain, `[teacher.teachers.DOMAIN]` each."""

    teachers: Mapping[str, Any]
    """Domain of a task -> the options of its teacher, its name included."""
    default: Mapping[str, Any] | None = None
    """The teacher of every other domain; without it an unknown domain is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureOptions:
    """name = "mixture": the weighted mean of several teachers' probabilities."""

    teachers: Mapping[str, Any]
    """Any label -> the options of a teacher, its name included."""
    weights: Mapping[str, Any]
    """The same labels -> positive weights that sum to 1."""

    def __post_init__(self) -> None:
        if set(self.weights) != set(self.teachers):
            raise ConfigError(
                "teacher.weights must have the labels of teacher.teachers: "
                f"{', '.join(self.teachers)}; found {', '.join(self.weights)}"
            )


TEACHERS: dict[str, type[Any]] = {
    "local": LocalOptions,
    "self_teacher": SelfOptions,
    "routed": RoutedOptions,
    "mixture": MixtureOptions,
    "server": ServerTeacherOptions,
    "remote": RemoteOptions,
    "cross_tokenizer": CrossTokenizerOptions,
    "black_box": BlackBoxOptions,
    "text": LocalTextOptions,
}


def teacher_options(config: Config, named: Named, section: str = "teacher") -> Any:
    """The options of a teacher of ours, or one's own teacher, which is made from its options."""
    return construct(named, TEACHERS, section, config)


def nested(table: Mapping[str, Any], section: str, config: Config) -> list[tuple[str, Any]]:
    """Label and checked options of each teacher of a table of teachers."""
    if not table:
        raise ConfigError(f"{section} names no teacher")
    found = []
    for label, inner in table.items():
        where = f"{section}.{label}"
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise ConfigError(f"{where} must be a table with the name of a teacher, got {inner!r}")
        named = Named(name=inner["name"], options={k: v for k, v in inner.items() if k != "name"})
        options = teacher_options(config, named, where)
        require_scoring(options, where)
        found.append((label, options))
    return found


def capabilities(config: Config, options: Any, section: str = "teacher") -> frozenset[str]:
    """What a teacher with these options can do."""
    if isinstance(options, LocalOptions | SelfOptions | RemoteOptions):
        return EVERYTHING
    if isinstance(options, ServerTeacherOptions):
        return SERVER
    if isinstance(options, CrossTokenizerOptions):
        return GROUPS
    if isinstance(options, BlackBoxOptions | LocalTextOptions):
        return TEXT
    if isinstance(options, RoutedOptions | MixtureOptions):
        inner = nested(options.teachers, f"{section}.teachers", config)
        if isinstance(options, RoutedOptions) and options.default is not None:
            inner += nested({"default": options.default}, section, config)
        found = [capabilities(config, o, f"{section}.teachers.{label}") for label, o in inner]
        # Groups of bytes belong to one teacher alone: several of them have no common ones.
        return frozenset.intersection(*found) - GROUPS
    return frozenset(options.capabilities)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What teachers are built from."""

    config: Config
    student: Student
    locate: Locate
    candidates: int = 0
    """Entries per position that a step will ask of a teacher."""
    task_of: Callable[[str], Task] | None = None
    """The task of a rollout, as the student read it; None while nobody acts."""
    cache: Path | None = None
    """Where scores of frozen teachers are kept, for those that ask for it; None keeps none."""

    def teacher(self) -> Teacher | None:
        """The teacher that scores; None without one, and for one that only writes text."""
        options = self._options(self.config.teacher, "teacher")
        return None if options is None or is_text_only(options) else self._build(options, "teacher")

    def reference(self) -> Teacher | None:
        options = self._options(self.config.reference, "reference")
        if options is None:
            return None
        require_scoring(options, "reference")
        return self._build(options, "reference")

    def audit(self, objective: Objective, task_of: Callable[[str], Task]) -> Auditor | None:
        """Lets a text-only teacher judge the student's replies; None unless it is needed."""
        if not self.config.teacher.name or "text" not in objective.needs:
            return None
        options = self._options(self.config.teacher, "teacher")
        return build_auditor(options, objective, self.student, task_of, self.locate)

    def _options(self, named: Named, section: str) -> Any:
        return teacher_options(self.config, named, section) if named.name else None

    def _build(self, options: Any, label: str) -> Teacher:
        from teachers.mixture import MixtureTeacher, RoutedTeacher

        if isinstance(options, SelfOptions):
            return self._self(options)
        if isinstance(options, LocalOptions):
            return self._local(options, label)
        if isinstance(options, RoutedOptions):
            inner = nested(options.teachers, f"{label}.teachers", self.config)
            default = None
            if options.default is not None:
                ((_, chosen),) = nested({"default": options.default}, label, self.config)
                default = self._build(chosen, f"{label}_default")
            made = {name: self._build(o, f"{label}_{name}") for name, o in inner}
            return RoutedTeacher(teachers=made, default=default)
        if isinstance(options, MixtureOptions):
            inner = nested(options.teachers, f"{label}.teachers", self.config)
            weights = [
                coerce(float, options.weights[name], f"{label}.weights.{name}", str)
                for name, _ in inner
            ]
            made_parts = [self._build(o, f"{label}_{name}") for name, o in inner]
            return MixtureTeacher(made_parts, weights=weights, name=label)
        if isinstance(options, ServerTeacherOptions):
            return self._server(options)
        if isinstance(options, RemoteOptions):
            return self._remote(options, label)
        if isinstance(options, CrossTokenizerOptions):
            return self._cross(options)
        own: Teacher = options
        return own

    def _server(self, options: ServerTeacherOptions) -> Teacher:
        from teachers.server import ServerTeacher

        policy = self.student.policy
        return ServerTeacher(
            options,
            num_ids=policy.head().vocab_size,
            k=self.candidates,
            temperature=policy.temperature,
            tokenizer=self.student.chat.tokenizer,
        )

    def _remote(self, options: RemoteOptions, label: str) -> Teacher:
        from teachers.remote import RemoteTeacher

        policy = self.student.policy
        made = RemoteTeacher(
            options,
            tokenizer=self.student.chat.tokenizer,
            num_ids=policy.head().vocab_size,
            temperature=policy.temperature,
            device=policy.device,
            label=label,
        )
        return self._cached(made, options.cache, made.identity, options.cache_gib)

    def _cross(self, options: CrossTokenizerOptions) -> Teacher:
        from distill.body import require_known_head
        from distill.models import eos_token_ids, load_tokenizer
        from distill.tokens import Chat
        from flows.local_teachers import load_frozen
        from teachers.cross_tokenizer import CrossTokenizerTeacher

        if self.task_of is None:
            raise ConfigError(
                'a teacher "cross_tokenizer" compares groups of bytes while a stage trains; it '
                "scores no single tokens"
            )
        policy, folder = self.student.policy, self.locate(options.path, options.revision)
        model = load_frozen(folder, dtype=options.dtype, quantize="none", device=policy.device)
        require_known_head(model)
        chat = Chat(
            load_tokenizer(str(folder)),
            eos_token_ids=eos_token_ids(model),
            max_length=options.max_length,
            template_kwargs=options.template_kwargs,
        )
        return CrossTokenizerTeacher(
            Policy(model, base=options.path, trainable=False, temperature=policy.temperature),
            chat,
            name=options.path,
            student=self.student.chat,
            num_ids=policy.head().vocab_size,
            task_of=self.task_of,
            max_length=options.max_length,
        )

    def _cached(self, teacher: Teacher, wanted: bool, key: str, max_gib: float) -> Teacher:
        if not wanted or self.cache is None:
            return teacher
        from teachers.cache import CachedTeacher

        return CachedTeacher(teacher, self.cache, key, max_gib=max_gib)

    def _self(self, options: SelfOptions) -> Teacher:
        from teachers.mixture import TrustRegionTeacher
        from teachers.self_teacher import self_teacher

        policy = self.student.policy
        if options.weights == "base":
            return self_teacher(policy, role=BASE)
        if options.weights == "live":
            return self_teacher(policy, role=STUDENT)
        if options.weights == "trust_region":
            anchor, moving = self_teacher(policy, role=BASE), self_teacher(policy, role=STUDENT)
            return TrustRegionTeacher(anchor, moving, mix=options.mix, name="self:trust_region")
        spec = FollowerSpec(name=options.weights, rate=options.rate, every=options.every)
        return self_teacher(policy, role=policy.add_follower(spec))

    def _local(self, options: LocalOptions, label: str) -> Teacher:
        from distill.body import require_known_head
        from distill.models import adapter_dir, load_tokenizer
        from distill.tokens import require_same_tokenizer
        from flows.local_teachers import load_frozen, weights_digest
        from teachers.local import LocalTeacher

        policy, chat = self.student.policy, self.student.chat
        if options.adapter:
            made_here = options.adapter.startswith(STAGE_PREFIX)
            place = self.locate(options.adapter, None) if made_here else Path(options.adapter)
            # Numbered: names of nested tables may coincide, and one would replace the other.
            number = len(getattr(policy.model, "peft_config", ()))
            role = policy.add_adapter(f"teacher{number}", adapter_dir(place))
            return LocalTeacher(policy, name=options.adapter, role=role)
        folder = self.locate(options.path, options.revision)
        require_same_tokenizer(chat.tokenizer, load_tokenizer(str(folder)), options.path)
        frozen = Policy(
            load_frozen(
                folder, dtype=options.dtype, quantize=options.quantize, device=policy.device
            ),
            base=options.path,
            trainable=False,
            temperature=policy.temperature,
        )
        require_known_head(frozen.model)
        widths = {frozen.head().vocab_size, policy.head().vocab_size}
        # Padding rows of one side are no tokens of the other: only the shared ids are compared.
        shared = None if len(widths) == 1 else min(len(chat.tokenizer), *widths)
        made = LocalTeacher(frozen, name=options.path, num_ids=shared)
        if not options.cache:
            return made
        weights = weights_digest(folder, dtype=options.dtype, quantize=options.quantize)
        key = digest_json([weights, shared, policy.temperature])
        return self._cached(made, True, key, options.cache_gib)


def build_teacher(config: Config, student: Student, locate: Locate) -> Teacher | None:
    """The teacher of a stage; None when it has none."""
    return Surroundings(config=config, student=student, locate=locate).teacher()
