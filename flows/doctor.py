"""`distill doctor`: is this machine ready, and do the parts of a configuration fit together?

The quick checks load tokenizers and headers, never weights; a night begins with them. The others,
asked for with `--full`, run the real models, engines and rehearsals.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distill.config import Config
from distill.errors import DistillError, PreflightError
from flows.doctor_checks import Check as Check
from flows.doctor_checks import Finding, Load, Rule, Subject, guarded, ok
from flows.identity import foreign_packages, places

if TYPE_CHECKING:
    from distill.devices import Device

logger = logging.getLogger(__name__)

REQUIRED = (
    "torch",
    "transformers",
    "peft",
    "datasets",
    "safetensors",
    "numpy",
    "pydantic",
    "typer",
    "rich",
    "faiss-cpu",
    "wandb",
    "prefect",
)
SAME_TOKENS = ("model", "teacher", "reference", "data")


def examine(
    config: Config | None, home: Path, *, full: bool = False, device: str = ""
) -> list[Check]:
    """Every check of the machine; with a configuration those of its stages too.

    `device` names a GPU that memory and time are estimated for; empty takes the one that is there.
    ConfigError for one whose rates nobody knows.
    """
    from distill.devices import find_device

    named = find_device(device) if device else None
    if config is None:
        return [*machine(home), _devices()]
    from flows import wiring
    from flows.doctor_models import loader

    def settled() -> list[Finding]:
        wiring.check(config)
        return [ok(f"{len(config.stages)} stages, digest {config.digest()[:12]}")]

    load = loader(config, home)
    checks = [*machine(home, _space(config, home, load)), _devices()]
    found = stages(config, home, load, full=full, device=named)
    told = {check.detail for check in found if check.status == "fail"}
    # What a stage finds is said once, under the name of the stage.
    settings = [c for c in guarded("configuration", settled) if c.detail not in told]
    return [*checks, *settings, *found]


def machine(home: Path, needed: int = 0) -> list[Check]:
    """Python, packages, where ours are, and a disk with room for `needed` bytes. Loads nothing
    heavy."""
    from flows.doctor_resources import check_disk

    return [_python(), _origin(), _required(), *check_disk(home, needed)]


def require_ready(home: Path, config: Config | None = None) -> None:
    """PreflightError with the first quick check that fails: those of the machine and, with a
    configuration, those of its stages. Servers may still be starting. Warnings are logged."""
    if config is None:
        checks = machine(home)
    else:
        from flows.doctor_models import loader

        load = loader(config, home)
        checks = machine(home, _space(config, home, load))
        if not any(check.status == "fail" for check in checks):
            checks += stages(config, home, load, waits=True)
    for check in checks:
        line = "; ".join(filter(None, (f"{check.name}: {check.detail}", check.advice)))
        if check.status == "fail":
            raise PreflightError(line)
        if check.status == "warn":
            logger.info("%s", line)


def _space(config: Config, home: Path, load: Load) -> int:
    from flows.doctor_resources import space_needed

    try:
        return space_needed(config, home, load)
    except DistillError:
        return 0  # a model that cannot be found is a failure of its own


def stages(
    config: Config,
    home: Path,
    load: Load,
    *,
    full: bool = False,
    device: Device | None = None,
    waits: bool = False,
) -> list[Check]:
    """The checks of every stage's model, teacher, data and engine. Stages that agree on what a
    check reads are checked once, under the name of the first. `waits`: servers may still be
    starting, because a night waits for them."""
    seen, checks, unread = set[str](), list[Check](), set[str]()
    parts = [(stage.name, config.for_stage(stage)) for stage in config.stages]
    subjects = [
        Subject(
            name=name,
            own=own,
            config=config,
            home=home,
            load=load,
            device=device,
            waits=waits,
        )
        for name, own in parts or [("model", config)]
    ]
    try:
        for subject in subjects:
            checks += _stage(subject, _rules(full), seen, unread)
        if full and any(stage.target == "student" for stage in config.stages):
            last = config.last_student().name
            checks += _rehearsals(next(s for s in subjects if s.name == last))
    finally:
        if full:
            from flows.doctor_engines import close_all

            close_all([subject.room for subject in subjects])
    return checks


def _stage(
    subject: Subject, rules: Sequence[Rule], seen: set[str], unread: set[str]
) -> list[Check]:
    """The checks of one stage. What could not be read of its data is kept in `unread`: other rules
    stumble over the same and add nothing."""
    checks: list[Check] = []
    broken = False
    table = subject.own.to_dict() | {"tokens": subject.tokens}
    for rule in rules:
        key = json.dumps([rule.name, [table[name] for name in rule.reads]])
        if key in seen or (broken and rule.needs_model):
            continue
        seen.add(key)
        found = guarded(f"{subject.name}: {rule.name}", partial(rule.run, subject))
        found = [check for check in found if check.detail not in unread]
        if rule.name == "data":
            unread |= {check.detail for check in found if check.status == "fail"}
        if rule.name == "model":
            broken = any(check.status == "fail" for check in found)
        checks += found
    return checks


def _rules(full: bool) -> list[Rule]:
    from flows import (
        doctor_data,
        doctor_models,
        doctor_packages,
        doctor_resources,
        doctor_scoring,
        doctor_servers,
        doctor_teachers,
        doctor_tokens,
    )

    path = ("model", "engine", "teacher", "reference", "objective", "sampling", "data")
    rules = [
        Rule("data", doctor_data.check_data, ("data",), needs_model=False),
        Rule(
            "packages",
            doctor_packages.check_packages,
            ("engine", "teacher", "reference", "analyst", "model"),
            needs_model=False,
        ),
        Rule("model", doctor_models.check_model, ("tokens",)),
        Rule("template", doctor_tokens.check_template, ("tokens",)),
        Rule("stop set", doctor_tokens.check_stop_set, ("tokens",)),
        Rule("engine", doctor_packages.check_heads, ("engine", "model")),
        Rule("teacher", doctor_teachers.check_teacher, SAME_TOKENS, needs_model=False),
        Rule("adapter", doctor_models.check_adapter, SAME_TOKENS),
        Rule("prompts", doctor_data.check_prompts, ("tokens", "data", "sampling")),
        Rule("sampling", doctor_scoring.check_sampling, ("sampling", "teacher")),
        Rule(
            "servers", doctor_servers.check_servers, ("engine", "teacher", "reference", "analyst")
        ),
        Rule("scorer", doctor_servers.check_handshake, path),
        Rule("equal teacher", doctor_scoring.check_equal_teacher, path),
        Rule("memory and time", doctor_resources.check_fits, (*path, "trainer")),
    ]
    if full:
        from flows import doctor_engines

        rules += [
            Rule("weights", doctor_models.check_finite, ("model", "teacher", "reference")),
            Rule("scorer in two orders", doctor_servers.check_orders, path),
            Rule("engine and trainer", doctor_engines.check_agreement, path),
            Rule("delivery", doctor_engines.check_canary, path),
            Rule("equal teacher, real", doctor_scoring.check_equal_teacher_full, path),
        ]
    return rules


def _rehearsals(subject: Subject) -> list[Check]:
    from flows import doctor_rehearsals

    return [
        *guarded("resume rehearsal", partial(doctor_rehearsals.check_resume, subject)),
        *guarded("gate rehearsal", partial(doctor_rehearsals.check_gate, subject)),
    ]


def _origin() -> Check:
    name, where, foreign = "our packages", places(), foreign_packages()
    if foreign:
        advice = "install distill-nightly in an environment of its own"
        return Check(name=name, status="fail", detail=foreign, advice=advice)
    return Check(name=name, status="ok", detail=f"{', '.join(where)} from {where['flows']}")


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(name="python", status="ok", detail=f"{version}, {os.cpu_count()} CPUs")


def versions(packages: Sequence[str] = REQUIRED) -> dict[str, str | None]:
    """Installed version of each distribution, None for a missing one."""
    import importlib.metadata

    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _required() -> Check:
    found = versions()
    missing = [package for package, version in found.items() if version is None]
    if missing:
        return Check(
            name="packages",
            status="fail",
            detail=f"missing: {', '.join(missing)}",
            advice="reinstall distill-nightly, for instance with: make install",
        )
    listed = ", ".join(f"{package} {version}" for package, version in found.items())
    return Check(name="packages", status="ok", detail=listed)


def _devices() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check(name="device", status="fail", detail=f"torch cannot be imported: {error}")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    threads = f"{torch.get_num_threads()} CPU threads"
    return Check(name="device", status="ok", detail=", ".join([*names, threads]))
