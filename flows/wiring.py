"""From configuration to live objects. The only caller of the tables of names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from distill.config import Config, Stage
from distill.errors import ConfigError
from distill.models import pick_device
from distill.objectives.base import Objective
from distill.policy import Policy, require_known_head
from distill.protocols import Env, Teacher, View
from distill.sections import Named
from distill.tables import coerce, did_you_mean, find_origin, reject_unknown
from distill.tokens import Chat, require_same_tokenizer

STAGE = "stage:"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions:
    """[teacher] name = "local": a frozen Hugging Face model in this process."""

    path: str = ""
    """A Hugging Face name, a directory, `package:NAME` or `stage:NAME`; empty with an adapter of
    the student's own base."""
    adapter: str = ""
    """A folder or `stage:NAME` with an adapter of the student's base model."""
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfOptions:
    """[teacher] name = "self_teacher": the student's own base model."""

    role: Literal["base"] = "base"


TEACHERS: dict[str, type[Any]] = {"local": LocalOptions, "self_teacher": SelfOptions}


@dataclass(frozen=True, kw_only=True, slots=True)
class HFOptions:
    """[engine] name = "hf": the exact reference engine in this process."""

    max_batch: int = 256
    """Replies generated at once."""


ENGINES: dict[str, type[Any]] = {"hf": HFOptions}
_INJECTED = frozenset({"chat", "task_of"})
OriginOf = Callable[[str], str]


def check(config: Config) -> None:
    """Refuse what cannot run, before any model is loaded. ConfigError names the legal choices."""
    names = [s.name for s in config.stages]
    if not any(s.target == "student" for s in config.stages):
        raise ConfigError(
            f'a night needs a [[stage]] with target = "student"; the stages are: '
            f"{', '.join(names) or 'none'}"
        )
    for stage in config.stages:
        check_stage(config.for_stage(stage), stage)


def check_stage(config: Config, stage: Stage) -> None:
    where = f"stage {stage.name!r}"
    objective = build_objective(config)
    engine_options(config)
    if not len(build_env(config).tasks("train")):
        raise ConfigError(f"{where}: data.name = {config.data.name!r} has no task in split 'train'")
    pick_device(config.model.device)
    if config.reference.name:
        raise ConfigError(
            f"{where}: [reference] names {config.reference.name!r}, but no objective of this "
            "version reads a reference; remove the section"
        )
    if stage.kind == "sft":
        if objective.needs:
            raise ConfigError(
                f"{where} learns from worked solutions, but objective {objective.name!r} needs "
                f'{", ".join(sorted(objective.needs))}; use objective.name = "sft", or '
                'kind = "on_policy"'
            )
        return
    _check_on_policy(config, objective, where)


def _check_on_policy(config: Config, objective: Objective, where: str) -> None:
    needs_teacher = any(n.startswith("teacher.") for n in objective.needs)
    if needs_teacher and not config.teacher.name:
        raise ConfigError(
            f"{where}: objective {objective.name!r} needs a teacher; set teacher.name to one of "
            f"{', '.join(TEACHERS)}"
        )
    if config.teacher.name:
        _check_capabilities(teacher_options(config), objective, where)
        _view_options(config)
    if objective.name == "sft":
        raise ConfigError(
            f"{where} is on-policy, but objective 'sft' learns from worked solutions; use "
            'kind = "sft"'
        )
    sampling = config.sampling
    if "groups" in objective.needs and sampling.num_samples < 2:
        raise ConfigError(
            f"{where}: objective {objective.name!r} compares replies to one prompt, so "
            f"sampling.num_samples must be at least 2, found {sampling.num_samples}"
        )
    if sampling.temperature <= 0 or sampling.top_p < 1 or sampling.top_k > 0:
        raise ConfigError(
            f"{where}: training replies must come from the untruncated distribution: "
            f"temperature > 0, top_p = 1 and top_k = 0; found {sampling.temperature}, "
            f"{sampling.top_p} and {sampling.top_k}"
        )
    self_full = config.teacher.name == "self_teacher" and config.view.name == "plain"
    if self_full and config.model.kind == "adapter":
        raise ConfigError(
            f"{where}: a self-teacher with the view 'plain' only pulls the student back to its "
            'base; use view.name = "with_answer"'
        )


def _check_capabilities(
    teacher: LocalOptions | SelfOptions | Teacher, objective: Objective, where: str
) -> None:
    if isinstance(teacher, LocalOptions | SelfOptions):
        return  # a model in this process can do everything
    wanted = {n.removeprefix("teacher.") for n in objective.needs if n.startswith("teacher.")}
    missing = sorted(wanted - teacher.capabilities)
    if missing:
        raise ConfigError(
            f"{where}: objective {objective.name!r} needs {', '.join(missing)} from its teacher, "
            f"but {teacher.name!r} offers {', '.join(sorted(teacher.capabilities)) or 'nothing'}"
        )


