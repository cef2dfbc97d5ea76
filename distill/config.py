"""Configuration: defaults in code, then TOML layers left to right, then `key=value` arguments.

Unknown keys, wrong types and values out of range are errors that name the origin, the key, the
valid ones and the nearest match. A table `[stage.NAME.trainer]`, or `stage.NAME.trainer.steps=5`,
reaches one stage of an earlier layer; a list `[[stage]]` replaces the earlier list. Choosing
another `name` in a named section drops the options that belonged to the old one.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from distill.config_check import STAGE_PREFIX, check
from distill.curriculum.options import CurriculumSection, TrafficSection
from distill.errors import ConfigError
from distill.sections import (
    STAGE_SECTIONS,
    CheckpointSection,
    CorrectionSection,
    EvalsSection,
    GateSection,
    ModelSection,
    MonitorSection,
    Named,
    RewardSection,
    RunSection,
    SamplingSection,
    SkillsSection,
    Stage,
    TrackingSection,
    TrainerSection,
)
from distill.tables import (
    COMMAND_LINE,
    OriginOf,
    build_record,
    coerce,
    did_you_mean,
    find_origin,
    forget,
    join,
    leaves,
    parse_overrides,
    plain,
    plain_table,
    reject_unknown,
)

__all__ = [
    "COMMAND_LINE",
    "DEFAULT",
    "STAGE_PREFIX",
    "Config",
    "Explained",
    "Layer",
    "Stage",
    "differences",
    "explain",
    "load",
]

DEFAULT = "default"
TERMS = "terms"
"""The objective that is a sum: `objective.terms = [{name = "grpo"}, {name = "gkd"}]`."""
_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """TOML text and where it came from, such as a file name or `preset tiny`."""

    origin: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything that a night needs to know. Build it with `load` or `Config.from_dict`."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    engine: Named = field(default_factory=lambda: Named(name="hf"))
    teacher: Named = field(default_factory=Named)
    view: Named = field(default_factory=lambda: Named(name="plain"))
    reference: Named = field(default_factory=Named)
    objective: Named = field(default_factory=Named)
    analyst: Named = field(default_factory=Named)
    skills: SkillsSection = field(default_factory=SkillsSection)
    data: Named = field(default_factory=Named)
    sampler: Named = field(default_factory=lambda: Named(name="uniform"))
    sampling: SamplingSection = field(default_factory=SamplingSection)
    reward: RewardSection = field(default_factory=RewardSection)
    correction: CorrectionSection = field(default_factory=CorrectionSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    monitor: MonitorSection = field(default_factory=MonitorSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    curriculum: CurriculumSection = field(default_factory=CurriculumSection)
    traffic: TrafficSection = field(default_factory=TrafficSection)
    evals: EvalsSection = field(default_factory=EvalsSection)
    gate: GateSection = field(default_factory=GateSection)
    tracking: TrackingSection = field(default_factory=TrackingSection)
    stages: tuple[Stage, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Dotted key -> the layer that set it; keys that are missing kept their default."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under the keys of a configuration file; `from_dict` reads it back."""
        table = _section_tables(self)
        table["stage"] = [
            {"name": s.name, "kind": s.kind, "target": s.target, "cache": s.cache, **s.overrides}
            for s in self.stages
        ]
        return {key: plain(value) for key, value in table.items()}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], origin: str = "stored configuration") -> Config:
        """The configuration that `to_dict` wrote. ConfigError as for a file."""
        return _resolve([(origin, table)])

    def digest(self) -> str:
        """SHA-256 (hex) of every resolved value."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def stage(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = [stage.name for stage in self.stages]
        raise ConfigError(
            f"no stage is called {name!r}{did_you_mean(name, names)}; "
            f"the stages are: {', '.join(names) or 'none'}"
        )

    def last_student(self) -> Stage:
        """The stage whose weights a night ends with."""
        students = [stage for stage in self.stages if stage.target == "student"]
        if not students:
            names = ", ".join(stage.name for stage in self.stages) or "none"
            raise ConfigError(f'no stage has target = "student"; the stages are: {names}')
        return students[-1]

    def for_stage(self, stage: Stage) -> Config:
        """What one stage sees: its overrides merged in, itself the only stage."""
        prefix = f"stage.{stage.name}"

        def origin_of(dotted: str) -> str:
            own = find_origin(self.origins, join(prefix, dotted.removeprefix(prefix + ".")))
            return own or find_origin(self.origins, dotted.removeprefix(prefix + ".")) or DEFAULT

        tables, origins = _section_tables(self), dict(self.origins)
        _merge(tables, stage.overrides, "", origin_of, origins)
        sections = {
            name: _build_section(
                name,
                tables[name],
                join(prefix, name) if name in stage.overrides else name,
                origin_of,
            )
            for name in SECTIONS
        }
        own = Stage(name=stage.name, kind=stage.kind, target=stage.target, cache=stage.cache)
        return Config(**sections, stages=(own,), origins=origins)


SECTIONS: dict[str, Any] = {
    "run": RunSection,
    "model": ModelSection,
    "engine": Named,
    "teacher": Named,
    "view": Named,
    "reference": Named,
    "objective": Named,
    "analyst": Named,
    "skills": SkillsSection,
    "data": Named,
    "sampler": Named,
    "sampling": SamplingSection,
    "reward": RewardSection,
    "correction": CorrectionSection,
    "trainer": TrainerSection,
    "monitor": MonitorSection,
    "checkpoint": CheckpointSection,
    "curriculum": CurriculumSection,
    "traffic": TrafficSection,
    "evals": EvalsSection,
    "gate": GateSection,
    "tracking": TrackingSection,
}
"""Section name -> its class, in the order in which a configuration is shown."""
_NAMED: dict[str, str] = {
    name: getattr(Config(), name).name for name in SECTIONS if SECTIONS[name] is Named
}


def load(layers: Sequence[Layer], overrides: Sequence[str] = ()) -> Config:
    """Resolve layers left to right, then `key=value` arguments. ConfigError on anything wrong."""
    tables: list[tuple[str, Mapping[str, Any]]] = []
    for layer in layers:
        try:
            tables.append((layer.origin, tomllib.loads(layer.text)))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{layer.origin}: not valid TOML: {error}") from error
    if overrides:
        tables.append((COMMAND_LINE, parse_overrides(overrides)))
    return _resolve(tables)


class Explained(NamedTuple):
    key: str
    value: Any
    origin: str


def explain(config: Config) -> list[Explained]:
    """Every resolved value with the layer that set it, in the order of the sections."""
    table = config.to_dict()
    table["stage"] = {stage.pop("name"): stage for stage in table["stage"]}
    return [Explained(key, value, config.origins.get(key, DEFAULT)) for key, value in leaves(table)]


def differences(ours: Config, theirs: Config) -> list[str]:
    """Dotted keys on which two configurations differ."""
    left, right = ({e.key: e.value for e in explain(c)} for c in (ours, theirs))
    missing = object()
    keys = [*left, *(key for key in right if key not in left)]
    return [key for key in keys if left.get(key, missing) != right.get(key, missing)]


def _resolve(tables: Sequence[tuple[str, Mapping[str, Any]]]) -> Config:
    tree: dict[str, Any] = {"stage": {}}
    origins: dict[str, str] = {}
    for origin, table in tables:
        rest = {key: value for key, value in table.items() if key != "stage"}
        if "stage" in table:
            rest["stage"] = _stages_by_name(table["stage"], tree, origin)
        _merge(tree, rest, "", _constant(origin), origins)

    def origin_of(dotted: str) -> str:
        return find_origin(origins, dotted) or DEFAULT

    stages = tree.pop("stage")
    reject_unknown(tree, [*SECTIONS, "stage"], "", origin_of)
    sections = {
        name: _build_section(name, tree.get(name, {}), name, origin_of) for name in SECTIONS
    }
    config = Config(
        **sections,
        stages=tuple(_build_stage(name, stages[name], origin_of) for name in stages),
        origins=origins,
    )
    check(config, origin_of)
    return config


def _constant(origin: str) -> OriginOf:
    return lambda _: origin


def _stages_by_name(value: Any, tree: dict[str, Any], origin: str) -> dict[str, Any]:
    """A layer's stages as name -> table; a list empties the tree's stages first."""
    if isinstance(value, Mapping):
        for name in value:
            if name not in tree["stage"]:
                names = list(tree["stage"])
                raise ConfigError(
                    f"{origin}: no stage is called {name!r}{did_you_mean(name, names)}; "
                    f"the stages are: {', '.join(names) or 'none'}"
                )
        return dict(value)
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise ConfigError(f"{origin}: expected [[stage]] tables, found stage = {value!r}")
    tree["stage"] = {}
    named: dict[str, Any] = {}
    for entry in value:
        name = entry.get("name")
        if not isinstance(name, str) or not _STAGE_NAME.fullmatch(name):
            raise ConfigError(
                f"{origin}: every [[stage]] needs a name of letters, digits, '-' and '_', "
                f"found {name!r}"
            )
        if name in named:
            raise ConfigError(f"{origin}: two stages are called {name!r}; names must differ")
        named[name] = {key: below for key, below in entry.items() if key != "name"}
    return named


def _merge(
    into: dict[str, Any],
    table: Mapping[str, Any],
    path: str,
    origin_of: OriginOf,
    origins: dict[str, str],
) -> None:
    for key, value in table.items():
        dotted = join(path, key)
        below = into.get(key)
        if isinstance(value, Mapping) and key == "objective" and TERMS in value:
            value = {"name": TERMS, **value}
        if isinstance(value, Mapping):
            if not isinstance(below, dict) or _renames(dotted, below, value):
                forget(origins, dotted)
                below = into[key] = {}
            _merge(below, value, dotted, origin_of, origins)
            origins.setdefault(dotted, origin_of(dotted))
        else:
            forget(origins, dotted)
            into[key] = value
            origins[dotted] = origin_of(dotted)


def _renames(dotted: str, below: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    parts = dotted.split(".")
    is_section = len(parts) == 1 or (len(parts) == 3 and parts[0] == "stage")
    if not is_section or parts[-1] not in _NAMED or "name" not in value:
        return False
    return bool(value["name"] != below.get("name", _NAMED[parts[-1]]))


def _build_section(name: str, table: Any, path: str, origin_of: OriginOf) -> Any:
    if not isinstance(table, Mapping) or SECTIONS[name] is not Named:
        return coerce(SECTIONS[name], table, path, origin_of)
    default = TERMS if name == "objective" and TERMS in table else _NAMED[name]
    chosen = coerce(str, table.get("name", default), join(path, "name"), origin_of)
    options = {key: value for key, value in table.items() if key != "name"}
    if options and not chosen:
        raise ConfigError(
            f"{origin_of(path)}: [{path}] has options ({', '.join(options)}) but no name"
        )
    return Named(name=chosen, options=plain_table(options, path, origin_of))


def _build_stage(name: str, table: Any, origin_of: OriginOf) -> Stage:
    path = f"stage.{name}"
    own = ("kind", "target", "cache")
    reject_unknown(table, [*own, *STAGE_SECTIONS], path, origin_of)
    head = {key: table[key] for key in own if key in table}
    overrides = {key: value for key, value in table.items() if key not in own}
    return build_record(Stage, {"name": name, **head, "overrides": overrides}, path, origin_of)


def _section_tables(config: Config) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for name in SECTIONS:
        section = getattr(config, name)
        if isinstance(section, Named):
            tables[name] = {"name": section.name, **section.options}
        else:
            tables[name] = asdict(section)
    return tables
