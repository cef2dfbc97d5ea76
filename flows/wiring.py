"""From configuration to live objects. The only caller of the tables of names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from distill.config import TERMS, Config, Stage
from distill.config_check import STAGE_PREFIX
from distill.errors import ConfigError
from distill.models import pick_device
from distill.objectives.base import Objective
from distill.protocols import Env, View
from distill.rollout import TurnRules
from distill.sections import Named
from distill.tables import coerce
from distill.tokens import Chat
from distill.types import Sampling
from flows import compatibility, engine_checks
from flows.engines import engine_options
from flows.naming import INJECTED, construct, lookup, options_of
from flows.shadowed import require_effect


def check(config: Config) -> None:
    """Refuse what cannot run, before any model is loaded. ConfigError names the legal choices."""
    require_effect(config)
    names = [s.name for s in config.stages]
    if not any(s.target == "student" for s in config.stages):
        raise ConfigError(
            f'a night needs a [[stage]] with target = "student"; the stages are: '
            f"{', '.join(names) or 'none'}"
        )
    for stage in config.stages:
        check_stage(config.for_stage(stage), stage)
    if config.data.name == compatibility.RECORDED:
        raise ConfigError(
            f"[data] name = {compatibility.RECORDED!r} has nothing to evaluate on; name the tasks "
            "of the evaluation in [data], and recorded turns in [stage.data] of student stages"
        )


def check_stage(config: Config, stage: Stage) -> None:
    where = f"stage {stage.name!r}"
    if stage.target == "data":
        from flows import data_stages  # which needs everything that trains

        data_stages.check(config, stage, where)
        return
    objective, sampler = build_objective(config), build_sampler_options(config)
    engine_options(config)
    if stage.cache and config.skills.bank and stage.target == "student":
        raise ConfigError(
            f"{where} works with the skill bank {config.skills.bank!r}, which a result from the "
            "cache would leave out; set cache = false for this stage"
        )
    env = build_env(config)
    if not is_made(config) and not len(env.tasks("train")):
        raise ConfigError(f"{where}: data.name = {config.data.name!r} has no task in split 'train'")
    pick_device(config.model.device)
    if stage.kind == "sft":
        if objective.needs:
            raise ConfigError(
                f"{where} learns from worked solutions, but objective {objective.name!r} needs "
                f'{", ".join(sorted(objective.needs))}; use objective.name = "sft", or '
                'kind = "on_policy"'
            )
        if compatibility.uses_contexts(config):
            raise ConfigError(
                f'{where} learns from recorded answers, but data.use = "contexts" has none; use '
                'data.use = "turns", or kind = "on_policy"'
            )
        compatibility.check_worked_sampler(config, sampler, where)
        if stage.target == "student":
            compatibility.check_worked(config, where)
        return
    compatibility.check_on_policy(config, objective, where)
    compatibility.check_sampler(config, sampler, objective, where)
    engine_checks.check_served(config, where)
    engine_checks.check_overlap(config, sampler, objective, where)
    # Environments that say beforehand which domains their tasks have.
    known = () if is_made(config) else getattr(env, "domains", getattr(env, "generators", ()))
    compatibility.check_routes(config, known, where)
    if config.teacher.name:
        build_view(config, None, None)  # refuses a template without its placeholders


def build_objective(config: Config) -> Objective:
    from distill.objectives import OBJECTIVES
    from distill.objectives.terms import Sum

    if config.objective.name != TERMS:
        return construct(config.objective, OBJECTIVES, "objective", config)
    terms = config.objective.options.get(TERMS)
    if not isinstance(terms, list) or not terms or set(config.objective.options) != {TERMS}:
        raise ConfigError(
            "objective.terms must be a list of tables, each with a name and a coefficient, and "
            f"nothing beside it; found {config.objective.options!r}"
        )
    parts = []
    for i, term in enumerate(terms):
        if not isinstance(term, dict) or not isinstance(term.get("name"), str):
            raise ConfigError(f"objective.terms[{i}] needs a name, found {term!r}")
        options = {k: v for k, v in term.items() if k not in ("name", "coefficient")}
        named = Named(name=term["name"], options=options)
        part: Objective = construct(named, OBJECTIVES, f"objective.terms[{i}]", config)
        weight = coerce(
            float, term.get("coefficient", 1.0), f"objective.terms[{i}].coefficient", str
        )
        parts.append((part, weight))
    total: Objective = Sum(parts=tuple(parts))
    return total


def build_env(config: Config, locate: Callable[[str], Path] | None = None) -> Env:
    """The environment of [data]. `locate` finds what an earlier stage made; without it such an
    environment can only be checked, not read."""
    from evals.envs import build_env as build

    if not config.data.name:
        raise ConfigError('data.name is missing: where do the tasks come from? e.g. "jsonl"')
    options = dict(config.data.options)
    if locate is not None and is_made(config):
        options["path"] = str(locate(str(options["path"])))
    return build(config.data.name, options, seed=config.run.seed)


def is_made(config: Config) -> bool:
    """Whether the tasks are what an earlier stage of the run makes."""
    return str(config.data.options.get("path", "")).startswith(STAGE_PREFIX)


def judged(config: Config, shared: Config) -> Config:
    """The configuration that a student stage is evaluated with: recorded turns have no evaluation
    tasks, so its tasks are then those of the shared [data]."""
    return (
        replace(config, data=shared.data) if config.data.name == compatibility.RECORDED else config
    )


def build_sampler_options(config: Config) -> Any:
    """The options of [sampler], checked."""
    from distill.curriculum.samplers import SAMPLERS

    return construct(config.sampler, SAMPLERS, "sampler", config)


def build_view(config: Config, chat: Chat | None, task_of: Callable[[str], Any] | None) -> View:
    """The view of a stage; without its surroundings it can only be checked, not used."""
    from teachers.views import VIEWS

    cls = lookup(config.view, VIEWS, "view", config)
    values = options_of(cls, config.view, "view", config)
    wanted = {f.name for f in fields(cls)} & INJECTED
    given = {"chat": chat, "task_of": task_of}
    view: View = cls(**values, **{name: given[name] for name in wanted})
    return view


def turns_of(config: Config) -> TurnRules:
    """How episodes of several turns are played and cut into rows."""
    sampling = config.sampling
    return TurnRules(
        max_turns=sampling.max_turns,
        history=sampling.history,
        rows=sampling.rows,
        invalid_penalty=config.reward.invalid_penalty,
    )


def sampling_of(config: Config) -> Sampling:
    sampling = config.sampling
    return Sampling(
        num_samples=sampling.num_samples,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )
