"""Nights with hindsight or with a bank in their prompts, killed at random moments and continued."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import Command
from distill.rundir import RunDir, read_json, read_jsonl
from night_server import play
from skill_nights import (
    PROMOTED,
    RULES,
    SKILLRL,
    home_with_base,
    order_skill,
    right_order,
    run_night,
    start_file,
)
from skills.bank import SkillBank
from skills.check import verify
from tree import ROOT

POLICY = (
    'stage.seed.analyst={name="policy", format="slot", max_tokens=4}',
    "skills.keep=true",
    "skills.min_sightings=1",
)
"""The student reads its own attempts, and what it wrote is measured and kept."""
LOGS = "runs/*/logs/attempt_*.log"
MORE = ("stage.seed.trainer.steps=4", "checkpoint.every_steps=2", *PROMOTED)


@dataclass(frozen=True)
class Ended:
    """What must not depend on when a night was killed."""

    weights: str
    version: str
    skills: tuple[tuple[str, str, str, str, int], ...]
    looks: list[object]
    learned: object
    verdict: str
    bank: str | None
    warnings: list[str]


def ended(home: Path) -> Ended:
    (run,) = RunDir.all(home)
    summary, stage = read_json(run.summary_path), run.stage_dir("seed")
    bank = SkillBank.open(home, "calls")
    assert verify(bank.store).problems == ()
    left = [p.name for p in bank.path.rglob("*") if ".partial-" in p.name or p.name == "tmp"]
    assert left == []
    learned = stage / "learned.json"
    return Ended(
        weights=summary["adapter_sha256"],
        version=bank.snapshot(),
        skills=tuple(
            (i.id, i.category, i.principle, i.status, i.credit.num_used) for i in bank.items()
        ),
        looks=read_jsonl(stage / "bank.jsonl"),
        learned=read_json(learned) if learned.exists() else None,
        verdict=summary["verdict"],
        bank=summary["bank_version"],
        warnings=summary["warnings"],
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose cache holds the base; do not write into it."""
    home = tmp_path_factory.mktemp("base")
    run_night(home, RULES, "stage.seed.trainer.steps=1", "skills.keep=false", 'skills.bank=""')
    return home


def night(name: str, folder: Path) -> tuple[str, ...]:
    if name == "hindsight":
        return (*POLICY, *MORE)
    skill = order_skill("A", right_order("A"), id="call_001", status="active")
    start = start_file(folder, skill)
    return (*SKILLRL, *MORE, f"skills.start={start}")


@pytest.fixture(scope="module", params=["hindsight", "bank"])
def unbroken(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, ...], Ended, float]:
    """Arguments of a night, how it ends when nobody disturbs it, and how long it takes."""
    folder = tmp_path_factory.mktemp(request.param)
    changes = night(request.param, folder)
    home = home_with_base(base, folder / "home")
    began = time.monotonic()
    run_night(home, *changes)
    found = ended(home)
    assert len(found.skills) > 1, "the bank has grown"
    return changes, found, time.monotonic() - began


def is_finished(home: Path) -> bool:
    runs = RunDir.all(home)
    return bool(runs) and runs[0].is_finished


class Nights:
    """Plays nights in processes of their own, and kills them."""

    def __init__(self, log: Path) -> None:
        self._log = log
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        with log.open("w", encoding="utf-8") as errors:
            self._server = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "night_server.py")],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def kill(
        self,
        home: Path,
        changes: tuple[str, ...],
        *,
        after: float | None = None,
        mine: str = "",
        nth: int = 1,
    ) -> bool:
        """Begin or continue the night of a home, which steps on a mine or is killed after so many
        seconds of its work. Whether it was killed before its end."""
        assert self._server.stdin is not None
        logs = len(list(home.glob(LOGS)))
        asked = {"home": str(home), "changes": changes, "mine": mine, "nth": nth}
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        process = self._answer()
        if after is not None:
            deadline = time.monotonic() + 60
            while len(list(home.glob(LOGS))) == logs and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(after)
            with contextlib.suppress(ProcessLookupError):  # it is over already
                os.kill(process, signal.SIGKILL)
        status = self._answer()
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, self._log.read_text()
        return os.WIFSIGNALED(status)

    def _answer(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def close(self) -> None:
        self._server.communicate(timeout=60)


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nights]:
    found = Nights(tmp_path_factory.mktemp("nights") / "errors.log")
    yield found
    found.close()


def test_a_night_killed_at_random_moments_ends_with_the_same_weights_and_skills(
    unbroken, base, tmp_path, nights
):
    changes, expected, duration = unbroken
    home, draw, hits = home_with_base(base, tmp_path / "home"), random.Random(7), 0
    for _ in range(3):
        hits += nights.kill(home, changes, after=draw.uniform(0.05, 0.7) * duration)
        if is_finished(home):
            break
    if not is_finished(home):
        play(home, changes)
    assert hits >= 1
    assert ended(home) == expected


MINES = (
    ("bank", "bank:before log", 1),  # a bank without the skills that it should begin with
    ("bank", "bank:after log", 1),  # they are logged, but not active
    ("bank", "bank:after log", 2),
    ("bank", "flows.evolving:append_jsonl", 2),  # the bank has grown, the look is not recorded
    ("bank", "flows.registry:append_jsonl", 2),
    ("hindsight", "bank:after log", 1),
    ("hindsight", "flows.keeping:write_json", 1),  # the bank has kept, nobody knows what
)


@pytest.mark.parametrize(
    ("unbroken", "mine", "nth"),
    MINES,
    indirect=["unbroken"],
    ids=[f"{name}, {mine} {nth}" for name, mine, nth in MINES],
)
def test_a_night_killed_at_the_worst_moment_ends_with_the_same_weights_and_skills(
    unbroken, mine, nth, base, tmp_path, nights
):
    changes, expected, _ = unbroken
    home = home_with_base(base, tmp_path / "home")
    assert nights.kill(home, changes, mine=mine, nth=nth)
    assert not is_finished(home)
    play(home, changes)
    assert ended(home) == expected


@pytest.mark.parametrize("unbroken", ["bank"], indirect=True)
def test_a_killed_night_is_continued_by_the_command_line(unbroken, base, tmp_path, nights):
    changes, expected, _ = unbroken
    home = home_with_base(base, tmp_path / "home")
    assert nights.kill(home, changes, mine="flows.evolving:append_jsonl", nth=3)
    done = Command(home)("nightly", "--resume", "--home", str(home))
    assert done.returncode in (0, 3), done.stderr
    assert ended(home) == expected
