"""The command line stays light: nothing heavy is loaded before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from tree import HEAVY, ROOT, light_sources, module_of


def loaded_after(*modules: str) -> set[str]:
    code = f"import json, sys, {', '.join(modules)}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_importing_the_command_line_loads_no_heavy_package() -> None:
    assert loaded_after("flows.cli") & set(HEAVY) == set()


def test_importing_the_light_modules_loads_no_heavy_package() -> None:
    modules = [module_of(path) for path in light_sources()]
    assert len(modules) > 8
    assert loaded_after(*modules) & set(HEAVY) == set()


def test_help_answers_within_half_a_second() -> None:
    command = [sys.executable, "-c", "from flows.cli import main; main()", "--help"]
    best, tries = float("inf"), 0
    while best >= 0.5 and tries < 8:  # another process may hold the cores for a moment
        tries += 1
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        best = min(best, time.perf_counter() - start)
    assert "nightly" in done.stdout
    assert best < 0.5, f"`distill --help` took {best:.2f} s at best"
