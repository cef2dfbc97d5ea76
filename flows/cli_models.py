"""Commands around weights: sample, eval, gate, promote, rollback, registry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from distill.errors import ConfigError
from flows import cli_export
from flows.options import Arguments, Home, Json, Yes
from flows.output import print_json, print_report, print_table, print_verdict, say

if TYPE_CHECKING:
    from distill.config import Config
    from distill.types import EvalReport, Verdict
    from flows.checkpoints import Found

registry_app = typer.Typer(help="List champions, show their history.", rich_markup_mode=None)
Checkpoint = Annotated[
    str, typer.Argument(help="A folder of weights, a run, or a model with a champion.")
]
Suite = Literal["evolve", "gate", "test"]


def register(app: typer.Typer) -> None:
    app.command()(sample)
    app.command("eval")(evaluate)
    app.command()(gate)
    app.command()(promote)
    app.command()(rollback)
    cli_export.register_registry(registry_app)
    app.add_typer(registry_app, name="registry")


def sample(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="What the user says.")],
    arguments: Arguments = None,
    teacher: Annotated[bool, typer.Option("--teacher", help="Score every token.")] = False,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Print one reply; with --teacher also how likely the teacher finds each token."""
    from flows.checkpoints import find_checkpoint

    found = find_checkpoint(home, checkpoint)
    from flows import single

    night = single.around(_config(found, arguments), found.run, home)
    result = single.sample(night, found.path, prompt, teacher=teacher, bank=found.bank)
    if as_json:
        print_json(result)
        return
    print(result["reply"])
    if teacher:
        print_table(result["tokens"], ["token", "logprob", "teacher_logprob"])


