"""What the tree never contains: unsafe loading, shells, unfinished work, machine names."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tree import PACKAGES, ROOT, imports, name_of, sources, syntax

UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"torch.load", "eval", "exec", "os.system", "os.popen"}
UNSAFE_KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}

HOST = re.compile(r"https?://(?!127\.0\.0\.1|localhost|\[::1\]|www\.w3\.org\b)[\w.-]+", re.I)
ADDRESS = re.compile(
    # Loopback, every interface, and the three blocks that documents may use (RFC 5737).
    r"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b|192\.0\.2\.|198\.51\.100\.|203\.0\.113\.)"
    r"\d{1,3}(?:\.\d{1,3}){3}\b"
)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|home|work|opt|mnt|Users)/\w+")
UNFINISHED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")

TEXT = {".py", ".toml", ".md", ".txt", ".yaml", ".html", ".svg", ".json", ".jsonl"}
TEXT_NAMES = {"Makefile", "run", ".gitignore"}
FOLDERS = (*PACKAGES, "tests", "docs", ".ci")


def texts() -> Iterator[tuple[str, str]]:
    """Name and content of every text file that belongs to the product."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    for path in [*sorted(ROOT.iterdir()), *files]:
        if path.is_file() and (path.suffix in TEXT or path.name in TEXT_NAMES):
            yield name_of(path), path.read_text(encoding="utf-8")


def matches(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number} {found.group()}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), start=1)
        for found in pattern.finditer(line)
    ]


def unsafe(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that could run code out of a file or a string."""
    for package, line in imports(tree):
        if package in UNSAFE_MODULES:
            yield line, f"import {package}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in UNSAFE_CALLS:
            yield node.lineno, name
        for keyword in node.keywords:
            constant = isinstance(keyword.value, ast.Constant) and keyword.value.value
            if keyword.arg in UNSAFE_KEYWORDS and constant:
                yield node.lineno, f"{keyword.arg}=True"


def swallowed(tree: ast.AST) -> list[int]:
    """Lines of handlers that catch everything and do nothing with it."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"})
        and all(isinstance(step, ast.Pass | ast.Continue) for step in node.body)
    ]


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "torch.load('x')",
        "eval('1')",
        "run('x', shell=True)",
        "load('x', trust_remote_code=True)",
    ],
)
def test_unsafe_code_is_recognised(code: str) -> None:
    assert len(list(unsafe(ast.parse(code)))) == 1


def test_nothing_runs_code_out_of_a_file_or_a_string() -> None:
    found = [
        f"{name_of(path)}:{line} {what}"
        for path in sources(*PACKAGES, "tests")
        for line, what in unsafe(syntax(path))
    ]
    assert found == []


def test_no_error_is_swallowed() -> None:
    assert swallowed(ast.parse("try:\n    f()\nexcept Exception:\n    pass")) == [3]
    found = [f"{name_of(path)}:{n}" for path in sources() for n in swallowed(syntax(path))]
    assert found == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (HOST, "see https" + "://example.org/x"),
        (ADDRESS, "at 10.0" + ".0.7"),
        (MACHINE_PATH, "in /ho" + "me/someone/x"),
        (UNFINISHED, "TO" + "DO later"),
    ],
)
def test_the_patterns_find_what_they_look_for(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)


@pytest.mark.parametrize("pattern", [HOST, ADDRESS, MACHINE_PATH], ids=["host", "ip", "path"])
def test_the_tree_names_no_host_and_no_machine(pattern: re.Pattern[str]) -> None:
    assert matches(pattern) == []


def test_nothing_is_left_unfinished() -> None:
    assert matches(UNFINISHED) == []


def test_the_five_packages_lie_side_by_side() -> None:
    parents = {
        Path(str(importlib.import_module(package).__file__)).resolve().parent.parent
        for package in PACKAGES
    }
    assert parents == {ROOT}


def test_the_test_folders_hold_no_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_python_file_postpones_its_annotations() -> None:
    late = [
        name_of(path)
        for path in sources(*PACKAGES, "tests")
        if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.walk(syntax(path)))
        and "from __future__ import annotations" not in path.read_text()
    ]
    assert late == []
