"""Small nights in processes that may be killed: copies of one that has loaded everything once.

    python tests/night_server.py

A line of JSON on stdin asks for a night: `home`, `changes`, and a `mine` that it steps on at the
`nth` time. Answered are the number of its process and, when that is over, its wait status.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from distill.rundir import RunDir
from flows.launch import open_run
from flows.nightly import run_nightly
from flows.progress import NoProgress
from skill_nights import tiny
from skills.versions import Store


def play(home: Path, changes: tuple[str, ...]) -> None:
    """Begin the night of a home, or continue it."""
    runs = RunDir.all(home)
    config, old = tiny(home, *changes), runs[0] if runs else None
    with open_run(config, subcommand="nightly", argv=["distill"], resume=old) as run:
        run_nightly(config, run=run, progress=NoProgress())


def lay(mine: str, nth: int) -> None:
    """Let this process die at the nth time that it comes to a place: `bank:POINT` inside of a
    change of a skill bank, or `MODULE:FUNCTION` just before a call."""
    module, _, name = mine.partition(":")
    seen = 0

    def step_on() -> None:
        nonlocal seen
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    if module != "bank":
        place = importlib.import_module(module)
        plain = getattr(place, name)

        def mined(*arguments: Any, **options: Any) -> Any:
            step_on()
            return plain(*arguments, **options)

        setattr(place, name, mined)
        return
    begin = Store.__init__

    def mined_store(self: Store, path: Path, **options: Any) -> None:
        begin(self, path, **options)
        self.barrier = lambda point: step_on() if point == name else None

    Store.__init__ = mined_store  # type: ignore[method-assign]


def load() -> None:
    """Import what a night imports late. Nothing is trained here: a process that went backward once
    cannot be copied."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

    for late in (AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM):
        assert late is not None
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def serve() -> None:
    load()
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if asked["mine"]:
                    lay(asked["mine"], asked["nth"])
                play(Path(asked["home"]), tuple(asked["changes"]))
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    serve()
