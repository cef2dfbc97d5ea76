"""`distill doctor`: is this machine ready, and do the models of a configuration fit together?"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from distill.config import STAGE_PREFIX, Config
from distill.errors import DistillError, PreflightError
from distill.rundir import read_json
from distill.types import Message
from flows.identity import foreign_packages, places

Status = Literal["ok", "warn", "fail"]
Finding = tuple[Status, str, str]
"""Status, detail, advice."""

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
DISK_FAIL = 200 * 2**20
"""Bytes; a night of the smallest preset writes less than that."""
DISK_WARN = 5 * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One finding. `advice` says what to do; empty when there is nothing to do."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def examine(config: Config | None, home: Path) -> list[Check]:
    """Every check of the machine; with a configuration those of its models and data too."""
    checks = [*machine(home), _devices()]
    if config is not None:
        checks += models(config, home)
    return checks


def machine(home: Path) -> list[Check]:
    """The quick checks, which load nothing heavy: Python, packages, where ours are, disk."""
    return [_python(), _origin(), _required(), _disk(home)]


def require_ready(home: Path) -> None:
    """PreflightError with the first quick check that fails."""
    for check in machine(home):
        if check.status == "fail":
            raise PreflightError(f"{check.name}: {check.detail}; {check.advice}")


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


def _disk(home: Path) -> Check:
    place = home.resolve()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        advice = "choose another folder with --home or run.home"
        return Check(name="disk", status="fail", detail=f"{place} is no folder", advice=advice)
    free = shutil.disk_usage(place).free
    detail = f"{free / 2**30:.1f} GiB free for {home.resolve()}"
    advice = "free some space, or choose another folder with run.home"
    if not os.access(place, os.W_OK):
        return Check(name="disk", status="fail", detail=f"{place} is not writable", advice=advice)
    if free < DISK_FAIL:
        return Check(name="disk", status="fail", detail=detail, advice=advice)
    if free < DISK_WARN:
        return Check(name="disk", status="warn", detail=detail, advice=advice)
    return Check(name="disk", status="ok", detail=detail)


def _devices() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check(name="device", status="fail", detail=f"torch cannot be imported: {error}")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    threads = f"{torch.get_num_threads()} CPU threads"
    return Check(name="device", status="ok", detail=", ".join([*names, threads]))


def models(config: Config, home: Path) -> list[Check]:
    """Tokenizer, template, stop set and vocabulary of every stage's model, and whether its teacher
    reads the same tokens. Loads tokenizers, never weights."""
    checks: list[Check] = []
    seen: set[str] = set()
    for own in [config.for_stage(stage) for stage in config.stages] or [config]:
        name = own.stages[0].name if own.stages else "model"
        data = json.dumps(own.to_dict()["data"])
        if own.data.name and data not in seen:
            seen.add(data)
            checks += _guarded(f"{name}: data", partial(_data, own))
        fingerprint = json.dumps([own.to_dict()["model"], own.to_dict()["teacher"]])
        if fingerprint in seen:
            continue
        seen.add(fingerprint)
        load = partial(_tokenizer, own=own, config=config, home=home)
        checks += _guarded(f"{name}: model", partial(_model, own, load))
        if own.teacher.name == "local":
            checks += _guarded(f"{name}: teacher", partial(_teacher, own, load))
    return checks


def _guarded(name: str, check: Callable[[], list[Finding]]) -> list[Check]:
    try:
        found = check()
    except DistillError as error:
        found = [("fail", str(error), "")]
    return [Check(name=name, status=s, detail=detail, advice=advice) for s, detail, advice in found]


def _model(own: Config, load: Callable[[str], Loaded]) -> list[Finding]:
    from distill.tokens import Chat

    loaded = load(own.model.path)
    tokenizer = loaded.tokenizer
    chat = Chat(
        tokenizer,
        stop=own.model.stop,
        eos_token_ids=loaded.eos_token_ids,
        max_length=own.model.max_length,
        template_kwargs=own.model.template_kwargs,
    )
    stops = ", ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in chat.stop_token_ids)
    found: list[Finding] = [("ok", f"{len(tokenizer)} tokens, replies end with {stops}", "")]
    if loaded.vocab_size is not None and loaded.vocab_size < len(tokenizer):
        detail = f"the tokenizer has {len(tokenizer)} tokens, the model {loaded.vocab_size}"
        found.append(("fail", detail, "use the tokenizer that belongs to the weights"))
    if not tokenizer.chat_template:
        advice = "fine for a base model; a chat model needs its template in the tokenizer's folder"
        found.append(("warn", "no chat template: messages are joined as they are", advice))
    else:
        text = chat.render([Message(role="user", content="Hello")])
        found.append(("ok", f"chat template: {text!r}", ""))
    return found


def _data(own: Config) -> list[Finding]:
    """Rows of the user's own table, read once; generated tasks need no look."""
    from evals.envs.table import Table
    from flows.wiring import build_env

    env = build_env(own)
    if not isinstance(env, Table):
        return []
    return [("ok", f"{env.path}: {len(env.tasks('train'))} tasks to train on", "")]


def _teacher(own: Config, load: Callable[[str], Loaded]) -> list[Finding]:
    from distill.tokens import require_same_tokenizer

    path = str(own.teacher.options.get("path", ""))
    if not path:
        return [("ok", "an adapter of the student's own base", "")]
    ours, theirs = load(own.model.path).tokenizer, load(path).tokenizer
    require_same_tokenizer(ours, theirs, path)
    return [("ok", f"{path} reads the same {len(theirs)} tokens", "")]


class Loaded(NamedTuple):
    tokenizer: Any
    eos_token_ids: Sequence[int]
    """Ends of a reply by the model's generation settings."""
    vocab_size: int | None
    """Rows of the model's output layer; None while the model is yet to be made."""


def _tokenizer(path: str, *, own: Config, config: Config, home: Path) -> Loaded:
    from distill.models import char_tokenizer, load_tokenizer
    from distill.pretrained import resolve_model

    if path.startswith(STAGE_PREFIX):
        maker = config.for_stage(config.stage(path.removeprefix(STAGE_PREFIX)))
        return _tokenizer(maker.model.path, own=maker, config=config, home=home)
    if not path:
        from evals.envs.world import ALPHABET

        return Loaded(char_tokenizer(ALPHABET), (), None)
    revision = own.model.revision if path == own.model.path else None
    folder = Path(resolve_model(path, home=home, revision=revision).dir_or_id)
    tokenizer = load_tokenizer(str(folder), trust_remote_code=own.model.trust_remote_code)
    settings = folder / "generation_config.json"
    eos = read_json(settings).get("eos_token_id") if settings.exists() else None
    vocab_size = read_json(folder / "config.json").get("vocab_size")
    return Loaded(tokenizer, [eos] if isinstance(eos, int) else eos or (), vocab_size)
