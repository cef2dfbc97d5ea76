"""The console script `distill`. Importing it, and `distill --help`, load nothing heavy.

Exit codes: 0 done, 3 held or rejected by the gate, 2 usage or configuration, 20 the machine is not
ready, 130 interrupted, 1 anything else. Results go to stdout, talk to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import distill
from distill.errors import DistillError
from flows import (
    cli_bench,
    cli_compare,
    cli_curriculum,
    cli_export,
    cli_forget,
    cli_logs,
    cli_models,
    cli_night,
    cli_runs,
    cli_setup,
    cli_skills,
    cli_teacher,
)
from flows.identity import foreign_packages
from flows.output import say

# Plain help: rich would double the time that `distill --help` takes.
app = typer.Typer(
    name="distill",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)
for _module in (
    *(cli_night, cli_compare, cli_models, cli_skills, cli_logs, cli_curriculum, cli_forget),
    *(cli_export, cli_runs, cli_bench, cli_setup, cli_teacher),
):
    _module.register(app)

# Typer does not export the base of its usage errors.
_UsageError: Any = next(t for t in typer.BadParameter.__mro__ if t.__name__ == "ClickException")


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    """Distil a teacher into a student overnight: train, evaluate, judge, promote."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Errors become one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if words == ["--version"]:
        print(f"distill-nightly {distill.__version__}")
        return 0
    # Bars of the libraries below would break our own lines; what takes time is announced by us.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    foreign = foreign_packages()
    if foreign and words[:1] != ["doctor"]:
        say(f"distill: error: {foreign}; install distill-nightly in an environment of its own")
        return 20
    try:
        code = app(words, prog_name="distill", standalone_mode=False)
        if sys.stdout is not None:  # None when the caller closed it
            sys.stdout.flush()
        if code == 130:
            say("distill: interrupted")
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        # The reader of our output went away, as `head` does; the interpreter must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as left:
        # Typer turns a broken pipe into this.
        if isinstance(left.__context__, BrokenPipeError):
            return 0
        raise
    except Exception as error:
        if debug:
            raise
        return _explain(error)


def _explain(error: Exception) -> int:
    if isinstance(error, DistillError):
        say(f"distill: error: {_one_line(str(error))}")
        return error.exit_code
    if isinstance(error, _UsageError):
        text = error.format_message()
        # Without a command, the message is the help itself.
        say(text if type(error).__name__ == "NoArgsIsHelpError" else f"distill: error: {text}")
        return 2
    say(
        f"distill: error: unexpected {type(error).__name__}: {_one_line(str(error))}; "
        "the same command with --debug shows where"
    )
    return 1


def _one_line(text: str) -> str:
    return " ".join(text.split())
