"""Sizes that keep a file readable in one sitting."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tree import name_of, sources, syntax

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[Path, Function]]:
    for path in sources():
        for node in ast.walk(syntax(path)):
            if isinstance(node, Function):
                yield path, node


def num_parameters(function: Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    stars = [star for star in (arguments.vararg, arguments.kwarg) if star is not None]
    return len([one for one in named if one.arg not in {"self", "cls"}]) + len(stars)


def num_lines(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_no_file_reaches_four_hundred_lines() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in sources()}
    assert {name: n for name, n in lines.items() if n >= MAX_FILE_LINES} == {}


def test_no_function_reaches_sixty_lines() -> None:
    long = [
        f"{name_of(path)}:{function.lineno} {function.name} has {num_lines(function)} lines"
        for path, function in functions()
        if num_lines(function) >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_function_takes_more_than_eight_parameters() -> None:
    wide = [
        f"{name_of(path)}:{function.lineno} {function.name} takes {num_parameters(function)}"
        for path, function in functions()
        if num_parameters(function) > MAX_PARAMETERS
    ]
    assert wide == []
