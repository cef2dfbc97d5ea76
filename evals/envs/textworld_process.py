"""The parent's side of the TextWorld worker: starts it, asks it, and never leaves it behind.

All environments of a program share one worker, as making a game takes up to seconds and what a
worker makes depends on the game alone.
"""

from __future__ import annotations

import json
import logging
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill.errors import EngineError, MissingExtra

logger = logging.getLogger(__name__)

FEATURE = "data.name='textworld'"
PATIENCE = 2.0
"""Seconds that a worker gets to end by itself."""

_ROOT = Path(__file__).resolve().parents[2]


class GameLost(RuntimeError):
    """One game cannot go on, as its worker died, hung or refused; other games still can."""


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
        self._made: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._asked = 0
        self._slots = 0
        self._left: deque[tuple[int, int]] = deque()
        self.generation = 0

    @property
    def pid(self) -> int | None:
        """The process id of the running worker; None when there is none."""
        return self._child.process.pid if self._child else None

    def make(self, game: Mapping[str, Any]) -> dict[str, Any]:
        """First view, goal, winning walk and route of a game, asked for once.

        EngineError when the worker cannot be started or cannot make the game.
        """
        key = tuple(game.values())
        if key not in self._made:
            try:
                self._made[key] = self.ask("make", **game)
            except GameLost as error:
                raise EngineError(str(error)) from error
        return self._made[key]

    def ask(self, op: str, *, generation: int | None = None, **fields: Any) -> Any:
        """The worker's answer. `generation` is that of a game which only its own worker knows.

        GameLost when it refuses, hangs or has died, EngineError when it cannot be started.
        """
        with self._lock:
            if generation is None:
                self._ensure()
            elif self._child is None or generation != self.generation:
                raise GameLost(
                    "the TextWorld worker that held this game has ended, and the game with it; "
                    "the next episode starts a new worker"
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
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def _drain(self) -> list[tuple[int, int]]:
        return [self._left.popleft() for _ in range(len(self._left))]

    def _ensure(self) -> None:
        """Start a worker unless one is running. EngineError when it does not come up."""
        if self._child is not None and self._child.process.poll() is not None:
            code, words = self._child.process.returncode, self._child.last_words()
            logger.warning(
                "the TextWorld worker ended with exit code %s while nobody asked it (its last "
                "words: %s); a new one is started, games in progress are lost",
                code,
                words,
            )
            self._end()
        if self._child is not None:
            return
        self._child = child = _Child()
        self.generation += 1
        try:
            ready = self._receive(child, "start")
        except GameLost as error:
            raise EngineError(str(error)) from error
        if "missing" in ready:
            self._end()
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
            self._end()
            raise GameLost(
                f"the TextWorld worker answered question {answer['id']} when {self._asked} was "
                "asked; it was ended, start a new episode"
            )
        if "error" in answer:
            raise GameLost(
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
            self._end()
            raise GameLost(
                f"the TextWorld worker gave no answer to {op!r} within {self._timeout:g} s and was "
                f"ended (its last words: {words}); raise data.timeout or choose a lower level"
            ) from None
        if answer is None:
            raise self._died(child, op)
        return answer

    def _died(self, child: _Child, op: str) -> GameLost:
        try:
            code = child.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.process.kill()
            code = child.process.wait()
        words = child.last_words()
        self._end()
        return GameLost(
            f"the TextWorld worker ended with exit code {code} during {op!r} (its last words: "
            f"{words}); games in progress are lost, the next episode starts a new worker"
        )


class Lease:
    """One environment's use of the worker that all environments of this program share.

    Nothing but `timeout` makes a difference to a worker, so equal ones are the same. It ends when
    the last lease is closed, else with the program: environments that are made one after the other
    find the games that the first one made.
    """

    def __init__(self, timeout: float) -> None:
        self._key = os.getpid(), timeout  # a fork must not talk over its parent's pipes
        with _SHARING:
            self.process = _SHARED.setdefault(self._key, GameProcess(timeout=timeout))
            _LEASES.setdefault(self.process, weakref.WeakSet()).add(self)

    def close(self) -> None:
        """End the worker unless another environment still uses it."""
        with _SHARING:
            leases = _LEASES.get(self.process)
            if leases is None:
                return
            leases.discard(self)
            if leases:
                return
            del _LEASES[self.process], _SHARED[self._key]
        self.process.close()


_SHARING = threading.Lock()
_SHARED: dict[tuple[int, float], GameProcess] = {}
_LEASES: dict[GameProcess, weakref.WeakSet[Lease]] = {}


def _named(request: dict[str, Any]) -> str:
    named = [str(request[key]) for key in ("kind", "level", "seed", "command") if key in request]
    return ":".join(named) or "a game"
