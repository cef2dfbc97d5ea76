"""Comparisons: a configuration with one more table, [compare], and one per [[contender]].

The two extra tables are taken out first and checked here; the rest is an ordinary configuration
whose last student stage is the template. A contender is one more layer over that stage, so that
every rule and every error of `distill.config` holds for it too.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from distill.config import Config, Layer, Stage, load
from distill.errors import ConfigError
from distill.sections import within
from distill.tables import (
    COMMAND_LINE,
    build_record,
    did_you_mean,
    parse_overrides,
    plain_table,
    reject_unknown,
)
from flows.configs import layer, packaged, split, toml_key, toml_value

DEFAULT_PRESET = "compare"
OVERRIDABLE: tuple[str, ...] = (
    "data",
    "sampler",
    "teacher",
    "view",
    "reference",
    "objective",
    "analyst",
    "skills",
    "engine",
    "sampling",
    "reward",
    "correction",
    "trainer",
    "monitor",
)
"""Sections that a contender may override. `data` is what it trains on: student and evaluation are
the same for all."""
SET_HERE = {
    "run.seed": "compare.seeds",
    "evals.tasks_per_domain": "compare.tasks_per_domain",
}
"""Values of a configuration that a comparison sets itself, and from what."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareSection:
    """[compare]: what all contenders share."""

    tokens: int = within(100_000, 1)
    """Budget of every contender: tokens that the student sampled, or that a teacher wrote for it.
    The step that reaches it is the last one."""
    points: int = within(8, 1, 1000)
    """Evaluations while training, evenly spaced over the budget; the start is one more."""
    tasks_per_domain: int = within(256, 1)
    """Gate tasks per domain behind every point."""
    metric: Literal["sampled", "greedy"] = "sampled"
    """Which accuracy ranks: sampled replies, or the greedy one."""
    level: float = within(0.5, 0.0, 1.0)
    """Accuracy behind "steps and tokens to reach"."""
    seeds: tuple[int, ...] = within((0,), 0)
    """Each seed has its own tasks, draws, base and teacher, the same for all contenders."""
    baseline: str = ""
    """The contender that the others are compared with; empty takes the first one."""
    forgetting: str = "hint"
    """Name of the tasks' own prompts on which forgetting is measured, where they have such."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    name: str
    layers: tuple[Layer, ...]
    """Overrides of the student stage, as layers of a configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Everything that a comparison needs to know. Build it with `load_comparison` or `resolve`."""

    settings: CompareSection
    layers: tuple[Layer, ...]
    overrides: tuple[str, ...]
    contenders: tuple[Contender, ...]
    student: Stage
    """The template: the last student stage, without anyone's overrides."""

    @property
    def names(self) -> list[str]:
        return [contender.name for contender in self.contenders]

    @property
    def baseline(self) -> str:
        return self.settings.baseline or self.names[0]

    def template(self, seed: int) -> Config:
        """The configuration that bootstraps and evaluates; it is no contender's."""
        return load(self.layers, self._overrides(seed))

    def config(self, name: str, seed: int) -> Config:
        """The complete configuration of a contender."""
        (contender,) = (c for c in self.contenders if c.name == name)
        return load([*self.layers, *contender.layers], self._overrides(seed))

    def _overrides(self, seed: int) -> list[str]:
        per_domain = f"evals.tasks_per_domain={self.settings.tasks_per_domain}"
        return [*self.overrides, f"run.seed={seed}", per_domain]


def comparisons() -> dict[str, str]:
    """Packaged comparison name -> its TOML text."""
    return packaged("presets", "comparisons")


def load_comparison(arguments: Sequence[str]) -> Comparison:
    """The comparison of `[PRESET|FILE ...] [key=value ...]`; without a layer the packaged one."""
    names, overrides = split(arguments)
    known = comparisons()
    layers = [
        layer(n, known, "a packaged comparison", "packaged") for n in names or [DEFAULT_PRESET]
    ]
    return resolve(layers, overrides)


def choose(
    comparison: Comparison,
    *,
    only: Sequence[str] = (),
    num_seeds: int = 0,
    baseline: str = "",
) -> Comparison:
    """The named contenders, the first seeds (continued by the numbers that follow), a baseline."""
    chosen = [_named(comparison.names, name, "--only") for name in only] or comparison.names
    contenders = tuple(c for c in comparison.contenders if c.name in chosen)
    seeds = list(comparison.settings.seeds)
    while len(seeds) < num_seeds:
        seeds.append(max(seeds) + 1)
    names = [c.name for c in contenders]
    if baseline:
        _named(names, baseline, "--baseline")
    elif comparison.settings.baseline in names:
        baseline = comparison.settings.baseline
    settings = replace(
        comparison.settings,
        seeds=tuple(seeds[: num_seeds or None]),
        baseline=baseline,
    )
    return replace(comparison, contenders=contenders, settings=settings)


