"""The vectors of a stage's skills and goals: always those of one and the same set of weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from distill.config import Config, Stage

if TYPE_CHECKING:
    from distill.policy import Policy
    from flows.night import Night, Student
    from skills.embed import Embedder

_frozen: WeakValueDictionary[tuple[str, str, str], Policy] = WeakValueDictionary()
"""Copies that somebody in this process still uses: run, stage, digest of the weights."""


def embedder_for(night: Night, config: Config, stage: Stage, student: Student) -> Embedder | None:
    """What turns skills and goals into vectors; None where no mode needs it.

    The student's own are those of the weights that the stage starts from, in training and in every
    evaluation: vectors of weights that move would never be comparable.
    """
    if config.skills.mode == "template" or not config.skills.show:
        return None
    if config.skills.embedder == "student":
        return _of_start(night, config, stage, student)
    from flows.skills_showing import embedder_of

    return embedder_of(config.skills.embedder, home=night.home)


def _of_start(night: Night, config: Config, stage: Stage, student: Student) -> Embedder:
    from distill.models import adapter_dir, weights_file
    from distill.policy import BASE
    from distill.rundir import digest_file
    from skills.embed import PolicyEmbedder

    policy, chat, first = student.policy, student.chat, _first(night, stage)
    if first is None and night.read_only:
        return PolicyEmbedder(policy, chat)  # weights without their run: they do not move either
    version = digest_file(weights_file(first)) if first else ""
    if policy.kind == "full":
        return PolicyEmbedder(_copy(night, config, stage, first, version), chat, version=version)
    role = BASE  # where an adapter that is new starts
    if first is not None:
        name = f"start_{version[:12]}"
        known = name in policy.model.peft_config
        role = f"adapter:{name}" if known else policy.add_adapter(name, adapter_dir(first))
    return PolicyEmbedder(policy, chat, version=version, role=role)


def _first(night: Night, stage: Stage) -> Path | None:
    """The folder of the weights that a stage starts from, or those of the night while the stages
    before are not finished; None where neither was kept."""
    from flows.training import first_weights

    places = (first_weights(night, stage), night.start)
    return next((place for place in places if place is not None and place.is_dir()), None)


def _copy(night: Night, config: Config, stage: Stage, first: Path | None, version: str) -> Policy:
    """A frozen policy with these weights; what training uses, evaluations share."""
    from flows.night import load_student

    key = (str(night.run.path), stage.name, version)
    policy = _frozen.get(key)
    if policy is None:
        policy = _frozen[key] = load_student(night, config, first).policy
        policy.model.requires_grad_(False)
    return policy
