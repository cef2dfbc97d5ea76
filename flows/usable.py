"""What of [skills] and [analyst] can be refused before a night begins."""

from __future__ import annotations

import re
from pathlib import Path

from distill.config import STAGE_PREFIX, Config
from distill.errors import ConfigError
from flows import banking, hindsight

EMBEDDERS = ("student", "sentence:", "endpoint:", "policy:")
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?", re.ASCII)


def require_bank(config: Config, where: str) -> None:
    """ConfigError for what would only be noticed once a stage begins: a bank that cannot have its
    name, skills to begin with that are not there, a table of words or an embedder that does not
    exist, lending that lends nothing."""
    from flows.evolving import retrieve_options
    from skills.bank import require_name

    skills = config.skills
    if skills.lend and skills.outcomes == "success":
        raise ConfigError(
            f"{where}: skills.lend gives notes to failures, but skills.outcomes is 'success'; set "
            'skills.outcomes = "all" or "failure", or skills.lend = false'
        )
    if not skills.bank:
        return
    try:
        require_name(skills.bank)
    except ConfigError as error:
        raise ConfigError(f"{where}: skills.bank: {error}") from error
    retrieve_options(config)
    if skills.mode != "template":
        _require_embedder(skills.embedder, where)
    if not (Path(config.run.home) / "bank" / skills.bank).exists():
        banking.first_items(skills.start)


def require_analyst(config: Config, where: str) -> None:
    """ConfigError for an analyst whose replies have no place for what is asked of them, or whose
    model is not there."""
    options = hindsight.analyst_options(config)
    scope = config.view.options.get("scope", "episode")
    writes = isinstance(options, hindsight.PolicyOptions) or config.stages[0].kind == "sft"
    asks_steps = writes and config.skills.max_step_skills and scope != "episode"
    if asks_steps and getattr(options, "format", "") == "slot":
        raise ConfigError(
            f"{where}: analyst.format = 'slot' holds one text about the whole attempt, but "
            f"view.scope = {scope!r} shows skills of single turns; set analyst.format = "
            '"json", or view.scope = "episode"'
        )
    if isinstance(options, hindsight.ModelOptions):
        path, adapter = (str(options.writer.get(key) or "") for key in ("path", "adapter"))
        _require_there(path, f"{where}: analyst.writer.path", (STAGE_PREFIX, "package:"))
        _require_there(adapter, f"{where}: analyst.writer.adapter", (STAGE_PREFIX,), hub=False)


def _require_embedder(text: str, where: str) -> None:
    kind, _, rest = text.partition(":")
    place = rest.partition("#")[0]
    if not text.startswith(EMBEDDERS) or (kind == "student") == bool(place):
        raise ConfigError(
            f"{where}: skills.embedder is student, sentence:PATH, endpoint:URL#MODEL or "
            f"policy:PATH, found {text!r}"
        )
    if kind in ("sentence", "policy"):
        elsewhere = ("package:",) if kind == "policy" else ()
        _require_there(place, f"{where}: skills.embedder", elsewhere)


def _require_there(
    place: str, what: str, elsewhere: tuple[str, ...] = (), *, hub: bool = True
) -> None:
    """ConfigError for a path that leads nowhere. A name of the hub is looked up once it is used."""
    if not place or place.startswith(elsewhere) or Path(place).expanduser().exists():
        return
    if not (hub and _HUB_NAME.fullmatch(place)):
        named = [f"{prefix}NAME" for prefix in elsewhere] + ["a hub name"] * hub
        raise ConfigError(
            f"{what}: there is no folder {place!r}; expected one that exists"
            + "".join(f", or {name}" for name in named)
        )