def resolve(layers: Sequence[Layer], overrides: Sequence[str] = ()) -> Comparison:
    """Take [compare] and [[contender]] out of the layers and check them. ConfigError as for a
    configuration; contenders are checked further where their configurations are built."""
    settings: dict[str, Any] = {}
    origins: dict[str, str] = {}
    contenders: dict[str, list[Layer]] = {}
    rest: list[Layer] = []
    own, others = _split(overrides)
    tables = [(layer.origin, _parse(layer)) for layer in layers]
    if own:
        tables.append((COMMAND_LINE, parse_overrides(own)))
    stages = [t["stage"] for _, t in tables if isinstance(t.get("stage"), list)]
    student = _student_name(stages[-1]) if stages else ""
    for origin, table in tables:
        section = table.pop("compare", {})
        if not isinstance(section, Mapping):
            raise ConfigError(f"{origin}: expected a table [compare], found {section!r}")
        settings |= section
        origins |= dict.fromkeys((f"compare.{key}" for key in section), origin)
        _add_contenders(contenders, table.pop("contender", {}), origin, student)
        rest.append(_as_layer(origin, table))
    made = build_record(
        CompareSection, settings, "compare", lambda key: origins.get(key, layers[-1].origin)
    )
    found = tuple(Contender(name=name, layers=tuple(own)) for name, own in contenders.items())
    template = load(rest, others)
    comparison = Comparison(
        settings=made,
        layers=tuple(rest),
        overrides=tuple(others),
        contenders=found,
        student=template.last_student(),
    )
    _check(comparison, template)
    return comparison


def _check(comparison: Comparison, template: Config) -> None:
    """What no single table can know."""
    settings, names = comparison.settings, comparison.names
    if not names:
        raise ConfigError(
            "there is nothing to compare: expected [[contender]] tables, each with a name and "
            f"sections that override the stage {comparison.student.name!r}"
        )
    for key, ours in SET_HERE.items():
        if key in template.origins:
            raise ConfigError(
                f"{template.origins[key]}: {key} is set by {ours} in a comparison; use that"
            )
    students = [stage.name for stage in template.stages if stage.target == "student"]
    if len(students) != 1 or comparison.student.kind != "on_policy":
        raise ConfigError(
            'a comparison needs exactly one [[stage]] with target = "student", on-policy, as the '
            f"template of all contenders; found {', '.join(students) or 'none'}"
        )
    if not settings.seeds or len(set(settings.seeds)) < len(settings.seeds):
        raise ConfigError(f"compare.seeds must name different seeds, found {list(settings.seeds)}")
    if settings.metric == "sampled" and not template.evals.samples:
        raise ConfigError(
            'compare.metric = "sampled" needs evals.samples of at least 1, found 0; or use "greedy"'
        )
    if settings.baseline:
        _named(names, settings.baseline, "compare.baseline")


def _named(names: Sequence[str], name: str, where: str) -> str:
    if name not in names:
        raise ConfigError(
            f"{where}: no contender is called {name!r}{did_you_mean(name, names)}; "
            f"the contenders are: {', '.join(names)}"
        )
    return name


def _add_contenders(known: dict[str, list[Layer]], value: Any, origin: str, student: str) -> None:
    """A list of tables replaces the earlier contenders, a table by name adds to one of them."""
    if isinstance(value, Mapping):
        for name, table in value.items():
            _named(list(known), name, origin)
            known[name].append(_overrides_of(name, table, origin, student))
        return
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise ConfigError(f"{origin}: expected [[contender]] tables, found contender = {value!r}")
    known.clear()
    for entry in value:
        name = entry.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{origin}: every [[contender]] needs a name of letters, digits, '.', '-' and '_', "
                f"found {name!r}"
            )
        if name in known:
            raise ConfigError(f"{origin}: two contenders are called {name!r}; names must differ")
        table = {key: below for key, below in entry.items() if key != "name"}
        known[name] = [_overrides_of(name, table, origin, student)]


def _overrides_of(name: str, table: Any, origin: str, student: str) -> Layer:
    where = f"{origin}, contender {name!r}"
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: expected a table, found {table!r}")
    reject_unknown(table, OVERRIDABLE, f"contender.{name}", lambda _: where)
    return _as_layer(where, {"stage": {student: table}} if table else {})


def _student_name(stages: Sequence[Any]) -> str:
    """Name of the last student stage of a list of [[stage]] tables; checked later by `load`."""
    students = [s for s in stages if isinstance(s, Mapping) and s.get("target") == "student"]
    return str(students[-1].get("name", "")) if students else ""


def _split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """`compare.*` and `contender.*`, and all other `key=value` arguments."""
    own = [o for o in overrides if o.partition(".")[0] in ("compare", "contender")]
    return own, [o for o in overrides if o not in own]


def _parse(layer: Layer) -> dict[str, Any]:
    try:
        return tomllib.loads(layer.text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{layer.origin}: not valid TOML: {error}") from error


def _as_layer(origin: str, table: Mapping[str, Any]) -> Layer:
    plain = plain_table(table, "", lambda _: origin)
    lines = [f"{toml_key(key)} = {toml_value(value)}" for key, value in plain.items()]
    return Layer(origin=origin, text="\n".join(lines))
