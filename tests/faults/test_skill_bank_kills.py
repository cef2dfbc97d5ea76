"""A writer of a skill bank is killed at every moment, and two write at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distill.errors import ConfigError
from skills.bank import SkillBank
from skills.check import verify
from skills.items import SkillItem
from tree import ROOT

POINTS = (
    "before items",
    "items written",
    "half of the items named",
    "after items",
    "before version",
    "after version",
    "before log",
    "after log",
    "before pointer",
    "after pointer",
)
COMMITTED = ("after log", "before pointer", "after pointer")

WRITER = """
import os, signal, sys
from pathlib import Path
from skills.bank import SkillBank
from skills.items import SkillItem

home, point = Path(sys.argv[1]), sys.argv[2]

def die(name):
    if name == point:
        os.kill(os.getpid(), signal.SIGKILL)

bank = SkillBank.open(home, "main", barrier=die)
words = "open close heat cool carry wash look slice".split()
with bank.change(actor="writer") as change:
    change.add([SkillItem(id=f"n{i}", title=w.title(), principle=f"Always {w} {w}s." * 3)
                for i, w in enumerate(words)])
    change.retire("old", reason="test")
"""

ADDER = """
import sys
from pathlib import Path
from skills.bank import SkillBank
from skills.intake import AddOptions
from skills.items import SkillItem

home, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
bank = SkillBank.open(home, "main")
print("ready", flush=True)
for i in range(count):
    with bank.change(actor=name, wait=60) as change:
        change.add([SkillItem(id=f"{name}{i}", title=f"{name} {i}", principle=f"{name} {i}.")],
                   AddOptions(dedup=False))
"""


@pytest.fixture
def bank(tmp_path: Path) -> SkillBank:
    bank = SkillBank.create(tmp_path, "main")
    bank.add([SkillItem(id="old", title="Old", principle="Look first.")])
    return bank


def start(code: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def leftovers(bank: SkillBank) -> list[str]:
    found = [p for p in bank.path.rglob("*") if ".partial-" in p.name or p.name == "tmp"]
    return sorted(str(path.relative_to(bank.path)) for path in found)


@pytest.mark.parametrize("point", POINTS)
def test_a_writer_killed_anywhere_leaves_a_whole_bank_and_the_next_one_cleans_up(
    point: str, bank: SkillBank, tmp_path: Path
) -> None:
    old = bank.snapshot()
    writer = start(WRITER, tmp_path, point)
    assert writer.wait(60) == -signal.SIGKILL, writer.stderr and writer.stderr.read()
    for stream in (writer.stdout, writer.stderr):
        assert stream is not None
        stream.close()
    seen = bank.items()  # a reader right after the crash
    if point == "after pointer":
        assert len(seen) == 9
    else:
        assert bank.snapshot() == old
        assert [item.id for item in seen] == ["old"]
    bank.recover()
    assert len(bank.items()) == (9 if point in COMMITTED else 1)
    assert verify(bank.store).problems == ()
    assert leftovers(bank) == []
    writer = start(WRITER, tmp_path, "never")
    _, said = writer.communicate(timeout=60)
    assert writer.returncode == (1 if point in COMMITTED else 0), said
    assert len(bank.items()) == 9
    assert bank.get("old").status == "retired"
    assert verify(bank.store).problems == ()
    assert leftovers(bank) == []


def test_a_writer_killed_at_random_moments_never_breaks_the_bank(
    bank: SkillBank, tmp_path: Path
) -> None:
    for number in range(4):
        writer = start(ADDER, tmp_path, f"k{number}_", "500")
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.05 + 0.11 * number)
        writer.kill()
        writer.communicate()
        before = len(bank.items())
        bank.recover()
        assert len(bank.items()) in (before, before + 1)
        assert verify(bank.store).problems == ()
    assert len(bank.items()) > 1


def test_two_writers_at_once_lose_nothing(bank: SkillBank, tmp_path: Path) -> None:
    writers = [start(ADDER, tmp_path, name, "6") for name in ("a", "b")]
    for writer in writers:
        _, said = writer.communicate(timeout=120)
        assert writer.returncode == 0, said
    names = {item.id for item in bank.items()}
    assert names == {"old", *(f"{name}{i}" for name in "ab" for i in range(6))}
    assert [op.seq for op in bank.history()] == list(range(1, len(bank.history()) + 1))
    assert verify(bank.store).problems == ()


def test_a_second_writer_is_told_who_holds_the_bank(bank: SkillBank) -> None:
    with bank.change() as change:
        change.pin("old")
        other = SkillBank(bank.path)
        with pytest.raises(ConfigError, match=r"another writer of skill bank 'main' is running"):
            other.add([])
        assert other.get("old").pinned is False
    assert bank.get("old").pinned is True