def evaluate(
    checkpoint: Checkpoint,
    arguments: Arguments = None,
    suite: Annotated[Suite, typer.Option(help="The split whose tasks are used.")] = "gate",
    out: Annotated[Path | None, typer.Option(help="Also write the report here.")] = None,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Evaluate weights: accuracy with intervals, overall and per domain."""
    from distill.rundir import write_json
    from flows.checkpoints import find_checkpoint

    report = _evaluate(find_checkpoint(home, checkpoint), arguments, suite, home)
    if out is not None:
        write_json(out, report)
    if as_json:
        print_json(report)
    else:
        print_report(report)


def gate(
    candidate: Annotated[str, typer.Argument(help="An evaluation (JSON file), or weights.")],
    incumbent: Annotated[str, typer.Argument(help="The same for what it must beat.")],
    arguments: Arguments = None,
    suite: Annotated[Suite, typer.Option(help="Tasks for what must be evaluated.")] = "gate",
    as_json: Json = False,
    home: Home = Path(),
) -> int:
    """Compare two evaluations task by task: promote, hold or reject, with reasons."""
    from distill.config import Config
    from evals.gate import decide
    from flows.configs import load_config

    reports = [_report(name, arguments, suite, home) for name in (candidate, incumbent)]
    rules = (load_config(arguments) if arguments else Config()).gate
    verdict = decide(reports[0], reports[1], rules)
    if as_json:
        print_json(verdict)
    else:
        print_verdict(verdict)
    return 0 if verdict.decision == "promote" else 3


def promote(
    checkpoint: Checkpoint,
    model: Annotated[str, typer.Option(help="Name in the registry; default: the run's.")] = "",
    yes: Yes = False,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Make weights the champion, and the skills that belong to them the active ones. Without a
    verdict that says so, --yes is needed."""
    from flows import registry
    from flows.checkpoints import find_checkpoint

    found = find_checkpoint(home, checkpoint)
    from distill.models import checkpoint_ref
    from flows.night import base_name

    config = found.config()
    own = config.for_stage(config.last_student())
    ref = checkpoint_ref(found.path, base=base_name(own))
    verdict_path = found.run.gate_path() if found.run else None
    verdict = _verdict_on(verdict_path, ref.digest)
    if (verdict is None or verdict.decision != "promote") and not yes:
        judged = f"the verdict on it is {verdict.decision!r}" if verdict else "no verdict is on it"
        raise ConfigError(f"{found.path}: {judged}; promote it all the same with --yes")
    name = model or config.model.name
    is_judged = verdict is not None and verdict.decision == "promote"
    with registry.model_lock(home, name):
        done = registry.promote(
            home,
            name,
            ref,
            run=found.run.name if found.run else None,
            verdict_path=verdict_path if is_judged else None,
            bank=_skills_of(found, home),
        )
        _follow(home, name, f"{name}: promoted {done.to_digest[:12]} by hand, {done.at}")
    if as_json:
        print_json(done)
    else:
        print(f"{name}: champion is now {done.to_digest[:12]}, before {_short(done.from_digest)}")


def rollback(
    model: Annotated[str, typer.Argument(help="Name in the registry.")],
    to: Annotated[str | None, typer.Option(help="Digest (or its start) to go back to.")] = None,
    yes: Yes = False,
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Make an earlier champion the current one again; by default the one before."""
    from flows import registry

    if not yes:
        raise ConfigError(f"rollback changes what model {model!r} stands for; confirm with --yes")
    if model not in registry.models(home):
        raise _no_champion(home, model)
    with registry.model_lock(home, model):
        if to is None and _is_half_done(home, model):
            say("the last rollback was interrupted before the skill bank moved; finishing it")
            done = registry.history(home, model)[-1].promotion()
        else:
            done = registry.rollback(home, model, to)
        _follow(home, model, _of_rollback(model, done.at))
    if as_json:
        print_json(done)
    else:
        print(f"{model}: champion is now {done.to_digest[:12]}, before {_short(done.from_digest)}")


@registry_app.command("list")
def registry_list(as_json: Json = False, home: Home = Path()) -> None:
    """List the models that have a champion."""
    from flows import registry

    champions = [registry.current(home, name) for name in registry.models(home)]
    if as_json:
        print_json(champions)
    elif champions:
        names = ("model", "kind", "base", "run", "at")
        rows = [
            {"digest": c.digest[:12], **{name: getattr(c, name) for name in names}}
            for c in champions
            if c
        ]
        print_table(rows, ["model", "digest", "kind", "base", "run", "at"])
    else:
        say(f"no champions in {home / 'registry'}; a night that is promoted makes one")


@registry_app.command("show")
def registry_show(
    model: Annotated[str, typer.Argument(help="Name in the registry.")],
    as_json: Json = False,
    home: Home = Path(),
) -> None:
    """Show the champion of a model and every change, oldest first."""
    from flows import registry

    champion = registry.current(home, model)
    if champion is None:
        raise _no_champion(home, model)
    entries = registry.history(home, model)
    if as_json:
        print_json({"current": champion, "history": entries})
        return
    print(f"{model}: {champion.digest}, {champion.kind} weights in {champion.path}")
    if champion.bank:
        print(f"skills in its prompts: {champion.bank}")
    rows = [
        {
            "at": entry.at,
            "action": entry.action,
            "from": _short(entry.from_digest),
            "to": entry.to_digest[:12],
            "run": entry.run,
        }
        for entry in entries
    ]
    print_table(rows, ["at", "action", "from", "to", "run"])


def _skills_of(found: Found, home: Path) -> str | None:
    """NAME@VERSION of the skills that belong to weights; None where none do."""
    from flows.banking import version_of
    from flows.single import around

    if found.bank is not None or found.run is None:
        return found.bank
    return version_of(around(found.config(), found.run, home), start=False)


def _follow(home: Path, model: str, reason: str) -> None:
    """Make the skills of a champion the active ones of their bank."""
    from flows import registry
    from flows.banking import follow

    champion = registry.current(home, model)
    if champion is not None and follow(home, champion.bank, reason=reason):
        say(f"the skill bank went with the weights: {champion.bank}")


def _of_rollback(model: str, at: str) -> str:
    return f"rollback of {model}, {at}"


def _is_half_done(home: Path, model: str) -> bool:
    """Whether the last change was a rollback that was killed before the bank followed."""
    from flows import registry
    from flows.banking import was_left

    *earlier, last = registry.history(home, model)
    if last.action != "rollback":
        return False
    left = next((e.bank for e in reversed(earlier) if e.to_digest == last.from_digest), None)
    return was_left(home, left, last.bank, reason=_of_rollback(model, last.at))


def _config(found: Found, arguments: list[str] | None) -> Config:
    from flows.configs import load_config

    return load_config(arguments) if arguments else found.config()


def _evaluate(found: Found, arguments: list[str] | None, suite: Suite, home: Path) -> EvalReport:
    from flows import single

    night = single.around(_config(found, arguments), found.run, home)
    return single.evaluate_checkpoint(night, found.path, suite, bank=found.bank)


def _report(name: str, arguments: list[str] | None, suite: Suite, home: Path) -> EvalReport:
    from distill.rundir import from_json, read_json
    from distill.types import EvalReport
    from flows.checkpoints import find_checkpoint

    path = Path(name)
    if path.is_file():
        return from_json(EvalReport, read_json(path), where=name)
    return _evaluate(find_checkpoint(home, name), arguments, suite, home)


def _verdict_on(path: Path | None, digest: str) -> Verdict | None:
    """The stored verdict of a run if it is about these weights."""
    from distill.rundir import from_json, read_json
    from distill.types import Verdict

    if path is None or not path.exists():
        return None
    verdict = from_json(Verdict, read_json(path), where=str(path))
    return verdict if verdict.candidate == digest else None


def _no_champion(home: Path, model: str) -> ConfigError:
    from flows import registry

    known = ", ".join(registry.models(home)) or "none"
    return ConfigError(f"no champion of {model!r} in {home / 'registry'}; models with one: {known}")


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"
