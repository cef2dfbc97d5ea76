"""What engines and served teachers cannot do, refused before any model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.config import Config
from distill.engines.server_options import ServerOptions
from distill.engines.server_sync import require_kind
from distill.engines.vllm_options import VLLMOptions
from distill.errors import ConfigError
from distill.models import pick_device
from distill.objectives.base import Objective
from flows.compatibility import refill_rounds
from flows.engines import engine_options, shares_weights
from flows.teaching import nested, teacher_options
from flows.together import num_processes
from teachers.server import ServerTeacherOptions, require_temperature


def check_served(config: Config, where: str) -> None:
    """ConfigError for weights that an engine cannot be sent, and for a temperature at which a stock
    server cannot score."""
    engine = engine_options(config)
    try:
        if isinstance(engine, ServerOptions):
            require_kind(engine.sync, config.model.kind)
        if isinstance(engine, VLLMOptions):
            engine.require_device(pick_device(config.model.device).type)
        for named, section in ((config.teacher, "teacher"), (config.reference, "reference")):
            if named.name and _asks_a_stock_server(config, teacher_options(config, named), section):
                require_temperature(config.sampling.temperature)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _asks_a_stock_server(config: Config, options: Any, section: str) -> bool:
    inner = getattr(options, "teachers", None)
    if not isinstance(inner, Mapping):
        return isinstance(options, ServerTeacherOptions)
    found = nested(inner, f"{section}.teachers", config)
    return any(_asks_a_stock_server(config, o, f"{section}.teachers.{n}") for n, o in found)


def check_overlap(config: Config, sampler: Any, objective: Objective, where: str) -> None:
    """Sampling ahead needs weights that stand still, and draws that this step does not decide."""
    alone = num_processes() == 1
    if not alone and config.trainer.offload != "none":
        raise ConfigError(
            f"{where}: an optimizer on the CPU works in one process only; set trainer.offload = "
            '"none", which spreads it over the processes anyway'
        )
    if not config.sampling.overlap:
        return
    if not alone:
        raise ConfigError(
            f"{where}: sampling.overlap needs the student for itself, which several processes "
            "share; set sampling.overlap = false, or use one process"
        )
    copies = bool(config.sampling.refresh) and config.model.kind == "full"
    if shares_weights(engine_options(config)) and not copies:
        raise ConfigError(
            f"{where}: sampling.overlap samples while the weights change, and engine "
            f'{config.engine.name!r} shares them; use engine.name = "vllm" or "server", or a copy '
            "of full weights with sampling.refresh = 1"
        )
    if getattr(engine_options(config), "sleep", False) is True:
        raise ConfigError(
            f"{where}: with sampling.overlap the engine samples while the trainer works, so it "
            "cannot sleep meanwhile; set engine.sleep = false"
        )
    if config.correction.level == "none":
        raise ConfigError(
            f"{where}: with sampling.overlap every reply is one update old, which must be "
            'corrected; set correction.level = "token" (or "sequence")'
        )
    decided = [
        (sampler.reads_rewards, f"sampler {config.sampler.name!r} draws by this step's rewards"),
        (refill_rounds(sampler, objective) > 0, "groups that teach nothing are drawn again"),
        (bool(config.skills.bank), f"skill bank {config.skills.bank!r} changes between steps"),
    ]
    for is_so, reason in decided:
        if is_so:
            raise ConfigError(f"{where}: sampling.overlap cannot sample the next step: {reason}")
