"""Fixtures shared by all tests. Nothing here touches the network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


class Command:
    """Runs `distill` as its own process, with one home folder."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "flows", *arguments]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}

    def __call__(self, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*arguments),
            cwd=self.home,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A process to be killed; its output is kept in a file of the home folder."""
        with (self.home / "output.log").open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                self.argv(*arguments), cwd=self.home, env=self.env, stdout=log, stderr=log
            )


@pytest.fixture(scope="session")
def micro_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with one finished `micro` night; do not write into it."""
    home = tmp_path_factory.mktemp("micro")
    done = Command(home)("nightly", "micro")
    assert done.returncode in (0, 3), done.stderr
    return home


@pytest.fixture
def warm_home(micro_home: Path, tmp_path: Path) -> Path:
    """An empty home folder whose cache already holds the bootstrapped models."""
    shutil.copytree(micro_home / "cache", tmp_path / "cache")
    return tmp_path
