"""Who may import whom: the layers, and which file may use which third party."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tree import (
    HEAVY,
    PACKAGES,
    ROOT,
    distribution_name,
    imports,
    imports_when_loaded,
    light_sources,
    name_of,
    project,
    sources,
    syntax,
)

ALLOWED = {
    "vllm": ("distill/engines/vllm*.py",),
    "faiss": ("skills/index.py",),
    "prefect": ("flows/nightly.py", "flows/schedule.py"),
    "wandb": ("distill/tracking.py",),
    "datasets": ("evals/envs/*.py", "distill/curriculum/*.py"),
    "scipy": ("distill/curriculum/*.py",),
    "rensa": ("distill/overlap.py",),
    "reasoning_gym": ("evals/envs/gym*.py",),
    "typer": ("flows/*.py",),
}
"""Third parties with a fixed place; the rest may be imported where they are needed."""

DISTRIBUTIONS = {"faiss": "faiss-cpu", "reasoning_gym": "reasoning-gym"}
"""Import names that differ from the name of their distribution."""

BROUGHT = {
    "tokenizers": "transformers",
    "huggingface_hub": "transformers",
    "pydantic_core": "pydantic",
    "jinja2": "torch",
    "click": "typer",
}
"""Packages that a named dependency always brings and exposes in its own interface."""


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    return subprocess.run(
        [*command, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False
    )


def copy_of_the_tree(folder: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_the_layers_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("distill/errors.py", "import flows"),
        ("teachers/__init__.py", "import evals"),
        ("distill/errors.py", "import distill.types"),
    ],
)
def test_an_import_upwards_is_reported(file: str, line: str, tmp_path: Path) -> None:
    copy = copy_of_the_tree(tmp_path)
    with (copy / file).open("a", encoding="utf-8") as stream:
        stream.write(f"\n\ndef later() -> None:\n    {line}\n")
    done = lint_imports(copy)
    assert done.returncode != 0
    assert line.split()[-1] in done.stdout


def test_third_parties_stay_where_they_belong() -> None:
    strays = [
        f"{name_of(path)}:{line} imports {package}"
        for path in sources()
        for package, line in imports(syntax(path))
        if package in ALLOWED
        and not any(fnmatch(name_of(path), pattern) for pattern in ALLOWED[package])
    ]
    assert strays == []


def test_the_wandb_import_sits_inside_its_tracker_class() -> None:
    tree = syntax(ROOT / "distill/tracking.py")
    inside = {
        node
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in ast.walk(owner)
    }
    outside = [node for node in ast.walk(tree) if node not in inside]
    used = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(package == "wandb" for package, _ in imports(node))
    ]
    assert used
    assert not set(used) & set(outside)


def test_light_modules_import_nothing_heavy_when_loaded() -> None:
    heavy = [
        f"{name_of(path)}:{line} imports {package}"
        for path in light_sources()
        for package, line in imports_when_loaded(syntax(path))
        if package in HEAVY
    ]
    assert heavy == []


def test_everything_imported_is_declared() -> None:
    table = project()["project"]
    groups = [table["dependencies"], *table["optional-dependencies"].values()]
    declared = {distribution_name(line) for group in groups for line in group}
    known = sys.stdlib_module_names | set(PACKAGES)
    undeclared = {
        f"{name_of(path)}:{line} imports {package}"
        for path in sources()
        for package, line in imports(syntax(path))
        if package not in known
        and DISTRIBUTIONS.get(package, BROUGHT.get(package, package)).replace("_", "-")
        not in declared
    }
    assert undeclared == set()