def build_objective(config: Config) -> Objective:
    from distill.objectives import OBJECTIVES

    cls = _lookup(config.objective, OBJECTIVES, "objective", config)
    objective: Objective = _construct(cls, config.objective, "objective", config)
    return objective


def build_env(config: Config) -> Env:
    from evals.envs import build_env as build

    if not config.data.name:
        raise ConfigError('data.name is missing: where do the tasks come from? e.g. "jsonl"')
    return build(config.data.name, config.data.options, seed=config.run.seed)


def engine_options(config: Config) -> HFOptions:
    cls = _lookup(config.engine, ENGINES, "engine", config)
    options: HFOptions = _construct(cls, config.engine, "engine", config)
    return options


def teacher_options(config: Config) -> LocalOptions | SelfOptions | Teacher:
    """The options of a teacher of ours, or one's own teacher, which is made from its options."""
    cls = _lookup(config.teacher, TEACHERS, "teacher", config)
    options: LocalOptions | SelfOptions | Teacher = _construct(
        cls, config.teacher, "teacher", config
    )
    if isinstance(options, LocalOptions) and not (options.path or options.adapter):
        raise ConfigError("teacher.path is missing: a model, or an adapter of the student's base")
    return options


def _view_options(config: Config) -> dict[str, Any]:
    from teachers.views import VIEWS

    cls = _lookup(config.view, VIEWS, "view", config)
    return _options(cls, config.view, "view", config)


def build_view(config: Config, chat: Chat, task_of: Callable[[str], Any]) -> View:
    from teachers.views import VIEWS

    cls = _lookup(config.view, VIEWS, "view", config)
    values = _options(cls, config.view, "view", config)
    wanted = {f.name for f in fields(cls)} & _INJECTED
    given = {"chat": chat, "task_of": task_of}
    view: View = cls(**values, **{name: given[name] for name in wanted})
    return view


def build_teacher(
    config: Config, policy: Policy, chat: Chat, locate: Callable[[str, str | None], Path]
) -> Teacher | None:
    """The teacher of a stage. `locate` turns `stage:NAME`, a package or a name into a folder."""
    from distill.models import adapter_dir, load_model, load_tokenizer
    from teachers.local import LocalTeacher
    from teachers.self_teacher import self_teacher

    if not config.teacher.name:
        return None
    options = teacher_options(config)
    if isinstance(options, SelfOptions):
        return self_teacher(policy, role=options.role)
    if not isinstance(options, LocalOptions):
        return options
    if options.adapter:
        made_here = options.adapter.startswith(STAGE)
        place = locate(options.adapter, None) if made_here else Path(options.adapter)
        role = policy.add_adapter("teacher", adapter_dir(place))
        return LocalTeacher(policy, name=options.adapter, role=role)
    folder = locate(options.path, options.revision)
    require_same_tokenizer(chat.tokenizer, load_tokenizer(str(folder)), options.path)
    frozen = Policy(
        load_model(str(folder), dtype=options.dtype).to(policy.device),
        base=options.path,
        trainable=False,
        temperature=policy.temperature,
    )
    require_known_head(frozen.model)
    return LocalTeacher(frozen, name=options.path)


def _lookup(named: Named, table: Mapping[str, Any], section: str, config: Config) -> Any:
    if named.name in table:
        return table[named.name]
    module, colon, attr = named.name.partition(":")
    if colon and section in ("objective", "teacher"):
        try:
            return getattr(importlib.import_module(module), attr)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{section}.name = {named.name!r} cannot be loaded: {error}"
            ) from error
    origin = find_origin(config.origins, f"{section}.name") or "default"
    raise ConfigError(
        f"{origin}: {section}.name: {named.name!r} is unknown{did_you_mean(named.name, table)}; "
        f"expected one of {', '.join(table)}"
    )


def _construct(cls: Any, named: Named, section: str, config: Config) -> Any:
    return cls(**_options(cls, named, section, config))


def _options(cls: Any, named: Named, section: str, config: Config) -> dict[str, Any]:
    def origin_of(key: str) -> str:
        return find_origin(config.origins, key) or "default"

    own = [f for f in fields(cls) if f.name not in _INJECTED]
    reject_unknown(named.options, [f.name for f in own], section, origin_of)
    hints = get_type_hints(cls)
    values = {}
    for entry in own:
        key = f"{section}.{entry.name}"
        if entry.name in named.options:
            values[entry.name] = coerce(
                hints[entry.name], named.options[entry.name], key, origin_of
            )
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ConfigError(f"{origin_of(section)}: {key} is missing")
    return values
