"""The parent's side of the TextWorld worker: starts it, asks it, and never leaves it behind."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from distill.errors import EngineError, MissingExtra

FEATURE = "data.name='textworld'"
PATIENCE = 2.0
"""Seconds that a worker gets to end by itself."""

_ROOT = Path(__file__).resolve().parents[2]


class _Child:
    """One running worker. `end` needs no reference to it, so that collecting it ends the worker."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="textworld-"))
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        with (self.folder / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "evals.envs.textworld_worker", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
                # The order of sets decides details of a game; one thread is all that it needs.
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "PYTHONHASHSEED": "0",
                    "OMP_NUM_THREADS": "1",
                },
                start_new_session=True,  # an interrupt in the terminal is for the parent to handle
            )
        self.end = weakref.finalize(self, _end, self.process, self.folder, os.getpid())
        self._pending = b""

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next answer; None when the worker is gone. TimeoutError after `seconds`."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                return None
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def last_words(self) -> str:
        """The last lines that the worker wrote to standard error."""
        path = self.folder / "stderr"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return " | ".join(text.strip().splitlines()[-3:])[-500:] or "nothing"


def _end(process: subprocess.Popen[bytes], folder: Path, owner: int) -> None:
    """End the worker by its own id: closing its input is enough unless it hangs."""
    if os.getpid() != owner:
        return  # a fork of the parent does not own the worker
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class GameProcess:
    """Asks the worker; started by the first question, and again when it died in between.

    `timeout` is the number of seconds that each answer may take. `generation` counts the starts:
    games opened in an earlier worker are gone.
    """

    def __init__(self, *, timeout: float) -> None:
        self._timeout = timeout
        self._child: _Child | None = None
        self._lock = threading.Lock()
        self._asked = 0
        self._slots = 0
        self._left: deque[tuple[int, int]] = deque()
        self.generation = 0

    @property
    def pid(self) -> int | None:
        """The process id of the running worker; None when there is none."""
        return self._child.process.pid if self._child else None

    def ask(self, op: str, *, generation: int | None = None, **fields: Any) -> Any:
        """The worker's answer. EngineError when it fails, hangs or has died."""
        with self._lock:
            if self._child is None:
                self._start()
            if generation not in (None, self.generation):
                raise EngineError(
                    "the TextWorld worker that held this game has ended and another has taken its "
                    "place; start a new episode"
                )
            slots = [slot for era, slot in self._drain() if era == self.generation]
            if slots:
                self._exchange({"op": "close", "slots": slots})
            return self._exchange({"op": op, **fields})

    def open(self, game: dict[str, Any], owner: object) -> tuple[int, int, Any]:
        """Start a game in a slot that is free again when `owner` is: generation, slot, view."""
        with self._lock:
            self._slots += 1
            slot = self._slots
        view = self.ask("reset", slot=slot, **game)
        # Collected at any moment, maybe inside `ask`: only noted here, sent with the next question.
        weakref.finalize(owner, self._left.append, (self.generation, slot)).atexit = False
        return self.generation, slot, view

    def close(self) -> None:
        """End the worker. The next question would start another."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _drain(self) -> list[tuple[int, int]]:
        return [self._left.popleft() for _ in range(len(self._left))]

    def _start(self) -> None:
        self._child = child = _Child()
        self.generation += 1
        ready = self._receive(child, "start")
        if "missing" in ready:
            self.close()
            raise MissingExtra.of(
                ready["missing"], extra="textworld", feature=FEATURE
            ) from ImportError(ready["error"])

    def _exchange(self, request: dict[str, Any]) -> Any:
        child = self._child
        assert child is not None
        self._asked += 1
        try:
            child.send({"id": self._asked, **request})
        except BrokenPipeError:
            raise self._died(child, request["op"]) from None
        answer = self._receive(child, request["op"])
        if answer["id"] != self._asked:
            self.close()
            raise EngineError(
                f"the TextWorld worker answered question {answer['id']} when {self._asked} was "
                "asked; it was ended, start a new episode"
            )
        if "error" in answer:
            raise EngineError(
                f"the TextWorld worker could not {request['op']} {_named(request)}: "
                f"{answer['error']}; if this game cannot be made, choose another data.seed or level"
            )
        return answer["ok"]

    def _receive(self, child: _Child, op: str) -> dict[str, Any]:
        try:
            answer = child.receive(self._timeout)
        except TimeoutError:
            child.process.kill()
            words = child.last_words()
            self.close()
            raise EngineError(
                f"the TextWorld worker gave no answer to {op!r} within {self._timeout:g} s and was "
                f"ended (its last words: {words}); raise data.timeout or choose a lower level"
            ) from None
        if answer is None:
            raise self._died(child, op)
        return answer

    def _died(self, child: _Child, op: str) -> EngineError:
        try:
            code = child.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.process.kill()
            code = child.process.wait()
        words = child.last_words()
        self.close()
        return EngineError(
            f"the TextWorld worker ended with exit code {code} during {op!r} (its last words: "
            f"{words}); games in progress are lost, the next episode starts a new worker"
        )


def _named(request: dict[str, Any]) -> str:
    named = [str(request[key]) for key in ("kind", "level", "seed", "command") if key in request]
    return ":".join(named) or "a game"
