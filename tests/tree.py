"""The source tree as the architecture tests see it: which files there are, and their syntax."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("distill", "skills", "teachers", "evals", "flows")
HEAVY = ("torch", "vllm", "transformers", "peft", "prefect", "wandb", "faiss", "datasets")
LIGHT = (
    "distill/errors.py",
    "distill/types.py",
    "distill/protocols.py",
    "distill/config.py",
    "distill/rundir.py",
    "distill/tracking.py",
    "evals/gate.py",
    "evals/metrics.py",
    "evals/graders.py",
    "evals/report.py",
    "flows/cli*.py",
    "flows/registry.py",
    "flows/doctor.py",
    "flows/init.py",
)
"""Modules that load nothing heavy when they are imported."""


def name_of(path: Path) -> str:
    """The path inside the repository, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def sources(*folders: str) -> list[Path]:
    """Every Python file of the named folders; without names, of the five packages."""
    return [
        path for folder in folders or PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def light_sources() -> list[Path]:
    return [path for pattern in LIGHT for path in sorted(ROOT.glob(pattern))]


def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=name_of(path))


def module_of(path: Path) -> str:
    """`distill/engines/hf.py` is the module `distill.engines.hf`."""
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Top-level package and line of every absolute import, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno


def imports_when_loaded(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The imports that run when the module is imported: none in functions or for types only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
        yield from imports_when_loaded(node)


def project() -> dict[str, Any]:
    """The content of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def distribution_name(requirement: str) -> str:
    """`faiss-cpu>=1.12 ; ...` names the distribution `faiss-cpu`."""
    return re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0].lower().replace("_", "-")
