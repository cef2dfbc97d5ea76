"""Which objective, teacher, view and sampling go together; checked before any model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distill.config import Config
from distill.curriculum.samplers import Staged
from distill.errors import ConfigError
from distill.objectives.base import Objective, on_policy_share, option_of
from flows import hindsight, teaching, texting, usable
from teachers.cross_options import CrossTokenizerOptions

RECORDED = "routing"
"""The environment of recorded turns: a log seldom knows what would be right."""
KNOWING_VIEWS = (
    *("with_answer", "with_solution", "with_demonstration", "with_context"),
    *("with_feedback", "with_peer_success", "with_verdict"),
)
"""Views of what somebody must know about a task or an attempt: an answer, a text, a reward."""
TRUNCATED = "training replies must come from the untruncated distribution"


def check_on_policy(config: Config, objective: Objective, where: str) -> None:
    """ConfigError for a combination that cannot mean what it says, naming the legal choices."""
    _check_teacher(config, objective, where)
    _check_reference(config, objective, where)
    _check_sampling(config, objective, where)
    _check_turns(config, objective, where)
    _check_skills(config, where)
    _check_worked(objective, where)
    _check_recorded(config, objective, where)


def _check_recorded(config: Config, objective: Objective, where: str) -> None:
    """What recorded turns cannot give: a log knows answers that were given, not those that are
    right, and of a context not even those."""
    if config.data.name != RECORDED:
        return
    if config.view.name in KNOWING_VIEWS:
        raise ConfigError(
            f"{where}: the view {config.view.name!r} shows what is known about a task or an "
            'attempt, and nobody knows it of a recorded turn; use view.name = "plain" with a '
            "teacher that is better than the student"
        )
    share = on_policy_share(objective)
    if share < 1.0 and uses_contexts(config):
        raise ConfigError(
            f"{where}: on_policy_share = {share} learns the other prompts from their recorded "
            'answers, but data.use = "contexts" has none; use on_policy_share = 1, or data.use = '
            '"turns"'
        )


def uses_contexts(config: Config) -> bool:
    """Whether the tasks are recorded turns without the answers that were given."""
    return config.data.name == RECORDED and config.data.options.get("use") == "contexts"


def _parts(objective: Objective) -> list[Objective]:
    return [part for part, _ in getattr(objective, "parts", ((objective, 1.0),))]


def _check_teacher(config: Config, objective: Objective, where: str) -> None:
    wanted = {n.removeprefix("teacher.") for n in objective.needs if n.startswith("teacher.")}
    if "text" in objective.needs:
        wanted.add("text")
    name = config.teacher.name
    if wanted and not name:
        raise ConfigError(
            f"{where}: objective {objective.name!r} needs a teacher; set teacher.name to one of "
            f"{', '.join(teaching.TEACHERS)}"
        )
    if not name:
        return
    offered = teaching.capabilities(config, teaching.teacher_options(config, config.teacher))
    missing = sorted(wanted - offered)
    if missing:
        raise ConfigError(
            f"{where}: objective {objective.name!r} needs {', '.join(missing)} from its teacher, "
            f"but {name!r} offers {', '.join(sorted(offered)) or 'nothing'}; choose another "
            "teacher.name or objective.name"
        )
    _check_view(config, objective, where)


def _check_view(config: Config, objective: Objective, where: str) -> None:
    from teachers.views import VIEWS

    if config.view.name != "plain":
        if "text" in objective.needs:
            raise ConfigError(
                f"{where}: a teacher that only writes reads the task itself, so "
                f'view.name = {config.view.name!r} would be ignored; use "plain"'
            )
        if "teacher.groups" in objective.needs:
            raise ConfigError(
                f"{where}: a teacher with another tokenizer writes the task itself, so "
                f'view.name = {config.view.name!r} would be ignored; use "plain"'
            )
        return
    legal = ", ".join(v for v in VIEWS if v not in ("plain", "shuffled"))
    privileged = [p.name for p in _parts(objective) if getattr(p, "privileged", False)]
    if privileged:
        raise ConfigError(
            f"{where}: objective {privileged[0]!r} learns from a teacher that knows more than the "
            f"student, but view.name is 'plain'; choose one of {legal}"
        )
    if config.teacher.name == "self_teacher" and config.teacher.options.get("weights") != "ema":
        raise ConfigError(
            f"{where}: a self-teacher with the view 'plain' only pulls the student back to its "
            f"own weights; choose one of the views {legal}"
        )


def check_routes(config: Config, domains: Sequence[str], where: str) -> None:
    """ConfigError when tasks of a domain would have no teacher."""
    if not config.teacher.name:
        return
    options = teaching.teacher_options(config, config.teacher)
    if not isinstance(options, teaching.RoutedOptions) or options.default is not None:
        return
    alone = sorted(set(domains) - set(options.teachers))
    if alone:
        raise ConfigError(
            f"{where}: no teacher answers for the domain {alone[0]!r}; teacher.teachers has "
            f"{', '.join(options.teachers)}; add [teacher.teachers.{alone[0]}], or teacher.default "
            "for every other domain"
        )


def _check_reference(config: Config, objective: Objective, where: str) -> None:
    needed = any(n.startswith("reference.") for n in objective.needs)
    if needed and not config.reference.name:
        raise ConfigError(
            f"{where}: objective {objective.name!r} with these options needs a frozen reference; "
            'set reference.name = "self_teacher" (the student\'s own start) or "local" with a path'
        )
    if config.reference.name and not needed:
        raise ConfigError(
            f"{where}: [reference] names {config.reference.name!r}, but objective "
            f"{objective.name!r} with these options reads no reference; remove the section"
        )
    if config.reference.name:
        options = teaching.teacher_options(config, config.reference, "reference")
        texting.require_scoring(options, "reference")
        if isinstance(options, CrossTokenizerOptions):
            raise ConfigError(
                f"{where}: a reference compares token ids, which another tokenizer does not have; "
                'use reference.name = "self_teacher" or "local"'
            )
        if isinstance(options, teaching.SelfOptions) and options.weights != "base":
            raise ConfigError(
                f"{where}: a reference must be frozen: with a live one the objective degenerates; "
                'use reference.weights = "base"'
            )


def _check_sampling(config: Config, objective: Objective, where: str) -> None:
    sampling = config.sampling
    if "groups" in objective.needs and sampling.num_samples < 2:
        raise ConfigError(
            f"{where}: objective {objective.name!r} compares replies to one prompt, so "
            f"sampling.num_samples must be at least 2, found {sampling.num_samples}"
        )
    if config.view.name == "with_peer_success" and sampling.num_samples < 2:
        raise ConfigError(
            f"{where}: the view 'with_peer_success' needs other replies to the same prompt, so "
            f"sampling.num_samples must be at least 2, found {sampling.num_samples}"
        )
    if sampling.temperature <= 0 or sampling.top_p < 1 or sampling.top_k > 0:
        raise ConfigError(
            f"{where}: {TRUNCATED}: temperature > 0, top_p = 1 and top_k = 0; found "
            f"{sampling.temperature}, {sampling.top_p} and {sampling.top_k}"
        )
    updates = config.trainer.epochs * config.trainer.minibatches
    if "text" in objective.needs and updates > 1:
        raise ConfigError(
            f"{where}: objective {objective.name!r} is defined for one update per batch; "
            f"trainer.epochs x trainer.minibatches is {updates}"
        )


def check_worked(config: Config, where: str) -> None:
    """A stage of worked solutions may learn to be an analyst, from one who knows better."""
    if config.data.name == RECORDED and config.analyst.name:
        raise ConfigError(
            f"{where} learns from recorded turns, and an analyst reads attempts whose reward is "
            "known; remove [analyst], or name other tasks in [data]"
        )
    if config.analyst.name == "policy":
        raise ConfigError(
            f"{where} learns from labels, and the student cannot label its own attempts; set "
            'analyst.name = "rules" or "model"'
        )
    usable.require_analyst(config, where)
    if config.skills.show and not config.skills.bank:
        raise ConfigError(f"{where}: skills.show needs a bank; set skills.bank to its name")
    usable.require_bank(config, where)


def check_worked_sampler(config: Config, sampler: Any, where: str) -> None:
    """Worked solutions earn no reward, and nobody samples."""
    if sampler.reads_rewards:
        raise ConfigError(
            f"{where} learns from worked solutions, which earn no reward, but sampler.name = "
            f'{config.sampler.name!r} chooses by rewards; use "uniform" or "staged"'
        )
    if config.sampling.refresh:
        raise ConfigError(
            f"{where} learns from worked solutions and samples nothing, so sampling.refresh = "
            f"{config.sampling.refresh} has no effect; remove it"
        )


def check_sampler(config: Config, sampler: Any, objective: Objective, where: str) -> None:
    """What chooses by rewards needs rewards, and differences between them."""
    rewarded = config.data.name != RECORDED
    if not rewarded and (sampler.reads_rewards or "rewards" in objective.needs):
        asks = f"sampler {config.sampler.name!r}"
        if "rewards" in objective.needs:
            asks = f"objective {objective.name!r}"
        raise ConfigError(
            f"{where}: {asks} needs rewards, and a reply to a recorded turn earns none; use an "
            'objective with a teacher such as "gkd", and the sampler "staged" or "uniform"'
        )
    if sampler.reads_rewards and config.sampling.num_samples < 2:
        raise ConfigError(
            f"{where}: sampler.name = {config.sampler.name!r} looks at how often a prompt is "
            f"solved, so sampling.num_samples must be at least 2, found "
            f"{config.sampling.num_samples}"
        )
    refill_rounds(sampler, objective)


def refill_rounds(sampler: Any, objective: Objective) -> int:
    """Most extra draws per step, asked for by the sampler or by the objective, never by both."""
    rounds = int(option_of(objective, "refill_rounds", 0))
    if rounds and (sampler.rounds or isinstance(sampler, Staged)):
        raise ConfigError(
            f"objective.refill_rounds = {rounds} draws other tasks in place of groups that teach "
            'nothing, and so does sampler.name = "refill", while "staged" gives every task '
            "exactly once; set objective.refill_rounds = 0"
        )
    return rounds or sampler.rounds


def _check_turns(config: Config, objective: Objective, where: str) -> None:
    """What is told apart by turns needs a row for every turn."""
    if config.sampling.rows == "turns":
        return
    if "turns" in objective.needs:
        raise ConfigError(
            f"{where}: objective {objective.name!r} with these options gives credit to single "
            'turns; set sampling.rows = "turns"'
        )
    if config.view.name == "with_skill" and config.view.options.get("scope") not in (
        None,
        "episode",
    ):
        raise ConfigError(
            f"{where}: view.scope = {config.view.options['scope']!r} shows skills of single turns; "
            'set sampling.rows = "turns", or view.scope = "episode"'
        )


def _check_skills(config: Config, where: str) -> None:
    """Hindsight, its view, and the bank belong together."""
    skills, analyst = config.skills, config.analyst.name
    usable.require_analyst(config, where)
    if config.view.name == "with_skill" and not analyst:
        raise ConfigError(
            f"{where}: the view 'with_skill' shows what an analyst writes; set analyst.name to one "
            f"of {', '.join(hindsight.ANALYSTS)}"
        )
    grows = skills.evolve_every > 0
    if analyst and not (config.view.name == "with_skill" or grows):
        raise ConfigError(
            f"{where}: nothing reads what the analyst {analyst!r} writes; set view.name = "
            '"with_skill" beside a teacher, or skills.evolve_every'
        )
    if not skills.bank:
        asked = [k for k in ("show", "keep", "evolve_every", "start") if getattr(skills, k)]
        if asked:
            raise ConfigError(
                f"{where}: skills.{asked[0]} needs a bank; set skills.bank to its name"
            )
    if (grows or skills.keep) and not analyst:
        key = "evolve_every" if grows else "keep"
        raise ConfigError(f"{where}: skills.{key} needs somebody who writes; set analyst.name")
    if grows and not skills.show:
        raise ConfigError(
            f"{where}: skills.evolve_every measures new skills in the acting prompt; set "
            "skills.show = true"
        )
    if skills.keep and config.view.name != "with_skill":
        raise ConfigError(
            f"{where}: skills.keep keeps what hindsight taught, but no view reads hindsight; set "
            'view.name = "with_skill"'
        )
    usable.require_bank(config, where)


def _check_worked(objective: Objective, where: str) -> None:
    learns = any(p.name == "sft" for p in _parts(objective))
    if learns and on_policy_share(objective) >= 1.0:
        raise ConfigError(
            f"{where}: the term 'sft' only learns from worked solutions, and every prompt is "
            "answered by the student; add a gkd term with on_policy_share < 1"
        )
